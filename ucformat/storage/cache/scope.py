"""Which versions of files a group of reads relies on, and whether these are current.

Bytes in the cache are of a version of a file. Only the remote store knows which version is current,
so every read asks it, once. Reads in one *scope* ask together, when all is read: a listing answers
for a thousand files.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, TypeVar

from ucformat.errors import Conflict, UcformatError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ucformat.storage.base import Info
    from ucformat.storage.cache.folder import Asks

T = TypeVar("T")

_PATIENCE = 2.0  # seconds to wait for others that read, so as to ask together
_TRIES = 5  # before reading what is rewritten again and again is given up


class StaleVersion(Conflict):
    """What was read is of a version of a file that is not current."""


class Pins:
    """The versions of the files of a store on which the reads of a scope rely.

    Args:
        optimistic: whether to rely on the last known versions, and to ask at the end.
    """

    def __init__(self, store: Asks, *, listing: bool, optimistic: bool) -> None:
        self._store, self._listing, self._optimistic = store, listing, optimistic
        self._infos: dict[str, Info] = {}
        # known from answers to requests that were sent in this scope
        self._current: dict[str, Info] = {}
        self._listed: Mapping[str, Info] | None = None
        self._begun = time.monotonic()
        self._joined = store.join() if listing and optimistic else None

    def close(self) -> None:
        """Let others know that the reads are done."""
        if self._joined is not None:
            self._joined.close()
            self._joined = None

    def has_others(self) -> bool:
        """Whether other processes read files of the store, too."""
        joined = self._joined
        return joined is not None and self._store.has_others(joined)

    def find(self, key: str, span: tuple[int, int] | None = None) -> Info | None:
        """The version of a file; None if there is no such file.

        Args:
            span: the bytes that will be read next (None: unknown).
        """
        if key in self._infos:
            return self._infos[key]
        info = self._current.get(key)
        if info is None and self._optimistic:
            info = self._store.known.get(key)
        if info is None:
            self._ask([key], span)
            info = self._current.get(key)
        return None if info is None else self._infos.setdefault(key, info)

    def received(self, key: str, info: Info) -> None:
        """Take note of a version of which bytes were received."""
        self._learn({key: info})
        self._infos.setdefault(key, info)
        self._compare([key])

    def files(self) -> Mapping[str, Info] | None:
        """All files, as they were listed in this scope; None if they cannot be listed, or are too many."""
        self._list()
        return self._listed

    def confirm(self) -> None:
        """Ask for the files that were not asked for in this scope."""
        self._compare(list(self._infos))

    def _compare(self, keys: Sequence[str]) -> None:
        self._ask([key for key in keys if key not in self._current])
        for key in keys:
            current = self._current.get(key)
            if current is None:
                self._store.known.pop(key, None)
            if current is None or not current.is_same(self._infos[key]):
                raise self._stale(key)

    def _ask(self, keys: Sequence[str], span: tuple[int, int] | None = None) -> None:
        """Ask for files: all at once, and each that is not listed."""
        if keys:
            self._list()
            self._learn(self._store.ask([key for key in keys if key not in self._current], span))

    def _list(self) -> None:
        """List all files once."""
        if self._listing:
            self.close()
            patience = (
                min(_PATIENCE, (time.monotonic() - self._begun) / 2) if self._optimistic else 0
            )
            self._listing, self._listed = False, self._store.ask_listing(patience)
            self._learn(self._listed or {})

    def _learn(self, infos: Mapping[str, Info]) -> None:
        self._current.update(infos)
        self._store.known.update(infos)

    def _stale(self, key: str) -> StaleVersion:
        return StaleVersion(
            f"{self._store.url}/{key} was rewritten or deleted while it was read",
            hint="retry when nothing writes there any more",
        )


class _Scope:
    def __init__(self, *, listing: bool, optimistic: bool) -> None:
        self._listing, self._optimistic = listing, optimistic
        self._pins: dict[int, tuple[Asks, Pins]] = {}
        self._lock = threading.Lock()

    def pins(self, store: Asks) -> Pins:
        with self._lock:
            if id(store) not in self._pins:
                self._pins[id(store)] = (
                    store,
                    Pins(store, listing=self._listing, optimistic=self._optimistic),
                )
            return self._pins[id(store)][1]

    def confirm(self) -> None:
        for _, pins in list(self._pins.values()):
            pins.confirm()

    def close(self) -> None:
        for _, pins in list(self._pins.values()):
            pins.close()

    def check(self) -> None:
        """Raise Stale if a version is known not to be current; errors of asking are suppressed."""
        try:
            self.confirm()
        except StaleVersion:
            raise
        except UcformatError:
            pass


_uncached: ContextVar[bool] = ContextVar("ucformat_uncached", default=False)
_scope: ContextVar[_Scope | None] = ContextVar("ucformat_cache_scope", default=None)


def current_pins(store: Asks) -> Pins | None:
    """The versions on which reads of a store rely in the current scope; None outside of one."""
    scope = _scope.get()
    return None if scope is None else scope.pins(store)


@contextmanager
def consistent(*, optimistic: bool = True, listing: bool = True) -> Iterator[None]:
    """Ask for the versions of all files that are read from caches inside the block together; in a scope, do nothing.

    Threads take part that run in a copy of the block's context.

    Args:
        optimistic: whether to rely on versions that are known from before, and to ask when the
            block ends (default: yes; else before the first read).
        listing: whether to list the files (default: yes; else each is asked for).
    """
    if _scope.get() is not None:
        yield
        return
    scope = _Scope(listing=listing, optimistic=optimistic)
    token = _scope.set(scope)
    try:
        try:
            yield
        except UcformatError as error:  # perhaps because of versions that do not belong together
            if not isinstance(error, StaleVersion):
                scope.check()
            raise
        scope.confirm()
    finally:
        scope.close()
        _scope.reset(token)


@contextmanager
def uncached() -> Iterator[None]:
    """Read from the stores themselves inside the block, past all caches; threads take part as in `consistent`."""
    token = _uncached.set(True)
    try:
        yield
    finally:
        _uncached.reset(token)


def is_uncached() -> bool:
    """Whether reads go past all caches."""
    return _uncached.get()


def read_consistently(
    read: Callable[[], T], *, optimistic: bool = True, listing: bool = True, _tries: int = _TRIES
) -> T:
    """Call a function as in a block of `consistent`, and again if what it has read was not current.

    Args:
        listing: as for `consistent`; when it is called again, each file is asked for, because
            listings of some services differ from their other answers.
    """
    if _scope.get() is not None:
        return read()
    while True:
        _tries -= 1
        try:
            with consistent(optimistic=optimistic, listing=listing):
                return read()
        except StaleVersion:
            if not _tries:
                raise
        listing = False
