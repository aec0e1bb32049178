"""The tensors of a distributed checkpoint by their keys: whole, stacked, as chunks of them lie in the files.

Up to Megatron-Core 0.14 the optimizer's format `fully_sharded_model_space` stored flat ranges of the ranks' chunks: an
entry then has the number of chunks along each dim as its shape, and the flattened chunk as a last dim; `mcore_data` in
`.metadata` has the shape of the tensor itself.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from ucformat.errors import IntegrityError
from ucformat.geometry.box import Box, row_major
from ucformat.geometry.coverage import prove
from ucformat.geometry.flat import flat_boxes
from ucformat.geometry.tensor import Extent, Key, TensorInfo
from ucformat.schema.dtypes import ITEMSIZE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ucformat.sources.dcp.items import Items
    from ucformat.sources.dcp.metadata import Metadata

__all__ = ["Chunk", "StoredKey", "original_shapes"]

_SHAPE = "nd_reformulated_orig_global_shape"


@dataclass(frozen=True, slots=True)
class Chunk:
    """A stored chunk: the boxes of the tensor that it is, in the order in which they lie in it, and its own box."""

    boxes: tuple[Box, ...]
    stored: Box


def original_shapes(meta: Metadata) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors that are stored as flat ranges, by entry."""
    found = meta.root.get("mcore_data")
    out = {}
    for fqn, told in found.items() if isinstance(found, dict) else ():
        shape = told.get(_SHAPE) if isinstance(told, dict) else None
        if shape is None:
            continue
        if not isinstance(shape, tuple | list) or not all(type(n) is int and n >= 0 for n in shape):
            raise IntegrityError(f"{meta.file} gives {fqn} the impossible shape {shape!r}")
        out[fqn] = tuple(shape)
    return out


@dataclass(slots=True)
class StoredKey:
    """One tensor entry, in the coordinates of the whole, stacked tensor."""

    items: Items
    fqn: str
    key: Key  # what errors call it
    dtype: str
    shape: tuple[int, ...]
    leading: int  # dims along which parameters are stacked
    chunks: tuple[Chunk, ...]
    _by_index: dict[tuple[int, ...], list[Chunk]] | None = None
    _extents: dict[Box, list[Extent]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of(cls, items: Items, fqn: str, key: Key, leading: int, original: tuple[int, ...] | None) -> StoredKey:
        """The tensor of an entry; `original` is its shape where flat ranges of it are stored."""
        entry = items.meta.tensors[fqn]
        boxes = [b for b in dict.fromkeys(entry.boxes) if b.size]
        if original is None:
            chunks, shape = [Chunk((b,), b) for b in boxes], entry.shape
        else:
            chunks, shape = [_flat(fqn, b, entry.shape, original) for b in boxes], original
        if leading > len(shape):
            raise IntegrityError(
                f"{items.meta.file}: {fqn} has the shape {list(shape)}, but its name says that {leading} dims are "
                "those of layers and experts"
            )
        return cls(items, fqn, key, entry.dtype, shape, leading, tuple(chunks))

    def boxes(self) -> Iterator[Box]:
        """The boxes that ranks stored."""
        return (b for chunk in self.chunks for b in chunk.boxes)

    def extents(self, box: Box) -> Iterator[Extent]:
        """The extents of a box of the whole tensor, with their own boxes; proved to cover it."""
        near = [(chunk, clip) for chunk in self._near(box) for b in chunk.boxes if (clip := b.intersect(box))]
        info = TensorInfo(*self.key, self.dtype, box.shape)
        shift = tuple(-a for a in box.start)
        prove(info, [(str(chunk.stored), clip.shift(shift)) for chunk, clip in near])
        for chunk in dict.fromkeys(chunk for chunk, _ in near):
            yield from self._read(chunk)

    def _near(self, box: Box) -> Iterable[Chunk]:
        """The chunks that may have a part of a box: of a stack those of the same layer and expert."""
        n = self.leading
        if self._by_index is None:
            found: dict[tuple[int, ...], list[Chunk]] = {}
            if all(b.shape[:n] == (1,) * n for b in self.boxes()):
                for chunk in self.chunks:
                    found.setdefault(chunk.boxes[0].start[:n], []).append(chunk)
            self._by_index = found
        if not self._by_index or box.shape[:n] != (1,) * n:
            return self.chunks
        return self._by_index.get(box.start[:n], [])

    def _read(self, chunk: Chunk) -> list[Extent]:
        with self._lock:
            found = self._extents.get(chunk.stored)
        if found is None:
            shape = self.items.meta.tensors[self.fqn].shape
            info = TensorInfo(*self.key, self.dtype, shape)
            stretch = self.items.stretch(self.fqn, chunk.stored, info)
            found = self.items.chunk(self.fqn, chunk.stored, stretch, info)
            if chunk.boxes != (chunk.stored,):
                found = list(_unflattened(self, chunk, found))
            with self._lock:
                self._extents[chunk.stored] = found
        return found


def _flat(fqn: str, stored: Box, counts: tuple[int, ...], shape: tuple[int, ...]) -> Chunk:
    """A flat range of one chunk of a regular grid, as boxes of the tensor."""
    numel = counts[-1] if counts else 0
    grid = counts[:-1]
    if len(grid) != len(shape) or any(g < 1 or n % g for n, g in zip(shape, grid, strict=True)):
        raise IntegrityError(f"{fqn}: a grid of {list(grid)} chunks does not divide a tensor of {list(shape)}")
    local = tuple(n // g for n, g in zip(shape, grid, strict=True))
    start, stop = stored.start[-1], stored.start[-1] + stored.shape[-1]
    outside = any(a >= g for a, g in zip(stored.start, grid, strict=False))
    if math.prod(local) != numel or stop > numel or stored.shape[:-1] != (1,) * len(grid) or outside:
        raise IntegrityError(f"{fqn}: {stored} is no range of a chunk of the shape {list(local)}")
    corner = tuple(i * n for i, n in zip(stored.start, local, strict=False))
    return Chunk(tuple(b.shift(corner) for b in flat_boxes(local, start, stop)), stored)


def _unflattened(of: StoredKey, chunk: Chunk, found: list[Extent]) -> Iterator[Extent]:
    """The extents of a flat range as boxes of the tensor."""
    (flat,) = found
    unit = ITEMSIZE[of.dtype]
    if flat.strides[-1] != unit and flat.box.shape[-1] > 1:
        raise IntegrityError(f"{flat.file}: the flat range {chunk.stored} of {of.fqn} is not contiguous")
    counts = of.items.meta.tensors[of.fqn].shape
    local = tuple(n // g for n, g in zip(of.shape, counts, strict=False))
    sizes = [b.size for b in chunk.boxes]
    starts = [0, *(sum(sizes[: i + 1]) for i, _ in enumerate(sizes))]
    for box, (at, _) in zip(chunk.boxes, pairwise(starts), strict=True):
        yield Extent(box, flat.file, flat.offset + at * unit, row_major(local, unit))
