"""The chunk and shard grids of a tensor, and the tiles of packed files: pure functions of shape and dtype."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from ucformat.errors import IntegrityError
from ucformat.geometry.box import Box, each_index, unravel
from ucformat.geometry.tensor import Tiles

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: A chunk is the unit of reading and of checksums: at most this many bytes, unless one element is
#: larger.
CHUNK_BYTES = 1 << 20
#: A shard is the unit of writing: at most this many bytes of chunks, and at least half of it if the
#: tensor allows.
SHARD_BYTES = 128 << 20

CHECKSUM_BYTES = 4  # after each chunk or tile

# An encoded chunk is at most its header longer than without. zstd makes no less than four bytes of
# 128 KiB.
_BLOSC_HEADER, _LARGEST_RATIO = 16, 1 << 15  # bytes; decoded bytes for each stored one

_DEGREES = 16  # cuts into 1, 2, 4, 8 and 16 parts fall on chunk boundaries
_MIN_FRACTION = 16  # chunks are not made smaller than 1/16 of the target
# rows of a chunk are not made shorter, or than this part of a target below 1 MiB
_ROW_BYTES, _ROW_FRACTION = 256, 4096


def chunk_shape(
    shape: tuple[int, ...], itemsize: int, target: int = CHUNK_BYTES
) -> tuple[int, ...]:
    """Choose the shape of a tensor's chunks, and of its tiles in packed files.

    A tensor of at most `target` bytes is one chunk. A larger one of two or more dims is tiled
    first, so that cuts of each dim into 1, 2, 4, 8 and 16 parts fall on chunk boundaries if the dim
    divides; dims that do not divide stay whole. A dim of at most 16 elements, such as experts or
    layers, is cut into single indices, if the last dim is longer and the chunks remain large
    enough. Otherwise it is cut like any other. No cut makes rows, of elements that follow one
    another in the tensor, shorter than 256 bytes (or 1/4096 of a smaller target): rows of
    embeddings stay whole, and 16 ranks can each have columns of a weight. If tiles would get too
    small, the dim with the most cuts gets fewer; of several such dims the first one while they have
    16 cuts, then the last one: ranks most often read an eighth of the rows, which should be whole
    tiles. A tile that is still larger than `target` is cut along its first dims.
    """
    edges = [max(1, n) for n in shape]
    total = math.prod(edges) * itemsize
    if len(edges) > 1 and total > target:
        floor = max(itemsize, target // _MIN_FRACTION)
        row = min(_ROW_BYTES, target // _ROW_FRACTION)
        inner = [math.prod(edges[d + 1 :]) * itemsize for d in range(len(edges))]
        cuts = [_cuts(*dim, row) for dim in zip(edges, inner, strict=True)]
        degrees = [
            n if n <= _DEGREES and index >= row else c
            for n, index, c in zip(edges, inner, cuts, strict=True)
        ]
        if edges[-1] <= _DEGREES or total // math.prod(degrees) < floor:
            degrees = cuts
        while total // math.prod(degrees) < floor and max(degrees) > 1:
            most = max(degrees)
            where = [d for d, n in enumerate(degrees) if n == most]
            degrees[where[0 if most == _DEGREES else -1]] //= 2
        edges = [n // g for n, g in zip(edges, degrees, strict=True)]
    return row_block(tuple(edges), itemsize, target)


def _cuts(n: int, inner: int, row: int) -> int:
    """The most of 1, 2, 4, 8 and 16 parts into which a dim is cut evenly, so that each has rows of `row` bytes.

    Args:
        inner: the bytes of one index of the dim.
    """
    cuts = math.gcd(n, _DEGREES)
    while cuts > 1 and n // cuts * inner < row:
        cuts //= 2
    return cuts


def row_block(shape: tuple[int, ...], itemsize: int, target: int = CHUNK_BYTES) -> tuple[int, ...]:
    """Cut a box along its first dims, until it has at most `target` bytes or one element."""
    edges = [max(1, n) for n in shape]
    for d in range(len(edges)):
        inner = math.prod(edges[d + 1 :]) * itemsize
        if edges[d] * inner <= target:
            break
        edges[d] = _part(edges[d], max(1, target // inner))
    return tuple(edges)


def _part(n: int, most: int) -> int:
    """The edge of at most `most` that cuts `n` evenly, with up to four times the chunks; else with little padding."""
    fewest = -(-n // most)
    for count in range(fewest, 4 * fewest + 1):
        if n % count == 0:
            return n // count
    return -(-n // fewest)


def shard_shape(
    shape: tuple[int, ...], chunk: tuple[int, ...], itemsize: int, target: int = SHARD_BYTES
) -> tuple[int, ...]:
    """Choose the shape of a tensor's shards: all chunks along the last dims, and as many along the first as fit.

    Args:
        target: the most bytes of a shard's chunks, unless one chunk is larger (default 128 MiB).

    Returns:
        The edges of a shard, in elements: multiples of the chunk's.
    """
    counts = [-(-max(1, n) // c) for n, c in zip(shape, chunk, strict=True)]
    take = [1] * len(counts)
    nbytes = math.prod(chunk) * itemsize
    for d in reversed(range(len(counts))):
        most = max(1, target // nbytes)
        parts = -(-counts[d] // most)
        take[d] = -(-counts[d] // parts)
        nbytes *= take[d]
        if parts > 1:
            break
    return tuple(c * t for c, t in zip(chunk, take, strict=True))


@dataclass(frozen=True, slots=True)
class Grid:
    """The chunk and shard grids of a tensor.

    Attributes:
        chunk: the edges of a chunk, in elements.
        shard: the edges of a shard, in elements: multiples of the chunk's.
    """

    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    shard: tuple[int, ...]
    itemsize: int

    @classmethod
    @lru_cache(maxsize=1 << 12)  # layers repeat
    def of(
        cls,
        shape: tuple[int, ...],
        itemsize: int,
        chunk_bytes: int | None = None,
        shard_bytes: int | None = None,
    ) -> Grid:
        """The grid that format version 1 chooses for a tensor."""
        chunk = chunk_shape(shape, itemsize, chunk_bytes or CHUNK_BYTES)
        return cls(
            shape, chunk, shard_shape(shape, chunk, itemsize, shard_bytes or SHARD_BYTES), itemsize
        )

    @property
    def chunk_nbytes(self) -> int:
        """Bytes of a chunk without its checksum."""
        return math.prod(self.chunk) * self.itemsize

    @property
    def chunks(self) -> tuple[int, ...]:
        """Number of chunks of the tensor along each dim; 0 along an empty dim."""
        return tuple(-(-n // c) for n, c in zip(self.shape, self.chunk, strict=True))

    @property
    def chunks_in_shard(self) -> tuple[int, ...]:
        """Number of chunks of a whole shard along each dim."""
        return tuple(s // c for s, c in zip(self.shard, self.chunk, strict=True))

    @property
    def count(self) -> int:
        """Number of shards."""
        return math.prod(self._shards)

    @property
    def _shards(self) -> list[int]:
        """Number of shards along each dim."""
        return [-(-n // s) for n, s in zip(self.shape, self.shard, strict=True)]

    def shards(self, within: Box | None = None) -> Iterator[tuple[int, ...]]:
        """The coordinates of shards, in C order; none if the tensor has no elements."""
        box = within or Box.whole(self.shape)
        bounds = zip(box.start, box.stop, self.shard, strict=True)
        return each_index([range(first // s, -(-last // s)) for first, last, s in bounds])

    def shard_at(self, number: int) -> tuple[int, ...]:
        """The coordinates of a shard."""
        return unravel(number, self._shards)

    def box(self, shard: tuple[int, ...]) -> Box:
        """The part of the tensor in a shard."""
        start = tuple(i * s for i, s in zip(shard, self.shard, strict=True))
        return Box(
            start,
            tuple(min(s, n - a) for s, n, a in zip(self.shard, self.shape, start, strict=True)),
        )

    def tiles(self, shard: tuple[int, ...], file: str) -> Tiles:
        """The extents of a shard's chunks."""
        return Tiles(self.box(shard), file, 0, self.chunk, self.itemsize)

    @property
    def index_nbytes(self) -> int:
        """Bytes of the index at the end of a shard's file, with its checksum."""
        return 16 * math.prod(self.chunks_in_shard) + CHECKSUM_BYTES

    def chunk_limits(self, codec: str | None) -> tuple[int, int]:
        """The fewest and the most bytes that a chunk has in a file, with its checksum."""
        nbytes, beside = self.chunk_nbytes, CHECKSUM_BYTES
        if codec is None:
            return nbytes + beside, nbytes + beside
        beside += _BLOSC_HEADER
        return nbytes // _LARGEST_RATIO + beside, nbytes + beside

    def check_size(self, shard: tuple[int, ...], codec: str | None, size: int) -> None:
        """Check that a shard's file can have this size.

        Raises:
            IntegrityError: it cannot.
        """
        chunks = math.prod(self.tiles(shard, "").grid)
        least, most = (chunks * n + self.index_nbytes for n in self.chunk_limits(codec))
        if not least <= size <= most:
            expected = str(least) if least == most else f"{least} to {most}"
            raise IntegrityError(f"the file has {size} bytes instead of {expected}")

    def file_nbytes(self, shard: tuple[int, ...]) -> int:
        """Bytes of a shard's file whose chunks are not encoded: these and then the index, each with a checksum."""
        stored = math.prod(self.tiles(shard, "").grid)
        return stored * (self.chunk_nbytes + CHECKSUM_BYTES) + self.index_nbytes


#: A tile of a packed file has at most this many bytes, unless one element is larger.
TILE_BYTES = CHUNK_BYTES


@dataclass(frozen=True, slots=True)
class Tiling:
    """The tiles of a tensor in packed files, where a box of it is stored tile by tile, each followed by its checksum.

    Tiles are in C order, and each is row-major. They begin at multiples of `tile` in the tensor,
    wherever the box begins, and are clipped to the box. So tile boundaries do not depend on how the
    tensor was sharded when it was saved.

    Attributes:
        tile: the edges of a tile, in elements.
    """

    tile: tuple[int, ...]
    itemsize: int

    @classmethod
    def of(cls, shape: tuple[int, ...], itemsize: int) -> Tiling:
        """The tiles that writers choose for a tensor."""
        return _tiling(shape, itemsize, TILE_BYTES)

    def grid(self, box: Box) -> tuple[int, ...]:
        """Number of tiles along each dim."""
        return tuple(
            -(-b // t) - a // t for a, b, t in zip(box.start, box.stop, self.tile, strict=True)
        )

    def count(self, box: Box) -> int:
        """Number of tiles.

        Args:
            box: the stored box; without elements it has no tiles.
        """
        return math.prod(self.grid(box)) if box.size else 0

    def nbytes(self, box: Box) -> int:
        """Bytes of all tiles with their checksums."""
        return _nbytes(self, box)

    def runs(self, box: Box, file: str, offset: int, within: Box | None = None) -> Iterator[Tiles]:
        """The tiles of a stored box, those of equal shape together.

        Args:
            offset: the byte of the file at which the first tile of the box begins.
            within: only the tiles that intersect this box of the tensor (default: all).
        """
        for run_box, begin, tile, steps in _placed_runs(self, box, within or box):
            yield Tiles(run_box, file, offset + begin, tile, self.itemsize, steps)

    def boxes(self, box: Box) -> Iterator[Box]:
        """Each tile of a box, in the order of the file."""
        count = self.count(box)
        if count < 2:
            yield from (box,) * count
            return
        dims = [list(_runs(*dim, most=1)) for dim in self.dims(box, box)]
        starts = product(*([run.start for run in runs] for runs in dims))
        yield from map(Box, starts, product(*([run.edge for run in runs] for runs in dims)))

    def placed(self, box: Box, offset: int) -> Iterator[tuple[int, Box]]:
        """Each tile of a box, in the order of the file, and the byte at which it begins.

        Args:
            offset: the byte at which the first one does.
        """
        for tile in self.boxes(box):
            yield offset, tile
            offset += tile.size * self.itemsize + CHECKSUM_BYTES

    def dims(self, box: Box, within: Box) -> Iterator[tuple[int, int, int, int, int]]:
        """Of each dim: the range of a box, the tile's edge, and the range to which the box is limited."""
        for a, b, t, low, high in zip(
            box.start, box.stop, self.tile, within.start, within.stop, strict=True
        ):
            yield a, b, t, max(a, low), min(b, high)

    def place(self, box: Box, at: Sequence[_TileRun]) -> tuple[int, tuple[int, ...]]:
        """The offset of the first tile of some runs from the box's first tile, and the step per dim, in bytes."""
        begin, steps = 0, []
        above = 1  # elements of these tiles, in the dims above
        elements, tiles = box.size, self.count(box)  # of the box, in the dims below
        for run, a, n, count, t in zip(
            at, box.start, box.shape, self.grid(box), self.tile, strict=True
        ):
            elements, tiles = elements // n, tiles // count
            begin += (
                above * (run.start - a) * elements * self.itemsize
                + run.first * tiles * CHECKSUM_BYTES
            )
            steps.append(above * t * elements * self.itemsize + tiles * CHECKSUM_BYTES)
            above *= run.edge
        return begin, tuple(steps)


@lru_cache(maxsize=1 << 12)  # layers repeat: a model has few distinct shapes
def _tiling(shape: tuple[int, ...], itemsize: int, target: int) -> Tiling:
    return Tiling(chunk_shape(shape, itemsize, target), itemsize)


@lru_cache(maxsize=1 << 12)
def _nbytes(tiling: Tiling, box: Box) -> int:
    return box.size * tiling.itemsize + CHECKSUM_BYTES * tiling.count(box)


@lru_cache(maxsize=1 << 12)
def _placed_runs(
    tiling: Tiling, box: Box, within: Box
) -> tuple[tuple[Box, int, tuple[int, ...], tuple[int, ...]], ...]:
    """`Tiling.runs`: the box, the offset from the box's first tile, the tile and the steps of each."""
    out = []
    for at in product(*(list(_runs(*dim)) for dim in tiling.dims(box, within))):
        run_box = Box(tuple(r.start for r in at), tuple(r.tiles * r.edge for r in at))
        begin, steps = tiling.place(box, at)
        out.append((run_box, begin, tuple(r.edge for r in at), steps))
    return tuple(out)


class _TileRun(NamedTuple):
    """Consecutive tiles along a dim: `tiles` of `edge` elements each, from number `first` of the box, at `start`."""

    first: int
    tiles: int
    start: int
    edge: int


def _runs(
    start: int, stop: int, tile: int, low: int, high: int, most: int | None = None
) -> Iterator[_TileRun]:
    """The tiles of `[start, stop)` that intersect `[low, high)`, in as few runs as possible, of at most `most` each."""
    number = low // tile
    while low < high and number * tile < high:
        begin, end = max(start, number * tile), min(stop, (number + 1) * tile)
        whole = min(high, stop) // tile - number if end - begin == tile else 1
        count = max(1, whole if most is None else min(whole, most))
        yield _TileRun(number - start // tile, count, begin, end - begin)
        number += count
