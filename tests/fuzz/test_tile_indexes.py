"""Encoded packed files that are damaged, or claim much, under the right checksums."""

from __future__ import annotations

import struct
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ucformat
from tests.fakes import random_array, same
from tests.fuzz.fuzzing import Files, bounded, harmless, mutated
from tests.packed import write_encoded
from ucformat.checkpoint import open_checkpoint
from ucformat.errors import IntegrityError
from ucformat.reading.execute import place_checksum
from ucformat.storage.memory import MemoryStore
from ucformat.storage.strided import checksum

__all__ = ["encoded", "encoded_file", "with_file"]

_CONSTANT = 96 << 20  # bytes besides: buffers, and the stacks of threads
_ENTRY = struct.Struct("<QIIIBBHQQ")
_ARRAYS = {
    ("a", "weight"): np.repeat(np.arange(30, dtype="f4"), 40).reshape(30, 40),
    ("b", "weight"): random_array((50,), "int64"),
    ("c", "weight"): random_array((), "float64"),
}


@cache
def encoded() -> Files:
    """A checkpoint of two encoded files; some tiles shrink."""
    store = MemoryStore("fuzz-encoded")
    write_encoded(store, _ARRAYS, 2, name="0" * 20)
    return {i.key: store.read(i.key) for i in store.list()}


def encoded_file() -> str:
    """The key of the second file, in which each tensor has a tile."""
    return max(key for key in encoded() if key.endswith(".bin"))


def with_file(data: bytes) -> Files:
    """The file as these bytes, with the right checksums after its payloads, where it has any, and its index."""
    name, file = encoded_file(), bytearray(data)
    count = int.from_bytes(data[-20:-12], "little")
    begin = len(data) - 28 - min(count, 9) * _ENTRY.size
    end = 0
    for at in range(max(begin, 0), len(data) - 28 - _ENTRY.size + 1, _ENTRY.size):
        stored = _ENTRY.unpack_from(data, at)[2]
        if not 0 < stored <= begin - end - 4:
            break
        crc = checksum(bytes(file[end : end + stored]), place_checksum(name, end))
        file[end + stored : end + stored + 4] = crc.to_bytes(4, "little")
        end += stored + 4
    index = bytes(file[max(begin, 0) :])
    crc = checksum(index, place_checksum(name, max(begin, 0)))
    return {name: bytes(file) + crc.to_bytes(4, "little")}


@given(st.data())
def test_a_damaged_file(data: st.DataObject) -> None:
    file = data.draw(mutated([encoded()[encoded_file()][:-4]]))
    store = MemoryStore("fuzz-encoded-damaged")
    for key, content in {**encoded(), **with_file(file)}.items():
        with store.create(key) as out:
            out.write(content)

    def read() -> None:
        ck = open_checkpoint(store)
        report = ucformat.verify(ck)
        whole = ck["a"].read()
        assert same(np.asarray(ck["a"][3:20, 7:]), whole[3:20, 7:])
        assert not report or same(whole, _ARRAYS["a", "weight"])

    harmless(read, 100_000, constant=_CONSTANT)


def test_the_checksums_are_those_of_the_writer() -> None:
    whole = encoded()[encoded_file()]
    assert with_file(whole[:-4]) == {encoded_file(): whole}


@pytest.mark.parametrize(
    ("count", "nbytes", "plain"),
    [(1, 1 << 30, 1 << 30), (1 << 59, 8, 1 << 60), (1, 8, 1 << 59), (3, 1 << 24, 3 << 24)],
)
def test_a_small_file_that_claims_much(count: int, nbytes: int, plain: int) -> None:
    entries = b"".join(
        _ENTRY.pack(n * (nbytes + 4), nbytes, 8, 0, 1, 4, 0xFFFF, 0, 0)
        for n in range(min(count, 3))
    )
    trailer = struct.pack("<8sQQI", b"UCFTILES", count, plain, 0)
    files = {**encoded(), **with_file(bytes(min(count, 3) * 12) + entries + trailer)}
    store = MemoryStore("fuzz-encoded-claims")
    for key, content in files.items():
        with store.create(key) as out:
            out.write(content)
    for act in (
        ucformat.open(store)["a"].read,
        lambda: ucformat.copy(ucformat.open(store), MemoryStore("fuzz-encoded-copy")),
    ):
        with bounded(10_000, constant=_CONSTANT, seconds=20), pytest.raises(IntegrityError):
            act()
    with bounded(10_000, constant=_CONSTANT, seconds=20):
        assert not ucformat.verify(store, workers=1)
