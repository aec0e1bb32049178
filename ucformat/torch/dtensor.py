"""Which boxes of the global tensor a rank's DTensor or ShardedTensor holds."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.placement_types import _StridedShard

from ucformat.errors import LayoutError, UsageError
from ucformat.geometry.local import Dim, Run
from ucformat.geometry.tensor import TensorInfo
from ucformat.torch.local import Local, pieces_in
from ucformat.torch.memory import dtype_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["local_of", "mesh_of"]


def local_of(name: str, state: str, tensor: torch.Tensor) -> Local:
    """What this rank holds of a tensor in a training state: of a DTensor its shard, of a plain tensor all.

    Raises:
        LayoutError: the local shape is not what the placements say, or a placement is one that nobody can store.
    """
    if isinstance(tensor, DTensor):
        return _of_dtensor(name, state, tensor)
    if isinstance(tensor, ShardedTensor):
        return _of_sharded(name, state, tensor)
    tensor = _plain(name, tensor)
    info = TensorInfo(name, state, dtype_name(tensor.dtype), tuple(tensor.shape))
    return Local(info, pieces_in(tensor, [_whole(n) for n in tensor.shape]), tensor)


def mesh_of(tensors: Sequence[torch.Tensor]) -> dict[str, int]:
    """The axes of the meshes that these tensors are laid over, and their sizes."""
    axes: dict[str, int] = {}
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            names = mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(mesh.ndim))
            axes |= dict(zip(names, mesh.shape, strict=True))
    return axes


def _plain(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its gradient; UsageError for one whose memory is not plain rows of elements."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        what = "meta" if tensor.is_meta else "quantized" if tensor.is_quantized else str(tensor.layout)
        raise UsageError(
            f"{name} is a {what} tensor, which has no plain memory",
            hint="make it a dense tensor first (a meta tensor: model.to_empty(device=…))",
        )
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        return tensor.resolve_conj().resolve_neg()
    return tensor


def _whole(n: int) -> Dim:
    return Dim(n, (Run(0, 0, n, False),) if n else ())


def _of_dtensor(name: str, state: str, tensor: DTensor) -> Local:
    mesh, shape = tensor.device_mesh, tuple(tensor.shape)
    local = _plain(name, tensor.to_local())
    info = TensorInfo(name, state, dtype_name(tensor.dtype), shape)
    at = mesh.get_coordinate()
    if at is None:
        return Local(info, (), local)
    if any(isinstance(p, Partial) for p in tensor.placements):
        raise LayoutError(
            f"{name} ({state}) is partial over its mesh: each rank holds a summand of it",
            hint="reduce it first: tensor.redistribute(placements=[Replicate() …])",
        )
    for dims in _readings(shape, tensor.placements, mesh.shape, at):
        sizes = tuple(d.size for d in dims)
        if sizes == tuple(local.shape) or (0 in sizes and not local.numel()):  # FSDP2 makes (0, 0) of an empty (0, n)
            return Local(info, pieces_in(local, dims), local)
    raise LayoutError(
        f"{name} ({state}): its local shape {tuple(local.shape)} is not what its placements {tensor.placements} make "
        f"of {shape} at coordinate {tuple(at)} of the mesh {tuple(mesh.shape)}",
        hint="ucformat knows Shard, _StridedShard and Replicate as torch.chunk cuts them",
    )


def _readings(
    shape: tuple[int, ...], placements: Sequence[Any], degrees: Sequence[int], at: Sequence[int]
) -> Iterator[list[Dim]]:
    """The dims of the local tensor: cut in the order that strided shards stand for, else from left to right.

    `_StridedShard(d, k)` says that the dim was cut in `k` by mesh axes further to the right before (FSDP2 over TP: TP
    cuts first). Cut from left to right it takes its share of each of `k` parts, which is the same where all is even.
    """
    cuts: dict[int, list[tuple[int, int, int]]] = {}  # dim -> (degree, coordinate, split factor), from left to right
    for placement, degree, index in zip(placements, degrees, at, strict=True):
        if placement.is_replicate():
            continue
        factor = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
        cuts.setdefault(placement.dim, []).append((degree, index, factor))
    ordered = {d: _order(found) for d, found in cuts.items()}
    if all(o is not None for o in ordered.values()):
        yield [_cut(n, ordered.get(d) or []) for d, n in enumerate(shape)]
    yield [_cut(n, cuts.get(d, [])) for d, n in enumerate(shape)]


def _order(cuts: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]] | None:
    """The cuts of one dim in the order in which they were made, all plain; None where no order gives the factors."""
    made: list[tuple[int, int, int]] = []
    for degree, index, factor in reversed(cuts):
        for position in range(len(made) + 1):
            if math.prod(d for d, _, _ in made[:position]) == factor:
                made.insert(position, (degree, index, 1))
                break
        else:
            return None
    return made


def _cut(n: int, cuts: Sequence[tuple[int, int, int]]) -> Dim:
    dim = _whole(n)
    for degree, index, factor in cuts:
        parts = [_chunk(0, dim.size, factor, i) for i in range(factor)]
        dim = dim.take([_chunk(a, b, degree, index) for a, b in parts])
    return dim


def _chunk(begin: int, end: int, count: int, index: int) -> tuple[int, int]:
    """Part `index` of `begin:end` as `torch.chunk` cuts it in `count`."""
    step = -(-(end - begin) // count)
    return min(end, begin + index * step), min(end, begin + (index + 1) * step)


def _of_sharded(name: str, state: str, tensor: ShardedTensor) -> Local:
    """FSDP1's shards; a rank has one, or none."""
    shards = tensor.local_shards()
    info = TensorInfo(name, state, dtype_name(tensor.dtype), tuple(tensor.size()))
    if not shards:
        return Local(info, (), torch.empty(0, dtype=tensor.dtype))
    if len(shards) > 1:
        raise UsageError(
            f"{name} ({state}): this rank holds {len(shards)} shards of one ShardedTensor",
            hint="save it through torch.distributed.checkpoint, with ucformat.torch.Writer",
        )
    local, where = _plain(name, shards[0].tensor), shards[0].metadata
    starts_and_sizes = zip(where.shard_offsets, where.shard_sizes, strict=True)
    return Local(
        info, pieces_in(local, [Dim(n, (Run(a, 0, n, False),) if n else ()) for a, n in starts_and_sizes]), local
    )
