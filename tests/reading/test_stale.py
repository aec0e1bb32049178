"""Whole and partial reads give the same bytes, and none of another read (docs/security.md, rule 14)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from ucformat.errors import IntegrityError
from ucformat.geometry.box import Box, row_major
from ucformat.geometry.tensor import Block, Extent, Piece, TensorInfo
from ucformat.reading import execute as module
from ucformat.reading.execute import read_planned
from ucformat.reading.plan import ReadItem, Verify, make_plan
from ucformat.storage.memory import MemoryStore

CANARY, UNFILLED = 0xA5, 0xF0
FILE = bytes(range(120))
SHAPE = (4, 6)
INFO = TensorInfo("t", "weight", "uint8", SHAPE)
VERIFY: list[Verify] = ["whole", "always", "never"]


class _NumPy:
    """NumPy, but that memory which is not filled holds canaries, as if others had read into it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    @staticmethod
    def empty(size: int, dtype: Any) -> Any:
        return np.full(size + 64, CANARY, dtype)


@pytest.fixture(scope="module", autouse=True)
def _canaries() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "np", _NumPy())
        yield


@st.composite
def extents(draw: st.DrawFn) -> Extent:
    """Of the whole tensor, anywhere in the file, and a block anywhere, whose checksum is right."""
    strides = draw(st.sampled_from([row_major(SHAPE), (1, 4), (8, 1), (12, 2)]))
    span = sum((n - 1) * s for n, s in zip(SHAPE, strides, strict=True)) + 1
    offset = draw(st.integers(0, len(FILE) - span))
    tight = Block(offset, span, crc32c(FILE[offset : offset + span]))
    begin = draw(st.integers(0, len(FILE) - 1))
    nbytes = draw(st.integers(1, len(FILE) - begin))
    loose = Block(begin, nbytes, crc32c(FILE[begin : begin + nbytes]))
    shifted = [
        Block(at, span, crc32c(FILE[at : at + span]))
        for at in (offset - 1, offset + 1)
        if 0 <= at <= len(FILE) - span
    ]
    return Extent(
        Box.whole(SHAPE),
        "f",
        offset,
        strides,
        draw(st.sampled_from([None, tight, loose, *shifted])),
    )


def read(extent: Extent, boxes: list[Box], verify: Verify) -> list[Any]:
    """What each box gives, all read by one plan."""
    store = MemoryStore("stale")
    with store.create("f") as out:
        out.write(FILE)
    memories = [np.full(b.size, UNFILLED, np.uint8) for b in boxes]
    pieces = [(n, Piece(b, 0, row_major(b.shape))) for n, b in enumerate(boxes)]
    plan = make_plan([ReadItem(INFO, [extent], pieces)], verify)
    read_planned(plan, store, lambda: memories, ["t"] * len(boxes), threads=1)
    return [m.reshape(b.shape) for m, b in zip(memories, boxes, strict=True)]


@given(
    extents(), st.integers(1, SHAPE[0] - 1), st.integers(1, SHAPE[1] - 1), st.sampled_from(VERIFY)
)
@settings(max_examples=200)
def test_parts_are_what_the_whole_is(extent: Extent, row: int, column: int, verify: Verify) -> None:
    parts = [
        Box((a, b), (c - a, d - b))
        for a, c in ((0, row), (row, SHAPE[0]))
        for b, d in ((0, column), (column, SHAPE[1]))
    ]
    truth = np.lib.stride_tricks.as_strided(
        np.frombuffer(FILE, np.uint8)[extent.offset :], SHAPE, extent.strides
    )
    block, held = extent.block, np.unique(truth)  # every byte of the file tells where it lies
    inside = block is None or (block.offset <= held[0] and held[-1] < block.offset + block.nbytes)
    for boxes in ([Box.whole(SHAPE)], parts, [Box.whole(SHAPE), *parts]):
        try:
            found = read(extent, boxes, verify)
        except IntegrityError:
            if inside:
                raise
            continue
        assert inside
        for box, data in zip(boxes, found, strict=True):
            assert (data == truth[tuple(map(slice, box.start, box.stop))]).all()


def test_a_block_that_is_larger_than_its_file() -> None:
    """No memory is taken for what it claims to have."""
    extent = Extent(Box.whole(SHAPE), "f", 0, row_major(SHAPE), Block(0, 1 << 51, 0))
    with pytest.raises(IntegrityError, match="f has 120 bytes"):
        read(extent, [Box.whole(SHAPE)], "whole")
