"""Ranks of the paper's targets, read from one source, against plain NumPy that lays out bytes as DeepSpeed does.

The targets are those of the figure "single source" of the Universal Checkpointing paper: (TP, PP,
DP, ZeRO stage, SP).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ucformat
from tests.fakes import Arrays, FakeSource, random_array, same
from ucformat.checkpoint import Checkpoint
from ucformat.errors import LayoutError, UsageError
from ucformat.storage.memory import MemoryStore
from ucformat.storage.wrappers import RecordingStore

TARGETS = [
    (1, 1, 1, 1, 1),
    (1, 1, 2, 3, 1),
    (1, 1, 2, 1, 2),
    (1, 1, 4, 2, 1),
    (1, 1, 4, 3, 1),
    (1, 2, 2, 1, 1),
    (2, 1, 1, 1, 1),
    (2, 1, 2, 1, 1),
    (2, 1, 2, 2, 1),
    (2, 2, 1, 1, 1),
    (2, 2, 2, 1, 1),
]
LAYERS = 3
COLUMN, ROW = (
    ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head"),
    ("o_proj", "down_proj"),
)
FLAT = ("master", "exp_avg", "exp_avg_sq")


def model() -> dict[str, tuple[int, ...]]:
    """A Llama of odd sizes."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (211, 30)}
    for i in range(LAYERS):
        p = f"model.layers.{i}"
        shapes |= {
            f"{p}.self_attn.q_proj.weight": (30, 30),
            f"{p}.self_attn.k_proj.weight": (6, 30),
            f"{p}.self_attn.v_proj.weight": (6, 30),
            f"{p}.self_attn.o_proj.weight": (30, 30),
            f"{p}.mlp.gate_proj.weight": (41, 30),
            f"{p}.mlp.up_proj.weight": (41, 30),
            f"{p}.mlp.down_proj.weight": (30, 41),
            f"{p}.input_layernorm.weight": (30,),
        }
    return shapes | {"model.norm.weight": (30,), "lm_head.weight": (211, 30)}


GROUPS = [[n for n, s in model().items() if (len(s) == 2) == wide] for wide in (True, False)]


def source_arrays() -> Arrays:
    arrays: Arrays = {}
    for i, (name, shape) in enumerate(model().items()):
        arrays[name, "weight"] = random_array(shape, "bfloat16", i)
        for j, state in enumerate(FLAT):
            arrays[name, state] = random_array(shape, "float32", 1000 * j + i)
        arrays[name, "step"] = np.array(7.0, np.float32)
    return arrays


ARRAYS = source_arrays()


def layout(tp: int, pp: int, dp: int, stage: int, sp: int) -> ucformat.Layout:
    flat: dict[str, Any] = {"flat": "optimizer", "over": ["dp", "sp"]}
    flat |= {"cut": "before_join"} if stage == 3 else {"group_pad": 2}
    return ucformat.Layout.parse(
        {
            "version": 1,
            "mesh": {"pp": pp, "dp": dp, "sp": sp, "tp": tp},
            "stages": [
                {
                    "match": r"/model\.layers\.(\d+)\..*/",
                    "place": [{"stage": [0, 2][:pp], "over": "pp"}],
                },
                {"match": "model.embed_tokens.weight", "place": [{"stage": 0, "over": "pp"}]},
                {"match": "*", "place": [{"stage": -1, "over": "pp"}]},
            ],
            "rules": [
                {"match": "*", "states": ["step"], "place": ["replicate"]},
                {
                    "match": [f"*.{n}.weight" for n in COLUMN] + ["lm_head.weight"],
                    "place": [{"shard": 0, "over": "tp"}],
                },
                {"match": [f"*.{n}.weight" for n in ROW], "place": [{"shard": 1, "over": "tp"}]},
                {"match": "*", "place": ["replicate"]},
            ],
            "data": [
                {
                    "match": "*",
                    "states": list(FLAT) + (["weight"] if stage == 3 else []),
                    "place": [flat],
                },
                {"match": "*", "place": ["replicate"]},
            ],
        }
    )


def reference(target: tuple[int, int, int, int, int], rank: int) -> dict[tuple[str, str], Any]:
    """What the rank holds: whole local arrays, and flat buffers by (`flat:<group>`, state)."""
    tp, pp, dp, stage, sp = target
    rest, t = divmod(rank, tp)
    rest, s = divmod(rest, sp)
    p, d = divmod(rest, dp)
    ways, way = dp * sp, d * sp + s

    def held(name: str) -> bool:
        if ".layers." in name:
            return pp == 1 or p == (int(name.split(".")[2]) >= 2)
        return p == (0 if "embed" in name else pp - 1)

    def local(name: str, state: str) -> Any:
        a = ARRAYS[name, state]
        if state == "step" or tp == 1:
            return a
        dim = 0 if any(c in name for c in COLUMN) else 1 if any(r in name for r in ROW) else None
        if dim is None:
            return a
        first = -(-a.shape[dim] // tp)
        return np.split(a, list(range(first, a.shape[dim], first)), axis=dim)[t]

    out: dict[tuple[str, str], Any] = {}
    for state in ("weight", *FLAT, "step"):
        is_flat = state in FLAT or (state == "weight" and stage == 3)
        for g, names in enumerate(GROUPS):
            mine = [n for n in names if held(n)]
            locals_ = [local(n, state) for n in mine]
            if not is_flat:
                out |= {(n, state): a for n, a in zip(mine, locals_, strict=True)}
                continue
            if not mine:
                continue
            if stage == 3:
                parts = []
                for a in locals_:
                    part = -(-a.size // ways)
                    padded = np.concatenate(
                        [a.reshape(-1), np.zeros(part * ways - a.size, a.dtype)]
                    )
                    parts.append(padded[way * part : (way + 1) * part])
                out[f"flat:{g}", state] = np.concatenate(parts)
            else:
                joined = np.concatenate([a.reshape(-1) for a in locals_])
                total = -(-joined.size // (2 * ways)) * 2 * ways
                joined = np.concatenate([joined, np.zeros(total - joined.size, joined.dtype)])
                out[f"flat:{g}", state] = np.split(joined, ways)[way]
    return out


@pytest.fixture(scope="module")
def checkpoints() -> list[Checkpoint]:
    groups = tuple({"params": names, "lr": 0.1} for names in GROUPS)
    foreign = Checkpoint(FakeSource.write(MemoryStore("targets"), ARRAYS, ranks=5, groups=groups))
    return [
        foreign,
        ucformat.convert(
            foreign, MemoryStore("targets-64"), chunk_bytes=64, shard_bytes=1024, overwrite=True
        ),
        ucformat.convert(foreign, MemoryStore("targets-default"), overwrite=True),
    ]


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: "tp{}-pp{}-dp{}-zero{}-sp{}".format(*t))
def test_every_rank_of_the_papers_targets(
    checkpoints: list[Checkpoint], target: tuple[int, int, int, int, int]
) -> None:
    where = layout(*target)
    tp, pp, dp, _, sp = target
    for ck in checkpoints:
        for rank in range(tp * pp * dp * sp):
            recorder = RecordingStore(ck.store)
            inner, ck.source.store = ck.source.store, recorder
            try:
                plan = ck.plan(where, rank)
                assert recorder.nbytes == 0  # a plan reads no tensor bytes
                found = plan.execute()
            finally:
                ck.source.store = inner
            assert recorder.nbytes == plan.bytes_read
            expected = reference(target, rank)
            buffers = {b.key for b in plan.buffers}
            assert buffers == set(expected)
            for key, a in expected.items():
                assert same(found[key], a), (rank, key)


def test_tensors_in_a_flat_buffer_are_views_of_it(checkpoints: list[Checkpoint]) -> None:
    found = checkpoints[0].plan(layout(1, 1, 2, 1, 1), 0).execute()
    embed, buffer = found["model.embed_tokens.weight", "exp_avg"], found["flat:0", "exp_avg"]
    assert np.shares_memory(embed, buffer)
    assert same(embed, ARRAYS["model.embed_tokens.weight", "exp_avg"].reshape(-1)[: embed.size])


def test_states_can_be_chosen_and_memory_given(checkpoints: list[Checkpoint]) -> None:
    plan = checkpoints[1].plan(layout(2, 1, 1, 1, 1), 1, states=["weight"])
    assert {b.key[1] for b in plan.buffers} == {"weight"}
    mine = {b.key: np.full(b.shape, 3, checkpoints[1][b.key].dtype) for b in plan.buffers}
    found = plan.execute(into=mine)
    assert all(found[k] is a for k, a in mine.items())
    assert all(same(a, reference((2, 1, 1, 1, 1), 1)[k]) for k, a in mine.items())


def test_wrong_memory_ranks_and_states_are_refused(checkpoints: list[Checkpoint]) -> None:
    ck, where = checkpoints[1], layout(2, 1, 1, 1, 1)
    plan = ck.plan(where, 0, states=["weight"])
    with pytest.raises(UsageError, match="has no buffer"):
        plan.execute(into={("nothing", "weight"): np.zeros(3)})
    with pytest.raises(UsageError, match="the array to fill has dtype float64"):
        plan.execute(into={("model.norm.weight", "weight"): np.zeros(30)})
    with pytest.raises(UsageError, match="there is no rank 2") as caught:
        ck.plan(where, 2)
    assert "0 to 1" in str(caught.value)
    with pytest.raises(UsageError, match="no tensor is stored in state 'momentum'"):
        ck.plan(where, 0, states="momentum")
    assert ck.plan(where, 0, states="weight").buffers == plan.buffers


def test_a_plan_prints_itself(checkpoints: list[Checkpoint]) -> None:
    text = str(checkpoints[2].plan(layout(2, 2, 2, 1, 1), 3))
    assert text.startswith("rank 3: ")
    for word in ("needed", "read", "unverified", "requests"):
        assert word in text


def test_renames_apply_before_rules() -> None:
    arrays = {("module.w", "weight"): random_array((4, 6), "float32")}
    ck = Checkpoint(FakeSource.write(MemoryStore("renames"), arrays))
    where = ucformat.Layout.parse(
        {
            "version": 1,
            "mesh": {"tp": 2},
            "renames": [{"from": r"module\.(.*)", "to": r"\1"}],
            "rules": [{"match": "w", "place": [{"shard": 1, "over": "tp"}]}],
        }
    )
    found = ck.plan(where, 1).execute()
    assert same(found["w", "weight"], np.ascontiguousarray(arrays["module.w", "weight"][:, 3:]))


def test_a_tensor_that_no_rule_matches_is_an_error_before_any_reading() -> None:
    ck = Checkpoint(
        FakeSource.write(MemoryStore("unmatched"), {("w", "weight"): random_array((4,), "float32")})
    )
    where = ucformat.Layout.parse(
        {"version": 1, "mesh": {"tp": 2}, "rules": [{"match": "x", "place": ["replicate"]}]}
    )
    with pytest.raises(LayoutError, match="w"):
        ck.plan(where, 0)


def test_padding_is_filled_from_the_source_where_it_kept_some_else_with_zeros() -> None:
    arrays = {
        ("embed", "weight"): random_array((10, 3), "float32"),
        ("embed", "weight.padding"): random_array((6, 3), "float32", 2),
    }
    where = ucformat.Layout.parse(
        {
            "version": 1,
            "mesh": {"tp": 2},
            "rules": [
                {
                    "match": "*",
                    "states": ["weight"],
                    "place": [{"shard": 0, "over": "tp", "pad_to": 16}],
                },
                {"match": "*", "place": ["replicate"]},
            ],
        }
    )
    whole = np.concatenate([arrays["embed", "weight"], arrays["embed", "weight.padding"]])
    kept = Checkpoint(FakeSource.write(MemoryStore("padding"), arrays))
    plan = kept.plan(where, 1, states=["weight"])
    assert same(plan.execute()["embed", "weight"], whole[8:])
    assert not plan.zero_filled
    del arrays["embed", "weight.padding"]
    plan = Checkpoint(FakeSource.write(MemoryStore("no-padding"), arrays)).plan(where, 1)
    whole[10:] = 0
    assert same(plan.execute()["embed", "weight"], whole[8:])
    assert sum(plan.zero_filled.values()) == 18
    assert "18 elements of padding" in str(plan)


def test_padding_is_no_tensor_of_its_own_unless_its_state_is_named() -> None:
    """Flat rules match every state, and the padding's shape is not its tensor's."""
    shapes = {"exp_avg": (10, 3), "exp_avg.padding": (6, 3), "lone.padding": (2,)}
    arrays = {
        ("embed", s): random_array(shape, "float32", i)
        for i, (s, shape) in enumerate(shapes.items())
    }
    groups = ({"params": ["embed"]},)
    ck = Checkpoint(FakeSource.write(MemoryStore("flat-padding"), arrays, groups=groups))
    lone: dict[str, Any] = {"match": "*", "states": ["lone*"], "place": ["replicate"]}
    cut: dict[str, Any] = {"match": "*", "place": [{"shard": 0, "over": "tp", "pad_to": 16}]}
    flat: dict[str, Any] = {"match": "*", "place": [{"flat": "optimizer", "over": "dp"}]}
    where = ucformat.Layout({"dp": 2, "tp": 2}, [lone, cut], data=[lone, flat])
    assert ucformat.fits(ck, where), ucformat.fits(ck, where).misfits
    found = ck.plan(where, 3).execute()  # the second half of the second half
    assert same(found["flat:0", "exp_avg"], arrays["embed", "exp_avg.padding"].reshape(-1)[-12:])
    assert same(
        found["embed", "lone.padding"], arrays["embed", "lone.padding"]
    )  # of no tensor that is there
    assert ("embed", "exp_avg.padding") not in found
    whole = ucformat.Layout({"dp": 1}, [{"match": "*", "place": ["replicate"]}])
    assert same(
        ck.plan(whole, 0, states=["exp_avg.padding"]).execute()["embed", "exp_avg.padding"],
        arrays["embed", "exp_avg.padding"],
    )


@pytest.mark.parametrize(("dim", "degree"), [(0, 3), (0, 7), (0, 8), (1, 2), (1, 4), (1, 8)])
def test_large_tensors_are_read_within_two_percent_of_what_is_needed(dim: int, degree: int) -> None:
    """A 16 MiB tensor for real: what a recording store counts is what the plan says."""
    a = random_array((1024, 4096), "float32")
    place = MemoryStore("large")
    if not list(place.list("data")):
        ucformat.convert(
            Checkpoint(FakeSource.write(MemoryStore("large-source"), {("w", "weight"): a})), place
        )
    recorder = RecordingStore(place)
    ck = ucformat.open(recorder)
    where = ucformat.Layout(
        mesh={"tp": degree}, rules=[{"match": "*", "place": [{"shard": dim, "over": "tp"}]}]
    )
    for rank in range(degree):
        plan = ck.plan(where, rank)
        recorder.clear()
        found = plan.execute()["w", "weight"]
        n = -(-a.shape[dim] // degree)
        expected = a[rank * n : (rank + 1) * n] if dim == 0 else a[:, rank * n : (rank + 1) * n]
        assert same(found, np.ascontiguousarray(expected))
        assert recorder.nbytes == plan.bytes_read
        assert plan.bytes_read <= 1.02 * plan.bytes_needed
