"""Questions to a remote store whose answers the processes of a host share.

An answer counts for those who had asked before its request was sent, as in a group commit: of those who wait while a
request is under way, one sends the next request for all. A listing is requested a moment later if other processes ask
too, because processes that are started together arrive one after another.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from contextlib import suppress
from dataclasses import astuple
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ucformat.errors import NotFound, PermissionDenied, UnsupportedError
from ucformat.storage.base import Info
from ucformat.storage.cache.entry import Entry

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ucformat.storage.cache.base import VersionedStore
    from ucformat.storage.cache.folder import CacheFolder
    from ucformat.storage.local_files import Descriptor

_MAX_FILES = 10_000  # longer listings are not used
_PATIENCE = 5.0  # seconds to wait for another process that asks
_COMPANY = 5_000_000_000  # nanoseconds after another process has asked in which more are expected
_QUIET = 200_000_000  # nanoseconds after the last process has asked until its question is sent
_LONGEST = 1_000_000_000  # nanoseconds after which it is sent although more keep asking
_PAUSE = 0.005  # seconds


class _Request(Protocol):
    """Sends a question; `first` if it was never asked before. None: the files cannot be listed, or are too many."""

    def __call__(self, *, first: bool) -> Sequence[Info] | None: ...


class Answers:
    """Asks for the current versions of the files of a store.

    Args:
        folder: the folder of the cache, which holds the last answers.
    """

    def __init__(self, store: VersionedStore, folder: CacheFolder) -> None:
        self._store, self._folder = store, folder
        self._can_list = True

    def info(self, key: str, begin: Callable[[], Info]) -> Info | None:
        """The current version of a file; None if there is no such file.

        Args:
            begin: called instead of requesting the info alone if no process has asked for the file yet: receives its
                first bytes, and returns the info that comes with them.
        """

        def request(*, first: bool) -> Sequence[Info]:
            try:
                return [begin() if first else self._store.info(key)]
            except NotFound:
                return []

        found = self._share(_entry("info", self._store.identity, key), request)
        return found[0] if found else None

    def join(self) -> Descriptor | None:
        """Be among the processes that read files of the store until the descriptor is closed; None if that fails."""
        return self._folder.join(self._listing)

    def has_others(self, joined: Descriptor | None = None) -> bool:
        """Whether other processes read files of the store.

        Args:
            joined: what `join` returned (None: this one has not joined).
        """
        return self._folder.has_others(self._listing, joined) or (joined is not None and self._others_ask())

    @property
    def _listing(self) -> Entry:
        return _entry("list", self._store.identity)

    def listing(self, patience: float) -> Mapping[str, Info] | None:
        """The current versions of all files; None if they cannot be listed, or are too many.

        Args:
            patience: seconds to wait for other processes that read files of the store, and will ask the same (0: wait
                for those that ask now).
        """

        def request(*, first: bool) -> Sequence[Info] | None:  # noqa: ARG001 - see _Request
            try:
                found = list(islice(self._store.list(), _MAX_FILES + 1))
            except (PermissionDenied, UnsupportedError):
                return None
            return found if len(found) <= _MAX_FILES else None

        def gather() -> None:
            end = time.monotonic() + patience
            while self.has_others() and time.monotonic() < end:
                time.sleep(_PAUSE)
            if not patience and (others or self._others_ask()):
                self._await_quiet()

        found = None
        if self._can_list:
            others = self._others_ask()
            self._folder.want(self._listing, time.monotonic_ns())
            found = self._share(self._listing, request, gather)
        self._can_list = found is not None
        return None if found is None else {info.key: info for info in found}

    def _share(
        self, entry: Entry, request: _Request, gather: Callable[[], None] = lambda: None
    ) -> Sequence[Info] | None:
        """The answer to a request that is sent after this call begins, by this process or another.

        `gather` waits for others that may ask the same.
        """
        begun = time.monotonic_ns()
        lock = self._folder.lock(entry, _PATIENCE)
        try:
            before = self._folder.read(entry)
            if before is not None:
                sent, found = _decoded(before)
                if sent >= begun:
                    return found
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
        while (now := time.monotonic_ns()) - begun < _LONGEST and now - self._folder.wanted(self._listing)[0] < _QUIET:
            time.sleep(_PAUSE)


def _entry(*question: str) -> Entry:
    """The entry of an answer; those of other hosts, or from before a restart, are others."""
    return Entry(json.dumps([*question, _clock()]).encode())


@cache
def _clock() -> str:
    """What distinguishes the monotonic clock of this host, since it was started, from all others."""
    with suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text()} {Path('/proc/self/ns/time').readlink()}"
    return uuid.uuid4().hex


def _encoded(sent: int, infos: Sequence[Info] | None) -> bytes:
    return json.dumps([sent, None if infos is None else [astuple(info) for info in infos]]).encode()


def _decoded(data: bytes) -> tuple[int, Sequence[Info] | None]:
    sent, infos = json.loads(data)
    return sent, None if infos is None else [Info(*fields) for fields in infos]
