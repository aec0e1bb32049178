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
    local = draw(st.lists(st.integers(1, 5), max_size=4))
    strides, size = [0] * len(local), 1
    for d in draw(st.permutations(range(len(local)))):
        strides[d] = size
        size *= local[d]
    start = [draw(st.integers(0, n - 1)) for n in local]
    shape = [draw(st.integers(0, n - a)) for n, a in zip(local, start, strict=True)]
    shift = draw(st.integers(0, 5))
    offset = shift + sum(a * s for a, s in zip(start, strides, strict=True))
    return Piece(Box(tuple(start), tuple(shape)), offset, tuple(strides), "flat:0"), shift + size + 3


def elements(piece: Piece) -> dict[int, tuple[int, ...]]:
    return {
        piece.offset + sum(i * s for i, s in zip(index, piece.strides, strict=True)): tuple(
            a + i for a, i in zip(piece.box.start, index, strict=True)
        )
        for index in np.ndindex(*piece.box.shape)
    }


@given(pieces(), st.data())
def test_cut(drawn: tuple[Piece, int], data: st.DataObject) -> None:
    piece, size = drawn
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    found: dict[int, tuple[int, ...]] = {}
    for part in cut_piece(piece, start, stop):
        own = elements(part)
        assert own
        assert not found.keys() & own.keys()
        assert part.buffer == piece.buffer
        found |= own
    assert found == {at: i for at, i in elements(piece).items() if start <= at < stop}


def test_a_range_of_rows_is_few_pieces() -> None:
    whole = Piece(Box((0, 0, 0), (1000, 30, 20)), 0, (600, 20, 1))
    assert len(list(cut_piece(whole, 601 * 7 + 3, 500_001))) <= 5
