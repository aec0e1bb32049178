"""Connections to the catalog's database, and the state of its tables: created where empty, upgraded only when asked."""

from __future__ import annotations

import os
import random
import re
import time
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from uuid import uuid4

import sqlalchemy as sa
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError

from ucformat.catalog.models import Base, Identity
from ucformat.errors import NotFound, PermissionDenied, UcformatError, UnsupportedError, UpgradeNeeded, UsageError
from ucformat.migrations import HEAD, KNOWN, configuration
from ucformat.redacted import learn, learn_url, redacted, scrub
from ucformat.settings import local_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy.engine import URL, Connection, Engine

__all__ = ["VERSION_TABLE", "Database", "explaining"]

T = TypeVar("T")

VERSION_TABLE = "ucformat_version"
_CONNECT_TIMEOUT = 10  # seconds to wait for PostgreSQL's first answer
_BUSY_TIMEOUT = 60  # seconds to wait for another writer of SQLite
_MAX_TRIES = 10
_CLASHES = ("40001", "40P01")  # serialization failure, deadlock detected
_LOCK = 0x75636661  # PostgreSQL's advisory lock while tables are made or changed: "ucfa"
_NETWORK = {
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "smbfs",
    "9p",
    "afs",
    "ceph",
    "lustre",
    "gpfs",
    "beegfs",
    "pvfs2",
    "glusterfs",
}
_NETWORK_FUSE = (
    "fuse.sshfs",
    "fuse.s3fs",
    "fuse.gcsfuse",
    "fuse.glusterfs",
    "fuse.ceph",
    "fuse.rclone",
    "fuse.juicefs",
)


class Database:
    """The database of a catalog, with tables of this version in it.

    Raises:
        UsageError: the url is not one of SQLite or PostgreSQL.
        NotFound: it is only to be read, and there is none.
        UnsupportedError: SQLite on a network file system.
        PermissionDenied: tables of somebody else.
        UpgradeNeeded: the tables are older than this ucformat (`upgrade=True` brings them up to date).
    """

    def __init__(self, url: str, *, upgrade: bool = False, read_only: bool = False) -> None:
        self._url = _parse(url)
        self.sqlite = self._url.get_backend_name() == "sqlite"
        self.url = _shown(self._url)
        self.read_only = read_only
        if self.sqlite:
            self._check_place()
        self.newer: str | None = None  # the revision of tables that a newer ucformat made
        self.engine = self._engine()
        try:
            self._settle(upgrade=upgrade)
        except BaseException:
            self.close()
            raise

    def _check_place(self) -> None:
        if self._url.database in (None, "", ":memory:"):
            raise UsageError("a catalog in memory would be lost", hint="name a file: sqlite:///catalog.db")
        file = Path(str(self._url.database)).absolute()
        kind = _file_system(file)
        if kind in _NETWORK or kind.startswith(_NETWORK_FUSE):
            raise UnsupportedError(
                f"the catalog {file} is on a network file system ({kind}), where SQLite loses data",
                hint="set UCP_CATALOG to a file on a local disk, or to postgresql://… for a team",
            )
        if self.read_only:
            if not file.exists():
                raise NotFound(f"there is no catalog at {self.url} yet", hint=_MADE)
            return
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PermissionDenied(
                f"the catalog {file} cannot be made: {error.strerror}", hint="set UCP_CATALOG to a file elsewhere"
            ) from error

    def _engine(self) -> Engine:
        options: dict[str, Any] = {
            "isolation_level": "READ COMMITTED",  # whatever the server's default is
            "connect_args": {"connect_timeout": _CONNECT_TIMEOUT},
        }
        if self.sqlite:
            options = {"connect_args": {"timeout": _BUSY_TIMEOUT, "check_same_thread": False, "isolation_level": None}}
        try:
            engine = sa.create_engine(self._url, **options)
        except ModuleNotFoundError as error:
            raise UnsupportedError(
                f"{self.url} needs the package {error.name}", hint="pip install 'ucformat[postgres]'"
            ) from error
        if self.sqlite:
            sa.event.listen(engine, "connect", self._prepare_sqlite)
            sa.event.listen(engine, "begin", _begin_sqlite)
        return engine

    def _prepare_sqlite(self, connection: Any, _record: Any) -> None:
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute(
            "PRAGMA synchronous = NORMAL"
        )  # in WAL a commit may be lost with the power, never half of it
        connection.execute("PRAGMA cache_size = -65536")
        if self.read_only:
            connection.execute("PRAGMA query_only = ON")
        if connection.execute("PRAGMA journal_mode").fetchone() != ("wal",):
            connection.execute("PRAGMA journal_mode = WAL")

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """A transaction that writes, committed at the end of the block; on SQLite one at a time."""
        if self.newer is not None:
            raise UpgradeNeeded(
                f"the catalog {self.url} was made by a newer ucformat (revision {self.newer}): it can only be read"
            )
        if self.read_only:
            raise PermissionDenied(f"the catalog {self.url} was opened to be read only")
        with explaining(self.url), self.engine.connect() as connection:
            connection.info["writing"] = True
            try:
                with connection.begin():
                    yield connection
            finally:
                connection.info["writing"] = False

    def write(self, work: Callable[[Connection], T]) -> T:
        """Do something in a transaction that writes; again, if it clashed with another and was to give way."""
        for left in reversed(range(_MAX_TRIES)):
            try:
                with self.writing() as connection:
                    return work(connection)
            except UcformatError as error:
                cause = error.__cause__
                clashed = isinstance(cause, DBAPIError) and getattr(cause.orig, "sqlstate", None) in _CLASHES
                if not clashed or not left:
                    raise
                time.sleep(random.uniform(0.01, 0.1))  # noqa: S311 - so that they do not meet again
        raise AssertionError  # the last try returns or raises

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A transaction that sees one state of the catalog."""
        with explaining(self.url), self.engine.connect() as connection:
            if not self.sqlite:
                connection.execution_options(postgresql_readonly=True, isolation_level="REPEATABLE READ")
            with connection.begin():
                yield connection

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()

    def _settle(self, *, upgrade: bool) -> None:
        """Make sure that the tables are of this version."""
        with self.reading() as connection:
            found = _schema_state(connection)
        if found == "empty" and not self.read_only:
            with self._alone() as connection:
                if _schema_state(connection) == "empty":  # nobody else was quicker
                    _create(connection)
                    connection.execute(sa.insert(Identity).values(id=uuid4().hex, created=datetime.now(UTC)))
        elif found == "empty":
            raise NotFound(f"there is no catalog at {self.url} yet", hint=_MADE)
        elif found == "older" and upgrade:
            with self._alone() as connection:
                if _schema_state(connection) == "older":
                    _migrate(connection)
        elif found == "older":
            raise UpgradeNeeded(
                f"the catalog {self.url} was made by an older ucformat",
                hint="back it up, then `ucp catalog upgrade`; nothing is changed unasked",
            )
        elif found == "newer":
            with self.reading() as connection:
                self.newer = _revision(connection)

    @contextmanager
    def _alone(self) -> Iterator[Connection]:
        """A transaction in which nobody else makes or changes tables."""
        with self.writing() as connection:
            if not self.sqlite:  # SQLite's writing transaction is alone anyway
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))
            yield connection

    @property
    def revision(self) -> str:
        """The revision of the tables."""
        with self.reading() as connection:
            return str(_revision(connection))


def _parse(url: str) -> URL:
    """The url as SQLAlchemy knows it; a path is a SQLite file."""
    learn_url(url)
    if "://" not in url:
        if _ALMOST.match(url):
            raise UsageError("the catalog's url has no :// after its scheme", hint=_URLS)
        url = f"sqlite:///{local_path(url)}"
    elif url.startswith("postgres://"):
        url = f"postgresql://{url.removeprefix('postgres://')}"
    try:
        found = make_url(url)
        backend = found.get_backend_name()
    except (ArgumentError, NoSuchModuleError, ValueError):  # not said why: that repeats parts of it
        found = None
    server = None if found is None or backend == "sqlite" else f"{found.host}{found.database}"
    if found is None or (server and "@" in server):  # of a password
        raise UsageError("the catalog's url cannot be read", hint=f"{_URLS}; in a password write @ as %40, / as %2F")
    learn(str(found.password or ""), *_secret_values(found))
    if backend == "postgresql":
        return found.set(drivername="postgresql+psycopg")
    if backend != "sqlite":
        raise UsageError(f"a catalog cannot be kept in {backend}", hint=_URLS)
    return found


def _shown(url: URL) -> str:
    """The url without what may be secret in it: of its parameters, those are shown that are known to hold nothing."""
    query = {name: value if name in _PLAIN else "***" for name, value in url.query.items()}
    return url.set(query=query).render_as_string(hide_password=True).replace("=%2A%2A%2A", "=***")


def _secret_values(url: URL) -> Iterator[str]:
    for name, value in url.query.items():
        if name not in _PLAIN:
            yield from (value,) if isinstance(value, str) else value


#: Parameters of a url that hold nothing secret.
_PLAIN = {
    *("host", "hostaddr", "port", "dbname", "user", "application_name", "client_encoding", "connect_timeout"),
    *("sslmode", "sslrootcert", "sslcert", "sslkey", "gssencmode", "channel_binding", "target_session_attrs"),
    *("keepalives", "keepalives_idle", "keepalives_interval", "keepalives_count", "tcp_user_timeout", "service"),
    *("mode", "cache", "uri", "timeout", "passfile"),
}
_ALMOST = re.compile(r"(postgres|mysql|mariadb|oracle|mssql)[\w+]*:", re.IGNORECASE)
_MADE = "it is made when something is recorded: `ucp register PLACE`"
_URLS = "write a file's path, sqlite:////an/absolute/path.db, or postgresql://user@host/database"


def _file_system(file: Path) -> str:
    """The kind of file system that a path is on, as Linux calls it; empty where that cannot be told."""
    try:
        mounts = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    real, best, kind = f"{os.path.realpath(file)}/", "", ""
    for line in mounts:
        _, point, found, *_ = line.split(" ")
        point = point.replace("\\040", " ").rstrip("/") + "/"
        if real.startswith(point) and len(point) >= len(best):
            best, kind = point, found
    return kind


def _begin_sqlite(connection: Connection) -> None:
    """Take the writers' lock at once: a transaction that first reads and then writes could not wait for it."""
    connection.exec_driver_sql("BEGIN IMMEDIATE" if connection.info.get("writing") else "BEGIN")


def _schema_state(connection: Connection) -> Literal["empty", "older", "current", "newer"]:
    tables = set(sa.inspect(connection).get_table_names())
    if VERSION_TABLE not in tables:
        if taken := tables & set(Base.metadata.tables):
            raise PermissionDenied(
                f"the database has a table {min(taken)!r} that is not ucformat's",
                hint="give the catalog a database, or a PostgreSQL schema, of its own",
            )
        return "empty"
    revision = _revision(connection)
    if revision is None:
        return "empty"
    if revision == HEAD:
        return "current"
    return "older" if revision in KNOWN else "newer"


def _revision(connection: Connection) -> str | None:
    found = connection.execute(sa.text(f"select version_num from {VERSION_TABLE}")).scalar()  # noqa: S608 - a constant
    return None if found is None else str(found)


def _create(connection: Connection) -> None:
    """Create the tables in the caller's transaction."""
    from alembic import command

    Base.metadata.create_all(connection)
    command.stamp(configuration(connection, Base.metadata, VERSION_TABLE), HEAD)


def _migrate(connection: Connection) -> None:
    """Upgrade the tables in the caller's transaction."""
    from alembic import command

    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql("PRAGMA defer_foreign_keys = ON")  # batch mode drops tables that others refer to
    command.upgrade(configuration(connection, Base.metadata, VERSION_TABLE), HEAD)


@contextmanager
def explaining(url: str) -> Iterator[None]:
    """Turn what a database says of a lost connection or a lock into an error of ours."""
    try:
        yield
    except DBAPIError as error:
        scrub(error)
        said = str(error.orig).strip().splitlines()[0] if error.orig else str(error)
        raise UcformatError(
            f"the catalog {url}: {redacted(said)}",
            hint="is the database there, and may you use it? `ucp catalog info` says which it is",
        ) from error
