"""Blocks of files in the cache, each received once by one of the processes that need it."""

from __future__ import annotations

import json
import time
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, NamedTuple

from ucformat.storage.cache.entry import Entry
from ucformat.storage.concurrency import map_io

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ucformat.storage.base import Bytes, Info
    from ucformat.storage.cache.base import VersionedStore
    from ucformat.storage.cache.folder import CacheFolder
    from ucformat.storage.local_files import Descriptor

_BLOCK = 1 << 20  # bytes
_LOCKED = 256  # blocks that one call locks at once
_BLOCK_PATIENCE = 60.0  # seconds to wait for another process that receives a block
_SETTLED = 2.0  # seconds after which a file that is rewritten has another time


class FileVersion(NamedTuple):
    """A version of a file, told apart from all others by its entity tag, or by its size and time."""

    info: Info
    version: str

    @classmethod
    def of(cls, info: Info) -> FileVersion | None:
        """The version of a file; None if others may look the same."""
        if info.etag and not info.etag.startswith("W/"):
            return cls(info, "etag " + info.etag.strip('"'))
        if info.modified and time.time() - info.modified > _SETTLED:
            return cls(info, f"time {info.modified} {info.version}")
        return None


class Part(NamedTuple):
    """Bytes of a file, and the memory to fill with them."""

    begin: int
    view: memoryview

    @property
    def end(self) -> int:
        """Offset in the file after the last byte."""
        return self.begin + self.view.nbytes

    def clip(self, begin: int, end: int) -> Part:
        """The part of it in a range of the file."""
        first, last = max(begin, self.begin), min(end, self.end)
        return Part(first, self.view[first - self.begin : last - self.begin])


class Blocks:
    """The blocks of the files of a store."""

    def __init__(self, store: VersionedStore, folder: CacheFolder) -> None:
        self._store, self._folder = store, folder

    @property
    def _most(self) -> int:
        """Blocks of the longest request: one more than plans request at once, which need not begin with a block."""
        return self._store.costs.request // _BLOCK + 1

    def begin(self, key: str, begin: int, end: int) -> Info:
        """Receive blocks, and the version of the file that they are of.

        Args:
            end: byte after the last; the file may be shorter.
        """
        first = begin // _BLOCK
        nbytes = min(-(-end // _BLOCK) - first, self._most) * _BLOCK
        with self._store.read_with_info(key, first * _BLOCK, nbytes) as (info, data):
            if file := FileVersion.of(info):
                for number in range(first, first + -(-data.nbytes // _BLOCK)):
                    at = (number - first) * _BLOCK
                    self._folder.write(self._entry(file, number), data[at : at + _BLOCK])
            return info

    def fill(
        self,
        file: FileVersion,
        parts: Sequence[Part],
        received: Callable[[Info], None],
        has_others: Callable[[], bool],
    ) -> None:
        """Fill parts of a file with bytes from the cache, or from the store.

        Args:
            received: called with the version of the file of which bytes were received; raises an error if it is not
                `file`.
        """
        wanted: dict[int, list[Part]] = {}
        for part in parts:
            for number in range(part.begin // _BLOCK, -(-part.end // _BLOCK)):
                wanted.setdefault(number, []).append(part.clip(number * _BLOCK, (number + 1) * _BLOCK))
        missing, waits = sorted(wanted), True
        while missing := [n for n in missing if not self._load(file, n, wanted[n])]:
            locks = self._lock(file, missing[:_LOCKED]) if waits else dict.fromkeys(missing)
            try:
                if not locks:  # others are receiving them
                    waits = self._wait(file, missing[0])
                    continue
                if waits and sum(part.view.nbytes for part in parts) >= _BLOCK and has_others():
                    self._extend(file, locks)
                ours = [
                    n for n in locks if not waits or not self._load(file, n, wanted.get(n, ()))
                ]  # it may have just come

                def receive(numbers: Sequence[int], locks: Mapping[int, Descriptor | None] = locks) -> None:
                    self._receive(file, numbers, wanted, received)
                    for number in numbers:
                        _unlock(locks[number])

                map_io(receive, _runs(ours, self._most))
                missing = [n for n in missing if n not in locks]
            finally:
                for lock in locks.values():
                    _unlock(lock)

    def _entry(self, file: FileVersion, number: int) -> Entry:
        info = file.info
        what = ["block", self._store.identity, info.key, file.version, info.size, number * _BLOCK, _BLOCK]
        return Entry(json.dumps(what).encode())

    def _load(self, file: FileVersion, number: int, parts: Sequence[Part]) -> bool:
        """Fill parts of a block from the cache; False if it is missing there."""
        if not parts:
            return self._folder.holds(self._entry(file, number))
        size = min(_BLOCK, file.info.size - number * _BLOCK)
        begin, end = parts[0].begin, parts[-1].end
        adjacent = all(a.end == b.begin for a, b in pairwise(parts))
        if adjacent:
            buffers = [part.view for part in parts]
        else:
            begin, end = min(part.begin for part in parts), max(part.end for part in parts)
            buffers = [memoryview(bytearray(end - begin))]
        if not self._folder.read_into(self._entry(file, number), size, begin - number * _BLOCK, buffers):
            return False
        if not adjacent:
            _copy(buffers[0], begin, parts)
        return True

    def _lock(self, file: FileVersion, numbers: Sequence[int]) -> dict[int, Descriptor | None]:
        """Lock those blocks that nobody has locked."""
        locks = ((number, self._folder.try_lock(self._entry(file, number))) for number in numbers)
        return {number: lock for number, lock in locks if lock is not None}

    def _extend(self, file: FileVersion, locks: dict[int, Descriptor | None]) -> None:
        """Lock blocks after the last one that are missing and nobody has locked."""
        number = max(locks)
        for _ in range(self._most - len(locks)):
            number += 1
            entry = self._entry(file, number)
            if number * _BLOCK >= file.info.size or self._folder.holds(entry):
                return
            lock = self._folder.try_lock(entry)
            if lock is None:
                return
            locks[number] = lock

    def _wait(self, file: FileVersion, number: int) -> bool:
        """Wait until nobody has locked a block; False if that takes too long."""
        lock = self._folder.lock(self._entry(file, number), _BLOCK_PATIENCE)
        _unlock(lock)
        return lock is not None

    def _receive(
        self,
        file: FileVersion,
        numbers: Sequence[int],
        wanted: Mapping[int, Sequence[Part]],
        received: Callable[[Info], None],
    ) -> None:
        """Receive blocks that follow each other with one request, fill their parts, and put them into the cache."""
        begin = numbers[0] * _BLOCK
        nbytes = min(len(numbers) * _BLOCK, file.info.size - begin)
        with self._store.read_with_info(file.info.key, begin, nbytes, file.info) as (info, data):
            received(info)
            for number in numbers:
                block = data[number * _BLOCK - begin : (number + 1) * _BLOCK - begin]
                _copy(block, number * _BLOCK, wanted.get(number, ()))
                self._folder.write(self._entry(file, number), block)


def _unlock(lock: Descriptor | None) -> None:
    if lock is not None:
        lock.close()


def _copy(data: Bytes, begin: int, parts: Sequence[Part]) -> None:
    """Fill parts from bytes of the file that begin at an offset."""
    for part in parts:
        part.view[:] = data[part.begin - begin : part.end - begin]


def _runs(numbers: Sequence[int], most: int) -> Iterator[Sequence[int]]:
    """Numbers that follow each other, at most so many together."""
    for _, group in groupby(enumerate(numbers), lambda item: item[1] - item[0]):
        run = [number for _, number in group]
        for at in range(0, len(run), most):
            yield run[at : at + most]
