"""Exports are loaded by DeepSpeed itself, and its state is compared bit for bit with that of the engine that saved."""

from __future__ import annotations

from functools import cache, partial
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest

import ucformat
from tests.engines import make_deepspeed
from tests.exporters.loading import Engines
from ucformat.jobs.export import export

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from tests.engines import Made

#: Of all engines here: odd sizes, two optimizer groups, buffers, a tied and a frozen parameter.
MODEL = {"tied": True, "freeze": "blocks.0.mix", "scalars": False, "empty": False, "after": 2}
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
FSDP = "fsdp2-fp32"
UNIVERSAL = "deepspeed-universal"
SOURCES = [
    {"name": FSDP, "dtype": "fp32", **MODEL, "freeze": "", "fsdp": True},
    *(
        {"name": f"z{z}-{dtype}", "zero": z, "dtype": dtype, **MODEL}
        for z in (0, 1, 2, 3)
        for dtype in DTYPES
    ),
]
#: Source, stage, ranks, whether by way of a universal checkpoint of ours, whether as DeepSpeed's
#: universal format.
Load = tuple[str, int, int, bool, bool]
CHOSEN: list[Load] = [
    ("z1-bf16", 1, 2, False, False),
    ("z1-bf16", 0, 2, False, False),
    ("z2-fp32", 2, 2, False, False),
    ("z0-fp32", 1, 2, True, False),
    ("z3-bf16", 2, 2, True, False),
    ("z0-bf16", 3, 2, False, False),
    ("z3-fp32", 3, 2, True, False),
    ("z3-bf16", 1, 2, False, True),
    ("z1-fp32", 3, 2, True, True),
    (FSDP, 2, 2, False, False),
    (FSDP, 3, 2, True, False),
    ("z2-bf16", 1, 3, True, False),
    ("z3-fp32", 0, 3, False, False),
    ("z1-bf16", 3, 3, False, False),
    ("z2-fp32", 2, 3, False, True),
    (FSDP, 1, 3, True, True),
    ("z3-bf16", 3, 1, False, False),
    ("z1-fp32", 2, 1, True, False),
]
ALL: list[Load] = [
    (name, stage, world, via, universal)
    for name, stage, world, via, universal in product(
        (str(s["name"]) for s in SOURCES), (0, 1, 2, 3), (1, 2, 3, 4), (False, True), (False, True)
    )
    if stage or not universal
]


def label(load: Load) -> str:
    name, stage, world, via, universal = load
    return f"{name}-to-{stage}-on-{world}{'-via' if via else ''}{'-universal' if universal else ''}"


def dtype_of(name: str) -> str:
    return name.partition("-")[2]


def exported(load: Load, sources: Mapping[str, Made], folder: Path) -> dict[str, Any]:
    """Export a source; returns the spec of the engine that loads it."""
    name, stage, world, via, universal = load
    options: dict[str, Any] = {"stage": stage} if universal else {"stage": stage, "world": world}
    ck = ucformat.open(sources[name].checkpoint)
    if name == FSDP:
        ck = ck.view([{"alias": {"head.weight": "embed.weight"}}])
        options["config"] = {
            "zero_optimization": {"stage": stage},
            "scheduler": {"type": "WarmupLR"},
        }
        options["buffers"] = [n for n in ck if n.endswith((".seen", ".mean")) or n == "mask"]
    if via:
        ucformat.convert(ck, folder / "ours")
        ck = ucformat.open(folder / "ours")
    export(ck, folder / "x", "deepspeed-universal" if universal else "deepspeed", **options)
    model = {**MODEL, "freeze": ""} if name == FSDP else MODEL
    return {
        "zero": stage,
        "dtype": dtype_of(name),
        "load": str(folder / "x"),
        "universal": universal,
        **model,
    }


@pytest.fixture(scope="session")
def engines(common: Path) -> Callable[[list[Load], str], Engines]:
    """The engines of some loads, by the name of their folder; stage 3, which changes torch for good, comes last."""

    @cache
    def made(name: str, loads: tuple[Load, ...]) -> Engines:
        last = sorted(loads, key=lambda load: load[1])
        by_name = {label(load): (load[2], partial(exported, load)) for load in last}
        return Engines(common / f"exports-{name}", "deepspeed/make_deepspeed.py", SOURCES, by_name)

    return lambda loads, name: made(name, tuple(loads))


def check(engines: Engines, load: Load) -> None:
    """Compare an engine that has loaded an export with the one that saved the source."""
    name, stage, world, _, universal = load
    before, after = engines.sources[name], engines.on(world)[label(load)]
    wanted, found = before.truth, after.truth
    whole = {n: found.pop(("fp32", n)) for s, n in list(found) if s == "fp32"}
    buffers = {n for s, n in wanted if s == "weight" and n.endswith((".seen", ".mean"))}
    for (state, tensor), value in found.items():
        if universal and tensor in buffers:
            continue  # DeepSpeed does not restore them
        reference = (
            wanted.get((state, tensor)) or wanted["weight", tensor]
        )  # a master of what has no fp32 copy
        assert value == reference, (state, tensor)
    assert {key for key in wanted if key[0] not in ("master", "weight")} <= found.keys()
    for tensor in (
        {n for s, n in wanted if s == "exp_avg"} if whole else ()
    ):  # what `zero_to_fp32` makes of the files
        assert (
            whole[tensor][2] == (wanted.get(("master", tensor)) or wanted["weight", tensor])[2]
        ), tensor
    if (
        not (universal and stage == 3) and "hyper" in before.facts
    ):  # of which DeepSpeed restores the first group's
        assert after.facts["hyper"] == before.facts["hyper"]
    if "counters" in before.facts:
        assert after.facts["counters"] == before.facts["counters"]
    if name == f"z{stage}-{dtype_of(name)}" and world == 2 and not universal:
        assert after.facts["losses"] == before.facts["losses"]
        assert (
            after.facts["client"].items()
            >= {**before.facts["client"], "5": repr({"of": [1, 2]})}.items()
        )


@pytest.mark.parametrize("load", CHOSEN, ids=label)
def test_deepspeed_loads_what_was_saved(
    engines: Callable[[list[Load], str], Engines], load: Load
) -> None:
    check(engines(CHOSEN, "chosen"), load)


@pytest.mark.matrix
@pytest.mark.parametrize("load", [one for one in ALL if one not in CHOSEN], ids=label)
def test_every_source_to_every_engine(
    engines: Callable[[list[Load], str], Engines], load: Load
) -> None:
    check(engines([one for one in ALL if one not in CHOSEN], "all"), load)


@pytest.mark.front("deepspeed-2", "deepspeed-universal-3")
@pytest.mark.parametrize(
    ("kind", "stage"),
    [("deepspeed", 0), ("deepspeed", 2), ("deepspeed", 3), (UNIVERSAL, 2), (UNIVERSAL, 3)],
)
def test_nothing_is_loaded_without_a_last_file(
    engines: Callable[[list[Load], str], Engines], tmp_path: Path, kind: str, stage: int
) -> None:
    source = engines(CHOSEN, "chosen").sources["z3-fp32"].checkpoint
    last = [
        f.key for f in ucformat.jobs.export.plan_export(source, kind, stage=stage).files if f.last
    ]
    specs = []
    for i, key in enumerate(last):
        place = tmp_path / f"without-{i}"
        export(source, place, kind, stage=stage)
        (place / key).unlink()
        options = {} if key.startswith("latest") else {"tag": "global_step3"}
        spec = {
            "zero": stage,
            "dtype": "fp32",
            "load": str(place),
            "load_options": options,
            "refused": True,
        }
        spec["universal"] = kind == UNIVERSAL
        specs.append({"name": f"refused-{i}", **spec, **MODEL})
    assert len(specs) == 2
    make_deepspeed(specs, 2, tmp_path / "engines")


def test_weights_alone(engines: Callable[[list[Load], str], Engines], tmp_path: Path) -> None:
    made = engines(CHOSEN, "chosen").sources["z2-fp32"]
    export(made.checkpoint, tmp_path / "hf", "safetensors")
    specs = []
    module = {"load_module_only": True}
    for stage, options in {
        0: module,
        2: module,
        3: {"load_optimizer_states": False, "load_lr_scheduler_states": False},
    }.items():
        place = tmp_path / f"weights-{stage}"
        buffers = ["mask", *(f"blocks.{i}.{name}" for i in (0, 1) for name in ("seen", "mean"))]
        export(
            tmp_path / "hf",
            place,
            "deepspeed",
            stage=stage,
            world=2,
            step=0,
            weights_only=True,
            buffers=buffers,
        )
        spec = {
            "zero": stage,
            "dtype": "fp32",
            "load": str(place),
            "load_options": options,
            "bare": True,
        }
        specs.append({"name": f"weights-{stage}", **MODEL, "after": 0, **spec})
    for name, after in make_deepspeed(specs, 2, tmp_path / "engines").items():
        for (state, tensor), value in after.truth.items():
            assert value == made.truth["weight", tensor], (name, state, tensor)
