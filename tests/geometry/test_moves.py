"""Moves: how views of arrays compose, and the boxes that they connect."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucformat.geometry.box import row_major
from ucformat.geometry.moves import MAX_BOXES, Move, NotBoxes, boxes, composed, remaining

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

SHAPES = st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=3).map(tuple)


def places(move: Move, side: int) -> list[int]:
    """The elements of one side of a move, one by one."""
    offset, strides = move.offsets[side], move.strides[side]
    return [
        offset + sum(i * s for i, s in zip(index, strides, strict=True))
        for index in np.ndindex(*move.shape)
    ]


def pairs(moves: Sequence[Move]) -> list[tuple[int, int]]:
    return sorted((t, f) for m in moves for t, f in zip(places(m, 0), places(m, 1), strict=True))


def strided(view: NDArray[np.int64], base: NDArray[np.int64]) -> tuple[tuple[int, ...], int]:
    """The strides and the offset of a view, in elements."""
    offset = view.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    return tuple(s // 8 for s in view.strides), offset // 8


@st.composite
def views(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """A view of a row-major array, and the array."""
    base = np.arange(int(np.prod(shape))).reshape(shape)
    view = base
    for _ in range(draw(st.integers(0, 3))):
        how = draw(st.sampled_from(["slice", "transpose", "split", "step"]))
        dim = draw(st.integers(0, view.ndim - 1))
        n = view.shape[dim]
        if how == "slice":
            start = draw(st.integers(0, n - 1))
            stop = draw(st.integers(start + 1, n))
            view = view[(slice(None),) * dim + (slice(start, stop),)]
        elif how == "step":
            view = view[(slice(None),) * dim + (slice(None, None, draw(st.sampled_from([1, 2]))),)]
        elif how == "transpose":
            view = view.transpose(draw(st.permutations(range(view.ndim))))
        elif n % 2 == 0 and view.ndim < 4:
            step = view.strides[dim]
            new = (*view.shape[:dim], n // 2, 2, *view.shape[dim + 1 :])
            strides = (*view.strides[:dim], 2 * step, step, *view.strides[dim + 1 :])
            view = np.lib.stride_tricks.as_strided(view, new, strides)
    return view, base


@given(st.data(), SHAPES, SHAPES)
def test_moves_compose(
    data: st.DataObject, shape: tuple[int, ...], source: tuple[int, ...]
) -> None:
    """A part of a source is put into a view of an array, of which another view is taken."""
    written, base = data.draw(views(shape))
    taken = data.draw(views(shape))
    first = Move.between(
        written.shape, strided(written, base), (row_major(written.shape), len(source))
    )
    second = Move.between(taken[0].shape, (row_major(taken[0].shape), 5), strided(*taken))
    put = dict(zip(places(first, 0), places(first, 1), strict=True))
    wanted = sorted(
        (t, put[f]) for t, f in zip(places(second, 0), places(second, 1), strict=True) if f in put
    )
    try:
        assert pairs(composed(second, first)) == wanted
        left = [(t, f) for t, f in pairs([first]) if t not in places(second, 1)]
        over = Move(second.shape, (second.strides[1], second.strides[0]), second.offsets[::-1])
        assert pairs(remaining(first, over)) == left
    except NotBoxes:
        pass  # rows of 4 and of 6: refused


@given(st.data(), SHAPES, SHAPES)
def test_boxes_are_what_a_move_connects(
    data: st.DataObject, target: tuple[int, ...], source: tuple[int, ...]
) -> None:
    view, base = data.draw(views(source))
    flat = view.reshape(-1)[: int(np.prod(target))]
    if flat.size < np.prod(target):
        return
    whole = Move.between((base.size,), ((1,), 0), ((1,), 0))
    ordered = Move.between(view.shape, (row_major(view.shape), 0), strided(view, base))
    first = Move.between(flat.shape, ((1,), 0), ((1,), 0))
    try:
        parts = [m for o in composed(ordered, whole) for m in composed(first, o)]
        found = np.full(target, -1)
        for pair in (p for m in parts for p in boxes(m, target, source)):
            box = tuple(slice(a, b) for a, b in zip(pair.box.start, pair.box.stop, strict=True))
            values = base[box]
            axes = [a for a in pair.axes if a is not None]
            values = values.transpose([*axes, *(d for d in range(base.ndim) if d not in axes)])
            into = tuple(
                slice(a, b) for a, b in zip(pair.target.start, pair.target.stop, strict=True)
            )
            assert (found[into] == -1).all()
            found[into] = values.reshape(pair.target.shape)
    except NotBoxes:
        return
    assert (found == flat.reshape(target)).all()


def test_heads_are_few_boxes() -> None:
    """Rotary halves of 32 heads, and a transposed matrix."""
    split = Move.between(
        (32, 2, 64, 512), ((128 * 512, 512, 1024, 1), 0), (row_major((32, 2, 64, 512)), 0)
    )
    assert len(boxes(split, (4096, 512), (4096, 512))) == 4096  # a row each
    transposed = Move.between((512, 768), ((768, 1), 0), ((1, 512), 0))
    (pair,) = boxes(transposed, (512, 768), (768, 512))
    assert pair.axes == (1, 0)


def test_too_many_boxes_are_refused() -> None:
    n = MAX_BOXES + 1
    with pytest.raises(NotBoxes, match="boxes would describe it"):
        boxes(Move.between((n, 2), ((2, 1), 0), ((2, 1), 0)), (n, 2), (2 * n,))


def test_rows_that_do_not_divide_are_refused() -> None:
    first = Move.between((4, 3), ((6, 1), 0), ((3, 1), 0))
    second = Move.between((3, 2), ((2, 1), 0), ((4, 1), 0))
    with pytest.raises(NotBoxes, match="do not divide"):
        composed(second, first)
