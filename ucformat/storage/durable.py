"""Making local files durable without waiting for each: write-back starts at `close`, fsync comes for many at once.

Measured converting 228 tensors of 1 GB in all on ext4, in shuffled order (medians of 5, in seconds): `cp -r` and
`sync -f` 1.0; fsync in the background from `close` on 1.6, for each of them commits the journal; early write-back and
fsync at the end 1.4; without early write-back 2.1. `syncfs` would be as fast, and wait for what everybody else wrote.
"""

from __future__ import annotations

import ctypes
import functools
import os
import resource
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from ucformat.storage.oserrors import explaining

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from ucformat.storage.handles import Descriptor

__all__ = ["Durability", "start_writeback"]

_THREADS = 4
_SMALL = 64 << 10  # bytes; smaller files are better written all at once, by their fsync


class Durability:
    """The files and folders one store has written and not yet made durable; `sync` is given a folder to sync."""

    def __init__(self, sync: Callable[[str], None]) -> None:
        self._sync = sync
        self._lock = threading.Lock()
        self._flushing = threading.Lock()
        self._most = max(
            16, min(512, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        )  # files kept open before some are synced
        self._pool: ThreadPoolExecutor | None = None
        self._open: list[tuple[Path, Descriptor, list[Future[None]]]] = []
        self._files: dict[Path, Future[None]] = {}
        self._folders: set[str] = set()

    def add(self, file: Path, open_file: Descriptor, folders: Iterable[str]) -> None:
        """Begin to write back a file; `flush` syncs it and `folders`, and closes it."""
        small = os.fstat(open_file.fd).st_size < _SMALL
        with self._lock:
            self._pool = self._pool or ThreadPoolExecutor(_THREADS, "ucformat-fsync")
            self._open.append((file, open_file, [] if small else [self._pool.submit(_start, open_file)]))
            self._folders.update(folders)
            if len(self._open) >= self._most:
                wait(self._files.values())  # no more than twice as many are ever open
                self._sync_open()

    def changed(self, folder: str) -> None:
        """Have `flush` sync this folder, too."""
        with self._lock:
            self._folders.add(folder)

    def _sync_open(self) -> None:
        """Begin to sync all open files; the lock is held."""
        for file, open_file, started in self._open:
            assert self._pool is not None  # noqa: S101
            self._files[file] = self._pool.submit(_sync_and_close, open_file, started)
        self._open = []

    def knows(self, file: Path) -> bool:
        """Whether the next `flush` speaks for this file."""
        with self._lock:
            return file in self._files or any(file == o[0] for o in self._open)

    def forget(self, gone: Callable[[Path], bool]) -> None:
        """Let `flush` say nothing of files that were deleted, those for which `gone` is true."""
        with self._lock:
            for _, open_file, started in (o for o in self._open if gone(o[0])):
                wait(started)
                open_file.close()
            self._open = [o for o in self._open if not gone(o[0])]
            self._files = {file: done for file, done in self._files.items() if not gone(file)}

    def flush(self) -> None:
        """Sync the files, then their folders; raises for the first that cannot be made durable."""
        with self._flushing:
            with self._lock:
                self._sync_open()
                files, self._files = self._files, {}
                folders, self._folders = self._folders, set()
            try:
                wait(files.values())
                for file, done in files.items():
                    with explaining("make durable", str(file)):
                        done.result()
                list((map if self._pool is None else self._pool.map)(self._sync, folders))
            except BaseException:  # a file that failed stays, so that no later flush says all is well
                with self._lock:
                    self._files = files | self._files
                    self._folders |= folders
                raise


def start_writeback(fd: int) -> None:
    """Ask the kernel to begin writing a file to its disk; a hint, and only on Linux. Waits for room in its queue."""
    start = _sync_file_range()
    if start is not None:
        start(fd, 0, 0, 2)  # SYNC_FILE_RANGE_WRITE, to the end of the file


@functools.cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    try:
        function = ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return function


def _start(file: Descriptor) -> None:
    start_writeback(file.fd)


def _sync_and_close(file: Descriptor, started: list[Future[None]]) -> None:
    wait(started)
    try:
        os.fsync(file.fd)
    finally:
        file.close()
