"""Read-only access to any storage that fsspec supports and obstore does not: remote file systems, hubs, archives."""

from __future__ import annotations

import json
from contextlib import contextmanager
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import urljoin, urlsplit

from ucformat.errors import Conflict, IntegrityError, NotFound, UcformatError, UnsupportedError
from ucformat.redacted import learn, named_secrets, redacted, secrets_in
from ucformat.storage.base import HIDDEN, Checksums, Costs, FlatStore, Info, check_key, check_range
from ucformat.storage.clouds import service
from ucformat.storage.error_mapping import mapping_os_errors
from ucformat.storage.strided import fill

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_TRIES = 5  # before reading a file that is rewritten again and again is given up
# replaces the file's own name, which contains no secret, while secrets are removed
_NAME = "\ue000"

#: Headers that contain no secret.
_PLAIN = frozenset(
    {"accept", "accept-encoding", "if-match", "if-none-match", "range", "user-agent"}
)

# names used by the libraries
_MODIFIED = ("LastModified", "last_modified", "updated", "mtime", "created")
_VERSION = (
    "ETag",
    "etag",
    "md5Hash",
    "generation",
    "LastModified",
    "last_modified",
    "mtime",
    "created",
    "ino",
    "size",
)


class FsspecStore(FlatStore):
    """Files under a root that fsspec supports, read-only. They are copied once, because fsspec returns bytes.

    Writing is UnsupportedError: fsspec cannot put a file atomically only if it is absent.
    """

    costs = Costs(gap=256 << 10, short=32 << 10, request=8 << 20, join=8 << 20, parallel=16)

    def __init__(self, url: str, filesystem: Any = None, **options: Any) -> None:
        import fsspec

        if filesystem is None:
            filesystem, path = fsspec.core.url_to_fs(url, **_over_http(url, options))
        else:
            path = filesystem._strip_protocol(url)  # noqa: SLF001 - as url_to_fs does
        learn(*named_secrets(getattr(filesystem, "storage_options", {})))
        self._fs, self._root, self._url = filesystem, path.rstrip("/"), url.rstrip("/")

    def __reduce__(self) -> tuple[type[FsspecStore], tuple[str, Any]]:
        return FsspecStore, (self._url, self._fs)

    def __repr__(self) -> str:
        return f"FsspecStore({self._url!r})"

    @property
    def url(self) -> str:
        """The URL, as it was given."""
        return self._url

    def info(self, key: str) -> Info:
        """Size and version of a file."""
        path = self._path(key)
        entry = self._call("read", key, lambda: _info_of(self._fs, path))
        if entry["type"] == "directory":
            raise NotFound(f"{self._url}/{key} is a folder, not a file")
        return _info(key, entry)

    def read(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """Bytes of a file."""
        if nbytes is None:
            if not offset:
                path = self._path(key)
                return bytes(self._call("read", key, lambda: self._fs.cat_file(path)))
            size = self.info(key).size
            nbytes = size - offset
            check_range(f"{self._url}/{key}", offset, nbytes, size)
        return self._fetch(key, offset, nbytes)

    def read_into(
        self, key: str, offset: int, buffers: Sequence[memoryview], crcs: Checksums | None = None
    ) -> None:
        """Copy bytes, fetched in one request, into buffers."""
        data = memoryview(self._fetch(key, offset, sum(b.nbytes for b in buffers)))
        fill(buffers, data, crcs)

    @cached_property
    def identity(self) -> str:
        """See VersionedStore."""
        options = getattr(self._fs, "storage_options", {})
        text = json.dumps(options, sort_keys=True, default=lambda value: type(value).__qualname__)
        return f"{self._url} {service(type(self._fs).__qualname__, text)}"

    @contextmanager
    def read_with_info(
        self, key: str, offset: int, nbytes: int, known: Info | None = None
    ) -> Iterator[tuple[Info, memoryview]]:
        """See VersionedStore: fsspec returns bytes without a version, so it is compared with the one afterwards."""
        before = known or self.info(key)
        for _ in range(_TRIES):
            if offset >= before.size:
                check_range(f"{self._url}/{key}", offset, 1, before.size)
            data = self._fetch(key, offset, min(nbytes, before.size - offset))
            after = self.info(key)
            if after.is_same(before):
                yield after, memoryview(data)
                return
            before = after
        raise Conflict(
            f"{self._url}/{key} is rewritten again and again",
            hint="retry when nothing writes there",
        )

    def create(self, key: str, unit: int = 1) -> NoReturn:  # noqa: ARG002 - see Store
        """UnsupportedError."""
        raise self._read_only(key)

    def put_if_absent(self, key: str, data: bytes) -> NoReturn:  # noqa: ARG002 - see Store
        """UnsupportedError."""
        raise self._read_only(key)

    def replace(self, key: str, data: bytes, version: str) -> NoReturn:  # noqa: ARG002 - see Store
        """UnsupportedError."""
        raise self._read_only(key)

    def list(self, prefix: str = "") -> Iterator[Info]:
        """All files below a folder, in the order of their keys; all are requested before the first is returned."""
        folder = self._path(prefix) if prefix else self._root
        entries = self._call("list", prefix, lambda: _find(self._fs, folder))
        start = len(self._root) + 1
        shown = (
            (path[start:], file)
            for path, file in entries.items()
            if path.startswith(f"{folder}/") and not path.rpartition("/")[2].startswith(HIDDEN)
        )
        return (_info(key, file) for key, file in sorted(shown, key=lambda f: f[0]))

    def delete(self, key: str) -> NoReturn:
        """UnsupportedError."""
        raise self._read_only(key)

    def delete_prefix(self, prefix: str) -> NoReturn:
        """UnsupportedError."""
        raise self._read_only(prefix)

    def _read_only(self, key: str) -> UnsupportedError:
        check_key(key)
        return UnsupportedError(
            f"{self._url} can be read, but not written to: it cannot put a file only if it is "
            "absent, so "
            "concurrent commits would not be detected",
            hint="write to a local folder, or to S3, Google or Azure storage",
        )

    def _path(self, key: str) -> str:
        return f"{self._root}/{check_key(key)}"

    def _call(self, action: str, key: str, call: Callable[[], Any]) -> Any:
        """The result of `call`; its error is not chained, because messages of libraries may contain secrets."""
        name = f"{self._url}/{key}"
        try:
            with mapping_os_errors(action, name):
                return call()
        except UcformatError as error:
            kind, message, hint = type(error), error.message, error.hint
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - each library behind fsspec raises its own
            kind, message, hint = (
                UcformatError,
                f"cannot {action} {name}: {type(error).__name__}: {error}",
                None,
            )
        text = redacted(
            message.replace(name, _NAME), secrets_in(getattr(self._fs, "storage_options", {}))
        )
        raise kind(text.replace(_NAME, name), hint=hint) from None

    def _fetch(self, key: str, offset: int, nbytes: int) -> bytes:
        path, name = self._path(key), f"{self._url}/{key}"
        # only that they are not negative: the size of the file is not known yet
        check_range(name, offset, nbytes, offset + nbytes)
        if nbytes == 0:
            return b""
        try:
            data: bytes = self._call(
                "read", key, lambda: self._fs.cat_file(path, start=offset, end=offset + nbytes)
            )
        except NotFound:
            raise
        # some libraries fail for a range past the end, others return less
        except (UcformatError, MemoryError):
            check_range(name, offset, nbytes, self.info(key).size)
            raise
        if len(data) < nbytes:
            check_range(name, offset, nbytes, self.info(key).size)
        if len(data) != nbytes:
            raise IntegrityError(
                f"{name}: {nbytes} bytes were requested, but {len(data)} were received"
            )
        return data


def _over_http(url: str, options: dict[str, Any]) -> dict[str, Any]:
    """Options with which fsspec uses our HTTP clients, also in a chain."""
    schemes = {
        scheme
        for part in url.split("::")
        if (scheme := part.partition("://")[0].lower()) in ("http", "https")
    }
    return {**options, **{s: {"get_client": _client, **options.get(s, {})} for s in schemes}}


async def _client(**options: Any) -> Any:
    """An HTTP client that removes all headers that may be secret when it is redirected to another host.

    aiohttp does so for `Authorization` and cookies, not for others that a user's fsspec
    configuration sets.
    """
    import aiohttp

    async def remove_headers(
        _session: object, _context: object, params: aiohttp.TraceRequestRedirectParams
    ) -> None:
        answer, here = params.response.headers, str(params.url)
        there = urljoin(here, answer.get("Location") or answer.get("URI") or "")
        if urlsplit(there).hostname != urlsplit(here).hostname:
            for name in {*params.headers.keys()}:
                if name.lower() not in _PLAIN:
                    params.headers.popall(name)

    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(remove_headers)
    return aiohttp.ClientSession(**options, trace_configs=[trace])


def _info_of(fs: Any, path: str) -> dict[str, Any]:
    fs.invalidate_cache(path)
    entry: dict[str, Any] = fs.info(path)
    return entry


def _find(fs: Any, folder: str) -> dict[str, Any]:
    """All files below a folder, by path. fsspec's own `find` omits folders that it fails to list."""
    fs.invalidate_cache()
    entries, folders = {}, [folder]
    while folders:
        at = folders.pop()
        try:
            listed = fs.ls(at, detail=True)
        except (FileNotFoundError, NotADirectoryError):  # removed meanwhile
            continue
        for entry in listed:
            path = entry["name"].rstrip("/")
            if entry["type"] != "directory":
                entries[path] = entry
            elif path != at.rstrip("/"):
                folders.append(path)
    return entries


def _info(key: str, entry: dict[str, Any]) -> Info:
    parts = (entry[k] for k in _VERSION if k in entry)
    version = "-".join(str(f.timestamp() if isinstance(f, datetime) else f) for f in parts)
    times = (
        f.timestamp() if isinstance(f, datetime) else f
        for k in _MODIFIED
        if (f := entry.get(k)) is not None
    )
    modified = next((float(t) for t in times if isinstance(t, int | float)), None)
    etag = entry.get("ETag") or entry.get("etag")
    return Info(key, int(entry["size"]), version, modified, str(etag) if etag else None)
