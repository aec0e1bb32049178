"""States of 64 ranks under three layouts: DTensors on meshes of a process group that sends nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.testing._internal.distributed.fake_pg import FakeStore

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["LAYOUTS", "holds", "state_of", "whole"]

LAYOUTS = ("fsdp", "tp_pp", "ep")
LAYERS, EXPERTS, STAGES = 8, 16, 4


def placed(
    layout: str, rank: int, size: int
) -> Iterator[tuple[str, tuple[int, ...], torch.Tensor, list[Any]]]:
    """Of each tensor of a rank its name, shape, ranks and placements; most shapes do not divide."""
    everybody = torch.arange(size)
    for layer in range(LAYERS):
        shapes = {f"layers.{layer}.weight": (37, 24), f"layers.{layer}.bias": (11,)}
        for name, shape in shapes.items():
            if layout == "tp_pp":
                each = size // STAGES
                stage = layer % STAGES
                if rank // each == stage:
                    ranks = torch.arange(stage * each, (stage + 1) * each).reshape(-1, 8)
                    yield (
                        name,
                        shape,
                        ranks,
                        [Replicate(), Shard(1) if len(shape) > 1 else Replicate()],
                    )
            else:
                yield name, shape, everybody, [Shard(0)]
    for expert in range(EXPERTS):
        name, shape = f"experts.{expert}", (13, 5)
        if layout == "ep":
            if expert % 8 == rank % 8:
                yield name, shape, torch.arange(rank % 8, size, 8), [Shard(0)]
        elif layout == "fsdp" or expert % STAGES == rank // (size // STAGES):
            ranks = (
                everybody if layout == "fsdp" else everybody.reshape(STAGES, -1)[expert % STAGES]
            )
            yield name, shape, ranks, [Shard(1 if layout == "fsdp" else 0)]


def whole(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """The values of a tensor."""
    n = torch.Size(shape).numel()
    return (torch.arange(n, dtype=torch.float32) + 1000 * sum(map(ord, name)) + seed / 2).reshape(
        shape
    )


def state_of(layout: str, rank: int, size: int, seed: int | None) -> dict[str, DTensor]:
    """The state of a rank; zeros without a seed."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        out = {}
        for name, shape, ranks, placements in placed(layout, rank, size):
            mesh = DeviceMesh("cpu", ranks, _init_backend=False, _rank=rank)
            part = torch.zeros(shape) if seed is None else whole(name, shape, seed)
            local = _local(part, mesh, placements).clone()
            strides = torch.empty(shape).stride()
            out[name] = DTensor.from_local(
                local, mesh, placements, run_check=False, shape=shape, stride=strides
            )
        return out
    finally:
        dist.destroy_process_group()


def holds(state: dict[str, DTensor], seed: int) -> bool:
    """Whether a loaded state has the values of a seed."""
    return all(
        torch.equal(
            t.to_local(),
            _local(whole(name, tuple(t.shape), seed), t.device_mesh, list(t.placements)),
        )
        for name, t in state.items()
    )


def _local(tensor: torch.Tensor, mesh: DeviceMesh, placements: list[Any]) -> torch.Tensor:
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    return tensor[tuple(slice(a, a + n) for a, n in zip(offset, shape, strict=True))]
