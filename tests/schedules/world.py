"""One store, a few catalogs and a clock, all in memory, under which commands of ucformat run as actors, one at a time.

Each actor is a thread that stops before every call to the store and before every transaction of a
catalog, and goes on when the schedule says so. What else could differ from run to run is taken
away: thread pools do their work at once, in the thread that asks, ids are counted, and time stands
still unless the schedule moves it.
"""

from __future__ import annotations

import datetime as dt
import errno
import hashlib
import itertools
import logging
import os
import pkgutil
import sqlite3
import sys
import threading
import traceback
import zlib
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, Self
from unittest import mock
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.pool import StaticPool

import ucformat  # noqa: F401 - it has catalogs write their documents
from tests.inline import Inline
from ucformat.catalog.database import Database, _begin_sqlite
from ucformat.catalog.database import translated_errors as translated_database_errors
from ucformat.catalog.models import Base
from ucformat.errors import Conflict, UcformatError, Uncertain
from ucformat.format.structure import parse_manifest
from ucformat.jobs import removal
from ucformat.schema import MANIFEST
from ucformat.schema.documents import is_tombstone
from ucformat.settings import using
from ucformat.storage import memory
from ucformat.storage.error_mapping import mapping_os_errors
from ucformat.storage.memory import MemoryStore, MemoryWriter
from ucformat.torch.tiers.nodes import Node, Nodes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path
    from types import TracebackType

    from ucformat.storage.base import Bytes, Checksums, Info

__all__ = ["CATALOGS", "FAULTS", "ROOTS", "Actor", "Call", "Killed", "Outcome", "Snapshot", "World"]

CATALOGS = ("one", "two", "three")
_HANGS = 300  # seconds without any call after which an actor is taken to wait for another one
_SHORT = 64  # bytes of a file that are their own digest
_ANSWERED = ("read", "list")  # calls that change nothing

#: What can go wrong with a call. The store's errors are those that a local folder or an object
#: store makes of it.
FAULTS = {
    "eio": "it does nothing, and fails: EIO, an answer 503, a catalog's disk that cannot be read or written to",
    "denied": "it does nothing, and is refused: EACCES, EROFS, credentials that ran out",
    "lost": "it takes effect, and fails: an answer, or one to COMMIT, that never came",
    "full": "the disk is full from then on, the store's or the catalog's; what is deleted makes room",
    "create": "a file cannot be begun",
    "short": "a file that is being written takes a part of some bytes, and no more",
    "flush": "what was written cannot be made durable",
}
EPOCH = dt.datetime(2024, 1, 1, tzinfo=dt.UTC)

#: What is imported, so that its clocks, ids and thread pools can be replaced.
_PACKAGES = ("catalog", "format", "jobs", "sources", "storage")
_MODULES = (
    "ucformat.torch.saving.save",
    "ucformat.torch.saving.partial",
    "ucformat.torch.loading.replay",
    "ucformat.torch.manager.manager",
    "ucformat.torch.tiers.tiers",
    "ucformat.jobs.dependents",
    "ucformat.checkpoint",
    "ucformat.references",
)


class Killed(BaseException):
    """What an actor that is killed sees; whatever it does then, it makes no further call."""


@dataclass(slots=True)
class Call:
    """A call to the store, or a transaction of a catalog; `what` is one of `read`, `list`, `write` and `delete`.

    Where it `changes` anything, `state` tells apart what the store and the catalogs held before it,
    and what all other actors had seen of them: two schedules that have it in common come out alike
    when its actor is killed there.
    """

    actor: str
    what: str
    key: str
    changes: bool = False
    state: bytes = b""

    def __post_init__(self) -> None:
        self.changes = self.what in ("write", "delete")

    def meets(self, other: Call) -> bool:
        """Whether the two may come out differently in another order."""
        if not (self.changes or other.changes):
            return False
        if self.what == "list" or other.what == "list":
            folder, key = (self.key, other.key) if self.what == "list" else (other.key, self.key)
            return key.startswith(f"{folder}/")
        return self.key == other.key

    def __str__(self) -> str:
        return f"{self.actor:<16} {self.what:<6} {self.key}"


class Actor:
    """A command in a thread of its own, which runs only while `advance` or `kill` waits for it."""

    running: ClassVar[Actor | None] = None

    def __init__(
        self, name: str, work: Callable[[], Any], skew: dt.timedelta = dt.timedelta(0)
    ) -> None:
        self.name, self.skew = name, skew
        self.calls = 0
        self.began = self.ended = self.killed = self.warned = False
        self.struck = ""  # the fault that befell it
        self._fault, self._until = "", 0
        self.error: BaseException | None = None
        self._work, self._left = work, 0
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def advance(self, calls: int | None = None) -> None:
        """Let it make so many calls, or (None) all that it makes; it stops before the next one, or has ended."""
        if not self.ended and calls != 0:
            self._left = -1 if calls is None else calls
            self._resume()

    def expect(self, fault: str, number: int) -> None:
        """Let a fault befall it, at its call of this number from here on of those that it can befall."""
        self._fault, self._until = fault, number

    def strike(self, *kinds: str) -> str:
        """The fault that befalls it now, if it is one of these."""
        if self._fault not in kinds or not self._fault:
            return ""
        self._until -= 1
        if self._until:
            return ""
        self.struck, self._fault = self._fault, ""
        return self.struck

    def kill(self) -> None:
        """End it where it stands."""
        if not self.ended:
            self.killed = True
            if self.began:
                self._resume()
            self.ended = True

    def _resume(self) -> None:
        Actor.running = self
        if self.began:
            self._go.release()
        else:
            self.began = True
            self._thread.start()
        if not self._back.acquire(timeout=_HANGS):
            stack = "".join(traceback.format_stack(sys._current_frames()[self._thread.ident or 0]))
            raise AssertionError(
                f"{self.name} waits for what another actor holds, after {self.calls} calls:\n{stack}"
            )
        Actor.running = None
        if self.ended:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._work()
        except Killed:
            pass
        except Exception as error:  # noqa: BLE001 - whoever wrote the schedule looks at it
            self.error = error
        self.ended = True
        self._back.release()

    def wait(self) -> None:
        """Stop, in the actor's own thread, until it may make its next call."""
        if self._left == 0 and not self.killed:
            self._back.release()
            self._go.acquire()
        if self.killed:
            raise Killed
        self._left -= 1
        self.calls += 1


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that a world holds at an instant."""

    files: dict[str, Any]
    databases: dict[str, bytes]
    time: dt.datetime
    ids: dict[str, int]
    versions: int
    digests: dict[str, bytes]  # of those databases that are known


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of the work of one who ran alone: what was wrong, and what the world, of his, held then."""

    said: tuple[str, ...]
    files: dict[str, Any]
    database: bytes
    digest: bytes
    ids: int
    versions: int
    commits: tuple[tuple[str, str, str], ...]


@dataclass
class World:
    """The store `memory://w`, three catalogs, and the time.

    As a context manager it takes the place of the real ones in all of ucformat, for this process:
    there is one at once.
    """

    trace: list[Call] = field(default_factory=list)  # of all actors, in order
    commits: list[tuple[str, str, str]] = field(
        default_factory=list
    )  # place, id, and the actor that committed it

    def __post_init__(self) -> None:
        self.time = EPOCH
        self.files: dict[str, Any] = {}
        self._ids: dict[str, int] = {}
        self._versions = 0
        self._digests: dict[str, bytes] = {}  # of catalogs that did not change since
        self._engines = {name: _memory_engine() for name in CATALOGS}
        self._raw = {
            name: _raw(engine) for name, engine in self._engines.items()
        }  # the one connection of each
        self._saw: dict[
            str, bytes
        ] = {}  # of each actor all that it was answered: after the same it does the same
        self._busy = ""
        self.asked: list[tuple[str, str, bytes]] | None = (
            None  # what was asked of the store by no actor, and answered
        )
        self.used: set[str] = set()  # catalogs that somebody asked, or wrote to
        self.room: int | None = None  # bytes that can be written before the store is full
        self.full: set[str] = set()  # catalogs that are
        self._patches = [*_patches(self)]
        self._warned = _Warned()

    def __enter__(self) -> Self:
        for patch in self._patches:
            patch.start()
        logging.getLogger("ucformat").addHandler(self._warned)
        for name in CATALOGS:
            _Database(self, name)._prepare_tables(upgrade=False)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        logging.getLogger("ucformat").removeHandler(self._warned)
        for patch in reversed(self._patches):
            patch.stop()

    # What is in it

    def save(self) -> Snapshot:
        """What it holds now."""
        databases = {name: raw.serialize() for name, raw in self._raw.items()}
        return Snapshot(
            dict(self.files),
            databases,
            self.time,
            dict(self._ids),
            self._versions,
            dict(self._digests),
        )

    def restore(self, found: Snapshot) -> None:
        """Hold again what it held then, with no calls made."""
        self.files.clear()
        self.files.update(found.files)
        for name, data in found.databases.items():
            self._raw[name].deserialize(data)
        self.time, self._ids, self._versions = found.time, dict(found.ids), found.versions
        self._digests = dict(found.digests)
        self._saw.clear()
        self.room = None
        self.full.clear()
        self.trace.clear()
        self.commits.clear()

    def about(self, catalog: str, who: str) -> object:
        """What tells apart all that somebody finds who runs alone, with this catalog and no other."""
        return who, self._ids.get(who, 0), self.time, self.digest(), catalog, self.digest(catalog)

    def outcome(self, catalog: str, who: str, act: Callable[[], Iterable[str]]) -> Outcome:
        """Let somebody run alone, with this catalog and no other, and note what comes of it."""
        self.used.clear()
        commits = len(self.commits)
        said = tuple(act())
        if not self.used <= {catalog}:
            raise AssertionError(
                f"{who or 'gc'} was to use the catalog {catalog} alone, and used {self.used}"
            )
        database = zlib.compress(self._raw[catalog].serialize(), 1)
        ids, made = self._ids.get(who, 0), tuple(self.commits[commits:])
        return Outcome(
            said, dict(self.files), database, self.digest(catalog), ids, self._versions, made
        )

    def come_out(self, catalog: str, who: str, found: Outcome) -> None:
        """Hold what it held when the same was done to the same before."""
        self.files.clear()
        self.files.update(found.files)
        self._raw[catalog].deserialize(zlib.decompress(found.database))
        self._digests[catalog] = found.digest
        self._ids[who] = found.ids
        self._versions = max(self._versions, found.versions)
        self.commits += found.commits

    def actor(self, name: str, work: Callable[[], Any], catalog: str, skew: dt.timedelta) -> Actor:
        """A command that is to run here, with this catalog and a clock that is wrong by `skew`."""

        def run() -> None:
            with using(catalog=catalog, roots=ROOTS):
                work()

        return Actor(name, run, skew)

    # What actors see

    def stop(self, what: str, key: str) -> Call | None:
        """Wait until the actor that runs may make this call."""
        actor = Actor.running
        if key.startswith("catalog "):
            self.used.add(key.removeprefix("catalog "))
        if actor is None:
            if self.asked is not None:
                self.asked.append((what, key, self.answer(what, key)))
            return None
        if self._busy:
            raise AssertionError(
                f"{actor.name} calls the store ({what} {key}) inside of a transaction of {self._busy}"
            )
        call = Call(actor.name, what, key)
        actor.wait()
        if call.changes:
            others = sorted((name, saw) for name, saw in self._saw.items() if name != actor.name)
            call.state = _digest(self.digest(), *map(self.digest, CATALOGS), others)
        self._saw[actor.name] = _digest(
            self._saw.get(actor.name, b""), what, key, self.answer(what, key)
        )
        self.trace.append(call)
        return call

    def strike(self, *kinds: str) -> str:
        """The fault that befalls the actor that runs, if it is one of these."""
        return "" if Actor.running is None else Actor.running.strike(*kinds)

    @contextmanager
    def call(self, what: str, key: str, nbytes: int = 0) -> Iterator[Call | None]:
        """A call to the store, before which the actor stops, and that may go wrong; `nbytes` is what it writes."""
        call = self.stop(what, key)
        lasting = () if what in _ANSWERED else ("lost", "full") if what == "write" else ("lost",)
        fault = self.strike("eio", "denied", *lasting)
        with mapping_os_errors(what, f"memory://{key}"):
            if fault in ("eio", "denied"):
                raise _os_error(errno.EIO if fault == "eio" else errno.EACCES)
            if fault == "full":
                self.room = 0
            self._fill(what, key, nbytes)
            yield call
            if fault == "lost":
                raise _os_error(errno.EIO)

    def _fill(self, what: str, key: str, nbytes: int) -> None:
        """Write to a disk that is full, or make room on it."""
        if self.room is None or Actor.running is None:
            return
        if what == "delete" and key in self.files:
            self.room += len(self.files[key].data)
        elif what == "write":
            if nbytes > self.room:
                raise _os_error(errno.ENOSPC)
            self.room -= nbytes

    def answer(self, what: str, key: str) -> bytes:
        """What tells apart the answers that a call can get."""
        if key.startswith("catalog "):
            return self.digest(key.removeprefix("catalog "))
        if what != "list":
            return _digest(_content(self.files.get(key)))
        below = f"{key}/"
        return _digest(
            *((k, _content(f)) for k, f in sorted(self.files.items()) if k.startswith(below))
        )

    def now(self) -> dt.datetime:
        """What the clock of the actor of this thread shows."""
        actor = Actor.running
        return self.time if actor is None else self.time + actor.skew

    def uuid(self) -> UUID:
        """Another one each time, for an actor the same in each run, whatever others do."""
        who = "" if Actor.running is None else Actor.running.name
        self._ids[who] = self._ids.get(who, 0) + 1
        return UUID(bytes=_digest(f"{who} {self._ids[who]}"))

    def version(self) -> int:
        """The number of a file that is written."""
        self._versions += 1
        return self._versions

    def digest(self, name: str | None = None) -> bytes:
        """What tells apart what the store holds, or a catalog of this name."""
        if name is None:
            return _digest(*((key, _content(file)) for key, file in sorted(self.files.items())))
        if name not in self._digests:
            rows = (self.rows(name, f"select * from {table}") for table in Base.metadata.tables)  # noqa: S608 - our own
            self._digests[name] = _digest(
                *rows
            )  # not its pages, in which the same rows may lie in another order
        return self._digests[name]

    @contextmanager
    def transaction(self, what: str, name: str) -> Iterator[None]:
        """Stop before it, and let nobody stop in it: SQLite runs them one after another."""
        call = self.stop(what, f"catalog {name}")
        raw = self._raw[name]
        before = raw.total_changes
        self._busy = name
        try:
            yield
        finally:
            self._busy = ""
            if raw.total_changes != before:
                self._digests.pop(name, None)
            elif call is not None:
                call.changes = False

    def rows(self, name: str, query: str) -> list[Any]:
        """What a catalog holds, asked in SQL."""
        return list(self._raw[name].execute(query))

    def engine(self, name: str) -> sa.Engine:
        """The database of a catalog."""
        return self._engines[name]


ROOTS = ",".join(f"memory://w/{place}" for place in ("src", "t/p", "t/a", "t/new", "u/p"))


class _Database(Database):
    """A catalog's database in memory, of which each transaction is one step."""

    def __init__(self, world: World, url: str, *, read_only: bool = False) -> None:
        self._world, self.url, self.read_only = world, url, read_only
        self.sqlite, self.newer = True, None
        self.engine = world.engine(url)

    @contextmanager
    def writing(self) -> Iterator[sa.Connection]:
        with translated_database_errors(self.url), self._world.transaction("write", self.url):
            fault = self._world.strike("eio", "lost", "full")
            if fault == "eio":
                raise _sqlite_error("disk I/O error")
            if fault == "full":
                self._world.full.add(self.url)
            with super().writing() as connection:
                yield connection
                if self.url in self._world.full and Actor.running is not None:
                    raise _sqlite_error("database or disk is full")
            if fault == "lost":
                raise _sqlite_error("disk I/O error")

    @contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        with translated_database_errors(self.url), self._world.transaction("read", self.url):
            if self._world.strike("eio"):
                raise _sqlite_error("disk I/O error")
            with super().reading() as connection:
                yield connection

    def close(self) -> None:
        pass


class _Store(MemoryStore):
    """A memory store whose every call is a step; so is each file of a folder that is deleted, as in any real store.

    To open a writer and to write to it changes nothing that anybody sees: closing it is the step.
    """

    def __init__(self, world: World, name: str) -> None:
        super().__init__(name)
        self._world = world
        self._lost = False  # whether what was written cannot be made durable

    def _call(self, what: str, key: str, nbytes: int = 0) -> AbstractContextManager[Call | None]:
        return self._world.call(what, f"{self._root}{key}".rstrip("/"), nbytes)

    def info(self, key: str) -> Info:
        with self._call("read", key):
            return super().info(key)

    def read(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        with self._call("read", key):
            return super().read(key, offset, nbytes)

    def read_into(
        self, key: str, offset: int, buffers: Sequence[memoryview], crcs: Checksums | None = None
    ) -> None:
        with self._call("read", key):
            super().read_into(key, offset, buffers, crcs)

    def read_versioned(self, key: str) -> tuple[bytes, str]:
        with self._call("read", key):
            return super().read_versioned(key)

    def adopt(self, key: str) -> None:
        with self._call("read", key):
            super().adopt(key)

    def create(self, key: str, unit: int = 1) -> MemoryWriter:
        if self._world.strike("create"):
            with mapping_os_errors("write", f"{self.url}/{key}"):
                raise _os_error(errno.ENOSPC)
        return _Writer(self, key, super().create(key, unit)._path)

    def flush(self) -> None:
        self._lost = self._lost or bool(self._world.strike("flush"))
        if self._lost:
            with mapping_os_errors("write", self.url):
                raise _os_error(errno.EIO)
        super().flush()

    def put_if_absent(self, key: str, data: bytes) -> str:
        return self._put(key, data, lambda: super(_Store, self).put_if_absent(key, data))

    def replace(self, key: str, data: bytes, version: str) -> str:
        return self._put(key, data, lambda: super(_Store, self).replace(key, data, version))

    def list(self, prefix: str = "") -> Iterator[Info]:
        with self._call("list", prefix):
            return super().list(prefix)

    def delete(self, key: str) -> None:
        with self._call("delete", key) as call:
            if call is not None:
                call.changes = self._root + key in self._world.files
            super().delete(key)

    def delete_prefix(self, prefix: str) -> None:
        for info in [*self.list(prefix)]:
            self.delete(info.key)

    def _put(self, key: str, data: bytes, put: Callable[[], str]) -> str:
        version = ""
        try:
            with self._call("write", key, len(data)) as call:
                try:
                    version = put()
                except Conflict:
                    if call is not None:
                        call.changes = False
                    raise
                if key == MANIFEST and not is_tombstone(data):
                    who = "" if Actor.running is None else Actor.running.name
                    self._world.commits.append(
                        (self._root.rstrip("/"), parse_manifest(data, key).id, who)
                    )
        except Conflict:
            raise
        except UcformatError as error:
            if version:
                raise Uncertain(
                    f"it is unknown whether {self.url}/{key} was written: {error.message}"
                ) from None
            raise
        return version


class _NodeFolder(_Store):
    """What a node has for itself: a folder of its own, by its path or the url that this has."""

    def __init__(self, world: World, place: str | Path) -> None:
        super().__init__(world, str(place).removeprefix("memory:/"))

    def confined(self, _: Callable[[str], bool]) -> _NodeFolder:
        return self


class _Writer(MemoryWriter):
    def __init__(self, store: _Store, key: str, path: str) -> None:
        super().__init__(path)
        self._store, self._key = store, key

    def write(self, data: Bytes) -> None:
        if self._store._world.strike("short"):
            super().write(memoryview(data).cast("B")[: memoryview(data).nbytes // 2])
            with mapping_os_errors("write", f"{self._store.url}/{self._key}"):
                raise _os_error(errno.ENOSPC)
        super().write(data)

    def close(self) -> None:
        if self._data is not None:
            try:
                with self._store._call("write", self._key, len(self._data)):
                    super().close()
            except UcformatError:
                self.abort()  # as every writer does that cannot be closed
                raise


class _Warned(logging.Handler):
    """Notes of an actor that it told its user of something."""

    def emit(self, record: logging.LogRecord) -> None:
        if Actor.running is not None and record.levelno >= logging.WARNING:
            Actor.running.warned = True


def _os_error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def _sqlite_error(said: str) -> sa.exc.OperationalError:
    return sa.exc.OperationalError("…", None, sqlite3.OperationalError(said))


def _digest(*parts: object) -> bytes:
    out = hashlib.blake2b(digest_size=16)
    for part in parts:
        out.update(part if isinstance(part, bytes) else repr(part).encode())
    return out.digest()


def _content(file: Any) -> object:
    """What tells apart a file from others; its number does not: it only tells that it was written anew."""
    return file and (file.modified, file.data if len(file.data) <= _SHORT else _digest(file.data))


def _memory_engine() -> sa.Engine:
    engine = sa.create_engine(
        "sqlite://",
        poolclass=StaticPool,
        connect_args={"check_same_thread": False, "isolation_level": None},
    )

    def prepare(connection: Any, _: Any) -> None:
        connection.execute("PRAGMA foreign_keys = ON")

    sa.event.listen(engine, "connect", prepare)
    sa.event.listen(engine, "begin", _begin_sqlite)
    return engine


def _raw(engine: sa.Engine) -> Any:
    with engine.connect() as connection:
        return connection.connection.driver_connection


def _cached_properties(module: Any) -> Iterator[cached_property[Any]]:
    for found in vars(module).values():
        if isinstance(found, type) and found.__module__ == module.__name__:
            yield from (
                value for value in vars(found).values() if isinstance(value, cached_property)
            )


def _clocks(world: World) -> Iterator[Any]:
    """What takes the place of clocks; what took how long is in manifests."""
    boot = [lambda _: iter([("the boot", world.time.timestamp())])]
    yield mock.patch("ucformat.catalog.stamp.CLOCKS", boot)
    for module in ("saving.save", "saving.manifest", "loading.load"):
        yield mock.patch(f"ucformat.torch.{module}.time", SimpleNamespace(monotonic=lambda: 0.0))


def _on_one_node(world: World) -> Iterator[Any]:
    """What takes the place of a node's folder, and of all nodes."""
    for module in ("tiers", "recovery"):
        yield mock.patch(
            f"ucformat.torch.tiers.{module}.LocalStore", lambda place: _NodeFolder(world, place)
        )
    nodes = Nodes((Node("here", ((0, 1),)),))
    yield mock.patch("ucformat.torch.tiers.tiers.gather_nodes", return_value=nodes)


def _patches(world: World) -> Iterator[Any]:
    """What takes the place of files, catalogs, clocks, ids and threads in ucformat."""
    for package in _PACKAGES:
        found = import_module(f"ucformat.{package}")
        for info in pkgutil.walk_packages(found.__path__, f"ucformat.{package}."):
            if not info.name.startswith("ucformat.sources.opening.") or "safetensors" in info.name:
                import_module(info.name)
    for name in _MODULES:
        import_module(name)

    class Time(dt.datetime):
        @classmethod
        def now(cls, tz: dt.tzinfo | None = None) -> dt.datetime:  # type: ignore[override]
            return world.now()

    def file(data: bytes, _: int) -> Any:
        return kept(data, world.version(), world.time.timestamp())

    kept = memory._MemoryFile
    yield mock.patch.object(memory, "_FILES", world.files)
    yield mock.patch.object(memory, "_MemoryFile", file)
    yield mock.patch.object(memory, "_VERSIONS", itertools.repeat(0))
    yield mock.patch("ucformat.storage.memory.MemoryStore", lambda name: _Store(world, name))
    yield mock.patch(
        "ucformat.catalog.catalog.Database",
        lambda url, *, read_only, upgrade: _Database(world, url, read_only=read_only),
    )
    yield mock.patch(
        "ucformat.torch.comm.group.Group.exclusive", nullcontext
    )  # of another process each
    yield from _clocks(world)
    yield mock.patch.object(removal, "_warn", removal._warn.__wrapped__)  # each time, not once
    yield mock.patch("ucformat.jobs.run.default_workers", return_value=1)
    yield from _on_one_node(world)
    replaced = {
        "datetime": (dt.datetime, Time),
        "uuid4": (None, world.uuid),
        "ThreadPoolExecutor": (None, Inline),
    }
    for name, module in sorted(sys.modules.items()):
        if name.startswith("ucformat."):
            for cached in _cached_properties(
                module
            ):  # until Python 3.12 one lock for all instances, of all actors
                yield mock.patch.object(cached, "lock", nullcontext(), create=True)
            for attribute, (old, new) in replaced.items():
                there = vars(module).get(attribute)
                if there is not None and (old is None or there is old):
                    yield mock.patch.object(module, attribute, new)
