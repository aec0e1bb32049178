"""What ranks do in `test_small.py`: save many small tensors, and load them on another number of ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tests.torch.faults_program import error_of, sharded
from ucformat.torch import PerRank, load, save

if TYPE_CHECKING:
    from pathlib import Path

#: So many tensors of each kind; together more than are stored as arrays.
EACH = 350


def state_of(*, filled: bool) -> dict[str, Any]:
    """Small tensors that are cut, replicated, and of one rank each, as of pipeline stages, and a large one."""

    def values(shape: tuple[int, ...], seed: int) -> torch.Tensor:
        return (
            torch.arange(torch.Size(shape).numel()).reshape(shape) + float(seed)
            if filled
            else torch.zeros(shape)
        )

    rank, size = dist.get_rank(), dist.get_world_size()
    cut = {f"cut.{n}": sharded(values((6, 1 + n % 3), n), 0) for n in range(EACH)}
    whole = {f"whole.{n}": values((), n) if n % 2 else values((4,), n) for n in range(EACH)}
    stages = {f"stage.{n}": values((1 + n % 5,), n) for n in range(EACH) if n % size == rank}
    large = {"large": sharded(values((400, 300), 7), 0), "empty": values((0, 3), 0)}
    return {"model": {**cut, **whole, **stages, **large}, "seen": 5 if filled else 0}


def saved(folder: Path, form: str) -> int:
    state = state_of(filled=True)
    save({**state, "mine": PerRank(dist.get_rank())}, folder / form, form=form)  # type: ignore[arg-type]
    return len(state["model"])


def loaded(folder: Path, form: str) -> bool:
    state, expected = state_of(filled=False), state_of(filled=True)
    report = load(state, folder / form, leave=["mine"], verify="always")
    assert state["seen"] == 5
    for name, tensor in state["model"].items():
        a, b = (
            t.to_local() if hasattr(t, "to_local") else t for t in (tensor, expected["model"][name])
        )
        assert torch.equal(a, b), name
    return bool(report)


def disagreeing(folder: Path) -> Any:
    """One tensor that is small on rank 0 alone."""
    odd = torch.zeros(3) if not dist.get_rank() else torch.zeros(300, 300)
    with error_of() as seen:
        save(
            {"model": {**{f"t{n}": torch.ones(2) for n in range(1200)}, "odd": odd}}, folder / "ck"
        )
    return seen["kind"], seen["message"]
