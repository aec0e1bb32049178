"""The storage protocol: reading and writing files under one root URL.

A *key* is a relative path with `/` between its parts (`data/x/c/0`). Keys that are absolute or
empty, or contain `..`, `.`, an empty part, a backslash, a NUL or invalid Unicode are rejected
before any access, so no name read from a checkpoint ever leaves the root.

There are two kinds of version. `Info.version` is cheap (size and time, an ETag, …) and only shows
whether a file changed since another `info`. The version that `read_versioned`, `put_if_absent` and
`replace` return is the hash of the content, `content_version`, which is the same in every store.

A store pickles as its URL, so that a worker process opens its own; it must not be used after a
`fork`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import MutableSequence, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self, runtime_checkable

from ucformat.errors import Conflict, MissingData, NotFound, UnsafeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "ENCODED",
    "HIDDEN",
    "ByteRange",
    "Bytes",
    "Checksums",
    "Costs",
    "FileWriter",
    "FlatStore",
    "Info",
    "RangeReader",
    "Ranges",
    "Store",
    "VersionReader",
    "changed_meanwhile",
    "check_key",
    "check_range",
    "content_version",
    "exists",
    "read_parts",
    "read_ranges",
    "stored_key",
]

#: Data to write or to hash: any contiguous buffer.
Bytes = bytes | bytearray | memoryview

#: The CRC-32C of each of several buffers: a list, or of `ChunkBuffers` an array of type `I`.
Checksums = MutableSequence[int]

#: Prefix of the names of temporary files and locks, which `Store.list` does not return.
HIDDEN = ".ucf-"

# the last are no bytes of a name that is not UTF-8
_UNSAFE = re.compile("[\\\\\0\ud800-\udc7f\udd00-\udfff]")


#: Prefix of the keys of the plain images of encoded files (`format.encoded`); the key of the stored file follows.
ENCODED = f"{HIDDEN}encoded/"


def stored_key(key: str) -> str:
    """The key of the stored file, if a key is that of its plain image; else the same key."""
    return key.replace(ENCODED, "", 1)


class ByteRange(NamedTuple):
    """A range of bytes of a file."""

    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Info:
    """A stored file: its key, size in bytes, and a `version` token that changes whenever its content does.

    `modified` is the time of the last write in seconds since 1970, if the store knows it; object
    stores report whole seconds and an `etag`. `changed` is the time of the last change of content
    or metadata in nanoseconds, if the store knows it.
    """

    key: str
    size: int
    version: str
    modified: float | None = None
    etag: str | None = None
    changed: int | None = None

    def is_same(self, other: Info) -> bool:
        """Whether the file is unchanged since another `info`.

        Listings and single requests report different fields of objects; the fields that both have
        are compared.
        """
        if self.etag and other.etag:
            return (self.size, self.etag.strip('"')) == (other.size, other.etag.strip('"'))
        return (self.size, self.version, self.changed) == (other.size, other.version, other.changed)


@dataclass(frozen=True, slots=True)
class Costs:
    """How requests to a store are best made; sizes are in bytes, the defaults are for local files.

    Attributes:
        gap: maximum gap between rows that are read together, if it is a twentieth of them or they
            are `short`.
        short: rows shorter than this are cheaper to read together with the gaps between them.
        request: maximum size of a request, unless a single chunk is larger.
        join: adjacent requests are joined up to this size if the gap between them is at most a
            hundredth of them.
        block: blocks up to this size are read whole and verified wherever chunks that are read
            whole are.
        parallel: concurrent requests (None: one or two for each core).
        first: concurrent requests with which a read begins; more join while it lasts (None: all at
            once).
        together: ranges of one file that are best requested in one call.
        in_flight: bytes in flight at once (None: reads need no memory but the destination).
    """

    gap: int = 4 << 10
    short: int = 1 << 10
    request: int = 4 << 20
    join: int = 1 << 20
    block: int = 1 << 20
    parallel: int | None = None
    first: int | None = None
    together: int = 1
    in_flight: int | None = None


class FileWriter(Protocol):
    """A file that one thread writes sequentially; it becomes visible under its key, as a whole, on `close`.

    It is durable after the next `Store.flush`. As a context manager, it closes on success and
    aborts on an error.
    """

    def write(self, data: Bytes) -> None:
        """Append bytes; the caller may reuse the buffer after the call."""

    def close(self) -> None:
        """Make the file visible, replacing any existing one; a second call does nothing."""

    def abort(self) -> None:
        """Discard what was written; nothing becomes visible. After `close` it does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()


class Store(Protocol):
    """Files under one root. Safe to use from several threads at once.

    Reading a missing file is NotFound; an operation that the storage forbids is PermissionDenied,
    one that it does not support is UnsupportedError; any other failure of the storage (a full disk,
    a lost connection) is an UcformatError. Each names the file.
    """

    @property
    def url(self) -> str:
        """The URL or path of the root, as a user would write it."""

    @property
    def costs(self) -> Costs:
        """How requests to this store are best made."""

    def info(self, key: str) -> Info:
        """Size and version of a file.

        Raises:
            NotFound: there is no such file.
        """

    def read(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """Read a range of a file into new memory; meant for small reads.

        Args:
            nbytes: number of bytes (None: to the end of the file).

        Raises:
            MissingData: the file ends before the range does.
        """

    def read_into(
        self, key: str, offset: int, buffers: Sequence[memoryview], crcs: Checksums | None = None
    ) -> None:
        """Read a contiguous range of a file into buffers, one after another.

        Args:
            buffers: writable: C-contiguous, or bytes whose last dim is; after an error their
                content is undefined.
            crcs: for each buffer, a CRC-32C that is continued with its bytes, in place (None: none
                is computed).

        Raises:
            MissingData: the file ends before the range does.
        """

    def read_rows(self, key: str, offset: int, step: int, rows: Sequence[memoryview]) -> None:
        """Read many short ranges of a file at regular distances; errors as for `read_into`.

        Args:
            offset: first byte of the first row.
            step: bytes from the beginning of a row to that of the next.
            rows: one writable buffer for each row, as for `read_into`.
        """
        for number, row in enumerate(rows):
            self.read_into(key, offset + number * step, [row])

    def read_versioned(self, key: str) -> tuple[bytes, str]:
        """A whole small file and its content version, for `replace`."""
        data = self.read(key)
        return data, content_version(data)

    def create(self, key: str, unit: int = 1) -> FileWriter:
        """Write a file as a stream; missing parent folders are created.

        Args:
            unit: bytes; storage that uploads in parts uses multiples of this (default: 1).
        """

    def flush(self) -> None:
        """Wait until every file that this store object has closed is durable, with the folders that contain it.

        Deletions are durable then too: a deleted file does not reappear after a power failure. A
        file that could not be made durable raises here, again on every call until it is rewritten
        or deleted.
        """

    def adopt(self, key: str) -> None:
        """Include a file in the next `flush` that another store or process has closed."""

    def put_if_absent(self, key: str, data: bytes) -> str:
        """Write a whole file, durably and atomically, unless it exists; returns its content version.

        Raises:
            Conflict: the file exists.
            Uncertain: it is unknown whether the file was written, or is durable.
        """

    def replace(self, key: str, data: bytes, version: str) -> str:
        """Replace a whole file, durably and atomically, if its content is unchanged; returns the new content version.

        Args:
            version: its content version before.

        Raises:
            Conflict: the file has another content, or does not exist.
            Uncertain: it is unknown whether the file was written, or is durable.
        """

    def list(self, prefix: str = "") -> Iterator[Info]:
        """All files below a folder, in the order of their keys; none if the folder does not exist.

        A file that is written or deleted meanwhile may be listed or not.

        Args:
            prefix: key of the folder (`""`: the root).
        """

    def delete(self, key: str) -> None:
        """Delete a file; a missing file is not an error."""

    def delete_prefix(self, prefix: str) -> None:
        """Delete a folder with all its files, including leftovers of killed writers; a missing folder is not an error.

        Raises:
            UnsafeError: the folder is the root (`""`).
        """

    def sweep(self) -> None:
        """Remove the leftovers of killed writers below the root, and none of live writers."""

    def prune(self, folder: str) -> None:
        """Remove a folder if it is empty.

        Args:
            folder: key of the folder (`""`: the root).
        """


class FlatStore(Store):
    """A store without folders and leftovers, in which closing a file is all that makes it last."""

    def flush(self) -> None:
        """Do nothing: no file has to be made durable."""

    def adopt(self, key: str) -> None:
        """Check that the file exists."""
        self.info(key)

    def sweep(self) -> None:
        """Do nothing: killed writers leave nothing that a listing contains."""

    def prune(self, folder: str) -> None:
        """Do nothing: there are no folders."""


def check_key(key: str) -> str:
    """The key, if it names a file below the root.

    Raises:
        UnsafeError: the key leaves the root, is not valid Unicode, or is reserved for temporary
            files.
    """
    parts = key.split("/")
    if any(p in ("", ".", "..") for p in parts) or _UNSAFE.search(key):
        raise UnsafeError(
            f"the path {key!r} does not stay inside its checkpoint",
            hint="the checkpoint is damaged or malicious; nothing was read or written",
        )
    if any(p.startswith(HIDDEN) for p in parts):
        raise UnsafeError(
            f"the path {key!r} is reserved: names that begin with {HIDDEN!r} are for temporary "
            "files"
        )
    return key


def is_computed(key: str) -> bool:
    """Whether a key is that of a synthetic file, here or in another checkpoint."""
    return f"/{HIDDEN}" in f"/{key}"


def check_range(name: str, offset: int, nbytes: int, size: int) -> None:
    """Check that a file contains a range of bytes.

    Args:
        name: name of the file in the error message.

    Raises:
        MissingData: the file lacks some of the bytes.
    """
    if offset < 0 or nbytes < 0 or (nbytes and offset + nbytes > size):
        raise MissingData(
            f"{name}: bytes {offset} to {offset + max(nbytes, 0)} are needed, but the file has "
            f"{size}",
            hint=(
                "the file is truncated or does not belong to the checkpoint; restore it from a copy"
            ),
        )


def exists(store: Store, key: str) -> bool:
    """Whether a file exists."""
    try:
        store.info(key)
    except NotFound:
        return False
    return True


_PART = 8 << 20  # bytes of a file in memory at once


def read_parts(store: Store, key: str, nbytes: int) -> Iterator[tuple[int, memoryview]]:
    """Read a whole file: the offset and the bytes of each part, all in the same memory."""
    buffer = memoryview(bytearray(min(_PART, nbytes)))
    for at in range(0, nbytes, _PART):
        part = buffer[: min(_PART, nbytes - at)]
        store.read_into(key, at, [part])
        yield at, part


def changed_meanwhile(name: str) -> Conflict:
    """The error of `Store.replace` for a file that has another content."""
    return Conflict(
        f"{name} was changed by another writer since it was read", hint="read it again and retry"
    )


def content_version(data: bytes) -> str:
    """The version of a file with this content."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


#: Ranges of a file in memory that belongs to the store and counts towards its budget until the
#: `with` block ends.
Ranges = AbstractContextManager[Sequence[memoryview]]


@runtime_checkable
class RangeReader(Protocol):
    """A store that lends the memory into which it received bytes, or a wrapper that may contain such a store.

    This saves a copy of bytes that cannot be read directly into the destination, and memory that no
    budget counts.
    """

    def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> Ranges | None:
        """Read ranges of a file, as views for a `with` block; None if the inner store cannot lend memory.

        Args:
            ranges: pairs of offset and size in bytes.
        """


def read_ranges(store: Store, key: str, ranges: Sequence[tuple[int, int]]) -> Ranges | None:
    """Read ranges of a file, as views for a `with` block; None if the store only fills buffers.

    Args:
        ranges: pairs of offset and size in bytes.
    """
    # not `isinstance` for each request: of a protocol it takes 25 µs
    lend: Callable[..., Ranges | None] | None = getattr(store, "read_ranges", None)
    return None if lend is None else lend(key, ranges)


@runtime_checkable
class VersionReader(Protocol):
    """A store whose answer to the request for a file contains the version of the file."""

    def read_with_version(self, key: str) -> tuple[Info, bytes]:
        """Read a whole small file."""
