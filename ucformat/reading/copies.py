"""Strided copies from a file to a buffer, computed by intersecting extents with pieces."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product
from typing import TYPE_CHECKING, overload

from ucformat.geometry.box import row_major
from ucformat.geometry.tensor import Block, Extent, Tiles

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucformat.geometry.box import Box
    from ucformat.geometry.tensor import Piece


@dataclass(frozen=True, slots=True)
class Copy:
    """Copies bytes `src + i·src_strides` to `dst + i·dst_strides` of a buffer, for every index `i` of `shape`.

    All values are in bytes. Dims are folded: adjacent dims that one stride covers on both sides are
    one dim; the last is a run of bytes that is contiguous on both sides. In a request of a plan,
    `src` counts from the first byte of the request; the copy is repeated `count` times, `src_step`
    and `dst_step` apart. With a `block`, each repetition is within a block of its own, `src_step`
    apart, whose checksum is verified. If the request stands for several files, the copies from the
    next one follow `file_step` bytes later in the buffer.
    """

    shape: tuple[int, ...]
    src: int
    src_strides: tuple[int, ...]
    dst: int
    dst_strides: tuple[int, ...]
    buffer: int = 0
    block: Block | None = None
    count: int = 1
    src_step: int = 0
    dst_step: int = 0
    file_step: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes copied by one of `count` repetitions."""
        return math.prod(self.shape)

    def within(self, outer: Copy) -> Copy:
        """This copy repeated for each index of `outer`, as one copy with dims in descending order of file stride."""
        if outer is _ONCE and all(a >= b for a, b in pairwise(self.src_strides)):
            return self
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


_ONCE = Copy((), 0, (), 0, ())


def copies(
    extent: Extent | Tiles, piece: Piece, common: Box, itemsize: int
) -> Iterator[tuple[Copy, Copy, Block | None, bool]]:
    """Compute what to copy from `extent` to `piece`, both of one tensor.

    Yields:
        a copy whose `src` counts from the beginning of the file, the grid of chunks over which it
        is repeated, the
            block of the first chunk, and whether all elements of each chunk are copied.
    """
    dst_strides = tuple(s * itemsize for s in piece.strides)
    if isinstance(extent, Tiles):
        grid = (extent.box, extent.chunk, itemsize, extent.strides)
        at, base, nbytes = (
            extent.offset,
            piece.offset * itemsize,
            math.prod(extent.chunk) * itemsize,
        )
        for inner, outer, begin, whole in _tiled(*grid, common, piece.box.start, dst_strides):
            copy = Copy(
                inner.shape, inner.src + at, inner.src_strides, inner.dst + base, inner.dst_strides
            )
            yield copy, outer, Block(at + begin, nbytes, placed=extent.placed), whole
        return
    src = extent.offset + _dot(common.start, extent.box.start, extent.strides)
    dst = piece.offset * itemsize + _dot(common.start, piece.box.start, dst_strides)
    inner = _fold((*common.shape, itemsize), src, (*extent.strides, 1), dst, (*dst_strides, 1))
    yield inner, _ONCE, extent.block, common == extent.box


@lru_cache(maxsize=1 << 12)  # layers repeat: a model has few distinct shapes
def _tiled(
    box: Box,
    chunk: tuple[int, ...],
    itemsize: int,
    grid: tuple[int, ...],
    common: Box,
    start: tuple[int, ...],
    dst_strides: tuple[int, ...],
) -> tuple[tuple[Copy, Copy, int, bool], ...]:
    """A copy for each combination, over the dims, of a partial first chunk, the whole ones and a partial last chunk.

    Offsets, also that of the first chunk, count from the first chunk of the tiles and the first
    element of the piece.
    """
    within = row_major(chunk, itemsize)
    cuts = [
        tuple(_cuts(a - s, n, c, m))
        for a, n, s, c, m in zip(
            common.start, common.shape, box.start, chunk, box.shape, strict=True
        )
    ]
    base = _dot(box.start, start, dst_strides)
    outer_dst = tuple(n * t for n, t in zip(chunk, dst_strides, strict=True))
    out = []
    for cut in product(*cuts):
        begin = sum(c.first * g for c, g in zip(cut, grid, strict=True))
        src = begin + sum(c.skip * w for c, w in zip(cut, within, strict=True))
        dst = base + sum(
            (c.first * n + c.skip) * t for c, n, t in zip(cut, chunk, dst_strides, strict=True)
        )
        outer = _fold(tuple(c.count for c in cut), 0, grid, 0, outer_dst, run=False)
        inner = _fold(
            (*(c.length for c in cut), itemsize), src, (*within, 1), dst, (*dst_strides, 1)
        )
        out.append((inner, outer, begin, all(c.whole for c in cut)))
    return tuple(out)


@dataclass(frozen=True, slots=True)
class _Cut:
    """Along one dim: `count` chunks beginning with chunk `first`, in each the `length` elements after `skip`."""

    first: int
    count: int
    skip: int
    length: int
    whole: bool


def _cuts(start: int, length: int, chunk: int, bound: int) -> Iterator[_Cut]:
    """The cuts of the range `start … start + length` of a dim of `bound` elements by chunks of `chunk` elements."""
    stop = start + length
    while start < stop:
        first, skip = divmod(start, chunk)
        full = min(chunk, bound - first * chunk)  # the last chunk has fewer elements, then padding
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
) -> Copy:
    """Drop dims of size 1, merge dims that one stride covers on both sides; with `run`, end in a run of bytes."""
    folded, src_steps, dst_steps = _folded(shape, src_strides, dst_strides, run)
    return Copy(folded, src, src_steps, dst, dst_steps)


@lru_cache(maxsize=1 << 12)  # rows that a view takes differ only in their place
def _folded(
    shape: tuple[int, ...],
    src_strides: tuple[int, ...],
    dst_strides: tuple[int, ...],
    run: bool,  # noqa: FBT001
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
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
    return tuple(n for n, _, _ in dims), tuple(s for _, s, _ in dims), tuple(d for _, _, d in dims)


def placed(c: Copy, src: int, dst: int) -> Copy:
    """The same copy from and to other places."""
    where = (c.shape, src, c.src_strides, dst, c.dst_strides)
    return Copy(*where, c.buffer, c.block, c.count, c.src_step, c.dst_step, c.file_step)


@dataclass(frozen=True, slots=True, eq=False)
class AlikeCopies(Sequence[Copy]):
    """The copies of tensors that lie alike, each to the same place of a buffer of its own; made when asked for.

    Attributes:
        first: the first of them.
        further: how many bytes further in the file each of them lies, ascending from 0.
        buffers: the buffer of each.
    """

    first: Copy
    further: list[int]
    buffers: list[int]

    def __len__(self) -> int:
        return len(self.buffers)

    @overload
    def __getitem__(self, index: int) -> Copy: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Copy]: ...
    def __getitem__(self, index: int | slice) -> Copy | Sequence[Copy]:
        if isinstance(index, slice):
            return [self[n] for n in range(len(self))[index]]
        further = self.further[index]
        return moved_copy(self.first, self.first.src + further, further, self.buffers[index])


def moved_copy(c: Copy, src: int, by: int, buffer: int) -> Copy:
    """The same copy from another place, with its block so many bytes further in the file, to another buffer."""
    block = c.block and Block(c.block.offset + by, c.block.nbytes, c.block.crc32c, c.block.placed)
    where = (c.shape, src, c.src_strides, c.dst, c.dst_strides, buffer, block)
    return Copy(*where, c.count, c.src_step, c.dst_step)
