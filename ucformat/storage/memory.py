"""Files in the memory of this process, for tests and short-lived data."""

from __future__ import annotations

import itertools
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ucformat.errors import Conflict, NotFound, UnsupportedError, UsageError
from ucformat.storage.base import (
    Costs,
    FileWriter,
    FlatStore,
    Info,
    changed_meanwhile,
    check_key,
    check_range,
    content_version,
)
from ucformat.storage.strided import fill

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ucformat.storage.base import Bytes, Checksums


@dataclass(frozen=True, slots=True)
class _MemoryFile:
    data: Bytes
    version: int
    modified: float = field(default_factory=time.time)

    def info(self, key: str) -> Info:
        return Info(key, len(self.data), str(self.version), self.modified)


_LOCK = threading.Lock()
_FILES: dict[str, _MemoryFile] = {}  # of the whole process, by root and key
_VERSIONS = itertools.count()


class MemoryStore(FlatStore):
    """Files in memory, shared by all stores of one name in this process: `memory://name` or `memory://name/folder`."""

    costs = Costs()

    def __init__(self, name: str) -> None:
        if not name.strip("/"):
            raise UsageError("a memory store needs a name", hint="write memory://NAME")
        self._root = check_key(name.strip("/")) + "/"

    def __reduce__(self) -> tuple[object, ...]:
        raise UnsupportedError(
            f"{self.url} is in the memory of one process",
            hint="use a folder to share files between processes",
        )

    def __repr__(self) -> str:
        return f"MemoryStore({self._root[:-1]!r})"

    @property
    def url(self) -> str:
        """`memory://` and the name."""
        return f"memory://{self._root[:-1]}"

    def info(self, key: str) -> Info:
        """Size and version of a file."""
        return self._get(key).info(key)

    def read(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """Bytes of a file."""
        data = self._get(key).data
        nbytes = len(data) - offset if nbytes is None else nbytes
        check_range(f"{self.url}/{key}", offset, nbytes, len(data))
        return bytes(memoryview(data)[offset : offset + nbytes])

    @contextmanager
    def viewed(self, key: str, offset: int, nbytes: int | None) -> Iterator[memoryview]:
        """Bytes of a file, without a copy; `nbytes` is as for `read`."""
        data = self._get(key).data
        nbytes = len(data) - offset if nbytes is None else nbytes
        check_range(f"{self.url}/{key}", offset, nbytes, len(data))
        with memoryview(data) as whole, whole[offset : offset + nbytes] as view:
            yield view

    def read_into(
        self, key: str, offset: int, buffers: Sequence[memoryview], crcs: Checksums | None = None
    ) -> None:
        """Copy bytes into buffers."""
        data = memoryview(self._get(key).data)
        check_range(f"{self.url}/{key}", offset, sum(b.nbytes for b in buffers), len(data))
        fill(buffers, data[offset:], crcs)

    def create(self, key: str, unit: int = 1) -> MemoryWriter:  # noqa: ARG002 - nothing is uploaded
        """Write a file as a stream."""
        return MemoryWriter(self._root + check_key(key))

    def put_if_absent(self, key: str, data: bytes) -> str:
        """Write a whole file unless it exists."""
        path = self._root + check_key(key)
        with _LOCK:
            if path in _FILES:
                raise Conflict(f"{self.url}/{key} exists already")
            _FILES[path] = _MemoryFile(bytes(data), next(_VERSIONS))
        return content_version(data)

    def replace(self, key: str, data: bytes, version: str) -> str:
        """Replace a whole file if it still has this content version."""
        path = self._root + check_key(key)
        with _LOCK:
            existing = _FILES.get(path)
            if existing is None or content_version(bytes(existing.data)) != version:
                raise changed_meanwhile(f"{self.url}/{key}")
            _FILES[path] = _MemoryFile(bytes(data), next(_VERSIONS))
        return content_version(data)

    def list(self, prefix: str = "") -> Iterator[Info]:
        """All files below a folder, in the order of their keys."""
        folder = f"{self._root}{check_key(prefix)}/" if prefix else self._root
        with _LOCK:
            files = sorted((path, file) for path, file in _FILES.items() if path.startswith(folder))
        return (file.info(path[len(self._root) :]) for path, file in files)

    def delete(self, key: str) -> None:
        """Remove a file."""
        with _LOCK:
            _FILES.pop(self._root + check_key(key), None)

    def delete_prefix(self, prefix: str) -> None:
        """Remove a folder and all in it."""
        folder = f"{self._root}{check_key(prefix)}/"
        with _LOCK:
            for path in [p for p in _FILES if p.startswith(folder)]:
                del _FILES[path]

    def _get(self, key: str) -> _MemoryFile:
        with _LOCK:
            file = _FILES.get(self._root + check_key(key))
        if file is None:
            raise NotFound(f"{self.url}/{key} does not exist")
        return file


class MemoryWriter(FileWriter):
    """A file of a MemoryStore that is being written."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._data: bytearray | None = bytearray()

    def write(self, data: Bytes) -> None:
        """Append bytes."""
        if self._data is None:
            raise ValueError("the writer is closed")
        self._data += data

    def close(self) -> None:
        """Make the file visible."""
        if self._data is not None:
            with _LOCK:
                _FILES[self._path] = _MemoryFile(self._data, next(_VERSIONS))
        self._data = None

    def abort(self) -> None:
        """Discard what was written."""
        self._data = None


def open_memory(url: str) -> MemoryStore:
    """Open the files in the memory of this process that a `memory://` URL names."""
    return MemoryStore(url.partition("://")[2])
