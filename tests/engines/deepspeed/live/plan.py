"""Which engines save, which load what they saved, and in which starts of torchrun."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    Task = dict[str, Any]  # as train.py wants it

__all__ = ["KINDS", "RECIPES", "Load", "Source", "all_loads", "chosen_loads", "starts"]

KINDS: dict[str, int | None] = {"zero0": 0, "zero1": 1, "zero2": 2, "zero3": 3, "fsdp2": None}
WORLDS = (1, 2, 3)
#: What is loaded: our two forms, and DeepSpeed's own checkpoint.
SAVED = ("zarr", "packed", "own")

RECIPES: dict[str, dict[str, Any]] = {
    "plain": {"dtype": "fp32"},
    "tied": {"dtype": "bf16", "tied": True},
    "frozen": {"dtype": "fp16", "freeze": ["norm2", "embed"], "warmup": True},
    "sgd": {"dtype": "bf16", "optimizer": "sgd", "groups": 1, "freeze": ["layers.0.up"]},
    "counted": {"dtype": "bf16", "optimizer": "counted", "accumulate": 2, "empty": True},
}


#: Options of an engine, taken in turn; those of ZeRO 1 that want bf16 are left out elsewhere.
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "zero0": [{}, {"fused": True}],
    "zero1": [
        {"bf16_optimizer": True},
        {},
        {"options": {"parameter_alignment": True}},
        {"options": OFFLOAD},
    ],
    "zero2": [{"options": {"round_robin_gradients": True}}, {}, {"options": OFFLOAD}],
    "zero3": [
        {"options": {"sub_group_size": 60}},
        {"options": {"stage3_param_persistence_threshold": 50}},
        {"options": {**OFFLOAD, "offload_param": {"device": "cpu"}}},
        {},
    ],
    "fsdp2": [{}],
}


@dataclass(frozen=True, order=True)
class Source:
    """An engine that trains and saves."""

    recipe: str
    kind: str
    world: int

    def __str__(self) -> str:
        return f"{self.recipe}-{self.kind}x{self.world}"

    @property
    def task(self) -> dict[str, Any]:
        """As `train.py` wants it."""
        options = OPTIONS[self.kind]
        number = WORLDS.index(self.world) + list(RECIPES).index(self.recipe)
        chosen = options[number % len(options)]
        if RECIPES[self.recipe]["dtype"] != "bf16":
            chosen = {k: v for k, v in chosen.items() if k != "bf16_optimizer"}
        return {
            "name": str(self),
            "zero": KINDS[self.kind],
            "empty": False,
            **RECIPES[self.recipe],
            **chosen,
        }


@dataclass(frozen=True, order=True)
class Load:
    """An engine that loads what a source saved."""

    source: Source
    saved: str
    kind: str
    world: int

    def __str__(self) -> str:
        return f"{self.source}-{self.saved}-to-{self.kind}x{self.world}"

    @property
    def task(self) -> dict[str, Any]:
        target = Source(self.source.recipe, self.kind, self.world).task
        # what is frozen is fp32 under FSDP2, and of the step's dtype under ZeRO
        cast = bool(target.get("freeze")) and "fsdp2" in {self.source.kind, self.kind} != {"fsdp2"}
        return {
            **target,
            "name": str(self),
            "load": str(self.source),
            "what": self.saved,
            "cast": cast,
        }

    @property
    def same(self) -> bool:
        """Whether source and target compute alike to the bit: the same stage and world size."""
        return (self.source.kind, self.source.world) == (self.kind, self.world)


def _possible(recipe: str, kind: str) -> bool:
    """FSDP2 does not scale fp16 by itself, and its states are tensors."""
    return kind != "fsdp2" or recipe not in ("frozen", "counted")


def all_loads(recipe: str) -> list[Load]:
    """Every engine and world size into every other; what is loaded of each source in turn."""
    engines = [(k, w) for k, w in product(KINDS, WORLDS) if _possible(recipe, k)]
    out = []
    for i, ((kind, world), (to, number)) in enumerate(product(engines, engines)):
        saved = SAVED[i % (2 if kind == "fsdp2" else 3)]
        out.append(Load(Source(recipe, kind, world), saved, to, number))
    return out


def _pairs(load: Load) -> set[tuple[str, Any, Any]]:
    """What of a choice must occur together."""
    s = load.source
    return {
        ("kinds", s.kind, load.kind),
        ("worlds", s.world, load.world),
        ("recipe of source", s.recipe, s.kind),
        ("recipe of target", s.recipe, load.kind),
        ("source", s.kind, s.world),
        ("target", load.kind, load.world),
        ("saved", s.kind, load.saved),
        ("loaded", load.kind, load.saved),
    }


def chosen_loads() -> list[Load]:
    """Few loads in which every two of those values occur together, and every kind is loaded by itself.

    None of three ranks' by one, which would need a start of torchrun more.
    """
    every = [load for recipe in RECIPES for load in all_loads(recipe)]
    left = [load for load in every if (load.source.world, load.world) != (3, 1)]
    chosen = [
        load
        for load in left
        if load.same and load.world == 2 and load.source.recipe == _own_recipe(load.kind)
    ]
    missing = set().union(*map(_pairs, left)).difference(*map(_pairs, chosen))
    while missing:
        used = {load.source for load in chosen}
        best = max(
            left, key=lambda load: (len(_pairs(load) & missing), load.source in used, str(load))
        )
        chosen.append(best)
        missing -= _pairs(best)
    return sorted(set(chosen))


def _own_recipe(kind: str) -> str:
    names = [r for r in RECIPES if _possible(r, kind)]
    return names[list(KINDS).index(kind) % len(names)]


def starts(
    loads: Iterable[Load], more: Sequence[tuple[int, Task]] = ()
) -> list[tuple[int, list[Task]]]:
    """World sizes and tasks, start after start: each world saves once, and loads when its sources are saved.

    `more` are further tasks and their world sizes.
    """
    left = set(loads)
    saved: set[Source] = set()
    out = []
    order = [2, 1, 3, 2, 1]
    for turn, world in enumerate(order):
        first = world not in order[:turn]
        new = {load.source for load in loads if load.source.world == world} if first else set()
        saved |= new
        ready = sorted(load for load in left if load.world == world and load.source in saved)
        left -= set(ready)
        tasks = [s.task for s in sorted(new)] + [load.task for load in ready]
        tasks += [task for number, task in more if number == world and first]
        if tasks:
            out.append((world, tasks))
    assert not left
    return out
