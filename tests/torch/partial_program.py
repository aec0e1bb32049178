"""What ranks do in `test_partial_saves.py`: train a mixture of experts, and save some of its experts at a time."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from tests.torch.moe import Model, digests, train
from ucformat.errors import UsageError
from ucformat.torch import Experts, Manager, async_save, load, save

if TYPE_CHECKING:
    from pathlib import Path

Digests = dict[tuple[str, str], str]
EXPERTS = 64


def model_of(
    degree: int, seed: int = 1, experts: int = EXPERTS
) -> tuple[Model, torch.optim.Optimizer]:
    """The model of this rank under an expert-parallel degree."""
    rank = int(os.environ["RANK"]) % degree
    model = Model(experts, layers=1, rank=rank, degree=degree, seed=seed)
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)


def saved(
    folder: Path, *, degree: int, form: Any, saves: int = 3, asynchronous: bool = False
) -> Any:
    """Save a run, of which each checkpoint has some experts; what this rank had at each step, and wrote."""
    model, optimizer = model_of(degree)
    for step in range(-4, 1):  # so that most experts have moments
        train(model, optimizer, step, tokens=512)
    at_steps: dict[int, Digests] = {}
    written = []
    for step in range(1, saves + 1):
        train(model, optimizer, step)
        at_steps[step] = digests(model, optimizer)
        state = {"model": model, "optimizer": optimizer}
        given: Any = {"step": step, "partial": Experts(k=8), "form": form, "certify": True}
        if asynchronous:
            done = async_save(state, folder / str(step), **given).wait()
        else:
            done = save(state, folder / str(step), **given)
        written.append(done.nbytes)
    return at_steps, written


def loaded(folder: Path, *, step: int, degree: int) -> Any:
    """What this rank has after a load under another degree, and what the report says is older."""
    model, optimizer = model_of(degree, seed=9)
    state = {"model": model, "optimizer": optimizer}
    report = load(state, folder / str(step))
    again = load(state, folder / str(step), strict_step=False, certify=True)
    assert again
    return digests(model, optimizer), bool(report), {tuple(k): n for k, n in report.older.items()}


def managed(folder: Path, *, degree: int, steps: int) -> Any:
    """A manager that saves some experts at each step; the steps of those that it has loaded, and of each save."""
    model, optimizer = model_of(degree, experts=8)
    state = {"model": model, "optimizer": optimizer}
    with Manager(folder / "run", partial=Experts(k=2), keep=2) as manager:
        report = manager.restore_latest(state, strict_step=False)
        first = 1 if report is None else report.step + 1  # type: ignore[operator]
        for step in range(first, first + steps):
            train(model, optimizer, step)
            manager.save(step, state)
    return None if report is None else (report.step, bool(report), len(report.older))


def differing(folder: Path, *, what: str) -> str:
    """What a rank is told that saves with another step or lineage than the others."""
    model, optimizer = model_of(1, experts=8)
    state = {"model": model, "optimizer": optimizer}
    train(model, optimizer, 1)
    save(state, folder / "1", step=1, partial=Experts())
    lineage = [load(state, folder / "1").lineage]
    train(model, optimizer, 2)
    first = os.environ["RANK"] == "0"
    given: Any = {"step": 2, "lineage": lineage}
    if not first:
        given[what] = 3 if what == "step" else []
    try:
        save(state, folder / "2", partial=Experts(), **given)
    except UsageError as error:
        return str(error)
    return ""
