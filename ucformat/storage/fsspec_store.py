"""Any place that fsspec reaches: object stores, remote file systems, archives."""

from __future__ import annotations

import secrets
import threading
from contextlib import contextmanager, nullcontext, suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any

from ucformat.errors import Conflict, IntegrityError, NotFound, Refused, UcformatError
from ucformat.storage.base import HIDDEN, Info, Writer, check_key, check_range, content_version
from ucformat.storage.oserrors import explaining

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from ucformat.storage.base import Bytes

__all__ = ["FsspecStore"]

_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az"}  # what s3fs, gcsfs and adlfs call themselves
_PROCESS = threading.RLock()  # fsspec's memory file system lives in one process and takes no locks
_MODIFIED = ("LastModified", "last_modified", "updated", "mtime", "created")  # as each library calls it
_VERSION = ("ETag", "etag", "md5Hash", "generation", "LastModified", "last_modified", "mtime", "created", "ino", "size")


class FsspecStore:
    """Files under a root that fsspec reaches. Reads are copied once, because fsspec returns bytes.

    Where files appear before they are whole (all but object stores), they are written under a hidden name and moved.
    Put-if-absent is possible on S3, Google and Azure storage and in fsspec's memory, `replace` only in the latter;
    elsewhere they are Refused, because what fsspec offers there is a look followed by a write. A place that speaks S3
    but ignores `If-None-Match` cannot be told apart here.
    """

    def __init__(self, url: str, filesystem: Any = None, **options: Any) -> None:
        import fsspec

        if filesystem is None:
            filesystem, path = fsspec.core.url_to_fs(url, **options)
        else:
            path = filesystem._strip_protocol(url)  # noqa: SLF001 - as url_to_fs does
        self._fs, self._root, self._url = filesystem, path.rstrip("/"), url.rstrip("/")
        names = filesystem.protocol
        protocols = {names} if isinstance(names, str) else set(names)
        self._memory = "memory" in protocols
        self._whole = bool(protocols & _OBJECT_STORES)

    def __reduce__(self) -> tuple[type[FsspecStore], tuple[str, Any]]:
        return FsspecStore, (self._url, self._fs)

    def __repr__(self) -> str:
        return f"FsspecStore({self._url!r})"

    @property
    def url(self) -> str:
        """The url, as it was given."""
        return self._url

    def info(self, key: str) -> Info:
        """Size and version of a file."""
        path = self._path(key)
        with self._asking("read", key):
            self._fs.invalidate_cache(path)
            found = self._fs.info(path)
        if found["type"] == "directory":
            raise NotFound(f"{self._url}/{key} is a folder, not a file")
        return _info(key, found)

    def read(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """Bytes of a file."""
        if nbytes is None:
            if not offset:
                with self._asking("read", key):
                    return bytes(self._fs.cat_file(self._path(key)))
            size = self.info(key).size
            nbytes = size - offset
            check_range(f"{self._url}/{key}", offset, nbytes, size)
        return self._fetch(key, offset, nbytes)

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Copy bytes, fetched in one request, into buffers."""
        data = memoryview(self._fetch(key, offset, sum(b.nbytes for b in buffers)))
        for buffer in buffers:
            if buffer.nbytes:
                buffer.cast("B")[:] = data[: buffer.nbytes]
                data = data[buffer.nbytes :]

    def read_rows(self, key: str, offset: int, step: int, rows: Sequence[memoryview]) -> None:
        """Fill rows one by one."""
        for number, row in enumerate(rows):
            self.read_into(key, offset + number * step, [row])

    def read_versioned(self, key: str) -> tuple[bytes, str]:
        """A whole small file and its content version."""
        data = self.read(key)
        return data, content_version(data)

    def create(self, key: str) -> FsspecWriter:
        """Write a file as a stream."""
        return FsspecWriter(self, key)

    def flush(self) -> None:
        """Do nothing: an object is durable when its upload is closed, and fsspec promises no more elsewhere."""

    def adopt(self, key: str) -> None:
        """See that the file is there."""
        self.info(key)

    def put_if_absent(self, key: str, data: bytes) -> str:
        """Write a whole file by one conditional request, where there is one."""
        path = self._path(key)
        if not (self._whole or self._memory):
            raise Refused(
                f"{self._url} cannot put a file only if it is absent; it can be read, but not committed to",
                hint="write to a local folder or to S3, Google or Azure storage",
            )
        with self._asking("create", key), self._alone():
            self._fs.pipe_file(path, data, mode="create")
        return content_version(data)

    def replace(self, key: str, data: bytes, version: str) -> str:
        """Write a whole file in place of one with this content version, where that can be made one step."""
        path = self._path(key)
        if not self._memory:
            raise Refused(
                f"{self._url} cannot replace a file only if it is unchanged",
                hint="write to a new place instead, and delete this one then",
            )
        with self._asking("write", key), self._alone():
            if not self._fs.isfile(path) or content_version(self._fs.cat_file(path)) != version:
                raise Conflict(
                    f"{self._url}/{key} was changed by somebody else since it was read",
                    hint="read it again, and decide anew what to write",
                )
            self._fs.pipe_file(path, data)
        return content_version(data)

    def list(self, prefix: str = "") -> Iterator[Info]:
        """All files below a folder, in the order of their keys; they are all asked for before the first comes."""
        folder = self._path(prefix) if prefix else self._root
        with self._asking("list", prefix):
            self._fs.invalidate_cache(folder)
            found = self._fs.find(folder, detail=True)
        start = len(self._root) + 1
        shown = (
            (path[start:], file)
            for path, file in found.items()
            if path.startswith(f"{folder}/") and not path.rpartition("/")[2].startswith(HIDDEN)
        )
        return (_info(key, file) for key, file in sorted(shown, key=lambda f: f[0]))

    def delete(self, key: str) -> None:
        """Remove a file."""
        path = self._path(key)
        with suppress(NotFound), self._asking("delete", key), self._alone():
            self._fs.rm_file(path)

    def delete_prefix(self, prefix: str) -> None:
        """Remove a folder and all in it."""
        path = self._path(prefix)
        if set(path) & set("*?["):
            raise Refused(f"{self._url}/{prefix} is not deleted, because fsspec would take it for a pattern")
        with suppress(NotFound), self._asking("delete", prefix), self._alone():
            self._fs.invalidate_cache(path)
            if not self._fs.isfile(path):
                self._fs.rm(path, recursive=True)

    def sweep(self) -> None:
        """Nothing: the file systems behind fsspec do not tell a killed writer from a slow one."""

    def prune(self) -> None:
        """Nothing: most places behind fsspec have no folders."""

    def _path(self, key: str) -> str:
        return f"{self._root}/{check_key(key)}"

    def _alone(self) -> AbstractContextManager[object]:
        return _PROCESS if self._memory else nullcontext()

    @contextmanager
    def _asking(self, action: str, key: str) -> Iterator[None]:
        name = f"{self._url}/{key}"
        with explaining(action, name):
            try:
                yield
            except (UcformatError, OSError):
                raise
            except Exception as error:  # each library behind fsspec has errors of its own
                raise UcformatError(f"cannot {action} {name}: {type(error).__name__}: {error}") from error

    def _fetch(self, key: str, offset: int, nbytes: int) -> bytes:
        path, name = self._path(key), f"{self._url}/{key}"
        check_range(name, offset, nbytes, offset + nbytes)
        if nbytes == 0:
            return b""
        try:
            with self._asking("read", key):
                data: bytes = self._fs.cat_file(path, start=offset, end=offset + nbytes)
        except NotFound:
            raise
        except UcformatError:  # some places fail for a range past the end, others send less
            check_range(name, offset, nbytes, self.info(key).size)
            raise
        if len(data) < nbytes:
            check_range(name, offset, nbytes, self.info(key).size)
        if len(data) != nbytes:
            raise IntegrityError(f"{name}: {nbytes} bytes were asked for and {len(data)} came")
        return data


class FsspecWriter(Writer):
    """A file being written through fsspec."""

    def __init__(self, store: FsspecStore, key: str) -> None:
        self._file: Any = None
        self._store, self._key, self._path = store, key, store._path(key)  # noqa: SLF001 - one thing in two classes
        self._fs, self._whole, self._asking = store._fs, store._whole, store._asking  # noqa: SLF001
        folder = self._path.rpartition("/")[0]
        self._written = self._path if self._whole else f"{folder}/{HIDDEN}{secrets.token_hex(8)}.tmp"
        with self._asking("write", key), store._alone():  # noqa: SLF001
            if not self._whole:
                self._fs.makedirs(folder, exist_ok=True)
            self._file = self._fs.open(self._written, "wb")

    def write(self, data: Bytes) -> None:
        """Append bytes."""
        with self._asking("write", self._key):
            self._file.write(data)

    def close(self) -> None:
        """Finish the upload, or give the file its name."""
        if self._file is None:
            return
        try:
            with self._asking("write", self._key), self._store._alone():  # noqa: SLF001
                self._file.close()
                if not self._whole:
                    self._move()
        except BaseException:
            self.abort()
            raise
        self._file = None

    def _move(self) -> None:
        from fsspec import AbstractFileSystem

        if type(self._fs).mv is AbstractFileSystem.mv:  # it would take names with `*` for patterns
            self._fs.cp_file(self._written, self._path)
            self._fs.rm_file(self._written)
        else:
            self._fs.mv(self._written, self._path)

    def abort(self) -> None:
        """Give up the upload, or remove the hidden file; failing that, it stays without harm."""
        file, self._file = self._file, None
        if file is None:
            return
        with suppress(Exception), self._store._alone():  # noqa: SLF001
            if self._whole:
                file.discard()
            else:
                file.close()
                self._fs.rm_file(self._written)
        if self._whole:
            file.closed = True  # else fsspec would finish the upload when it collects the file

    def __del__(self) -> None:
        self.abort()


def _info(key: str, found: dict[str, Any]) -> Info:
    facts = (found[k] for k in _VERSION if k in found)
    version = "-".join(str(f.timestamp() if isinstance(f, datetime) else f) for f in facts)
    times = (f.timestamp() if isinstance(f, datetime) else f for k in _MODIFIED if (f := found.get(k)) is not None)
    modified = next((float(t) for t in times if isinstance(t, int | float)), None)
    return Info(key, int(found["size"]), version, modified)
