"""The training whose checkpoints actors write: what it holds at each step, parts of it that are saved, and its tiers.

Each step adds the same to all weights, so that it can be repeated, and its deltas applied, exactly.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from ucformat.errors import Conflict, StateMismatch
from ucformat.format.described import packed_file
from ucformat.format.structure import read_manifest
from ucformat.storage.url import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = [
    "DONE",
    "FAST",
    "HOME",
    "MIDDLE",
    "Content",
    "arrays",
    "fill_again",
    "launch",
    "replay",
    "replay_at",
    "same",
    "save_deltas",
    "save_experts",
    "save_step",
    "save_window",
    "unless_done",
]

#: The places of a run with tiers, the fastest first.
FAST, MIDDLE, HOME = (f"memory://w/{place}" for place in ("f", "u/r", "t/r"))

_ADDED = 100  # to all weights, in a step
_PATTERN = "(?P<layer>w)(?P<expert>[0-9])"
_GROUPS = (("w1",), ("w0",))  # of which the second has optimizer states

#: What a save says whose place has a checkpoint.
DONE = "already holds the committed checkpoint"

#: The step of all tensors, or of each of them.
Content = int | tuple[int, int]


def arrays(content: Content) -> dict[str, Any]:
    """The weights of all checkpoints that have this content."""
    steps = (content, content) if isinstance(content, int) else content
    return {
        f"w{n}": np.arange(rows * 4, dtype=np.float32).reshape(rows, 4) + _ADDED * step
        for n, (rows, step) in enumerate(zip((16, 4), steps, strict=True))
    }


def same(held: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether all that is wanted is held, bit for bit."""
    return all(
        a.dtype == held[name].dtype and np.array_equal(a, held[name]) for name, a in wanted.items()
    )


def _state(step: int) -> dict[str, Any]:
    """The state of the training after a step."""
    import torch

    model = {name: torch.from_numpy(a) for name, a in arrays(step).items()}
    moments = {"w0": {"exp_avg": model["w0"] / 2}}
    return {
        "model": model,
        "optimizer": {"state": moments, "param_groups": [{"params": [*model]}]},
    }


def save_step(step: int, place: str, **more: Any) -> None:
    """Save the training."""
    from ucformat.torch import save

    save(_state(step), place, run="r", step=step, **more)


@contextmanager
def unless_done() -> Iterator[None]:
    """Go on where what is to be saved is there already."""
    try:
        yield
    except Conflict as error:
        if DONE not in error.message:
            raise


# Parts of it.


def save_experts(base: str, place: str) -> None:
    """Save one of two experts; the other one is that of the base."""
    from ucformat.torch import Experts

    save_step(5, place, base=base, partial=Experts(pattern=_PATTERN))


def save_window(base: str, *places: str) -> None:
    """Save a window of two checkpoints, as far as that is not done."""
    from ucformat.torch import Window

    for step, place in enumerate(places, 5):
        with unless_done():
            save_step(step, place, base=base, partial=Window(2, _GROUPS))
        base = place


def save_deltas(base: str, *places: str) -> None:
    """Save what each of the steps after that of the base applied, as far as that is not done."""
    import torch

    from ucformat.torch import Deltas

    for step, place in enumerate(places, 2):
        deltas = {name: torch.full(a.shape, float(_ADDED)) for name, a in arrays(0).items()}
        with unless_done():
            save_step(step, place, base=base, partial=Deltas(), deltas={step: deltas})
        base = place


def replay_at(place: str) -> tuple[int, dict[str, Any]] | None:
    """Replay a window, or deltas: the step, and the weights that come of it; None if the base was thinned."""
    from ucformat.torch import replay as replay_in

    state = _state(0)

    def step_fn(_: int, deltas: Mapping[str, Any] | None = None) -> None:
        for name, weight in state["model"].items():
            weight.add_(_ADDED if deltas is None else deltas[name])
        state["optimizer"]["state"]["w0"]["exp_avg"][:] = state["model"]["w0"] / 2

    try:
        report = replay_in(place, state, step_fn)
    except StateMismatch as error:
        if "were dropped by thin" not in error.message:
            raise
        return None
    held = {name: weight.numpy() for name, weight in state["model"].items()}
    moments = state["optimizer"]["state"]["w0"]["exp_avg"].numpy()
    assert report.step is not None
    if not np.array_equal(moments, held["w0"] / 2):
        raise AssertionError(f"the moments after a replay of {place} are those of another step")
    return report.step, held


def replay(place: str) -> None:
    """Replay a checkpoint, and look at what comes of it."""
    replayed = replay_at(place)
    if replayed is not None and not same(replayed[1], arrays(replayed[0])):
        raise AssertionError(f"a replay of {place} gives other bits")


# Its tiers.


def launch(*steps: int) -> None:
    """Start the training: restore what is left of it, and save those of these steps that come after that.

    A tier keeps one checkpoint. Each step is saved in the fast tier, and copied from there to the others.
    """
    from ucformat.torch import Manager, Tier

    state = _state(0)
    tiers = [Tier(FAST.removeprefix("memory:/"), keep=1), Tier(MIDDLE, keep=1)]
    with Manager(HOME, keep=1, run="r", tiers=tiers, signals=()) as manager:
        report = manager.restore_latest(state)
        held = {name: weight.numpy() for name, weight in state["model"].items()}
        if report is not None and not same(held, arrays(report.step or 0)):
            raise AssertionError(f"{report.url} was restored with other bits")
        for step in steps:
            if report is None or step > (report.step or 0):
                manager.save(step, _state(step))


def fill_again(folder: str) -> None:
    """Fill the slowest tier from the fast one, as a launch does whose end nobody waited for."""
    from ucformat.torch.comm.group import single_process_group
    from ucformat.torch.tiers.copying import fill, gather_documents

    ranks, store = single_process_group(), open_store(f"{FAST}/{folder}")
    documents = gather_documents(store, ranks)
    own = packed_file(f"data/{read_manifest(store)[0].attempt}", 0)
    fill(store, open_store(f"{HOME}/{folder}"), documents, [own], ranks)
