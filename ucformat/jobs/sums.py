"""Reads a file front to back, and compares its blocks with their checksums while it goes by."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from ucformat.reading.execute import checksum, place_checksum

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ucformat.geometry.tensor import Block, Key
    from ucformat.storage.base import Store, Writer

__all__ = ["Sums", "read_through"]

_READ = 8 << 20  # bytes that are held at once


class Sums:
    """Compares the blocks of a file, which may overlap, with their checksums while the file goes by."""

    def __init__(self, file: str, blocks: Sequence[tuple[Key, Block]]) -> None:
        self._todo = deque(_Sum(file, key, block) for key, block in blocks)  # in the order of their offsets
        self._begun: list[_Sum] = []
        self._bad: list[_Sum] = []

    def take(self, at: int, data: memoryview) -> None:
        """The next bytes of the file, from `at` on."""
        stop = at + len(data)
        while self._todo and self._todo[0].block.offset < stop:
            self._begun.append(self._todo.popleft())
        for each in self._begun:
            each.take(at, data)
        self._bad += [s for s in self._begun if s.end <= stop and not s.ok]
        self._begun = [s for s in self._begun if s.end > stop]

    def damaged(self) -> list[tuple[Key, Block]]:
        """The blocks that are not what their checksums say, and those that the file ends before."""
        return [(s.key, s.block) for s in (*self._bad, *self._begun, *self._todo) if s.block.nbytes]


class _Sum:
    """The checksum of one block so far, and the one stored behind it."""

    __slots__ = ("_crc", "_stored", "block", "end", "key")

    def __init__(self, file: str, key: Key, block: Block) -> None:
        self.key, self.block = key, block
        self.end = block.offset + block.nbytes + (4 if block.crc32c is None else 0)
        self._crc = place_checksum(file, block.offset) if block.placed else 0
        self._stored = b""

    def take(self, at: int, data: memoryview) -> None:
        start, stop = self.block.offset, self.block.offset + self.block.nbytes
        self._crc = checksum(data[max(0, start - at) : max(0, stop - at)], self._crc)
        self._stored += data[max(0, stop - at) : max(0, self.end - at)]

    @property
    def ok(self) -> bool:
        crc = self.block.crc32c
        return self._crc == (int.from_bytes(self._stored, "little") if crc is None else crc)


def read_through(
    store: Store, file: str, nbytes: int, see: Callable[[int, memoryview], None], out: Writer | None
) -> None:
    """Read a file front to back, and write it to `out`."""
    for at, data in _parts(store, file, nbytes):
        see(at, data)
        if out is not None:
            out.write(data)


def _parts(store: Store, file: str, nbytes: int) -> Iterator[tuple[int, memoryview]]:
    buffer = memoryview(bytearray(min(_READ, nbytes)))
    for at in range(0, nbytes, _READ):
        part = buffer[: min(_READ, nbytes - at)]
        store.read_into(file, at, [part])
        yield at, part
