"""Shards of compressed chunks that are damaged, or claim much, under the right checksums."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ucformat
from tests.fakes import FakeSource, manifest_file, same
from tests.fuzz.fuzzing import Files, bounded, harmless, mutated
from tests.tables import with_entries
from ucformat.checkpoint import Checkpoint, open_checkpoint
from ucformat.errors import IntegrityError
from ucformat.storage.memory import MemoryStore
from ucformat.storage.strided import checksum

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["compressed", "first_shard", "with_shard"]

_CONSTANT = (
    96 << 20
)  # bytes that a command may take besides: buffers, and the stacks of its threads


def elements() -> Any:
    """Elements of which some chunks shrink."""
    rng = np.random.default_rng(0)
    return np.where(np.arange(1800) < 700, 1.5, rng.random(1800)).astype("f4").reshape(60, 30)


@cache
def compressed() -> Files:
    """A checkpoint of one array, in four shards of compressed chunks."""
    source = FakeSource.write(MemoryStore("fuzz-shards-source"), {("a", "weight"): elements()})
    store = MemoryStore("fuzz-shards")
    ucformat.convert(
        Checkpoint(source), store, codec="blosc", chunk_bytes=512, shard_bytes=2048, overwrite=True
    )
    return {i.key: store.read(i.key) for i in store.list()}


def first_shard() -> str:
    """The key of the first shard."""
    return min(key for key in compressed() if "/c/" in key)


def with_shard(data: bytes) -> Files:
    """The first shard as these bytes, with the right checksums after its chunks, where it has any, and its index."""
    file = bytearray(data)
    entries = _entries(data)
    for at, length in entries:
        if at + length <= len(file) and length > 4:
            crc = checksum(bytes(file[at : at + length - 4]))
            file[at + length - 4 : at + length] = crc.to_bytes(4, "little")
    index = bytes(file[-16 * len(entries) :])
    return {first_shard(): bytes(file) + checksum(index).to_bytes(4, "little")}


@cache
def _count() -> int:
    """The chunks of a shard."""
    file = compressed()[first_shard()]
    crc = int.from_bytes(file[-4:], "little")
    return next(n for n in range(1, 99) if checksum(file[-4 - 16 * n : -4]) == crc)


def _entries(data: bytes) -> list[tuple[int, int]]:
    index = data[-16 * _count() :].ljust(16 * _count(), b"\0")
    numbers = [int.from_bytes(index[n : n + 8], "little") for n in range(0, len(index), 8)]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


@given(st.data())
def test_a_damaged_shard(data: st.DataObject) -> None:
    shard = data.draw(mutated([compressed()[first_shard()][:-4]]))
    store = MemoryStore("fuzz-shards-damaged")
    for key, content in {**compressed(), **with_shard(shard)}.items():
        with store.create(key) as out:
            out.write(content)

    def read() -> None:
        ck = open_checkpoint(store)
        report = ucformat.verify(ck)
        whole = ck["a"].read()
        assert same(np.asarray(ck["a"][3:20, 7:]), whole[3:20, 7:])
        assert not report or same(whole, elements())

    harmless(read, 100_000, constant=_CONSTANT)


@pytest.mark.parametrize(
    ("shape", "chunk", "shard"),
    [
        ([1 << 50], [1 << 30], [1 << 30]),
        ([1 << 40], [1 << 18], [1 << 40]),
        ([1 << 30], [1 << 30], [1 << 30]),
        ([1 << 29], [1], [1 << 29]),
    ],
)
def test_small_files_that_claim_much(
    tmp_path: Path, shape: list[int], chunk: list[int], shard: list[int]
) -> None:
    kind = {"dtype": "uint8", "shape": shape, "chunk": chunk, "shard": shard, "codec": "blosc"}
    tensor = {"name": "a", "state": "weight", **kind, "path": "data/x/weight/a"}
    manifest = {"format": "ucformat", "version": 1, "id": "0" * 32, "attempt": "0" * 20}
    manifest |= {"created": "2026-01-01T00:00:00Z", "requires": ["codecs"]}
    entries = [{**tensor, "digest": f"xxh3:{'0' * 32}"}]
    (tmp_path / "manifest.json").write_bytes(manifest_file(with_entries(manifest, entries)))
    file = tmp_path / "data/x/weight/a/c/0"
    file.parent.mkdir(parents=True)
    chunk_of = compressed()[first_shard()][:400]
    file.write_bytes(chunk_of + bytes(16) + checksum(bytes(16)).to_bytes(4, "little"))
    for act in (
        ucformat.open(tmp_path)["a"].plan,
        ucformat.open(tmp_path)["a"].read,
        lambda: ucformat.copy(tmp_path, tmp_path / "new"),
        lambda: ucformat.convert(tmp_path, tmp_path / "new", workers=1),
    ):
        with (
            bounded(10_000, constant=_CONSTANT, seconds=20),
            pytest.raises(
                IntegrityError, match=r"the file has 420 bytes instead of|are missing|is missing"
            ),
        ):
            act()
    with bounded(10_000, constant=_CONSTANT, seconds=20):
        assert not ucformat.verify(tmp_path, workers=1)
