"""A run's checkpoints, small, for the tests of what a manager does with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ucformat.storage.base import HIDDEN
from ucformat.torch import Manager, Saved

if TYPE_CHECKING:
    from pathlib import Path

State = dict[str, Any]


def state_at(step: int) -> State:
    """A state that tells its step: several chunks and shards, and a plain value."""
    generator = torch.Generator().manual_seed(step)
    weights = {n: torch.randn(33, 16, generator=generator) for n in ("a", "b")}
    return {"model": weights, "progress": {"step": step, "loss": step / 7}}


def manager_of(place: Path, **options: Any) -> Manager:
    """With shards of 256 bytes."""
    return Manager(place, **{"chunk_bytes": 64, "shard_bytes": 256, "signals": (), **options})


def fill(place: Path, *steps: int, **options: Any) -> None:
    """Checkpoints of these steps, one after another."""
    manager = manager_of(place, **options)
    for step in steps:
        assert isinstance(manager.save(step, state_at(step)), Saved)


def restored(place: Path, **options: Any) -> tuple[int, Any]:
    """The step that is restored, which the whole state must tell alike, and the report."""
    state = state_at(0)
    report = manager_of(place).restore_latest(state, **options)
    assert report is not None
    expected = state_at(state["progress"]["step"])
    assert all(torch.equal(state["model"][n], t) for n, t in expected["model"].items())
    assert state["progress"] == expected["progress"]
    return state["progress"]["step"], report


def folders(place: Path) -> list[str]:
    return sorted(p.name for p in place.iterdir() if not p.name.startswith(HIDDEN))


def names(*steps: int) -> list[str]:
    return [f"step-{s:08d}" for s in steps]


def data_file(checkpoint: Path) -> Path:
    files = [
        p
        for p in checkpoint.glob("data/**/*")
        if p.is_file() and p.suffix not in (".json", ".safetensors")
    ]
    return max(files)
