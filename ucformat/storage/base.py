"""The storage protocol: what every back end does with bytes under one root url.

A *key* is a relative path with `/` between its parts (`data/x/c/0`). Keys that are absolute, empty, or hold `..`, `.`,
an empty part, a backslash, a NUL or what is not Unicode are refused before anything is touched, so no name read from a
checkpoint ever leaves the root.

There are two kinds of version. `Info.version` is cheap (size and time, an ETag, …) and only good for seeing that a file
changed since another `info`. The version that `read_versioned`, `put_if_absent` and `replace` return is the hash of the
content, `content_version`, the same in every store.

A store pickles as its url, so that a worker process opens its own; it is not carried over a `fork`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self, runtime_checkable

from ucformat.errors import MissingData, NotFound, UnsafeError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

__all__ = [
    "HIDDEN",
    "ByteRange",
    "Bytes",
    "Costs",
    "Info",
    "RangeReader",
    "Ranges",
    "Store",
    "Writer",
    "check_key",
    "check_range",
    "content_version",
    "exists",
    "read_ranges",
]

#: What reads fill and writes take: any contiguous buffer.
Bytes = bytes | bytearray | memoryview

#: How the names of temporary files and locks begin, which `Store.list` does not show.
HIDDEN = ".ucf-"


class ByteRange(NamedTuple):
    """A range of a file, in bytes."""

    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Info:
    """A stored file: its key, size in bytes, and a `version` token that changes whenever its content does.

    `modified` is when, in seconds since 1970, where the place tells; an object store tells full seconds and an `etag`.
    `changed` is when anything of it was last changed, its names and rights too, in nanoseconds, where the place tells.
    """

    key: str
    size: int
    version: str
    modified: float | None = None
    etag: str | None = None
    changed: int | None = None

    def is_same(self, other: Info) -> bool:
        """Whether the file is still the one of another `info`; a list and a look tell different things of objects."""
        if self.etag and other.etag:
            return (self.size, self.etag.strip('"')) == (other.size, other.etag.strip('"'))
        return (self.size, self.version, self.changed) == (other.size, other.version, other.changed)


@dataclass(frozen=True, slots=True)
class Costs:
    """How requests are best made to a place, in bytes; the defaults are for local files.

    Attributes:
        gap: rows of one tensor are read as one where the gap between them is at most this, and at most a twentieth of
            them, or they are shorter than `short`.
        short: rows so short that asking for each would cost more.
        request: no request is longer, unless a single chunk is.
        join: neighbouring requests are joined, to at most this, where the gap between them is at most a hundredth of
            them.
        block: where chunks that are read whole are checked, so is every block of at most this: it is read whole.
        parallel: requests at once (None: one or two for each core).
        together: how many ranges of one file are best asked for in one call.
        in_flight: bytes in flight at once; None where nothing is held in memory but what was asked for.
    """

    gap: int = 4 << 10
    short: int = 1 << 10
    request: int = 4 << 20
    join: int = 1 << 20
    block: int = 1 << 20
    parallel: int | None = None
    together: int = 1
    in_flight: int | None = None


class Writer(Protocol):
    """A file being written front to back, by one thread; it is seen under its key only after `close`, and whole.

    It is durable after the next `Store.flush`. As a context manager, it closes on success and aborts on an error.
    """

    def write(self, data: Bytes) -> None:
        """Append these bytes; they may be reused by the caller when this returns."""

    def close(self) -> None:
        """Make the file visible, replacing what stood there; a second call does nothing."""

    def abort(self) -> None:
        """Drop what was written; nothing becomes visible. After `close` it does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()


class Store(Protocol):
    """Bytes under one root. Safe to use from several threads at once.

    Reading what is not there is NotFound; what this place does not allow is PermissionDenied, what it cannot do is
    UnsupportedError; any other failure of the place (a full disk, a lost connection) is an UcformatError. Each names
    the file.
    """

    @property
    def url(self) -> str:
        """The root, as the user would write it."""

    @property
    def costs(self) -> Costs:
        """How requests are best made here."""

    def info(self, key: str) -> Info:
        """Size and version of a file; NotFound where there is none."""

    def read(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """Bytes `offset … offset + nbytes` of a file (to its end where None): for small things.

        MissingData where the file ends before.
        """

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill `buffers` one after another with the bytes from `offset` on; MissingData where the file is too short.

        Buffers are writable and C-contiguous, of any item type. After an error their content is undefined.
        """

    def read_rows(self, key: str, offset: int, step: int, rows: Sequence[memoryview]) -> None:
        """Fill each of many short rows: number `k` with the bytes from `offset + k * step` on; else as `read_into`."""

    def read_versioned(self, key: str) -> tuple[bytes, str]:
        """A whole small file and its content version, which `replace` wants to see."""

    def create(self, key: str, unit: int = 1) -> Writer:
        """Write a file as a stream, and the folders above it; where it is sent in parts, in parts of whole units."""

    def flush(self) -> None:
        """Return when every file that this store object has closed is durable, and the folders that name it.

        What it has deleted is then gone for good, too: after a power failure it does not come back.
        A file that could not be made durable raises here, again on every call until it is written anew or deleted.
        """

    def adopt(self, key: str) -> None:
        """Let the next `flush` cover this file too, which another store object or an earlier process has closed."""

    def put_if_absent(self, key: str, data: bytes) -> str:
        """Write a whole file, durably and atomically, unless one is there (Conflict); its content version.

        Uncertain where nothing tells whether it was written, or will last.
        """

    def replace(self, key: str, data: bytes, version: str) -> str:
        """Write a whole file, durably and atomically, in place of one with this content version, else Conflict.

        Returns the new content version. Uncertain as for `put_if_absent`.
        """

    def list(self, prefix: str = "") -> Iterator[Info]:
        """All files below a folder (`""`: the root), in the order of their keys; none where there is no such folder.

        A file that comes or goes meanwhile may be listed or not.
        """

    def delete(self, key: str) -> None:
        """Remove a file; one that is already gone counts as removed."""

    def delete_prefix(self, prefix: str) -> None:
        """Remove a folder and all in it, leftovers of killed writers too; what is already gone counts as removed.

        The root itself (`""`) is UnsafeError.
        """

    def sweep(self) -> None:
        """Remove what killed writers left below the root, and nothing of those that live."""

    def prune(self, folder: str) -> None:
        """Remove a folder (`""`: the root) that holds nothing: for one who writes no more to it."""


def check_key(key: str) -> str:
    """The key, where it names something below the root; else UnsafeError."""
    parts = key.split("/")
    if any(p in ("", ".", "..") for p in parts) or "\\" in key or "\0" in key or not _encodable(key):
        raise UnsafeError(
            f"the path {key!r} does not stay inside its checkpoint",
            hint="the checkpoint is damaged or was made to do harm; nothing was read or written",
        )
    if any(p.startswith(HIDDEN) for p in parts):
        raise UnsafeError(
            f"the path {key!r} is not to be used: names that begin with {HIDDEN!r} are for temporary files"
        )
    return key


def _encodable(key: str) -> bool:
    try:
        key.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


def check_range(name: str, offset: int, nbytes: int, size: int) -> None:
    """MissingData where a file of this size, named so in the message, lacks some of `nbytes` bytes from `offset` on."""
    if offset < 0 or nbytes < 0 or (nbytes and offset + nbytes > size):
        raise MissingData(
            f"{name}: bytes {offset} to {offset + max(nbytes, 0)} are wanted, but the file has {size}",
            hint="the file is truncated or another one than the checkpoint was made with; restore it from a copy",
        )


def exists(store: Store, key: str) -> bool:
    """Whether there is a file of this key."""
    try:
        store.info(key)
    except NotFound:
        return False
    return True


def content_version(data: bytes) -> str:
    """The version of a file with this content."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


#: Ranges of a file in memory of the store's, which counts towards its budget until the `with` block ends.
Ranges = AbstractContextManager[Sequence[memoryview]]


@runtime_checkable
class RangeReader(Protocol):
    """A store that gives out the memory in which it got bytes, or a wrapper that may be around one.

    It saves a copy of bytes that cannot go straight into the destination's memory, and memory that no budget counts.
    """

    def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> Ranges | None:
        """Read ranges of a file, (offset, bytes), for a `with` block; None where the store inside cannot."""


def read_ranges(store: Store, key: str, ranges: Sequence[tuple[int, int]]) -> Ranges | None:
    """Read ranges of a file, (offset, bytes), for a `with` block; None where this store only fills buffers."""
    return store.read_ranges(key, ranges) if isinstance(store, RangeReader) else None
