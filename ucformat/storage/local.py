"""Files under a local folder."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import stat
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ucformat.errors import Conflict, NotFound, Refused, UcformatError, Uncertain
from ucformat.settings import local_path
from ucformat.storage.base import HIDDEN, Costs, Info, Writer, check_key, check_range, content_version
from ucformat.storage.durable import Durability, start_writeback, sync_folder
from ucformat.storage.folders import Folders
from ucformat.storage.handles import Descriptor, Handles, OpenFile, read_scattered
from ucformat.storage.oserrors import explaining
from ucformat.storage.roots import led_to, roots_hint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ucformat.storage.base import Bytes

__all__ = ["LocalStore"]

_LOCK = f"{HIDDEN}lock"
_WRITE = 256 << 10  # bytes of one write(2): ext4 was measured up to nine times slower with 8 MiB than with this
_BEHIND = 32 << 20  # bytes after which a file that is being written begins to go to its disk


class LocalStore:
    """Files under a local folder, which need not exist before the first is written.

    Symbolic links are followed when reading, also out of the root, because foreign checkpoints are made of them
    (Hugging Face's cache), unless the store is `confined`; `list` shows linked files, not what is in linked folders.
    Writing through a link that leaves the root is Refused. What a killed writer leaves are hidden files, which `sweep`
    and `delete_prefix` remove. Open files are closed when the store is garbage-collected.
    """

    costs = Costs()

    def __init__(self, root: str | os.PathLike[str], allows: Callable[[str], bool] | None = None) -> None:
        self._root = local_path(root)
        self._allows = allows
        self._handles = Handles()
        self._durability = Durability()
        self._folders = Folders(self._root)

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
        with explaining("read", str(path)):
            found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise NotFound(f"{path} is not a file")
        self._handles.drop_others(key, found)
        return _info(key, found)

    def read(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """Bytes of a file, always of the one that stands there now."""
        path = self._path(key)
        with explaining("read", str(path)):
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
        with explaining("read", name):
            file = self._handles.get(key) or self._handles.open(key, self._open)
            got = read_scattered(file.fd, offset, buffers)
            if got < wanted:
                check_range(name, offset, wanted, min(offset + got, os.fstat(file.fd).st_size))

    def read_rows(self, key: str, offset: int, step: int, rows: Sequence[memoryview]) -> None:
        """Fill rows by a `preadv` each, with nothing else done for each."""
        name = f"{self._root}/{key}"
        if offset < 0 or step < 0:
            check_range(name, min(offset, step), 1, 0)
        with explaining("read", name):
            file = self._handles.get(key) or self._handles.open(key, self._open)
            fd, at = file.fd, offset
            for row in rows:
                got = os.preadv(fd, (row,), at)
                if got < row.nbytes:  # the end of the file, or a read that was interrupted
                    got = read_scattered(fd, at, [row])
                    check_range(name, at, row.nbytes, at + got)
                at += step

    def read_versioned(self, key: str) -> tuple[bytes, str]:
        """A whole small file and its content version."""
        data = self.read(key)
        return data, content_version(data)

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
            with explaining("read", str(path)):
                self._durability.add(path, self._open(key), self._make_folder(path))

    def put_if_absent(self, key: str, data: bytes) -> str:
        """Write a whole file by a hard link to a hidden one, which fails where a file is."""
        path = self._path(key)
        folders = self._make_folder(path)
        with _hidden(path, data) as temporary:
            try:
                with explaining("create", str(path)):
                    os.link(temporary, path)
            except Conflict:
                if temporary.stat().st_nlink != 2:  # else the link was made, and its answer lost, as happens over NFS
                    raise
            except Refused as error:
                hint = "commit to a place with hard links, or to an object store"
                raise Refused(f"{path} cannot be put if absent: {error.message}", hint=hint) from error
        self._settled(key, folders)
        return content_version(data)

    def replace(self, key: str, data: bytes, version: str) -> str:
        """Write a whole file in place of one with this content version, under a lock on its folder."""
        path = self._path(key)
        folders = self._make_folder(path)
        lock = path.with_name(_LOCK)
        with explaining("lock", str(lock)):
            fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            with explaining("lock", str(lock)):
                fcntl.flock(fd, fcntl.LOCK_EX)
            try:
                found = self.read_versioned(key)[1]
            except NotFound:
                found = "gone"
            if found != version:
                raise Conflict(
                    f"{path} was changed by somebody else since it was read",
                    hint="read it again, and decide anew what to write",
                )
            with _hidden(path, data) as temporary, explaining("write", str(path)):
                temporary.rename(path)
            self._settled(key, folders)
        finally:
            os.close(fd)
        return content_version(data)

    def list(self, prefix: str = "") -> Iterator[Info]:
        """All files below a folder, in the order of their keys."""
        folder = self._path(prefix) if prefix else self._root
        return _walk(folder, f"{prefix}/" if prefix else "")

    def delete(self, key: str) -> None:
        """Remove a file."""
        path = self._path(key)
        self._folders.has_no_links(str(path.parent))
        with suppress(NotFound), explaining("delete", str(path)):
            if path.is_dir() and not path.is_symlink():
                raise IsADirectoryError  # unlink would say EISDIR or EPERM, as the system likes
            path.unlink()
        self._durability.changed(path.parent)  # also where it was gone: whoever removed it may not have synced that
        self._handles.drop(key)
        self._durability.forget(path.__eq__)

    def delete_prefix(self, prefix: str) -> None:
        """Remove a folder and all in it, hidden files too; a linked folder loses only its link."""
        path = self._path(prefix)
        self._folders.has_no_links(str(path.parent))
        with explaining("delete", str(path)):
            if path.is_symlink() and path.is_dir():
                path.unlink(missing_ok=True)
            while path.is_dir():
                try:
                    shutil.rmtree(path)
                except FileNotFoundError:  # somebody else deletes here too
                    continue
        self._durability.changed(path.parent)
        self._handles.clear()
        self._folders.forget()
        self._durability.forget(lambda file: path in file.parents)

    def sweep(self) -> None:
        """Remove hidden files on which nobody holds the lock that a writer holds as long as it lives."""
        for folder, _, names in os.walk(self._root):
            for name in names:
                if not (name.startswith(HIDDEN) and name.endswith(".tmp")):
                    continue
                path = Path(folder, name)
                with suppress(OSError):  # gone, or its writer lives
                    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
                    try:
                        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        path.unlink()
                    finally:
                        os.close(fd)

    def prune(self, folder: str) -> None:
        """Remove a folder that holds nothing, or nothing but the lock of `replace`, which goes with the last file."""
        path = self._path(folder) if folder else self._root
        self._folders.has_no_links(str(path))
        with suppress(OSError):  # it is not there, or holds something
            with os.scandir(path) as found:
                files = [e.name for e in found if not e.is_dir(follow_symlinks=False)]
            if files == [_LOCK]:
                (path / _LOCK).unlink()
            path.rmdir()
        self._folders.forget()

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)

    def _open(self, key: str) -> OpenFile:
        """Open a file to read from it; what was opened is what is checked."""
        path = self._path(key)
        file = OpenFile(path)
        if self._allows is not None:
            place = file.place(path)
            root = os.path.realpath(self._root).rstrip("/")  # a string: pathlib takes three times as long
            if not place.startswith(f"{root}/") and not self._allows(place):
                raise Refused(
                    f"{path} is {place}, by a symbolic link that leads out of {self._root}",
                    hint=roots_hint(led_to(self._root, key)),
                )
        return file

    def _make_folder(self, path: Path) -> tuple[Path, ...]:
        """Make the file's folder; the folders to sync so that its name lasts."""
        return self._folders.make(os.path.dirname(path))  # noqa: PTH120 - a string, see Folders

    def _settled(self, key: str, folders: Iterable[Path]) -> None:
        """What is done when a whole file has its name; where that fails the file stays, perhaps not durable."""
        self._handles.drop(key)
        try:
            for folder in folders:
                sync_folder(folder)
        except UcformatError as error:
            raise Uncertain(f"{self._path(key)} was written, but may not last: {error.message}") from error


class LocalWriter(Writer):
    """A file being written under a hidden name beside its own."""

    _file = Descriptor(-1)  # of all that have none (yet)

    def __init__(self, store: LocalStore, key: str) -> None:
        self._store, self._key, self._path = store, key, store._path(key)  # noqa: SLF001 - one thing in two classes
        self._folders = store._make_folder(self._path)  # noqa: SLF001
        self._temporary, self._file = _open_hidden(self._path)
        self._behind = 0  # bytes whose write-back was not begun

    def write(self, data: Bytes) -> None:
        """Append bytes."""
        view = memoryview(data)
        with explaining("write", str(self._path)):
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
            with explaining("write", str(self._path)):
                self._temporary.rename(self._path)
        except BaseException:
            self.abort()
            raise
        written = self._file
        del self._file
        self._store._handles.drop(self._key)  # noqa: SLF001
        self._store._durability.add(self._path, written, self._folders)  # noqa: SLF001

    def abort(self) -> None:
        """Remove what was written."""
        if self._file.fd >= 0:
            self._temporary.unlink(missing_ok=True)
            self._file.close()

    def __del__(self) -> None:
        self.abort()


def _nowhere(_path: str) -> bool:
    """Allows nothing."""
    return False


@contextmanager
def _hidden(path: Path, data: bytes) -> Iterator[Path]:
    """A durable hidden file with this content beside `path`, there and locked until the block ends."""
    temporary, file = _open_hidden(path)
    try:
        with explaining("write", str(path)):
            _write_all(file.fd, memoryview(data))
            os.fsync(file.fd)
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)
        file.close()


def _open_hidden(path: Path) -> tuple[Path, Descriptor]:
    """A hidden file beside `path`, locked as long as it is open."""
    while True:
        temporary = path.with_name(f"{HIDDEN}{secrets.token_hex(8)}.tmp")
        with explaining("write", str(path)):
            file = Descriptor(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
            fcntl.flock(file.fd, fcntl.LOCK_EX)
            if os.fstat(file.fd).st_nlink:  # else somebody swept it before it was locked
                return temporary, file
            file.close()


def _write_all(fd: int, data: memoryview) -> None:
    if data.nbytes:
        data = data.cast("B")
        while data:
            data = data[os.write(fd, data[:_WRITE]) :]


def _info(key: str, s: os.stat_result) -> Info:
    return Info(key, s.st_size, f"{s.st_size}-{s.st_mtime_ns}-{s.st_ino}", s.st_mtime, changed=s.st_ctime_ns)


def _walk(folder: Path, prefix: str) -> Iterator[Info]:
    entries: list[os.DirEntry[str]] = []
    folders: set[str] = set()
    with suppress(NotFound), explaining("list", str(folder)), os.scandir(folder) as scan:
        entries = [e for e in scan if not e.name.startswith(HIDDEN)]
        folders = {e.name for e in entries if e.is_dir(follow_symlinks=False)}
    for e in sorted(entries, key=lambda e: e.name + "/" * (e.name in folders)):
        if e.name in folders:
            yield from _walk(folder / e.name, f"{prefix}{e.name}/")
            continue
        try:
            found = e.stat()
        except OSError as error:
            if e.is_symlink() or isinstance(error, FileNotFoundError):  # a link to nowhere, or deleted meanwhile
                continue
            with explaining("list", str(folder / e.name)):  # to leave it out would be to say that it is not there
                raise
        if stat.S_ISREG(found.st_mode):
            yield _info(prefix + e.name, found)
