"""Files in an object store: S3, Google or Azure, or read-only any server of plain HTTP."""

from __future__ import annotations

import math
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ucformat.errors import (
    Conflict,
    IntegrityError,
    NotFound,
    PermissionDenied,
    UcformatError,
    UnsupportedError,
)
from ucformat.settings import load_settings
from ucformat.storage import strided
from ucformat.storage.base import (
    HIDDEN,
    Checksums,
    Costs,
    FlatStore,
    Info,
    changed_meanwhile,
    check_key,
    check_range,
    content_version,
)
from ucformat.storage.clouds import Options, boto_client, parse, service, shared_connection
from ucformat.storage.concurrency import RequestBudget, grouped
from ucformat.storage.error_mapping import map_object_error, retry
from ucformat.storage.upload import ObjectWriter, put_on_condition

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from obstore.store import ObjectStore as Client

    from ucformat.storage.base import Bytes
    from ucformat.storage.clouds import Connection, UrlParts


# Multipart uploads to S3 of which several processes put parts, through boto3: obstore has no call
# for a single part.
#
# One process begins an upload, and tells its id to the others; when all parts are there it
# completes the upload. Nothing is visible before, and an upload that is neither completed nor
# aborted stays invisible.


_DENIED = {401, 403}


class Multipart:
    """Uploads to a bucket. Safe to use from several threads at once."""

    def __init__(self, client: Any, place: UrlParts) -> None:
        self._client, self._place = client, place

    def begin(self, key: str) -> str:
        """Begin an upload, and return its id."""
        return str(self._request("write", "create_multipart_upload", key)["UploadId"])

    def put(self, key: str, upload: str, number: int, data: Bytes) -> str:
        """Put a part, replacing any existing one, and return its ETag.

        Args:
            data: at least 5 MiB, except of the last part.
        """
        part = {"UploadId": upload, "PartNumber": number + 1, "Body": bytes(data)}
        return str(self._request("write", "upload_part", key, **part)["ETag"])

    def complete(self, key: str, upload: str, etags: Sequence[str], nbytes: int) -> None:
        """Make the object visible."""
        parts = {"Parts": [{"PartNumber": n, "ETag": tag} for n, tag in enumerate(etags, 1)]}
        try:
            self._request(
                "write", "complete_multipart_upload", key, UploadId=upload, MultipartUpload=parts
            )
        except UcformatError:
            if self._size(key) != nbytes:  # else only the answer was lost
                raise
        if (size := self._size(key)) != nbytes:
            raise UcformatError(
                f"{self._name(key)} has {size} bytes instead of {nbytes}", hint="save again"
            )

    def abort(self, key: str, upload: str) -> None:
        """Discard an upload and its parts."""
        self._request("delete", "abort_multipart_upload", key, UploadId=upload)

    def _size(self, key: str) -> int | None:
        """The size of an object; None if there is none."""
        try:
            return int(self._request("read", "head_object", key)["ContentLength"])
        except NotFound:
            return None

    def _of(self, key: str) -> dict[str, str]:
        prefix = self._place.prefix
        return {
            "Bucket": self._place.bucket,
            "Key": f"{prefix}/{check_key(key)}" if prefix else check_key(key),
        }

    def _name(self, key: str) -> str:
        return f"{self._place.root}/{key}"

    def _request(self, action: str, call: str, key: str, **arguments: Any) -> Any:
        """The answer to a request; an error shows nothing of an answer but its code and message."""
        from botocore.exceptions import ClientError

        try:
            return getattr(self._client, call)(**self._of(key), **arguments)
        except ClientError as error:
            answer, status = (
                error.response.get("Error", {}),
                error.response["ResponseMetadata"].get("HTTPStatusCode"),
            )
            why = f"{answer.get('Code', '')}: {answer.get('Message', '')}"[:200]
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - botocore raises many
            status, why = None, type(error).__name__
        if status == 404 and action == "read":
            raise NotFound(f"{self._name(key)} does not exist")
        failed = f"cannot {action} {self._name(key)}: {why}"
        if status in _DENIED:
            raise PermissionDenied(
                failed, hint="check the credentials that boto3 finds, and their permissions"
            )
        raise UcformatError(failed, hint="`ucp doctor URL` reports what the storage supports")


#: The budget that the reads of all object stores of this process share.
BUDGET = RequestBudget(requests=128, nbytes=256 << 20)

_COSTS = Costs(gap=256 << 10, short=32 << 10, request=8 << 20, join=8 << 20, together=10)
_THREADS = 32  # that wait for answers; more do not pay off
_FIRST = 8  # of them, of a store that answers at once: each needs fresh memory for what it receives
_THREADS_PER_SECOND = 1600  # more of them at first, by seconds until an answer begins
_PAGE = 1000  # keys that one request lists or deletes


class ObjectStore(FlatStore):
    """The objects below a prefix of a bucket.

    An object becomes visible as a whole and durable when its upload is closed. Each put carries a
    write id, so that a writer that finds its object already there knows that only the answer to its
    own request was lost.
    """

    def __init__(self, url: str, options: Options = Options()) -> None:  # noqa: B008 - it is immutable
        self._place, self._options = parse(url), options
        # clients are of a bucket, except those of plain HTTP
        folder = "" if self._place.cloud == "http" else self._place.prefix
        self._prefix = f"{folder}/" if folder else ""
        self._connected: Connection | None = None
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[ObjectStore], tuple[str, Options]]:
        return ObjectStore, (self.url, self._options)

    def __repr__(self) -> str:
        return f"ObjectStore({self.url!r})"

    @property
    def url(self) -> str:
        """The URL, without a trailing slash."""
        return self._place.root

    @property
    def costs(self) -> Costs:
        """The costs with the current limits of the budget, and the latency that was measured."""
        parallel = min(_THREADS, BUDGET.requests)
        latency = self._connected.latency if self._connected else math.inf
        first = int(min(parallel, _FIRST + _THREADS_PER_SECOND * latency))
        return replace(_COSTS, parallel=parallel, first=first, in_flight=BUDGET.nbytes)

    @property
    def _connection(self) -> Connection:
        with self._lock:
            if self._connected is None:
                try:
                    self._connected = shared_connection(self._place, self._options)
                except MemoryError:
                    raise
                except Exception as error:  # noqa: BLE001 - a configuration that obstore rejects
                    failure = (
                        error
                        if isinstance(error, UcformatError)
                        else map_object_error(error, "open", self.url)
                    )
                if self._connected is None:
                    raise failure from None  # outside, or the library's error would be its context
            return self._connected

    # --- reading

    def info(self, key: str) -> Info:
        """Size and version of an object."""
        check_key(key)
        with BUDGET.take(1, 0):
            return self._head(key)

    def _head(self, key: str) -> Info:
        import obstore

        path = self._path(key)
        return self._info(self._request("read", key, lambda client: obstore.head(client, path)))

    def read(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """Bytes of an object; small ranges take one request."""
        check_key(key)
        if nbytes is None and offset == 0:
            return self.read_with_version(key)[1]
        if nbytes is None or nbytes > _COSTS.request:  # check the size before allocating memory
            size = self.info(key).size
            nbytes = size - offset if nbytes is None else nbytes
            check_range(self._name(key), offset, nbytes, size)
        check_range(self._name(key), offset, nbytes, offset + nbytes)
        out = bytearray(nbytes)
        self.read_into(key, offset, [memoryview(out)])
        return bytes(out)

    def read_with_version(self, key: str) -> tuple[Info, bytes]:
        """See VersionReader."""
        import obstore

        path = self._path(check_key(key))

        def fetch(client: Client) -> tuple[Info, bytes]:
            answer = obstore.get(client, path)
            return self._info(answer.meta), bytes(answer.bytes())

        whole: tuple[Info, bytes] = self._request("read", key, fetch)
        return whole

    def read_into(
        self, key: str, offset: int, buffers: Sequence[memoryview], crcs: Checksums | None = None
    ) -> None:
        """Fill buffers with requests of at most `costs.request` bytes; obstore's own buffers are copied once."""
        check_key(key)
        remaining = [row for b in buffers if b.nbytes for row in strided.rows(b)][::-1]
        end = offset + sum(b.nbytes for b in remaining)
        check_range(self._name(key), offset, end - offset, end)
        while offset < end:
            nbytes = min(_COSTS.request, end - offset)
            with self.read_ranges(key, [(offset, nbytes)]) as (data,):
                _scatter(data, remaining)
            offset += nbytes
        strided.extend(crcs, buffers)

    def read_rows(self, key: str, offset: int, step: int, rows: Sequence[memoryview]) -> None:
        """Fill rows, several with each request."""
        check_key(key)
        wanted = [(offset + k * step, row.cast("B")) for k, row in enumerate(rows) if row.nbytes]
        for group in grouped(wanted, lambda row: row[1].nbytes, _COSTS.request):
            with self.read_ranges(key, [(begin, row.nbytes) for begin, row in group]) as views:
                for (_, row), data in zip(group, views, strict=True):
                    row[:] = data

    @contextmanager
    def read_ranges(
        self, key: str, ranges: Sequence[tuple[int, int]]
    ) -> Iterator[Sequence[memoryview]]:
        """See RangeReader; the bytes of the ranges count as in flight until the block ends."""
        import obstore

        check_key(key)
        for begin, nbytes in ranges:
            check_range(self._name(key), begin, nbytes, begin + nbytes)
        per_call = min(_COSTS.together, BUDGET.requests)  # as many as obstore requests at once
        path = self._path(key)

        def fetch(client: Client) -> list[Any]:
            if len(ranges) == 1:
                return [obstore.get_range(client, path, start=ranges[0][0], length=ranges[0][1])]
            answers: list[Any] = []
            for i in range(0, len(ranges), per_call):
                starts, lengths = zip(*ranges[i : i + per_call], strict=True)
                answers += obstore.get_ranges(
                    client, path, starts=starts, lengths=lengths, coalesce=0
                )
            return answers

        with BUDGET.take(min(per_call, len(ranges)), sum(n for _, n in ranges)):
            with self._checking(key, ranges):
                answers = self._request("read", key, fetch)
                views = [_of_size(data, n) for data, (_, n) in zip(answers, ranges, strict=True)]
            yield views

    @cached_property
    def identity(self) -> str:
        """See VersionedStore."""
        return f"{self.url} {service(self._options.endpoint, self._options.region)}"

    @contextmanager
    def read_with_info(
        self,
        key: str,
        offset: int,
        nbytes: int,
        known: Info | None = None,  # noqa: ARG002 - answers contain it
    ) -> Iterator[tuple[Info, memoryview]]:
        """See VersionedStore; the bytes count as in flight until the block ends."""
        import obstore

        path = self._path(check_key(key))

        def fetch(client: Client) -> tuple[Info, Any]:
            answer = obstore.get(client, path, options={"range": (offset, offset + nbytes)})
            return self._info(answer.meta), answer.bytes()

        with BUDGET.take(1, nbytes):
            info, data = self._request("read", key, fetch)
            yield info, _of_size(data, min(nbytes, info.size - offset))

    @contextmanager
    def _checking(self, key: str, ranges: Sequence[tuple[int, int]]) -> Iterator[None]:
        """Raise MissingData if the object is too short, for which stores return various errors."""
        try:
            yield
        except NotFound:
            raise
        except UcformatError:
            size = self._head(key).size  # of a request that has its place in the budget
            for begin, nbytes in ranges:
                check_range(self._name(key), begin, nbytes, size)
            raise

    def list(self, prefix: str = "") -> Iterator[Info]:
        """All objects below a prefix, in order of their keys; a request returns a thousand."""
        infos = (self._info(meta) for page in self._pages(prefix) for meta in page)
        return (i for i in infos if not i.key.rpartition("/")[2].startswith(HIDDEN))

    def _pages(self, prefix: str) -> Iterator[Sequence[Any]]:
        folder = self._path(check_key(prefix)) if prefix else self._prefix.rstrip("/") or None
        if self._place.cloud == "http":
            raise UnsupportedError(
                f"{self._name(prefix)} cannot be listed: plain HTTP has no folders",
                hint="open a universal checkpoint, or a single file by its name",
            )
        return self._each_page(prefix, folder)

    def _each_page(self, prefix: str, folder: str | None) -> Iterator[Sequence[Any]]:
        import obstore

        stream: Any = None
        last = None

        def next_page(client: Client) -> Any:
            nonlocal stream
            stream = stream or obstore.list(client, folder, offset=last, chunk_size=_PAGE)
            try:
                return next(stream, None)
            except Exception:
                stream = None  # a retry continues after the last key
                raise

        while (page := self._request("list", prefix, next_page)) is not None:
            keys = [meta["path"] for meta in page]
            if keys != sorted(keys) or (last is not None and keys and keys[0] <= last):
                raise UnsupportedError(
                    f"{self._name(prefix)} is not listed in the order of keys",
                    hint="use a general-purpose bucket",
                )
            last = keys[-1] if keys else last
            yield page

    # --- writing

    def create(self, key: str, unit: int = 1) -> ObjectWriter:
        """Write an object as a stream, in parts of whole units."""
        self._check_writable()
        path, client = self._path(check_key(key)), self._connection.client
        return ObjectWriter(client, path, self._name(key), unit, self._options.deadline)

    @cached_property
    def multipart(self) -> Multipart | None:
        """Uploads of which several processes put parts; None if this store or its configuration has none."""
        client = boto_client(self._options) if self._place.cloud == "s3" else None
        return None if client is None else Multipart(client, self._place)

    def put_if_absent(self, key: str, data: bytes) -> str:
        """Write a whole object with one conditional request."""
        self._check_writable()
        check_key(key)
        self._put(key, data, "create", Conflict(f"{self._name(key)} exists already"))
        return content_version(data)

    def replace(self, key: str, data: bytes, version: str) -> str:
        """Replace a whole object with a conditional request, if it has this content version."""
        import obstore

        self._check_writable()
        check_key(key)
        changed, path = changed_meanwhile(self._name(key)), self._path(key)
        try:
            answer = self._request("read", key, lambda client: obstore.get(client, path))
            content = self._request("read", key, lambda _: bytes(answer.bytes()))
        except NotFound:
            raise changed from None
        if content_version(content) != version:
            raise changed
        self._put(
            key,
            data,
            {k: answer.meta[k] for k in ("e_tag", "version") if answer.meta.get(k)},
            changed,
        )
        return content_version(data)

    def _put(self, key: str, data: bytes, mode: Any, conflict: Conflict) -> None:
        path, client = self._path(key), self._connection.client
        put_on_condition(
            client, path, self._name(key), data, mode, conflict, self._options.deadline
        )

    def delete(self, key: str) -> None:
        """Remove an object."""
        import obstore

        self._check_writable()
        path = self._path(check_key(key))
        with suppress(NotFound):
            self._request("delete", key, lambda client: obstore.delete(client, path))

    def delete_prefix(self, prefix: str) -> None:
        """Remove all objects below a prefix; one request deletes a thousand."""
        import obstore

        self._check_writable()
        check_key(prefix)
        for page in self._pages(prefix):
            paths = [meta["path"] for meta in page]

            def delete(client: Client, paths: Any = paths) -> None:
                obstore.delete(client, paths)

            with suppress(NotFound):
                self._request("delete", prefix, delete)

    # --- reading and writing

    def _path(self, key: str) -> str:
        """The path of an object in what the client is of."""
        return self._prefix + key

    def _info(self, meta: Any) -> Info:
        # the resolution of HTTP; listings of S3 have a finer one
        modified = float(int(meta["last_modified"].timestamp()))
        version = meta.get("version") or meta.get("e_tag") or modified
        key, size = meta["path"].removeprefix(self._prefix), int(meta["size"])
        return Info(key, size, f"{version}-{size}", modified, meta.get("e_tag"))

    def _name(self, key: str) -> str:
        return f"{self.url}/{key}" if key else self.url

    def _check_writable(self) -> None:
        if self._place.cloud == "http":
            raise UnsupportedError(
                f"{self.url} can be read, but not written to",
                hint="write to S3, Google or Azure storage",
            )

    def _request(self, action: str, key: str, call: Callable[[Client], Any]) -> Any:
        """The result of an idempotent request, which is retried."""
        connection, begun = self._connection, time.perf_counter()
        answer = retry(
            action, self._name(key), lambda: call(connection.client), self._options.deadline
        )
        connection.latency = min(connection.latency, time.perf_counter() - begun)
        return answer


def _of_size(data: Any, nbytes: int) -> memoryview:
    """A view of received bytes; IntegrityError if their number differs, as for a range past the object's end."""
    view = memoryview(data)
    if view.nbytes != nbytes:
        raise IntegrityError(f"{nbytes} bytes were requested, but {view.nbytes} were received")
    return view


def _scatter(data: memoryview, buffers: list[memoryview]) -> None:
    """Copy all of `data` into buffers, beginning with the last; buffers that are not full remain in the list."""
    while data:
        room = buffers[-1]
        take = min(room.nbytes, data.nbytes)
        room[:take] = data[:take]
        data = data[take:]
        if take == room.nbytes:
            buffers.pop()
        else:
            buffers[-1] = room[take:]


def open_objects(url: str) -> ObjectStore:
    """Open the objects below a URL, with the endpoint and the limits of the user's settings."""
    settings = load_settings()
    BUDGET.set(settings.requests, settings.in_flight)
    return ObjectStore(url, Options(settings.endpoint, settings.region, settings.deadline))
