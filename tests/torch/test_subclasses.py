"""Tensors that are not plain memory: taken apart and put back as they were, or refused by name with nothing written."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.masked import masked_tensor
from torch.testing._internal.two_tensor import TwoTensor

import ucformat
from tests.torch.ranks import Ranks
from tests.torch.wrappers import Fresh, Settings, Silent, Wrapper, numbers
from ucformat.errors import StateMismatch, UsageError
from ucformat.torch import (
    Manager,
    PerRank,
    Reader,
    Writer,
    async_save,
    load,
    load_into,
    save,
    state_dict,
)

if TYPE_CHECKING:
    from collections.abc import Callable


NEEDS_TORCHAO = pytest.mark.skipif(
    find_spec("torchao") is None, reason="needs torchao: pip install torchao"
)


class Scheme(enum.Enum):
    SYMMETRIC = 1


class Choice(NamedTuple):
    bits: int
    scheme: Scheme


def faked() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(4, 4)


def freed() -> torch.Tensor:
    tensor = torch.ones(4, 4)
    tensor.untyped_storage().resize_(0)
    return tensor


def functional() -> torch.Tensor:
    return torch._to_functional_tensor(torch.ones(4, 4))


def logged() -> torch.Tensor:
    """A subclass with memory that decides itself what an operation does."""
    return torch.Tensor._make_subclass(Silent, torch.ones(4, 4))


class Annotated(torch.nn.Parameter):
    """A parameter, as of a program that writes on it."""


def annotated(**attributes: Any) -> torch.Tensor:
    made = Annotated(torch.ones(4, 4))
    made.__dict__.update(attributes)
    return made


def wrapper(**context: Any) -> Wrapper:
    return Wrapper({"a": torch.ones(4, 4), "b": torch.zeros(4, 4)}, context)


def holding_itself() -> torch.Tensor:
    made = wrapper()
    made.inner["c"] = made.__dict__["c"] = made
    return made


def looping() -> torch.Tensor:
    loop: list[Any] = []
    loop.append(loop)
    return wrapper(loop=loop)


def overlapping() -> torch.Tensor:
    memory = torch.zeros(20)
    return Wrapper({"a": memory[:16].view(4, 4), "b": memory[4:].view(4, 4)})


def holding(tensor: torch.Tensor) -> torch.nn.Module:
    module = torch.nn.Module()
    module.register_buffer("w", tensor)
    return module


STRANGERS: dict[str, tuple[Callable[[], Any], str]] = {
    "meta": (lambda: torch.ones(4, 4, device="meta"), "meta tensor"),
    "sparse": (lambda: torch.eye(4).to_sparse(), "sparse"),
    "csr": (lambda: torch.eye(4).to_sparse_csr(), "sparse"),
    "mkldnn": (lambda: torch.eye(4).to_mkldnn(), "mkldnn"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "Nested"),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "NestedTensor",
    ),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.ones(4, 4), 0.1, 0, torch.qint8),
        "quantized",
    ),
    "zeros": (lambda: torch._efficientzerotensor((4, 4)), "ZeroTensor"),
    "functional": (functional, "Functionalize"),
    "fake": (faked, "FakeTensor"),
    "masked": (lambda: masked_tensor(torch.ones(4, 4), torch.ones(4, 4) > 0), "MaskedTensor"),
    "freed": (freed, "freed"),
    "uninitialized": (torch.nn.UninitializedParameter, "UninitializedParameter"),
    "silent": (lambda: Silent(torch.ones(4, 4)), "Silent"),
    "silent parameter": (lambda: torch.nn.Parameter(Silent(torch.ones(4, 4))), "Silent"),
    "dispatching": (logged, "Silent"),
    "with a tensor": (
        lambda: annotated(scale=torch.ones(1)),
        r"Annotated with tensors as attributes \(scale\)",
    ),
    "with tensors of its own": (
        lambda: annotated(state=SimpleNamespace(absmax=torch.ones(1))),
        r"\(state\)",
    ),
    "fake inside": (lambda: Wrapper({"a": faked()}), r"\.a is a .*FakeTensor"),
    "silent inside a wrapper": (
        lambda: Wrapper({"w": Wrapper({"a": Silent(torch.ones(4, 4))})}),
        r"\.w\.a is .*Silent",
    ),
    "itself": (holding_itself, "contains itself"),
    "overlapping": (overlapping, "share a part"),
    "context": (lambda: wrapper(what=object()), "context .* not plain"),
    "local function": (lambda: wrapper(what=lambda: 1), "context .* not plain"),
    "tensor in the context": (lambda: wrapper(scale=torch.ones(1)), "context .* not plain"),
    "context of itself": (looping, "context .* not plain"),
    "no tensor": (lambda: Wrapper({"a": torch.ones(2), "b": 1}), "not a tensor"),
    "the key of the record": (
        lambda: Wrapper({"__subclass__": torch.ones(2)}),
        "names its inner tensors",
    ),
}


@pytest.mark.parametrize("kind", STRANGERS)
@pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::DeprecationWarning"
)  # torch's own, of young and old layouts
def test_what_is_not_understood_is_refused_by_name_before_anything_is_written(
    kind: str, tmp_path: Path
) -> None:
    make, words = STRANGERS[kind]
    place = tmp_path / "ck"
    ways: list[Callable[[Any], object]] = [
        lambda t: save({"w": t}, place),
        lambda t: save({"deep": {"er": [t]}}, place, form="packed"),
        lambda t: async_save({"w": t}, place),
        lambda t: save({"m": holding(t)}, place),
        lambda t: save({"w": PerRank(t)}, place),
    ]
    value = "a per-rank value is a .*Wrapper" if type(make()) is Wrapper else words
    for way in ways:
        with pytest.raises(UsageError, match=words if way is not ways[-1] else value):
            way(make())
        assert not place.exists()
    if kind not in (
        "meta",
        "uninitialized",
        "jagged",
        "nested",
        "mkldnn",
        "no tensor",
        "itself",
    ):  # in which DCP itself fails first
        with pytest.raises((UsageError, dcp.api.CheckpointException), match=words):
            dcp.save({"w": make()}, storage_writer=Writer(place), no_dist=True)
        assert not (place / "manifest.json").exists()
    with Manager(tmp_path / "run", signals=()) as manager, pytest.raises(UsageError, match=words):
        manager.save(1, {"w": make()}, force=True)
    save({"w": torch.ones(4, 4)}, place)
    for filled, expected in (({"w": make()}, words), ({"w": PerRank(make())}, value)):
        with pytest.raises(UsageError, match=expected):
            load(filled, place, strict=False)


def inner_of(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        inner = getattr(tensor, name)
        more = inner_of(inner) if hasattr(inner, "__tensor_flatten__") else {"": inner}
        out |= {f"{name}.{n}".rstrip("."): t for n, t in more.items()}
    return out


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    mine, other = inner_of(a), inner_of(b)
    return mine.keys() == other.keys() and all(torch.equal(mine[n], other[n]) for n in mine)


def some(seed: int, context: Any = None) -> Wrapper:
    torch.manual_seed(seed)
    shared = torch.randn(3)
    inside = Wrapper({"x": torch.randn(2, 2), "y": torch.randint(9, (2,))}, [1.5])
    return Wrapper(
        {"a": torch.randn(4, 4).t(), "b": inside, "c": shared, "d": shared}, context, (4, 4)
    )


PLAIN = [
    None, 1, True, 1.5, float("nan"), "x", b"x", 2j, torch.float16, torch.strided, torch.device("cpu"), [1, (2, [3])],
    {"a": 1, 2: None}, {1, 2}, Settings(8), Choice(4, Scheme.SYMMETRIC), torch.Size([4, 4]), torch.nn.Linear,
    torch.nn.functional.softmax,
]  # fmt: skip


@pytest.mark.parametrize("form", ["zarr", "packed"])
@pytest.mark.parametrize("number", range(len(PLAIN)))
def test_a_wrapper_is_put_back_in_place(form: Any, number: int, tmp_path: Path) -> None:
    context = PLAIN[number]
    one, two = some(1, context), some(2, context)
    memory = {n: t.data_ptr() for n, t in inner_of(two).items()}
    save({"w": one, "deep": [one.b, {"x": 1}]}, tmp_path / "ck", form=form)
    assert load({"w": two, "deep": [two.b, {"x": 0}]}, tmp_path / "ck")
    assert same(one, two)
    assert {n: t.data_ptr() for n, t in inner_of(two).items()} == memory
    assert sorted(state_dict(tmp_path / "ck", "w")) == ["w.a", "w.b.x", "w.b.y", "w.c"]
    for other in PLAIN:
        if other is not context and repr(other) != repr(context):
            with pytest.raises(
                StateMismatch,
                match=r"w is a wrapper with context .*, in the checkpoint with context",
            ):
                load({"w": some(3, other)}, tmp_path / "ck")


def test_true_is_not_one(tmp_path: Path) -> None:
    save({"w": some(1, [True])}, tmp_path / "ck")
    with pytest.raises(StateMismatch, match="context"):
        load({"w": some(2, [1])}, tmp_path / "ck")


class TestAWrapperThatIsAnotherOne:
    """Nothing of it is filled, whatever is asked for."""

    def check(self, saved: Any, other: Any, words: str, folder: Path) -> None:
        save({"w": saved, "n": torch.ones(2)}, folder)
        before = (
            {n: t.clone() for n, t in inner_of(other).items()}
            if hasattr(other, "__tensor_flatten__")
            else {}
        )
        with pytest.raises(StateMismatch, match=words):
            load({"w": other}, folder)
        n = torch.zeros(2)
        for cast in (False, True):
            report = load({"w": other, "n": n}, folder, strict=False, cast=cast)
            assert not report
            assert torch.equal(n, torch.ones(2))
        assert all(
            torch.equal(t, before[n]) for n, t in (inner_of(other) if before else {}).items()
        )

    def test_of_another_class(self, tmp_path: Path) -> None:
        self.check(
            TwoTensor(torch.ones(4), torch.ones(4)),
            Wrapper({"a": torch.zeros(4), "b": torch.zeros(4)}),
            "class",
            tmp_path,
        )

    def test_with_other_inner_tensors(self, tmp_path: Path) -> None:
        self.check(some(1), Wrapper({"a": torch.zeros(4, 4)}), "tensors", tmp_path)

    def test_with_other_dtypes_inside(self, tmp_path: Path) -> None:
        one = Wrapper({"a": torch.ones(4), "b": torch.ones(4)})
        self.check(
            one,
            Wrapper({"a": torch.zeros(4), "b": torch.zeros(4, dtype=torch.int32)}),
            "different dtype",
            tmp_path,
        )

    def test_with_other_shapes_inside(self, tmp_path: Path) -> None:
        one = Wrapper({"a": torch.ones(4), "b": torch.ones(4)})
        self.check(
            one, Wrapper({"a": torch.zeros(4), "b": torch.zeros(2)}), "different shape", tmp_path
        )

    def test_sharing_memory_otherwise(self, tmp_path: Path) -> None:
        one, both = Wrapper({"a": torch.ones(4), "b": torch.zeros(4)}), torch.zeros(4)
        self.check(one, Wrapper({"a": both, "b": both}), "same", tmp_path)

    def test_plain_in_the_program(self, tmp_path: Path) -> None:
        self.check(some(1), torch.zeros(4, 4), "missing: w", tmp_path)

    def test_plain_in_the_checkpoint(self, tmp_path: Path) -> None:
        self.check(torch.ones(4, 4), some(1), "in the checkpoint it is not", tmp_path)

    def test_in_parts_in_the_checkpoint(self, tmp_path: Path) -> None:
        self.check(
            {"a": torch.ones(4)},
            Wrapper({"a": torch.zeros(4)}),
            "in the checkpoint it is not",
            tmp_path,
        )


def test_a_wrapper_that_gives_copies_can_be_saved_and_is_not_filled(tmp_path: Path) -> None:
    elements = numbers(4, 4)
    save({"w": Fresh({"elements": elements})}, tmp_path / "ck")
    assert torch.equal(state_dict(tmp_path / "ck")["w.made"], elements)
    with pytest.raises(UsageError, match=r"w is a .*Fresh, whose made is a new copy each time"):
        load({"w": Fresh({"elements": torch.zeros(4, 4)})}, tmp_path / "ck")


def test_lazy_views_of_dtensors_and_values_are_their_values(tmp_path: Path) -> None:
    lazy = torch.tensor([1 + 2j, 3 - 4j]).conj()
    save(
        {"w": Wrapper({"a": lazy}, None, (2,)), "v": [{1: {2.5: 1}}, 1], "r": PerRank(lazy)},
        tmp_path / "ck",
    )
    ck = ucformat.open(tmp_path / "ck")
    assert ck["w.a"][...].tolist() == [1 - 2j, 3 + 4j]
    found = torch.zeros(2, dtype=torch.complex64)
    load({"r": PerRank(found)}, tmp_path / "ck")
    assert found.tolist() == [1 - 2j, 3 + 4j]
    with pytest.raises(UsageError, match=r"w\.a \(weight\) is a lazy conjugate"):
        load(
            {"w": Wrapper({"a": torch.zeros(2, dtype=torch.complex64).conj()}, None, (2,))},
            tmp_path / "ck",
        )


def module(seed: int) -> torch.nn.Module:
    made = torch.nn.Linear(4, 4)
    made.weight = torch.nn.Parameter(some(seed))
    torch.nn.init.constant_(made.bias, seed)
    return torch.nn.ModuleDict({"layer": made})


def test_the_weights_of_a_module(tmp_path: Path) -> None:
    one = module(1)
    save({"model": one}, tmp_path / "ck")
    for fill in (
        lambda m: load({"model": m}, tmp_path / "ck"),
        lambda m: load_into(m, tmp_path / "ck") == ([], []),
    ):
        two = module(2)
        assert fill(two)
        assert same(one["layer"].weight, two["layer"].weight)
        assert torch.equal(one["layer"].bias, two["layer"].bias)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_distributed_checkpoint(tmp_path: Path) -> None:
    def state(seed: int) -> dict[str, Any]:
        twice = TwoTensor(torch.full((4,), float(seed)), torch.arange(4.0) + seed)
        return {
            "model": {"w": some(seed)},
            "optim": {"state": {"w": {"exp_avg": twice}}},
            "plain": torch.ones(2) * seed,
        }

    dcp.save(state(1), storage_writer=Writer(tmp_path / "ck"), no_dist=True)
    for place in ("ck", "again"):
        found = state(2)
        dcp.load(found, storage_reader=Reader(tmp_path / place), no_dist=True)
        assert same(found["model"]["w"], state(1)["model"]["w"])
        assert same(
            found["optim"]["state"]["w"]["exp_avg"], state(1)["optim"]["state"]["w"]["exp_avg"]
        )
        assert torch.equal(found["plain"], torch.ones(2))
        again = state(3)
        assert load(again, tmp_path / place)
        assert same(again["model"]["w"], state(1)["model"]["w"])
        save(state(1), tmp_path / "again", overwrite=True)
    other = state(2)
    other["model"]["w"] = torch.zeros(4, 4)
    with pytest.raises(
        dcp.api.CheckpointException,
        match=r"model\.w is a plain tensor, in the checkpoint it is a wrapper",
    ):
        dcp.load(other, storage_reader=Reader(tmp_path / "ck"), no_dist=True)
    other["model"]["w"], other["plain"] = some(2), Wrapper({"a": torch.zeros(2)})
    with pytest.raises(
        dcp.api.CheckpointException,
        match=r"plain \(weight\) is a .*Wrapper, which has no plain memory",
    ):
        dcp.load(other, storage_reader=Reader(tmp_path / "ck"), no_dist=True)


def test_dcp_stages_wrappers_as_they_are(tmp_path: Path) -> None:
    one = some(1)
    for cached in (False, True):
        writer = Writer(tmp_path / "ck", cache_staged_state_dict=cached)
        for _ in range(2):
            staged = writer.stage({"w": [one, (1, torch.ones(2))], "n": 1})
            copied = staged["w"][0]
            assert same(copied, one)
            assert not {t.data_ptr() for t in inner_of(copied).values()} & {
                t.data_ptr() for t in inner_of(one).values()
            }
            assert staged["n"] == 1
            assert staged["w"][1][0] == 1


def test_what_a_subclass_with_memory_of_its_own_is_stays(tmp_path: Path) -> None:
    one, two = annotated(partition_dim=1, loader=print), annotated(partition_dim=2)
    one.data.fill_(3)
    save({"w": one}, tmp_path / "ck")
    assert load({"w": two}, tmp_path / "ck")
    assert torch.equal(two.data, torch.full((4, 4), 3.0))
    assert (type(two), two.partition_dim) == (Annotated, 2)


@dataclass(frozen=True)
class Leaf:
    """A tensor: its values, and how it is in memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    memory: str = "own"

    def make(self, seed: int) -> torch.Tensor:
        shape = self.shape[::-1] if self.memory == "transposed" else self.shape
        count = torch.Size(shape).numel()
        values = torch.arange(count + 3).mul(7).add(seed * 31).remainder(120).to(self.dtype)
        made = (
            values[3:].reshape(shape)
            if self.memory == "offset"
            else values[:count].reshape(shape).clone()
        )
        return made.t() if self.memory == "transposed" else made


@dataclass(frozen=True)
class Tree:
    """A wrapper: what is inside by name, names that are the same tensor as another one, and a context."""

    inner: tuple[tuple[str, Leaf | Tree], ...]
    same: tuple[tuple[str, str], ...] = ()
    context: Any = None
    silent: bool = False

    def make(self, seed: int) -> torch.Tensor:
        if self.silent:
            return Silent(torch.ones(2))
        made = {name: part.make(seed + n) for n, (name, part) in enumerate(self.inner)}
        made |= {name: made[other] for name, other in self.same}
        return Wrapper(made, self.context, (2, 3))

    @property
    def refused(self) -> bool:
        return self.silent or any(part.refused for _, part in self.inner if isinstance(part, Tree))


_NAMES = st.sampled_from(["a", "b", "qdata", "scale", "weight", "_x", "step", "a.b", "0"])
_CONTEXTS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.floats(width=16)
    | st.text(max_size=2)
    | st.binary(max_size=2)
    | st.sampled_from(
        [torch.float16, torch.strided, torch.Size([2, 3]), (2, 3), Scheme.SYMMETRIC, Settings(4)]
    ),
    lambda part: (
        st.lists(part, max_size=2)
        | st.tuples(part)
        | st.dictionaries(st.text(max_size=2), part, max_size=2)
    ),
    max_leaves=4,
)
_LEAVES = st.builds(
    Leaf,
    st.sampled_from(
        [torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.bool, torch.float8_e4m3fn]
    ),
    st.sampled_from([(), (0,), (1,), (5,), (2, 3), (3, 2)]),
    st.just("own"),
) | st.builds(
    Leaf, st.just(torch.float32), st.just((2, 3)), st.sampled_from(["offset", "transposed"])
)


@st.composite
def trees(draw: st.DrawFn, depth: int = 0) -> Tree:
    if draw(st.integers(0, 15)) == 7:
        return Tree((), silent=True)
    part: st.SearchStrategy[Any] = _LEAVES if depth == 2 else st.one_of(_LEAVES, trees(depth + 1))
    inner = draw(st.dictionaries(_NAMES, part, max_size=3))
    plain = [n for n, p in inner.items() if isinstance(p, Leaf) and 0 not in p.shape]
    twice = plain[: draw(st.integers(0, 1))]
    same = {"again": twice[0]} if twice else {}
    return Tree(tuple(inner.items()), tuple(same.items()), draw(_CONTEXTS))


def bits(tensor: torch.Tensor) -> list[tuple[str, torch.dtype, tuple[int, ...], list[int]]]:
    return [
        (n, t.dtype, tuple(t.shape), t.contiguous().reshape(-1).view(torch.uint8).tolist())
        for n, t in inner_of(tensor).items()
    ]


@given(saved=trees(), other=trees(), as_state=st.booleans())
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_wrapper_comes_back_or_is_refused(saved: Tree, other: Tree, as_state: bool) -> None:
    def state(tensor: torch.Tensor) -> dict[str, Any]:
        groups = {"param_groups": [{"params": ["p"], "lr": 1.0}]}
        optimizer = {"state": {"p": {"exp_avg": tensor}}, **groups}
        return (
            {"model": {"p": torch.ones(2)}, "optim": optimizer}
            if as_state
            else {"model": {"w": tensor}}
        )

    with TemporaryDirectory() as folder:
        place = Path(folder) / "ck"
        one = saved.make(1)
        if saved.refused:
            with pytest.raises(UsageError, match="Silent"):
                save(state(one), place, form="packed")
            assert not place.exists()
            return
        try:
            save(state(one), place, form="packed")
        except UsageError as error:
            if (
                "two entries of the state are named" in error.message
            ):  # "a.b" may be b inside a, too
                return
            raise
        two = saved.make(2)
        before = bits(two)
        assert load(state(two), place, strict=True)
        assert bits(two) == bits(one)
        assert [n for n, *_ in before] == [n for n, *_ in bits(two)]
        if other.refused:
            return
        third = other.make(3)
        before = bits(third)
        try:
            report = load(state(third), place, strict=False, cast=True)
        except UsageError as error:
            if "two entries of the state are named" in error.message:
                return
            raise
        assert bits(third) == (bits(one) if report else before)


class TestRanks:
    """Wrappers inside DTensors."""

    RANKS = Ranks("tests.torch.subclasses_program")

    @pytest.mark.front("2-few")
    @pytest.mark.parametrize("loading", [(1, 2), (3, 4)], ids=["few", "many"])
    @pytest.mark.parametrize("saving", [2, 4])
    def test_what_is_inside_is_sharded_as_the_wrapper(
        self, saving: int, loading: tuple[int, ...], tmp_path: Path
    ) -> None:
        self.RANKS.run("blocks", saving, tmp_path, writes=True)
        for ranks in loading:
            assert all(map(all, self.RANKS.run("blocks", ranks, tmp_path, writes=False)))
        whole = ucformat.open(tmp_path / "zarr-0-of-10")
        assert [whole[n].shape for n in ("w.codes", "w.scale", "w.table")] == [(10, 8), (20,), (6,)]
        assert whole["w.scale"][...].tolist() == list(range(20))

    def test_what_ranks_do_not_have_in_common_is_refused(self, tmp_path: Path) -> None:
        found = self.RANKS.run("scaled", 2, tmp_path)[0]
        expected = [
            "saved",
            "of which ranks must compare",
            "a different value on rank 1",
            "of which ranks must compare",
        ]
        unknown = [
            f"how the shards split its inner {n} is not known"
            for n in (r"table \[4\]", r"scale \[3, 6\]")
        ]
        for message, words in zip(
            found, [*expected, unknown[0], unknown[0], unknown[1], unknown[1]], strict=True
        ):
            assert re.search(words, message)
        assert (
            ucformat.open(tmp_path / "rows")["w.scale"][...].tolist() == [[0.0]] * 4 + [[1.0]] * 4
        )

    @pytest.mark.front("AdamW8bit")
    @NEEDS_TORCHAO
    @pytest.mark.parametrize("kind", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
    def test_an_optimizer_of_torchao_under_fsdp2(self, kind: str, tmp_path: Path) -> None:
        saved = self.RANKS.run("optimizer", 2, tmp_path, kind=kind, writes=True)[0]
        for ranks in (1, 3):
            loaded = self.RANKS.run("optimizer", ranks, tmp_path, kind=kind, writes=False)[0]
            assert [name for name, _ in loaded] == [name for name, _ in saved]
            assert all(
                torch.equal(one, other) for (_, one), (_, other) in zip(saved, loaded, strict=True)
            )


@NEEDS_TORCHAO
@pytest.mark.parametrize(
    "config",
    ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"],
)
def test_a_model_that_torchao_has_quantized(config: str, tmp_path: Path) -> None:
    from torchao import quantization

    def quantized(seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(256, 128, bias=False)).to(torch.bfloat16)
        quantization.quantize_(model, getattr(quantization, config)())
        return model

    one = quantized(1)
    save({"model": one}, tmp_path / "ck")
    for fill in (
        lambda m: load({"model": m}, tmp_path / "ck"),
        lambda m: load_into(m, tmp_path / "ck") == ([], []),
    ):
        two = quantized(2)
        assert fill(two)
        assert all(
            torch.equal(a.float(), b.float())
            for a, b in zip(
                inner_of(one[0].weight).values(), inner_of(two[0].weight).values(), strict=True
            )
        )


class Scale:
    """What quantizes a parameter, as bitsandbytes has it: tensors, and plain values packed into a tensor."""

    def __init__(self, absmax: torch.Tensor, offset: float) -> None:
        self.absmax, self.offset = absmax, offset

    def as_dict(self) -> dict[str, torch.Tensor]:
        packed = torch.tensor([*repr(self.offset).encode()], dtype=torch.uint8)
        return {"absmax": self.absmax, "quant_state.bitsandbytes__nf4": packed}

    @classmethod
    def from_dict(cls, found: dict[str, Any], device: torch.device) -> Scale:
        (offset,) = (v for k, v in found.items() if "quant_state" in k)
        return cls(found["absmax"].to(device), float(bytes(offset.tolist())))


class Codes(torch.nn.Parameter):
    """A parameter whose attribute has tensors."""

    quant_state: Scale


class Linear4bit(torch.nn.Module):
    """A module whose state dict has what its `load_state_dict` does not take."""

    def __init__(self, offset: float) -> None:
        super().__init__()
        self.weight = Codes(torch.full((8, 1), int(offset), dtype=torch.uint8), requires_grad=False)
        self.weight.quant_state = self.quant_state = Scale(torch.full((2,), offset), offset)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, tensor in self.weight.quant_state.as_dict().items():
            destination[f"{prefix}weight.{name}"] = tensor


def test_parameters_of_bitsandbytes(tmp_path: Path) -> None:
    """What is packed may have another length; what belongs to the parameter is put back there."""
    save({"m": torch.nn.Sequential(Linear4bit(1.25))}, tmp_path / "ck")
    module = torch.nn.Sequential(Linear4bit(7.0))
    assert load({"m": module}, tmp_path / "ck", strict=True)
    found: Any = module[0]
    assert found.quant_state is found.weight.quant_state
    assert (found.quant_state.offset, found.quant_state.absmax.tolist()) == (1.25, [1.25, 1.25])
    assert found.weight.flatten().tolist() == [1] * 8


def test_bitsandbytes_itself(tmp_path: Path) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")

    def made(seed: int) -> Any:
        torch.manual_seed(seed)
        return torch.nn.Sequential(
            bitsandbytes.nn.Linear4bit(64, 32, quant_type="nf4"), torch.nn.Linear(32, 4)
        ).to("cpu")

    given, other = made(0), made(1)
    save({"m": given}, tmp_path / "ck")
    assert load({"m": other}, tmp_path / "ck", strict=True)
    x = torch.randn(2, 64)
    assert torch.equal(given(x), other(x))


class Adding(torch.nn.Linear):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}extra"] = torch.ones(1)


def test_entries_that_a_module_does_not_take_back_are_an_error_before_anything_is_changed(
    tmp_path: Path,
) -> None:
    save({"m": torch.nn.Sequential(Adding(2, 2))}, tmp_path / "ck")
    module = torch.nn.Sequential(Adding(2, 2))
    before = module[0].weight.clone()
    with pytest.raises(
        StateMismatch, match=r"m\.0\.extra: the module's own load_state_dict does not take it"
    ):
        load({"m": module}, tmp_path / "ck")
    assert torch.equal(module[0].weight, before)
