"""Tiles of packed files: a piece cut along the grid of its whole tensor, each tile with its checksum behind it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from ucformat.format.chunking import chunk_shape
from ucformat.geometry.box import Box
from ucformat.geometry.tensor import Tiles

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["CHECKSUM_BYTES", "TILE_BYTES", "Tiling", "tile_shape"]

#: A tile has at most this many bytes, unless one element is larger.
TILE_BYTES = 1 << 20
CHECKSUM_BYTES = 4  # behind each tile

_CUTS = 8  # along each dim: degrees 1, 2, 4 and 8 fall on the boundaries of tiles


def tile_shape(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """The tile that writers choose for a tensor: a pure function of its shape, whoever holds which piece."""
    return _tile_shape(shape, itemsize, TILE_BYTES)


@lru_cache(4096)
def _tile_shape(shape: tuple[int, ...], itemsize: int, target: int) -> tuple[int, ...]:
    return chunk_shape(shape, itemsize, target, _CUTS)


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a box of a tensor lies in a packed file: its tiles in C order, each in row-major order with its checksum.

    Tiles begin at multiples of `tile` (elements) in the tensor, wherever the box begins; those that leave the box are
    clipped, so that whoever reads a part of the tensor meets the same boundaries however it was cut when it was saved.
    """

    box: Box
    tile: tuple[int, ...]
    itemsize: int

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of tiles along each dim."""
        return tuple(-(-b // t) - a // t for a, b, t in zip(self.box.start, self.box.stop, self.tile, strict=True))

    @property
    def count(self) -> int:
        """Number of tiles; none of a box without elements."""
        return math.prod(self.grid) if self.box.size else 0

    @property
    def nbytes(self) -> int:
        """Bytes of all tiles, with their checksums."""
        return self.box.size * self.itemsize + CHECKSUM_BYTES * self.count

    def runs(self, file: str, offset: int, within: Box | None = None) -> Iterator[Tiles]:
        """The tiles that meet a box (None: all), those of one shape together; the first of all begins at `offset`."""
        for at in product(*(list(_runs(*dim)) for dim in self._dims(within))):
            start = tuple(r.start for r in at)
            tile = tuple(r.edge for r in at)
            shape = tuple(r.tiles * r.edge for r in at)
            begin, steps = self._place(at)
            yield Tiles(Box(start, shape), file, offset + begin, tile, self.itemsize, steps)

    def boxes(self) -> Iterator[Box]:
        """All tiles, in the order in which they lie."""
        if not self.box.size:
            return
        for at in product(*(list(_runs(*dim, most=1)) for dim in self._dims(None))):
            yield Box(tuple(r.start for r in at), tuple(r.edge for r in at))

    def _dims(self, within: Box | None) -> Iterator[tuple[int, int, int, int, int]]:
        near = within or self.box
        for a, b, t, low, high in zip(self.box.start, self.box.stop, self.tile, near.start, near.stop, strict=True):
            yield a, b, t, max(a, low), min(b, high)

    def _place(self, at: Sequence[_Run]) -> tuple[int, tuple[int, ...]]:
        """Where the first tile of runs lies, in bytes behind the first of all, and how far to the next in each dim."""
        begin, steps = 0, []
        above = 1  # elements of these tiles, in the dims above
        elements, tiles = self.box.size, self.count  # of the box, in the dims below
        for run, a, n, count, t in zip(at, self.box.start, self.box.shape, self.grid, self.tile, strict=True):
            elements, tiles = elements // n, tiles // count
            begin += above * (run.start - a) * elements * self.itemsize + run.first * tiles * CHECKSUM_BYTES
            steps.append(above * t * elements * self.itemsize + tiles * CHECKSUM_BYTES)
            above *= run.edge
        return begin, tuple(steps)


class _Run(NamedTuple):
    """Along one dim: `tiles` of them from number `first` of the box on, of `edge` elements each, from `start` on."""

    first: int
    tiles: int
    start: int
    edge: int


def _runs(start: int, stop: int, tile: int, low: int, high: int, most: int | None = None) -> Iterator[_Run]:
    """The tiles between `start` and `stop` that meet `low … high`, as few runs as can be, each of at most `most`."""
    number = low // tile
    while low < high and number * tile < high:
        begin, end = max(start, number * tile), min(stop, (number + 1) * tile)
        whole = min(high, stop) // tile - number if end - begin == tile else 1
        count = max(1, whole if most is None else min(whole, most))
        yield _Run(number - start // tile, count, begin, end - begin)
        number += count
