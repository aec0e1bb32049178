"""The file `state` of the cache: the bytes of all files, when answers were last wanted, and locks between processes.

Processes lock bytes far beyond its end. The locks belong to open file descriptions, so threads exclude each other too,
and the kernel releases the locks of a process that is killed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ucformat.storage.local_files import Descriptor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ucformat.storage.cache.entry import Entry

_STATE_NAME = "state"
_STAMP = struct.Struct("<QQ")  # time in nanoseconds, process id
_STAMPS = 256
STATE_BYTES = 8 + _STAMPS * _STAMP.size  #: of the file
_ACCOUNTS = 1 << 40  # the byte that is locked while files are created, renamed and counted
_MADE = 1 << 41  # the first of those that are locked by whoever makes an entry
_USED = 1 << 42  # the first of those that are locked, together, by those who use an answer

_ACCOUNTS_PATIENCE = 10.0  # seconds to wait for the accounts, which are locked for milliseconds
_PAUSE, _LONGEST_PAUSE = 1e-4, 0.02  # seconds between two tries to lock


class State:
    """The file, opened anew for each lock. All methods raise OSError if the disk fails."""

    def __init__(self, folder: Descriptor) -> None:
        self._folder = folder

    def _open(self) -> Descriptor:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        return Descriptor(os.open(_STATE_NAME, flags, 0o600, dir_fd=self._folder.fd))

    def lock(self, entry: Entry) -> Descriptor | None:
        """Lock the making of an entry until the descriptor is closed; None if another thread or process has the lock."""
        return self._lock(_byte(_MADE, entry), fcntl.F_WRLCK)

    def join(self, entry: Entry) -> Descriptor | None:
        """Be among those who use an answer until the descriptor is closed; None if that is being examined."""
        return self._lock(_byte(_USED, entry), fcntl.F_RDLCK)

    def has_others(self, entry: Entry, joined: Descriptor | None) -> bool:
        """Whether other threads or processes use an answer.

        Args:
            joined: what `join` returned (None: the caller has not joined).
        """
        byte = _byte(_USED, entry)
        if joined is None:
            return self._lock(byte, fcntl.F_WRLCK) is None
        alone = _set_lock(joined.fd, byte, fcntl.F_WRLCK)
        _set_lock(joined.fd, byte, fcntl.F_RDLCK)
        return not alone

    def wanted(self, entry: Entry) -> tuple[int, int]:
        """When an entry, or one of those with the same stamp, was last wanted, and by which process."""
        file = self._open()
        when, pid = _STAMP.unpack(os.pread(file.fd, _STAMP.size, _stamp(entry)).ljust(_STAMP.size, b"\0"))
        return when, pid

    def want(self, entry: Entry, now: int) -> None:
        """Record that this process wants an entry."""
        file = self._open()
        os.pwrite(file.fd, _STAMP.pack(now, os.getpid()), _stamp(entry))

    @contextmanager
    def accounts(self) -> Iterator[Accounts | None]:
        """Lock the number of bytes, and with it the creation and renaming of files; None if it stays locked."""
        file = patiently(lambda: self._lock(_ACCOUNTS, fcntl.F_WRLCK), _ACCOUNTS_PATIENCE)
        try:
            yield None if file is None else Accounts(file)
        finally:
            if file is not None:
                file.close()

    def _lock(self, byte: int, kind: int) -> Descriptor | None:
        file = self._open()
        return file if _set_lock(file.fd, byte, kind) else None


class Accounts:
    """The bytes of all files on the disk, which are never more than `total`; 0 if they were not counted yet."""

    def __init__(self, file: Descriptor) -> None:
        self._file = file

    @property
    def total(self) -> int:
        """The number of bytes."""
        return int.from_bytes(os.pread(self._file.fd, 8, 0), "little")

    @total.setter
    def total(self, total: int) -> None:
        os.pwrite(self._file.fd, max(0, total).to_bytes(8, "little"), 0)


def patiently(lock: Callable[[], Descriptor | None], patience: float) -> Descriptor | None:
    """Try to lock until that succeeds; None if it takes too long: a process that is stopped keeps its locks."""
    end, pause = time.monotonic() + patience, _PAUSE
    while (held := lock()) is None and time.monotonic() < end:
        time.sleep(pause)
        pause = min(1.5 * pause, _LONGEST_PAUSE)
    return held


def _set_lock(fd: int, byte: int, kind: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", kind, os.SEEK_SET, byte, 1, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def _byte(first: int, entry: Entry) -> int:
    return first + int.from_bytes(entry.digest[:5], "little")


def _stamp(entry: Entry) -> int:
    """The place of an entry's stamp in the file."""
    return 8 + entry.digest[-1] * _STAMP.size
