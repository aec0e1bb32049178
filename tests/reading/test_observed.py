"""Observers of a watched store see the bytes of the file, also those between the elements that are read."""

from __future__ import annotations

import random

import numpy as np
import pytest

from ucformat.geometry.box import Box, row_major
from ucformat.geometry.tensor import Extent, Piece, TensorInfo
from ucformat.reading.execute import read_items
from ucformat.reading.plan import ReadItem
from ucformat.storage.memory import MemoryStore
from ucformat.storage.strided import rows
from ucformat.storage.wrappers import WatchedStore


@pytest.mark.parametrize("seed", range(30))
def test_what_observers_see_is_what_the_file_has(seed: int) -> None:
    chance = random.Random(seed)
    run, count, gap = (
        chance.randint(17_000, 40_000),
        chance.randint(2, 9),
        chance.choice([1, 4, 13]),
    )
    data = chance.randbytes(count * (run + gap) + 7)
    store = MemoryStore(f"observed-{seed}")
    with store.create("f") as out:
        out.write(data)
    watched = WatchedStore(store)
    seen: list[tuple[int, bytes]] = []

    def see(_file: str, at: int, buffer: memoryview) -> None:
        for row in rows(buffer):
            seen.append((at, bytes(row)))
            at += row.nbytes

    shape = (count, run)
    extent = Extent(Box.whole(shape), "f", 3, (run + gap, 1))
    memory = np.zeros(count * run, np.uint8)
    with watched.observed(see):
        wanted = [
            ReadItem(
                TensorInfo("t", "weight", "uint8", shape),
                [extent],
                [(0, Piece(Box.whole(shape), 0, row_major(shape)))],
            )
        ]
        read_items(watched, wanted, [memory], ["t"])
    assert memory.tobytes() == b"".join(data[3 + i * (run + gap) :][:run] for i in range(count))
    assert len(seen) > 1
    for at, found in seen:
        assert found == data[at : at + len(found)], (at, len(found))
