"""Files that several processes write together, each its own parts of a file whose size is known.

On a file system such a file has its name from the beginning, so it must be below something that is
not visible yet, such as an attempt.
"""

from __future__ import annotations

import os
import stat
import threading
from contextlib import ExitStack
from functools import cached_property
from typing import TYPE_CHECKING, Literal, Self

from ucformat.errors import UcformatError, UsageError
from ucformat.storage.error_mapping import mapping_os_errors
from ucformat.storage.folders import with_parents
from ucformat.storage.local import LocalStore
from ucformat.storage.local_files import Descriptor, start_writeback
from ucformat.storage.objects import ObjectStore
from ucformat.storage.upload import unit_for
from ucformat.storage.wrappers import WrappedStore

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from ucformat.storage.base import Bytes, FileWriter, Store
    from ucformat.storage.objects import Multipart

#: How files are written together: by positional writes, in parts of an upload, or each file by one
#: process.
Way = Literal["in place", "parts", "whole"]

_WRITEBACK = 32 << 20  # bytes after which write-back starts


class InPlaceFile:
    """A file that is written in place; its bytes are zeros until they are written.

    As a context manager, it closes on success: what this process has written is durable after the
    next `flush` of the store.
    """

    def __init__(self, store: LocalStore, key: str, nbytes: int) -> None:
        self._store, self._key, self._path = store, key, store._path(key)  # noqa: SLF001 - as LocalWriter
        self._nbytes, self._unsynced = nbytes, 0
        folder = store._folders.make(key.rpartition("/")[0])  # noqa: SLF001
        with mapping_os_errors("write", str(self._path)):
            # Nobody reads through this descriptor, so a network file system sends exactly the bytes
            # that are written, and not the rest of their pages, which others write.
            flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            self._file = Descriptor(os.open(self._path.name, flags, 0o666, dir_fd=folder.fd))
            status = os.fstat(self._file.fd)
            if not stat.S_ISREG(status.st_mode) or status.st_size not in (0, nbytes):
                raise UcformatError(
                    f"{self._path} is not the file that was to be written", hint="save again"
                )
            os.ftruncate(self._file.fd, nbytes)  # it has this size, or none

    def write(self, offset: int, data: Bytes) -> None:
        """Write bytes."""
        view, done = memoryview(data).cast("B"), 0
        with mapping_os_errors("write", str(self._path)):
            while done < len(view):
                done += os.pwrite(self._file.fd, view[done:], offset + done)
        self._unsynced += done
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

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._file.close()


def way_of(store: Store) -> tuple[Way, Multipart | None]:
    """How files of a store are written together, and the uploads if it is in parts of these."""
    if isinstance(store, LocalStore):
        return "in place", None
    while isinstance(store, WrappedStore) and store.url == store.inner.url:  # the keys are the same
        store = store.inner
    uploads = store.multipart if isinstance(store, ObjectStore) else None
    return "whole" if uploads is None else "parts", uploads


class PartsWriter:
    """Writes one process's parts of files that several processes write together.

    As a context manager, it closes on success: then what it has written is durable after the next
    `flush` of the store, and files that are written whole are visible.

    Args:
        way: how they are written; if whole, all parts of a file are written in order, and one file
            after the other.

    Attributes:
        etags: of parts of uploads: the ETag of each, by file and part.
    """

    def __init__(
        self, store: Store, files: Sequence[tuple[str, int]], way: Way, uploads: Sequence[str] = ()
    ) -> None:
        self.etags: dict[tuple[int, int], str] = {}
        self._store, self._files, self._way, self._uploads = store, files, way, uploads
        self._lock, self._stack = threading.Lock(), ExitStack()
        self._opened: dict[int, InPlaceFile] = {}
        self._writing: tuple[int, FileWriter] | None = None

    def write(self, file: int, part: int, begin: int, data: Bytes) -> None:
        """Write a part; unless files are written whole, several threads may do so at once.

        Args:
            begin: the byte of the file at which it begins.
        """
        key, nbytes = self._files[file]
        if self._way == "parts":
            self.etags[file, part] = self._multipart.put(key, self._uploads[file], part, data)
        elif self._way == "in place":
            self._in_place(file).write(begin, data)
        else:
            if self._writing is None or self._writing[0] != file:
                self._stack.close()
                self._writing = (
                    file,
                    self._stack.enter_context(self._store.create(key, unit_for(nbytes))),
                )
            self._writing[1].write(data)

    @cached_property
    def _multipart(self) -> Multipart:
        _, uploads = way_of(self._store)
        if uploads is None:
            raise UsageError(
                f"{self._store.url}: this rank cannot write parts of uploads, and rank 0 can",
                hint="install boto3 on all ranks or on none, and give them the same environment",
            )
        return uploads

    def _in_place(self, file: int) -> InPlaceFile:
        with self._lock:
            if file not in self._opened:
                key, nbytes = self._files[file]
                assert isinstance(self._store, LocalStore)  # noqa: S101 - it is written in place
                self._opened[file] = self._stack.enter_context(
                    InPlaceFile(self._store, key, nbytes)
                )
            return self._opened[file]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, trace)
