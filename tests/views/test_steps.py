"""The steps of a view, against NumPy: what each makes of arrays is what the extents of its views give."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes import Arrays, FakeSource, same
from ucformat.checkpoint import Checkpoint
from ucformat.errors import LayoutError, UsageError
from ucformat.geometry.tensor import Key, TensorList
from ucformat.storage.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray


def checkpoint(arrays: Arrays, **facts: Any) -> Checkpoint:
    return Checkpoint(FakeSource.write(MemoryStore("steps"), arrays, **facts))


def counting(*shape: int, dtype: str = "float32", start: int = 0) -> NDArray[Any]:
    return (np.arange(int(np.prod(shape, dtype=int))) + start).astype(dtype).reshape(shape)


def seen(arrays: Mapping[str, NDArray[Any]], *steps: dict[str, Any]) -> dict[str, NDArray[Any]]:
    """The weights after some steps."""
    ck = checkpoint({(name, "weight"): a for name, a in arrays.items()}).view(steps)
    return {name: ck[name].read() for name in ck}


def test_keep_and_drop() -> None:
    arrays = {"a.x": counting(2), "a.y": counting(3), "b": counting(4)}
    assert list(seen(arrays, {"keep": "a.*"}, {"drop": "/.*y/"})) == ["a.x"]


def test_states_are_dropped_and_renamed() -> None:
    ck = checkpoint({("a", s): counting(2) for s in ("weight", "mu", "nu")})
    view = ck.view(
        [
            {"drop": "*", "states": ["weight"]},
            {"rename_states": {"mu": "exp_avg", "nu": "exp_avg_sq"}},
        ]
    )
    assert view.states("a") == ["exp_avg", "exp_avg_sq"]
    assert same(view["a", "exp_avg"].read(), counting(2))


def test_rename() -> None:
    found = seen(
        {"module.3.w": counting(2)},
        {"rename": r"/module\.(?P<n>\d+)\.(.*)/", "to": r"layers.\g<n>.\2"},
    )
    assert list(found) == ["layers.3.w"]


def test_transpose_and_trim() -> None:
    a = counting(5, 3)
    found = seen({"a": a}, {"transpose": "a"}, {"trim": "a", "dim": 1, "size": 4})
    assert same(found["a"], np.ascontiguousarray(a.T[:, :4]))
    cube = counting(2, 3, 4)
    assert same(
        seen({"a": cube}, {"transpose": "a", "axes": [1, 2, 0]})["a"],
        np.ascontiguousarray(cube.transpose(1, 2, 0)),
    )


def megatron_qkv(
    groups: int, heads: int, size: int, hidden: int
) -> tuple[NDArray[Any], list[NDArray[Any]]]:
    """Megatron's fused query, key and value, and the three apart."""
    fused = counting(groups * (heads + 2) * size, hidden)
    blocks = fused.reshape(groups, (heads + 2) * size, hidden)
    cuts = (
        slice(0, heads * size),
        slice(heads * size, (heads + 1) * size),
        slice((heads + 1) * size, None),
    )
    return fused, [np.ascontiguousarray(blocks[:, cut].reshape(-1, hidden)) for cut in cuts]


@given(
    groups=st.integers(1, 3),
    heads=st.integers(1, 3),
    size=st.integers(1, 3),
    hidden=st.integers(1, 4),
)
def test_grouped_queries_come_apart_and_together_again(
    groups: int, heads: int, size: int, hidden: int
) -> None:
    fused, apart = megatron_qkv(groups, heads, size, hidden)
    split = {
        "split": r"/(.*)\.qkv/",
        "into": [rf"\1.{n}" for n in "qkv"],
        "sizes": [heads, 1, 1],
        "repeat": groups,
    }
    found = seen({"l.0.qkv": fused}, split)
    assert list(found) == ["l.0.q", "l.0.k", "l.0.v"]
    for name, expected in zip(found, apart, strict=True):
        assert same(found[name], expected)
    fuse = {"fuse": r"/(.*)\.q/", "and": [r"\1.k", r"\1.v"], "into": r"\1.qkv", "repeat": groups}
    assert same(seen({"l.0.qkv": fused}, split, fuse)["l.0.qkv"], fused)
    again = seen(dict(zip(("l.0.q", "l.0.k", "l.0.v"), apart, strict=True)), fuse)
    assert same(again["l.0.qkv"], fused)


@given(
    shape=st.lists(st.integers(0, 3), min_size=0, max_size=3),
    count=st.integers(1, 12),
    data=st.data(),
)
def test_stack_and_unstack(shape: list[int], count: int, data: st.DataObject) -> None:
    arrays = {f"layers.{i}.w": counting(*shape, start=100 * i) for i in range(count)}
    dim = data.draw(st.integers(0, len(shape)))
    stack = {"stack": r"/layers\.(\d+)\.(.*)/", "into": r"layers.\2", "dim": dim}
    stacked = seen(arrays, stack)
    assert same(stacked["layers.w"], np.stack(list(arrays.values()), dim))
    unstack = {"unstack": r"/layers\.(.*)/", "into": r"layers.{i}.\1", "dim": dim}
    back = seen(arrays, stack, unstack)
    assert list(back) == list(arrays)
    assert all(same(back[n], a) for n, a in arrays.items())


@given(data=st.data())
def test_any_composition_reads_as_numpy_does(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 4)) * 4, data.draw(st.integers(1, 4)) * 2
    arrays = {f"x.{i}": counting(rows, columns, start=1000 * i) for i in range(3)}
    found = seen(
        arrays,
        {"stack": r"/x\.(\d+)/", "into": "x"},
        {"transpose": "x", "axes": [2, 0, 1]},
        {"split": "x", "into": ["a", "b"], "dim": 2, "sizes": [3, 1], "repeat": 1},
        {"fuse": "/b/", "and": ["a"], "into": "ba", "dim": 2},
        {"trim": "ba", "dim": 0, "size": columns - 1},
    )
    x = np.stack(list(arrays.values())).transpose(2, 0, 1)
    cut = rows * 3 // 4
    assert same(
        found["ba"],
        np.ascontiguousarray(np.concatenate([x[..., cut:], x[..., :cut]], 2)[: columns - 1]),
    )


class TestStates:
    """What happens to a parameter happens to its optimizer states."""

    ARRAYS: ClassVar[Arrays] = {
        ("w", "weight"): counting(4, 2),
        ("w", "exp_avg"): counting(4, 2, start=50),
        ("w", "step"): counting(),
        ("out", "weight"): counting(3),
    }

    def test_they_follow_and_scalars_go_with_each_part(self) -> None:
        ck = checkpoint(self.ARRAYS, groups=({"params": ["w"], "lr": 0.1},))
        view = ck.view([{"split": "w", "into": ["a", "b"]}])
        assert same(view["b", "exp_avg"].read(), counting(4, 2, start=50)[2:])
        assert view.states("a") == view.states("b") == ["weight", "exp_avg", "step"]
        assert view.metadata.groups == ({"params": ["a", "b"], "lr": 0.1},)
        assert view.metadata.tensor_list.groups == {"a": 0, "b": 0}

    def test_states_of_another_shape_are_refused(self) -> None:
        ck = checkpoint({("w", "weight"): counting(4, 2), ("w", "row"): counting(4)})
        with pytest.raises(LayoutError, match=r"its state row(.|\n)*drop it"):
            ck.view([{"transpose": "w"}])

    def test_a_fused_tensor_needs_the_same_states_of_all(self) -> None:
        ck = checkpoint(
            {("a", "weight"): counting(2), ("b", "weight"): counting(2), ("b", "mu"): counting(2)}
        )
        with pytest.raises(LayoutError, match="drop the states"):
            ck.view([{"fuse": "/a/", "and": ["b"], "into": "ab"}])


class TestGivenAndGathered:
    """Numbers of steps: one tensor for all parameters, or a state of each."""

    give: ClassVar = {"give": "count", "to": "p.*", "state": "step", "dtype": "float32"}
    gather: ClassVar = {"gather": "p.*", "state": "step", "into": "count", "dtype": "int32"}

    def counted(self, count: Any = 3, dtype: str = "int32", **others: Any) -> Checkpoint:
        arrays = {("p.a", "weight"): counting(2), ("p.b", "weight"): counting(3)}
        arrays["count", "weight"] = np.array(count, dtype)
        return checkpoint(arrays | {(n, "weight"): a for n, a in others.items()})

    def stepped(self, *steps: Any, dtype: str = "float32") -> Checkpoint:
        arrays = {(f"p.{n}", "weight"): counting(2) for n in range(len(steps))}
        return checkpoint(
            arrays | {(f"p.{n}", "step"): np.array(s, dtype) for n, s in enumerate(steps)}
        )

    def test_there_and_back(self) -> None:
        given = self.counted(7).view([self.give])
        assert list(given) == ["p.a", "p.b"]
        for name in given:
            assert given.states(name) == ["weight", "step"]
            assert same(given[name, "step"].read(), np.array(7, "float32"))
        back = given.view([self.gather])
        assert {name: back.states(name) for name in back} == {
            n: ["weight"] for n in ("count", "p.a", "p.b")
        }
        assert same(back["count"].read(), np.array(7, "int32"))
        plain = self.counted(7).view([{k: v for k, v in self.give.items() if k != "dtype"}])
        assert same(plain["p.b", "step"].read(), np.array(7, "int32"))

    def test_they_must_be_equal_and_fit(self) -> None:
        assert self.stepped(4, 4, 4).view([self.gather])["count"].read() == 4
        for steps, message in (
            ((4, 4, 5), r"count .* several values: 4\.0, 5\.0"),
            ((4.5, 4.5), r"4\.5 does not fit int32"),
            ((np.nan,), "nan does not fit int32"),
            ((0.0, -0.0), r"count .* several values: 0\.0, -0\.0"),
            ((-0.0,), r"-0\.0 does not fit int32"),
            ((2.0**31,), "does not fit int32"),
        ):
            view = self.stepped(*steps).view([self.gather])
            with pytest.raises(UsageError, match=message):
                view["count"].read()
        with pytest.raises(UsageError, match="16777217 does not fit float32"):
            self.counted((1 << 24) + 1).view([self.give])["p.a", "step"].read()

    def test_what_has_no_such_number_is_refused(self) -> None:
        for ck, step, message in (
            (self.counted([1, 2]), self.give, r"has the shape \(2,\), and should have one element"),
            (self.counted(), self.give | {"give": "other"}, "needs other"),
            (self.counted(), self.give | {"to": "q.*"}, "no tensor is called q"),
            (self.counted(dtype="bool"), self.give, "is bool, which is no number"),
            (self.stepped(1), self.give | {"give": "p.0"}, "has the states weight, step"),
            (self.counted(1), self.give | {"to": "count"}, "count would be given to itself alone"),
            (self.stepped(1), self.gather | {"state": "lr"}, "p.0 has no state lr"),
            (self.stepped(1), self.gather | {"into": "p.0"}, "would be called p.0"),
        ):
            with pytest.raises(LayoutError, match=message):
                ck.view([step])
        with pytest.raises(LayoutError, match="has a state step already"):
            self.counted().view([self.give | {"dtype": "int32"}]).view(
                [{"gather": "p.a", "state": "step", "into": "n"}, self.give | {"give": "n"}]
            )
        mixed = checkpoint(
            {
                ("p.0", "step"): np.array(1, "float32"),
                ("p.1", "step"): np.array(1, "float64"),
            }
        )
        with pytest.raises(LayoutError, match=r"is float64, and .* float32"):
            mixed.view([self.gather])


class TestTies:
    """A further name is renamed and cut as what it stands for, and stays one."""

    def view(self, *steps: dict[str, Any]) -> Checkpoint:
        arrays = {("embed", "weight"): counting(4, 2), ("x", "weight"): counting(2)}
        return checkpoint(arrays, aliases={"head": "embed"}).view(steps)

    def test_both_are_renamed(self) -> None:
        view = self.view({"rename": "/(embed|head)/", "to": r"model.\1"})
        assert (view.names(), dict(view.aliases)) == (
            ["model.embed", "x"],
            {"model.head": "model.embed"},
        )

    def test_both_are_split(self) -> None:
        view = self.view({"split": "/(.*e.*d)/", "into": [r"\1.a", r"\1.b"]})
        assert dict(view.aliases) == {"head.a": "embed.a", "head.b": "embed.b"}

    def test_what_is_changed_alone_is_stored(self) -> None:
        view = self.view({"transpose": "head"})
        assert (view.names(), dict(view.aliases)) == (["embed", "x", "head"], {})
        assert same(view["head"].read(), np.ascontiguousarray(counting(4, 2).T))

    def test_it_becomes_the_stored_one_where_the_other_goes(self) -> None:
        view = self.view({"drop": "embed"})
        assert (view.names(), dict(view.aliases)) == (["x", "head"], {})

    def test_alias_and_untie(self) -> None:
        view = self.view({"alias": {"y": "x"}}, {"untie": "head"})
        assert (view.names(), dict(view.aliases)) == (["embed", "x", "head"], {"y": "x"})

    def test_a_name_that_is_stored_is_no_alias(self) -> None:
        with pytest.raises(LayoutError, match="stored itself"):
            self.view({"alias": {"x": "embed"}})


class TestComputed:
    """Casts and means."""

    def test_cast_rounds_to_nearest_even(self) -> None:
        a = np.array([1.0, 1.00390625, -2.5, 3e-41, np.inf, np.nan], np.float32)
        found = seen({"a": a}, {"cast": "*", "dtype": "bfloat16"})["a"]
        assert same(found, a.astype(ml_dtypes.bfloat16))

    def test_slices_of_a_cast_read_what_they_need(self) -> None:
        a = counting(50, 7)
        ck = checkpoint({("a", "weight"): a}).view(
            [{"cast": "a", "dtype": "float64"}, {"transpose": "a"}]
        )
        assert same(ck["a"][2:5, 3:40], np.ascontiguousarray(a.T[2:5, 3:40].astype(np.float64)))
        assert ck["a"].plan().bytes_needed == 50 * 7 * 8

    def test_only_some_states(self) -> None:
        ck = checkpoint({("a", "weight"): counting(2), ("a", "exp_avg"): counting(2)})
        view = ck.view([{"cast": "*", "states": ["weight"], "dtype": "bfloat16"}])
        assert (str(view["a"].dtype), str(view["a", "exp_avg"].dtype)) == ("bfloat16", "float32")

    def test_what_does_not_fit_is_an_error(self) -> None:
        with pytest.raises(UsageError, match="70000"):
            seen({"a": np.array([1, 70000], np.float32)}, {"cast": "*", "dtype": "float16"})

    def test_integers_are_not_cast(self) -> None:
        with pytest.raises(LayoutError, match="int64"):
            seen({"a": counting(2, dtype="int64")}, {"cast": "*", "dtype": "float32"})

    def test_mean(self) -> None:
        arrays = {f"a.rank{i}": counting(3, 2, start=i * i) for i in range(3)}
        found = seen(arrays, {"mean": r"/(?P<name>.*)\.rank(?P<i>\d)/", "into": r"\g<name>"})
        expected = sum(arrays.values()) / np.float32(3)
        assert list(found) == ["a"]
        assert same(found["a"], expected.astype(np.float32))

    def test_a_source_may_say_that_a_tensor_is_a_mean(self) -> None:
        arrays = {("a", f"weight.partial{i}"): counting(4, start=i) for i in range(2)}
        inner = FakeSource.write(MemoryStore("mean"), arrays)
        info = replace(inner.metadata.tensor_list.tensors[0], state="weight")
        metadata = replace(
            inner.metadata,
            tensor_list=TensorList((info,)),
            means={info.key: tuple(Key(*k) for k in arrays)},
        )
        source: Any = SimpleNamespace(
            kind="fake", store=inner.store, metadata=metadata, extents=inner.extents
        )
        ck = Checkpoint(source)
        assert same(ck["a"].read(), (counting(4) + 0.5).astype(np.float32))

    def test_a_view_of_a_view_computes_both(self) -> None:
        """Both number their computed tensors from 0, in one store."""
        arrays = {
            (n, "weight"): counting(6, start=i) for i, n in enumerate(("a0", "a1", "b0", "b1"))
        }
        ck = (
            checkpoint(arrays)
            .view([{"mean": r"/a(\d)/", "into": "a"}])
            .view([{"mean": r"/b(\d)/", "into": "b"}])
        )
        assert same(ck["a"].read(), (counting(6) + 0.5).astype(np.float32))
        assert same(ck["b"].read(), (counting(6) + 2.5).astype(np.float32))
        cast = ck.view([{"cast": "a", "dtype": "float64"}])
        assert same(cast["a"].read(), counting(6) + np.float64(0.5))


class TestErrors:
    @pytest.mark.parametrize(
        ("step", "message"),
        [
            (
                {"rename": "/(.*)/", "to": "one"},
                r"view\[0\] \(rename /\(\.\*\)/\): .* would be called one",
            ),
            ({"rename": "/a/", "to": r"\3"}, "does not fit its pattern"),
            ({"split": "a", "into": ["x", "y"], "sizes": [1, 4]}, "cannot be split"),
            ({"split": "a", "into": ["x", "y"], "dim": 5}, "there is no dim 5"),
            (
                {"split": "a", "into": ["x", "y"], "sizes": [1, 2, 3]},
                "3 sizes are given for 2 names",
            ),
            ({"fuse": "/a/", "and": ["zz"], "into": "x"}, "needs zz"),
            ({"fuse": "/a/", "and": ["b"], "into": "x"}, "does not fit a"),
            ({"stack": r"/(.)/", "into": "x"}, "captures no number in a"),
            ({"unstack": "a", "into": "x"}, r"must have \{i\}"),
            ({"transpose": "a", "axes": [0, 0]}, "are not its dims"),
            ({"trim": "a", "size": 99}, "fewer than 99"),
            ({"alias": {"c": "zz"}}, "needs zz"),
            ({"preset": "nothing"}, "there is no preset"),
            ({"cast": "a", "dtype": "float3"}, "float3"),
            ({"turn": "a"}, "not a valid step"),
            ({"drop": "/(/"}, "not a regular expression"),
            ({"keep": "a", "statez": ["x"]}, "statez"),
        ],
    )
    def test_a_step_that_cannot_be_done(self, step: dict[str, Any], message: str) -> None:
        with pytest.raises(LayoutError, match=message):
            seen({"a": counting(4, 2), "b": counting(3)}, step)

    def test_a_number_that_is_missing(self) -> None:
        with pytest.raises(LayoutError, match="1 is missing"):
            seen({"a.0": counting(2), "a.2": counting(2)}, {"stack": r"/a\.(\d+)/", "into": "a"})


class TestComposed:
    """Tensors tiled by boxes of others, as `capture` says them."""

    def step(self, parts: list[dict[str, Any]], *shape: int, **of: Any) -> dict[str, Any]:
        return {"compose": {"p": {"shape": list(shape), "parts": parts}}, "of": of}

    def test_boxes_that_are_moved_turned_and_cast(self) -> None:
        a, b = counting(4, 6), counting(3, 2, dtype="float64", start=100)
        parts = [
            {"from": "a", "start": [1, 2], "size": [2, 3], "axes": [1, 0]},
            {"from": "b", "at": [0, 2], "cast": "float32"},
        ]
        found = seen({"a": a, "b": b}, self.step(parts, 3, 4))
        assert list(found) == ["p"]
        wanted = np.concatenate([a[1:3, 2:5].T, b.astype("float32")], axis=1)
        assert same(found["p"], wanted)

    def test_a_new_dim_and_a_dim_less(self) -> None:
        a, b = counting(4), counting(1, 4, start=10)
        parts: list[dict[str, Any]] = [
            {"from": "a", "axes": [None, 0]},
            {"from": "b", "at": [1, 0], "axes": [None, 1]},
        ]
        assert same(seen({"a": a, "b": b}, self.step(parts, 2, 4))["p"], np.stack([a, b[0]]))

    def test_states_follow(self) -> None:
        arrays = {("a", s): counting(4, start=i) for i, s in enumerate(("weight", "exp_avg"))}
        parts = [{"from": "a", "start": [1], "size": [2]}]
        view = checkpoint(arrays | {("a", "step"): counting(1)}).view([self.step(parts, 2)])
        assert same(view["p", "exp_avg"].read(), counting(4, start=1)[1:3])
        assert view["p", "step"].shape == (1,)

    @pytest.mark.parametrize(
        ("parts", "message"),
        [
            ([{"from": "a", "size": [2]}], "p"),
            ([{"from": "a", "start": [3], "size": [2]}], "has no box"),
            ([{"from": "a", "size": [4, 1]}], "has not its dims"),
            ([{"from": "a", "axes": [1]}], "not the axes"),
            ([{"from": "x"}], "needs x"),
            ([{"from": "a"}, {"from": "a"}], "from two sources"),
            ([{"from": "a", "size": [2]}, {"from": "d", "at": [2]}], "several dtypes"),
        ],
    )
    def test_what_does_not_tile_it_is_refused(
        self, parts: list[dict[str, Any]], message: str
    ) -> None:
        arrays = {"a": counting(4), "d": counting(2, dtype="float64")}
        with pytest.raises(LayoutError, match=message):
            seen(arrays, self.step(parts, 4))

    def test_another_tensor_is_refused(self) -> None:
        step = self.step([{"from": "a"}], 4, a={"dtype": "bfloat16", "shape": [4]})
        with pytest.raises(LayoutError, match=r"a is float32 \[4\], and must be bfloat16 \[4\]"):
            seen({"a": counting(4)}, step)
