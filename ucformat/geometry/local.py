"""What one coordinate holds of a tensor, as boxes on both sides: of the local tensor, and of the global one.

What is stored of a local tensor (whole, or flat ranges of it, as ZeRO cuts them) is boxes of the local tensor. Clipped
to its regions they are boxes of the global tensor, with the strides that they have in the file: a `View` whose sources
are the local tensors does it.
"""

from __future__ import annotations

import math
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from ucformat.errors import LayoutError
from ucformat.geometry.box import Box, row_major
from ucformat.geometry.view import Part

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ucformat.geometry.cut import Dim
    from ucformat.geometry.tensor import Key

__all__ = ["Region", "Strides", "keep_rows", "parts_of", "regions_of", "strided_regions"]

_MOST = 1 << 16  # boxes that one strided piece may come apart into


class Region(NamedTuple):
    """A box of a local tensor that is a box, of the same shape, of the global one."""

    local: Box
    box: Box


class Strides(NamedTuple):
    """Where a piece lies in a row-major tensor, as `torch.as_strided` says it: in elements."""

    offset: int
    strides: tuple[int, ...]


def regions_of(dims: tuple[Dim, ...]) -> tuple[tuple[Region, ...], tuple[Region, ...]]:
    """The regions of the local tensor with these dims, and those of its padding (boxes of the padding tensor)."""
    regions: list[Region] = []
    padding: list[Region] = []
    for runs in product(*(d.runs for d in dims)):
        shape = tuple(r.size for r in runs)
        region = Region(Box(tuple(r.at for r in runs), shape), Box(tuple(r.start for r in runs), shape))
        (padding if any(r.padding for r in runs) else regions).append(region)
    return tuple(regions), tuple(padding)


def keep_rows(regions: Iterable[Region], rows: int) -> tuple[tuple[Region, ...], tuple[Region, ...]]:
    """The regions of the first global rows, and those of the others, counted from there: padding that a file holds."""
    kept: list[Region] = []
    padding: list[Region] = []
    for local, box in regions:
        below = min(box.stop[0], rows) - box.start[0]
        if below > 0:
            kept.append(Region(_rows(local, 0, below), _rows(box, 0, below)))
        if below < box.shape[0]:
            over = max(0, below)
            shift = (-rows, *[0] * (len(box.start) - 1))
            padding.append(Region(_rows(local, over, box.shape[0]), _rows(box, over, box.shape[0]).shift(shift)))
    return tuple(kept), tuple(padding)


def strided_regions(
    shape: tuple[int, ...], local_shape: tuple[int, ...], size: tuple[int, ...], at: Strides, local: Strides
) -> Iterator[Region]:
    """The regions of a strided piece of `size`, which lies `at` in the global tensor and `local` in the local one.

    Its axes must run along the dims of both; where they skip elements, each index becomes a region of its own.
    LayoutError where they run otherwise, or leave a tensor.
    """
    whole, inner = _place(shape, size, at), _place(local_shape, size, local)
    cut = [n > 1 and (a != 1 or b != 1) for n, a, b in zip(size, whole.steps, inner.steps, strict=True)]
    if math.prod(n for n, c in zip(size, cut, strict=True) if c) > _MOST:
        raise LayoutError(f"a piece of the shape {size} comes apart into more than {_MOST:,} boxes")
    if 0 in size:
        return
    part = tuple(1 if c else n for n, c in zip(size, cut, strict=True))
    for index in product(*(range(n if c else 1) for n, c in zip(size, cut, strict=True))):
        yield Region(Box(inner.at(index), part), Box(whole.at(index), part))


def parts_of(regions: Iterable[Region], source: Key) -> Iterator[Part]:
    """The same as parts of a view, whose source is the local tensor."""
    return (Part(r.box, source, r.local, tuple(range(len(r.box.shape)))) for r in regions)


def _rows(box: Box, first: int, last: int) -> Box:
    return Box((box.start[0] + first, *box.start[1:]), (last - first, *box.shape[1:]))


class _Place(NamedTuple):
    """A strided piece in a tensor: the index of its first element, and its step along each dim."""

    start: tuple[int, ...]
    steps: tuple[int, ...]

    def at(self, of: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(a + i * s for a, i, s in zip(self.start, of, self.steps, strict=True))


def _place(shape: tuple[int, ...], size: tuple[int, ...], at: Strides) -> _Place:
    where = f"a piece of the shape {size} at element {at.offset} with the strides {at.strides}"
    if not len(shape) == len(size) == len(at.strides) or any(n < 0 for n in size) or at.offset < 0:
        raise LayoutError(f"{where} has not the dims of a tensor of the shape {shape}")
    if 0 in size:
        return _Place((0,) * len(size), (1,) * len(size))
    start, steps, left = [], [], at.offset
    for n, count, stride, unit in zip(shape, size, at.strides, row_major(shape), strict=True):
        first, left = divmod(left, unit) if unit else (0, left)
        step, rest = divmod(stride, unit) if unit and count > 1 else (1, 0)
        if rest or step < 1 or first + (count - 1) * step >= n:
            raise LayoutError(f"{where} does not run along the dims of a tensor of the shape {shape}")
        start.append(first)
        steps.append(step)
    return _Place(tuple(start), tuple(steps))
