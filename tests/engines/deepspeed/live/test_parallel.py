"""Engines of pipelines save what engines of every other layout load, and load what these saved."""

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
    from collections.abc import Callable
    from pathlib import Path

    from tests.engines.deepspeed.live.compare import Held

pytestmark = pytest.mark.engine

TIED = {"tied": True, "dtype": "bf16", "groups": 2, "buffers": True}
PLAIN = {"tied": True, "accumulate": 2}
FROZEN = {"dtype": "bf16", "freeze": "1.down", "groups": 2}
#: Name -> ranks and the engine: its options as `parallel.py` wants them.
SOURCES: dict[str, tuple[int, dict[str, Any]]] = {
    "pipe-z1": (4, {"pp": 2, "zero": 1, **TIED}),
    "pipe-z0": (4, {"pp": 2, "zero": 0, **PLAIN}),
    "pipe-bf16": (4, {"pp": 2, "zero": 1, "bf16_optimizer": True, **FROZEN}),
    "z3": (2, {"zero": 3, **TIED}),
    "alone": (1, {"zero": None, **PLAIN}),
}


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
    # which is BF16_Optimizer without ZeRO
    Load("pipe-z1", 2, {"pp": 2, "zero": 0}, "own", readable=False),
    Load("pipe-z0", 3, {"pp": 3, "zero": 1}, "packed"),
    Load("pipe-z0", 2, {"zero": 1}, "packed"),
    Load("pipe-z0", 2, {"pp": 2, "zero": 1}, "own", more=NAMED),
    # whose last stage has a tied module without a file
    Load("pipe-z0", 3, {"pp": 3, "zero": 0}, readable=False),
    Load("pipe-z0", 1, {"zero": None}),
    Load("pipe-bf16", 2, {"zero": 2}),
    Load("pipe-bf16", 1, {"pp": 1, "zero": 1}, "packed"),
    Load("z3", 4, {"pp": 2, "zero": 1}),
    Load("z3", 2, {"pp": 2, "zero": 1, "bf16_optimizer": True}, "own"),
    Load("alone", 4, {"pp": 2, "zero": 1}),
    Load("alone", 3, {"pp": 3, "zero": 0}, "packed", readable=False),
]


@pytest.fixture(scope="session")
def made(shared: Path) -> Callable[[], Path]:
    """Where all of these saved and loaded."""
    starts: list[tuple[int, list[dict[str, Any]]]] = []
    saved: set[str] = set()
    left = list(LOADS)
    for world in (2, 1, 4, 2, 3, 1):
        new = [n for n, (ranks, _) in SOURCES.items() if ranks == world and n not in saved]
        saved.update(new)
        ready = [load for load in left if load.world == world and load.source in saved]
        left = [load for load in left if load not in ready]
        tasks = [{"name": n, **SOURCES[n][1]} for n in new] + [load.task for load in ready]
        starts += [(world, tasks)] if tasks else []
    assert not left
    loads_of_three = next(tasks for world, tasks in starts if world == 3)
    loads_of_three.append({**Load("pipe-z1", 3, {"pp": 3}).task, "edge": "refused"})
    starts[0][1].extend({"name": edge, "edge": edge} for edge in ("extras", "untied"))
    return lambda: run_all(starts, shared / "parallel", "parallel.py")


def own_of(folder: Path, name: str) -> Held:
    """What an engine held, as it says itself."""
    found = held_by_engine(folder / name)
    # whose files under ZeRO 0 do not have the key of a tied module
    called = {"0.weight": "tied_modules.embed.weight"} if not _has_key(found) else {}
    return {(called.get(n, n), state): array for (n, state), array in found.items()}


def _has_key(found: Held) -> bool:
    return any(name.startswith(("tied_modules.", "4.")) for name, _ in found)


@pytest.mark.parametrize("name", list(SOURCES))
def test_what_is_saved_is_what_the_engine_holds(made: Callable[[], Path], name: str) -> None:
    folder = made() / name
    expected = own_of(made(), name)
    for form in ("zarr", "packed"):
        assert not differences(held(folder / form), expected)
    assert not facts(folder)["listed"]
    if name == "alone":
        return
    ours, own = ucformat.open(str(folder / "zarr")), ucformat.open(str(folder / "own"))
    for axis in ("zero", "dp", "pp"):
        assert ours.manifest.layout.get(axis) == own.manifest.layout.get(axis)
    for kind in ("lr_scheduler", "global_steps", "global_samples", "skipped_steps"):
        assert ours.objects[kind] == own.objects[kind]
    if SOURCES[name][1]["zero"]:
        assert set(ours.names()) == set(own.names())
        assert ours.aliases == own.aliases
        assert groups_by_name(ours) == groups_by_name(own)


@pytest.mark.parametrize("load", LOADS, ids=str)
def test_what_is_loaded_is_what_was_saved(made: Callable[[], Path], load: Load) -> None:
    folder = made()
    saved = held(folder / load.source / "zarr")
    for form in ("zarr", "packed"):
        assert not differences(held(folder / str(load) / "again" / form), saved)
    if load.readable:
        assert not differences(own_of(folder, str(load)), saved)
    before, after = facts(folder / load.source)["saved"], facts(folder / str(load))
    both = before.keys() & after["loaded"].keys()
    assert {k: after["loaded"][k] for k in both} == {k: before[k] for k in both}
    assert after["report"] == [True, True, "resume" if load.same else "reshard"]


@pytest.mark.parametrize("load", LOADS, ids=str)
def test_training_goes_on_as_if_it_had_not_stopped(made: Callable[[], Path], load: Load) -> None:
    expected = facts(made() / load.source)["losses"]
    found = facts(made() / str(load))["losses"]
    if load.same:
        assert found == expected
    else:
        exact = SOURCES[load.source][1].get("dtype", "fp32") == "fp32"
        np.testing.assert_allclose(found, expected, rtol=1e-6 if exact else 2e-2)


def test_values_of_all_stages_are_kept(made: Callable[[], Path]) -> None:
    found = facts(made() / "extras")["ranks"]
    assert found == [{"good": True, "here": 1}, {"good": True, "here": 1}]
    ck = ucformat.open(str(made() / "extras" / "saved"))
    assert ck.objects["buffer_names"] == ["1.scale", "2.scale"]
    assert set(ck.objects["module"]) == {"1._extra_state", "2._extra_state"}


def test_copies_of_a_tied_module_that_differ_are_refused(made: Callable[[], Path]) -> None:
    """What is not in `tied_weight_attr` each stage trains by itself."""
    found = facts(made() / "untied")["ranks"]
    for rank in found:
        assert "tied_modules.embed.shift (" in rank["told"]
        assert "has a different value on rank 1 than on rank 0" in rank["told"]
        assert 'replicas="first"' in rank["told"]
        assert not rank["committed"]
    assert "tied_modules.embed.shift" in ucformat.open(str(made() / "untied" / "first")).names()


def test_a_scheduler_of_other_groups_is_refused(made: Callable[[], Path]) -> None:
    """The last of three stages has no vectors, so no group for them."""
    for told in facts(made() / str(Load("pipe-z1", 3, {"pp": 3})))["ranks"]:
        assert told.startswith("StateMismatch")
        assert "the object lr_scheduler: it is for 2 optimizer groups, and this rank has 1" in told
