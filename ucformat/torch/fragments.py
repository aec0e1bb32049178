"""Boxes of local tensors as rows of bytes: gathered for a file or a message, scattered from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ucformat.geometry.box import Box, row_major

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ucformat.geometry.tensor import Piece
    from ucformat.torch.memory import Memory

__all__ = ["Region", "blocks_of", "copy_common", "region_of"]

#: Bytes of a block, unless its maker says otherwise.
BLOCK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Region:
    """A box of a tensor in memory: element `box.start + i` at byte `offset + sum(i[d] * strides[d])`."""

    box: Box
    memory: Memory
    offset: int
    strides: tuple[int, ...]

    def within(self, box: Box) -> Region:
        """The region of a box inside this one."""
        skip = sum((a - b) * s for a, b, s in zip(box.start, self.box.start, self.strides, strict=True))
        return Region(box, self.memory, self.offset + skip, self.strides)

    def elements(self, itemsize: int) -> NDArray[np.generic]:
        """The box as an array of whole elements, whatever their type."""
        return np.ndarray(self.box.shape, _UNITS[itemsize], self.memory, self.offset, self.strides)

    def row_major(self, itemsize: int) -> Memory:
        """The box's bytes in row-major order: its own memory where they lie so, else a copy."""
        if self.is_row_major(itemsize):
            return self.memory[self.offset : self.offset + self.box.size * itemsize]
        return np.ascontiguousarray(self.elements(itemsize)).reshape(-1).view(np.uint8)

    def is_row_major(self, itemsize: int) -> bool:
        """Whether the box's bytes lie in row-major order."""
        dense = row_major(self.box.shape, itemsize)
        return all(n == 1 or s == d for n, s, d in zip(self.box.shape, self.strides, dense, strict=True))

    def copy_to(self, memory: Memory, itemsize: int) -> None:
        """Copy the box's bytes in row-major order to the beginning of `memory`."""
        dense_region(self.box, memory, itemsize).elements(itemsize)[...] = self.elements(itemsize)


_UNITS = {n: np.dtype(f"V{n}") if n > 8 else np.dtype(f"u{n}") for n in (1, 2, 4, 8, 16)}


def region_of(piece: Piece, memory: Memory, itemsize: int) -> Region:
    """Where a piece lies in the host memory of its tensor."""
    return Region(piece.box, memory, piece.offset * itemsize, tuple(s * itemsize for s in piece.strides))


def dense_region(box: Box, memory: Memory, itemsize: int) -> Region:
    """A box that lies in row-major order in memory of its own."""
    return Region(box, memory, 0, row_major(box.shape, itemsize))


def copy_common(source: Region, target: Region, itemsize: int) -> None:
    """Copy what two regions have in common."""
    common = source.box.intersect(target.box)
    if common is not None:
        target.within(common).elements(itemsize)[...] = source.within(common).elements(itemsize)


def blocks_of(box: Box, itemsize: int, most: int = BLOCK_BYTES) -> Sequence[Box]:
    """A box cut in blocks that follow each other in its row-major order, each of at most `most` bytes."""
    if box.size * itemsize <= most or not box.shape:
        return [box] if box.size else []
    row = box.size // box.shape[0] * itemsize
    rows = max(1, most // row)
    out: list[Box] = []
    for first in range(0, box.shape[0], rows):
        count = min(rows, box.shape[0] - first)
        cut = Box((box.start[0] + first, *box.start[1:]), (count, *box.shape[1:]))
        if count == 1 and row > most:  # cut the row itself
            below = blocks_of(Box(cut.start[1:], cut.shape[1:]), itemsize, most)
            out += [Box((cut.start[0], *b.start), (1, *b.shape)) for b in below]
        else:
            out.append(cut)
    return out
