"""The proof of coverage, against counting elements."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ucformat.errors import CoverageError
from ucformat.geometry.box import Box
from ucformat.geometry.coverage import prove
from ucformat.geometry.flat_buffer import flat_boxes
from ucformat.geometry.tensor import TensorInfo

PINWHEEL = [
    Box((0, 0), (1, 2)),
    Box((0, 2), (2, 1)),
    Box((2, 1), (1, 2)),
    Box((1, 0), (2, 1)),
    Box((1, 1), (1, 1)),
]  # no straight cut divides it


def tensor(*shape: int) -> TensorInfo:
    return TensorInfo("a.weight", "exp_avg", "float32", shape)


def covered(shape: tuple[int, ...], boxes: list[Box]) -> bool:
    count = np.zeros(shape, int)
    for box in set(boxes):
        count[tuple(map(slice, box.start, box.stop))] += 1
    return bool((count == 1).all())


def proved(shape: tuple[int, ...], boxes: list[Box]) -> bool:
    try:
        prove(tensor(*shape), enumerate(boxes))
    except CoverageError:
        return False
    return True


@st.composite
def tilings(draw: st.DrawFn, box: Box) -> list[Box]:
    """A box cut at random, again and again; a square of 3 sometimes as a pinwheel."""
    if box.shape == (3, 3) and draw(st.booleans()):
        return [b.shift(box.start) for b in PINWHEEL]
    d = draw(st.integers(-1, len(box.shape) - 1))
    if d < 0 or box.shape[d] < 2:
        return [box]
    at = draw(st.integers(1, box.shape[d] - 1))
    first = Box(box.start, (*box.shape[:d], at, *box.shape[d + 1 :]))
    shift = tuple(at if i == d else 0 for i in range(len(box.shape)))
    second = Box(first.shift(shift).start, (*box.shape[:d], box.shape[d] - at, *box.shape[d + 1 :]))
    return draw(tilings(first)) + draw(tilings(second))


@st.composite
def box_sets(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A tiling, sometimes with a box lost, doubled, or moved and resized."""
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 3, 5]), min_size=1, max_size=3)))
    boxes = draw(tilings(Box.whole(shape)))
    for _ in range(draw(st.integers(0, 2))):
        i = draw(st.integers(0, len(boxes) - 1))
        match draw(st.sampled_from(["lose", "double", "change"])):
            case "lose" if len(boxes) > 1:
                boxes.pop(i)
            case "double":
                boxes.append(boxes[i])
            case _:
                start = tuple(draw(st.integers(0, n)) for n in shape)
                boxes[i] = Box(
                    start,
                    tuple(draw(st.integers(0, n - a)) for a, n in zip(start, shape, strict=True)),
                )
    return shape, draw(st.permutations(boxes))


@settings(max_examples=500)
@given(box_sets())
def test_the_proof_agrees_with_counting(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = case
    assert proved(shape, boxes) == covered(shape, boxes)


@settings(max_examples=300)
@given(box_sets())
def test_a_hole_that_is_named_is_a_hole(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = case
    try:
        prove(tensor(*shape), enumerate(boxes))
    except CoverageError as e:
        if "no rank or file holds " in e.message:
            said = e.message.split("no rank or file holds [")[1].split("]")[0]
            bounds = [tuple(map(int, s.split(":"))) for s in said.split(", ")]
            hole = Box(tuple(a for a, _ in bounds), tuple(b - a for a, b in bounds))
            assert hole.size
            assert all(hole.intersect(b) is None for b in boxes)


def test_replicas_count_once_and_a_pinwheel_is_whole() -> None:
    assert proved((3, 3), [*PINWHEEL, *PINWHEEL])
    assert not proved((3, 3), PINWHEEL[:-1])
    assert not proved((3, 3), PINWHEEL[1:])


def test_nothing_covers_an_empty_tensor_and_one_box_a_scalar() -> None:
    prove(tensor(3, 0), [])
    prove(tensor(), [(0, Box((), ())), (1, Box((), ()))])
    with pytest.raises(CoverageError, match=r"a.weight \(exp_avg\).*no rank or file holds \[\]"):
        prove(tensor(), [])


def test_a_hole_is_named_with_the_box_before_it() -> None:
    boxes = [("f0", Box((0, 0), (2, 4))), ("f1", Box((3, 0), (1, 4)))]
    with pytest.raises(CoverageError) as e:
        prove(tensor(4, 4), boxes)
    assert e.value.message == (
        "a.weight (exp_avg) of shape (4, 4): no rank or file holds [2:3, 0:4]; f0 holds [0:2, 0:4] before it"
    )


def test_an_overlap_names_both_owners() -> None:
    with pytest.raises(
        CoverageError, match=r"rank 3 holds \[0:3\] and rank 5 holds \[2:4\].*share \[2:3\]"
    ):
        prove(tensor(4), [(3, Box((0,), (3,))), (5, Box((2,), (2,)))])


@pytest.mark.parametrize("box", [Box((0,), (5,)), Box((-1,), (2,)), Box((0, 0), (4, 1))])
def test_a_box_outside_is_an_error(box: Box) -> None:
    with pytest.raises(CoverageError, match="rank 7 holds"):
        prove(tensor(4), [(7, box), (0, Box((0,), (4,)))])


def test_of_a_partial_tensor_every_owner_must_hold_all() -> None:
    whole, half = Box((0,), (4,)), Box((0,), (2,))
    prove(tensor(4), [(0, whole), (1, half), (1, Box((2,), (2,)))], partial=True)
    with pytest.raises(CoverageError, match=r"no rank or file holds \[2:4\]"):
        prove(tensor(4), [(0, whole), (1, half)], partial=True)
    with pytest.raises(CoverageError, match="no rank or file holds"):
        prove(tensor(4), [], partial=True)


def grid(rows: int, columns: int) -> list[Box]:
    return [Box((3 * i, 2 * j), (3, 2)) for i in range(rows) for j in range(columns)]


def slices(shape: tuple[int, ...], width: int) -> list[Box]:
    size = int(np.prod(shape))
    return [b for a in range(0, size, width) for b in flat_boxes(shape, a, min(size, a + width))]


def columns_of_slices(rows: int, width: int, columns: int, step: int) -> list[Box]:
    """Each column of a TP cut, flattened and cut by itself, at places of its own."""
    return [
        b.shift((0, c * width)) for c in range(columns) for b in slices((rows, width), step + c)
    ]


def pinwheels(n: int) -> list[Box]:
    return [b.shift((3 * i, 3 * j)) for i in range(n) for j in range(n) for b in PINWHEEL]


@pytest.mark.parametrize(
    ("shape", "boxes"),
    [
        ((316 * 3, 316 * 2), grid(316, 316)),
        ((100_000, 7), slices((100_000, 7), 7)),
        ((40_000, 7), slices((40_000, 7), 8)),
        ((6_000, 128), columns_of_slices(6_000, 16, 8, 10)),
        ((423, 423), pinwheels(141)),
    ],
    ids=["grid", "rows", "flat", "flat in columns", "pinwheels"],
)
def test_a_hundred_thousand_boxes(shape: tuple[int, ...], boxes: list[Box]) -> None:
    assert len(boxes) > 60_000
    began = time.process_time()
    prove(tensor(*shape), enumerate(boxes))
    assert (
        time.process_time() - began < 10
    )  # 0.6 s for the grid; the bound only tells n log n from n squared
    with pytest.raises(CoverageError):
        prove(tensor(*shape), enumerate(boxes[:-1]))
