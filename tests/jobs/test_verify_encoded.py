"""`verify` finds whatever is wrong in encoded packed files, and names the tensor, the tile and the file."""

from __future__ import annotations

import json
import struct
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

import ucformat
from tests.fakes import random_array, same
from tests.jobs.test_verify import extents_of, rewritten
from tests.packed import write_encoded
from ucformat.errors import ChecksumError, IntegrityError, UcformatError
from ucformat.geometry.tensor import Block
from ucformat.reading.execute import place_checksum
from ucformat.storage.memory import MemoryStore
from ucformat.storage.strided import checksum

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.fakes import Arrays
    from ucformat.storage.base import Bytes

ENTRY = struct.Struct("<QIIIBBHQQ")
ARRAYS: Arrays = {
    ("w", "weight"): random_array((6, 5), "float32", 1),
    ("w", "exp_avg"): np.zeros((6, 300), "float32"),
    ("lone", "weight"): random_array((), "float64", 5),
    ("empty", "weight"): random_array((0, 4), "int8", 6),
}


@pytest.fixture
def store() -> MemoryStore:
    store = MemoryStore(uuid.uuid4().hex)
    write_encoded(store, ARRAYS, ranks=2)
    return store


def files(store: MemoryStore) -> list[str]:
    return sorted(info.key for info in store.list() if info.key.endswith(".bin"))


def put(store: MemoryStore, file: str, data: Bytes) -> None:
    with store.create(file) as out:
        out.write(data)


def with_index(
    store: MemoryStore, file: str, change: Callable[[list[list[int]]], object], plain: int = 0
) -> None:
    """Change the entries of an index, and give it a checksum that is right."""
    data = store.read(file)
    _, count, size, zero, _ = struct.unpack("<8sQQII", data[-32:])
    begin = len(data) - 32 - 40 * count
    entries = [list(entry) for entry in ENTRY.iter_unpack(data[begin:-32])]
    change(entries)
    index = b"".join(ENTRY.pack(*entry) for entry in entries)
    index += struct.pack("<8sQQI", b"UCFTILES", len(entries), size + plain, zero)
    crc = checksum(index, place_checksum(file, begin))
    put(store, file, data[:begin] + index + crc.to_bytes(4, "little"))


def test_what_is_whole_is_whole(store: MemoryStore) -> None:
    report = ucformat.verify(store)
    assert report.problems == ()
    assert report.bytes_verified >= sum(a.nbytes for a in ARRAYS.values())
    ck = ucformat.open(store)
    assert all(same(ck[key][...], a) for key, a in ARRAYS.items())
    stored = sum(len(store.read(file)) for file in files(store))
    assert stored < sum(a.nbytes for a in ARRAYS.values())


def test_each_flipped_bit_is_found_and_copied_nowhere(store: MemoryStore) -> None:
    for file in files(store):
        data = store.read(file)
        for at in range(len(data)):
            damaged = bytearray(data)
            damaged[at] ^= 1 << at % 8
            put(store, file, damaged)
            report = ucformat.verify(store)
            assert {p.file for p in report.problems} == {file}, at
            assert not any(".ucf-" in str(p) for p in report.problems)
            if at % 7 == 0:
                with pytest.raises(IntegrityError):
                    ucformat.copy(ucformat.open(store), MemoryStore(uuid.uuid4().hex))
        put(store, file, data)
    assert ucformat.verify(store)


def test_a_damaged_tile_is_named(store: MemoryStore) -> None:
    (file, _) = files(store)
    data = bytearray(store.read(file))
    data[3] ^= 1
    put(store, file, data)
    (problem,) = ucformat.verify(store).problems
    assert (problem.name, problem.state, problem.kind) == ("w", "weight", "differs")
    assert problem.reason.startswith(f"the tile [0:3, 0:5] at bytes 0:64 of {file} cannot")
    with pytest.raises(ChecksumError, match=r"w \(weight\): the tile \[0:3, 0:5\] at bytes 0:64"):
        ucformat.open(store)["w"][0]
    assert same(ucformat.open(store)["w"][3:], ARRAYS["w", "weight"][3:])


def test_a_damaged_index_is_told_once_of_each_tensor(store: MemoryStore) -> None:
    (file, _) = files(store)
    data = bytearray(store.read(file))
    data[-40] ^= 1
    put(store, file, data)
    problems = ucformat.verify(store).problems
    assert sorted((p.name or "", p.state or "") for p in problems) == [
        ("", ""),
        ("w", "exp_avg"),
        ("w", "weight"),
    ]
    assert all("index of tiles is damaged" in p.reason for p in problems)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda entries: entries[0].__setitem__(7, 5), "fingerprint that the index"),
        (lambda entries: entries[0].__setitem__(3, 5), "crc32c differs (block at byte 0)"),
        (lambda entries: entries[1].__setitem__(4, 9), "encoding 9"),
        (lambda entries: entries[1].__setitem__(5, 2), "header says"),
    ],
)
def test_an_index_that_lies_is_found(
    store: MemoryStore, change: Callable[[list[list[int]]], object], reason: str
) -> None:
    (file, _) = files(store)
    with_index(store, file, change)
    problems = ucformat.verify(store).problems
    assert [p for p in problems if reason in p.reason and p.file == file and p.name == "w"], (
        problems
    )


def test_a_tile_of_no_tensor_is_found(store: MemoryStore) -> None:
    (file, _) = files(store)
    data = store.read(file)
    size = struct.unpack_from("<Q", data, len(data) - 16)[0]
    (count,) = struct.unpack_from("<Q", data, len(data) - 24)
    begin = len(data) - 32 - 40 * count
    extra = b"abcd" + checksum(b"abcd", place_checksum(file, begin)).to_bytes(4, "little")
    put(store, file, data[:begin] + extra + data[begin:])
    with_index(
        store,
        file,
        lambda entries: entries.append([size, 4, 4, 0, 0, 1, 0xFFFF, 0, 0]),
        plain=8,
    )
    (problem,) = ucformat.verify(store).problems
    assert "another tile at byte" in problem.reason
    with pytest.raises(IntegrityError, match="another tile at byte"):
        ucformat.copy(ucformat.open(store), MemoryStore(uuid.uuid4().hex))


def test_a_missing_file_is_found(store: MemoryStore) -> None:
    (file, _) = files(store)
    store.delete(file)
    problems = ucformat.verify(store).problems
    assert {p.file for p in problems} == {file}
    with pytest.raises(IntegrityError, match=r"w \(weight\)|does not exist"):
        ucformat.open(store)["w"].read()


def test_an_encoded_tensor_needs_placed_checksums(store: MemoryStore) -> None:
    extents = extents_of(store)
    extents[0][0] = replace(extents[0][0], block=Block(0, 60, 5))
    found = ucformat.verify(rewritten(store, extents)).problems
    assert [p for p in found if "is encoded, and is no tile" in p.reason]
    with pytest.raises(UcformatError):
        ucformat.open(store)["w"].read()


def test_the_feature_must_be_named(store: MemoryStore) -> None:
    document = json.loads(store.read("manifest.json"))
    assert "codecs" in document["requires"]
    rewritten(store, change=lambda d: d.update(requires=["packed"]))
    with pytest.raises(IntegrityError, match="codecs"):
        ucformat.open(store)
