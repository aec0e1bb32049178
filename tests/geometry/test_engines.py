"""Layouts against what engines do, spelled with np.split, np.concatenate and np.pad and none of our code."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.geometry.reference import FILLER, gather, numbered, scatter, tensors
from ucformat.geometry.box import Box
from ucformat.geometry.layout import Layout
from ucformat.geometry.placement import Flat, Mesh, Owner, Partial, Replicate, Rule, Shard, Stage
from ucformat.geometry.tensor import Key, TensorInfo, TensorList

EVERYWHERE = Rule("*", (Replicate(),))
W = "weight"


def chunk(a: np.ndarray, k: int, dim: int = 0) -> list[np.ndarray]:
    """As torch.chunk, with empty parts at the end so that there are `k`."""
    step = math.ceil(a.shape[dim] / k)
    return np.split(a, [step * i for i in range(1, k)], axis=dim)


def padded(a: np.ndarray, multiple: int) -> np.ndarray:
    return np.pad(a, (0, -a.size % multiple), constant_values=FILLER)


def aligned(parts: list[np.ndarray], to: int) -> np.ndarray:
    """Concatenated, each but the last padded."""
    return np.concatenate([*(padded(p, to) for p in parts[:-1]), parts[-1]])


def same(a: np.ndarray, b: np.ndarray) -> None:
    np.testing.assert_array_equal(a, b.ravel())


def test_fused_unequal_qkv_under_tp_then_zero_1() -> None:
    """q of 8 rows, k and v of 4 each; DeepSpeed pads the joined buffer to 2 * dp (its NCCL alignment)."""
    infos = [TensorInfo(n, s, "float32", shape) for n, shape in [("qkv", (16, 3)), ("norm", (3,))]
             for s in (W, "master", "exp_avg")]  # fmt: skip
    tensor_list = TensorList(tuple(infos), {"qkv": 0, "norm": 0})
    layout = Layout(
        {"dp": 4, "tp": 2},
        [Rule("qkv", (Shard(0, "tp", parts=(8, 4, 4)),)), EVERYWHERE],
        data=[Rule("*", (Replicate(),), states=(W,)), Rule("*", (Flat("dp", group_pad=2),))],
    )
    wholes = numbered(tensor_list)
    ranks = scatter(layout.bind(tensor_list), wholes)
    for dp in range(4):
        for tp in range(2):
            mine = ranks[dp * 2 + tp]
            for state in (W, "master", "exp_avg"):
                q, k, v = np.split(wholes[Key("qkv", state)], [8, 12])
                qkv = np.concatenate([np.split(part, 2)[tp] for part in (q, k, v)])
                norm = wholes[Key("norm", state)]
                if state == W:
                    same(mine["qkv", W], qkv)
                    same(mine["norm", W], norm)
                else:
                    buffer = padded(np.concatenate([qkv.ravel(), norm]), 2 * 4)
                    assert buffer.size == 32
                    same(mine["flat:0", state], np.split(buffer, 4)[dp])


def test_fsdp2_over_tp_is_strided() -> None:
    tensor_list = tensors((13, 3))
    layout = Layout({"dp": 3, "tp": 2}, [Rule("*", (Shard(0, "tp"), Shard(0, "dp")))])
    wholes = numbered(tensor_list)
    ranks = scatter(layout.bind(tensor_list), wholes)
    for dp in range(3):
        for tp in range(2):
            same(ranks[dp * 2 + tp]["t0", W], chunk(chunk(wholes[Key("t0", W)], 2)[tp], 3)[dp])


def test_experts_on_a_mesh_that_does_not_nest_in_the_dense_one() -> None:
    """Dense: dp=2, tp=4. Experts: edp=1, ep=4, tp=2: an expert's tp group is half of a dense one."""
    tensor_list = TensorList(
        (
            TensorInfo("experts.up", W, "float32", (8, 6, 4)),
            TensorInfo("attn.o", W, "float32", (5, 8)),
        )
    )
    layout = Layout(
        {"dense": {"dp": 2, "tp": 4}, "expert": {"edp": 1, "ep": 4, "etp": 2}},
        [
            Rule("experts.*", (Shard(0, "ep"), Shard(2, "etp")), mesh="expert"),
            Rule("*", (Shard(1, "tp"),)),
        ],
        data=[
            Rule("experts.*", (Flat("edp", group="all"),)),
            Rule("*", (Flat("dp", group="all", group_pad=2),)),
        ],
    )
    wholes = numbered(tensor_list)
    bound = layout.bind(tensor_list)
    bound.prove()
    ranks = scatter(bound, wholes)
    for rank in range(8):
        expert = np.split(np.split(wholes[Key("experts.up", W)], 4)[rank // 2], 2, axis=2)[rank % 2]
        dense = padded(np.split(wholes[Key("attn.o", W)], 4, axis=1)[rank % 4].ravel(), 4)
        same(ranks[rank]["flat:expert:all", W], expert)
        same(ranks[rank]["flat:dense:all", W], np.split(dense, 2)[rank // 4])


def test_padded_vocabulary_keeps_its_padding_apart() -> None:
    tensor_list = tensors((11, 2))
    bound = Layout({"tp": 4}, [Rule("*", (Shard(0, "tp", pad_to=8),))]).bind(tensor_list)
    whole = numbered(tensor_list)[Key("t0", W)]
    rows = np.split(np.pad(whole, ((0, 5), (0, 0)), constant_values=FILLER), 4)
    ranks = scatter(bound, {Key("t0", W): whole})
    for rank in range(4):
        same(ranks[rank]["t0", W], rows[rank])
    padding = bound.padding(Key("t0", W))
    assert padding == TensorInfo("t0", "weight.padding", "float32", (5, 2))
    held = [bound.local(Key("t0", W), r) for r in range(4)]
    assert [[str(p.box) for p in h.padding] for h in held if h] == [
        [],
        [],
        ["[0:1, 0:2]"],
        ["[1:5, 0:2]"],
    ]
    assert [[p.offset for p in h.padding] for h in held if h] == [[], [], [6], [0]]
    assert [h.shape for h in held if h] == [(4, 2)] * 4


def test_padded_vocabulary_in_a_flat_buffer() -> None:
    tensor_list = tensors((5, 3), (7,), states=("master",))
    rules = [Rule("t0", (Shard(0, "tp", pad_to=4),)), EVERYWHERE]
    bound = Layout({"dp": 3, "tp": 2}, rules, data=[Rule("*", (Flat("dp"),))]).bind(tensor_list)
    wholes = numbered(tensor_list)
    vocabulary = np.pad(wholes[Key("t0", "master")], ((0, 3), (0, 0)), constant_values=FILLER)
    ranks = scatter(bound, wholes)
    for dp in range(3):
        for tp in range(2):
            joined = np.concatenate(
                [np.split(vocabulary, 2)[tp].ravel(), wholes[Key("t1", "master")]]
            )
            same(ranks[dp * 2 + tp]["flat:0", "master"], np.split(padded(joined, 3), 3)[dp])


def zero_3(
    arrays: list[np.ndarray], degree: int, sub_group_size: int | None
) -> list[list[np.ndarray]]:
    """DeepSpeed's `_partition_param` and `_create_fp16_sub_groups`: for each rank, its sub-groups."""
    parts = [np.split(padded(a.ravel(), degree), degree) for a in arrays]
    ranks: list[list[np.ndarray]] = []
    for rank in range(degree):
        groups: list[list[np.ndarray]] = [[]]
        for i, part in enumerate(parts):
            groups[-1].append(part[rank])
            full = sub_group_size is not None and sum(p.size for p in groups[-1]) >= sub_group_size
            if full and i < len(parts) - 1:
                groups.append([])
        ranks.append([np.concatenate(g) for g in groups])
    return ranks


@pytest.mark.parametrize("sub_group_size", [None, 1, 4, 6, 1000])
def test_zero_3_sub_groups(sub_group_size: int | None) -> None:
    tensor_list = tensors((5, 3), (2,), (), (4, 4), (3,), states=(W, "master"))
    flat = Flat("dp", cut="before_join", max_elements=sub_group_size)
    bound = Layout({"dp": 4}, [Rule("*", (flat,))]).bind(tensor_list)
    wholes = numbered(tensor_list)
    ranks = scatter(bound, wholes)
    for state in (W, "master"):
        expected = zero_3([wholes[Key(f"t{i}", state)] for i in range(5)], 4, sub_group_size)
        for rank in range(4):
            for sub, group in enumerate(expected[rank]):
                name = "flat:0" if sub_group_size is None else f"flat:0.{sub}"
                same(ranks[rank][name, state], group)
            assert len(bound.buffers(rank)) == 2 * len(expected[rank])


@pytest.mark.parametrize("order", ["checkpoint", "reverse", "round_robin"])
def test_zero_2_orders_and_parameter_alignment(order: str) -> None:
    """`parameter_alignment` aligns each bf16 parameter to 16 bytes, 8 elements; round robin deals them out."""
    tensor_list = tensors((5,), (3, 4), (2,), (7,), (3, 3), states=("master",))
    flat = Flat("dp", order=order, tensor_align=8, group_pad=2)  # type: ignore[arg-type]
    wholes = numbered(tensor_list)
    arrays = [wholes[Key(f"t{i}", "master")].ravel() for i in range(5)]
    dealt = {
        "checkpoint": [0, 1, 2, 3, 4],
        "reverse": [4, 3, 2, 1, 0],
        "round_robin": [0, 3, 1, 4, 2],
    }[order]
    buffer = padded(aligned([arrays[i] for i in dealt], 8), 2 * 3)
    ranks = scatter(Layout({"dp": 3}, [Rule("*", (flat,))]).bind(tensor_list), wholes)
    for rank in range(3):
        same(ranks[rank]["flat:0", "master"], np.split(buffer, 3)[rank])


def test_hsdp_shards_in_a_node_and_replicates_over_nodes() -> None:
    tensor_list = tensors((7, 2), (5,))
    bound = Layout({"replicate": 2, "shard": 4}, [Rule("*", (Shard(0, "shard"),))]).bind(
        tensor_list
    )
    wholes = numbered(tensor_list)
    ranks = scatter(bound, wholes)
    for rank in range(8):
        for name in ("t0", "t1"):
            same(ranks[rank][name, W], chunk(wholes[Key(name, W)], 4)[rank % 4])
    last = bound.local(Key("t1", W), 3)
    assert last is not None  # an empty shard is held, unlike a tensor of another stage
    assert last.shape == (0,)
    assert last.pieces == ()


def test_fsdp1_units() -> None:
    """Each unit's parameters start at multiples of 16 bytes, and the flat parameter is padded to the world size."""
    names = ["embed.w", "layers.0.a", "layers.0.b", "layers.1.a", "layers.1.b"]
    shapes = [(3, 4), (5,), (2, 3), (5,), (2, 3)]
    tensor_list = TensorList(
        tuple(TensorInfo(n, W, "float32", s) for n, s in zip(names, shapes, strict=True))
    )
    flat = Flat("dp", group=r"/(embed|layers\.\d+)\..*/", tensor_align=4)
    wholes = numbered(tensor_list)
    ranks = scatter(Layout({"dp": 3}, [Rule("*", (flat,))]).bind(tensor_list), wholes)
    for unit, members in [("embed", names[:1]), ("layers.0", names[1:3]), ("layers.1", names[3:])]:
        joined = padded(aligned([wholes[Key(n, W)].ravel() for n in members], 4), 3)
        for rank in range(3):
            same(ranks[rank][f"flat:{unit}", W], np.split(joined, 3)[rank])


def test_megatron_buckets() -> None:
    """Megatron: parameters reversed and aligned to 64, a bucket closed when it reaches its size and padded to 128."""
    shapes = [(10, 10), (70,), (200,), (3,)]
    tensor_list = tensors(*shapes, states=("master",))
    flat = Flat(
        "dp", group="all", order="reverse", tensor_align=64, total_align=128, max_elements=250
    )
    wholes = numbered(tensor_list)
    t0, t1, t2, t3 = (wholes[Key(f"t{i}", "master")].ravel() for i in range(4))
    buckets = [padded(aligned([t3, t2], 64), 128), padded(aligned([t1, t0], 64), 128)]
    ranks = scatter(Layout({"dp": 2}, [Rule("*", (flat,))]).bind(tensor_list), wholes)
    for rank in range(2):
        for i, bucket in enumerate(buckets):
            same(ranks[rank][f"flat:all.{i}", "master"], np.split(bucket, 2)[rank])


def test_each_stage_and_tp_coordinate_joins_what_it_holds() -> None:
    """pp=2, dp=2, tp=2; uneven tp, so that a replicated norm is cut at another place on each tp coordinate."""
    shapes = {
        "embed": (7, 2),
        "layers.0.w": (5, 3),
        "layers.0.norm": (3,),
        "layers.1.w": (5, 3),
        "layers.1.norm": (3,),
    }
    tensor_list = TensorList(
        tuple(TensorInfo(n, "master", "float32", s) for n, s in shapes.items()),
        dict.fromkeys(shapes, 0),
    )
    layout = Layout(
        {"pp": 2, "dp": 2, "tp": 2},
        [Rule("*norm", (Replicate(),)), Rule("*", (Shard(0, "tp"),))],
        stages=[
            Rule(r"/layers\.(\d+)\..*/", (Stage("pp", starts=(0, 1)),)),
            Rule("*", (Stage("pp", 0),)),
        ],
        data=[Rule("*", (Flat("dp", group_pad=2),))],
    )
    bound = layout.bind(tensor_list)
    bound.prove()
    wholes = numbered(tensor_list)
    ranks = scatter(bound, wholes)
    for pp, held in enumerate(
        [["embed", "layers.0.w", "layers.0.norm"], ["layers.1.w", "layers.1.norm"]]
    ):
        for tp in range(2):
            local = [wholes[Key(n, "master")] for n in held]
            joined = padded(
                np.concatenate([(a if a.ndim == 1 else chunk(a, 2)[tp]).ravel() for a in local]), 4
            )
            for dp in range(2):
                rank = pp * 4 + dp * 2 + tp
                assert [k.name for k in bound.keys(rank)] == held
                same(ranks[rank]["flat:0", "master"], np.split(joined, 2)[dp])
    assert bound.local(Key("embed", "master"), 7) is None
    assert bound.buffers(7) == {("flat:0", "master"): (6, "float32")}


def test_interleaved_virtual_stages_take_turns() -> None:
    tensor_list = TensorList(
        tuple(TensorInfo(f"layers.{i}.w", W, "float32", (2,)) for i in range(8))
    )
    stage = Stage("pp", starts=(0, 2, 4, 6))
    bound = Layout({"pp": 2}, [Rule(r"/layers\.(?P<layer>\d+)\.(w)/", (stage,))]).bind(tensor_list)
    assert [k.name for k in bound.keys(0)] == [f"layers.{i}.w" for i in (0, 1, 4, 5)]


def test_explicit_sizes_and_widths_that_differ_by_rank() -> None:
    tensor_list = tensors((10, 2))
    wholes = numbered(tensor_list)
    whole = wholes[Key("t0", W)]
    ranks = scatter(
        Layout({"tp": 3}, [Rule("*", (Shard(-2, "tp", sizes=(5, 0, 5)),))]).bind(tensor_list),
        wholes,
    )
    for rank, expected in enumerate([whole[:5], whole[5:5], whole[5:]]):
        same(ranks[rank]["t0", W], expected)
    ranks = scatter(
        Layout({"tp": 2}, [Rule("*", (Shard(0, "tp", parts=((4, 2), (1, 3))),))]).bind(tensor_list),
        wholes,
    )
    for rank, rows in enumerate([[0, 1, 2, 3, 6], [4, 5, 7, 8, 9]]):
        same(ranks[rank]["t0", W], whole[rows])


def test_a_swiglu_in_proportions_cuts_gate_and_up_by_themselves() -> None:
    tensor_list = tensors((12, 2))
    wholes = numbered(tensor_list)
    whole = wholes[Key("t0", W)]
    bound = Layout({"dp": 2, "tp": 3}, [Rule("*", (Shard(0, ("tp",), parts=(1, 1)),))]).bind(
        tensor_list
    )
    for rank, mine in enumerate(scatter(bound, wholes)):
        same(
            mine["t0", W],
            np.concatenate([np.split(half, 3)[rank % 3] for half in np.split(whole, 2)]),
        )
    assert len(bound.pieces(Key("t0", W), 0)) == 2


def test_one_placement_over_several_axes_counts_them_as_listed() -> None:
    tensor_list = tensors((12,))
    wholes = numbered(tensor_list)
    ranks = scatter(
        Layout({"a": 2, "b": 3}, [Rule("*", (Shard(0, ("b", "a")),))]).bind(tensor_list), wholes
    )
    for a in range(2):
        for b in range(3):
            same(ranks[a * 3 + b]["t0", W], np.split(wholes[Key("t0", W)], 6)[b * 2 + a])


def test_ranks_may_sit_anywhere_in_the_mesh() -> None:
    tensor_list = tensors((4,))
    wholes = numbered(tensor_list)
    mesh = Mesh({"tp": 4}, ranks=[2, 0, 3, 1])
    ranks = scatter(Layout(mesh, [Rule("*", (Shard(0, "tp"),))]).bind(tensor_list), wholes)
    assert [int(r["t0", W][0]) for r in ranks] == [1, 3, 0, 2]


def test_owner_and_partial() -> None:
    tensor_list = tensors((3,), (2,))
    layout = Layout(
        {"dp": 2, "tp": 2}, [Rule("t0", (Owner(2),)), Rule("t1", (Partial("mean", "dp"),))]
    )
    bound = layout.bind(tensor_list)
    assert [bound.local(Key("t0", W), r) is not None for r in range(4)] == [
        False,
        False,
        True,
        False,
    ]
    assert [p.box for r in range(4) for p in bound.pieces(Key("t1", W), r)] == [Box((0,), (2,))] * 4
    assert (bound.reduction(Key("t0", W)), bound.reduction(Key("t1", W))) == (None, "mean")


def test_a_state_that_lacks_a_tensor_keeps_the_buffers_geometry() -> None:
    """A parameter that was never stepped has no exp_avg, but its engine leaves room for it."""
    infos = [TensorInfo("a", "master", "float32", (3,)), TensorInfo("b", "master", "float32", (2,)),
             TensorInfo("b", "exp_avg", "float32", (2,))]  # fmt: skip
    tensor_list = TensorList(tuple(infos), {"a": 0, "b": 0})
    bound = Layout({"dp": 1}, [Rule("*", (Flat("dp"),))]).bind(tensor_list)
    same(
        scatter(bound, numbered(tensor_list))[0]["flat:0", "exp_avg"],
        np.array([FILLER] * 3 + [5, 6]),
    )
    assert (
        gather(bound, scatter(bound, numbered(tensor_list))).keys() == numbered(tensor_list).keys()
    )
