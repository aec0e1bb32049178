"""Boxes: hyper-rectangles of a tensor, and the few operations everything else is made of."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["Box", "each_index", "hull", "is_apart", "row_major"]


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """A hyper-rectangle: the elements `start[d] <= i[d] < start[d] + shape[d]` for each dim `d`.

    A 0-d box (`start == shape == ()`) holds one element; a box with a zero in `shape` holds none.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """The box of a whole tensor of this shape."""
        return cls((0,) * len(shape), shape)

    @property
    def stop(self) -> tuple[int, ...]:
        """First index past the box, for each dim."""
        return tuple(a + n for a, n in zip(self.start, self.shape, strict=True))

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """The box common to both, or None where they share no element."""
        start, shape = [], []
        for a, n, b, m in zip(self.start, self.shape, other.start, other.shape, strict=True):
            low = a if a > b else b  # noqa: FURB136 - plans ask this millions of times, and max() is a call
            high = a + n if a + n < b + m else b + m  # noqa: FURB136
            if high <= low:
                return None
            start.append(low)
            shape.append(high - low)
        return Box(tuple(start), tuple(shape))

    def contains(self, other: Box) -> bool:
        """Whether every element of `other` is in this box."""
        return other.size == 0 or self.intersect(other) == other

    def shift(self, by: tuple[int, ...]) -> Box:
        """The box moved by `by` elements in each dim."""
        return Box(tuple(a + b for a, b in zip(self.start, by, strict=True)), self.shape)

    def __str__(self) -> str:
        """As a slice: `[0:512, 128:256]`; `[]` for a 0-d box."""
        return "[" + ", ".join(f"{a}:{a + n}" for a, n in zip(self.start, self.shape, strict=True)) + "]"


def hull(boxes: Iterable[Box]) -> Box | None:
    """The smallest box around all of these; None where none of them has an element."""
    full = [box for box in boxes if box.size]
    if not full:
        return None
    start = tuple(map(min, zip(*(box.start for box in full), strict=True)))
    stop = tuple(map(max, zip(*(box.stop for box in full), strict=True)))
    return Box(start, tuple(b - a for a, b in zip(start, stop, strict=True)))


def row_major(shape: tuple[int, ...], unit: int = 1) -> tuple[int, ...]:
    """Strides of a contiguous C-order array of this shape, in units of `unit`."""
    strides, step = [], unit
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def is_apart(shape: tuple[int, ...], strides: tuple[int, ...], unit: int = 1) -> bool:
    """Whether it is plain that no two elements of a strided array, of `unit` each, share memory.

    Each dim has to step over all that those of smaller strides span, which every slice and transpose of an array does;
    an interleaving that is apart by chance counts as shared.
    """
    span = unit
    for step, n in sorted((abs(s), n) for s, n in zip(strides, shape, strict=True) if n > 1):
        if step < span:
            return False
        span += (n - 1) * step
    return True


def each_index(ranges: Sequence[range]) -> Iterator[tuple[int, ...]]:
    """Every index of a grid, in C order; `itertools.product` would first make lists, of lengths that a file says."""
    if not all(ranges):
        return
    if not ranges:
        yield ()
        return
    for outer in each_index(ranges[:-1]):
        for i in ranges[-1]:
            yield (*outer, i)
