"""Flat ranges as boxes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.geometry.strategies import shapes
from ucformat.errors import UsageError
from ucformat.geometry.box import Box, hull
from ucformat.geometry.flat_buffer import flat_boxes, flat_range


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
    box = Box(start, tuple(data.draw(st.integers(0, n - a)) for a, n in zip(start, shape, strict=True)))
    numbers = np.arange(math.prod(shape)).reshape(shape)[tuple(map(slice, box.start, box.stop))]
    expected = (int(numbers.min()), int(numbers.max()) + 1) if numbers.size else (0, 0)
    assert flat_range(shape, box) == expected
    assert flat_range(shape, None) == (0, math.prod(shape))


@given(st.lists(st.tuples(*[st.tuples(st.integers(0, 9), st.integers(0, 4))] * 2), max_size=4))
def test_the_hull_is_the_smallest_box_around(sides: list[tuple[tuple[int, int], tuple[int, int]]]) -> None:
    boxes = [Box((a, b), (m, n)) for (a, m), (b, n) in sides]
    points = {(i, j) for (a, m), (b, n) in sides for i in range(a, a + m) for j in range(b, b + n)}
    found = hull(boxes)
    if found is None:
        assert not points
        return
    for d in range(2):
        assert (found.start[d], found.stop[d] - 1) == (min(p[d] for p in points), max(p[d] for p in points))


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
    assert sum(b.size for b in flat_boxes((1 << 20, 1 << 20, 1 << 20), 12345, (1 << 60) - 7)) == (1 << 60) - 7 - 12345
