"""Opening reads kilobytes of files of megabytes: what the suite cannot see in the small files that engines wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from ucformat.checkpoint import Checkpoint
from ucformat.sources.registry import all_sources
from ucformat.storage.local import LocalStore
from ucformat.testing.reading import Counting

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SIZE = 4 << 20  # bytes of each of two tensors


def save_dcp(state: dict[str, Any], folder: Path) -> None:
    dcp.save(state, checkpoint_id=folder, no_dist=True)


def save_torch(state: dict[str, Any], folder: Path) -> None:
    torch.save(state, folder / "model.pt")


def save_safetensors(state: dict[str, Any], folder: Path) -> None:
    save_file(state, folder / "model.safetensors")


def save_megatron(state: dict[str, Any], folder: Path) -> None:
    """As Megatron's torch_dist has it: a DCP checkpoint with what is common beside it."""
    (folder / "metadata.json").write_text(
        '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'
    )
    save_dcp(state, folder)
    torch.save({"iteration": 3}, folder / "common.pt")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("save", [save_dcp, save_torch, save_safetensors, save_megatron])
def test_opening_reads_kilobytes(
    save: Callable[[dict[str, Any], Path], None], tmp_path: Path
) -> None:
    save({name: torch.full((SIZE // 4,), 1.5) for name in ("a.weight", "b.weight")}, tmp_path)
    store = Counting(LocalStore(tmp_path))
    ck = Checkpoint(next(s for s in all_sources() if s.find(store)).open(store))
    assert sum(info.nbytes for info in ck.tensors.values()) == 2 * SIZE
    assert store.bytes.total() < SIZE // 8
