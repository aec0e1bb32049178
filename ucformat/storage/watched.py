"""Detects files of a checkpoint that change while it is read.

Bytes that are read before and after a file is rewritten belong to no checkpoint, and nothing else detects this: the
results have valid checksums. So the version of each file is recorded before its first byte is read, and compared after
all is read: before a commit, or before loaded values are used.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING

from ucformat.errors import Conflict, IntegrityError, NotFound
from ucformat.storage.base import read_ranges
from ucformat.storage.concurrency import map_io
from ucformat.storage.wrappers import WrappedStore

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from ucformat.storage.base import Checksums, Info, Ranges, Store

Observer = Callable[[str, int, memoryview], None]

_MAX_NAMED = 5  # changed files that an error names


class WatchedStore(WrappedStore):
    """A store that records which files were read through it, and their versions before the first read.

    On a disk the version is requested before the first read. In a store that is accessed over a network that would be a
    request for each file: there it is taken from listings, and from calls of `info` that are made anyway.
    """

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._seen: dict[str, Info] = {}
        self._read: dict[str, None] = {}
        self._uses_info = inner.costs.parallel is None
        self._observers: tuple[Observer, ...] = ()

    @contextmanager
    def observed(self, callback: Observer) -> Iterator[None]:
        """Report all bytes that are read inside the block, except those of files that are read whole by `read`.

        Args:
            callback: called with the key of the file, the offset in it, and the bytes: a buffer that may be strided.
        """
        self._observers = (*self._observers, callback)
        try:
            yield
        finally:
            self._observers = tuple(observe for observe in self._observers if observe is not callback)

    def _notify(self, key: str, found: Iterable[tuple[int, memoryview]]) -> None:
        for observe in self._observers:
            for begin, data in found:
                observe(key, begin, data)

    def note(self, key: str) -> None:
        """Record a file's version to compare it in the end; bytes read from now on are of this or a later version."""
        if key not in self._read:
            if self._uses_info and key not in self._seen:
                try:
                    found = self.inner.info(key)
                except NotFound:
                    return  # the read raises the error
                self._seen.setdefault(key, found)
            self._read[key] = None

    def recorded(self, key: str) -> Info | None:
        """The version with which a file's version is compared in the end; None if there is none yet."""
        return self._seen.get(key)

    def changed(self, ignore: Collection[str], among: Iterable[str] | None = None) -> list[str]:
        """The files that were read and have changed or are gone; requests the version of each once.

        Args:
            among: only these files, if all of them were read (default: all files that were read).
        """
        read = list(self._read) if among is None else list(among)
        if any(key not in self._read for key in read):  # computed from other files
            read = list(self._read)
        recorded = (key for key in read if key.rpartition("/")[2] not in ignore)
        known = [key for key in recorded if key in self._seen]
        return [key for key, same in zip(known, map_io(self._is_same, known), strict=True) if not same]

    def _is_same(self, key: str) -> bool:
        try:
            return self.inner.info(key).is_same(self._seen[key])
        except (NotFound, IntegrityError):
            return False

    def info(self, key: str) -> Info:
        """See Store."""
        found = self.inner.info(key)
        self._seen.setdefault(key, found)
        return found

    def list(self, prefix: str = "") -> Iterator[Info]:
        """See Store."""
        for info in self.inner.list(prefix):
            self._seen.setdefault(info.key, info)
            yield info

    def read(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """See Store."""
        self.note(key)
        return self.inner.read(key, offset, nbytes)

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview], crcs: Checksums | None = None) -> None:
        """See Store."""
        self.note(key)
        self.inner.read_into(key, offset, buffers, crcs)
        if self._observers:
            at = [offset, *accumulate((b.nbytes for b in buffers), initial=offset)][1:]
            self._notify(key, [(a, b) for a, b in zip(at, buffers, strict=False) if b.nbytes])

    def read_rows(self, key: str, offset: int, step: int, rows: Sequence[memoryview]) -> None:
        """See Store."""
        self.note(key)
        self.inner.read_rows(key, offset, step, rows)
        if self._observers:
            self._notify(key, [(offset + k * step, row) for k, row in enumerate(rows) if row.nbytes])

    def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> Ranges | None:
        """See RangeReader."""
        self.note(key)
        loan = read_ranges(self.inner, key, ranges)
        return loan if loan is None or not self._observers else self._observe(key, ranges, loan)

    @contextmanager
    def _observe(self, key: str, ranges: Sequence[tuple[int, int]], loan: Ranges) -> Iterator[Sequence[memoryview]]:
        with loan as found:
            self._notify(key, [(at, data) for (at, _), data in zip(ranges, found, strict=True) if data.nbytes])
            yield found

    def read_versioned(self, key: str) -> tuple[bytes, str]:
        """See Store."""
        self.note(key)
        return self.inner.read_versioned(key)


def find_watched(store: Store) -> WatchedStore | None:
    """The WatchedStore inside a store's wrappers; None if there is none."""
    while isinstance(store, WrappedStore):
        if isinstance(store, WatchedStore):
            return store
        store = store.inner
    return None


def first_info(store: Store, key: str) -> Info:
    """What is recorded of a file since its checkpoint was opened; requested if nothing is.

    Raises:
        NotFound: there is no such file.
    """
    found = find_watched(store)
    return (found.recorded(key) if found else None) or store.info(key)


def check_unchanged(
    store: Store, outcome: str, ignore: Collection[str] = (), among: Iterable[str] | None = None
) -> None:
    """Compare the version of every file that was read through a store with the one before its first byte was read.

    Args:
        among: only these files (default: all); if one of them is computed, the files from which it is are among others.

    Raises:
        Conflict: files have changed; the message names them.
    """
    found = find_watched(store)
    names = sorted(found.changed(ignore, among)) if found else []
    if names:
        more = f" and {len(names) - _MAX_NAMED} more files" if len(names) > _MAX_NAMED else ""
        raise Conflict(
            f"{', '.join(f'{store.url}/{name}' for name in names[:_MAX_NAMED])}{more} changed since the checkpoint was "
            f"opened, so the data may mix two versions; {outcome}",
            hint="retry when nothing writes there any more; a checkpoint that was kept open has to be reopened",
        )
