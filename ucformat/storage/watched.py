"""Sees whether the files of a checkpoint stay what they were while it is read.

Bytes that are read before and after a file is written anew belong to no checkpoint, and nothing else shows it: what is
made of them has valid checksums. So the version of each file is noted before the first byte of it is read, and compared
when all is read: before a commit, or before what was loaded is used.
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

    from ucformat.storage.base import Info, Ranges, Store

__all__ = ["WatchedStore", "check_unchanged", "find_watched"]

Tap = Callable[[str, int, memoryview], None]

_NAMED = 5  # of the files that changed, so many are named


class WatchedStore(WrappedStore):
    """A store that remembers which files were read through it, and what they were before.

    On a disk a file's version is asked for before it is first read. In a place that answers over a network that would
    be a request for each file: there the version is what the place was listed with, or what was asked for anyway.
    """

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._seen: dict[str, Info] = {}
        self._read: dict[str, None] = {}
        self._asks = inner.costs.parallel is None
        self._taps: tuple[Tap, ...] = ()

    @contextmanager
    def tapped(self, see: Tap) -> Iterator[None]:
        """Have all bytes that are read inside the block seen: the file, where they lie in it, and they themselves.

        Small things, which are read as a whole, are not shown.
        """
        self._taps = (*self._taps, see)
        try:
            yield
        finally:
            self._taps = tuple(tap for tap in self._taps if tap is not see)

    def _show(self, key: str, found: Iterable[tuple[int, memoryview]]) -> None:
        for tap in self._taps:
            for at, data in found:
                tap(key, at, data.cast("B"))

    def note(self, key: str) -> None:
        """Compare this file, too, in the end; whatever is read of it after this is of the version noted, or later."""
        if key not in self._read:
            if self._asks and key not in self._seen:
                try:
                    found = self.inner.info(key)
                except NotFound:
                    return  # the read says what is missing
                self._seen.setdefault(key, found)
            self._read[key] = None

    def changed(self, but: Collection[str]) -> list[str]:
        """The files that were read and are other ones now, or gone; asks for each of them once.

        `but` are names of files that may change.
        """
        marked = (key for key in list(self._read) if key.rpartition("/")[2] not in but)
        known = [key for key in marked if key in self._seen]
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

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """See Store."""
        self.note(key)
        self.inner.read_into(key, offset, buffers)
        if self._taps:
            at = [offset, *accumulate((b.nbytes for b in buffers), initial=offset)][1:]
            self._show(key, [(a, b) for a, b in zip(at, buffers, strict=False) if b.nbytes])

    def read_rows(self, key: str, offset: int, step: int, rows: Sequence[memoryview]) -> None:
        """See Store."""
        self.note(key)
        self.inner.read_rows(key, offset, step, rows)
        if self._taps:
            self._show(key, [(offset + k * step, row) for k, row in enumerate(rows) if row.nbytes])

    def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> Ranges | None:
        """See RangeReader."""
        self.note(key)
        lent = read_ranges(self.inner, key, ranges)
        return lent if lent is None or not self._taps else self._lent(key, ranges, lent)

    @contextmanager
    def _lent(self, key: str, ranges: Sequence[tuple[int, int]], lent: Ranges) -> Iterator[Sequence[memoryview]]:
        with lent as found:
            self._show(key, [(at, data) for (at, _), data in zip(ranges, found, strict=True) if data.nbytes])
            yield found

    def read_versioned(self, key: str) -> tuple[bytes, str]:
        """See Store."""
        self.note(key)
        return self.inner.read_versioned(key)


def find_watched(store: Store) -> WatchedStore | None:
    """What watches the files of a store, at the bottom of all that is around it; None where nothing does."""
    while isinstance(store, WrappedStore):
        if isinstance(store, WatchedStore):
            return store
        store = store.inner
    return None


def check_unchanged(store: Store, outcome: str, but: Collection[str] = ()) -> None:
    """Compare every file that was read through a store with what it was before the first of its bytes was read.

    Args:
        store: the store, or one around it.
        outcome: what the error says of what was made of the bytes.
        but: names of files that may change.

    Raises:
        Conflict: files were changed; the message names them.
    """
    found = find_watched(store)
    names = sorted(found.changed(but)) if found else []
    if names:
        more = f" and {len(names) - _NAMED} more files" if len(names) > _NAMED else ""
        raise Conflict(
            f"{', '.join(f'{store.url}/{name}' for name in names[:_NAMED])}{more} changed since the checkpoint was "
            f"opened, so that what was read may be of two versions; {outcome}",
            hint="run it again when nobody writes there any more; a checkpoint that is held open must be opened anew",
        )
