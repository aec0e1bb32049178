"""A store whose files are kept in a folder of the host, for all processes of a user."""

from __future__ import annotations

import json
import os
import time
import uuid
from contextlib import suppress
from dataclasses import astuple, replace
from functools import cache, partial
from itertools import groupby, islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ucformat.errors import NotFound, PermissionDenied, UcformatError, UnsupportedError
from ucformat.storage.base import Info, check_key, check_range, content_version
from ucformat.storage.cache.folder import CacheEntry
from ucformat.storage.cache.scope import current_pins, is_uncached, read_consistently
from ucformat.storage.concurrency import map_io
from ucformat.storage.strided import extend, fill
from ucformat.storage.strided import rows as rows_of
from ucformat.storage.wrappers import WrappedStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ucformat.storage.base import Bytes, Checksums, Costs
    from ucformat.storage.cache.folder import CacheFolder, VersionedStore
    from ucformat.storage.cache.scope import Pins
    from ucformat.storage.local_files import Descriptor


# Questions to a remote store whose answers the processes of a host share.
#
# An answer counts for those who had asked before its request was sent, as in a group commit: of
# those who wait while a request is under way, one sends the next request for all. A listing is
# requested a moment later if other processes ask too, because processes that are started together
# arrive one after another.


_MAX_FILES = 10_000  # longer listings are not used
_PATIENCE = 5.0  # seconds to wait for another process that asks
_COMPANY = 5_000_000_000  # nanoseconds after another process has asked in which more are expected
_QUIET = 200_000_000  # nanoseconds after the last process has asked until its question is sent
_LONGEST = 1_000_000_000  # nanoseconds after which it is sent although more keep asking
_PAUSE = 0.005  # seconds


class _SharedCall(Protocol):
    """Sends a question; `first` if it was never asked before. None: the files cannot be listed, or are too many."""

    def __call__(self, *, first: bool) -> Sequence[Info] | None: ...


class Answers:
    """Asks for the current versions of the files of a store."""

    def __init__(self, store: VersionedStore, folder: CacheFolder) -> None:
        self._store, self._folder = store, folder
        self._can_list = True

    def info(self, key: str, begin: Callable[[], Info]) -> Info | None:
        """The current version of a file; None if there is no such file.

        Args:
            begin: called instead of requesting the info alone if no process has asked for the file
                yet: receives its first bytes, and returns the info that comes with them.
        """

        def request(*, first: bool) -> Sequence[Info]:
            try:
                return [begin() if first else self._store.info(key)]
            except NotFound:
                return []

        infos = self._share(_entry("info", self._store.identity, key), request)
        return infos[0] if infos else None

    def join(self) -> Descriptor | None:
        """Be among the processes that read files of the store until the descriptor is closed; None if that fails."""
        return self._folder.join(self._listing)

    def has_others(self, joined: Descriptor | None = None) -> bool:
        """Whether other processes read files of the store."""
        return self._folder.has_others(self._listing, joined) or (
            joined is not None and self._others_ask()
        )

    @property
    def _listing(self) -> CacheEntry:
        return _entry("list", self._store.identity)

    def listing(self, patience: float) -> Mapping[str, Info] | None:
        """The current versions of all files; None if they cannot be listed, or are too many.

        Args:
            patience: seconds to wait for other processes that read files of the store, and will ask
                the same (0: wait for those that ask now).
        """

        def request(*, first: bool) -> Sequence[Info] | None:  # noqa: ARG001 - see _Request
            try:
                infos = list(islice(self._store.list(), _MAX_FILES + 1))
            except (PermissionDenied, UnsupportedError):
                return None
            return infos if len(infos) <= _MAX_FILES else None

        def gather() -> None:
            end = time.monotonic() + patience
            while self.has_others() and time.monotonic() < end:
                time.sleep(_PAUSE)
            if not patience and (others or self._others_ask()):
                self._await_quiet()

        infos = None
        if self._can_list:
            others = self._others_ask()
            self._folder.want(self._listing, time.monotonic_ns())
            infos = self._share(self._listing, request, gather)
        self._can_list = infos is not None
        return None if infos is None else {info.key: info for info in infos}

    def _share(
        self, entry: CacheEntry, request: _SharedCall, gather: Callable[[], None] = lambda: None
    ) -> Sequence[Info] | None:
        """The answer to a request that is sent after this call begins, by this process or another.

        `gather` waits for others that may ask the same.
        """
        begun = time.monotonic_ns()
        lock = self._folder.lock(entry, _PATIENCE)
        try:
            before = self._folder.read(entry)
            if before is not None:
                sent, infos = _decoded(before)
                if sent >= begun:
                    return infos
            gather()
            now = time.monotonic_ns()
            answer = request(first=before is None)
            self._folder.write(entry, _encoded(now, answer))
            return answer
        finally:
            if lock is not None:
                lock.close()

    def _others_ask(self) -> bool:
        """Whether another process has asked recently."""
        when, pid = self._folder.wanted(self._listing)
        return pid != os.getpid() and time.monotonic_ns() - when < _COMPANY

    def _await_quiet(self) -> None:
        begun = time.monotonic_ns()
        while (now := time.monotonic_ns()) - begun < _LONGEST and now - self._folder.wanted(
            self._listing
        )[0] < _QUIET:
            time.sleep(_PAUSE)


def _entry(*question: str) -> CacheEntry:
    """The entry of an answer; those of other hosts, or from before a restart, are others."""
    return CacheEntry(json.dumps([*question, _clock()]).encode())


@cache
def _clock() -> str:
    """What distinguishes the monotonic clock of this host, since it was started, from all others."""
    with suppress(OSError):
        return (
            f"{Path('/proc/sys/kernel/random/boot_id').read_text()} "
            f"{Path('/proc/self/ns/time').readlink()}"
        )
    return uuid.uuid4().hex


def _encoded(sent: int, infos: Sequence[Info] | None) -> bytes:
    return json.dumps([sent, None if infos is None else [astuple(info) for info in infos]]).encode()


def _decoded(data: bytes) -> tuple[int, Sequence[Info] | None]:
    sent, infos = json.loads(data)
    return sent, None if infos is None else [Info(*fields) for fields in infos]


# Blocks of files in the cache, each received once by one of the processes that need it.

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


class FileBytes(NamedTuple):
    """Bytes of a file, and the memory to fill with them."""

    begin: int
    view: memoryview

    @property
    def end(self) -> int:
        """Offset in the file after the last byte."""
        return self.begin + self.view.nbytes

    def clip(self, begin: int, end: int) -> FileBytes:
        """The part of it in a range of the file."""
        first, last = max(begin, self.begin), min(end, self.end)
        return FileBytes(first, self.view[first - self.begin : last - self.begin])


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
        parts: Sequence[FileBytes],
        received: Callable[[Info], None],
        has_others: Callable[[], bool],
    ) -> None:
        """Fill parts of a file with bytes from the cache, or from the store.

        Args:
            received: called with the version of the file of which bytes were received; raises an
                error if it is not `file`.
        """
        wanted: dict[int, list[FileBytes]] = {}
        for part in parts:
            for number in range(part.begin // _BLOCK, -(-part.end // _BLOCK)):
                wanted.setdefault(number, []).append(
                    part.clip(number * _BLOCK, (number + 1) * _BLOCK)
                )
        missing, waits = sorted(wanted), True
        while missing := [n for n in missing if not self._load(file, n, wanted[n])]:
            locks = self._lock(file, missing[:_LOCKED]) if waits else dict.fromkeys(missing)
            try:
                if not locks:  # others are receiving them
                    waits = self._wait(file, missing[0])
                    continue
                if waits and sum(part.view.nbytes for part in parts) >= _BLOCK and has_others():
                    self._extend(file, locks)
                # it may have just come
                ours = [n for n in locks if not waits or not self._load(file, n, wanted.get(n, ()))]

                def receive(
                    numbers: Sequence[int], locks: Mapping[int, Descriptor | None] = locks
                ) -> None:
                    self._receive(file, numbers, wanted, received)
                    for number in numbers:
                        _unlock(locks[number])

                map_io(receive, _runs(ours, self._most))
                missing = [n for n in missing if n not in locks]
            finally:
                for lock in locks.values():
                    _unlock(lock)

    def _entry(self, file: FileVersion, number: int) -> CacheEntry:
        info = file.info
        what = [
            "block",
            self._store.identity,
            info.key,
            file.version,
            info.size,
            number * _BLOCK,
            _BLOCK,
        ]
        return CacheEntry(json.dumps(what).encode())

    def _load(self, file: FileVersion, number: int, parts: Sequence[FileBytes]) -> bool:
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
        if not self._folder.read_into(
            self._entry(file, number), size, begin - number * _BLOCK, buffers
        ):
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
        wanted: Mapping[int, Sequence[FileBytes]],
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


def _copy(data: Bytes, begin: int, parts: Sequence[FileBytes]) -> None:
    """Fill parts from bytes of the file that begin at an offset."""
    for part in parts:
        part.view[:] = data[part.begin - begin : part.end - begin]


def _runs(numbers: Sequence[int], most: int) -> Iterator[Sequence[int]]:
    """Numbers that follow each other, at most so many together."""
    for _, group in groupby(enumerate(numbers), lambda item: item[1] - item[0]):
        run = [number for _, number in group]
        for at in range(0, len(run), most):
            yield run[at : at + most]


class CachingStore(WrappedStore):
    """Reads files from the cache if they are there, and else from the inner store.

    Which knows their current versions.
    """

    inner: VersionedStore

    def __init__(self, inner: VersionedStore, folder: CacheFolder) -> None:
        super().__init__(inner)
        self.known: dict[str, Info] = {}
        self._folder = folder
        self._answers, self._blocks = Answers(inner, folder), Blocks(inner, folder)

    def __reduce__(self) -> tuple[type[CachingStore], tuple[VersionedStore, CacheFolder]]:
        return CachingStore, (self.inner, self._folder)

    def __repr__(self) -> str:
        return f"CachingStore({self.inner!r})"

    @property
    def costs(self) -> Costs:
        """The costs of the inner store; but ranges are read into the destination, one with each call."""
        return replace(self.inner.costs, together=1, in_flight=None)

    # --- versions

    def ask(self, keys: Sequence[str], span: tuple[int, int] | None = None) -> Mapping[str, Info]:
        """See Asks."""

        def current_info(key: str) -> Info | None:
            return self._answers.info(key, partial(self._begin, key, span))

        return {
            key: info
            for key, info in zip(keys, map_io(current_info, keys), strict=True)
            if info is not None
        }

    def ask_listing(self, patience: float) -> Mapping[str, Info] | None:
        """See Asks."""
        return self._answers.listing(patience)

    def join(self) -> Descriptor | None:
        """See Asks."""
        return self._answers.join()

    def has_others(self, joined: Descriptor) -> bool:
        """See Asks."""
        return self._answers.has_others(joined)

    def _begin(self, key: str, span: tuple[int, int] | None) -> Info:
        if span is not None and 0 <= span[0] < span[1]:
            with suppress(UcformatError):  # the file may end before the span
                return self._blocks.begin(key, *span)
        return self.inner.info(key)

    def info(self, key: str) -> Info:
        """See Store."""
        check_key(key)
        if is_uncached():
            return self.inner.info(key)
        pins = current_pins(self)
        info = self.ask([key]).get(key) if pins is None else pins.find(key)
        if info is None:
            raise self._missing(key)
        return info

    def list(self, prefix: str = "") -> Iterator[Info]:
        """See Store."""
        below = f"{check_key(prefix)}/" if prefix else ""
        pins = None if is_uncached() else current_pins(self)
        files = None if pins is None else pins.files()
        if files is None:
            return self.inner.list(prefix)
        return (info for key, info in files.items() if key.startswith(below))

    def _missing(self, key: str) -> NotFound:
        return NotFound(f"{self.url}/{key} does not exist")

    # --- reading

    def read(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """See Store."""
        check_key(key)
        if nbytes == 0 or is_uncached():
            return self.inner.read(key, offset, nbytes)
        return read_consistently(lambda: self._read(key, offset, nbytes), listing=False)

    def _read(self, key: str, offset: int, nbytes: int | None) -> bytes:
        file = self._find(
            key, (offset, offset + (self.inner.costs.request if nbytes is None else nbytes))
        )
        if file is None:
            return self.inner.read(key, offset, nbytes)
        if nbytes is None:
            nbytes = file.info.size - offset
        self._check(file, offset, nbytes)
        out = bytearray(nbytes)
        self._fill(file, [FileBytes(offset, memoryview(out))])
        return bytes(out)

    def read_versioned(self, key: str) -> tuple[bytes, str]:
        """See Store."""
        data = self.read(key)
        return data, content_version(data)

    def read_into(
        self, key: str, offset: int, buffers: Sequence[memoryview], crcs: Checksums | None = None
    ) -> None:
        """See Store."""
        check_key(key)
        nbytes = sum(b.nbytes for b in buffers)
        if not nbytes or is_uncached():
            self.inner.read_into(key, offset, buffers, crcs)
            return
        direct = all(b.c_contiguous for b in buffers)
        parts: list[FileBytes] = []
        for row in (
            [row for b in buffers for row in rows_of(b)]
            if direct
            else [memoryview(bytearray(nbytes))]
        ):
            parts.append(FileBytes(parts[-1].end if parts else offset, row))
        if not read_consistently(lambda: self._read_parts(key, parts), listing=False):
            self.inner.read_into(key, offset, buffers, crcs)
        elif direct:
            extend(crcs, buffers)
        else:
            fill(buffers, parts[0].view, crcs)

    def read_rows(self, key: str, offset: int, step: int, rows: Sequence[memoryview]) -> None:
        """See Store."""
        check_key(key)
        parts = [
            FileBytes(offset + k * step, row.cast("B")) for k, row in enumerate(rows) if row.nbytes
        ]
        if (
            not parts
            or is_uncached()
            or not read_consistently(lambda: self._read_parts(key, parts), listing=False)
        ):
            self.inner.read_rows(key, offset, step, rows)

    def _read_parts(self, key: str, parts: Sequence[FileBytes]) -> bool:
        """Fill parts; False if the file is not cached, as its versions cannot be told apart."""
        file = self._find(key, (parts[0].begin, max(part.end for part in parts)))
        if file is None:
            return False
        for part in parts:
            self._check(file, part.begin, part.view.nbytes)
        self._fill(file, parts)
        return True

    def _pins(self) -> Pins:
        pins = current_pins(self)
        assert pins is not None  # noqa: S101 - all reads are in a scope
        return pins

    def _find(self, key: str, span: tuple[int, int]) -> FileVersion | None:
        """The version of a file; None if it cannot be told apart from others, so that the file is not cached."""
        last = self.known.get(key)
        if last is not None and FileVersion.of(last) is None:
            return None
        info = self._pins().find(key, span)
        if info is None:
            raise self._missing(key)
        return FileVersion.of(info)

    def _check(self, file: FileVersion, offset: int, nbytes: int) -> None:
        check_range(f"{self.url}/{file.info.key}", offset, nbytes, file.info.size)

    def _fill(self, file: FileVersion, parts: Sequence[FileBytes]) -> None:
        pins = self._pins()
        self._blocks.fill(file, parts, partial(pins.received, file.info.key), pins.has_others)
