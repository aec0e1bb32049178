"""Moves: equal strided sets of bytes in a file and in a buffer, made by intersecting extents with pieces."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from ucformat.geometry.box import Box, row_major
from ucformat.geometry.tensor import Extent, Tiles

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucformat.geometry.tensor import Piece

__all__ = ["Check", "Move", "Strided", "moves"]


@dataclass(frozen=True, slots=True)
class Strided:
    """Bytes `src + i·src_strides` of a file and `dst + i·dst_strides` of a buffer, for every index `i` below `shape`.

    All in bytes. Dims are folded: neighbours that one stride can walk, in the file and in the buffer, are one dim; the
    last is a run of adjacent bytes in both.
    """

    shape: tuple[int, ...]
    src: int
    src_strides: tuple[int, ...]
    dst: int
    dst_strides: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes moved."""
        return math.prod(self.shape)

    def within(self, outer: Strided) -> Strided:
        """This set once for each index of `outer`, as one set, its dims sorted by their stride in the file."""
        dims = sorted(
            zip(
                outer.shape + self.shape,
                outer.src_strides + self.src_strides,
                outer.dst_strides + self.dst_strides,
                strict=True,
            ),
            key=lambda dim: -dim[1],
        )
        shape, src_strides, dst_strides = zip(*dims, strict=True)
        return _fold(shape, self.src + outer.src, src_strides, self.dst + outer.dst, dst_strides)


@dataclass(frozen=True, slots=True)
class Check:
    """The chunk of `nbytes` that holds all of one inner set, and its checksum.

    It begins `skip` bytes before the set's first byte; `crc32c` and `placed` as of a `Block`.
    """

    nbytes: int
    skip: int
    crc32c: int | None = None
    placed: bool = False

    @property
    def stored(self) -> int:
        """Bytes to read for the chunk and what is stored of its checksum."""
        return self.nbytes + (4 if self.crc32c is None else 0)


@dataclass(frozen=True, slots=True)
class Move:
    """What one extent gives to one piece: the set `inner`, once for each index of the chunk grid `outer`."""

    file: str
    outer: Strided
    inner: Strided
    check: Check | None
    whole: bool  # all of each chunk's elements are wanted

    @property
    def nbytes(self) -> int:
        """Bytes wanted."""
        return self.outer.nbytes * self.inner.nbytes


_ONE = Strided((), 0, (), 0, ())


def moves(extent: Extent | Tiles, piece: Piece, itemsize: int) -> Iterator[Move]:
    """What `extent` gives to `piece`, both of one tensor whose elements are `itemsize` bytes; nothing if disjoint."""
    common = extent.box.intersect(piece.box)
    if common is None:
        return
    to = tuple(s * itemsize for s in piece.strides)
    if isinstance(extent, Tiles):
        yield from _tiled(extent, common, piece, to)
        return
    src = extent.offset + _dot(common.start, extent.box.start, extent.strides)
    dst = piece.offset * itemsize + _dot(common.start, piece.box.start, to)
    inner = _fold((*common.shape, itemsize), src, (*extent.strides, 1), dst, (*to, 1))
    check = None
    if extent.block is not None:
        block = extent.block
        check = Check(block.nbytes, src - block.offset, block.crc32c, block.placed)
    yield Move(extent.file, _ONE, inner, check, whole=common == extent.box)


def _tiled(tiles: Tiles, common: Box, piece: Piece, to: tuple[int, ...]) -> Iterator[Move]:
    """One move for each combination, over the dims, of a cut first chunk, the whole ones and a cut last chunk."""
    grid = tiles.strides
    within = row_major(tiles.chunk, tiles.itemsize)
    nbytes = math.prod(tiles.chunk) * tiles.itemsize
    cuts = [
        tuple(_cuts(a - s, n, c, m))
        for a, n, s, c, m in zip(common.start, common.shape, tiles.box.start, tiles.chunk, tiles.box.shape, strict=True)
    ]
    base = piece.offset * tiles.itemsize + _dot(tiles.box.start, piece.box.start, to)
    for cut in product(*cuts):
        skip = sum(c.skip * w for c, w in zip(cut, within, strict=True))
        src = tiles.offset + skip + sum(c.first * g for c, g in zip(cut, grid, strict=True))
        dst = base + sum((c.first * n + c.skip) * t for c, n, t in zip(cut, tiles.chunk, to, strict=True))
        outer_to = tuple(n * t for n, t in zip(tiles.chunk, to, strict=True))
        outer = _fold(tuple(c.count for c in cut), 0, grid, 0, outer_to, run=False)
        inner = _fold((*(c.length for c in cut), tiles.itemsize), src, (*within, 1), dst, (*to, 1))
        yield Move(tiles.file, outer, inner, Check(nbytes, skip, placed=tiles.placed), all(c.whole for c in cut))


@dataclass(frozen=True, slots=True)
class _Cut:
    """Along one dim: `count` chunks from number `first` on, of each the `length` elements after `skip`."""

    first: int
    count: int
    skip: int
    length: int
    whole: bool


def _cuts(start: int, length: int, chunk: int, bound: int) -> Iterator[_Cut]:
    """How the range `start … start + length` of a dim of `bound` elements lies over chunks of `chunk` elements."""
    stop = start + length
    while start < stop:
        first, skip = divmod(start, chunk)
        full = min(chunk, bound - first * chunk)  # the last chunk holds fewer elements, and padding
        n = min(full - skip, stop - start)
        count = 1
        if n == chunk:
            count = (stop - start) // chunk
        yield _Cut(first, count, skip, n, whole=skip == 0 and n == full)
        start += n * count


def _dot(at: tuple[int, ...], start: tuple[int, ...], strides: tuple[int, ...]) -> int:
    return sum((a - s) * t for a, s, t in zip(at, start, strides, strict=True))


def _fold(
    shape: tuple[int, ...],
    src: int,
    src_strides: tuple[int, ...],
    dst: int,
    dst_strides: tuple[int, ...],
    *,
    run: bool = True,
) -> Strided:
    """Drop dims of one element, join neighbours that one stride walks on both sides; `run`: end in a run of bytes."""
    dims: list[tuple[int, int, int]] = []
    for n, s, d in zip(shape, src_strides, dst_strides, strict=True):
        if n == 1:
            continue
        if dims and dims[-1][1] == n * s and dims[-1][2] == n * d:
            dims[-1] = (dims[-1][0] * n, s, d)
        else:
            dims.append((n, s, d))
    if run and (not dims or dims[-1][1:] != (1, 1)):
        dims.append((1, 1, 1))
    return Strided(tuple(n for n, _, _ in dims), src, tuple(s for _, s, _ in dims), dst, tuple(d for _, _, d in dims))
