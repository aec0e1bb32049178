"""Which boxes of an array the devices of a process hold, and how all processes hold it together."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jax.sharding import NamedSharding

from ucformat.geometry.box import Box, bounding_box, row_major
from ucformat.geometry.distribution import Cut, Distribution, RankMesh
from ucformat.geometry.tensor import Piece

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from jax.sharding import Mesh
    from numpy.typing import NDArray


def box_of(index: Sequence[slice], shape: tuple[int, ...]) -> Box:
    """Return the box of the slices that JAX gives for a shard."""
    ranges = [s.indices(n) for s, n in zip(index, shape, strict=True)]
    return Box(tuple(a for a, _, _ in ranges), tuple(max(0, b - a) for a, b, _ in ranges))


class HeldParts(NamedTuple):
    """What this process holds of an array: pieces in memory, and how all processes hold it, if that is known."""

    pieces: tuple[Piece, ...]
    memory: NDArray[np.uint8]
    distribution: Distribution | None


def begin_copy(array: Any) -> None:
    """Begin to copy what this process holds of an array to the host."""
    if not isinstance(array, np.ndarray):
        for data in _shards(array).values():
            data.copy_to_host_async()


def _shards(array: Any) -> dict[Box, Any]:
    """The boxes with elements that this process holds, with one of the devices' data each."""
    shape = tuple(array.shape)
    shards = {box_of(shard.index, shape): shard.data for shard in array.addressable_shards}
    return {box: data for box, data in shards.items() if box.size}


def parts_of(array: Any, *, copy: bool = False) -> HeldParts:
    """Return what this process holds of an array; boxes that several devices hold once.

    Args:
        copy: copy the values even if they are in host memory, so that they may be overwritten there.
    """
    if isinstance(array, np.ndarray):
        return HeldParts(_whole(array.shape), _bytes(array, copy=copy), None)
    shape, shards = tuple(array.shape), _shards(array)
    distribution = distribution_of(array.sharding)
    if not shards:  # other processes have it, or it has no elements
        nothing = _whole(shape) if 0 in shape else ()
        return HeldParts(nothing, np.empty(0, np.uint8), distribution)
    if len(shards) == 1:
        ((box, data),) = shards.items()
        return HeldParts(_dense([box]), _bytes(np.asarray(data), copy=copy), distribution)
    near = bounding_box(shards)
    assert near is not None  # noqa: S101 - there are shards
    if near.size == sum(box.size for box in shards):
        joined = np.empty(near.shape, array.dtype)
        for box, data in shards.items():
            joined[_slices(box, near)] = np.asarray(data)
        return HeldParts(_dense([near]), _bytes(joined, copy=False), distribution)
    boxes = sorted(shards, key=lambda box: box.start)
    memory = np.concatenate([_bytes(np.asarray(shards[box]), copy=False) for box in boxes])
    return HeldParts(_dense(boxes), memory, distribution)


def _whole(shape: tuple[int, ...]) -> tuple[Piece, ...]:
    return _dense([Box.whole(shape)])


def _dense(boxes: Sequence[Box]) -> tuple[Piece, ...]:
    """Boxes one after another in memory, each row-major."""
    pieces, at = [], 0
    for box in boxes:
        pieces.append(Piece(box, at, row_major(box.shape)))
        at += box.size
    return tuple(pieces)


def _bytes(array: NDArray[Any], *, copy: bool) -> NDArray[np.uint8]:
    """The elements of an array in row-major order, little-endian."""
    little = array.astype(array.dtype.newbyteorder("<")) if array.dtype.byteorder == ">" else array
    dense = np.array(little, order="C", copy=True if copy else None)
    return dense.reshape(-1).view(np.uint8)


def _slices(box: Box, within: Box) -> tuple[slice, ...]:
    starts = zip(box.start, within.start, box.shape, strict=True)
    return tuple(slice(a - b, a - b + n) for a, b, n in starts)


def distribution_of(sharding: Any) -> Distribution | None:
    """Return how processes hold an array, from the names of the mesh axes that cut its dims; None if that is not known.

    It is what the processes would hold if each had a block of the mesh; whoever states the
    distribution compares it with what this one holds.
    """
    if not isinstance(sharding, NamedSharding):
        return None
    mesh = _process_mesh(sharding.mesh)
    if mesh is None:
        return None
    axes = {name: axis for axis, name in enumerate(sharding.mesh.axis_names)}
    cuts = tuple(
        Cut(dim, axes[name])
        for dim, entry in enumerate(sharding.spec)
        for name in (entry if isinstance(entry, tuple) else (entry,) if entry is not None else ())
        if mesh.sizes[axes[name]] > 1
    )
    return Distribution(mesh, cuts)


@lru_cache(maxsize=64)
def _process_mesh(mesh: Mesh) -> RankMesh | None:
    """The mesh of processes, each of which has a block of a mesh of devices; None if they have no blocks."""
    devices = mesh.devices
    processes = np.array([d.process_index for d in devices.flat]).reshape(devices.shape)
    for axis, size in enumerate(devices.shape):
        blocks = (n for n in range(size, 0, -1) if size % n == 0)
        length = next(n for n in blocks if _is_constant(processes, axis, n))
        processes = processes.take(range(0, size // length * length, length), axis)
    ranks = processes.reshape(-1).tolist()
    if len(set(ranks)) < len(ranks) or len(ranks) == 1:
        return None
    return RankMesh.of(processes.shape, ranks)


def _is_constant(processes: NDArray[Any], axis: int, length: int) -> bool:
    """Whether blocks of so many indices along an axis are of one process."""
    ordered = np.moveaxis(processes, axis, 0)
    blocks = ordered.reshape(-1, length, *ordered.shape[1:])
    return bool((blocks == blocks[:, :1]).all())


def mesh_axes(shardings: Sequence[Any]) -> Mapping[str, int]:
    """Return the sizes of the mesh axes over which arrays are sharded, by name."""
    meshes = {id(s.mesh): s.mesh for s in shardings if isinstance(s, NamedSharding)}
    return {str(name): int(n) for mesh in meshes.values() for name, n in mesh.shape.items()}
