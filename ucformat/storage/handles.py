"""Open files to read from, shared by threads and bounded in number; and the scattering read itself."""

from __future__ import annotations

import os
import stat
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from ucformat.errors import NotFound

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

__all__ = ["Descriptor", "Handles", "OpenFile", "read_scattered"]

_IOV_MAX = 1024


class Descriptor:
    """A file descriptor that is closed once: by `close`, or when nobody holds this object any more."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def close(self) -> None:
        """Close it, if it is not closed yet: its number may by then be another file's."""
        fd, self.fd = getattr(self, "fd", -1), -1  # an interrupt may have come before it had one
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


class OpenFile(Descriptor):
    """A descriptor for reading; a pipe or a device is no file, and not waited for.

    With `folder`, which is open, the file is that of its name there, whatever stands in the folder's place by then.
    """

    __slots__ = ()

    def __init__(self, path: Path, folder: Descriptor | None = None) -> None:
        self.fd = -1
        name, above = (path, None) if folder is None else (path.name, folder.fd)
        self.fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=above)
        mode = os.fstat(self.fd).st_mode
        if not stat.S_ISREG(mode):
            raise IsADirectoryError if stat.S_ISDIR(mode) else NotFound(f"{path} is not a file")

    def whole(self) -> bytes:
        """All that it holds."""
        data = bytearray(os.fstat(self.fd).st_size)
        read_scattered(self.fd, 0, [memoryview(data)])
        return bytes(data)

    def place(self, path: Path) -> str:
        """Where it lies, whatever links led there; `path` is what was opened."""
        try:
            return os.readlink(f"/proc/self/fd/{self.fd}")  # noqa: PTH115 - the file that is open, even if renamed since
        except OSError:  # not on Linux
            return os.path.realpath(path)


class Handles:
    """The files read last, kept open: at most `limit`, besides those in the hands of a reading thread."""

    def __init__(self, limit: int = 128) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._files: OrderedDict[str, OpenFile] = OrderedDict()
        self._changes = 0

    def get(self, key: str) -> OpenFile | None:
        """The file, if it is open; hold it while reading."""
        with self._lock:
            file = self._files.get(key)
            if file is not None:
                self._files.move_to_end(key)
            return file

    def open(self, key: str, make: Callable[[str], OpenFile]) -> OpenFile:
        """Open the file, and keep it open."""
        changes = self._changes
        file = make(key)
        with self._lock:
            if changes == self._changes:  # else it may have been replaced since it was opened: use it once
                self._files[key] = file
                if len(self._files) > self._limit:
                    self._files.popitem(last=False)
        return file

    def drop_others(self, key: str, found: os.stat_result) -> None:
        """Forget the file, if somebody put another one, which was `found`, in its place."""
        file = self._files.get(key)
        if file is not None and not os.path.samestat(os.fstat(file.fd), found):
            self.drop(key)

    def drop(self, key: str) -> None:
        """Forget a file that was replaced or removed."""
        with self._lock:
            self._changes += 1
            self._files.pop(key, None)

    def clear(self) -> None:
        """Forget every file."""
        with self._lock:
            self._changes += 1
            self._files.clear()


def read_scattered(fd: int, offset: int, buffers: Sequence[memoryview]) -> int:
    """Fill buffers one after another from `offset` on; the number of bytes read, less only at the end of the file."""
    todo = [b.cast("B") for b in buffers if b.nbytes]
    todo.reverse()
    done = 0
    while todo:
        got = os.preadv(fd, todo[: -_IOV_MAX - 1 : -1], offset + done)
        if got == 0:
            break
        done += got
        while todo and got >= todo[-1].nbytes:
            got -= todo.pop().nbytes
        if got:
            todo[-1] = todo[-1][got:]
    return done
