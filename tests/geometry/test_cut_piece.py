"""The parts of a piece in a range of its buffer, against a list of all elements."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ucformat.geometry.box import Box
from ucformat.geometry.tensor import Piece, cut_piece


@st.composite
def pieces(draw: st.DrawFn) -> tuple[Piece, int]:
    """A box of an array whose dims are in any order in memory, and the elements of the buffer."""
    local = draw(st.lists(st.integers(2, 5), min_size=1, max_size=4))
    strides, size = [0] * len(local), 1
    for d in draw(st.permutations(range(len(local)))):
        strides[d] = size
        size *= local[d]
    start = [draw(st.integers(0, n // 2)) for n in local]
    shape = [draw(st.integers(1, n - a)) for n, a in zip(local, start, strict=True)]
    shift = draw(st.integers(0, 5))
    offset = shift + sum(a * s for a, s in zip(start, strides, strict=True))
    return Piece(
        Box(tuple(start), tuple(shape)), offset, tuple(strides), "flat:0"
    ), shift + size + 3


def elements(piece: Piece) -> dict[int, tuple[int, ...]]:
    return {
        piece.offset + sum(i * s for i, s in zip(index, piece.strides, strict=True)): tuple(
            a + i for a, i in zip(piece.box.start, index, strict=True)
        )
        for index in np.ndindex(*piece.box.shape)
    }


def check_cut(piece: Piece, start: int, stop: int) -> None:
    covered: dict[int, tuple[int, ...]] = {}
    for part in cut_piece(piece, start, stop):
        own = elements(part)
        assert own
        assert not covered.keys() & own.keys()
        assert part.buffer == piece.buffer
        covered |= own
    assert covered == {at: i for at, i in elements(piece).items() if start <= at < stop}


@given(pieces(), st.lists(st.floats(0, 1), min_size=12, max_size=12))
def test_cut(drawn: tuple[Piece, int], ends: list[float]) -> None:
    piece, size = drawn
    for a, b in zip(ends[::2], ends[1::2], strict=True):
        check_cut(piece, int(min(a, b) * size), int(max(a, b) * size))


def test_every_range_of_two_dims() -> None:
    for piece in (
        Piece(Box((1, 2), (3, 4)), 5, (5, 1), None),
        Piece(Box((0, 0), (3, 4)), 0, (1, 3), None),
        Piece(Box((), ()), 2, (), None),
        Piece(Box((0, 0), (0, 4)), 2, (4, 1), None),
    ):
        for start in range(22):
            for stop in range(start, 22):
                check_cut(piece, start, stop)


def test_a_range_of_rows_is_few_pieces() -> None:
    whole = Piece(Box((0, 0, 0), (1000, 30, 20)), 0, (600, 20, 1))
    assert len(list(cut_piece(whole, 601 * 7 + 3, 500_001))) <= 5
