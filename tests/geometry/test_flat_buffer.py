"""Flat ranges as boxes, and what each rank holds of tensors that are joined in a flat buffer."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.geometry.strategies import shapes
from ucformat.errors import UsageError
from ucformat.geometry.box import Box, bounding_box
from ucformat.geometry.flat_buffer import (
    FlatBuffer,
    align_up,
    flat_boxes,
    flat_extents,
    flat_range,
    part_size,
    round_robin_order,
)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = draw(shapes)
    start = draw(st.integers(0, math.prod(shape)))
    return shape, start, draw(st.integers(start, math.prod(shape)))


@given(ranges())
def test_boxes_are_the_range_in_flat_order(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = case
    numbers = np.arange(math.prod(shape)).reshape(shape)
    boxes = flat_boxes(shape, start, stop)
    found = [numbers[tuple(map(slice, b.start, b.stop))].ravel() for b in boxes]
    assert [int(i) for part in found for i in part] == list(range(start, stop))
    assert all(part.size for part in found)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@given(shapes, st.data())
def test_the_range_of_a_box(shape: tuple[int, ...], data: st.DataObject) -> None:
    start = tuple(data.draw(st.integers(0, n)) for n in shape)
    box = Box(
        start, tuple(data.draw(st.integers(0, n - a)) for a, n in zip(start, shape, strict=True))
    )
    numbers = np.arange(math.prod(shape)).reshape(shape)[tuple(map(slice, box.start, box.stop))]
    expected = (int(numbers.min()), int(numbers.max()) + 1) if numbers.size else (0, 0)
    assert flat_range(shape, box) == expected
    assert flat_range(shape, None) == (0, math.prod(shape))


@given(st.lists(st.tuples(*[st.tuples(st.integers(0, 9), st.integers(0, 4))] * 2), max_size=4))
def test_the_hull_is_the_smallest_box_around(
    sides: list[tuple[tuple[int, int], tuple[int, int]]],
) -> None:
    boxes = [Box((a, b), (m, n)) for (a, m), (b, n) in sides]
    points = {(i, j) for (a, m), (b, n) in sides for i in range(a, a + m) for j in range(b, b + n)}
    found = bounding_box(boxes)
    if found is None:
        assert not points
        return
    for d in range(2):
        assert (found.start[d], found.stop[d] - 1) == (
            min(p[d] for p in points),
            max(p[d] for p in points),
        )


def test_a_cut_through_three_dims_takes_five_boxes() -> None:
    assert flat_boxes((3, 4, 5), 7, 52) == (
        Box((0, 1, 2), (1, 1, 3)),
        Box((0, 2, 0), (1, 2, 5)),
        Box((1, 0, 0), (1, 4, 5)),
        Box((2, 0, 0), (1, 2, 5)),
        Box((2, 2, 0), (1, 1, 2)),
    )


def test_a_scalar_is_one_box_and_nothing_is_none() -> None:
    assert flat_boxes((), 0, 1) == (Box((), ()),)
    assert flat_boxes((), 0, 0) == flat_boxes((3, 0), 0, 0) == flat_boxes((4,), 2, 2) == ()


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 7)])
def test_a_range_outside_is_refused(start: int, stop: int) -> None:
    with pytest.raises(UsageError, match="not within the 6 elements"):
        flat_boxes((2, 3), start, stop)


def test_a_huge_range_costs_nothing() -> None:
    assert (
        sum(b.size for b in flat_boxes((1 << 20, 1 << 20, 1 << 20), 12345, (1 << 60) - 7))
        == (1 << 60) - 7 - 12345
    )


sizes_of = st.lists(st.integers(0, 40), min_size=1, max_size=8)


def check_ranks(
    buffer: FlatBuffer, ranks: list[np.ndarray], tensors: dict[str, np.ndarray]
) -> None:
    """Each rank holds of each tensor what the buffer says, and all ranks together each element once."""
    found: dict[str, list[int]] = {name: [] for name in tensors}
    for rank, memory in enumerate(ranks):
        for name, (start, stop, at) in buffer.on(rank).items():
            assert memory[at : at + stop - start].tolist() == tensors[name][start:stop].tolist()
            found[name] += range(start, stop)
    assert found == {name: list(range(t.size)) for name, t in tensors.items()}
    for name, tensor in tensors.items():
        for start in range(tensor.size):
            (holder,) = buffer.holders(name, start, start + 1)
            first, last, _ = buffer.part_on(name, holder)
            assert first <= start < last
        assert not buffer.holders(name, 0, 0)
        assert list(buffer.holders(name)) == [r for r in range(len(ranks)) if name in buffer.on(r)]


@given(sizes_of, st.integers(1, 5), st.integers(1, 9), st.data())
def test_partitions_of_a_joined_buffer(
    sizes: list[int], degree: int, align: int, data: st.DataObject
) -> None:
    tensors = {str(i): np.arange(100 * i, 100 * i + n) for i, n in enumerate(sizes)}
    buffer, memory = FlatBuffer(), np.empty(0, int)
    for name, tensor in tensors.items():
        padding = data.draw(st.integers(0, 5))
        buffer.append(name, tensor.size, align=align, padding=padding)
        memory = np.pad(memory, (0, align_up(memory.size, align) - memory.size), constant_values=-1)
        memory = np.pad(np.concatenate([memory, tensor]), (0, padding), constant_values=-1)
    assert buffer.end == memory.size
    buffer.size = part_size(buffer.end, degree)
    memory = np.pad(memory, (0, buffer.size * degree - memory.size), constant_values=-2)
    ranks = np.split(memory, degree)
    check_ranks(buffer, ranks, tensors)
    assert [buffer.padding(rank) for rank in range(degree)] == [
        int((part == -2).sum()) for part in ranks
    ]


@given(sizes_of, st.integers(1, 5), st.integers(1, 9))
def test_joined_parts_of_tensors_that_are_cut_first(
    sizes: list[int], degree: int, align: int
) -> None:
    tensors = {str(i): np.arange(100 * i, 100 * i + n) for i, n in enumerate(sizes)}
    buffer, ranks = FlatBuffer(), [np.empty(0, int)] * degree
    for name, tensor in tensors.items():
        part = part_size(tensor.size, degree, align)
        buffer.append_part(name, tensor.size, part)
        padded = np.pad(tensor, (0, part * degree - tensor.size), constant_values=-1)
        ranks = [np.concatenate(both) for both in zip(ranks, np.split(padded, degree), strict=True)]
    buffer.size = buffer.end
    assert {r.size for r in ranks} == {buffer.size}
    check_ranks(buffer, ranks, tensors)


def test_things_are_dealt_in_turn() -> None:
    assert round_robin_order(7, 3) == [0, 3, 6, 1, 4, 2, 5]
    assert round_robin_order(3, 1) == [0, 1, 2]
    assert round_robin_order(2, 5) == [0, 1]


@given(ranges(), st.integers(0, 99))
def test_extents_of_a_flat_range(case: tuple[tuple[int, ...], int, int], offset: int) -> None:
    shape, start, stop = case
    numbers = np.arange(math.prod(shape), dtype="<i4").reshape(shape)
    file = bytes(offset) + numbers.tobytes()[start * 4 : stop * 4]
    for extent in flat_extents(shape, start, stop, 4, "file", offset):
        found = np.ndarray(extent.box.shape, "<i4", file, extent.offset, extent.strides)
        assert (found == numbers[tuple(map(slice, extent.box.start, extent.box.stop))]).all()
