"""Distributions: how the ranks of a mesh hold a tensor, as a function of the coordinate.

A tensor is cut along its dims over axes of the mesh, as `torch.chunk` cuts, and replicated over all
other axes. The local tensor may in addition be a range of a flat buffer, as ZeRO and Megatron's
distributed optimizer partition it. Each rank so computes its own boxes, and which ranks hold a box,
in a time that does not depend on the number of ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from ucformat.errors import LayoutError
from ucformat.geometry.box import Box, chunk, reach, row_major, unravel
from ucformat.geometry.flat_buffer import flat_boxes, flat_range

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class RankMesh:
    """The rank at each coordinate of a mesh.

    Attributes:
        first: the rank at coordinate (0, 0, …).
        strides: ranks from one index to the next, for each axis; if `listed`, empty.
        listed: all ranks, in row-major order of their coordinates, if they do not follow from the
            strides.
    """

    sizes: tuple[int, ...]
    first: int = 0
    strides: tuple[int, ...] = ()
    listed: tuple[int, ...] = ()

    @classmethod
    def of(cls, sizes: tuple[int, ...], ranks: Sequence[int]) -> RankMesh:
        """The mesh of ranks that are listed in row-major order of their coordinates."""
        below = row_major(sizes)
        strides = tuple(
            ranks[step] - ranks[0] if n > 1 else 0 for n, step in zip(sizes, below, strict=True)
        )
        regular = cls(sizes, ranks[0], strides)
        follow = min(strides, default=0) >= 0 and np.array_equal(regular.ranks.reshape(-1), ranks)
        return regular if follow else cls(sizes, listed=tuple(ranks))

    @classmethod
    def crossing(cls, rank: int, rows: Sequence[int], columns: Sequence[int]) -> RankMesh | None:
        """The mesh of two groups in which a rank is, if all groups have the distances of these; None if they cannot.

        Args:
            rows: the ranks along the first axis.
            columns: the ranks along the second axis.
        """
        ranks = [row + column - rank for row in rows for column in columns]
        if min(ranks) < 0 or len(set(ranks)) < len(ranks):
            return None
        return cls.of((len(rows), len(columns)), ranks)

    @property
    def size(self) -> int:
        """Number of coordinates."""
        return math.prod(self.sizes)

    @property
    def ranks(self) -> NDArray[np.int64]:
        """The ranks, as an array of one dim for each axis."""
        return _ranks(self)

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """The coordinate of a rank; None if the rank is not in the mesh."""
        indices = np.argwhere(self.ranks == rank)
        return tuple(indices[0].tolist()) if len(indices) else None


@lru_cache(maxsize=64)
def _ranks(mesh: RankMesh) -> NDArray[np.int64]:
    if mesh.listed:
        return np.array(mesh.listed, np.int64).reshape(mesh.sizes)
    out = np.full(mesh.sizes, mesh.first, np.int64)
    for axis, (n, step) in enumerate(zip(mesh.sizes, mesh.strides, strict=True)):
        out += (np.arange(n, dtype=np.int64) * step).reshape(
            [-1 if a == axis else 1 for a in range(out.ndim)]
        )
    return out


class Cut(NamedTuple):
    """A cut of a dim into equal parts, one for each coordinate of an axis of the mesh."""

    dim: int
    axis: int


def order_of_cuts(splits: Sequence[tuple[int, int]]) -> list[int] | None:
    """The order in which the splits of one dim were made, by their numbers; None if no order fits.

    Args:
        splits: for each, from left to right, its degree and the number of parts into which splits
            further to the right had cut the dim before (1: it is a plain one).
    """
    ordered: list[int] = []
    for number in reversed(range(len(splits))):
        for position in range(len(ordered) + 1):
            # it was made when those before it had cut the dim into as many parts
            if math.prod(splits[i][0] for i in ordered[:position]) == splits[number][1]:
                ordered.insert(position, number)
                break
        else:
            return None
    return ordered


class Holding(NamedTuple):
    """The indices of one coordinate, over the axes that cut the tensor, and a box that it holds."""

    at: tuple[int, ...]
    box: Box


class Line(NamedTuple):
    """Boxes of some coordinates that follow each other along a dim; some may have no elements.

    Attributes:
        at: for each axis that cuts the tensor, the index of each coordinate.
        edges: where each box begins along the dim, and where the last one ends.
    """

    at: tuple[NDArray[np.int64], ...]
    dim: int
    edges: NDArray[np.int64]
    first: Box

    def box(self, number: int) -> Box:
        """One of the boxes."""
        start, shape = list(self.first.start), list(self.first.shape)
        start[self.dim] = int(self.edges[number])
        shape[self.dim] = int(self.edges[number + 1]) - start[self.dim]
        return Box(tuple(start), tuple(shape))


@dataclass(frozen=True, slots=True)
class Distribution:
    """How the ranks of a mesh hold a tensor.

    Attributes:
        cuts: the cuts, in the order in which they apply, each to what the previous ones left. Each
            axis cuts at most once. Parts are as those of `torch.chunk`: the last ones may be
            smaller, or empty.
        flat: the axis over which a flat buffer that contains the local tensor is partitioned (None:
            there is none).
        part: the elements of each rank's part of the flat buffer.
        position: the element of the flat buffer at which the local tensor begins, the same on all
            ranks.
    """

    mesh: RankMesh
    cuts: tuple[Cut, ...] = ()
    flat: int | None = None
    part: int = 0
    position: int = 0

    def __post_init__(self) -> None:
        used = list(self.axes)
        if len(set(used)) < len(used) or not all(0 <= axis < len(self.mesh.sizes) for axis in used):
            raise LayoutError(
                f"a tensor is cut along the axes {used} of a mesh of {len(self.mesh.sizes)} axes"
            )
        if (
            (self.part, self.position) != (0, 0)
            if self.flat is None
            else self.part < 1 or self.position < 0
        ):
            raise LayoutError(
                f"a flat buffer has parts of {self.part} elements, and a tensor at {self.position}"
            )

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes along which ranks hold different parts, in the order of `Holding.at`."""
        return (*(c.axis for c in self.cuts), *(() if self.flat is None else (self.flat,)))

    @property
    def replicas(self) -> tuple[int, ...]:
        """The axes along which ranks hold the same parts, ascending."""
        used = self.axes
        return tuple(axis for axis in range(len(self.mesh.sizes)) if axis not in used)

    @property
    def copies(self) -> int:
        """How many ranks hold each part."""
        return math.prod(self.mesh.sizes[a] for a in self.replicas)

    def copy_of(self, coordinate: tuple[int, ...]) -> int:
        """Which of the replicas a coordinate is, in row-major order of `replicas`."""
        at = 0  # in a loop, since a plan asks for each tensor
        for axis in self.replicas:
            at = at * self.mesh.sizes[axis] + coordinate[axis]
        return at

    def coordinate(self, at: tuple[Any, ...], copy: int) -> tuple[Any, ...]:
        """The coordinate of one of the ranks that hold the same part."""
        out = dict(zip(self.axes, at, strict=True))
        out |= zip(
            self.replicas, unravel(copy, [self.mesh.sizes[a] for a in self.replicas]), strict=True
        )
        return tuple(out[axis] for axis in range(len(self.mesh.sizes)))

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor can be distributed so: its dims exist, and its buffer holds it."""
        if any(not 0 <= cut.dim < len(shape) for cut in self.cuts):
            return False
        if self.flat is None:
            return True
        sizes = {math.prod(s) for s in self._local_shapes(shape)}
        return (
            len(sizes) == 1
            and self.position + sizes.pop() <= self.part * self.mesh.sizes[self.flat]
        )

    def _local_shapes(self, shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """The distinct shapes of local tensors."""
        return product(*(np.unique(np.diff(b)).tolist() for b in self.bounds(shape)))

    def bounds(self, shape: tuple[int, ...]) -> list[NDArray[np.int64]]:
        """For each dim, where each part begins, the last cut's parts one after another, and the end."""
        return [_bounds(n, self.degrees(d)) for d, n in enumerate(shape)]

    def degrees(self, dim: int) -> tuple[int, ...]:
        """The sizes of the axes that cut a dim, in the order of the cuts."""
        return tuple(self.mesh.sizes[c.axis] for c in self.cuts if c.dim == dim)

    def local(self, shape: tuple[int, ...], coordinate: tuple[int, ...]) -> Box:
        """The box that the cuts leave to a coordinate; before a flat buffer is partitioned."""
        start, stop = [0] * len(shape), list(shape)
        for dim, axis in self.cuts:
            first, last = chunk(stop[dim] - start[dim], self.mesh.sizes[axis], coordinate[axis])
            start[dim], stop[dim] = start[dim] + first, start[dim] + last
        return Box(tuple(start), tuple(b - a for a, b in zip(start, stop, strict=True)))

    def boxes(self, shape: tuple[int, ...], coordinate: tuple[int, ...]) -> tuple[Box, ...]:
        """The boxes of a coordinate, in the order of its memory: at most one, of a buffer several."""
        local = self.local(shape, coordinate)
        if self.flat is None:
            return (local,) if local.size else ()
        return tuple(self._flat_boxes(local, coordinate[self.flat]))

    def _flat_boxes(self, local: Box, part: int) -> Iterator[Box]:
        """The boxes of a local tensor in one of the parts of its flat buffer."""
        begin = part * self.part - self.position
        start, stop = (min(max(0, x), local.size) for x in (begin, begin + self.part))
        return (box.shift(local.start) for box in flat_boxes(local.shape, start, stop))

    def contiguous(self, shape: tuple[int, ...]) -> bool:
        """Whether each box is one range of the row-major tensor, as those of flat buffers are."""
        first = next((d for d, n in enumerate(shape) if n > 1), 0)
        return all(cut.dim <= first for cut in self.cuts)

    def by_axis(self, parts: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
        """The product of the values of a coordinate's parts: one dim for each axis of the mesh.

        Axes that cut no dim have one index.
        """
        values_of = np.ones((), np.int64)
        for values in parts:
            values_of = np.multiply.outer(values_of, values)
        # the order in which the parts of all dims are numbered
        cuts = sorted(self.cuts, key=lambda cut: cut.dim)
        by_cut = values_of.reshape([self.mesh.sizes[cut.axis] for cut in cuts])
        by_axis = by_cut.transpose(np.argsort([cut.axis for cut in cuts])) if cuts else by_cut
        cutting = {cut.axis for cut in cuts}
        return by_axis.reshape(
            [n if axis in cutting else 1 for axis, n in enumerate(self.mesh.sizes)]
        )

    def overlap(self, shape: tuple[int, ...], within: Box) -> NDArray[np.int64]:
        """How many elements of a box each coordinate holds; replicas have one index.

        In flat buffers it is an estimate.
        """
        if self.flat is None:
            ranges = zip(self.bounds(shape), within.start, within.stop, strict=True)
            return self.by_axis([np.diff(b.clip(start, stop)) for b, start, stop in ranges])
        out = np.zeros(
            [n if axis in self.axes else 1 for axis, n in enumerate(self.mesh.sizes)], np.int64
        )
        ends = np.arange(self.mesh.sizes[self.flat] + 1) * self.part
        for at, local in self._locals(shape, within):
            common, first, last = self._range(local, within)
            index: list[int | slice] = [0] * out.ndim
            for cut, i in zip(self.cuts, at, strict=True):
                index[cut.axis] = i
            index[self.flat] = slice(None)
            out[tuple(index)] = -(-np.diff(ends.clip(first, last)) * common.size // (last - first))
        return out

    def holdings(self, shape: tuple[int, ...], within: Box) -> Iterator[Holding]:
        """All boxes that intersect a box of the tensor, each once for its replicas, not clipped."""
        for local in self._locals(shape, within):
            if self.flat is None:
                yield local
            else:
                yield from self._parts(*local, within)

    def most_parts(self, shape: tuple[int, ...], within: Box) -> int:
        """About how many parts of any one dim a box intersects."""
        return max(
            (
                math.prod(self.degrees(c.dim)) * within.shape[c.dim] // shape[c.dim]
                for c in self.cuts
            ),
            default=0,
        )

    def lines(self, shape: tuple[int, ...], within: Box) -> Iterator[Line]:
        """The boxes of `holdings` without a flat buffer, those in a row along one dim together."""
        bounds = self.bounds(shape)
        meeting = _meeting(bounds, within)
        dim = max(range(len(shape)), key=lambda n: len(meeting[n]))
        index = np.arange(meeting[dim].start, meeting[dim].stop)
        edges = bounds[dim][meeting[dim].start : meeting[dim].stop + 1]
        for parts in product(*(r[:1] if n == dim else r for n, r in enumerate(meeting))):
            by_dim = [
                list(unravel(index if n == dim else i, self.degrees(n)))
                for n, i in enumerate(parts)
            ]
            # the cuts of one dim have the order of its degrees, so each takes the next index
            at = tuple(np.broadcast_to(by_dim[c.dim].pop(0), index.shape) for c in self.cuts)
            first = _part_box(bounds, parts)
            if all(size or d == dim for d, size in enumerate(first.shape)):
                yield Line(at, dim, edges, first)

    def _locals(self, shape: tuple[int, ...], within: Box) -> Iterator[Holding]:
        """The boxes that the cuts leave, and that intersect a box."""
        if not within.size:
            return
        degrees = [self.degrees(d) for d in range(len(shape))]
        bounds = self.bounds(shape)
        for parts in product(*_meeting(bounds, within)):
            local = _part_box(bounds, parts)
            if not local.size:
                continue
            by_dim = [list(unravel(i, d)) for i, d in zip(parts, degrees, strict=True)]
            yield Holding(tuple(by_dim[c.dim].pop(0) for c in self.cuts), local)

    def _range(self, local: Box, within: Box) -> tuple[Box, int, int]:
        """What a box shares with a local tensor, and the range of the buffer that contains it."""
        common = local.intersect(within)
        assert common is not None  # noqa: S101 - the local tensor was found by it
        first, last = flat_range(local.shape, common.shift(tuple(-a for a in local.start)))
        return common, first + self.position, last + self.position

    def _parts(self, at: tuple[int, ...], local: Box, within: Box) -> Iterator[Holding]:
        """The boxes of a local tensor that a flat buffer contains."""
        common, first, last = self._range(local, within)
        for part in range(first // self.part, -(-last // self.part)):
            for box in self._flat_boxes(local, part):
                if box.intersect(common) is not None:
                    yield Holding((*at, part), box)


@dataclass(frozen=True, slots=True)
class BoxList:
    """Which rank holds each box of a tensor, as a list: a distribution for what no cuts describe.

    The mesh has one axis, and the rank of each coordinate is its index. Each box is held by one rank.
    """

    mesh: RankMesh
    listed: tuple[Box, ...]
    ranks: tuple[int, ...]
    axes: ClassVar[tuple[int, ...]] = (0,)
    replicas: ClassVar[tuple[int, ...]] = ()
    copies: ClassVar[int] = 1

    def coordinate(self, at: tuple[int, ...], _copy: int) -> tuple[int, ...]:
        """As `Distribution.coordinate`."""
        return at

    def boxes(self, _shape: tuple[int, ...], coordinate: tuple[int, ...]) -> tuple[Box, ...]:
        """As `Distribution.boxes`."""
        return tuple(b for b, r in zip(self.listed, self.ranks, strict=True) if r == coordinate[0])

    def holdings(self, _shape: tuple[int, ...], within: Box) -> Iterator[Holding]:
        """As `Distribution.holdings`."""
        for box, rank in zip(self.listed, self.ranks, strict=True):
            if box.intersect(within) is not None:
                yield Holding((rank,), box)

    def overlap(self, _shape: tuple[int, ...], within: Box) -> NDArray[np.int64]:
        """As `Distribution.overlap`."""
        out = np.zeros(self.mesh.size, np.int64)
        for box, rank in zip(self.listed, self.ranks, strict=True):
            if (common := box.intersect(within)) is not None:
                out[rank] += common.size
        return out

    def contiguous(self, shape: tuple[int, ...]) -> bool:
        """As `Distribution.contiguous`."""
        steps = row_major(shape)
        return all(1 + reach(box.shape, steps) == box.size for box in self.listed)


def _part_box(bounds: Sequence[NDArray[np.int64]], parts: Sequence[int]) -> Box:
    """The box of one part along each dim."""
    start = tuple(int(b[i]) for b, i in zip(bounds, parts, strict=True))
    return Box(
        start, tuple(int(b[i + 1]) - a for b, i, a in zip(bounds, parts, start, strict=True))
    )


def _meeting(bounds: Sequence[NDArray[np.int64]], within: Box) -> list[range]:
    """For each dim, the parts that a box intersects."""
    return [
        range(int(np.searchsorted(b, a, "right")) - 1, int(np.searchsorted(b, a + n, "left")))
        for b, a, n in zip(bounds, within.start, within.shape, strict=True)
    ]


@lru_cache(maxsize=64)  # a model has few distinct (size, cuts)
def _bounds(n: int, degrees: tuple[int, ...]) -> NDArray[np.int64]:
    """The index at which each part of a dim begins, and the end: ascending."""
    start, size = np.zeros(1, np.int64), np.full(1, n, np.int64)
    for degree in degrees:
        step = -(-size // degree)
        at = np.minimum(np.arange(degree) * step[:, None], size[:, None])
        end = np.minimum((np.arange(degree) + 1) * step[:, None], size[:, None])
        start, size = (start[:, None] + at).reshape(-1), (end - at).reshape(-1)
    return np.append(start, n)
