"""How a pickled DTensor is placed, by its spec: a `DeviceMesh` and the placements over its axes."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ucformat.errors import IntegrityError, UnsupportedError
from ucformat.geometry.distribution import Cut, Distribution, RankMesh, order_of_cuts
from ucformat.reading.stand_ins import Inert, StoredTensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucformat.reading.stand_ins import LocalPart

_MAX_SIZE = 1 << 62  # of a dim or an offset


def is_size(value: Any) -> bool:
    """Whether a value from a file is a number that can be a size, an index or a rank."""
    return type(value) is int and 0 <= value < _MAX_SIZE


def distribution_of_part(label: str, part: LocalPart) -> Distribution | None:
    """The distribution of a DTensor over its mesh, as one rank has pickled it; None if its spec cannot be read.

    Raises:
        UnsupportedError: it has a placement or an order of cuts that a distribution cannot have.
    """
    if part.spec is None:
        return None
    mesh, placements = mesh_of(part.spec.get("mesh")), part.spec.get("placements")
    if mesh is None or not isinstance(placements, tuple):
        return None
    by_axis = [
        (p.name.rpartition(".")[2].removeprefix("_"), p.get("dim"), p.get("split_factor", 1))
        if isinstance(p, Inert)
        else (repr(p), None, 1)
        for p in placements
    ]
    return distribution_of(label, part.shape, *mesh, by_axis)


def distribution_of(
    label: str,
    shape: tuple[int, ...],
    sizes: tuple[int, ...],
    ranks: tuple[int, ...],
    placements: Sequence[tuple[str, Any, Any]],
) -> Distribution:
    """The distribution of a DTensor over a mesh.

    Args:
        placements: of each axis: `Shard`, `StridedShard` or `Replicate`, the dim and the split
            factor.
    """
    mesh = rank_mesh(sizes, ranks)
    if mesh is None:
        raise IntegrityError(f"{label} is on a mesh of {sizes} with the ranks {ranks!r:.99}")
    if len(placements) != len(sizes):
        raise IntegrityError(f"{label} has {len(placements)} placements on a mesh of {sizes}")
    by_dim: dict[int, list[tuple[int, int, int]]] = {}
    for axis, (kind, dim, factor) in enumerate(placements):
        if kind == "Replicate":
            continue
        if kind not in ("Shard", "StridedShard"):
            raise UnsupportedError(
                f"{label} has the placement {kind!r:.99}; Shard and Replicate are read",
                hint="redistribute it to one of them before it is saved",
            )
        if not is_size(dim) or dim >= len(shape) or not is_size(factor):
            raise IntegrityError(f"{label} is cut along {dim!r:.99} of {len(shape)} dims")
        by_dim.setdefault(dim, []).append((axis, sizes[axis], factor))
    cuts: list[Cut] = []
    for dim, splits in sorted(by_dim.items()):
        order = order_of_cuts([(degree, factor) for _, degree, factor in splits])
        if order is None:
            raise UnsupportedError(
                f"{label} is cut in strides that no order of cuts over a mesh of {sizes} makes",
                hint="redistribute it to plain shards before it is saved",
            )
        cuts += [Cut(dim, splits[i][0]) for i in order]
    return Distribution(mesh, tuple(cuts))


@lru_cache(maxsize=64)  # all tensors of a file have a few, of perhaps thousands of ranks
def rank_mesh(sizes: tuple[int, ...], ranks: tuple[int, ...]) -> RankMesh | None:
    """The mesh of ranks in row-major order; None if they are not one for each coordinate."""
    if len(ranks) != math.prod(sizes) or len(set(ranks)) < len(ranks) or not ranks:
        return None
    return RankMesh.of(sizes, ranks)


def mesh_of(mesh: Any) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The sizes and the ranks of a pickled `DeviceMesh`, in row-major order; None if they cannot be read."""
    return _mesh_of(mesh) if isinstance(mesh, Inert) else None


@lru_cache(maxsize=64)  # the tensors of a file share theirs
def _mesh_of(mesh: Inert) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    tensor, axes = mesh.get("mesh"), _axes(mesh.get("_layout"))
    if isinstance(tensor, StoredTensor):  # until PyTorch 2.9
        sizes = tensor.shape
    elif axes is not None:
        sizes = tuple(math.prod(size for size, _ in axis) for axis in axes)
    else:
        return None
    ranks = mesh.get("_flatten_mesh_list")  # of this mesh; later versions list those of its root
    if ranks is None and axes is not None:
        ranks = _ranks_of(axes, mesh.get("_flatten_rank_map"), mesh.get("_rank"))
    if (
        not sizes
        or not isinstance(ranks, tuple)
        or not all(map(is_size, ranks))
        or len(ranks) != math.prod(sizes)
    ):
        return None
    return sizes, ranks


def _axes(layout: Any) -> list[list[tuple[int, int]]] | None:
    """The sizes and strides of each axis of a mesh, without sizes of 1; None if they cannot be read."""
    if not isinstance(layout, Inert):
        return None
    axes = layout.get("axes")
    if isinstance(axes, tuple) and all(isinstance(axis, Inert) for axis in axes):
        pairs = [(axis.get("shape"), axis.get("stride")) for axis in axes]
    else:  # before PyTorch 2.13
        shape, stride = layout.get("shape"), layout.get("stride")
        nested = isinstance(shape, tuple) and isinstance(stride, tuple)
        if nested and len(shape) != len(stride):
            return None
        pairs = list(zip(shape, stride, strict=True)) if nested else [(shape, stride)]
    out = []
    for shape, stride in pairs:
        sizes, strides = _numbers(shape), _numbers(stride)
        if len(sizes) != len(strides):
            return None
        axis = [(n, step) for n, step in zip(sizes, strides, strict=True) if n != 1]
        if not all(is_size(n) and is_size(step) and n * step for n, step in axis):
            return None
        out.append(axis)
    return out


def _numbers(value: Any) -> list[Any]:
    """What is in nested tuples, or a value that is none, in order."""
    return [n for part in value for n in _numbers(part)] if isinstance(value, tuple) else [value]


def _ranks_of(axes: list[list[tuple[int, int]]], rank_map: Any, own: Any) -> tuple[Any, ...] | None:
    """The ranks of a mesh, which may be some axes of its root, in which the rank that saved it is."""
    if not isinstance(rank_map, tuple):
        return None
    cuts = [cut for axis in axes for cut in axis]
    size = math.prod(n for n, _ in cuts)
    if size > len(rank_map):  # before as many places are listed
        return None
    places = [0]
    if size < len(rank_map):
        if own not in rank_map:
            return None
        at = rank_map.index(own)
        places = [at - sum(at // step % n * step for n, step in cuts)]
    for n, step in cuts:
        places = [place + i * step for place in places for i in range(n)]
    if not all(0 <= place < len(rank_map) for place in places):
        return None
    return tuple(rank_map[place] for place in places)
