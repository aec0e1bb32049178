"""Files on a file system that several processes write at once, each its own bytes of a file whose size is known.

Such a file has its name from the beginning, so it must be below something that is not visible yet, such as an attempt.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, Self

from ucformat.errors import UcformatError, UnsupportedError
from ucformat.storage.error_mapping import mapping_os_errors
from ucformat.storage.folders import with_parents
from ucformat.storage.local import LocalStore
from ucformat.storage.local_files import Descriptor, start_writeback

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from ucformat.storage.base import Bytes, Store

__all__ = ["InPlaceFile", "local_store"]

_WRITEBACK = 32 << 20  # bytes after which write-back starts


def local_store(store: Store) -> LocalStore:
    """The store, if its files can be written in place.

    Args:
        store: the store.

    Raises:
        UnsupportedError: it is no folder of a file system.
    """
    if not isinstance(store, LocalStore):
        raise UnsupportedError(
            f"{store.url} is no folder of a file system, and so its files are not written in place by several ranks",
            hint='save with form="zarr", and then `ucp convert --weights safetensors`; or save to a file system',
        )
    return store


class InPlaceFile:
    """A file that is written in place; its bytes are zeros until they are written.

    As a context manager, it closes on success: what this process has written is durable after the next `flush` of the
    store.

    Args:
        store: the store.
        key: the key of the file.
        nbytes: its size, which all writers give.
    """

    def __init__(self, store: LocalStore, key: str, nbytes: int) -> None:
        self._store, self._key, self._path = store, key, store._path(key)  # noqa: SLF001 - as LocalWriter
        self._nbytes, self._unsynced = nbytes, 0
        folder = store._folders.make(key.rpartition("/")[0])  # noqa: SLF001
        with mapping_os_errors("write", str(self._path)):
            # Nobody reads through this descriptor, so a network file system sends exactly the bytes that are written,
            # and not the rest of their pages, which others write.
            flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            self._file = Descriptor(os.open(self._path.name, flags, 0o666, dir_fd=folder.fd))
            found = os.fstat(self._file.fd)
            if not stat.S_ISREG(found.st_mode) or found.st_size not in (0, nbytes):
                raise UcformatError(f"{self._path} is not the file that was to be written", hint="save again")
            os.ftruncate(self._file.fd, nbytes)  # it has this size, or none

    def write(self, offset: int, data: Bytes, runs: Sequence[tuple[int, int]] = ()) -> None:
        """Write bytes.

        Args:
            offset: of the first one in the file.
            data: the bytes.
            runs: if only some of them are written: the first byte of each run, and the byte after its last one.
        """
        view, fd, pwrite = memoryview(data).cast("B"), self._file.fd, os.pwrite
        with mapping_os_errors("write", str(self._path)):
            for start, stop in runs or ((0, len(view)),):  # there may be many, of few bytes
                at = start
                while at < stop:
                    at += pwrite(fd, view[at:stop], offset + at)
                self._unsynced += stop - start
        if self._unsynced >= _WRITEBACK:
            start_writeback(self._file.fd)
            self._unsynced = 0

    def close(self) -> None:
        """Include the file in the next `flush`."""
        file, self._file = self._file, Descriptor(-1)
        self._store._handles.drop(self._key)  # noqa: SLF001
        self._store._durability.add(self._path, file, with_parents(self._key.rpartition("/")[0]))  # noqa: SLF001

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._file.close()
