"""Stores around another store: a prefix of its keys, a cached listing, computed files, a record of reads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import replace
from itertools import accumulate, islice
from threading import Lock
from typing import TYPE_CHECKING

from ucformat.errors import Conflict, IntegrityError, NotFound, UcformatError
from ucformat.storage.base import ByteRange, VersionReader, check_key, content_version, read_ranges
from ucformat.storage.concurrency import map_io
from ucformat.storage.strided import fill

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence
    from typing import Self

    from ucformat.storage.base import Checksums, Costs, FileWriter, Info, Ranges, Store
    from ucformat.storage.concurrency import Cache


class WrappedStore:
    """Forwards every call to the inner store, those for one file under the key that a subclass chooses.

    A subclass that chooses keys maps the prefixes of `list`, `delete_prefix` and `prune` itself.
    """

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    @property
    def url(self) -> str:
        """The URL of the inner store."""
        return self.inner.url

    @property
    def costs(self) -> Costs:
        """The costs of the inner store."""
        return self.inner.costs

    def _key(self, key: str) -> str:
        """The key of a file in the inner store."""
        return key

    def info(self, key: str) -> Info:
        """See Store."""
        return self.inner.info(self._key(key))

    def read(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """See Store."""
        return self.inner.read(self._key(key), offset, nbytes)

    def read_into(
        self, key: str, offset: int, buffers: Sequence[memoryview], crcs: Checksums | None = None
    ) -> None:
        """See Store."""
        self.inner.read_into(self._key(key), offset, buffers, crcs)

    def read_rows(self, key: str, offset: int, step: int, rows: Sequence[memoryview]) -> None:
        """See Store."""
        self.inner.read_rows(self._key(key), offset, step, rows)

    def read_versioned(self, key: str) -> tuple[bytes, str]:
        """See Store."""
        return self.inner.read_versioned(self._key(key))

    def create(self, key: str, unit: int = 1) -> FileWriter:
        """See Store."""
        return self.inner.create(self._key(key), unit)

    def flush(self) -> None:
        """See Store."""
        self.inner.flush()

    def adopt(self, key: str) -> None:
        """See Store."""
        self.inner.adopt(self._key(key))

    def put_if_absent(self, key: str, data: bytes) -> str:
        """See Store."""
        return self.inner.put_if_absent(self._key(key), data)

    def replace(self, key: str, data: bytes, version: str) -> str:
        """See Store."""
        return self.inner.replace(self._key(key), data, version)

    def list(self, prefix: str = "") -> Iterator[Info]:
        """See Store."""
        return self.inner.list(prefix)

    def delete(self, key: str) -> None:
        """See Store."""
        self.inner.delete(self._key(key))

    def delete_prefix(self, prefix: str) -> None:
        """See Store."""
        self.inner.delete_prefix(prefix)

    def sweep(self) -> None:
        """See Store."""
        self.inner.sweep()

    def prune(self, folder: str) -> None:
        """See Store."""
        self.inner.prune(folder)


def layers(store: Store) -> Iterator[Store]:
    """A store, then the one that it wraps, and so on to the one that wraps none."""
    yield store
    while isinstance(store, WrappedStore):
        store = store.inner
        yield store


class RoutedStore(WrappedStore, ABC):
    """A store in which files of other stores are read, too, under keys of their own."""

    @abstractmethod
    def place(self, key: str) -> tuple[Store, str] | None:
        """The store of a file that is not of the inner one, and its key there; None for all others."""

    def _routed(self, key: str) -> tuple[Store, str]:
        """The store that a file is read from, and its key there."""
        return self.place(key) or (self.inner, key)

    def info(self, key: str) -> Info:
        """See Store."""
        store, name = self._routed(key)
        return store.info(name)

    def read(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """See Store."""
        store, name = self._routed(key)
        return store.read(name, offset, nbytes)

    def read_into(
        self, key: str, offset: int, buffers: Sequence[memoryview], crcs: Checksums | None = None
    ) -> None:
        """See Store."""
        store, name = self._routed(key)
        store.read_into(name, offset, buffers, crcs)

    def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> Ranges | None:
        """See RangeReader."""
        store, name = self._routed(key)
        return read_ranges(store, name, ranges)

    def read_rows(self, key: str, offset: int, step: int, rows: Sequence[memoryview]) -> None:
        """See Store."""
        store, name = self._routed(key)
        store.read_rows(name, offset, step, rows)

    def read_versioned(self, key: str) -> tuple[bytes, str]:
        """See Store."""
        store, name = self._routed(key)
        return store.read_versioned(name)


def routed(store: Store, key: str) -> tuple[Store, str]:
    """The store that has a file at last, with its wrappers, and the file's key there."""
    for layer in layers(store):
        place = layer.place(key) if isinstance(layer, RoutedStore) else None
        if place is not None:
            return routed(*place)
    return store, key


class SyntheticStore(WrappedStore, ABC):
    """A store with additional files whose bytes are computed when they are read.

    Their keys begin with `HIDDEN`, so that no file of a checkpoint can have such a name.
    """

    @abstractmethod
    def _holds(self, key: str) -> bool:
        """Whether a key names a synthetic file."""

    @abstractmethod
    def _info(self, key: str) -> Info:
        """Size and version of a synthetic file."""

    @abstractmethod
    def _content(self, key: str, offset: int, nbytes: int) -> memoryview:
        """A range of a synthetic file; MissingData if the file is shorter."""

    def gaps(self, key: str, offset: int, nbytes: int) -> int:  # noqa: ARG002
        """The bytes that are read of stored files in excess of a range that is computed from them, if that is known."""
        return 0

    def info(self, key: str) -> Info:
        """See Store."""
        return self._info(key) if self._holds(key) else self.inner.info(key)

    def read(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """See Store."""
        if not self._holds(key):
            return self.inner.read(key, offset, nbytes)
        return bytes(
            self._content(key, offset, self._info(key).size - offset if nbytes is None else nbytes)
        )

    def read_into(
        self, key: str, offset: int, buffers: Sequence[memoryview], crcs: Checksums | None = None
    ) -> None:
        """See Store."""
        if not self._holds(key):
            self.inner.read_into(key, offset, buffers, crcs)
            return
        data = self._content(key, offset, sum(b.nbytes for b in buffers))
        fill(buffers, data, crcs)

    def read_rows(self, key: str, offset: int, step: int, rows: Sequence[memoryview]) -> None:
        """See Store."""
        if not self._holds(key):
            self.inner.read_rows(key, offset, step, rows)
            return
        for number, row in enumerate(rows):
            self.read_into(key, offset + number * step, [row])


def gaps_of(store: Store, key: str, offset: int, nbytes: int) -> int:
    """As `SyntheticStore.gaps`, of the stores in a store's wrappers."""
    store, key = routed(store, key)
    return sum(
        layer.gaps(key, offset, nbytes)
        for layer in layers(store)
        if isinstance(layer, SyntheticStore)
    )


class PrefixStore(WrappedStore):
    """The files below a folder of another store, under keys relative to it."""

    def __init__(self, inner: Store, folder: str) -> None:
        super().__init__(inner)
        self.folder = check_key(folder)

    @property
    def url(self) -> str:
        """The URL of the folder."""
        return f"{self.inner.url}/{self.folder}"

    def _key(self, key: str) -> str:
        return f"{self.folder}/{check_key(key)}"

    def _relative(self, info: Info) -> Info:
        return replace(info, key=info.key.removeprefix(f"{self.folder}/"))

    def info(self, key: str) -> Info:
        """See Store."""
        return self._relative(super().info(key))

    def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> Ranges | None:
        """See RangeReader."""
        return read_ranges(self.inner, self._key(key), ranges)

    def list(self, prefix: str = "") -> Iterator[Info]:
        """See Store."""
        return map(self._relative, self.inner.list(self._key(prefix) if prefix else self.folder))

    def delete_prefix(self, prefix: str) -> None:
        """See Store."""
        self.inner.delete_prefix(self._key(prefix) if prefix else prefix)

    def sweep(self) -> None:
        """Do nothing: leftovers of killed writers belong to the whole store."""

    def prune(self, folder: str) -> None:
        """See Store."""
        self.inner.prune(self._key(folder) if folder else self.folder)


_MAX_FILES = 10_000  # longer listings are not cached


class CachedListingStore(WrappedStore):
    """Lists the inner store once in its `with` block and answers from the listing; otherwise forwards every call.

    Used to recognise and open a foreign checkpoint: each of many formats looks for its own files,
    and in an object store each look-up is a request.
    """

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._listing: dict[str, Info] | None = None
        self._listed = True

    def __enter__(self) -> Self:
        self._listed = self.inner.costs.parallel is None  # on a local disk a look-up costs little
        return self

    def __exit__(self, *_: object) -> None:
        self._listing, self._listed = None, True

    def _files(self) -> dict[str, Info] | None:
        """All files by key; None if they are not cached."""
        if not self._listed:
            self._listed = True
            try:
                listing = {info.key: info for info in islice(self.inner.list(), _MAX_FILES + 1)}
            except UcformatError:  # the store cannot be listed
                return None
            self._listing = listing if len(listing) <= _MAX_FILES else None
        return self._listing

    def info(self, key: str) -> Info:
        """See Store."""
        files = self._files()
        if files is None:
            return self.inner.info(key)
        if check_key(key) not in files:
            raise NotFound(f"{self.url}/{key} does not exist")
        return files[key]

    def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> Ranges | None:
        """See RangeReader."""
        return read_ranges(self.inner, key, ranges)

    def list(self, prefix: str = "") -> Iterator[Info]:
        """See Store."""
        files = self._files()
        if files is None:
            return self.inner.list(prefix)
        below = f"{check_key(prefix)}/" if prefix else ""
        return (info for key, info in files.items() if key.startswith(below))


class RecordingStore(WrappedStore):
    """Records every read of the inner store in `reads`, in order of completion; for tests and benchmarks."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.reads: list[ByteRange] = []  # appending is atomic, so threads need no lock

    @property
    def nbytes(self) -> int:
        """Total bytes of all reads; bytes that were read twice count twice."""
        return sum(r.nbytes for r in self.reads)

    def clear(self) -> None:
        """Forget all recorded reads."""
        self.reads.clear()

    def read(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """See Store."""
        data = self.inner.read(key, offset, nbytes)
        self.reads.append(ByteRange(key, offset, len(data)))
        return data

    def read_into(
        self, key: str, offset: int, buffers: Sequence[memoryview], crcs: Checksums | None = None
    ) -> None:
        """See Store."""
        self.inner.read_into(key, offset, buffers, crcs)
        self.reads.append(ByteRange(key, offset, sum(b.nbytes for b in buffers)))

    def read_rows(self, key: str, offset: int, step: int, rows: Sequence[memoryview]) -> None:
        """See Store."""
        self.inner.read_rows(key, offset, step, rows)
        self.reads.extend(
            ByteRange(key, offset + k * step, row.nbytes) for k, row in enumerate(rows)
        )

    def read_versioned(self, key: str) -> tuple[bytes, str]:
        """See Store."""
        data, version = self.inner.read_versioned(key)
        self.reads.append(ByteRange(key, 0, len(data)))
        return data, version


# Detects files of a checkpoint that change while it is read.
#
# Bytes that are read before and after a file is rewritten belong to no checkpoint, and nothing else
# detects this: the results have valid checksums. So the version of each file is recorded before its
# first byte is read, and compared after all is read: before a commit, or before loaded values are
# used.

Observer = Callable[[str, int, memoryview], None]

_MAX_NAMED = 5  # changed files that an error names


_observing = Lock()  # while observers of any store change; stores are pickled, locks are not


class WatchedStore(WrappedStore):
    """A store that records which files were read through it, and their versions before the first read.

    On a disk the version is requested before the first read. In a store that is accessed over a
    network that would be a request for each file: there it is taken from listings, and from calls
    of `info` that are made anyway.

    Args:
        tiles: keeps tiles that are decoded, for several checkpoints of which some are patches of others.
    """

    def __init__(self, inner: Store, tiles: Cache[memoryview] | None = None) -> None:
        super().__init__(inner)
        self.tiles = tiles
        self._seen: dict[str, Info] = {}
        self._read: dict[str, object] = {}  # by file something that each read replaces
        self.is_local = inner.costs.parallel is None
        self._observers: tuple[Observer, ...] = ()

    @contextmanager
    def observed(self, callback: Observer) -> Iterator[None]:
        """Report all bytes that are read inside the block, except those of files that are read whole by `read`.

        Args:
            callback: called with the key of the file, the offset in it, and the bytes: a buffer
                that may be strided.
        """
        with _observing:
            self._observers = (*self._observers, callback)
        try:
            yield
        finally:
            with _observing:
                self._observers = tuple(
                    observe for observe in self._observers if observe is not callback
                )

    def _notify(self, key: str, parts: Iterable[tuple[int, memoryview]]) -> None:
        for observe in self._observers:
            for begin, data in parts:
                observe(key, begin, data)

    def note(self, key: str) -> None:
        """Record a file's version to compare it in the end; bytes read from now on are of this or a later version."""
        if self.is_local and key not in self._read and key not in self._seen:
            try:
                info = self.inner.info(key)
            except NotFound:
                return  # the read raises the error
            self._seen.setdefault(key, info)
        self._read[key] = object()

    def reads(self) -> dict[str, object]:
        """The files that were read, each with an object that the next read of it replaces."""
        return dict(self._read)

    def recorded(self, key: str) -> Info | None:
        """The version with which a file's version is compared in the end; None if there is none yet."""
        return self._seen.get(key)

    def changed(self, ignore: Collection[str], among: Iterable[str] | None = None) -> list[str]:
        """The files that were read and have changed or are gone; requests the version of each once.

        Args:
            among: only these files, if all of them were read (default: all files that were read).
        """
        read = list(self._read) if among is None else list(among)
        if any(key not in self._read for key in read):  # computed from other files
            read = list(self._read)
        recorded = (key for key in read if key.rpartition("/")[2] not in ignore)
        with_version = [key for key in recorded if key in self._seen]
        return [
            key
            for key, same in zip(with_version, map_io(self._is_same, with_version), strict=True)
            if not same
        ]

    def _is_same(self, key: str) -> bool:
        try:
            return self.inner.info(key).is_same(self._seen[key])
        except (NotFound, IntegrityError):
            return False

    def info(self, key: str) -> Info:
        """See Store."""
        info = self.inner.info(key)
        self._seen.setdefault(key, info)
        return info

    def list(self, prefix: str = "") -> Iterator[Info]:
        """See Store."""
        for info in self.inner.list(prefix):
            self._seen.setdefault(info.key, info)
            yield info

    def read(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """See Store."""
        self.note(key)
        return self.inner.read(key, offset, nbytes)

    def read_into(
        self, key: str, offset: int, buffers: Sequence[memoryview], crcs: Checksums | None = None
    ) -> None:
        """See Store."""
        self.note(key)
        self.inner.read_into(key, offset, buffers, crcs)
        if self._observers:
            at = [offset, *accumulate((b.nbytes for b in buffers), initial=offset)][1:]
            self._notify(key, [(a, b) for a, b in zip(at, buffers, strict=False) if b.nbytes])

    def read_rows(self, key: str, offset: int, step: int, rows: Sequence[memoryview]) -> None:
        """See Store."""
        self.note(key)
        self.inner.read_rows(key, offset, step, rows)
        if self._observers:
            self._notify(
                key, [(offset + k * step, row) for k, row in enumerate(rows) if row.nbytes]
            )

    def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> Ranges | None:
        """See RangeReader."""
        self.note(key)
        loan = read_ranges(self.inner, key, ranges)
        return loan if loan is None or not self._observers else self._observe(key, ranges, loan)

    @contextmanager
    def _observe(
        self, key: str, ranges: Sequence[tuple[int, int]], loan: Ranges
    ) -> Iterator[Sequence[memoryview]]:
        with loan as views:
            self._notify(
                key,
                [(at, data) for (at, _), data in zip(ranges, views, strict=True) if data.nbytes],
            )
            yield views

    def read_versioned(self, key: str) -> tuple[bytes, str]:
        """See Store; over a network, too, the version of the file is recorded."""
        if self.is_local or not isinstance(self.inner, VersionReader):
            if not self.is_local:
                self.info(key)
            self.note(key)
            return self.inner.read_versioned(key)
        info, data = self.inner.read_with_version(key)
        self._seen.setdefault(key, info)
        self.note(key)
        return data, content_version(data)


def find_watched(store: Store) -> WatchedStore | None:
    """The WatchedStore inside a store's wrappers; None if there is none."""
    return next((layer for layer in layers(store) if isinstance(layer, WatchedStore)), None)


def first_info(store: Store, key: str) -> Info:
    """What is recorded of a file since its checkpoint was opened; requested if nothing is."""
    watched = find_watched(store)
    return (watched.recorded(key) if watched else None) or store.info(key)


def check_unchanged(
    store: Store, outcome: str, ignore: Collection[str] = (), among: Iterable[str] | None = None
) -> None:
    """Compare the version of every file that was read through a store with the one before its first byte was read.

    Args:
        among: only these files (default: all); if one of them is computed, the files from which it
            is are among others.

    Raises:
        Conflict: files have changed; the message names them.
    """
    watched = find_watched(store)
    _raise_changed(store, watched.changed(ignore, among) if watched else (), outcome)


@contextmanager
def checking_unchanged(store: Store, outcome: str, ignore: Collection[str] = ()) -> Iterator[None]:
    """As `check_unchanged` after the block; over a network, files that it does not read are checked meanwhile.

    What was read is then what the files had in common at a moment within the block.
    """
    watched = find_watched(store)
    if watched is None or watched.is_local:
        yield
        check_unchanged(store, outcome, ignore)
        return
    with ThreadPoolExecutor(1, "ucformat-check") as pool:
        before = watched.reads()
        early = pool.submit(copy_context().run, watched.changed, ignore, list(before))
        yield
        changed = set(early.result())
    again = [file for file, read in watched.reads().items() if before.get(file) is not read]
    _raise_changed(store, changed.union(watched.changed(ignore, again)), outcome)


def _raise_changed(store: Store, changed: Collection[str], outcome: str) -> None:
    names = sorted(changed)
    if names:
        others = f" and {len(names) - _MAX_NAMED} more files" if len(names) > _MAX_NAMED else ""
        raise Conflict(
            f"{', '.join(f'{store.url}/{name}' for name in names[:_MAX_NAMED])}{others} changed "
            "since the checkpoint was "
            f"opened, so the data may mix two versions; {outcome}",
            hint=(
                "retry when nothing writes there any more; a checkpoint that was kept open has "
                "to be reopened"
            ),
        )
