"""Files under a local folder."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import stat
from contextlib import contextmanager, suppress
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
from ucformat.storage.base import HIDDEN, Costs, Info, Store, Writer, check_key, check_range, content_version
from ucformat.storage.error_mapping import mapping_os_errors
from ucformat.storage.folders import Folders, is_folder, link_target, refuse_broken_link, remove, roots_hint, upwards
from ucformat.storage.local_files import (
    Descriptor,
    OpenFile,
    OpenFiles,
    PendingSyncs,
    file_info,
    read_scattered,
    start_writeback,
    walk,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from ucformat.storage.base import Bytes

__all__ = ["LocalStore"]

_LOCK = f"{HIDDEN}lock"
_WRITE = 256 << 10  # bytes of one write(2): ext4 was measured up to nine times slower with 8 MiB than with this
_BEHIND = 32 << 20  # bytes after which a file that is being written begins to go to its disk


class LocalStore(Store):
    """Files under a local folder, which need not exist before the first is written.

    Symbolic links are followed when reading, also out of the root, because foreign checkpoints are made of them
    (Hugging Face's cache), unless the store is `confined`; `list` shows linked files, not what is in linked folders.
    Nothing is written or deleted through a link below the root, even if it comes there meanwhile: that is UnsafeError.
    What a killed writer leaves are hidden files, which `sweep` and `delete_prefix` remove. Open files are closed when
    the store is garbage-collected.
    """

    costs = Costs()

    def __init__(self, root: str | os.PathLike[str], allows: Callable[[str], bool] | None = None) -> None:
        self._root = local_path(root)
        self._allows = allows
        self._handles = OpenFiles()
        self._folders = Folders(self._root)
        self._durability = PendingSyncs(self._folders.sync)

    def __reduce__(self) -> tuple[type[LocalStore], tuple[Path, Callable[[str], bool] | None]]:
        return LocalStore, (self._root, self._allows and _nowhere)  # what another process allows is its own to say

    def __repr__(self) -> str:
        return f"LocalStore({self.url!r})"

    @property
    def url(self) -> str:
        """The path of the root, absolute."""
        return str(self._root)

    def confined(self, allows: Callable[[str], bool]) -> LocalStore:
        """This folder, of which no file is read that a link makes one elsewhere, but where `allows(path)` is true."""
        return LocalStore(self._root, allows)

    def info(self, key: str) -> Info:
        """Size and version of the file that stands there now; it is also the one that is read from then on."""
        path = self._path(key)
        with mapping_os_errors("read", str(path)):
            found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise NotFound(f"{path} is not a file")
        self._handles.drop_others(key, found)
        return file_info(key, found)

    def read(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """Bytes of a file, always of the one that stands there now."""
        path = self._path(key)
        with mapping_os_errors("read", str(path)):
            file = self._open(key)
            size = os.fstat(file.fd).st_size
            nbytes = size - offset if nbytes is None else nbytes
            check_range(str(path), offset, nbytes, size)
            data = bytearray(nbytes)
            got = read_scattered(file.fd, offset, [memoryview(data)])
            check_range(str(path), offset, nbytes, offset + got)
            return bytes(data)

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill buffers by `preadv`, with no copy between."""
        name = f"{self._root}/{key}"
        wanted = sum(b.nbytes for b in buffers)
        if offset < 0:
            check_range(name, offset, wanted, 0)
        with mapping_os_errors("read", name):
            file = self._handles.get(key) or self._handles.open(key, self._open)
            got = read_scattered(file.fd, offset, buffers)
            if got < wanted:
                check_range(name, offset, wanted, min(offset + got, os.fstat(file.fd).st_size))

    def read_rows(self, key: str, offset: int, step: int, rows: Sequence[memoryview]) -> None:
        """Fill rows by a `preadv` each, with nothing else done for each."""
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

    def create(self, key: str, unit: int = 1) -> LocalWriter:  # noqa: ARG002 - it is sent nowhere
        """Write a file as a stream, under a hidden name until it is closed."""
        return LocalWriter(self, key)

    def flush(self) -> None:
        """Make every closed file durable, and the folders above it, and what was deleted."""
        self._durability.flush()

    def adopt(self, key: str) -> None:
        """Let the next `flush` cover this file too."""
        path = self._path(key)
        self.info(key)
        if not self._durability.knows(path):
            folder = _folder(key)
            opened = self._folders.make(folder)
            with mapping_os_errors("read", str(path)):
                self._durability.add(path, self._open(key, opened), upwards(folder))

    def put_if_absent(self, key: str, data: bytes) -> str:
        """Write a whole file by a hard link to a hidden one, which fails where a file is."""
        path = self._path(key)
        folder = self._folders.make(_folder(key))
        with _hidden(folder, path, data) as temporary:
            try:
                with mapping_os_errors("create", str(path)):
                    os.link(temporary, path.name, src_dir_fd=folder.fd, dst_dir_fd=folder.fd, follow_symlinks=False)
            except Conflict:
                if os.stat(temporary, dir_fd=folder.fd).st_nlink != 2:  # else it was made, and NFS lost its answer
                    refuse_broken_link(path, folder)
                    raise
            except (PermissionDenied, UnsupportedError) as error:
                hint = "commit to a place with hard links, or to an object store"
                raise UnsupportedError(f"{path} cannot be put if absent: {error.message}", hint=hint) from error
        self._settled(key, folder)
        return content_version(data)

    def replace(self, key: str, data: bytes, version: str) -> str:
        """Write a whole file in place of one with this content version, under a lock on its folder."""
        path = self._path(key)
        folder = self._folders.make(_folder(key))
        lock = str(path.with_name(_LOCK))
        with mapping_os_errors("lock", lock):
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            held = Descriptor(os.open(_LOCK, flags, 0o666, dir_fd=folder.fd))
        try:
            with mapping_os_errors("lock", lock):
                fcntl.flock(held.fd, fcntl.LOCK_EX)
            try:
                with mapping_os_errors("read", str(path)):
                    found = content_version(self._open(key, folder).whole())
            except NotFound:
                found = "gone"
            if found != version:
                raise Conflict(
                    f"{path} was changed by somebody else since it was read",
                    hint="read it again, and decide anew what to write",
                )
            with _hidden(folder, path, data) as temporary, mapping_os_errors("write", str(path)):
                os.rename(temporary, path.name, src_dir_fd=folder.fd, dst_dir_fd=folder.fd)
            self._settled(key, folder)
        finally:
            held.close()
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
                raise IsADirectoryError  # unlink would say EISDIR or EPERM, as the system likes
            os.unlink(path.name, dir_fd=folder.fd)
            self._folders.must_be(above, folder)
        self._durability.changed(above)  # also where it was gone: whoever removed it may not have synced that
        self._handles.drop(key)
        self._durability.forget(path.__eq__)

    def delete_prefix(self, prefix: str) -> None:
        """Remove a folder and all in it, hidden files too; a linked folder loses only its link."""
        path, above = self._path(prefix), _folder(prefix)
        with suppress(NotFound), mapping_os_errors("delete", str(path)):
            folder = self._folders.open(above)
            if is_folder(path.name, folder) and not is_folder(path.name, folder, follow=False):
                os.unlink(path.name, dir_fd=folder.fd)
            while is_folder(path.name, folder, follow=False):
                with suppress(FileNotFoundError):  # somebody else deletes here too
                    shutil.rmtree(path.name, dir_fd=folder.fd)
            self._folders.must_be(above, folder)
        self._durability.changed(above)
        self._handles.clear()
        self._durability.forget(lambda file: path in file.parents)

    def sweep(self) -> None:
        """Remove hidden files on which nobody holds the lock that a writer holds as long as it lives."""
        try:
            root = self._folders.open("")
        except OSError:
            return
        for _, _, names, folder in os.fwalk(".", dir_fd=root.fd):
            for name in names:
                if not (name.startswith(HIDDEN) and name.endswith(".tmp")):
                    continue
                with suppress(OSError):  # gone, or its writer lives
                    fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW, dir_fd=folder)
                    try:
                        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        os.unlink(name, dir_fd=folder)
                    finally:
                        os.close(fd)

    def prune(self, folder: str) -> None:
        """Remove a folder that holds nothing, or nothing but the lock of `replace`, which goes with the last file."""
        path = self._path(folder) if folder else self._root
        try:
            opened = self._folders.open(folder)
        except (PermissionDenied, UnsupportedError):
            raise
        except OSError:  # it is not there, or not ours to look into
            return
        with suppress(OSError):  # it holds something
            with os.scandir(opened.fd) as found:
                files = [e.name for e in found if not e.is_dir(follow_symlinks=False)]
            if files == [_LOCK]:
                os.unlink(_LOCK, dir_fd=opened.fd)
            if not folder:
                path.rmdir()
                return
            above = self._folders.open(_folder(folder))
            os.rmdir(path.name, dir_fd=above.fd)

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)

    def _open(self, key: str, folder: Descriptor | None = None) -> OpenFile:
        """Open a file to read from it, in its folder, if that is open; what was opened is what is checked."""
        path = self._path(key)
        file = OpenFile(path, folder)
        if self._allows is not None:
            place = file.place(path)
            root = os.path.realpath(self._root).rstrip("/")  # a string: pathlib takes three times as long
            if not place.startswith(f"{root}/") and not self._allows(place):
                raise UnsafeError(
                    f"{path} is {place}, by a symbolic link that leads out of {self._root}",
                    hint=roots_hint(link_target(self._root, key)),
                )
        return file

    def _settled(self, key: str, folder: Descriptor) -> None:
        """What is done when a whole file has its name; where that fails the file stays, perhaps not durable."""
        self._handles.drop(key)
        try:
            self._folders.settle(_folder(key), folder)
        except UcformatError as error:
            raise Uncertain(f"{self._path(key)} was written, but may not last: {error.message}") from error


class LocalWriter(Writer):
    """A file being written under a hidden name beside its own."""

    _file = Descriptor(-1)  # of all that have none (yet)

    def __init__(self, store: LocalStore, key: str) -> None:
        self._store, self._key, self._path = store, key, store._path(key)  # noqa: SLF001 - one thing in two classes
        self._folder = store._folders.make(_folder(key))  # noqa: SLF001
        self._temporary, self._file = _open_hidden(self._folder, self._path)
        self._behind = 0  # bytes whose write-back was not begun

    def write(self, data: Bytes) -> None:
        """Append bytes."""
        view = memoryview(data)
        with mapping_os_errors("write", str(self._path)):
            _write_all(self._file.fd, view)
        self._behind += view.nbytes
        if self._behind >= _BEHIND:
            start_writeback(self._file.fd)
            self._behind = 0

    def close(self) -> None:
        """Give the file its name, and have it synced in the background."""
        if self._file.fd < 0:
            return
        try:
            with mapping_os_errors("write", str(self._path)):
                here = self._folder.fd
                os.rename(self._temporary, self._path.name, src_dir_fd=here, dst_dir_fd=here)
                self._store._folders.must_be(_folder(self._key), self._folder)  # noqa: SLF001
        except BaseException:
            self.abort()
            raise
        written = self._file
        del self._file
        self._store._handles.drop(self._key)  # noqa: SLF001
        self._store._durability.add(self._path, written, upwards(_folder(self._key)))  # noqa: SLF001
        self._folder.close()

    def abort(self) -> None:
        """Remove what was written."""
        if self._file.fd >= 0:
            remove(self._temporary, self._folder)
            self._file.close()
            self._folder.close()

    def __del__(self) -> None:
        self.abort()


def _nowhere(_path: str) -> bool:
    """Allows nothing."""
    return False


def _folder(key: str) -> str:
    return key.rpartition("/")[0]


@contextmanager
def _hidden(folder: Descriptor, path: Path, data: bytes) -> Iterator[str]:
    """A durable hidden file with this content beside `path`, there and locked until the block ends."""
    temporary, file = _open_hidden(folder, path)
    try:
        with mapping_os_errors("write", str(path)):
            _write_all(file.fd, memoryview(data))
            os.fsync(file.fd)
        yield temporary
    finally:
        remove(temporary, folder)
        file.close()


def _open_hidden(folder: Descriptor, path: Path) -> tuple[str, Descriptor]:
    """A hidden file beside `path`, in its folder, which is open; locked as long as it is open."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    while True:
        temporary = f"{HIDDEN}{secrets.token_hex(8)}.tmp"
        with mapping_os_errors("write", str(path)):
            file = Descriptor(os.open(temporary, flags, 0o666, dir_fd=folder.fd))
            fcntl.flock(file.fd, fcntl.LOCK_EX)
            if os.fstat(file.fd).st_nlink:  # else somebody swept it before it was locked
                return temporary, file
            file.close()


def _write_all(fd: int, data: memoryview) -> None:
    if data.nbytes:
        data = data.cast("B")
        while data:
            data = data[os.write(fd, data[:_WRITE]) :]
