"""Files under a local folder."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import stat
from contextlib import contextmanager, nullcontext, suppress
from functools import cached_property
from time import perf_counter
from typing import TYPE_CHECKING

from ucformat.errors import (
    Conflict,
    NotFound,
    PermissionDenied,
    UcformatError,
    Uncertain,
    UnsafeError,
    UnsupportedError,
)
from ucformat.settings import local_path
from ucformat.storage.base import (
    HIDDEN,
    Costs,
    FileWriter,
    Info,
    Store,
    changed_meanwhile,
    check_key,
    check_range,
    content_version,
)
from ucformat.storage.direct import DIRECT, read_direct
from ucformat.storage.error_mapping import mapping_os_errors
from ucformat.storage.folders import (
    Folders,
    is_folder,
    link_target,
    reject_broken_link,
    remove,
    roots_hint,
    with_parents,
)
from ucformat.storage.local_files import (
    Descriptor,
    OpenFile,
    OpenFiles,
    PendingSyncs,
    file_info,
    prefetch,
    start_writeback,
    walk,
)
from ucformat.storage.profiles import profile_of
from ucformat.storage.strided import fill, nbytes_of, read_scattered, write_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from ucformat.storage.base import Bytes, Checksums, Ranges

_LOCK = f"{HIDDEN}lock"
_COSTS = Costs()
_LARGE, _CACHED = 64 << 10, 1.5e9  # bytes of a large read; bytes a second that a page cache reaches
_WRITEBACK = 32 << 20  # bytes after which write-back of a file that is being written starts


class LocalStore(Store):
    """Files under a local folder, which is created with the first file.

    Symbolic links are followed when reading, also out of the root, because foreign checkpoints
    contain them (Hugging Face's cache), unless the store is `confined`; `list` returns linked
    files, but not the contents of linked folders. Nothing is written or deleted through a link
    below the root, even if it is created concurrently: that is UnsafeError. Killed writers leave
    hidden files, which `sweep` and `delete_prefix` remove. Open files are closed when the store is
    garbage-collected.
    """

    def __init__(
        self, root: str | os.PathLike[str], allows: Callable[[str], bool] | None = None
    ) -> None:
        self._root = local_path(root)
        self._allows = allows
        self._handles = OpenFiles()
        self._from_disk = False  # whether the last large read was too slow for the page cache
        self._folders = Folders(self._root)
        self._durability = PendingSyncs(self._folders.sync)

    def __reduce__(self) -> tuple[type[LocalStore], tuple[Path, Callable[[str], bool] | None]]:
        # another process has to grant its own exceptions
        return LocalStore, (self._root, self._allows and _nowhere)

    def __repr__(self) -> str:
        return f"LocalStore({self.url!r})"

    @property
    def url(self) -> str:
        """The absolute path of the root."""
        return str(self._root)

    @cached_property
    def is_direct(self) -> bool:
        """Whether files that are not in the page cache are read past it, as `doctor` found best for this place."""
        profile = profile_of(self.url)
        return profile is not None and profile.direct

    @property
    def costs(self) -> Costs:
        """Those of local files; of longer requests where these are read past the page cache."""
        return DIRECT if self.is_direct else _COSTS

    def confined(self, allows: Callable[[str], bool]) -> LocalStore:
        """A store of this folder that rejects files that a link places outside of it."""
        return LocalStore(self._root, allows)

    def info(self, key: str) -> Info:
        """Size and version of the file that now has this key; later reads use this file."""
        name = self._name(key)
        with mapping_os_errors("read", name):
            status = os.stat(name)  # noqa: PTH116 - pathlib takes ten times as long as the system call
        if not stat.S_ISREG(status.st_mode):
            raise NotFound(f"{name} is not a file")
        self._handles.drop_if_replaced(key, status)
        return file_info(key, status)

    def read(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """Bytes of the file that now has this key."""
        name = self._name(key)
        with mapping_os_errors("read", name):
            file = self._open(key)
            size = os.fstat(file.fd).st_size
            nbytes = size - offset if nbytes is None else nbytes
            check_range(name, offset, nbytes, size)
            data = bytearray(nbytes)
            got = read_scattered(file.fd, offset, [memoryview(data)])
            check_range(name, offset, nbytes, offset + got)
            return bytes(data)

    def read_into(
        self, key: str, offset: int, buffers: Sequence[memoryview], crcs: Checksums | None = None
    ) -> None:
        """Fill buffers by `preadv`, without intermediate copies."""
        name = f"{self._root}/{key}"
        wanted = nbytes_of(buffers)
        if offset < 0:
            check_range(name, offset, wanted, 0)
        with mapping_os_errors("read", name):
            file = self._handles.get(key) or self._handles.open(key, self._open)
            if self.is_direct and (lent := read_direct(file, [(offset, wanted)], "direct")):
                fill(buffers, lent[0], crcs)
                return
            if self._from_disk and wanted >= _LARGE:
                prefetch(file.fd, offset, wanted)
            begun = perf_counter()
            got = read_scattered(file.fd, offset, buffers, crcs)
            if wanted >= _LARGE:
                self._from_disk = wanted < _CACHED * (perf_counter() - begun)
            if got < wanted:
                check_range(name, offset, wanted, min(offset + got, os.fstat(file.fd).st_size))

    def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> Ranges | None:
        """See RangeReader; only what is read past the page cache is lent."""
        if not self.is_direct or not ranges or ranges[0][0] < 0:
            return None
        with mapping_os_errors("read", f"{self._root}/{key}"):
            file = self._handles.get(key) or self._handles.open(key, self._open)
            lent = read_direct(file, ranges, "lent")
        return None if lent is None else nullcontext(lent)

    def read_rows(self, key: str, offset: int, step: int, rows: Sequence[memoryview]) -> None:
        """Fill rows with one `preadv` each, and nothing else for each row."""
        name = f"{self._root}/{key}"
        if offset < 0 or step < 0:
            check_range(name, min(offset, step), 1, 0)
        with mapping_os_errors("read", name):
            file = self._handles.get(key) or self._handles.open(key, self._open)
            fd, at = file.fd, offset
            for row in rows:
                got = os.preadv(fd, (row,), at)
                if got < row.nbytes:  # the end of the file, or a read that was interrupted
                    got = read_scattered(fd, at, [row])
                    check_range(name, at, row.nbytes, at + got)
                at += step

    @contextmanager
    def opened(self, key: str) -> Iterator[int]:
        """The descriptor of the file that now has this key, open for this block alone; other stores have none."""
        name = self._name(key)
        with mapping_os_errors("read", name):
            file = self._open(key)
        try:
            yield file.fd
        finally:
            file.close()

    def create(self, key: str, unit: int = 1) -> LocalWriter:  # noqa: ARG002 - nothing is uploaded
        """Write a file as a stream, under a hidden name until it is closed."""
        return LocalWriter(self, key)

    def flush(self) -> None:
        """Make every closed file, its parent folders and all deletions durable."""
        self._durability.flush()

    def adopt(self, key: str) -> None:
        """Include this file in the next `flush`."""
        path = self._path(key)
        self.info(key)
        if not self._durability.covers(path):
            folder = _folder(key)
            opened = self._folders.make(folder)
            with mapping_os_errors("read", str(path)):
                self._durability.add(path, self._open(key, opened), with_parents(folder))

    def put_if_absent(self, key: str, data: bytes) -> str:
        """Write a whole file by a hard link to a hidden one, which fails if the file exists."""
        path = self._path(key)
        folder = self._folders.make(_folder(key))
        with _hidden(folder, path, data) as temporary:
            try:
                with mapping_os_errors("create", str(path)):
                    os.link(
                        temporary,
                        path.name,
                        src_dir_fd=folder.fd,
                        dst_dir_fd=folder.fd,
                        follow_symlinks=False,
                    )
            except Conflict:
                # otherwise it was made, but NFS lost the answer
                if os.stat(temporary, dir_fd=folder.fd).st_nlink != 2:
                    reject_broken_link(path, folder)
                    raise
            except (PermissionDenied, UnsupportedError) as error:
                hint = "commit to a file system with hard links, or to an object store"
                raise UnsupportedError(
                    f"{path} cannot be put if absent: {error.message}", hint=hint
                ) from error
        self._finish(key, folder)
        return content_version(data)

    def replace(self, key: str, data: bytes, version: str) -> str:
        """Replace a whole file if it still has this content version, under a lock on its folder."""
        path = self._path(key)
        folder = self._folders.make(_folder(key))
        lock = str(path.with_name(_LOCK))
        with mapping_os_errors("lock", lock):
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            lock_file = Descriptor(os.open(_LOCK, flags, 0o666, dir_fd=folder.fd))
        try:
            with mapping_os_errors("lock", lock):
                fcntl.flock(lock_file.fd, fcntl.LOCK_EX)
            try:
                with mapping_os_errors("read", str(path)):
                    # opened anew: `_handles` may have a file that was replaced since
                    current = content_version(self._open(key, folder).whole())
            except NotFound:
                current = "gone"
            if current != version:
                raise changed_meanwhile(str(path))
            with _hidden(folder, path, data) as temporary, mapping_os_errors("write", str(path)):
                os.rename(temporary, path.name, src_dir_fd=folder.fd, dst_dir_fd=folder.fd)
            self._finish(key, folder)
        finally:
            lock_file.close()
        return content_version(data)

    def list(self, prefix: str = "") -> Iterator[Info]:
        """All files below a folder, in the order of their keys."""
        folder = self._path(prefix) if prefix else self._root
        return walk(folder, f"{prefix}/" if prefix else "")

    def delete(self, key: str) -> None:
        """Remove a file."""
        path, above = self._path(key), _folder(key)
        with suppress(NotFound), mapping_os_errors("delete", str(path)):
            folder = self._folders.open(above)
            if is_folder(path.name, folder, follow=False):
                raise IsADirectoryError  # unlink fails with EISDIR or EPERM, depending on the system
            os.unlink(path.name, dir_fd=folder.fd)
            self._folders.check_same(above, folder)
        # even if it was gone: its removal may not have been synced
        self._durability.add_folder(above)
        self._handles.drop(key)
        self._durability.forget(path.__eq__)

    def delete_prefix(self, prefix: str) -> None:
        """Remove a folder and all in it, including hidden files; of a linked folder only the link is removed."""
        path, above = self._path(prefix), _folder(prefix)
        with suppress(NotFound), mapping_os_errors("delete", str(path)):
            folder = self._folders.open(above)
            if is_folder(path.name, folder) and not is_folder(path.name, folder, follow=False):
                os.unlink(path.name, dir_fd=folder.fd)
            while is_folder(path.name, folder, follow=False):
                with suppress(FileNotFoundError):  # deleted concurrently
                    shutil.rmtree(path.name, dir_fd=folder.fd)
            self._folders.check_same(above, folder)
        self._durability.add_folder(above)
        self._handles.clear()
        self._durability.forget(lambda file: path in file.parents)

    def sweep(self) -> None:
        """Remove hidden files whose lock is free; a live writer holds it."""
        try:
            root = self._folders.open("")
        except OSError:
            return
        for _, _, names, folder in os.fwalk(".", dir_fd=root.fd):
            for name in names:
                if not (name.startswith(HIDDEN) and name.endswith(".tmp")):
                    continue
                with suppress(OSError):  # gone, or its writer is alive
                    fd = os.open(
                        name,
                        os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW,
                        dir_fd=folder,
                    )
                    try:
                        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        os.unlink(name, dir_fd=folder)
                    finally:
                        os.close(fd)

    def prune(self, folder: str) -> None:
        """Remove a folder that is empty, or contains only the lock of `replace`."""
        path = self._path(folder) if folder else self._root
        try:
            opened = self._folders.open(folder)
        except (PermissionDenied, UnsupportedError):
            raise
        except OSError:  # it does not exist, or may not be opened
            return
        with suppress(OSError):  # it is not empty
            with os.scandir(opened.fd) as entries:
                files = [e.name for e in entries if not e.is_dir(follow_symlinks=False)]
            if files == [_LOCK]:
                os.unlink(_LOCK, dir_fd=opened.fd)
            if not folder:
                path.rmdir()
                return
            above = self._folders.open(_folder(folder))
            os.rmdir(path.name, dir_fd=above.fd)

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)

    def _name(self, key: str) -> str:
        return f"{self._root}/{check_key(key)}"

    def _open(self, key: str, folder: Descriptor | None = None) -> OpenFile:
        """Open a file to read, in its folder if that is open; the file that was opened is the one checked."""
        name = self._name(key)
        file = OpenFile(name, folder)
        if self._allows is not None and (place := file.place(name)) != name:
            root = os.path.realpath(self._root).rstrip("/")
            if not place.startswith(f"{root}/") and not self._allows(place):
                raise UnsafeError(
                    f"{name} is {place}, by a symbolic link that leads out of {self._root}",
                    hint=roots_hint(link_target(self._root, key)),
                )
        return file

    def _finish(self, key: str, folder: Descriptor) -> None:
        """Finish writing a whole file that has its name; on failure it remains, but may not be durable."""
        self._handles.drop(key)
        try:
            self._folders.sync_upwards(_folder(key), folder)
        except UcformatError as error:
            raise Uncertain(
                f"{self._path(key)} was written, but may not be durable: {error.message}"
            ) from error


class LocalWriter(FileWriter):
    """A file that is being written under a hidden name in its folder."""

    _file = Descriptor(-1)  # until one is open

    def __init__(self, store: LocalStore, key: str) -> None:
        self._store, self._key, self._path = store, key, store._path(key)  # noqa: SLF001 - the two classes are one unit
        self._folder = store._folders.make(_folder(key))  # noqa: SLF001
        self._temporary, self._file = _open_hidden(self._folder, self._path)
        self._unsynced = 0  # bytes whose write-back has not started

    def write(self, data: Bytes) -> None:
        """Append bytes."""
        view = memoryview(data)
        with mapping_os_errors("write", str(self._path)):
            write_all(self._file.fd, view)
        self._unsynced += view.nbytes
        if self._unsynced >= _WRITEBACK:
            start_writeback(self._file.fd)
            self._unsynced = 0

    def close(self) -> None:
        """Rename the file to its final name; it is synced in the background."""
        if self._file.fd < 0:
            return
        try:
            with mapping_os_errors("write", str(self._path)):
                here = self._folder.fd
                os.rename(self._temporary, self._path.name, src_dir_fd=here, dst_dir_fd=here)
                self._store._folders.check_same(_folder(self._key), self._folder)  # noqa: SLF001
        except BaseException:
            self.abort()
            raise
        written = self._file
        del self._file
        self._store._handles.drop(self._key)  # noqa: SLF001
        self._store._durability.add(self._path, written, with_parents(_folder(self._key)))  # noqa: SLF001
        self._folder.close()

    def abort(self) -> None:
        """Delete what was written."""
        if self._file.fd >= 0:
            remove(self._temporary, self._folder)
            self._file.close()
            self._folder.close()

    def __del__(self) -> None:
        self.abort()


def _nowhere(_path: str) -> bool:
    """Allows no path."""
    return False


def _folder(key: str) -> str:
    return key.rpartition("/")[0]


@contextmanager
def _hidden(folder: Descriptor, path: Path, data: bytes) -> Iterator[str]:
    """A durable hidden file with this content beside `path`, which exists and is locked until the block ends."""
    temporary, file = _open_hidden(folder, path)
    try:
        with mapping_os_errors("write", str(path)):
            write_all(file.fd, memoryview(data))
            os.fsync(file.fd)
        yield temporary
    finally:
        remove(temporary, folder)
        file.close()


def _open_hidden(folder: Descriptor, path: Path) -> tuple[str, Descriptor]:
    """A new hidden file beside `path`, in its open folder; locked while it is open."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    while True:
        temporary = f"{HIDDEN}{secrets.token_hex(8)}.tmp"
        with mapping_os_errors("write", str(path)):
            file = Descriptor(os.open(temporary, flags, 0o666, dir_fd=folder.fd))
            fcntl.flock(file.fd, fcntl.LOCK_EX)
            if os.fstat(file.fd).st_nlink:  # otherwise a sweep removed it before it was locked
                return temporary, file
            file.close()
