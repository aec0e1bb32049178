"""Encoded packed files: read through the store they have the bytes of the plain file, and damage is found."""

from __future__ import annotations

import struct
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucformat.errors import ChecksumError, IntegrityError, MissingData
from ucformat.format.encoded import EncodedStore
from ucformat.format.encoding import Encoding, encode_tile
from ucformat.format.tile_index import (
    EncodedTile,
    TileIndex,
    TileIndexWriter,
    encode,
    read_index,
)
from ucformat.geometry.box import Box
from ucformat.geometry.tensor import Key
from ucformat.reading.execute import place_checksum
from ucformat.schema.limits import MAX_SPAN
from ucformat.storage.base import ENCODED
from ucformat.storage.memory import MemoryStore
from ucformat.storage.strided import checksum
from ucformat.storage.wrappers import RecordingStore

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ucformat.storage.base import Store

FILE = "data/0123456789abcdef0123/rank-00000.bin"
SUMS = (3, 4)


KEY = Key("w", "weight")


class Tiles:
    """Tiles whose boxes tell where they begin; with the bases of some, which all are tile files of base 7."""

    def __init__(self, bases: Mapping[int, bytes | None] | None = None) -> None:
        self.bases = bases or {}

    def locate(self, file: str, start: int) -> tuple[Key, Box]:
        assert file == FILE
        return KEY, Box((start,), (1,))

    def read_base(
        self, number: int, key: Key, boxes: Sequence[Box], outs: Sequence[memoryview]
    ) -> None:
        assert (number, key) == (7, KEY)
        for box, out in zip(boxes, outs, strict=True):
            base = self.bases[box.start[0]]
            assert base is not None
            out[:] = base

    def read_of_base(self, number: int, key: Key, boxes: Sequence[Box]) -> int:
        raise AssertionError(number, key, boxes)

    def wrong_base(self, number: int) -> ChecksumError:
        return ChecksumError(f"the base {number} is another one")

    def lossy_dtype(self, key: Key) -> np.dtype[np.float32]:
        return np.dtype(np.float32)


def opened(store: Store, file: str) -> TileIndex:
    return read_index(store, file, Tiles())


def four(data: bytes, start: int) -> bytes:
    return checksum(data, place_checksum(FILE, start)).to_bytes(4, "little")


def put(
    store: Store, tiles: Sequence[tuple[int, bytes, bytes | None]], codec: str = "blosc"
) -> bytes:
    """Write tiles, each behind some zeros and perhaps a patch of a base, and return the plain file."""
    index, plain, stored = TileIndexWriter(FILE), b"", b""
    for gap, data, base in tiles:
        plain += bytes(gap)
        start = len(plain)
        if base is None:
            tile = encode(FILE, start, data, 2, SUMS, codec)
        else:
            how, payload = encode_tile(data, 2, base)
            used = 0xFFFF if how <= Encoding.BLOSC else 7
            crc = checksum(data, place_checksum(FILE, start))
            tile = EncodedTile(len(data), 2, crc, SUMS, how, payload, used)
        stored += bytes(tile.payload) + index.add(start, tile)
        plain += data + four(data, start)
    with store.create(FILE) as out:
        out.write(stored + index.encode(len(plain)))
    return plain


def numbers(count: int, seed: int) -> bytes:
    return np.random.default_rng(seed).integers(0, 300, count, np.uint16).tobytes()


@st.composite
def files(draw: st.DrawFn) -> list[tuple[int, bytes, bytes | None]]:
    out = []
    for n in range(draw(st.integers(0, 6))):
        count = draw(st.sampled_from((1, 2, 3, 50, 4000)))
        data, base = numbers(count, n), None
        if draw(st.booleans()):
            base = data if draw(st.booleans()) else data[:-2] + b"xy"
        out.append((draw(st.sampled_from((0, 0, 4, 63))), data, base))
    return out


@given(
    tiles=files(),
    codec=st.sampled_from(("raw", "blosc")),
    cuts=st.lists(st.integers(0, 1 << 16)),
    start=st.integers(0, 1 << 16),
)
def test_any_range_has_the_bytes_of_the_plain_file(
    tiles: list[tuple[int, bytes, bytes | None]], codec: str, cuts: list[int], start: int
) -> None:
    inner = MemoryStore("encoded")
    plain = put(inner, tiles, codec)
    bases = {b: base for b, (_, data, base) in zip(starts(tiles), tiles, strict=True)}
    store = EncodedStore(inner, lambda store, file: read_index(store, file, Tiles(bases)))
    assert store.info(ENCODED + FILE).size == len(plain)
    assert store.read(ENCODED + FILE) == plain
    at = start % (len(plain) + 1)
    ends = sorted({at, *(at + c % (len(plain) - at + 1) for c in cuts)})
    buffers = [memoryview(bytearray(b - a)) for a, b in pairwise(ends)]
    crcs = [5] * len(buffers)
    store.read_into(ENCODED + FILE, at, buffers, crcs)
    assert b"".join(buffers) == plain[at : ends[-1]]
    assert crcs == [checksum(b, 5) for b in buffers]
    strided = np.zeros((3, 4), np.uint8)[:, :2]
    if len(plain) >= 6:
        store.read_into(ENCODED + FILE, 0, [strided.data])
        assert strided.tobytes() == plain[:6]


def starts(tiles: list[tuple[int, bytes, bytes | None]]) -> list[int]:
    out, end = [], 0
    for gap, data, _ in tiles:
        out.append(end + gap)
        end += gap + len(data) + 4
    return out


def test_neighbours_are_read_at_once_and_parts_are_decoded_once() -> None:
    inner = RecordingStore(MemoryStore("neighbours"))
    tiles = [(0, numbers(1000, n), None) for n in range(4)]
    plain = put(inner, tiles)
    store = EncodedStore(inner, opened)
    image = store.image(FILE)
    inner.clear()
    pitch = 2004
    store.read_into(ENCODED + FILE, pitch, [memoryview(bytearray(2 * pitch))])
    (read,) = inner.reads
    assert (read.offset, read.nbytes) == (image.stored_starts[1], sum(image.stored_sizes[1:3]))
    assert store.gaps(ENCODED + FILE, pitch, 2 * pitch) == read.nbytes - 2 * pitch < 0
    inner.clear()
    rows = [memoryview(bytearray(10)) for _ in range(50)]
    store.read_rows(ENCODED + FILE, 0, 20, rows)
    assert b"".join(rows) == b"".join(plain[k : k + 10] for k in range(0, 1000, 20))
    assert len(inner.reads) == 1
    assert inner.nbytes == image.stored_sizes[0]


def test_each_bit_is_protected() -> None:
    inner = MemoryStore("flipped")
    tiles = [(0, numbers(40, 1), None), (60, numbers(1, 2), None), (4, numbers(200, 3), None)]
    plain = put(inner, tiles)
    data = inner.read(FILE)
    assert len(data) < len(plain)
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1 << at % 8
        with inner.create(FILE) as out:
            out.write(damaged)
        with pytest.raises(IntegrityError):
            EncodedStore(inner, opened).read(ENCODED + FILE)
    for end in range(len(data)):
        with inner.create(FILE) as out:
            out.write(data[:end])
        with pytest.raises(IntegrityError):
            EncodedStore(inner, opened).read(ENCODED + FILE)
    with inner.create(FILE) as out:
        out.write(data)
    assert EncodedStore(inner, opened).read(ENCODED + FILE) == plain


def test_only_the_tiles_that_a_range_meets_are_read() -> None:
    store = MemoryStore("meeting")
    put(store, [(0, numbers(4, 0), None), (60, numbers(4, 1), None)])
    index = opened(store, FILE)
    end, second = 8 + 4, int(index.starts[1])
    assert index.meeting(0, second) == range(1)
    assert index.meeting(end - 1, second + 1) == range(2)
    assert index.meeting(end, second + 1) == range(1, 2)
    assert index.meeting(second, index.size) == range(1, 2)


def test_a_tile_of_another_place_is_refused() -> None:
    inner = MemoryStore("moved")
    put(inner, [(0, numbers(40, 1), None), (0, numbers(40, 2), None)], "raw")
    data = inner.read(FILE)
    with inner.create(FILE) as out:
        out.write(data[84:168] + data[:84] + data[168:])
    with pytest.raises(
        ChecksumError, match=r"w \(weight\): the tile \[0:1\] at bytes 0:84 of data"
    ):
        EncodedStore(inner, opened).read(ENCODED + FILE)
    other = FILE.replace("00000", "00001")
    with inner.create(other) as out:
        out.write(data)
    with pytest.raises(ChecksumError, match="index of tiles"):
        opened(inner, other)
    with pytest.raises(MissingData):
        opened(inner, "data/0123456789abcdef0123/rank-00002.bin")


ENTRY = struct.Struct("<QIIIBBHQQ")
GOOD = [(0, 6, 6, 0, 0, 2, 0xFFFF, 0, 0), (10, 4, 4, 0, 0, 2, 0xFFFF, 0, 0)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: 4}, "do not follow each other"),
        ({0: 1 << 63}, "after the end"),
        ({1: 0}, "no bytes"),
        ({1: (1 << 24) + 2}, "no bytes, or more than"),
        ({1: 12}, "do not follow each other"),
        ({2: 8}, "impossible number of bytes"),
        ({2: 0}, "impossible number of bytes"),
        ({2: 2}, "impossible number of bytes"),
        ({4: 4, 6: 1}, "impossible number of bytes"),
        ({4: 2}, "has no base"),
        ({6: 1}, "one that it does not need"),
        ({4: 2, 6: 4096}, "has no base"),
        ({5: 3}, "impossible elements"),
        ({5: 0}, "impossible elements"),
    ],
)
def test_an_impossible_index_is_refused(change: dict[int, int], message: str) -> None:
    entries = [list(GOOD[0]), list(GOOD[1])]
    store = MemoryStore("impossible")
    put_index(store, entries, 18)
    assert opened(store, FILE).sizes.tolist() == [6, 4]
    for field, value in change.items():
        entries[1][field] = value
    put_index(store, entries, 18)
    with pytest.raises(IntegrityError, match=message):
        opened(store, FILE)


@pytest.mark.parametrize("plain", [17, 18 + 64, MAX_SPAN + 1])
def test_an_impossible_size_is_refused(plain: int) -> None:
    store = MemoryStore("impossible")
    put_index(store, GOOD, plain)
    with pytest.raises(IntegrityError):
        opened(store, FILE)


def test_stored_bytes_that_no_tile_has_are_refused() -> None:
    store = MemoryStore("besides")
    put_index(store, GOOD, 18, stored=bytes(18 + 1))
    with pytest.raises(IntegrityError, match="where their index begins"):
        opened(store, FILE)


def put_index(
    store: Store, entries: Sequence[Sequence[int]], plain: int, stored: bytes = bytes(18)
) -> None:
    index = b"".join(ENTRY.pack(*entry) for entry in entries)
    index += struct.pack("<8sQQI", b"UCFTILES", len(entries), plain, 0)
    with store.create(FILE) as out:
        out.write(stored + index + four(index, len(stored)))
