"""Meshes, rules and layouts: what matches, what composes, and what the errors say."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.geometry.reference import tensors
from ucformat.errors import LayoutError, TensorNotFound, UsageError
from ucformat.geometry.layout import Layout
from ucformat.geometry.placement import Flat, Mesh, Owner, Partial, Replicate, Rule, Shard, Stage
from ucformat.geometry.tensor import Key, TensorInfo, TensorList

EVERYWHERE = Rule("*", (Replicate(),))


def test_a_mesh_counts_its_last_axis_fastest() -> None:
    mesh = Mesh({"pp": 2, "tp": 3})
    assert mesh.coordinate(4) == {"pp": 1, "tp": 1}
    assert [mesh.rank(c) for c in mesh.coordinates(["pp", "tp"])] == list(range(6))
    assert [mesh.rank(c) for c in mesh.coordinates(["tp", "pp"])] == [0, 3, 1, 4, 2, 5]
    assert mesh.index(("tp", "pp"), {"pp": 1, "tp": 2}) == 5
    assert mesh != Mesh({"tp": 3, "pp": 2})  # equal as dicts
    assert len({mesh, Mesh({"pp": 2, "tp": 3})}) == 1
    assert (str(mesh), repr(mesh)) == ("(pp=2, tp=3)", "Mesh(pp=2, tp=3)")


@pytest.mark.parametrize(
    ("axes", "ranks", "message"),
    [
        ({"tp": 0}, None, "invalid size 0"),
        ({"tp": 2}, [0, 0], "each of the ranks"),
        ({"tp": 2}, [1, 2], "each of"),
    ],
)
def test_an_impossible_mesh(axes: dict[str, int], ranks: list[int] | None, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        Mesh(axes, ranks)


def test_a_rank_outside_the_mesh() -> None:
    with pytest.raises(UsageError, match=r"rank 4 is not in the mesh \(tp=4\) of 4 ranks"):
        Layout({"tp": 4}, [EVERYWHERE]).bind(tensors((2,))).local(Key("t0", "weight"), 4)


@pytest.mark.parametrize(
    ("match", "name", "yes"),
    [
        ("*.weight", "model.layers.0.weight", True),
        ("model.*.weight", "model.weight", False),
        ("layers.?.w", "layers.1.w", True),
        ("layers.?.w", "layers.11.w", False),
        ("a[0].b", "a[0].b", True),  # brackets are no classes
        ("a.b", "axb", False),
        (r"/a\.\d+/", "a.12", True),
        (r"/a\.\d+/", "a.12.b", False),
    ],
)
def test_patterns(match: str, name: str, *, yes: bool) -> None:
    assert (Rule(match).find(name) is not None) == yes


def test_the_first_rule_that_matches_name_and_state_wins() -> None:
    tensor_list = tensors((4,), (2, 2), states=("weight", "exp_avg", "step"))
    rules = [
        Rule("*", states=("step",)),
        Rule(("t0", "x"), (Shard(0, "tp"),), states=("exp*",)),
        EVERYWHERE,
    ]
    bound = Layout({"tp": 2}, rules).bind(tensor_list)
    found = {
        tuple(k): next(r.label for r in bound.placed(k).rules if r.label.startswith("rules"))
        for k in bound.keys(0)
    }
    assert found["t0", "step"] == "rules[0]"
    assert found["t0", "exp_avg"] == "rules[1]"
    assert found["t0", "weight"] == found["t1", "exp_avg"] == "rules[2]"


def test_a_tensor_of_another_list() -> None:
    bound = Layout({"tp": 2}, [EVERYWHERE]).bind(tensors((2,)))
    with pytest.raises(TensorNotFound, match=r"not bound to t9 \(weight\)"):
        bound.pieces(Key("t9", "weight"), 0)


def test_renames() -> None:
    layout = Layout(
        {"tp": 1},
        [EVERYWHERE],
        renames=[(r"module\.(.*)", r"\1"), (r"(?P<a>.*)\.w", r"\g<a>.weight")],
    )
    assert layout.rename("module.a.w") == "a.w"  # the first that matches, alone
    assert layout.rename("a.w") == "a.weight"
    assert layout.rename("a.bias") == "a.bias"


def bind(place: object, shape: tuple[int, ...] = (8, 3), **more: Any) -> None:
    rules = [Rule("t*", place if isinstance(place, tuple) else (place,))]
    Layout({"dp": 2, "tp": 4}, rules, **more).bind(tensors(shape, states=("exp_avg",)))


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (
            Shard(2, "tp"),
            r"t0 \(exp_avg\): shard 2 is out of range for the shape \(8, 3\), in rules\[0\] \(match 't\*'\)",
        ),
        (Shard(-3, "tp"), "shard -3 is out of range"),
        (
            Shard(0, "tp", sizes=(1, 2, 3, 4)),
            r"t0 \(exp_avg\): the sizes \(1, 2, 3, 4\) add up to 10, not to the 8",
        ),
        (Shard(0, "tp", parts=(5, 6)), r"t0 \(exp_avg\): the parts \(5, 6\) add up to 11"),
        (Shard(0, "tp", pad_to=3), "a dim of 8, padded to 9, cannot be cut evenly over 4"),
        ((Shard(0, "dp"), Shard(-2, "tp", pad_to=4)), "shard -2 with pad_to must come before"),
        ((Shard(0, "dp", pad_to=4), Shard(1, "tp", pad_to=4)), "pads a second dim, after dim 0"),
        ((Shard(0, "dp"), Shard(1, "dp")), r"uses the axis 'dp' a second time, after rules\[0\]"),
        ((Flat("dp"), Shard(0, "tp")), "after flat only replicate, stage and owner may follow"),
        ((Flat("dp"), Flat("tp")), "after flat only"),
        ((Flat("dp"), Partial("mean", "tp")), "after flat only"),
        (
            Flat("dp", group="/x(.*)/"),
            r"the flat group /x\(\.\*\)/ .* does not match t0 \(exp_avg\)",
        ),
    ],
)
def test_a_rule_that_does_not_fit_the_tensors(place: object, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        bind(place)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (
            Shard(0, "ep"),
            r"rules\[0\] \(match '\*'\) names the axis 'ep', which is not in the mesh \(dp=2, tp=4\)",
        ),
        (Shard(0, "tp", sizes=(4, 4)), r"rules\[0\].*gives 2 widths \(4, 4\) for 4 coordinates"),
        (Shard(0, "tp", parts=(2, (1, 2))), "gives 2 widths"),
        (Stage("dp", 2), "stage 2 is out of range for 2 stages"),
        (Owner(8), "owner 8 is out of range for 8 coordinates"),
        (Owner(2, "dp"), "owner 2 is out of range for 2 coordinates"),
    ],
)
def test_a_rule_that_does_not_fit_the_mesh_fails_without_tensors(place: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        Layout({"dp": 2, "tp": 4}, [Rule("*", (place,))])


def test_the_first_layers_of_stages_fit_mesh_and_match() -> None:
    with pytest.raises(LayoutError, match="captures no layer number"):
        Rule("layers.*", (Stage("pp", starts=(0, 1)),))
    with pytest.raises(LayoutError, match="3 first layers are given for 2 stages"):
        Layout({"pp": 2}, [Rule("/(.*)/", (Stage("pp", starts=(0, 1, 2)),))])
    layout = Layout({"pp": 2}, [Rule(r"/t(.*)/", (Stage("pp", starts=(1, 2)),))])
    with pytest.raises(LayoutError, match="layer 0 of t0 comes before the first stage"):
        layout.bind(tensors((2,)))
    with pytest.raises(LayoutError, match="captures 'x' of tx, which is not a layer number"):
        layout.bind(TensorList((TensorInfo("tx", "weight", "int8", ()),)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Shard(0, ()), "names no axis"),
        (lambda: Shard(0, "a", sizes=(1,), pad_to=2), "one of sizes, parts and pad_to"),
        (lambda: Shard(0, "a", pad_to=0), "cannot pad to a multiple of 0"),
        (lambda: Shard(0, "a", sizes=(-1,)), "invalid widths"),
        (lambda: Shard(0, "a", parts=()), "invalid widths"),
        (lambda: Shard(0, "a", parts=(0, (0, 0))), "invalid widths"),
        (lambda: Flat(()), "flat names no axis"),
        (lambda: Flat("a", tensor_align=0), "tensor_align 0, which must be at least 1"),
        (lambda: Flat("a", group="units"), "unknown group 'units'"),
        (lambda: Flat("a", group="/x/"), "has no capture"),
        (lambda: Flat("a", group="/(/"), "not a regular expression"),
        (lambda: Stage((), 0), "stage names no axis"),
        (lambda: Stage("a"), "either an index or"),
        (lambda: Stage("a", starts=(3, 1)), "do not ascend"),
        (lambda: Rule(()), "matches nothing"),
        (lambda: Rule("/(/"), "not a regular expression"),
        (lambda: Layout({"a": 2}, []), "a layout without rules"),
        (lambda: Layout({"a": 2}, [Rule("*", mesh="b")]), r"rules\[0\].*names the mesh 'b'"),
        (
            lambda: Layout({"x": {"a": 2}, "y": {"a": 4}}, [EVERYWHERE]),
            "x .* has 2 ranks, y .* has 4 ranks",
        ),
        (lambda: Layout({"a": 2}, [EVERYWHERE], renames=[("(", "")]), r"renames\[0\]"),
        (lambda: Layout({"a": 2}, [EVERYWHERE], renames=[("a", r"\1")]), r"renames\[0\]"),
        (lambda: Layout({"a": 2}, [EVERYWHERE], renames=[("a", r"\g<x>")]), r"renames\[0\]"),
        (
            lambda: Layout({"a": 2}, [{"match": "*"}]),
            r"rules\[0\] is not a valid rule:\nplace: Field required",
        ),
    ],
)
def test_what_cannot_be(make: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        make()


def test_a_tensor_that_no_rule_matches() -> None:
    layout = Layout({"dp": 2}, [Rule("a")], data=[Rule("*", states=("weight",))])
    with pytest.raises(
        LayoutError, match=r"section rules matches t0 \(m\), .* and 1 more\n.*match: \"\*\""
    ):
        layout.bind(tensors((1,), (1,), (1,), (1,), (1,), states=("m",)))
    with pytest.raises(LayoutError, match=r"section data matches a \(m\)\n"):
        layout.bind(TensorList((TensorInfo("a", "m", "int8", ()),)))


def test_a_list_that_has_a_tensor_twice() -> None:
    with pytest.raises(LayoutError, match=r"lists t0 \(weight\) twice"):
        Layout({"dp": 2}, [EVERYWHERE]).bind(TensorList([*tensors((1,)).tensors] * 2))


def test_sections_that_name_different_meshes() -> None:
    layout = Layout(
        {"x": {"a": 2}, "y": {"b": 2}}, [Rule("*", mesh="y")], data=[Rule("*", mesh="x")]
    )
    with pytest.raises(LayoutError, match=r"rules\[0\] .* and data\[0\] .* name different meshes"):
        layout.bind(tensors((1,)))


def test_a_rule_without_a_mesh_takes_that_of_the_others() -> None:
    layout = Layout(
        {"x": {"a": 2}, "y": {"b": 2}}, [Rule("*", mesh="y")], data=[Rule("*", (Shard(0, "b"),))]
    )
    assert layout.bind(tensors((4,))).pieces(Key("t0", "weight"), 1)[0].box.start == (2,)
    with pytest.raises(LayoutError, match=r"names the axis 'b', which is not in the mesh \(a=2\)"):
        Layout({"x": {"a": 2}, "y": {"b": 2}}, [Rule("*", (Shard(0, "b"),))]).bind(tensors((4,)))


def tensor_list(*infos: tuple[str, str, str, tuple[int, ...]]) -> TensorList:
    return TensorList(
        tuple(TensorInfo(*info) for info in infos), {i[0]: 0 for i in infos if i[0] != "frozen"}
    )


@pytest.mark.parametrize(
    ("held", "rules", "message"),
    [
        (
            tensor_list(("frozen", "master", "int8", (2,))),
            [Rule("*", (Flat("dp"),))],
            "in no optimizer group",
        ),
        (
            tensor_list(("a", "master", "float32", (2,)), ("a", "step", "float32", ())),
            [Rule("*", (Flat("dp"),))],
            r"a \(step\) of shape \(\) cannot share flat:0 with a \(master\)",
        ),
        (
            tensor_list(("a", "master", "float32", (2,)), ("b", "master", "bfloat16", (2,))),
            [Rule("*", (Flat("dp"),))],
            r"b \(master\) is bfloat16, but shares the flat buffer 'flat:0' with a \(master\), float32",
        ),
        (
            tensor_list(("a", "master", "float32", (2,)), ("b", "master", "float32", (2,))),
            [Rule("a", (Flat("dp"),)), Rule("b", (Flat("dp", group_pad=2),))],
            r"b \(master\) joins the flat buffer 'flat:0', which another rule fills",
        ),
        (
            tensor_list(("a", "master", "float32", (2,)), ("a", "m", "float32", (2,))),
            [Rule("a", (Flat("dp"),), states=("m",)), Rule("a", (Shard(0, "tp"), Flat("dp")))],
            r"a \(m\) and a \(master\) share flat:0, but are cut differently",
        ),
    ],
)
def test_tensors_that_cannot_share_a_flat_buffer(
    held: TensorList, rules: list[Rule], message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        Layout({"dp": 2, "tp": 2}, rules).bind(held)


def test_two_states_may_be_flat_in_different_ways() -> None:
    """ZeRO++ keeps weights cut over a node and the optimizer over all: two geometries under one buffer name."""
    rules = [Rule("*", (Flat("tp"),), states=("weight",)), Rule("*", (Flat(("dp", "tp")),))]
    bound = Layout({"dp": 2, "tp": 2}, rules).bind(tensors((8,), states=("weight", "master")))
    assert {k: b.size for k, b in bound.buffers(0).items()} == {
        ("flat:0", "weight"): 4,
        ("flat:0", "master"): 2,
    }


def test_a_scalar_step_is_matched_by_an_earlier_rule() -> None:
    infos = [TensorInfo("a", s, "float32", () if s == "step" else (3,)) for s in ("master", "step")]
    data = [Rule("*", states=("step",)), Rule("*", (Flat("dp"),))]
    bound = Layout({"dp": 2}, [EVERYWHERE], data=data).bind(TensorList(tuple(infos), {"a": 0}))
    step = bound.local(Key("a", "step"), 1)
    assert step is not None
    assert (step.shape, step.size, len(step.pieces), step.buffer) == ((), 1, 1, None)


def test_thousands_of_tensors_on_hundreds_of_ranks() -> None:
    """Binding 20,000 tensors takes 0.7 s, all pieces of one rank 0.2 s, the proof 3 s; the bounds are for bad days."""
    shapes = {"q": (4096, 4096), "o": (4096, 4096), "up": (11008, 4096), "norm": (4096,)}
    names = {f"layers.{i}.{n}": shape for i in range(1250) for n, shape in shapes.items()}
    states = ("weight", "master", "exp_avg", "exp_avg_sq")
    infos = tuple(TensorInfo(n, s, "float32", shape) for n, shape in names.items() for s in states)
    layout = Layout(
        {"pp": 4, "dp": 16, "tp": 8},
        [Rule(("*.q", "*.up"), (Shard(0, "tp"),)), Rule("*.o", (Shard(1, "tp"),)), EVERYWHERE],
        stages=[Rule(r"/layers\.(\d+)\..*/", (Stage("pp", starts=(0, 300, 600, 900)),))],
        data=[Rule("*", states=("weight",)), Rule("*", (Flat("dp", group_pad=2),))],
    )
    began = time.process_time()
    bound = layout.bind(TensorList(infos, dict.fromkeys(names, 0)))
    pieces = [p for info in infos for p in bound.pieces(info.key, 77)]
    assert time.process_time() - began < 15
    assert len(pieces) < 5000
    bound.prove()
    assert time.process_time() - began < 60


def test_one_axis_is_a_list_of_one() -> None:
    for name, listed in (
        (Owner(1, "tp"), Owner(1, ("tp",))),
        (Partial("mean", "tp"), Partial("mean", ("tp",))),
        (Shard(0, "tp"), Shard(0, ("tp",))),
        (Stage("pp", 1), Stage(("pp",), 1)),
    ):
        assert name == listed
