"""Distributed checkpoints of Megatron's, written entry by entry, for what the kept ones do not have."""

from __future__ import annotations

import io
import json
import pickle
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["write_dist"]


def write_dist(
    folder: Path,
    entries: Mapping[str, tuple[tuple[int, ...], Sequence[tuple[tuple[int, ...], torch.Tensor]]]],
    *,
    flat: Mapping[str, tuple[int, ...]] | None = None,
    common: Mapping[str, Any] | None = None,
) -> Path:
    """Entries by key: the shape, and (offsets, chunk) of each. `flat`: the shapes of those that are flat ranges."""
    folder.mkdir(parents=True)
    described, stored, data = {}, {}, io.BytesIO()
    for key, (shape, chunks) in entries.items():
        metadata = []
        for offsets, chunk in chunks:
            start = data.tell()
            item = io.BytesIO()
            torch.save(chunk.contiguous(), item)
            data.write(item.getvalue())
            metadata.append(ChunkStorageMetadata(torch.Size(offsets), chunk.shape))
            info = _StorageInfo("__0_0.distcp", start, data.tell() - start)
            stored[MetadataIndex(key, torch.Size(offsets))] = info
        properties = TensorProperties(dtype=chunks[0][1].dtype)
        described[key] = TensorStorageMetadata(properties, torch.Size(shape), metadata)
    meta = Metadata(described, storage_data=stored)
    meta.mcore_data = {k: {"nd_reformulated_orig_global_shape": s} for k, s in (flat or {}).items()}
    (folder / "__0_0.distcp").write_bytes(data.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(meta))
    (folder / "metadata.json").write_text(
        json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1})
    )
    torch.save(dict(common or {}), folder / "common.pt")
    return folder
