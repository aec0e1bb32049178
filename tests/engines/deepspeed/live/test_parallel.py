"""Engines of pipelines and experts save what engines of every other layout load, and load what these saved."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import ucformat
from tests.engines.deepspeed.live.compare import (
    differences,
    facts,
    groups_by_name,
    held,
    held_by_engine,
)
from tests.engines.deepspeed.live.conftest import run_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from tests.engines.deepspeed.live.compare import Held

pytestmark = pytest.mark.engine

TIED = {"tied": True, "dtype": "bf16", "groups": 2, "buffers": True}
PLAIN = {"tied": True, "accumulate": 2}
EXPERTS = {"model": "experts"}
TENSOR = {"model": "tensor"}
ROUTED = {"model": "routed"}
STACKED = {"model": "stacked", "layers": 2}
FIRST = {"data_first": True, "layers": 2}
FROZEN = {"dtype": "bf16", "freeze": "1.down", "groups": 2}
#: Name -> ranks and the engine: its options as `parallel.py` wants them. The family comes first.
SOURCES: dict[str, tuple[int, dict[str, Any]]] = {
    "pipe-z1": (4, {"pp": 2, "zero": 1, **TIED}),
    "pipe-z0": (4, {"pp": 2, "zero": 0, **PLAIN}),
    "pipe-bf16": (4, {"pp": 2, "zero": 1, "bf16_optimizer": True, **FROZEN}),
    "pipe-none-z3": (2, {"zero": 3, **TIED}),
    "pipe-none": (1, {"zero": None, **PLAIN}),
    "experts-z1": (4, {**EXPERTS, "ep": 2, "zero": 1, "dtype": "bf16", "groups": 2}),
    "experts-z2": (4, {**EXPERTS, "ep": 2, "zero": 2, "dtype": "bf16", **FIRST}),
    "experts-z0": (2, {**EXPERTS, "ep": 2, "zero": 0}),
    "experts-whole": (2, {**EXPERTS, "ep": 1, "zero": 1}),
    "tensor-z1": (4, {**TENSOR, "tp": 2, "zero": 1, "dtype": "bf16", "groups": 2}),
    "tensor-odd": (4, {**TENSOR, "tp": 2, "zero": 2, "even": False, "groups": 2}),
    "tensor-z0": (2, {**TENSOR, "tp": 2, "zero": 0, "even": False}),
    "tensor-z3": (4, {**TENSOR, "tp": 2, "zero": 3, "dtype": "bf16"}),
    "tensor-none": (2, {**TENSOR, "zero": 3, "even": False}),
    "both-pipe": (4, {**ROUTED, "pp": 2, "ep": 2, "zero": 1, "dtype": "bf16", "groups": 2}),
    "both-cut": (4, {**EXPERTS, "tp": 2, "ep": 2, "zero": 1, "dtype": "bf16"}),
    "stacked-z3": (4, {**STACKED, "ep": 2, "zero": 3, "data_first": True}),
    "lanes-z1": (4, {"pp": 2, "tp": 2, "zero": 1, **TIED}),
    "grids-z0": (4, {"pp": 2, "tp": 2, "zero": 0, **PLAIN}),
    "grids-none": (1, {"zero": None, **PLAIN}),
    "mixed-pipe": (4, {**ROUTED, "pp": 2, "ep": 2, "zero": 1, "dtype": "bf16"}),
    "mixed-cut": (4, {**EXPERTS, "tp": 2, "ep": 2, "zero": 1, "dtype": "bf16"}),
    "mixed-across": (4, {**EXPERTS, "tp": 2, "ep": 2, "cut": False, "zero": 2}),
    "stacks-z1": (4, {**STACKED, "ep": 2, "zero": 1, "dtype": "bf16"}),
}
#: Families of the second tier.
SECOND = ("mixed-", "stacks-", "grids-")
#: Whose own files DeepSpeed does not describe: how a pipeline's layers are cut.
UNDESCRIBED = ("lanes-z1", "grids-z0")


@dataclass(frozen=True)
class Load:
    """An engine on some ranks that loads what a source saved."""

    source: str
    world: int
    options: dict[str, Any]
    what: str = "zarr"
    #: Whether it computes as the source does, to the bit.
    same: bool = False
    more: dict[str, Any] = field(default_factory=dict)
    #: Whether DeepSpeed's own files of it can be read.
    readable: bool = True

    def __str__(self) -> str:
        kind = "-".join(f"{k}{v}" for k, v in self.options.items())
        return f"{self.source}-{self.what}-to-{kind}x{self.world}"

    @property
    def task(self) -> dict[str, Any]:
        options = {**SOURCES[self.source][1], "pp": 0, "bf16_optimizer": False, **self.options}
        return {"name": str(self), **options, **self.more, "load": self.source, "what": self.what}


# DeepSpeed's own files of a pipeline under ZeRO 0 do not have the keys of tied modules
NAMED = {"rename": {r"0\.weight": "tied_modules.embed.weight"}}
LOADS = [
    Load("pipe-z1", 4, {"pp": 2, "zero": 1}, same=True),
    Load("pipe-z0", 4, {"pp": 2, "zero": 0}, "packed", same=True),
    Load("pipe-bf16", 4, {"pp": 2, "zero": 1, "bf16_optimizer": True}, "own", same=True),
    Load("pipe-z1", 2, {"zero": 3}),
    Load("pipe-z1", 2, {"pp": 2, "zero": 0}, "own"),  # BF16_Optimizer without ZeRO
    Load("pipe-z0", 3, {"pp": 3, "zero": 1}, "packed"),
    Load("pipe-z0", 2, {"zero": 1}, "packed"),
    Load("pipe-z0", 2, {"pp": 2, "zero": 1}, "own", more=NAMED),
    # whose last stage has a tied module without a file
    Load("pipe-z0", 3, {"pp": 3, "zero": 0}, readable=False),
    Load("pipe-z0", 1, {"zero": None}),
    Load("pipe-bf16", 2, {"zero": 2}),
    Load("pipe-bf16", 1, {"pp": 1, "zero": 1}, "packed"),
    Load("pipe-none-z3", 4, {"pp": 2, "zero": 1}),
    Load("pipe-none-z3", 2, {"pp": 2, "zero": 1, "bf16_optimizer": True}, "own"),
    Load("pipe-none", 4, {"pp": 2, "zero": 1}),
    Load("pipe-none", 3, {"pp": 3, "zero": 0}, "packed", readable=False),
    Load("experts-z1", 4, {"ep": 2, "zero": 1}, same=True),
    Load("experts-z1", 4, {"ep": 4, "zero": 2}, "packed"),
    Load("experts-z1", 4, {"ep": 1, "zero": 1, "bf16_optimizer": True}, "own"),
    Load("experts-z1", 2, {"ep": 2, "zero": 0, "groups": 2}),
    Load("experts-z2", 4, {"ep": 2, "zero": 2}, "own", same=True),
    Load("experts-z2", 4, {"ep": 4, "zero": 1, "data_first": False}),
    Load("experts-z2", 2, {"ep": 1, "zero": 2}, "packed"),
    Load("experts-z0", 2, {"ep": 2, "zero": 0}, "packed", same=True),
    Load("experts-z0", 2, {"ep": 1, "zero": 2}),
    Load("experts-z0", 1, {"ep": 1, "zero": 0}, "own"),
    Load("experts-whole", 2, {"ep": 2, "zero": 0}, "own"),
    Load("experts-whole", 4, {"ep": 4, "zero": 1}),
    Load("tensor-z1", 4, {"tp": 2, "zero": 1}, same=True),
    Load("tensor-z1", 2, {"tp": 1, "zero": 3}, "packed"),
    Load("tensor-z1", 2, {"tp": 2, "zero": 1, "bf16_optimizer": True}, "own"),
    Load("tensor-odd", 4, {"tp": 2, "zero": 2}, "packed", same=True),
    Load("tensor-odd", 3, {"tp": 3, "zero": 1}),
    Load("tensor-odd", 2, {"tp": 1, "zero": 1}, "own"),
    Load("tensor-z0", 2, {"tp": 2, "zero": 0}, same=True),
    Load("tensor-z0", 4, {"tp": 2, "zero": 1}, "own"),
    Load("tensor-z0", 1, {"tp": 1, "zero": None}),
    Load("tensor-z3", 4, {"tp": 2, "zero": 3}, same=True),
    Load("tensor-z3", 2, {"tp": 2, "zero": 2}, "packed"),
    Load("tensor-none", 4, {"tp": 2, "zero": 1}),
    Load("tensor-none", 3, {"tp": 3, "zero": 0}, "own"),
    Load("both-pipe", 4, {"pp": 2, "ep": 2, "zero": 1}, same=True),
    Load("both-cut", 4, {"tp": 2, "ep": 4, "cut": False, "zero": 0}, "own"),
    Load("both-cut", 2, {"tp": 1, "ep": 1, "zero": 2}, "packed"),
    Load("stacked-z3", 4, {"ep": 2, "zero": 3}, "own", same=True),
    Load("stacked-z3", 2, {"ep": 1, "zero": 2, "data_first": False}),
    Load("lanes-z1", 4, {"pp": 2, "tp": 2, "zero": 1}, same=True, readable=False),
    Load("lanes-z1", 4, {"tp": 1, "zero": 3}, "packed"),
    Load("grids-z0", 2, {"pp": 2, "tp": 1, "zero": 1}),
    Load("grids-z0", 1, {"tp": 1, "zero": None}, "packed"),
    Load("grids-none", 4, {"pp": 2, "tp": 2, "zero": 0}, readable=False),
    Load("grids-none", 4, {"pp": 2, "tp": 2, "zero": 1}, "packed", readable=False),
    # in bf16, whose own files are refused
    Load("mixed-pipe", 4, {"pp": 2, "ep": 1, "zero": 0}, "own", readable=False),
    Load("mixed-cut", 4, {"tp": 2, "ep": 2, "zero": 1}, "packed", same=True),
    Load("mixed-across", 4, {"tp": 2, "ep": 2, "zero": 2}, "own", same=True),
    Load("mixed-across", 2, {"tp": 2, "ep": 1, "cut": True, "zero": 1}, "packed"),
    Load("stacks-z1", 4, {"ep": 2, "zero": 1}, same=True),
    Load("stacks-z1", 4, {"ep": 4, "zero": 3}, "packed"),
    Load("stacks-z1", 2, {"ep": 2, "zero": 0}, "own"),
]
# AutoTP cuts each half of it
FUSED = {"block.gate_up.weight", "block.gate_up.bias"}
ROWS = {"block.up.weight", "block.up.bias", "block.down.weight", "block.out.weight"}
PARTS = ("up.weight", "up.bias", "down.weight")
BLOCK = {f"block.{rest}" for rest in PARTS}
EXPERT = "moe.0.deepspeed_moe.experts.deepspeed_experts."
#: What no description covers: also the parts of flat buffers in which ranks hold unequal numbers of elements.
LISTED = {
    "tensor-z1": FUSED,
    "tensor-z3": FUSED,
    "tensor-z0": FUSED,
    "tensor-odd": {*FUSED, *ROWS, "lm_head.weight"},
    "both-cut": {*BLOCK, *(f"{EXPERT}{n}.{rest}" for n in range(4) for rest in PARTS)},
    "mixed-across": BLOCK,
}
LISTED["mixed-cut"] = LISTED["both-cut"]
#: The last of three stages has no vectors, so no group for them.
OTHER_GROUPS = Load("pipe-z1", 3, {"pp": 3})
#: World sizes, and tasks that are functions of `parallel.py`.
EDGES: list[tuple[int, dict[str, Any]]] = [
    (2, {"name": "pipe-extras", "edge": "extras"}),
    (2, {"name": "pipe-untied", "edge": "untied"}),
    (3, {**OTHER_GROUPS.task, "edge": "refused"}),
    (2, {"name": "tensor-unclear", "edge": "unclear"}),
    (2, {"name": "both-halves", "edge": "halves"}),
    (4, {"name": "lanes-own", "edge": "lanes"}),
]


def tiers(cases: Iterable[Any]) -> list[Any]:
    """Cases as parameters, those of the second tier marked."""
    marks = {True: (pytest.mark.matrix,), False: ()}
    return [pytest.param(c, id=str(c), marks=marks[str(c).startswith(SECOND)]) for c in cases]


def starts_of(family: str) -> list[tuple[int, list[dict[str, Any]]]]:
    """World sizes and tasks, start after start: each world saves once, and loads when its sources are saved."""
    sources = {name: source for name, source in SOURCES.items() if name.startswith(family)}
    saved: set[str] = set()
    left = [load for load in LOADS if load.source in sources]
    starts: list[tuple[int, list[dict[str, Any]]]] = []
    for world in (2, 1, 4, 2, 3, 1):
        new = [name for name, (n, _) in sources.items() if n == world and name not in saved]
        saved.update(new)
        ready = [load for load in left if load.world == world and load.source in saved]
        left = [load for load in left if load not in ready]
        tasks = [{"name": n, **sources[n][1]} for n in new] + [load.task for load in ready]
        starts += [(world, tasks)] if tasks else []
    assert not left
    for world, task in EDGES:
        if task["name"].startswith(family):
            next(tasks for ranks, tasks in reversed(starts) if ranks == world).append(task)
    return starts


@pytest.fixture(scope="session")
def made(shared: Path) -> Callable[[str], Path]:
    """Where the engine that saved under this name saved, and what loaded it loaded."""

    def folder(name: str) -> Path:
        family = name.partition("-")[0]
        return run_all(starts_of(family), shared / family, "parallel.py")

    return folder


def own_of(folder: Path, name: str) -> Held:
    """What an engine held, as it says itself."""
    found = held_by_engine(folder / name)
    # whose files under ZeRO 0 do not have the key of a tied module
    called = {"0.weight": "tied_modules.embed.weight"} if not _has_key(found) else {}
    return {(called.get(n, n), state): array for (n, state), array in found.items()}


def _has_key(found: Held) -> bool:
    return any(name.startswith(("tied_modules.", "4.")) for name, _ in found)


@pytest.mark.parametrize("name", tiers(name for name in SOURCES if name not in UNDESCRIBED))
def test_what_is_saved_is_what_the_engine_holds(made: Callable[[str], Path], name: str) -> None:
    folder = made(name) / name
    expected = own_of(made(name), name)
    for form in ("zarr", "packed"):
        assert not differences(held(folder / form), expected)
    assert set(facts(folder)["listed"]) == LISTED.get(name, set())
    if SOURCES[name][1]["zero"] is None:
        return
    ours, own = ucformat.open(str(folder / "zarr")), ucformat.open(str(folder / "own"))
    for axis in ("zero", "dp", "pp", "tp", "ep"):
        assert ours.manifest.layout.get(axis) == own.manifest.layout.get(axis)
    for kind in ("lr_scheduler", "global_steps", "global_samples", "skipped_steps"):
        assert ours.objects[kind] == own.objects[kind]
    if SOURCES[name][1]["zero"]:
        assert set(ours.names()) == set(own.names())
        assert ours.aliases == own.aliases
        assert groups_by_name(ours) == groups_by_name(own)


@pytest.mark.parametrize("load", tiers(LOADS))
def test_what_is_loaded_is_what_was_saved(made: Callable[[str], Path], load: Load) -> None:
    folder = made(load.source)
    saved = held(folder / load.source / "zarr")
    for form in ("zarr", "packed"):
        assert not differences(held(folder / str(load) / "again" / form), saved)
    if load.readable:
        assert not differences(own_of(folder, str(load)), saved)
    before, after = facts(folder / load.source)["saved"], facts(folder / str(load))
    both = before.keys() & after["loaded"].keys()
    assert {k: after["loaded"][k] for k in both} == {k: before[k] for k in both}
    assert after["report"] == [True, True, "resume" if load.same else "reshard"]


@pytest.mark.parametrize("load", tiers(LOADS))
def test_training_goes_on_as_if_it_had_not_stopped(made: Callable[[str], Path], load: Load) -> None:
    expected = facts(made(load.source) / load.source)["losses"]
    found = facts(made(load.source) / str(load))["losses"]
    if load.same:
        assert found == expected
    elif "model" in SOURCES[load.source][1] and load.world != SOURCES[load.source][0]:
        pass  # a gate's loss of balance is that of a rank's part of the batch
    else:
        exact = SOURCES[load.source][1].get("dtype", "fp32") == "fp32"
        np.testing.assert_allclose(found, expected, rtol=1e-6 if exact else 2e-2)


def test_values_of_all_stages_are_kept(made: Callable[[str], Path]) -> None:
    found = facts(made("pipe") / "pipe-extras")["ranks"]
    assert found == [{"good": True, "here": 1}, {"good": True, "here": 1}]
    ck = ucformat.open(str(made("pipe") / "pipe-extras" / "saved"))
    assert ck.objects["buffer_names"] == ["1.scale", "2.scale"]
    assert set(ck.objects["module"]) == {"1._extra_state", "2._extra_state"}


def test_copies_of_a_tied_module_that_differ_are_refused(made: Callable[[str], Path]) -> None:
    """What is not in `tied_weight_attr` each stage trains by itself."""
    found = facts(made("pipe") / "pipe-untied")["ranks"]
    for rank in found:
        assert "tied_modules.embed.shift (" in rank["told"]
        assert "has a different value on rank 1 than on rank 0" in rank["told"]
        assert 'replicas="first"' in rank["told"]
        assert not rank["committed"]
    assert (
        "tied_modules.embed.shift"
        in ucformat.open(str(made("pipe") / "pipe-untied" / "first")).names()
    )


def test_a_scheduler_of_other_groups_is_refused(made: Callable[[str], Path]) -> None:
    for told in facts(made("pipe") / str(OTHER_GROUPS))["ranks"]:
        assert told.startswith("StateMismatch")
        assert "the object lr_scheduler: it is for 2 optimizer groups, and this rank has 1" in told


def test_cuts_that_are_not_described_are_refused(made: Callable[[str], Path]) -> None:
    for found in facts(made("tensor") / "tensor-unclear")["ranks"]:
        assert not found["good"]
        for name, says in (
            ("silent", "its layer does not tell how"),
            ("reason", "its heads are interleaved"),
            ("scaled", "scales its parts"),
        ):
            for told in (found[name], found[f"load {name}"]):
                assert told.startswith("UnsupportedError")
                assert "AutoTP has cut block.up.weight" in told
                assert says in told
        for zero in (0, 1):
            told = found[f"unlike {zero}"]
            assert "block.norm.bias (weight) has a different value on rank 1" in told
        assert not found["committed"]


def test_layers_of_a_programs_own_in_a_pipeline_are_refused(made: Callable[[str], Path]) -> None:
    for rank in facts(made("lanes") / "lanes-own")["ranks"]:
        for told in (rank["told"], rank["loaded"]):
            assert told.startswith("UnsupportedError")
            assert "a layer of the program's own has cut" in told
            assert "up.weight over 2 ranks" in told
        assert not rank["committed"]


def test_halves_of_experts_are_refused(made: Callable[[str], Path]) -> None:
    for rank in facts(made("both") / "both-halves")["ranks"]:
        assert rank["told"].startswith("UnsupportedError")
        assert "an expert's, of which no other rank has the rest" in rank["told"]
        assert rank["opened"].startswith("UnsupportedError")
        assert "no other rank has the rest" in rank["opened"]
        assert not rank["committed"]


@pytest.mark.parametrize(
    "name",
    tiers(["experts-z1", "experts-z2", "experts-z0", "both-pipe", "both-cut", "mixed-across"]),
)
def test_no_two_experts_are_one(made: Callable[[str], Path], name: str) -> None:
    """Ranks that number their experts from zero must not save, or load, those of the first rank (DeepSpeed 6589)."""
    ck = ucformat.open(str(made(name) / name / "zarr"))
    layers: dict[str, set[bytes]] = {}
    for tensor in ck.names():
        prefix, experts, rest = tensor.partition("deepspeed_experts.")
        if experts and rest.endswith("up.weight"):
            layers.setdefault(prefix, set()).add(ck[tensor].read().tobytes())
    assert layers
    assert all(len(experts) == 4 for experts in layers.values())


@pytest.mark.parametrize("name", tiers(["stacked-z3", "stacks-z1"]))
def test_no_two_experts_of_a_stack_are_one(made: Callable[[str], Path], name: str) -> None:
    ck = ucformat.open(str(made(name) / name / "zarr"))
    stacks = [key for key in ck.tensors if ".experts." in key.name and key.state != "step"]
    assert stacks
    for key in stacks:
        assert len({expert.tobytes() for expert in ck[key.name, key.state].read()}) == 4
