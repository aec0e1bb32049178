"""What `universal_checkpoint_info` says, against NumPy: parts cut by hand, and read as the patterns tell."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.geometry.reference import inside
from ucformat.engines.deepspeed.inference import Doubt, infer
from ucformat.engines.deepspeed.patterns import Patterns, TensorParallelInfo
from ucformat.errors import (
    IntegrityError,
    LayoutError,
    UcformatError,
    UnsupportedError,
    UpgradeNeeded,
)
from ucformat.geometry.box import Box
from ucformat.geometry.placement import Shard
from ucformat.geometry.tp_sharding import shard
from ucformat.sources.tp_merge import Replica

if TYPE_CHECKING:
    from ucformat.geometry.tp_sharding import TPSharding


def numbered(*shape: int) -> Any:
    return np.arange(math.prod(shape)).reshape(shape)


def read(
    info: dict[str, Any], name: str, parts: list[Any], padded: int | None = None
) -> tuple[TPSharding, Any, Any]:
    """The sharding, the tensor that it makes of the parts, and its padding."""
    found = TensorParallelInfo(info, "file", padded).sharding(name, tuple(p.shape for p in parts))
    assert found is not None
    whole, spare = np.full(found.shape, -1), np.full(found.padding_shape, -1)
    for into, regions in ((whole, found.regions), (spare, found.padding)):
        for rank, held in enumerate(regions):
            for region in held:
                inside(into, region.target)[...] = inside(parts[rank], region.box)
    assert (whole >= 0).all()
    assert (spare >= 0).all()
    return found, whole, spare


def cut(a: Any, dim: int, widths: list[list[int]]) -> list[Any]:
    """The parts of ranks of a concatenation of tensors, of which each is cut by itself."""
    starts = np.cumsum([0, *map(sum, widths)])
    return [
        np.concatenate(
            [
                np.take(a, range(s + sum(w[:t]), s + sum(w[: t + 1])), dim)
                for s, w in zip(starts, widths, strict=False)
            ],
            dim,
        )
        for t in range(len(widths[0]))
    ]


def sub(shape: Any, dim: int, pattern: str = "w") -> dict[str, Any]:
    return {
        "parameter_with_sub_params": [{"patterns": [pattern], "shape": shape, "partition_dim": dim}]
    }


class TestSubParameters:
    @pytest.mark.parametrize("ranks", [1, 2, 4])
    def test_fused_qkv_of_unequal_parts(self, ranks: int) -> None:
        a = numbered(16, 5)  # q of 8 rows, k and v of 4
        parts = cut(a, 0, [[n // ranks] * ranks for n in (8, 4, 4)])
        assert (read(sub(((8, 4, 4), 5), 0), "w", parts)[1] == a).all()

    def test_widths_of_version_4_may_be_uneven_and_even_none(self) -> None:
        widths = [[4, 2, 2], [2, 1, 0], [0, 2, 1]]
        a = numbered(14, 3)
        info = sub([(8, 3, 3), 3], 0, "^w$") | {
            "sub_param_shard_widths": {"^w$": widths},
            "universal_checkpoint_version": 0.4,
        }
        assert (read(info, "w", cut(a, 0, widths))[1] == a).all()

    def test_a_view_of_more_dims_fused_experts(self) -> None:
        experts, out, ins = 3, 4, 5
        a = numbered(experts * out, ins)
        view = a.reshape(experts, out, ins)
        parts = [view[:, t * 2 : t * 2 + 2].reshape(-1, ins) for t in range(2)]
        assert (read(sub((experts, out, ins), 1), "w", parts)[1] == a).all()

    def test_a_view_that_splits_the_last_dim(self) -> None:
        a = numbered(5, 12)
        view = a.reshape(5, 3, 4)
        parts = [view[:, :, t * 2 : t * 2 + 2].reshape(5, 6) for t in range(2)]
        assert (read(sub((5, 3, 4), 2), "w", parts)[1] == a).all()

    @pytest.mark.parametrize("version", [0.2, 0.3])
    def test_a_number_of_equal_parts_as_autotp_once_wrote(self, version: float) -> None:
        a = numbered(12, 4)
        parts = cut(a, 0, [[2, 2]] * 3)
        info = sub((3, -1), 0, "^w$") | {"universal_checkpoint_version": version}
        assert (read(info, "w", parts)[1] == a).all()

    def test_a_bias_has_a_view_of_one_dim(self) -> None:
        a = numbered(12)
        assert (
            read(sub(((6, 3, 3),), 0), "w", cut(a, 0, [[2] * 3, [1] * 3, [1] * 3]))[1] == a
        ).all()

    @pytest.mark.parametrize(
        ("shape", "dim"),
        [
            (((8, 4, 4), 6), 0),
            ((7, 5), 0),
            (((8, 4, 4), 5), 2),
            (((-8, 4), 5), 0),
            ((10**9, 1, 5), 1),
            ("no", 0),
            ((-1, -1), 0),
        ],
    )
    def test_what_does_not_fit_is_an_error(self, shape: Any, dim: int) -> None:
        with pytest.raises(UcformatError):
            read(sub(shape, dim), "w", [numbered(8, 5)] * 2)

    @pytest.mark.parametrize("n", [-2, 1 << 50, True, 2.0, "2", None])
    def test_what_is_no_size(self, n: Any) -> None:
        for shape in ((n, 5), ((n, 2), 5), ((2, -1), 5)):
            with pytest.raises(LayoutError, match="no usable shape"):
                read(sub(shape, 0), "w", [numbered(4, 5)] * 2)
        with pytest.raises(LayoutError, match="a size is not a number"):
            read(affine([n, 5], {}), "w", [numbered(4, 5)] * 2)

    @pytest.mark.parametrize("n", [-1, 0, (1 << 50) - 1])
    def test_what_is_a_size_that_does_not_fit(self, n: int) -> None:
        for shape in ((n, 5), ((abs(n), 2), 5)):
            with pytest.raises(LayoutError) as error:
                read(sub(shape, 0), "w", [numbered(4, 5)] * 2)
            assert "no usable shape" not in str(error.value)
        with pytest.raises(LayoutError, match="its affine map is for 0 ranks"):
            read(affine([n, 5], {}), "w", [numbered(4, 5)] * 2)

    def test_uneven_parts_without_widths_are_an_error(self) -> None:
        with pytest.raises(LayoutError, match="no widths are recorded"):
            read(sub(((3, 5), 2), 0), "w", [numbered(4, 2)] * 2)


class TestLists:
    def test_what_no_pattern_matches_is_joined_along_dim_0(self) -> None:
        a = numbered(6, 4)
        info = {"parameter_with_row_parallelism_patterns": [r"\d+.down"]}
        assert (read(info, "3.up", np.split(a, 2))[1] == a).all()
        assert (read(info, "3.down", np.split(a, 2, 1))[1] == a).all()
        assert (
            read(info, "13.down.more", np.split(a, 2, 1))[1] == a
        ).all()  # re.match matches the beginning

    def test_two_sub_parameters(self) -> None:
        a = numbered(12, 2)
        info = {"parameter_with_2_sub_params_cat_dim_0": ["w"]}
        assert (read(info, "w", cut(a, 0, [[3, 3], [3, 3]]))[1] == a).all()

    def test_averaged(self) -> None:
        found, _, _ = read({"parameter_to_average_patterns": ["w"]}, "w", [numbered(3)] * 2)
        assert found.mean

    def test_replicas_of_unequal_shape_are_an_error(self) -> None:
        with pytest.raises(LayoutError, match="cannot be replicas"):
            read({"tp_replicated_parameter_patterns": ["w"]}, "w", [numbered(3), numbered(4)])

    @pytest.mark.parametrize("ranks", [1, 2, 4])
    def test_the_padding_of_a_vocabulary_is_kept_apart(self, ranks: int) -> None:
        a = numbered(16, 3)
        info = {
            "vocabulary_parameter_patterns": ["embed"],
            "original_vocab_size": 9,
            "tp_replicated_parameter_patterns": ["x"],
        }
        _, whole, spare = read(info, "embed", np.split(a, ranks))
        assert (whole == a[:9]).all()
        assert (spare == a[9:]).all()

    def test_a_smaller_table_has_no_padding(self) -> None:
        info = {
            "vocabulary_parameter_patterns": ["."],
            "original_vocab_size": 9,
            "tp_replicated_parameter_patterns": ["x"],
        }
        assert read(info, "types", np.split(numbered(4, 3), 2), 16)[1].shape == (4, 3)
        with pytest.raises(LayoutError, match="padded vocabulary 16"):
            read(info, "more", np.split(numbered(20, 3), 2), 16)

    def test_autotp_pads_none_whatever_the_first_tables_size(self) -> None:
        info = {"vocabulary_parameter_patterns": ["^embed$"], "original_vocab_size": 9}
        info |= {"tp_replicated_parameter_patterns": ["^x$"]}
        assert read(info, "embed", np.split(numbered(20, 3), 2))[1].shape == (20, 3)

    def test_what_autotp_cannot_describe_is_an_error(self) -> None:
        info = {
            "autotp_unsupported_parameter_patterns": {"^w$": "shuffled"},
            "tp_replicated_parameter_patterns": ["^x$"],
        }
        with pytest.raises(LayoutError, match="shuffled"):
            read(info, "w", [numbered(4, 3)] * 2)

    @pytest.mark.parametrize(
        "value",
        [
            {"tp_replicated_parameter_patterns": 3},
            {"tp_replicated_parameter_patterns": [3]},
            {"tp_replicated_parameter_patterns": ["("]},
            {"parameter_with_sub_params": [3]},
            {"affine_map": {"params": 3}},
            {"affine_map": 3},
        ],
    )
    def test_nonsense_is_an_error(self, value: dict[str, Any]) -> None:
        with pytest.raises(IntegrityError):
            TensorParallelInfo(value, "file", None)

    def test_nothing_said_is_nothing(self) -> None:
        assert (
            TensorParallelInfo({"universal_checkpoint_version": 0.4}, "file", None).sharding(
                "w", ((2,), (2,))
            )
            is None
        )


def piece(
    shape: list[int], source: Any, dest: Any, ranks: list[int], **more: Any
) -> dict[str, Any]:
    return {"shape": shape, "source": source, "dest": dest, "locations": ranks, **more}


def affine(shape: list[int], ranks: dict[Any, Any], version: int = 1) -> dict[str, Any]:
    return {
        "affine_map": {
            "version": version,
            "params": {"^w$": {"logical_shape": shape, "ranks": ranks}},
        }
    }


class TestAffineMaps:
    def test_a_segment_that_all_ranks_hold(self) -> None:
        """As AutoTP cuts GPTBigCode: the queries are cut, keys and values are everywhere."""
        a = numbered(6, 2)
        held = {
            t: {
                "shard_shape": [4, 2],
                "pieces": [
                    piece([2, 2], [t * 4, [2, 1]], [0, [2, 1]], [t]),
                    piece([2, 2], [8, [2, 1]], [4, [2, 1]], [0, 1]),
                ],
            }
            for t in range(2)
        }
        parts = [np.concatenate([a[t * 2 : t * 2 + 2], a[4:]]) for t in range(2)]
        found, whole, _ = read(affine([6, 2], held), "w", parts)
        assert (whole == a).all()
        assert found.regions[0][1].target == found.regions[1][1].target

    def test_columns_and_every_other_row(self) -> None:
        a = numbered(4, 6)
        held = {
            str(t): {
                "shard_shape": [2, 6],
                "pieces": [piece([2, 6], [t * 6, [12, 1]], [0, [6, 1]], [t])],
            }
            for t in range(2)
        }
        assert (read(affine([4, 6], held), "w", [a[0::2], a[1::2]])[1] == a).all()

    def test_a_scale_is_noted(self) -> None:
        held = {
            t: {"shard_shape": [3], "pieces": [piece([3], [0, [1]], [0, [1]], [0, 1], scale=0.5)]}
            for t in range(2)
        }
        assert read(affine([3], held), "w", [numbered(3)] * 2)[0].scaled

    @pytest.mark.parametrize(
        "change",
        [
            {"shape": [2, 3]},
            {"source": [1, [1]]},
            {"source": [-1, [1]]},
            {"source": [0, [1, 1]]},
            {"source": [0]},
            {"source": None},
            {"dest": [1, [1]]},
            {"shape": [2]},
            {"shape": [2**40]},
            {"shape": ["a"]},
        ],
    )
    def test_nonsense_is_an_error(self, change: dict[str, Any]) -> None:
        one = {**piece([3], [0, [1]], [0, [1]], [0, 1]), **change}
        held = {t: {"shard_shape": [3], "pieces": [one]} for t in range(2)}
        with pytest.raises(LayoutError):
            read(affine([3], held), "w", [numbered(3)] * 2)

    def test_a_newer_version_is_refused(self) -> None:
        with pytest.raises(UpgradeNeeded, match="version 2"):
            TensorParallelInfo(affine([3], {}, 2), "file", None)


class TestHostilePatterns:
    @pytest.mark.parametrize(
        "pattern",
        ["(a+)+$", "(a|a)*$", "(.*)*x", "((a?)){40}a", "a?" * 30 + "a" * 30, "a" * 2000, r"(a)\1", "(?P<x>a)(?P=x)",
         "[a-z]*" * 9 + "1", "(a{1,9}){1,9}", "(?:a+|b)+c", ".*.*.*.*="],
    )  # fmt: skip
    def test_what_may_take_for_ever_is_refused(self, pattern: str) -> None:
        with pytest.raises(UnsupportedError, match=r"may take too long: |at most 1000"):
            Patterns([(pattern, 1)], "a file")

    @pytest.mark.parametrize(
        "pattern",
        [
            r"\d+.weight",
            r"^a.b+$",
            r".*\.(q|k)_proj",
            "[(+*]x*",
            r"\(a+\)+",
            "(?:a|b)c?",
            ".*.*.*=",
        ],
    )
    def test_what_people_write_is_not(self, pattern: str) -> None:
        Patterns([(pattern, 1)], "a file")

    def test_what_is_let_through_is_quick(self) -> None:
        begin = time.process_time()
        assert Patterns([(".*.*.*=", 1)], "a file").find("a" * 300) is None
        with pytest.raises(UnsupportedError, match="too long"):
            Patterns([(".*.*.*=", 1)], "a file").find("a" * 5000)
        assert time.process_time() - begin < 5

    def test_ten_thousand_exact_names_are_looked_up(self) -> None:
        found = Patterns([(rf"^a\.{i}$", i) for i in range(10_000)], "a file")
        begin = time.process_time()
        assert all(found.find(f"a.{i}") == (rf"^a\.{i}$", i) for i in range(10_000))
        assert time.process_time() - begin < 2


class TestInference:
    def one(self, name: str, shapes: Any, verdict: Any = "different", **siblings: Any) -> Any:
        return infer(name, shapes, lambda: verdict, siblings, 8)

    def test_equal_bytes_are_replicas_unless_constant(self) -> None:
        assert self.one("norm.weight", ((8,), (8,)), "equal").shape == (8,)
        assert isinstance(self.one("norm.weight", ((8,), (8,)), "constant"), Doubt)

    def test_uneven_widths_tell_the_dim_unless_fused(self) -> None:
        assert self.one("a.weight", ((8, 3), (8, 2))).shape == (8, 5)
        assert isinstance(self.one("a.qkv.weight", ((3, 8), (2, 8))), Doubt)

    def test_a_bias_goes_with_its_weight(self) -> None:
        weight = {"a.weight": ((4, 8), (4, 8))}
        assert self.one("a.bias", ((4,), (4,)), **weight).shape == (8,)
        assert isinstance(self.one("a.bias", ((4,), (4,))), Doubt)

    def test_an_embedding_goes_by_the_models_width(self) -> None:
        assert self.one("embed.weight", ((5, 8), (5, 8))).shape == (10, 8)
        assert self.one("embed.weight", ((5, 4), (5, 4))).shape == (5, 8)

    def test_a_square_matrix_is_a_doubt(self) -> None:
        assert self.one("a.weight", ((4, 4), (4, 4))) == Doubt(
            "a.weight", ((4, 4), (4, 4)), "{shard: 0, over: tp}", "{shard: 1, over: tp}"
        )

    def test_shapes_that_fit_no_cut(self) -> None:
        with pytest.raises(LayoutError, match="fit no sharding"):
            self.one("a.weight", ((4, 4), (5, 5)))


def test_parts_of_several_ranks_or_none_at_all_are_not_joined() -> None:
    tries: list[tuple[tuple[tuple[int, ...], ...], int]] = [
        (((2, 3), (2,)), 0),
        (((2,), (2,)), 1),
        (((2,), (2,)), -2),
    ]
    for shapes, dim in tries:
        with pytest.raises(LayoutError, match="cannot be joined along dim"):
            shard(shapes, Shard(dim, "tp"))


@pytest.mark.parametrize("shape", [(1, 4096), (2, 4096), (4096, 1)])
def test_of_large_copies_the_head_the_second_row_and_the_rest_are_compared(
    shape: tuple[int, ...],
) -> None:
    copy = Replica(lambda _: iter(()), Box.whole(shape), itemsize=4)
    size, row = math.prod(shape), shape[1]
    second = [(row, min(size, row + 128))] if shape == (2, 4096) else []
    assert list(copy.ranges(short=False)) == [(0, 128), *second, (0, size)]
    assert list(copy.ranges(short=True)) == [(0, 128), *second, (0, min(size, 1 << 14))]
