"""Ranges of a flattened tensor, as boxes: how ZeRO and FSDP slices become boxes like all else."""

from __future__ import annotations

import math

from ucformat.errors import UsageError
from ucformat.geometry.box import Box, row_major

__all__ = ["flat_boxes", "flat_range"]


def flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> tuple[Box, ...]:
    """Elements `[start, stop)` of the row-major flattened tensor, as at most `2 * ndim - 1` boxes in flat order.

    One box for a 0-d tensor, none for an empty range. UsageError where the range leaves the tensor.
    """
    size = math.prod(shape)
    if not 0 <= start <= stop <= size:
        raise UsageError(f"the flat range {start}:{stop} is not within the {size} elements of shape {shape}")
    return tuple(_boxes((), shape, start, stop)) if start < stop else ()


def flat_range(shape: tuple[int, ...], within: Box | None) -> tuple[int, int]:
    """The smallest range `[start, stop)` of the row-major flattened tensor that has all of a box (None: the tensor)."""
    if within is None:
        return 0, math.prod(shape)
    if not within.size:
        return 0, 0
    strides = row_major(shape)
    first = sum(i * s for i, s in zip(within.start, strides, strict=True))
    return first, first + 1 + sum((n - 1) * s for n, s in zip(within.shape, strides, strict=True))


def _boxes(at: tuple[int, ...], shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """The boxes of a non-empty range of the sub-tensor of this shape that lies at index `at`."""
    lead = (1,) * len(at)
    if not shape:
        return [Box(at, lead)]
    row = math.prod(shape[1:])
    (first, head), (last, tail) = divmod(start, row), divmod(stop, row)
    if first == last:  # within one row
        return _boxes((*at, first), shape[1:], head, tail)
    out = _boxes((*at, first), shape[1:], head, row) if head else []
    first += head > 0
    if first < last:
        out.append(Box((*at, first, *(0 for _ in shape[1:])), (*lead, last - first, *shape[1:])))
    return out + (_boxes((*at, last), shape[1:], 0, tail) if tail else [])
