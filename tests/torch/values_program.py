"""What ranks do in `test_rank_values.py`: save and load values of their own, of which some ranks write files."""

from __future__ import annotations

import errno
import os
import random
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.patience import PATIENCE
from tests.torch.faults_program import TIMEOUT, error_of
from ucformat.torch import PerRank, Rng, async_save, load, save
from ucformat.torch.saving import background
from ucformat.torch.saving import manifest as rank_values

if TYPE_CHECKING:
    from pathlib import Path

#: Twelve ranks of one host: 3, 7 and 10 have a child each, the others have rank 0 for parent.
#: States of generators have 20 kB for each rank.
RANKS = 12
BOUND = 30_000
#: The first rank and the number of ranks of each file: those of a rank and its child, and of one
#: rank with much.
FILES = [(0, 3), (3, 2), (5, 1), (6, 1), (7, 2), (9, 1), (10, 2)]
MUCH, LACKING, MORE = 5, 2, 9


def value_of(rank: int) -> dict[str, Any]:
    """What a rank has, other than its generators."""
    return {"at": rank, "t": torch.arange(6000 if rank == MUCH else 6).to(torch.float64) / 7 + rank}


def state_of(rank: int, *, empty: bool = False) -> dict[str, Any]:
    """The state of a rank; not every rank has every name."""
    state: dict[str, Any] = {"rng": Rng(), "n": 0 if empty else 5}
    value = value_of(rank)
    if empty:
        value = {"at": -1, "t": torch.zeros_like(value["t"])}
    if rank != LACKING:
        state["loader"] = PerRank(value)
    if rank == MORE:
        state["more"] = PerRank([] if empty else [1, 2])
    return state


def lower_the_bound() -> None:
    """Of this process; one of the doomed rank cannot write values."""
    mock.patch.object(rank_values, "MOST_BYTES", BOUND).start()
    if os.environ.get("DOOMED") == os.environ["RANK"]:
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        mock.patch.object(rank_values, "put_ranges", side_effect=full).start()


def put(folder: Path, name: str, how: str) -> str:
    """Save the state of this rank in this process or in the background, and give the id."""
    state = state_of(dist.get_rank())
    if how == "async":
        return async_save(state, folder / name, timeout=TIMEOUT).wait(PATIENCE).id
    return save(state, folder / name, timeout=TIMEOUT).id


def lowered(how: str) -> None:
    """Lower the bound where values are written."""
    if how == "async":
        background._MAIN = (
            "from tests.torch import values_program as v; v.lower_the_bound(); " + background._MAIN
        )
    else:
        lower_the_bound()


def back_and_forth(folder: Path, how: str) -> Any:
    """Save, and load: whether all is as it was, bit for bit."""
    rank = dist.get_rank()
    put(folder, "small", how="sync")
    lowered(how)
    torch.manual_seed(rank)
    random.seed(rank)
    put(folder, "ck", how)
    drawn = torch.rand(3).tolist(), random.random()
    torch.manual_seed(77)
    state, wanted = state_of(rank, empty=True), state_of(rank)
    load(state, folder / "ck", timeout=TIMEOUT)
    same = state["n"] == wanted["n"] and (
        rank != MORE or state["more"].value == wanted["more"].value
    )
    if rank != LACKING:
        found = state["loader"].value
        same = same and found["at"] == rank and torch.equal(found["t"], wanted["loader"].value["t"])
    return same, drawn == (torch.rand(3).tolist(), random.random())


def full_at_an_inner_rank(folder: Path, how: str, doomed: int) -> Any:
    """A rank cannot write the values of its subtree; then the ranks save again."""
    os.environ["DOOMED"] = str(doomed)
    lowered(how)
    with error_of() as seen:
        put(folder, "ck", how)
    dist.barrier()
    left = sorted(p.name for p in (folder / "ck").rglob("*") if p.is_file())
    dist.barrier()
    return seen, left, save({"w": torch.ones(3)}, folder / "ck", timeout=TIMEOUT).id
