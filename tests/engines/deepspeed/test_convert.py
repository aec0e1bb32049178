"""Real DeepSpeed checkpoints, converted: still the engine's own values, for every reader and under other layouts."""

from __future__ import annotations

from itertools import cycle, product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import ucformat
from tests.engines.deepspeed.conftest import CHOSEN, RANKS, pairs_that_never_meet
from tests.fakes import same
from ucformat.reading.dtypes import numpy_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.engines import Made
    from ucformat.checkpoint import Checkpoint

pytestmark = pytest.mark.engine

#: Every stage, dtype and number of ranks; tied, frozen and offloaded parameters, sub-groups, dealt
#: groups.
SOURCES = [
    (2, "z1"),
    (2, "z3-subgroups"),
    (3, "z0-fp16"),
    (3, "z2-round"),
    (4, "z0-bf16"),
    (4, "z1-round-aligned"),
    (4, "z2-rmsprop"),
    (4, "z3-offload"),
]
#: With those, every two values of two options meet in one that is converted.
MORE = [
    (2, "z0-adafactor"),
    (2, "z1-elastic-sgd"),
    (2, "z2-offload"),
    (3, "z1-adafactor"),
    (3, "z2-sgd"),
    (3, "z3-hpz"),
    (4, "z0-sgd"),
    (4, "z1-bf16opt"),
    (4, "z2-adafactor"),
    (4, "z3-adafactor"),
    (4, "z3-sgd"),
]
SIZES: list[tuple[int | None, int | None]] = [(64, 128), (4096, 8192), (None, None)]
CONVERSIONS = [*product(SOURCES, SIZES), *zip(MORE, cycle(SIZES), strict=False)]
FLAT = ("master", "exp_avg", "exp_avg_sq", "square_avg", "momentum_buffer")

Arrays = dict[tuple[str, str], Any]


def test_every_two_values_of_two_options_meet() -> None:
    assert (
        pairs_that_never_meet([(ranks, spec["name"]) for ranks in RANKS for spec in CHOSEN[ranks]])
        == []
    )
    assert pairs_that_never_meet([source for source, _ in CONVERSIONS]) == []


def name_of(source: tuple[int, str]) -> str:
    return f"{source[1]}-world{source[0]}"


@pytest.fixture(params=SOURCES, ids=name_of, scope="module")
def made(request: pytest.FixtureRequest, chosen: Callable[[int, str], Made]) -> Made:
    return chosen(*request.param)


@pytest.fixture(scope="module")
def truth(made: Made) -> Arrays:
    """What the engine had in memory, by (name, state); of ZeRO 3 without the weights that it writes nowhere."""
    arrays = {
        (name, state): np.frombuffer(data, numpy_dtype(dtype)).reshape(shape)
        for (state, name), (dtype, shape, data) in made.truth.items()
    }
    if "z3" in made.name:
        arrays = {
            (n, s): a
            for (n, s), a in arrays.items()
            if s != "weight" or (n, "master") not in arrays
        }
    return arrays


def stored(ck: Checkpoint) -> set[tuple[str, str]]:
    return {(k.name, k.state) for k in ck.tensors}


def parts(a: Any) -> Iterator[Any]:
    """Slices of an array of this shape: rows, columns, single elements, steps, from the end, none."""
    yield ...
    if a.ndim:
        n = a.shape[0]
        yield from (
            slice(n // 3, -(-2 * n // 3)),
            slice(None, None, 3),
            slice(n, n),
            slice(-2, None),
        )
        yield (..., slice(a.shape[-1] // 2, None))
    if a.size:
        yield tuple(s // 2 for s in a.shape)
        yield tuple(slice(s // 4, s // 4 + 1 + s // 2) for s in a.shape)
        yield (*[slice(None)] * (a.ndim - 1), -1)[: a.ndim]


def check_slices(ck: Checkpoint, truth: Arrays) -> None:
    for key, a in truth.items():
        for part in parts(a):
            assert same(
                np.asarray(ck[key][part]), np.ascontiguousarray(a[part]).reshape(a[part].shape)
            ), (key, part)


def test_slices_read_in_place_are_the_engines(made: Made, truth: Arrays) -> None:
    ck = ucformat.open(made.checkpoint)
    assert stored(ck) == set(truth)
    check_slices(ck, truth)


@pytest.mark.parametrize(
    ("made", "sizes"),
    CONVERSIONS,
    indirect=["made"],
    ids=[f"{name_of(s)}-{n or 'default'}" for s, (n, _) in CONVERSIONS],
)
def test_converted_it_is_still_the_engines_bit_for_bit(
    made: Made, truth: Arrays, tmp_path: Path, sizes: tuple[int | None, int | None]
) -> None:
    import tensorstore
    import zarr

    ucformat.register_zarr_dtypes()
    ck = ucformat.convert(
        made.checkpoint, tmp_path / "dst", chunk_bytes=sizes[0], shard_bytes=sizes[1]
    )
    assert stored(ck) == set(truth)
    assert ucformat.verify(ck)
    group: Any = zarr.open_group(ck.zarr_url, mode="r")
    docs = {(d.name, d.state): d for d in ck.manifest.tensors}
    for key, a in truth.items():
        assert same(ck[key][...], a), key
        path = str(docs[key].path)
        assert same(np.asarray(group[path.removeprefix(f"data/{ck.manifest.attempt}/")][...]), a), (
            key
        )
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{ck.url}/{path}"}}
        assert same(np.asarray(tensorstore.open(spec).result().read().result()), a), key
    if sizes[0] == 64:
        check_slices(ck, truth)
        embed = docs["embed.weight", "weight" if ("embed.weight", "weight") in truth else "master"]
        files = [p for p in (tmp_path / "dst" / str(embed.path) / "c").rglob("*") if p.is_file()]
        assert len(files) > 2  # it really crosses shards


def test_converted_it_says_of_itself_what_it_said_in_place(
    made: Made, truth: Arrays, tmp_path: Path
) -> None:
    source = ucformat.open(made.checkpoint)
    ck = ucformat.convert(source, tmp_path / "dst")
    assert dict(ck.aliases) == made.facts["tied"]
    for alias, name in made.facts["tied"].items():
        state = source[name].state
        assert same(ck[alias][...], truth[name, state])
    assert ck.metadata.step == 3
    assert ck.metadata.engine == {"name": "deepspeed", "version": made.facts["version"]}
    assert ck.metadata.layout == dict(source.metadata.layout)
    assert ck.objects == source.objects
    assert ck.objects["lr_scheduler"] == {"last_batch_iteration": 2}
    assert [dict(g) for g in ck.metadata.groups] == [dict(g) for g in source.metadata.groups]
    for group, names, hyper in zip(
        ck.metadata.groups, made.facts["groups"], made.facts["hyper"], strict=True
    ):
        assert sorted(group["params"]) == sorted(
            n for n in names if n in group["params"] or n != "idle.nothing"
        )
        assert (group["lr"], group["weight_decay"]) == (hyper["lr"], hyper["weight_decay"])
    assert ck.manifest.lineage[0].url == source.home


def test_client_state_with_tensors_survives(
    chosen: Callable[[int, str], Made], tmp_path: Path
) -> None:
    source = ucformat.open(chosen(3, "z3-client").checkpoint)
    ck = ucformat.convert(source, tmp_path / "dst", chunk_bytes=4096, shard_bytes=1 << 16)
    assert ucformat.verify(ck)
    assert ck.objects == source.objects
    assert ck.objects["client_state"]["nan"] == {"$float": "nan"}
    assert ck.objects["client_state"]["rng"]["$tensor"]["shape"] == [64]
    assert ck.objects["client_state"]["ema"]["big.weight"] == {
        "$ref": "client_state.ema.big.weight"
    }
    assert [k for k in ck.tensors if k.name == "rank2.client_state.own"]
    assert ck.tensors.keys() == source.tensors.keys()
    for key in source.tensors:
        assert same(ck[key.name, key.state][...], source[key.name, key.state][...]), key


COLUMN, ROW = (
    ("embed.weight", "blocks.*.up.weight", "blocks.*.up.bias", "head.weight"),
    ("blocks.*.down.weight",),
)


def layout(tp: int, dp: int) -> ucformat.Layout:
    """Tensor parallelism of the matrices, and ZeRO-1's flat groups over the rest."""
    return ucformat.Layout.parse(
        {
            "version": 1,
            "mesh": {"dp": dp, "tp": tp},
            "rules": [
                {"match": "*", "states": ["step"], "place": ["replicate"]},
                {"match": list(COLUMN), "place": [{"shard": 0, "over": "tp"}]},
                {"match": list(ROW), "place": [{"shard": 1, "over": "tp"}]},
                {"match": "*", "place": ["replicate"]},
            ],
            "data": [
                {
                    "match": "*",
                    "states": list(FLAT),
                    "place": [{"flat": "optimizer", "over": "dp", "group_pad": 2}],
                },
                {"match": "*", "place": ["replicate"]},
            ],
        }
    )


def reference(truth: Arrays, groups: list[list[str]], tp: int, dp: int, rank: int) -> Arrays:
    """What the rank holds, by NumPy alone: local arrays, and for each group and state a slice of the joined ones."""
    d, t = divmod(rank, tp)

    def local(name: str, state: str) -> Any:
        a, kind = truth[name, state], name.rsplit(".", 2)[-2:]
        dim = 1 if "down" in kind else 0 if kind[0] in ("embed", "up", "head") else None
        if dim is None or state == "step" or tp == 1:
            return a
        first = -(-a.shape[dim] // tp)
        return np.split(a, [first], axis=dim)[t]

    out = {(n, s): local(n, s) for n, s in truth if s not in FLAT}
    for g, names in enumerate(groups):
        for state in FLAT:
            joined = [local(n, state).reshape(-1) for n in names if (n, state) in truth]
            if not joined:
                continue
            flat = np.concatenate(joined)
            total = -(-flat.size // (2 * dp)) * 2 * dp
            flat = np.concatenate([flat, np.zeros(total - flat.size, flat.dtype)])
            out[f"flat:{g}", state] = np.split(flat, dp)[d]
    return out


@pytest.mark.parametrize(("tp", "dp"), [(1, 3), (2, 1), (2, 3)])
def test_every_rank_of_another_layout_holds_slices_of_the_truth(
    made: Made, truth: Arrays, tmp_path: Path, tp: int, dp: int
) -> None:
    source = ucformat.open(made.checkpoint)
    checkpoints = [
        source,
        ucformat.convert(source, tmp_path / "dst", chunk_bytes=64, shard_bytes=256),
    ]
    where = layout(tp, dp)
    trained = {n for n, s in truth if s in FLAT}
    groups = [[n for n in names if n in trained] for names in made.facts["groups"]]
    for ck in checkpoints:
        for rank in range(tp * dp):
            plan = ck.plan(where, rank)
            found = {k: a for k, a in plan.execute().items() if k in {b.key for b in plan.buffers}}
            expected = reference(truth, groups, tp, dp, rank)
            assert set(found) == set(expected)
            for key, a in expected.items():
                assert same(found[key], np.ascontiguousarray(a).reshape(a.shape)), (rank, key)
