"""Flat buffers: how ZeRO, FSDP1 and Megatron's distributed optimizer join, pad and partition tensors.

All offsets and sizes are in elements unless stated otherwise. A range of a flattened tensor is a
few boxes of the tensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ucformat.errors import UsageError
from ucformat.geometry.box import Box, offset_of, reach, row_major
from ucformat.geometry.tensor import Extent

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ucformat.geometry.placement import Flat


def flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> tuple[Box, ...]:
    """The boxes of a range of the row-major flattened tensor: at most `2 * ndim - 1`, in flat order.

    A 0-d tensor gives one box, an empty range none.
    """
    size = math.prod(shape)
    if not 0 <= start <= stop <= size:
        raise UsageError(
            f"the flat range {start}:{stop} is not within the {size} elements of shape {shape}"
        )
    return tuple(_flat_boxes((), shape, start, stop)) if start < stop else ()


def flat_range(shape: tuple[int, ...], within: Box | None) -> tuple[int, int]:
    """The smallest range `[start, stop)` of the row-major flattened tensor that contains a box."""
    if within is None:
        return 0, math.prod(shape)
    if not within.size:
        return 0, 0
    strides = row_major(shape)
    first = offset_of(within.start, strides)
    return first, first + 1 + reach(within.shape, strides)


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
    """The extents of a range of a flattened tensor that is stored contiguously in a file.

    Args:
        offset: byte of the file at which the element `start` begins.
    """
    strides = row_major(shape, itemsize)
    for box in flat_boxes(shape, start, stop):
        at = offset - start * itemsize + offset_of(box.start, strides)
        yield Extent(box, file, at, strides)


def align_up(n: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `n`."""
    return -(-n // multiple) * multiple


def part_size(numel: int, degree: int, align: int = 1) -> int:
    """Elements of each rank's part of a tensor that is partitioned by itself; the last parts are padded to this size.

    Args:
        align: the size is a multiple of this many elements (default: 1).
    """
    return align_up(-(-numel // degree), align)


def part_range(numel: int, part: int, rank: int) -> tuple[int, int]:
    """The range `[start, stop)` of a flattened tensor that a rank holds, if the tensor is partitioned by itself."""
    return min(numel, rank * part), min(numel, (rank + 1) * part)


def round_robin_order(n: int, groups: int) -> list[int]:
    """The order of `n` items that are dealt in turn to groups, group after group (DeepSpeed's `round_robin_gradients`).

    Returns:
        indices of the items: those of the first group, then of the second, and so on.
    """
    return [i for group in range(groups) for i in range(group, n, groups)]


@dataclass(slots=True)
class FlatBuffer:
    """Tensors joined in the order in which they are appended.

    `slots` are the ranges of the tensors in the joined buffer, which is then partitioned. If each
    tensor is partitioned before the parts are joined, they are the ranges of its parts in each
    rank's buffer, and `partitioned` has its elements. `size` is the number of elements on each
    rank, padding included. `end` is where the next tensor would begin; everything after it is
    padding.
    """

    name: str = ""
    slots: dict[str, range] = field(default_factory=dict)
    partitioned: dict[str, int] = field(default_factory=dict)
    end: int = 0
    size: int = 0

    def append(self, tensor: str, numel: int, *, align: int = 1, padding: int = 0) -> None:
        """Append a tensor to the joined buffer."""
        start = align_up(self.end, align)
        self.slots[tensor] = range(start, start + numel)
        self.end = start + numel + padding

    def append_part(self, tensor: str, numel: int, part: int) -> None:
        """Append the parts of a tensor that is partitioned by itself, one to each rank's buffer."""
        self.slots[tensor] = range(self.end, self.end + part)
        self.partitioned[tensor] = numel
        self.end += part

    def part_on(self, tensor: str, rank: int) -> tuple[int, int, int]:
        """A rank's part of a tensor.

        Returns:
            the range `[start, stop)` of the flattened tensor, and the element of the rank's buffer
            at which it begins.
        """
        slot, numel = self.slots[tensor], self.partitioned.get(tensor)
        if numel is not None:
            return *part_range(numel, len(slot), rank), slot.start
        a = min(max(slot.start, rank * self.size), slot.stop)
        b = max(a, min(slot.stop, (rank + 1) * self.size))
        return a - slot.start, b - slot.start, min(max(a - rank * self.size, 0), self.size)

    def holders(self, tensor: str, start: int = 0, stop: int | None = None) -> range:
        """The ranks that hold any of a range of a flattened tensor."""
        slot, numel = self.slots[tensor], self.partitioned.get(tensor)
        if stop is None:
            stop = len(slot) if numel is None else numel
        if start >= stop:
            return range(0)
        first, width = (slot.start + start, self.size) if numel is None else (start, len(slot))
        return range(first // width, (first + stop - start - 1) // width + 1)

    def on(self, rank: int) -> dict[str, tuple[int, int, int]]:
        """The tensors of which a rank holds any element, each with its part as of `part_on`."""
        parts = ((tensor, self.part_on(tensor, rank)) for tensor in self.slots)
        return {tensor: (start, stop, at) for tensor, (start, stop, at) in parts if start < stop}

    def padding(self, rank: int) -> int:
        """Elements at the end of a rank's partition that belong to no tensor."""
        return min(self.size, max(0, (rank + 1) * self.size - self.end))


def join_flat(
    flat: Flat, degree: int, name: str, members: Sequence[tuple[str, int]]
) -> dict[str, FlatBuffer]:
    """Join tensors into flat buffers with the settings of a layout.

    Args:
        members: the tensors in the order of the tensor list, each with the number of its elements
            to join.
    """
    out: dict[str, FlatBuffer] = {}
    buffers = [FlatBuffer(name if flat.max_elements is None else f"{name}.0")]
    if flat.order == "reverse":
        members = members[::-1]
    elif flat.order == "round_robin":
        members = [members[i] for i in round_robin_order(len(members), degree)]
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
            buffer.size = (
                align_up(buffer.end, math.lcm(flat.group_pad * degree, flat.total_align, degree))
                // degree
            )
    return out
