"""Ranges of a flattened tensor, as boxes: how ZeRO and FSDP slices become boxes like all else."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ucformat.errors import UsageError
from ucformat.geometry.box import Box, row_major

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucformat.geometry.placement import Flat

__all__ = ["Joined", "Slot", "flat_boxes", "flat_range", "join_flat"]


def flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> tuple[Box, ...]:
    """Elements `[start, stop)` of the row-major flattened tensor, as at most `2 * ndim - 1` boxes in flat order.

    One box for a 0-d tensor, none for an empty range. UsageError where the range leaves the tensor.
    """
    size = math.prod(shape)
    if not 0 <= start <= stop <= size:
        raise UsageError(f"the flat range {start}:{stop} is not within the {size} elements of shape {shape}")
    return tuple(_flat_boxes((), shape, start, stop)) if start < stop else ()


def flat_range(shape: tuple[int, ...], within: Box | None) -> tuple[int, int]:
    """The smallest range `[start, stop)` of the row-major flattened tensor that has all of a box (None: the tensor)."""
    if within is None:
        return 0, math.prod(shape)
    if not within.size:
        return 0, 0
    strides = row_major(shape)
    first = sum(i * s for i, s in zip(within.start, strides, strict=True))
    return first, first + 1 + sum((n - 1) * s for n, s in zip(within.shape, strides, strict=True))


def _flat_boxes(at: tuple[int, ...], shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """The boxes of a non-empty range of the sub-tensor of this shape that lies at index `at`."""
    lead = (1,) * len(at)
    if not shape:
        return [Box(at, lead)]
    row = math.prod(shape[1:])
    (first, head), (last, tail) = divmod(start, row), divmod(stop, row)
    if first == last:  # within one row
        return _flat_boxes((*at, first), shape[1:], head, tail)
    out = _flat_boxes((*at, first), shape[1:], head, row) if head else []
    first += head > 0
    if first < last:
        out.append(Box((*at, first, *(0 for _ in shape[1:])), (*lead, last - first, *shape[1:])))
    return out + (_flat_boxes((*at, last), shape[1:], 0, tail) if tail else [])


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor in a flat buffer: `start` and `part` are elements, of the joined buffer or of one rank's.

    `part` is None where the joined buffer is cut, else the width of each rank's part of this tensor.
    """

    buffer: str
    start: int
    numel: int
    part: int | None

    def holders(self, size: int, degree: int) -> range:
        """The coordinates that hold any of it."""
        if not self.numel:
            return range(0)
        first, width = (0, self.part) if self.part is not None else (self.start, size)
        return range(first // width, min(degree, (first + self.numel - 1) // width + 1))

    def on(self, index: int, size: int) -> tuple[int, int, int]:
        """What coordinate `index` holds of it: a flat range, and where that starts in its buffer of `size`."""
        if self.part is not None:
            return min(self.numel, index * self.part), min(self.numel, (index + 1) * self.part), self.start
        a = min(max(self.start, index * size), self.start + self.numel)
        b = max(a, min(self.start + self.numel, (index + 1) * size))
        return a - self.start, b - self.start, min(max(a - index * size, 0), size)


@dataclass(frozen=True, slots=True)
class Joined:
    """A group as it is joined: the slot of each tensor, and what one rank holds of each buffer, in elements."""

    slots: dict[str, Slot]
    sizes: dict[str, int]


def join_flat(flat: Flat, degree: int, name: str, members: Sequence[tuple[str, int]]) -> Joined:
    """Join the members, `(tensor, local elements)` in the order of the roster, into buffers called `name`.

    With `max_elements` there may be several buffers, `name.0`, `name.1`, …
    """
    slots: dict[str, Slot] = {}
    sizes: dict[str, int] = {}
    at, buffer = 0, _sub(flat, name, 0)
    for tensor, numel in _ordered(flat, degree, members):
        if flat.max_elements is not None and at >= flat.max_elements:
            sizes[buffer] = _closed(flat, degree, at)
            at, buffer = 0, _sub(flat, name, len(sizes))
        if flat.cut == "before_join":
            part = align_up(-(-numel // degree), flat.tensor_align)
            slots[tensor] = Slot(buffer, at, numel, part)
            at += part
        else:
            at = align_up(at, flat.tensor_align)
            slots[tensor] = Slot(buffer, at, numel, None)
            at += numel
    sizes[buffer] = _closed(flat, degree, at)
    return Joined(slots, sizes)


def _ordered(flat: Flat, degree: int, members: Sequence[tuple[str, int]]) -> Sequence[tuple[str, int]]:
    if flat.order == "reverse":
        return members[::-1]
    if flat.order == "round_robin":  # DeepSpeed's _round_robin_reorder: deal them out, then join the hands
        return [m for i in range(degree) for m in members[i::degree]]
    return members


def _closed(flat: Flat, degree: int, at: int) -> int:
    """What one rank holds of a buffer that ends at `at`."""
    if flat.cut == "before_join":
        return align_up(at, math.lcm(flat.group_pad, flat.total_align))
    return align_up(at, math.lcm(flat.group_pad * degree, flat.total_align, degree)) // degree


def _sub(flat: Flat, name: str, sub: int) -> str:
    return name if flat.max_elements is None else f"{name}.{sub}"


def align_up(n: int, to: int) -> int:
    return -(-n // to) * to
