"""Checksums of blocks while a file goes by: in any order, behind the block or in the list, across any boundary."""

from __future__ import annotations

import random

import pytest
from crc32c import crc32c

from ucformat.geometry.tensor import Block, Key
from ucformat.jobs.copy import BlockChecker
from ucformat.storage import base
from ucformat.storage.memory import MemoryStore

KEY = Key("w", "weight")
FILE = "data/a/f"


def checked(
    data: bytes, blocks: list[Block], monkeypatch: pytest.MonkeyPatch, read: int
) -> list[int]:
    """The offsets of the blocks that are found damaged."""
    monkeypatch.setattr(base, "_PART", read)
    store = MemoryStore("sums")
    with store.create("f") as out:
        out.write(data)
    sums = BlockChecker(FILE, [(KEY, b) for b in blocks])
    with store.create("g") as out:
        for at, part in base.read_parts(store, "f", len(data)):
            sums.take(at, part)
            out.write(part)
    assert store.read("g") == data
    return sorted(b.offset for _, b in sums.damaged())


@pytest.mark.parametrize("seed", range(60))
def test_each_damaged_block_is_found_and_no_other(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    data = bytearray(chance.randbytes(200))
    blocks = []
    at = 0
    while at < 170:
        nbytes = chance.randrange(1, 20)
        placed = chance.random() < 0.3
        crc = crc32c(bytes(data[at : at + nbytes]), place(at) if placed else 0)
        if chance.random() < 0.5:
            blocks.append(Block(at, nbytes, crc, placed))
            at += nbytes - chance.choice(
                (0, 0, -3, min(2, nbytes - 1))
            )  # one after another, apart, or overlapping
        else:
            data[at + nbytes : at + nbytes + 4] = crc.to_bytes(4, "little")
            blocks.append(Block(at, nbytes, None, placed))
            at += nbytes + 4
    blocks = [b for b in blocks if is_whole(bytes(data), b)]
    assert checked(bytes(data), blocks, monkeypatch, chance.randrange(1, 50)) == []
    data[chance.randrange(len(data))] ^= 1
    expected = sorted(b.offset for b in blocks if not is_whole(bytes(data), b))
    assert checked(bytes(data), blocks, monkeypatch, chance.randrange(1, 50)) == expected


def is_whole(data: bytes, block: Block) -> bool:
    end = block.offset + block.nbytes
    stored = int.from_bytes(data[end : end + 4], "little") if block.crc32c is None else block.crc32c
    return crc32c(data[block.offset : end], place(block.offset) if block.placed else 0) == stored


def place(offset: int) -> int:
    return crc32c(b"a/f" + offset.to_bytes(8, "little"))


def test_a_block_past_the_end_is_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [
        Block(0, 0, 0),
        Block(0, 5, crc32c(b"abcde")),
        Block(3, 10, 0),
        Block(10, 0, 0),
        Block(50, 1, 0),
    ]
    assert checked(b"abcdefghij", blocks, monkeypatch, 4) == [3, 50]
