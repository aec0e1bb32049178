"""Saved through `torch.distributed.checkpoint` under one layout, loaded through it under others."""

from __future__ import annotations

import fcntl
import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

import ucformat
from tests.engines import make_deepspeed
from tests.torch.running import fork
from tests.torch.specs import LAYOUTS, RECIPES, tolerance
from tests.torch.verdict import Truth, checkpoint_differences, differences, read_losses, relative

if TYPE_CHECKING:
    from pathlib import Path

SMALL = {"chunk_bytes": 2048, "shard_bytes": 16384}
#: Source -> layout, recipe, and how each of its checkpoints is saved.
SOURCES: dict[str, tuple[str, str, dict[str, dict[str, Any]]]] = {
    "two": (
        "fsdp2-2",
        "odd",
        {
            "zarr": SMALL,
            "packed": {"form": "packed", "spelling": "flat"},
            "own": {},
            "thread": {},
            "process": SMALL,
        },
    ),
    "four": (
        "fsdp2-2-tp-2",
        "tied",
        {"zarr": {**SMALL, "spelling": "flat"}, "packed": {"form": "packed"}},
    ),
    "stages": ("pp-2-fsdp2-2", "frozen", {"zarr": {"spelling": "nested"}}),
}
#: Source, checkpoint, layout and spelling of a load; the ranks of the layouts go up, so that four
#: runs do it all.
LOADS = [
    ("two", "own", "fsdp2-2", "nested"),
    ("two", "zarr", "fsdp2-2-tp-2", "flat"),
    ("two", "process", "hsdp-2x2", "nested"),
    ("two", "packed", "fsdp2-3", "nested"),
    ("four", "zarr", "fsdp2-3", "nested"),
    ("two", "zarr", "fsdp2-1", "flat"),
    ("four", "packed", "fsdp2-1", "flat"),
    ("stages", "zarr", "fsdp2-1", "nested"),
    ("stages", "zarr", "pp-2-fsdp2-2", "flat"),
]
RUNS = (2, 4, 3, 1)  # ranks; each loads what the ones before it saved
PROBES = {
    2: ["failure_on_one_rank", "several_shards"],
    4: ["values_of_each_rank", "some_ranks", "kept_plans", "without_collectives"],
}


def world(layout: str) -> int:
    return LAYOUTS[layout][0]


def save_job(at: Path, source: str) -> dict[str, Any]:
    layout, recipe, saves = SOURCES[source]
    actions: list[dict[str, Any]] = [
        {"train": 2},
        {"truth": str(at / source / "truth")},
        {"losses": str(at / source / "discarded")},
    ]
    for name, options in saves.items():
        url = str(at / source / name)
        if name == "own":
            actions += [{"save": url}]
        elif name in (
            "thread",
            "process",
        ):  # training goes on while it is written, and then begins at it again
            actions += [{"dcp_save": url, "how": name, **options}, {"train": 2}, {"dcp_wait": True}]
            actions += [{"losses": str(at / source / f"losses-{name}")}, {"dcp_load": url}]
        else:
            actions += [{"dcp_save": url, **options}]
    after = [{"train": 2}, {"losses": str(at / source / "losses")}]
    return {**RECIPES[recipe], "layout": LAYOUTS[layout][1], "actions": [*actions, *after]}


def load_job(at: Path, load: tuple[str, str, str, str]) -> dict[str, Any]:
    source, name, layout, spelling = load
    recipe, out = RECIPES[SOURCES[source][1]], at / "-".join(load)
    actions = [
        {"dcp_load": str(at / source / name), "spelling": spelling},
        {"truth": str(out / "truth")},
    ]
    after = [{"train": 2}, {"losses": str(out / "losses")}]
    model = {**recipe["model"], "seed": 1}
    return {**recipe, "model": model, "layout": LAYOUTS[layout][1], "actions": [*actions, *after]}


def jobs_of(at: Path, ranks: int) -> list[dict[str, Any]]:
    saves = [save_job(at, s) for s, (layout, _, _) in SOURCES.items() if world(layout) == ranks]
    loads = [load_job(at, x) for x in LOADS if world(x[2]) == ranks]
    return [*saves, *loads, *({"probe": p, "at": str(at / p)} for p in PROBES.get(ranks, []))]


def run(at: Path, name: str, ranks: int, jobs: list[dict[str, Any]]) -> None:
    document = at / f"{name}.json"
    document.write_text(json.dumps(jobs))
    fork(ranks, ["-m", "tests.engines.pytorch.dcp_program", str(document)], at / f"{name}.log")


@pytest.fixture(scope="module")
def made(common: Path) -> Path:
    """Where everything was saved and loaded, once for all test processes of this session."""
    at = common / "torch-dcp"
    at.mkdir(exist_ok=True)
    with (at / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (at / "failed").exists():
            pytest.fail((at / "failed").read_text())
        for ranks in RUNS if not (at / "done").exists() else ():
            try:
                run(at, f"ranks-{ranks}", ranks, jobs_of(at, ranks))
            except AssertionError as error:
                (at / "failed").write_text(str(error))
                raise
        (at / "done").touch()
    return at


@pytest.mark.parametrize(
    ("source", "name"), [(s, n) for s, (_, _, saves) in SOURCES.items() for n in saves]
)
def test_what_is_saved_is_what_was_held(made: Path, source: str, name: str) -> None:
    truth = Truth.read(made / source / "truth")
    ck = ucformat.open(made / source / name)
    assert checkpoint_differences(ck, truth) == []
    assert ck.manifest.layout["world"] == world(SOURCES[source][0])


def test_training_goes_on_while_it_is_written(made: Path) -> None:
    """Losses beside a save in a thread, in a process, and after loading each, are those of every continuation."""
    losses = [read_losses(made / "two" / f"losses{end}") for end in ("-thread", "-process", "")]
    assert len(losses[0]) == 2
    assert losses == [losses[0]] * 3


@pytest.mark.parametrize("load", LOADS, ids="-".join)
def test_what_is_loaded_is_what_was_saved(made: Path, load: tuple[str, str, str, str]) -> None:
    source, _, layout, _ = load
    truth = Truth.read(made / "-".join(load) / "truth")
    assert differences(truth, Truth.read(made / source / "truth")) == []
    losses, expected = (read_losses(p / "losses") for p in (made / "-".join(load), made / source))
    if layout == SOURCES[source][0]:
        assert losses == expected
    else:
        assert relative(losses, expected) <= tolerance(SOURCES[source][1])


@pytest.mark.parametrize("probe", [p for probes in PROBES.values() for p in probes])
def test_what_the_probes_of_the_program_say(made: Path, probe: str) -> None:
    """They raised nothing, or the run would have failed; and they did something."""
    assert any((made / probe).rglob("manifest.json"))


@pytest.mark.engine
def test_a_deepspeed_checkpoint_loads_into_fsdp2_with_tp(tmp_path: Path) -> None:
    spec = {"name": "z3", "zero": 3, "dtype": "bf16", "freeze": "up"}
    source = make_deepspeed([spec], 2, tmp_path / "deepspeed")["z3"]
    run(tmp_path, "load", 4, [{"probe": "deepspeed", "at": str(source.folder)}])
    found = torch.load(source.folder / "loaded.pt")
    truth = source.truth
    states = {"weight", "exp_avg", "exp_avg_sq", "step"}
    wanted = {(s, n) for s, n in truth if s in states and 0 not in truth[s, n][1]}
    assert {s for s, _ in wanted} == states
    assert {tuple(key.split("/", 1)) for key in found["tensors"]} == wanted
    for state, name in wanted:
        master = state == "weight" and ("master", name) in truth
        dtype, shape, data = truth["master" if master else state, name]
        tensor = found["tensors"][f"{state}/{name}"]
        assert (str(tensor.dtype), tuple(tensor.shape)) == (f"torch.{dtype}", shape), (state, name)
        assert tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() == data, (
            state,
            name,
        )
    decay = {n: g["weight_decay"] for g in found["groups"] for n in g["params"]}
    given = zip(source.facts["groups"], source.facts["hyper"], strict=True)
    names = {n: h["weight_decay"] for names, h in given for n in names}
    assert decay == {n: names[n] for n in decay}
    assert len(set(decay.values())) == 2
    assert {g["lr"] for g in found["groups"]} == {h["lr"] for h in source.facts["hyper"]}
