"""Flat buffers: how ZeRO, FSDP1 and Megatron's distributed optimizer join tensors, pad them, and partition the whole.

All offsets and sizes are elements, not bytes. A range of a flattened tensor is a few boxes of the tensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ucformat.errors import UsageError
from ucformat.geometry.box import Box, row_major
from ucformat.geometry.tensor import Extent

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ucformat.geometry.placement import Flat

__all__ = [
    "FlatBuffer",
    "Slot",
    "align_up",
    "deal",
    "flat_boxes",
    "flat_extents",
    "flat_range",
    "join_flat",
    "part_size",
]


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
    """The boxes of a non-empty range of the sub-tensor of this shape at index `at`."""
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


def flat_extents(
    shape: tuple[int, ...], start: int, stop: int, itemsize: int, file: str, offset: int
) -> Iterator[Extent]:
    """Where the elements `[start, stop)` of a flattened tensor are that a file holds one after another.

    Args:
        shape: of the whole tensor.
        start: the first element.
        stop: the element after the last.
        itemsize: bytes of one element.
        file: the key of the file.
        offset: the byte of the file at which the element `start` begins.

    Raises:
        UsageError: the range leaves the tensor.
    """
    strides = row_major(shape, itemsize)
    for box in flat_boxes(shape, start, stop):
        at = sum(i * s for i, s in zip(box.start, strides, strict=True))
        yield Extent(box, file, offset - start * itemsize + at, strides)


def align_up(n: int, to: int) -> int:
    """The first multiple of `to` from `n` on."""
    return -(-n // to) * to


def part_size(numel: int, degree: int, align: int = 1) -> int:
    """Elements of each rank's part of a tensor that is cut over `degree` ranks by itself, the last parts padded."""
    return align_up(-(-numel // degree), align)


def deal(n: int, hands: int) -> list[int]:
    """The order of `n` things after they were dealt out in turn, hand after hand (DeepSpeed's round robin)."""
    return [i for hand in range(hands) for i in range(hand, n, hands)]


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one tensor of `numel` elements in a flat buffer.

    Where the joined buffer is partitioned, `part` is None and `start` counts from its beginning. Where each tensor is
    cut over the ranks before they are joined, `part` is the size of each rank's part, which begins at `start` of each
    rank's buffer.
    """

    start: int
    numel: int
    part: int | None = None

    def on(self, rank: int, size: int) -> tuple[int, int, int]:
        """What a rank holds of it, in a buffer of `size` elements a rank: a flat range, and where that starts there."""
        if self.part is not None:
            return min(self.numel, rank * self.part), min(self.numel, (rank + 1) * self.part), self.start
        a = min(max(self.start, rank * size), self.start + self.numel)
        b = max(a, min(self.start + self.numel, (rank + 1) * size))
        return a - self.start, b - self.start, min(max(a - rank * size, 0), size)

    def holders(self, size: int, start: int, stop: int) -> range:
        """The ranks that hold any of the elements `[start, stop)` of it."""
        if start >= stop:
            return range(0)
        first, width = (start, self.part) if self.part is not None else (self.start + start, size)
        return range(first // width, (first + stop - start - 1) // width + 1)


@dataclass(slots=True)
class FlatBuffer:
    """Tensors that are joined in the order in which they are appended.

    `size` is what each rank holds, padding included. `end` is where the next tensor would begin: from there on there is
    padding.
    """

    name: str = ""
    slots: dict[str, Slot] = field(default_factory=dict)
    end: int = 0
    size: int = 0

    def append(self, tensor: str, numel: int, *, align: int = 1, padding: int = 0) -> None:
        """Join a tensor at the next multiple of `align`, with so much padding after it."""
        start = align_up(self.end, align)
        self.slots[tensor] = Slot(start, numel)
        self.end = start + numel + padding

    def append_part(self, tensor: str, numel: int, part: int) -> None:
        """Join the parts of a tensor that is cut over the ranks by itself."""
        self.slots[tensor] = Slot(self.end, numel, part)
        self.end += part

    def on(self, rank: int) -> dict[str, tuple[int, int, int]]:
        """The tensors of which a rank holds any element, as `Slot.on` describes it."""
        found = ((tensor, slot.on(rank, self.size)) for tensor, slot in self.slots.items())
        return {tensor: (start, stop, at) for tensor, (start, stop, at) in found if start < stop}

    def padding(self, rank: int) -> int:
        """Elements at the end of a rank's partition that belong to no tensor."""
        return min(self.size, max(0, (rank + 1) * self.size - self.end))


def join_flat(flat: Flat, degree: int, name: str, members: Sequence[tuple[str, int]]) -> dict[str, FlatBuffer]:
    """Join tensors into flat buffers by the settings of a layout.

    Args:
        flat: the layout's settings.
        degree: over how many coordinates the buffers are cut.
        name: of the buffer; with `max_elements` there may be several, `name.0`, `name.1`, …
        members: the tensors in the order of the tensor list, and the elements of each that are joined.

    Returns:
        The buffer of each tensor, by the tensor's name.
    """
    out: dict[str, FlatBuffer] = {}
    buffers = [FlatBuffer(name if flat.max_elements is None else f"{name}.0")]
    if flat.order == "reverse":
        members = members[::-1]
    elif flat.order == "round_robin":
        members = [members[i] for i in deal(len(members), degree)]
    for tensor, numel in members:
        if flat.max_elements is not None and buffers[-1].end >= flat.max_elements:
            buffers.append(FlatBuffer(f"{name}.{len(buffers)}"))
        if flat.cut == "before_join":
            buffers[-1].append_part(tensor, numel, part_size(numel, degree, flat.tensor_align))
        else:
            buffers[-1].append(tensor, numel, align=flat.tensor_align)
        out[tensor] = buffers[-1]
    for buffer in buffers:
        if flat.cut == "before_join":
            buffer.size = align_up(buffer.end, math.lcm(flat.group_pad, flat.total_align))
        else:
            buffer.size = align_up(buffer.end, math.lcm(flat.group_pad * degree, flat.total_align, degree)) // degree
    return out
