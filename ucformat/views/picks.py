"""Indices that a view takes along dims: which they are, and where they are stored."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import accumulate, product
from typing import TYPE_CHECKING

from ucformat.errors import LayoutError
from ucformat.geometry.box import Box
from ucformat.geometry.tensor import Extent

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

#: Consecutive indices: the first in the source, how many, and the position of the first in the result.
Run = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Picks:
    """Indices of a dim in the order in which they are taken, as runs (first index, length) of consecutive ones."""

    runs: tuple[tuple[int, int], ...]
    _begins: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        merged: list[tuple[int, int]] = []
        for start, length in self.runs:
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        object.__setattr__(self, "runs", tuple(merged))
        object.__setattr__(self, "_begins", tuple(accumulate((n for _, n in merged), initial=0)))

    @property
    def size(self) -> int:
        """Number of indices."""
        return self._begins[-1]

    def between(self, start: int, stop: int) -> Iterator[Run]:
        """The runs of a range of the result."""
        at = bisect_right(self._begins, start) - 1
        while at < len(self.runs) and self._begins[at] < stop:
            (first, length), begin = self.runs[at], self._begins[at]
            low, high = max(start, begin), min(stop, begin + length)
            yield first + low - begin, high - low, low
            at += 1

    def of(self, inner: Picks) -> Picks:
        """These indices of other picks, as indices of what those are taken from."""
        return Picks(tuple((s, n) for start, length in self.runs for s, n, _ in inner.between(start, start + length)))


def chosen(indices: Sequence[int | str] | None, first: int | None, count: int | None, what: str, noun: str) -> Picks:
    """The indices that a step names.

    Args:
        indices: indices, and ranges without their end, such as `8:16`; None: the first.
        first: how many of the first, if there are no `indices`.
        count: how many there are; None: the caller checks it.
    """
    runs = [(0, first or 0)] if indices is None else []
    for index in indices or ():
        start, stop = map(int, index.split(":")) if isinstance(index, str) else (index, index + 1)
        if start >= stop:
            raise LayoutError(f"the range {index} is empty", hint="a range excludes its end: 8:16 is 8, 9, … 15")
        runs.append((start, stop - start))
    end = 0
    for start, length in sorted(runs):
        if start < end:
            raise LayoutError(f"{noun} {start} is taken twice", hint="name each only once")
        end = start + length
    if count is not None and end > count:
        there = f"the last is {count - 1}" if count else "there is none"
        raise LayoutError(f"{what} has no {noun} {end - 1}: {there}")
    return Picks(tuple(runs))


def clipped(axes: Sequence[Picks | None], within: Box) -> list[list[Run]]:
    """The runs of each dim for a box of the result, in the order of the source."""
    return [
        [(start, length, start)] if axis is None else sorted(axis.between(start, start + length))
        for axis, start, length in zip(axes, within.start, within.shape, strict=True)
    ]


def source_box(runs: Sequence[Sequence[Run]]) -> Box:
    """The smallest box of the source that contains all runs.

    Args:
        runs: of each dim, in the order of the source.
    """
    start = tuple(r[0][0] for r in runs)
    return Box(start, tuple(r[-1][0] + r[-1][1] - a for r, a in zip(runs, start, strict=True)))


def mapped(runs: Sequence[Sequence[Run]], extents: Iterable[Extent]) -> Iterator[Extent]:
    """The extents of the result: one for each combination of runs of the dims, in each extent of the source.

    Args:
        runs: of each dim, in the order of the source.
    """
    starts = [[start for start, _, _ in of_dim] for of_dim in runs]
    for e in extents:
        dims = []
        for of_dim, begins, a, n, step in zip(runs, starts, e.box.start, e.box.shape, e.strides, strict=True):
            cuts = []
            for start, length, to in of_dim[max(0, bisect_right(begins, a) - 1) :]:
                if start >= a + n:
                    break
                low, high = max(start, a), min(start + length, a + n)
                if low < high:
                    cuts.append((to + low - start, high - low, (low - a) * step))
            dims.append(cuts)
        for cut in product(*dims):
            shape = tuple(n for _, n, _ in cut)
            offset = e.offset + sum(skip for _, _, skip in cut)
            yield Extent(Box(tuple(to for to, _, _ in cut), shape), e.file, offset, e.strides, e.block_of(shape))
