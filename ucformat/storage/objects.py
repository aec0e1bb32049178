"""Files in an object store: S3, Google, Azure, or whatever answers plain HTTP, which can only be read from."""

from __future__ import annotations

import threading
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ucformat.errors import Conflict, IntegrityError, NotFound, UcformatError, UnsupportedError
from ucformat.storage.base import HIDDEN, Costs, Info, Store, check_key, check_range, content_version
from ucformat.storage.clouds import Options, connect, parse
from ucformat.storage.concurrency import RequestBudget
from ucformat.storage.error_mapping import map_object_error, retry
from ucformat.storage.upload import ObjectWriter, put_on_condition

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from obstore.store import ObjectStore as Client

__all__ = ["BUDGET", "ObjectStore"]

#: What the reads of all object stores of this process share.
BUDGET = RequestBudget(requests=128, nbytes=256 << 20)

_COSTS = Costs(gap=256 << 10, short=32 << 10, request=8 << 20, join=8 << 20, together=10)
_THREADS = 32  # that wait for answers: more cost more than they bring
_PAGE = 1000  # keys that one request lists or deletes


class ObjectStore(Store):
    """The objects below a prefix of a bucket.

    An object is seen whole or not at all, and is durable when its upload is closed. Each put carries a write id, so
    that whoever finds his object there already can tell that only the answer to his own request was lost.
    """

    def __init__(self, url: str, options: Options = Options()) -> None:  # noqa: B008 - it cannot be changed
        self._place, self._options = parse(url), options
        self._connected: Client | None = None
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[ObjectStore], tuple[str, Options]]:
        return ObjectStore, (self.url, self._options)

    def __repr__(self) -> str:
        return f"ObjectStore({self.url!r})"

    @property
    def url(self) -> str:
        """The url, without a slash at its end."""
        return self._place.root

    @property
    def costs(self) -> Costs:
        """What the budget allows at the moment."""
        return replace(_COSTS, parallel=min(_THREADS, BUDGET.requests), in_flight=BUDGET.nbytes)

    @property
    def _client(self) -> Client:
        with self._lock:
            if self._connected is None:
                try:
                    self._connected = connect(self._place, self._options)
                except MemoryError:
                    raise
                except Exception as error:  # noqa: BLE001 - a configuration that obstore does not take
                    failure = error if isinstance(error, UcformatError) else map_object_error(error, "open", self.url)
                if self._connected is None:
                    raise failure from None  # here, for above it would have the library's error with it
            return self._connected

    # --- reading

    def info(self, key: str) -> Info:
        """Size and version of an object."""
        import obstore

        check_key(key)
        return _info(self._ask("read", key, lambda client: obstore.head(client, key)))

    def read(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """Bytes of an object; a small one in one request."""
        import obstore

        check_key(key)
        if nbytes is None and offset == 0:
            return bytes(self._ask("read", key, lambda client: obstore.get(client, key).bytes()))
        if nbytes is None or nbytes > _COSTS.request:  # nothing is allocated before it is known to be there
            size = self.info(key).size
            nbytes = size - offset if nbytes is None else nbytes
            check_range(self._name(key), offset, nbytes, size)
        check_range(self._name(key), offset, nbytes, offset + nbytes)
        out = bytearray(nbytes)
        self.read_into(key, offset, [memoryview(out)])
        return bytes(out)

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill buffers, by requests of at most `costs.request` bytes; each is copied once, for obstore has its own."""
        check_key(key)
        todo = [b.cast("B") for b in reversed(buffers) if b.nbytes]
        end = offset + sum(b.nbytes for b in todo)
        check_range(self._name(key), offset, end - offset, end)
        while offset < end:
            nbytes = min(_COSTS.request, end - offset)
            with self.read_ranges(key, [(offset, nbytes)]) as (found,):
                _scatter(found, todo)
            offset += nbytes

    def read_rows(self, key: str, offset: int, step: int, rows: Sequence[memoryview]) -> None:
        """Fill rows, several at once."""
        check_key(key)
        wanted = [(offset + k * step, row.cast("B")) for k, row in enumerate(rows) if row.nbytes]
        for group in _groups(wanted, _COSTS.request):
            with self.read_ranges(key, [(begin, row.nbytes) for begin, row in group]) as found:
                for (_, row), data in zip(group, found, strict=True):
                    row[:] = data

    @contextmanager
    def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> Iterator[Sequence[memoryview]]:
        """See RangeReader; as many bytes as ranges have are in flight until the block ends."""
        import obstore

        check_key(key)
        for begin, nbytes in ranges:
            check_range(self._name(key), begin, nbytes, begin + nbytes)
        most = min(_COSTS.together, BUDGET.requests)  # obstore asks for no more at once

        def ask(client: Client) -> list[Any]:
            if len(ranges) == 1:
                return [obstore.get_range(client, key, start=ranges[0][0], length=ranges[0][1])]
            found: list[Any] = []
            for i in range(0, len(ranges), most):
                starts, lengths = zip(*ranges[i : i + most], strict=True)
                found += obstore.get_ranges(client, key, starts=starts, lengths=lengths, coalesce=0)
            return found

        with BUDGET.take(min(most, len(ranges)), sum(n for _, n in ranges)):
            with self._checking(key, ranges):
                found = self._ask("read", key, ask)
                views = [_of_size(data, n) for data, (_, n) in zip(found, ranges, strict=True)]
            yield views

    @contextmanager
    def _checking(self, key: str, ranges: Sequence[tuple[int, int]]) -> Iterator[None]:
        """MissingData in place of what else fails where the object is too short: stores answer that in many ways."""
        try:
            yield
        except NotFound:
            raise
        except UcformatError:
            size = self.info(key).size
            for begin, nbytes in ranges:
                check_range(self._name(key), begin, nbytes, size)
            raise

    def list(self, prefix: str = "") -> Iterator[Info]:
        """All objects below a prefix, in the order of their keys; a thousand are asked for at a time."""
        found = (_info(meta) for page in self._pages(prefix) for meta in page)
        return (i for i in found if not i.key.rpartition("/")[2].startswith(HIDDEN))

    def _pages(self, prefix: str) -> Iterator[Sequence[Any]]:
        below = check_key(prefix) if prefix else None
        if self._place.cloud == "http":
            raise UnsupportedError(
                f"{self._name(prefix)} cannot be listed: plain HTTP has no folders",
                hint="open a universal checkpoint, or a single file by its name",
            )
        return self._each_page(prefix, below)

    def _each_page(self, prefix: str, below: str | None) -> Iterator[Sequence[Any]]:
        import obstore

        stream: Any = None
        last = None

        def ask(client: Client) -> Any:
            nonlocal stream
            stream = stream or obstore.list(client, below, offset=last, chunk_size=_PAGE)
            try:
                return next(stream, None)
            except Exception:
                stream = None  # and on from the last key
                raise

        while (page := self._ask("list", prefix, ask)) is not None:
            keys = [meta["path"] for meta in page]
            if keys != sorted(keys) or (last is not None and keys and keys[0] <= last):
                raise UnsupportedError(
                    f"{self._name(prefix)} is not listed in the order of keys", hint="use a bucket of the usual kind"
                )
            last = keys[-1] if keys else last
            yield page

    # --- writing

    def create(self, key: str, unit: int = 1) -> ObjectWriter:
        """Write an object as a stream, in parts of whole units."""
        self._must_write()
        check_key(key)
        return ObjectWriter(self._client, key, self._name(key), unit, self._options.deadline)

    def flush(self) -> None:
        """Do nothing: an object is durable when its upload is closed."""

    def adopt(self, key: str) -> None:
        """See that the object is there."""
        self.info(key)

    def put_if_absent(self, key: str, data: bytes) -> str:
        """Write a whole object by one conditional request."""
        self._must_write()
        check_key(key)
        self._put(key, data, "create", Conflict(f"{self._name(key)} exists already"))
        return content_version(data)

    def replace(self, key: str, data: bytes, version: str) -> str:
        """Write a whole object, on condition that the one with this content still stands there."""
        import obstore

        self._must_write()
        check_key(key)
        changed = Conflict(
            f"{self._name(key)} was changed by somebody else since it was read",
            hint="read it again, and decide anew what to write",
        )
        try:
            found = self._ask("read", key, lambda client: obstore.get(client, key))
            content = self._ask("read", key, lambda _: bytes(found.bytes()))
        except NotFound:
            raise changed from None
        if content_version(content) != version:
            raise changed
        self._put(key, data, {k: found.meta[k] for k in ("e_tag", "version") if found.meta.get(k)}, changed)
        return content_version(data)

    def _put(self, key: str, data: bytes, mode: Any, conflict: Conflict) -> None:
        put_on_condition(self._client, key, self._name(key), data, mode, conflict, self._options.deadline)

    def delete(self, key: str) -> None:
        """Remove an object."""
        import obstore

        self._must_write()
        check_key(key)
        with suppress(NotFound):
            self._ask("delete", key, lambda client: obstore.delete(client, key))

    def delete_prefix(self, prefix: str) -> None:
        """Remove all objects below a prefix, a thousand with each request."""
        import obstore

        self._must_write()
        check_key(prefix)
        for page in self._pages(prefix):
            paths = [meta["path"] for meta in page]

            def ask(client: Client, paths: Any = paths) -> None:
                obstore.delete(client, paths)

            with suppress(NotFound):
                self._ask("delete", prefix, ask)

    def sweep(self) -> None:
        """Nothing: what a killed writer leaves is an upload that was never completed, which no listing shows."""

    def prune(self, folder: str) -> None:
        """Nothing: there are no folders."""

    # --- both

    def _name(self, key: str) -> str:
        return f"{self.url}/{key}" if key else self.url

    def _must_write(self) -> None:
        if self._place.cloud == "http":
            raise UnsupportedError(
                f"{self.url} can be read, but not written to", hint="write to S3, Google or Azure storage"
            )

    def _ask(self, action: str, key: str, call: Callable[[Client], Any]) -> Any:
        """What a request gives that may be repeated."""
        client = self._client
        return retry(action, self._name(key), lambda: call(client), self._options.deadline)


def _info(meta: Any) -> Info:
    modified = float(int(meta["last_modified"].timestamp()))  # as HTTP tells it; lists of S3 tell more
    version = meta.get("version") or meta.get("e_tag") or modified
    return Info(meta["path"], int(meta["size"]), f"{version}-{meta['size']}", modified, meta.get("e_tag"))


def _of_size(data: Any, nbytes: int) -> memoryview:
    """What came; IntegrityError where it is not what was asked for, as of a range that ends past the object's end."""
    view = memoryview(data)
    if view.nbytes != nbytes:
        raise IntegrityError(f"{nbytes} bytes were asked for and {view.nbytes} came")
    return view


def _scatter(data: memoryview, buffers: list[memoryview]) -> None:
    """Fill buffers with all of some bytes, the last buffer first; what is not filled stays in the list."""
    while data:
        room = buffers[-1]
        take = min(room.nbytes, data.nbytes)
        room[:take] = data[:take]
        data = data[take:]
        if take == room.nbytes:
            buffers.pop()
        else:
            buffers[-1] = room[take:]


def _groups(rows: Sequence[tuple[int, memoryview]], most: int) -> Iterator[list[tuple[int, memoryview]]]:
    """Rows in groups of so many bytes."""
    group: list[tuple[int, memoryview]] = []
    held = 0
    for begin, row in rows:
        if group and held + row.nbytes > most:
            yield group
            group, held = [], 0
        group.append((begin, row))
        held += row.nbytes
    if group:
        yield group
