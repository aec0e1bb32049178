"""Ranks of which only the first has a tracker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ucformat.errors import UcformatError
from ucformat.torch import async_save, save

if TYPE_CHECKING:
    from pathlib import Path

    from ucformat import Reference


class Kept:
    """A tracker that keeps what it gets."""

    def __init__(self) -> None:
        self.references: list[Reference] = []

    def log_checkpoint(self, reference: Reference) -> None:
        """Keep a reference."""
        self.references.append(reference)


def saves(folder: Path) -> list[str]:
    """Save twice, and return the ids of what each rank has logged."""
    tracker, state = Kept(), {"w": torch.ones(4)}
    save(state, folder / "a", log_to=tracker, step=1)
    async_save(state, folder / "b", log_to=tracker, step=2).wait()
    return [f"{r.step} {r.id}" for r in tracker.references]


def refused(folder: Path) -> str:
    """Save to what is no tracker on the first rank, and return each rank's error."""
    tracker: Any = Kept() if dist.get_rank() else "neptune"
    try:
        save({"w": torch.ones(4)}, folder / "c", log_to=tracker)
    except UcformatError as error:
        return error.message
    return ""
