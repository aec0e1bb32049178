"""Boxes: hyper-rectangles of a tensor, and basic operations on boxes, strides and grids."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """A hyper-rectangle: the elements `start[d] <= i[d] < start[d] + shape[d]` for each dim `d`.

    A 0-d box (`start == shape == ()`) holds one element; a box with a zero in `shape` holds none.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """The box that covers a whole tensor."""
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
        """The elements common to both boxes; None if there are none."""
        start, shape = [], []
        for a, n, b, m in zip(self.start, self.shape, other.start, other.shape, strict=True):
            low = a if a > b else b  # noqa: FURB136 - a hot loop of planning; max() costs a call
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
        """This box, translated."""
        return Box(tuple(a + b for a, b in zip(self.start, by, strict=True)), self.shape)

    def __str__(self) -> str:
        """As a slice: `[0:512, 128:256]`; `[]` for a 0-d box."""
        return (
            "["
            + ", ".join(f"{a}:{a + n}" for a, n in zip(self.start, self.shape, strict=True))
            + "]"
        )


def bounding_box(boxes: Iterable[Box]) -> Box | None:
    """The smallest box that contains all of these; None if all of them are empty."""
    nonempty = [box for box in boxes if box.size]
    if len(nonempty) <= 1:
        return nonempty[0] if nonempty else None
    start = tuple(map(min, zip(*(box.start for box in nonempty), strict=True)))
    stop = tuple(map(max, zip(*(box.stop for box in nonempty), strict=True)))
    return Box(start, tuple(b - a for a, b in zip(start, stop, strict=True)))


def row_major(shape: tuple[int, ...], unit: int = 1) -> tuple[int, ...]:
    """Strides of a contiguous C-order array.

    Args:
        unit: size of one element in the unit of the strides, e.g. the itemsize for strides in bytes
            (default: 1, elements).
    """
    strides, step = [], unit
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def offset_of(index: Sequence[int], strides: Sequence[int]) -> int:
    """Where the element with this index is."""
    return sum(i * s for i, s in zip(index, strides, strict=True))


def unravel(number: Any, counts: Sequence[int]) -> tuple[Any, ...]:
    """The index of an element by its row-major number; of arrays, an array for each dim."""
    index = []
    for n in reversed(counts):
        number, at = divmod(number, n)
        index.append(at)
    return tuple(reversed(index))


def reach(shape: Sequence[int], strides: Sequence[int]) -> int:
    """The distance from the first element to the last."""
    distance = 0  # in a loop, since plans ask for each tensor
    for n, step in zip(shape, strides, strict=True):
        distance += (n - 1) * step
    return distance


def chunk(n: int, count: int, index: int) -> tuple[int, int]:
    """The interval of part `index` as `torch.chunk` cuts `n`: the last parts smaller or empty."""
    step = -(-n // count)
    return min(n, index * step), min(n, (index + 1) * step)


def is_non_overlapping(shape: tuple[int, ...], strides: tuple[int, ...], unit: int = 1) -> bool:
    """Whether the strides guarantee that no two elements of an array share memory.

    Each dim has to step over the span of all dims with smaller strides, which holds for every slice
    and transpose of an array. Interleaved dims that happen not to overlap are reported as
    overlapping.
    """
    span = unit
    for step, n in sorted((abs(s), n) for s, n in zip(strides, shape, strict=True) if n > 1):
        if step < span:
            return False
        span += (n - 1) * step
    return True


def each_index(ranges: Sequence[range]) -> Iterator[tuple[int, ...]]:
    """Every index of a grid, in C order; unlike `itertools.product`, it lists no range: a file may claim a huge one."""
    if not all(ranges):
        return
    if not ranges:
        yield ()
        return
    for outer in each_index(ranges[:-1]):
        for i in ranges[-1]:
            yield (*outer, i)
