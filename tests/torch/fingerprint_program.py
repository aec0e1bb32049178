"""What ranks do in `test_fingerprint.py`: tensors in many layouts, and the fingerprints of each."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import ucformat
from ucformat.torch import fingerprint, save

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed.tensor import DTensor


def layouts(folder: Path) -> list[list[str]]:
    """For each layout: what this rank says of the tensor in memory, and of what was saved of it in each form."""
    torch.manual_seed(0)
    whole = torch.randn(37, 26).to(torch.bfloat16)
    meshes = [init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))]
    tensors: dict[str, DTensor] = {}
    for mesh in meshes:
        for number, placements in enumerate(
            product([Replicate(), Shard(0), Shard(1)], repeat=mesh.ndim)
        ):
            tensors[f"{mesh.ndim}.{number}"] = distribute_tensor(whole.clone(), mesh, placements)
    rows: dict[str, list[str]] = {
        name: [fingerprint(whole), fingerprint(tensor)] for name, tensor in tensors.items()
    }
    for form in ("zarr", "packed", "safetensors"):
        save({"model": tensors}, folder / form, form=form)
        for name, row in rows.items():
            row.append(str(recorded(folder / form)[name]))
    return list(rows.values())


def recorded(url: Path) -> dict[str, Any]:
    return {t.name: t.fingerprint for t in ucformat.open(url).manifest.tensors}
