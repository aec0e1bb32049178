"""The folder of the host cache: its entries, and a bound on its bytes on the disk.

An error of the disk is logged once; then an entry is missing, or is not written, or nobody is
waited for.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import re
import stat
import struct
import time
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ucformat.errors import PermissionDenied, UnsafeError, UnsupportedError
from ucformat.storage.base import Info, Store
from ucformat.storage.local_files import Descriptor
from ucformat.storage.strided import checksum, read_scattered, write_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ucformat.storage.base import Bytes


# What the cache needs of a store.


#: A file and bytes of it, in memory that belongs to the store until the `with` block ends.
InfoAndBytes = AbstractContextManager[tuple[Info, memoryview]]


class VersionedStore(Store, Protocol):
    """A store of which the cache can keep files."""

    @property
    def identity(self) -> str:
        """What distinguishes its files from all others: the URL, and the service that the settings make of it."""

    def read_with_info(
        self, key: str, offset: int, nbytes: int, known: Info | None = None
    ) -> InfoAndBytes:
        """Read a range of a file, and the version of the file that the bytes are of.

        Args:
            known: the version that the file probably has, which was asked for earlier (None:
                unknown).
        """


class Asks(Protocol):
    """A store that knows versions of its files, and asks for the current ones."""

    #: The last known version of each file.
    known: dict[str, Info]

    @property
    def url(self) -> str:
        """The URL of the store."""

    def ask(self, keys: Sequence[str], span: tuple[int, int] | None = None) -> Mapping[str, Info]:
        """Ask for the current version of each of several files; those that do not exist are left out.

        Args:
            span: first byte, and byte after the last, that will be read of them (None: unknown).
                They may be received with the answer.
        """

    def ask_listing(self, patience: float) -> Mapping[str, Info] | None:
        """Ask for the current versions of all files; None if they cannot be listed, or are too many.

        Args:
            patience: seconds to wait for others that read files of the store, and will ask, too.
        """

    def join(self) -> Descriptor | None:
        """Be among those that read files of the store until the descriptor is closed; None if that fails."""

    def has_others(self, joined: Descriptor) -> bool:
        """Whether others read files of the store."""


# Entries of the host cache: files that are read as what they say they are, or not at all.
#
# An entry is named by the hash of its description. Its file holds the content, the CRC-32C of each
# 64 KiB of it, the description, and a CRC-32C of these two. The checksums continue from that of the
# description, so a torn, damaged or exchanged file, or one under another name, counts as missing.
# Therefore nothing has to be synced.

_PAGE = 64 << 10  # bytes of the content that one checksum covers


class CacheEntry:
    """An entry, whether or not there is a file of it."""

    __slots__ = ("_seed", "description", "digest")

    def __init__(self, description: bytes) -> None:
        self.description = description
        self.digest = hashlib.blake2b(description, digest_size=20).digest()
        self._seed = checksum(description)

    @property
    def name(self) -> str:
        """The name of its file."""
        return self.digest.hex()

    def file_size(self, size: int) -> int:
        """Bytes of the file."""
        return size + 4 * -(-size // _PAGE) + len(self.description) + 4

    def content_size(self, file_size: int) -> int:
        """Bytes of the content; negative if no file of the entry has this size."""
        rest = file_size - len(self.description) - 4
        return rest - 4 * -(-rest // (_PAGE + 4))

    def write(self, fd: int, data: Bytes) -> None:
        """Write the file."""
        view = memoryview(data)
        crcs = [checksum(view[at : at + _PAGE], self._seed) for at in range(0, view.nbytes, _PAGE)]
        footer = struct.pack(f"<{len(crcs)}I", *crcs) + self.description
        write_all(fd, view)
        write_all(fd, footer + checksum(footer).to_bytes(4, "little"))

    def read_into(self, fd: int, size: int, begin: int, buffers: Sequence[memoryview]) -> bool:
        """Read a range of the content, and what else the checksums of the range cover.

        Returns:
            whether the file is the entry's, and the checksums match.
        """
        pages = -(-size // _PAGE)
        footer = os.pread(fd, self.file_size(size) - size + 1, size)
        stored, described = footer[:-4], footer[4 * pages : -4]
        if described != self.description or checksum(stored) != int.from_bytes(
            footer[-4:], "little"
        ):
            return False
        end = begin + sum(b.nbytes for b in buffers)
        first, last = begin - begin % _PAGE, min(size, end + -end % _PAGE)
        parts = [memoryview(bytearray(begin - first)), *buffers, memoryview(bytearray(last - end))]
        parts = [part for part in parts if part.nbytes]
        if read_scattered(fd, first, parts) != last - first:
            return False
        crcs: list[int] = []
        room = 0  # bytes that the last page still lacks
        for part in parts:
            while part.nbytes:
                if not room:
                    crcs.append(self._seed)
                    room = _PAGE
                crcs[-1] = checksum(part[:room], crcs[-1])
                part, room = part[room:], max(0, room - part.nbytes)  # noqa: PLW2901
        return tuple(crcs) == struct.unpack_from(f"<{len(crcs)}I", stored, first // _PAGE * 4)


# The file `state` of the cache: the bytes of all files, when answers were last wanted, and locks
# between processes.
#
# Processes lock bytes far beyond its end. The locks belong to open file descriptions, so threads
# exclude each other too, and the kernel releases the locks of a process that is killed.

_STATE_NAME = "state"
_STAMP = struct.Struct("<QQ")  # time in nanoseconds, process id
_STAMPS = 256
STATE_BYTES = 8 + _STAMPS * _STAMP.size  #: of the file
_ACCOUNTS = 1 << 40  # the byte that is locked while files are created, renamed and counted
_MADE = 1 << 41  # the first of those that are locked by whoever makes an entry
_USED = 1 << 42  # the first of those that are locked, together, by those who use an answer

_ACCOUNTS_PATIENCE = 10.0  # seconds to wait for the accounts, which are locked for milliseconds
_PAUSE, _LONGEST_PAUSE = 1e-4, 0.02  # seconds between two tries to lock


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
    while (locked := lock()) is None and time.monotonic() < end:
        time.sleep(pause)
        pause = min(1.5 * pause, _LONGEST_PAUSE)
    return locked


def _set_lock(fd: int, byte: int, kind: int) -> bool:
    try:
        # `struct flock`: its last member, the process id, must be 0 for locks of open files
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", kind, os.SEEK_SET, byte, 1, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def _byte(first: int, entry: CacheEntry) -> int:
    return first + int.from_bytes(entry.digest[:5], "little")


def _stamp(entry: CacheEntry) -> int:
    """The place of an entry's stamp in the file."""
    return 8 + entry.digest[-1] * _STAMP.size


_ALLOCATED = 4 << 10  # file systems allocate multiples of this
_NAME_BYTES = 128  # that the folder may need for the name of a file
_NAME = re.compile(r"[0-9a-f]{40}(\.[0-9a-f]{16}\.tmp)?")
_LOW = 0.95  # of the bound: what entries that are evicted leave
_SMALL = 16 << 20  # bytes of the largest content that is read without knowing its size

_DAMAGED = (errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.ESPIPE)  # of what is not a regular file

_log = logging.getLogger("ucformat")


class Usage(NamedTuple):
    """What a cache holds: the number of its entries, and the bytes of all its files on the disk."""

    entries: int
    nbytes: int


class CacheFolder:
    """A folder that belongs to this user alone; it is created if it is missing."""

    def __init__(self, path: str, limit: int) -> None:
        self.path, self.limit = path, limit
        if not hasattr(fcntl, "F_OFD_SETLK"):
            raise UnsupportedError("a cache needs the file locks of Linux", hint="unset UCP_CACHE")
        self._folder = _open_folder(path)
        self._forgiving = _Forgiving(path)

    def __reduce__(self) -> tuple[type[CacheFolder], tuple[str, int]]:
        return CacheFolder, (self.path, self.limit)

    def _open(self, name: str, flags: int) -> Descriptor:
        flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        return Descriptor(os.open(name, flags, 0o600, dir_fd=self._folder.fd))

    def _remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._folder.fd)

    # --- entries

    def read_into(
        self, entry: CacheEntry, size: int, begin: int, buffers: Sequence[memoryview]
    ) -> bool:
        """Read a range of an entry; False if there is none, or it is damaged and removed."""
        with self._forgiving:
            try:
                file = self._open(entry.name, os.O_RDONLY)
                if entry.read_into(file.fd, size, begin, buffers):
                    _use(file)
                    return True
            except FileNotFoundError:
                return False
            except OSError as error:
                if error.errno not in _DAMAGED:
                    raise
            self._remove(entry.name)
        return False

    def read(self, entry: CacheEntry) -> bytes | None:
        """The content of a small entry; None if there is none, or it is damaged."""
        try:
            status = os.stat(entry.name, dir_fd=self._folder.fd, follow_symlinks=False)
        except OSError:
            return None
        data = bytearray(max(0, min(entry.content_size(status.st_size), _SMALL)))
        return bytes(data) if self.read_into(entry, len(data), 0, [memoryview(data)]) else None

    def holds(self, entry: CacheEntry) -> bool:
        """Whether there is a file of an entry, perhaps a damaged one."""
        try:
            os.stat(entry.name, dir_fd=self._folder.fd, follow_symlinks=False)
        except OSError:
            return False
        return True

    def write(self, entry: CacheEntry, data: Bytes) -> None:
        """Write an entry, in place of an earlier one; those that were not read for longest make room for it."""
        temporary = f"{entry.name}.{os.urandom(8).hex()}.tmp"
        with self._forgiving:
            file = self._create(temporary, entry.file_size(memoryview(data).nbytes))
            if file is None:
                return
            try:
                entry.write(file.fd, data)
                _use(file)
                self._rename(temporary, entry.name)
            finally:
                self._remove(temporary)  # unless it was renamed
                file.close()

    def _rename(self, temporary: str, name: str) -> None:
        """Rename a file while nobody counts, who might miss it or count it twice."""
        with self._accounts() as accounts:
            if accounts is not None:
                before = self._size(name)
                os.rename(temporary, name, src_dir_fd=self._folder.fd, dst_dir_fd=self._folder.fd)
                accounts.total -= before

    def _size(self, name: str) -> int:
        """Bytes on the disk of a file; 0 if there is none."""
        try:
            return _on_disk(os.stat(name, dir_fd=self._folder.fd, follow_symlinks=False))
        except FileNotFoundError:
            return 0

    # --- the bound

    def _create(self, name: str, size: int) -> Descriptor | None:
        """Create a file of its final size, once there is room; None if there never is, or the accounts stay locked.

        It is locked until it is closed, which shows that its writer lives.
        """
        need = _rounded(size)
        with self._accounts() as accounts:
            if accounts is None:
                return None
            if not accounts.total or accounts.total + need > self.limit:
                accounts.total = self._evict(min(self.limit - need, int(_LOW * self.limit)))
            if accounts.total + need > self.limit:
                return None
            file = self._open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            try:
                fcntl.flock(file.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                accounts.total += (
                    need  # before it has the size: after a kill the number is too high
                )
                os.ftruncate(file.fd, size)
            except BaseException:
                self._remove(name)
                raise
            return file

    def _evict(self, most: int) -> int:
        """Remove what killed writers left; if more than `most` bytes remain, also the entries not read for longest."""
        total, entries = _rounded(STATE_BYTES), []
        for name, status in self._scan():
            if name.endswith(".tmp"):
                if self._is_left(name):
                    self._remove(name)
                    continue
            else:
                entries.append((status.st_mtime_ns, name, _on_disk(status)))
            total += _on_disk(status)
        if total > most:
            for _, name, size in sorted(entries):
                self._remove(name)
                total -= size
                if total <= most:
                    break
        return total

    def _scan(self) -> Iterator[tuple[str, os.stat_result]]:
        with os.scandir(self._folder.fd) as entries:
            for entry in entries:
                if _NAME.fullmatch(entry.name) and not entry.is_dir(follow_symlinks=False):
                    with suppress(FileNotFoundError):  # removed meanwhile
                        yield entry.name, entry.stat(follow_symlinks=False)

    def _is_left(self, name: str) -> bool:
        """Whether the writer of a file is dead."""
        try:
            file = self._open(name, os.O_RDONLY)
            fcntl.flock(file.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def usage(self) -> Usage:
        """What it holds."""
        sizes = [_on_disk(status) for _, status in self._scan()]
        return Usage(len(sizes), sum(sizes) + _rounded(STATE_BYTES))

    def clear(self) -> None:
        """Remove all entries; processes that use the cache are not disturbed."""
        with self._accounts() as accounts:
            total = self._evict(0)
            if accounts is not None:
                accounts.total = total

    # --- between processes

    def try_lock(self, entry: CacheEntry) -> Descriptor | None:
        """Lock the making of an entry until the descriptor is closed.

        None if another thread or process has the lock.
        """
        with self._forgiving:
            return self._lock(_byte(_MADE, entry), fcntl.F_WRLCK)
        return Descriptor(-1)  # without a lock

    def lock(self, entry: CacheEntry, patience: float) -> Descriptor | None:
        """Lock the making of an entry, as `try_lock` does, as soon as it is free; None if that takes too long."""
        return patiently(lambda: self.try_lock(entry), patience)

    def join(self, entry: CacheEntry) -> Descriptor | None:
        """Be among those who use an answer until the descriptor is closed.

        None if that is being examined, or fails.
        """
        with self._forgiving:
            return self._lock(_byte(_USED, entry), fcntl.F_RDLCK)
        return None

    def has_others(self, entry: CacheEntry, joined: Descriptor | None = None) -> bool:
        """Whether others use an answer; `joined` is what `join` has returned to the caller."""
        byte = _byte(_USED, entry)
        with self._forgiving:
            if joined is None:
                return self._lock(byte, fcntl.F_WRLCK) is None
            # the only one of those who share a lock can have it alone
            alone = _set_lock(joined.fd, byte, fcntl.F_WRLCK)
            _set_lock(joined.fd, byte, fcntl.F_RDLCK)
            return not alone
        return False

    def wanted(self, entry: CacheEntry) -> tuple[int, int]:
        """When an entry, or one of those with the same stamp, was last wanted, and by which process."""
        with self._forgiving:
            file = self._open_state()
            stamp = os.pread(file.fd, _STAMP.size, _stamp(entry))
            when, pid = _STAMP.unpack(stamp.ljust(_STAMP.size, b"\0"))
            return when, pid
        return 0, 0

    def want(self, entry: CacheEntry, now: int) -> None:
        """Record that this process wants an entry."""
        with self._forgiving:
            file = self._open_state()
            os.pwrite(file.fd, _STAMP.pack(now, os.getpid()), _stamp(entry))

    @contextmanager
    def _accounts(self) -> Iterator[Accounts | None]:
        """Lock the number of bytes, and with it the creation and renaming of files; None if it stays locked."""
        file = patiently(lambda: self._lock(_ACCOUNTS, fcntl.F_WRLCK), _ACCOUNTS_PATIENCE)
        try:
            yield None if file is None else Accounts(file)
        finally:
            if file is not None:
                file.close()

    def _lock(self, byte: int, kind: int) -> Descriptor | None:
        file = self._open_state()
        return file if _set_lock(file.fd, byte, kind) else None

    def _open_state(self) -> Descriptor:
        """Open the file of the state, anew for each lock."""
        return self._open(_STATE_NAME, os.O_RDWR | os.O_CREAT)


class _Forgiving:
    """Logs the first error of the disk in its `with` blocks, and suppresses all."""

    def __init__(self, path: str) -> None:
        self._path, self._failed = path, False

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        if not isinstance(error, OSError):
            return False
        if not self._failed:
            self._failed = True
            _log.warning(
                "the cache %s is not used where its disk fails: %s",
                self._path,
                error.strerror or error,
            )
        return True


def _open_folder(path: str) -> Descriptor:
    hint = "set `cache` (UCP_CACHE) to a folder of your own, or to none"
    try:
        with suppress(FileExistsError):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).mkdir(mode=0o700)
        link = Path(path).lstat()
        folder = Descriptor(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    except OSError as error:
        raise PermissionDenied(
            f"the cache {path} cannot be opened: {error.strerror}", hint=hint
        ) from error
    status, user = os.fstat(folder.fd), os.geteuid()
    if status.st_uid != user:
        raise UnsafeError(
            f"the cache {path} belongs to another user, with number {status.st_uid}", hint=hint
        )
    if stat.S_ISLNK(link.st_mode) and link.st_uid not in (user, 0):
        raise UnsafeError(
            f"the cache {path} is a symbolic link of another user, with number {link.st_uid}",
            hint=hint,
        )
    if status.st_mode & 0o077:
        raise UnsafeError(
            f"the cache {path} has the mode {stat.S_IMODE(status.st_mode):04o}, so others may "
            "read or write there",
            hint=f"if it holds nothing of others: chmod 700 {path}; else {hint}",
        )
    return folder


def _use(file: Descriptor) -> None:
    """Set the time by which entries are evicted; the kernel's own is too coarse to tell them apart."""
    now = time.time_ns()
    os.utime(file.fd, ns=(now, now))


def _rounded(size: int) -> int:
    return size + -size % _ALLOCATED + _NAME_BYTES


def _on_disk(status: os.stat_result) -> int:
    return _rounded(status.st_size)
