"""Described tensors: those of a packed checkpoint whose extents follow from distributions (docs/spec/format.md).

Their boxes, files and offsets are computed when a tensor is read, so a sidecar does not grow with
the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np

from ucformat.errors import LayoutError
from ucformat.format.chunking import CHECKSUM_BYTES, Tiling
from ucformat.geometry.box import Box
from ucformat.geometry.tensor import FileRun, Tiles
from ucformat.schema.limits import MAX_RANKS, MAX_SPAN, MAX_TILES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from ucformat.geometry.distribution import Distribution, Line
    from ucformat.geometry.tensor import TensorInfo
    from ucformat.schema.documents import DescribedDoc

#: Bytes: each box of a packed file begins at a multiple of it, so that the file can be mapped;
#: zeros fill the gaps.
ALIGNMENT = 64

_FEWEST = 8  # boxes along a dim for which runs are looked for
# coordinates of all meshes, each counted for every group of rows: bounds the memory of a reader
_MAX_WORK = 1 << 25


def packed_file(folder: str, rank: int) -> str:
    """Return the key of a rank's file in the packed form."""
    return f"{folder}/rank-{rank:05d}.bin"


class DescribedRow(NamedTuple):
    """A described tensor.

    Attributes:
        writer: which of the ranks that hold equal parts has written them: the number of their
            coordinate over the axes that do not cut the tensor, in row-major order.
        tile: the edges of the tiles (see `Tiling`) in elements.
    """

    tensor: int
    distribution: Distribution
    writer: int
    tile: tuple[int, ...]


class FileOrder:
    """A key that sorts described tensors into the order of the files, by themselves alone.

    Partitions of flat buffers come last, and equal distributions and shapes together. What those of
    a group have in common is computed once, and compared by identity.
    """

    def __init__(self) -> None:
        self._of_group: dict[tuple[int, str, tuple[int, ...]], tuple[Any, ...]] = {}

    def __call__(self, info: TensorInfo, distribution: Distribution) -> tuple[Any, ...]:
        """The key of a tensor; the distributions live as long as this."""
        d, group = distribution, (id(distribution), info.dtype, info.shape)
        if (common := self._of_group.get(group)) is None:
            mesh = (d.mesh.sizes, d.mesh.first, d.mesh.strides, d.mesh.listed)
            flat = () if d.flat is None else (d.flat, d.part)
            kind = (info.itemsize, info.shape) if d.flat is None else ()
            common = self._of_group[group] = (flat, mesh, d.cuts, *kind)
        return (common, d.position, info.name, info.state)


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """Consecutive rows of one distribution, shape, dtype and tiling, which no flat buffer contains."""

    distribution: Distribution
    shape: tuple[int, ...]
    tiling: Tiling
    # bytes of a row at each coordinate, padded to the alignment; replicas have one index
    stored: NDArray[np.int64]
    # the byte at which the first row begins in the file of each coordinate
    begin: NDArray[np.int64]

    def offset(self, coordinate: tuple[Any, ...], before: int) -> Any:
        """The offset of a row, of which so many of the group precede in its file; of arrays of indices, an array."""
        at = tuple(0 if n == 1 else i for n, i in zip(self.stored.shape, coordinate, strict=True))
        return self.begin[coordinate] + before * self.stored[at]


class _Near(NamedTuple):
    """Tiles near a box: in whose file, those of the first row, and the bytes from one row to the next."""

    rank: int
    tiles: Tiles
    step: int


class _Placed(NamedTuple):
    """Where rows are that no flat buffer contains."""

    of_row: list[tuple[_Group, int]]  # and how many rows of the group precede it in its files
    ends: NDArray[np.int64]  # of what precedes flat buffers in the file of each rank


@dataclass(frozen=True, slots=True)
class _FlatGroup:
    """Consecutive rows that one flat buffer contains."""

    distribution: Distribution  # of the first row
    rows: range
    start: NDArray[np.int64]  # of each row, in elements of the buffer
    stop: NDArray[np.int64]
    writer: NDArray[np.int64]

    def written_by(self, coordinate: tuple[int, ...]) -> list[int]:
        """The rows that a coordinate has written."""
        d = self.distribution
        low = coordinate[d.axes[-1]] * d.part
        mask = (
            (self.start < low + d.part) & (self.stop > low) & (self.writer == d.copy_of(coordinate))
        )
        return [self.rows[n] for n in np.flatnonzero(mask).tolist()]


@dataclass(frozen=True, slots=True)
class _RankFiles(Sequence[str]):
    """The files of some ranks."""

    folder: str
    ranks: range

    def __len__(self) -> int:
        return len(self.ranks)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> _RankFiles: ...
    def __getitem__(self, index: int | slice) -> str | _RankFiles:
        if isinstance(index, slice):
            return _RankFiles(self.folder, self.ranks[index])
        return packed_file(self.folder, self.ranks[index])


class Described:
    """The described tensors of a checkpoint.

    Args:
        rows: the tensors, in the order of the files. Those in flat buffers come last; of the
            others, those of equal distribution, shape, dtype and tiling are together.
        kinds: of each row what it has in common with those of its group (default: computed from the
            tensors).
    """

    def __init__(
        self,
        rows: Sequence[DescribedRow],
        infos: Mapping[int, TensorInfo] | Sequence[TensorInfo],
        folder: str,
        kinds: Sequence[Any] | None = None,
    ) -> None:
        self.rows, self.infos, self.folder = tuple(rows), infos, folder
        # by `sidecar`; copies in other folders share it
        self.encoded: list[tuple[DescribedDoc, dict[str, bytes]]] = []
        self._row = dict(zip(map(itemgetter(0), self.rows), range(len(self.rows)), strict=True))
        if len(self._row) < len(self.rows):
            raise LayoutError("a tensor is described twice")
        # to hash each is slower
        distinct = {id(d): d for d in map(itemgetter(1), self.rows)}.values()
        mesh_ranks = [m.ranks.reshape(-1) for m in {d.mesh for d in distinct}]
        #: The ranks that have files, ascending.
        self.ranks: NDArray[np.int64] = np.unique(
            np.concatenate([np.empty(0, np.int64), *mesh_ranks])
        )
        self._parts: list[list[DescribedRow]] = []  # the groups that no flat buffer contains
        self._flat_groups: list[_FlatGroup] = []
        # offsets do not depend on the folder: copies of `in_folder` share the cache
        self._flat_file = lru_cache(maxsize=1 << 14)(self._lay_out_flat)
        self._near = lru_cache(maxsize=1 << 8)(self._find_near)  # the same for all rows of a group
        if kinds is None:
            own = ((without_position(r.distribution), infos[r.tensor], r.tile) for r in self.rows)
            kinds = [kind_of(d, info.shape, info.itemsize, tile) for d, info, tile in own]
        self._lay_out(kinds)

    def __contains__(self, tensor: int) -> bool:
        return tensor in self._row

    def _lay_out(self, kinds: Sequence[Any]) -> None:
        seen_kinds: set[Any] = set()
        work = nbytes = first = 0
        for kind, group in groupby(zip(kinds, self.rows, strict=True), itemgetter(0)):
            rows = [row for _, row in group]
            flat = rows[0].distribution.flat is not None
            writers = np.array([r.writer for r in rows], np.int64)
            work += rows[0].distribution.mesh.size
            nbytes += (
                sum(map(self._most_bytes, rows)) if flat else self._most_bytes(rows[0]) * len(rows)
            )
            if work > _MAX_WORK or nbytes > MAX_SPAN:
                raise LayoutError("the described tensors are too many, or too large")
            if kind in seen_kinds or (self._flat_groups and not flat):
                raise LayoutError("the described tensors are not in the order of files")
            seen_kinds.add(kind)
            if not 0 <= writers.min() <= writers.max() < rows[0].distribution.copies:
                raise LayoutError(
                    f"{self.infos[rows[0].tensor].key} was written by a replica that does not exist"
                )
            self._add_flat(first, rows, writers) if flat else self._parts.append(rows)
            first += len(rows)

    def _most_bytes(self, row: DescribedRow) -> int:
        """The most bytes that all boxes of a row may occupy; LayoutError if it is impossible."""
        info, d = self.infos[row.tensor], row.distribution
        if len(row.tile) != len(info.shape) or min(row.tile, default=1) < 1:
            raise LayoutError(
                f"{info.key} of the shape {info.shape} has tiles of the shape {row.tile}"
            )
        if info.nbytes > MAX_SPAN or d.mesh.size > MAX_RANKS or not d.fits(info.shape):
            raise LayoutError(
                f"{info.key} of the shape {info.shape} cannot be distributed as it is described"
            )
        longest = (int(np.diff(b).max(initial=0)) for b in d.bounds(info.shape))
        if (
            math.prod((n + t - 2) // t + 1 for n, t in zip(longest, row.tile, strict=True) if n)
            > MAX_TILES
        ):
            raise LayoutError(
                f"{info.key} of the shape {info.shape} has too many tiles of the shape {row.tile}"
            )
        return info.nbytes * (1 + CHECKSUM_BYTES) + ALIGNMENT * d.mesh.size

    @cached_property
    def _placed(self) -> _Placed:
        """Where the rows are that no flat buffer contains; it takes memory for each rank, and writers do not ask."""
        of_row: list[tuple[_Group, int]] = []
        ends = np.zeros(self.ranks.max(initial=-1) + 1, np.int64)
        for rows in self._parts:
            d, info = rows[0].distribution, self.infos[rows[0].tensor]
            tiling = Tiling(rows[0].tile, info.itemsize)
            stored = _stored(d, info.shape, tiling)
            group = _Group(d, info.shape, tiling, stored, ends[d.mesh.ranks])
            writers = np.array([r.writer for r in rows], np.int64)
            written = np.bincount(writers, minlength=d.copies)
            sizes = [n if axis in d.replicas else 1 for axis, n in enumerate(d.mesh.sizes)]
            ends[d.mesh.ranks] += stored * written.reshape(sizes)
            # for each row, how many rows before it the same replica has written
            order = np.argsort(writers, kind="stable")
            before = np.empty_like(writers)
            before[order] = np.arange(len(writers)) - np.searchsorted(
                writers[order], writers[order]
            )
            of_row += [(group, n) for n in before.tolist()]
        return _Placed(of_row, ends)

    def _add_flat(
        self, first: int, rows: Sequence[DescribedRow], writers: NDArray[np.int64]
    ) -> None:
        d = rows[0].distribution
        origin = (0,) * len(d.mesh.sizes)
        start = np.array([r.distribution.position for r in rows], np.int64)
        size = np.array(
            [r.distribution.local(self.infos[r.tensor].shape, origin).size for r in rows], np.int64
        )
        self._flat_groups.append(
            _FlatGroup(d, range(first, first + len(rows)), start, start + size, writers)
        )

    def _lay_out_flat(self, rank: int) -> dict[tuple[int, Box], int]:
        """The offset of each (row, box) of a flat buffer in a rank's file."""
        end = int(self._placed.ends[rank])
        out: dict[tuple[int, Box], int] = {}
        for group in self._flat_groups:
            coordinate = group.distribution.mesh.coordinate(rank)
            for row in [] if coordinate is None else group.written_by(coordinate):
                tensor, d, _, tile = self.rows[row]
                info = self.infos[tensor]
                for box in d.boxes(info.shape, coordinate or ()):
                    out[row, box] = end
                    end += -(-Tiling(tile, info.itemsize).nbytes(box) // ALIGNMENT) * ALIGNMENT
        return out

    def in_folder(self, folder: str) -> Described:
        """The same tensors in files of the same content elsewhere."""
        out = copy(self)
        out.folder = folder
        return out

    @property
    def files(self) -> list[str]:
        """The keys of the ranks' files."""
        return [packed_file(self.folder, rank) for rank in self.ranks.tolist()]

    def stored(self, tensor: int, within: Box | None = None) -> Iterator[tuple[int, Box, int]]:
        """The rank that has written each box of a tensor, the box, and its offset in the rank's file."""
        row = self._row[tensor]
        d, writer, shape = (
            self.rows[row].distribution,
            self.rows[row].writer,
            self.infos[tensor].shape,
        )
        ranks = d.mesh.ranks
        for at, box in d.holdings(shape, Box.whole(shape) if within is None else within):
            coordinate = d.coordinate(at, writer)
            rank = int(ranks[coordinate])
            if d.flat is None:
                group, before = self._placed.of_row[row]
                yield rank, box, int(group.offset(coordinate, before))
            else:
                yield rank, box, self._flat_file(rank)[row, box]

    def written_by(self, rank: int) -> Iterator[tuple[int, Box, int]]:
        """The boxes in a rank's file, in any order: the tensor, the box, and its offset."""
        for (tensor, d, writer, _), (group, before) in zip(
            self.rows, self._placed.of_row, strict=False
        ):
            coordinate = d.mesh.coordinate(rank)
            if coordinate is not None and d.copy_of(coordinate) == writer:
                for box in d.boxes(self.infos[tensor].shape, coordinate):
                    yield tensor, box, int(group.offset(coordinate, before))
        for (row, box), offset in self._flat_file(rank).items():
            yield self.rows[row].tensor, box, offset

    def file_runs(self, tensor: int, within: Box) -> Iterator[Tiles | FileRun]:
        """The extents of a tensor; those at the same place of many files are one `FileRun`."""
        row = self._row[tensor]
        _, d, writer, _ = self.rows[row]
        if d.flat is not None or not within.size:
            yield from self.extents(tensor, within)
            return
        group, before = self._placed.of_row[row]
        near = self._near(group, writer, within)
        if near is not None:
            for rank, t, step in near:
                file, offset = packed_file(self.folder, rank), t.offset + before * step
                yield Tiles(t.box, file, offset, t.chunk, t.itemsize, t.steps)
            return
        shape, tiling = group.shape, group.tiling
        for line in d.lines(shape, within):
            coordinate = d.coordinate(line.at, writer)
            offsets = group.offset(coordinate, before)
            for first, ranks in _equal(line, offsets, d.mesh.ranks[coordinate]):
                files, offset = _RankFiles(self.folder, ranks), int(offsets[first])
                box = line.box(first)
                size, tile = box.shape[line.dim], tiling.tile[line.dim]
                # tiles lie differently in each box
                if box.start[line.dim] % size or (size % tile and tile % size):
                    for n, file in enumerate(files):
                        yield from tiling.runs(line.box(first + n), file, offset, within)
                    continue
                for tiles in tiling.runs(box, files[0], offset, _across(within, box, line.dim)):
                    yield FileRun(tiles, line.dim, files)

    def _find_near(self, group: _Group, writer: int, within: Box) -> list[_Near] | None:
        """The tiles of a group's first row near a box; None if the files are so many that runs are looked for."""
        d = group.distribution
        if d.most_parts(group.shape, within) >= _FEWEST:
            return None
        out = []
        for at, box in d.holdings(group.shape, within):
            coordinate = d.coordinate(at, writer)
            rank, begin = int(d.mesh.ranks[coordinate]), int(group.offset(coordinate, 0))
            step = int(group.offset(coordinate, 1)) - begin
            out += [_Near(rank, t, step) for t in group.tiling.runs(box, "", begin, within)]
        return out

    def tiling(self, tensor: int) -> Tiling:
        """How the boxes of a tensor are stored."""
        return Tiling(self.rows[self._row[tensor]].tile, self.infos[tensor].itemsize)

    def extents(self, tensor: int, within: Box | None = None) -> Iterator[Tiles]:
        """The extents of a tensor, or only those that intersect a box of it."""
        tiling = self.tiling(tensor)
        for rank, box, offset in self.stored(tensor, within):
            yield from tiling.runs(box, packed_file(self.folder, rank), offset, within)


def _across(within: Box, box: Box, dim: int) -> Box:
    """A box with the range of another one along a dim."""
    start, shape = list(within.start), list(within.shape)
    start[dim], shape[dim] = box.start[dim], box.shape[dim]
    return Box(tuple(start), tuple(shape))


def _equal(
    line: Line, offsets: NDArray[np.int64], ranks: NDArray[np.int64]
) -> Iterator[tuple[int, range]]:
    """The runs of boxes of equal size that lie at one offset: the number of the first box, and the ranks."""
    sizes = np.diff(line.edges)
    steps = np.diff(ranks)
    other = (np.diff(sizes) != 0) | (np.diff(offsets) != 0)
    first = 0
    ends = np.flatnonzero(other | np.diff(steps, prepend=steps[:1]).astype(bool)).tolist()
    for last in (*ends, len(ranks) - 1):
        goes_on = (
            last < len(steps) and not other[last] and (last == first or steps[last] == steps[first])
        )
        if last >= first and not goes_on:
            step = int(steps[first]) if last > first else 1
            if sizes[first]:
                yield (
                    first,
                    range(int(ranks[first]), int(ranks[last]) + (1 if step > 0 else -1), step),
                )
            first = last + 1


def kind_of(d: Distribution, shape: tuple[int, ...], itemsize: int, tile: tuple[int, ...]) -> Any:
    """What a row has in common with those of its group."""
    return (d, shape, itemsize, tile) if d.flat is None else d


def _stored(d: Distribution, shape: tuple[int, ...], tiling: Tiling) -> NDArray[np.int64]:
    """The bytes of a tensor in the file of each coordinate, padded to the alignment; replicas have one index."""
    bounds = d.bounds(shape)
    elements = d.by_axis([np.diff(b) for b in bounds])
    tiles = d.by_axis(
        [-(-b[1:] // tile) - b[:-1] // tile for b, tile in zip(bounds, tiling.tile, strict=True)]
    )
    nbytes = elements * tiling.itemsize + np.where(elements > 0, tiles, 0) * CHECKSUM_BYTES
    padded: NDArray[np.int64] = -(-nbytes // ALIGNMENT) * ALIGNMENT
    return padded


def without_position(d: Distribution) -> Distribution:
    """A distribution of a tensor at the beginning of its flat buffer, if any."""
    return replace(d, position=0) if d.position else d
