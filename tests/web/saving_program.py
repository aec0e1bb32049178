"""What ranks do in `test_keeping.py`: save a step of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ucformat.torch import save

if TYPE_CHECKING:
    from pathlib import Path


def saved(folder: Path, step: int) -> int:
    """Save, of which each rank has a part of its own."""
    rank: int = dist.get_rank()
    state = {"model": {f"layers.{rank}.weight": torch.full((64, 32), float(step))}}
    save(state, folder / "run9" / str(step), step=step, run="run9")
    return rank
