"""Tiles as the bytes of a packed file: what is compiled, and what Python does without it, against the specification."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes import random_array
from ucformat.format import packing
from ucformat.format.packing import NO_RUN, pack, run_of
from ucformat.geometry.box import Box
from ucformat.geometry.fingerprint import fingerprint_of

needs_native = pytest.mark.skipif(
    not packing.NATIVE,
    reason="ucformat._native was not built (it needs x86-64 Linux and a C compiler): pip install -e .",
)
NATIVE = [pytest.param(True, marks=needs_native), False]
KEY, BEGIN = "data/attempt/rank-00003.bin", 4096
KINDS = st.tuples(
    st.sampled_from(["uint8", "int16", "float32", "float64", "complex128"]),
    st.integers(1, 700),
    st.integers(0, 5000),
)


@pytest.mark.parametrize("native", NATIVE)
@given(st.lists(KINDS, max_size=6))
def test_tiles_have_their_bytes_checksums_and_sums(
    native: bool, kinds: list[tuple[str, int, int]]
) -> None:
    tiles = [random_array((size,), dtype, n) for n, (dtype, size, _) in enumerate(kinds)]
    firsts = [first for *_, first in kinds]
    starts, end = [], 5
    for tile in tiles:
        starts.append(end)
        end += tile.nbytes + 4 + 7
    room = np.full(end + 3, 0xAA, np.uint8)
    expected = bytearray(end + 3)
    for tile, start in zip(tiles, starts, strict=True):
        data = tile.tobytes()
        place = b"attempt/rank-00003.bin" + (BEGIN + start).to_bytes(8, "little")
        expected[start : start + len(data) + 4] = data + crc32c(place + data).to_bytes(4, "little")
    with mock.patch.object(packing, "NATIVE", native):
        sums = pack(room, KEY, BEGIN, tiles, starts, firsts)
    assert room.tobytes() == expected
    for tile, first, of_tile in zip(tiles, firsts, sums.tolist(), strict=True):
        whole, box = (first + tile.size + 9,), Box((first,), tile.shape)
        assert tuple(of_tile) == fingerprint_of(tile, whole, box)


@pytest.mark.parametrize("native", NATIVE)
def test_tiles_may_be_in_the_room_and_without_a_run(native: bool) -> None:
    room = np.zeros(32, np.uint8)
    room[8:16] = data = random_array((8,), "uint8", 1)
    with mock.patch.object(packing, "NATIVE", native):
        sums = pack(room, "f", 0, [room[8:16]], [8], [NO_RUN])
    assert room[:8].tolist() == [0] * 8
    assert room[8:16].tobytes() == data.tobytes()
    crc = crc32c(b"f" + (8).to_bytes(8, "little") + data.tobytes())
    assert room[16:20].tobytes() == crc.to_bytes(4, "little")
    assert sums.tolist() == [[0, 0]]


@needs_native
@pytest.mark.parametrize("starts", [[-1, 40], [0, 11], [0, 57], [0, 2**62]])
def test_tiles_that_do_not_fit_are_refused(starts: list[int]) -> None:
    room, tiles = np.zeros(68, np.uint8), [np.ones(2, np.uint32)] * 2
    with pytest.raises(ValueError, match="overlap, or do not fit"):
        pack(room, "f", 0, tiles, starts, [0, 0])
    assert not room.any()
    with pytest.raises(ValueError, match="a row for each tile"):
        pack(room, "f", 0, tiles, [0], [0])
    with pytest.raises(ValueError, match="not C-contiguous"):
        pack(room, "f", 0, [np.ones(4, np.uint32)[::2]], [0], [0])


@given(st.data())
def test_a_run_is_a_range_of_the_row_major_tensor(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 4), max_size=4)))
    start = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    counts = tuple(data.draw(st.integers(1, n - a)) for n, a in zip(shape, start, strict=True))
    box = Box(start, counts)
    numbers: Any = np.arange(math.prod(shape)).reshape(shape)
    index = tuple(slice(a, a + n) for a, n in zip(start, counts, strict=True))
    within = numbers[(..., *index)].reshape(-1).tolist()
    is_run = within == list(range(within[0], within[0] + len(within)))
    assert run_of(box, shape) == (within[0] if is_run else NO_RUN)
