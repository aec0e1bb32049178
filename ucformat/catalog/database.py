"""Connections to the catalog's database, and its tables: created if there are none, upgraded only on request."""

from __future__ import annotations

import os
import random
import re
import time
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from uuid import uuid4

import sqlalchemy as sa
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError

from ucformat.catalog.models import Base, Identity
from ucformat.errors import (
    NotFound,
    PermissionDenied,
    UcformatError,
    UnsupportedError,
    UpgradeNeeded,
    UsageError,
)
from ucformat.migrations import HEAD, KNOWN, configuration
from ucformat.redacted import learn, learn_url, redacted, scrub
from ucformat.settings import local_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy.engine import URL, Connection, Engine

T = TypeVar("T")

VERSION_TABLE = "ucformat_version"
_CONNECT_TIMEOUT = 10  # seconds to wait for PostgreSQL's first answer
_BUSY_TIMEOUT = 60  # seconds to wait for another writer of SQLite
_MAX_TRIES = 10
_CONFLICTS = ("40001", "40P01")  # serialization failure, deadlock detected
_LOCK = 0x75636661  # PostgreSQL's advisory lock while tables are created or changed: "ucfa"
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
    """The database of a catalog; its tables have the current revision, or a newer one that is only read.

    Raises:
        NotFound: with `read_only`, there is no catalog.
    """

    def __init__(self, url: str, *, upgrade: bool = False, read_only: bool = False) -> None:
        self._url = _parse(url)
        self.sqlite = self._url.get_backend_name() == "sqlite"
        self.url = _shown(self._url)
        self.read_only = read_only
        if self.sqlite:
            self._check_place()
        self.newer: str | None = None  # the revision of tables that a newer ucformat created
        self.engine = self._engine()
        try:
            self._prepare_tables(upgrade=upgrade)
        except BaseException:
            self.close()
            raise

    def _check_place(self) -> None:
        if self._url.database in (None, "", ":memory:"):
            raise UsageError(
                "a catalog in memory would be lost", hint="name a file: sqlite:///catalog.db"
            )
        file = Path(str(self._url.database)).absolute()
        kind = _file_system(file)
        if kind in _NETWORK or kind.startswith(_NETWORK_FUSE):
            raise UnsupportedError(
                f"the catalog {file} is on a network file system ({kind}), where SQLite loses data",
                hint="set UCP_CATALOG to a file on a local disk, or to postgresql://… for a team",
            )
        if self.read_only:
            if not file.exists():
                raise NotFound(f"there is no catalog at {self.url} yet", hint=_CREATED)
            return
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PermissionDenied(
                f"the catalog {file} cannot be created: {error.strerror}",
                hint="set UCP_CATALOG to a file elsewhere",
            ) from error

    def _engine(self) -> Engine:
        options: dict[str, Any] = {
            "isolation_level": "READ COMMITTED",  # whatever the server's default is
            "connect_args": {"connect_timeout": _CONNECT_TIMEOUT},
        }
        if self.sqlite:
            options = {
                "connect_args": {
                    "timeout": _BUSY_TIMEOUT,
                    "check_same_thread": False,
                    # the driver begins no transaction of its own: `_begin_sqlite` does
                    "isolation_level": None,
                }
            }
        try:
            engine = sa.create_engine(self._url, **options)
        except ModuleNotFoundError as error:
            raise UnsupportedError(
                f"{self.url} needs the package {error.name}",
                hint="pip install 'ucformat[postgres]'",
            ) from error
        if self.sqlite:
            sa.event.listen(engine, "connect", self._prepare_sqlite)
            sa.event.listen(engine, "begin", _begin_sqlite)
        return engine

    def _prepare_sqlite(self, connection: Any, _record: Any) -> None:
        connection.execute("PRAGMA foreign_keys = ON")
        # with WAL, a power failure loses whole commits at most
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA cache_size = -65536")
        if self.read_only:
            connection.execute("PRAGMA query_only = ON")
        if connection.execute("PRAGMA journal_mode").fetchone() != ("wal",):
            connection.execute("PRAGMA journal_mode = WAL")

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """A transaction that writes, committed after the block; SQLite has one at a time."""
        if self.newer is not None:
            raise UpgradeNeeded(
                f"the catalog {self.url} was created by a newer ucformat (revision "
                f"{self.newer}): it can only be read"
            )
        if self.read_only:
            raise PermissionDenied(f"the catalog {self.url} was opened read-only")
        with translated_errors(self.url), self.engine.connect() as connection:
            connection.info["writing"] = True
            try:
                with connection.begin():
                    yield connection
            finally:
                connection.info["writing"] = False

    def write(self, work: Callable[[Connection], T]) -> T:
        """Run a function in a transaction that writes, up to ten times if it conflicts."""
        for left in reversed(range(_MAX_TRIES)):
            try:
                with self.writing() as connection:
                    return work(connection)
            except UcformatError as error:
                cause = error.__cause__
                conflict = (
                    isinstance(cause, DBAPIError)
                    and getattr(cause.orig, "sqlstate", None) in _CONFLICTS
                )
                if not conflict or not left:
                    raise
                time.sleep(random.uniform(0.01, 0.1))  # noqa: S311 - so that the retries do not collide again
        raise AssertionError  # the last try returns or raises

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A read-only transaction, which sees one state of the catalog."""
        with translated_errors(self.url), self.engine.connect() as connection:
            if not self.sqlite:
                connection.execution_options(
                    postgresql_readonly=True, isolation_level="REPEATABLE READ"
                )
            with connection.begin():
                yield connection

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()

    def _prepare_tables(self, *, upgrade: bool) -> None:
        """Create the tables if there are none, and check or upgrade their revision."""
        with self.reading() as connection:
            state = _schema_state(connection)
        if state == "empty" and not self.read_only:
            with self._exclusive() as connection:
                if _schema_state(connection) == "empty":  # no other process was faster
                    _create(connection)
                    connection.execute(
                        sa.insert(Identity).values(id=uuid4().hex, created=datetime.now(UTC))
                    )
        elif state == "empty":
            raise NotFound(f"there is no catalog at {self.url} yet", hint=_CREATED)
        elif state == "older" and upgrade:
            with self._exclusive() as connection:
                if _schema_state(connection) == "older":
                    _migrate(connection)
        elif state == "older":
            raise UpgradeNeeded(
                f"the catalog {self.url} was created by an older ucformat",
                hint="back it up, then run `ucp catalog upgrade`",
            )
        elif state == "newer":
            with self.reading() as connection:
                self.newer = _revision(connection)

    @contextmanager
    def _exclusive(self) -> Iterator[Connection]:
        """A transaction in which no other process creates or changes tables."""
        with self.writing() as connection:
            if not self.sqlite:  # SQLite has one writing transaction at a time
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))
            yield connection

    @cached_property
    def identity(self) -> str:
        """The id of this catalog."""
        with self.reading() as connection:
            return connection.execute(sa.select(Identity.id)).scalar_one()

    @property
    def revision(self) -> str:
        """The revision of the tables."""
        with self.reading() as connection:
            return str(_revision(connection))


def _parse(url: str) -> URL:
    """Parse the url for SQLAlchemy; a path is a SQLite file."""
    learn_url(url)
    if "://" not in url:
        if _ALMOST.match(url):
            raise UsageError("the catalog's url has no :// after its scheme", hint=_URLS)
        url = f"sqlite:///{local_path(url)}"
    elif url.startswith("postgres://"):
        url = f"postgresql://{url.removeprefix('postgres://')}"
    try:
        parsed = make_url(url)
        backend = parsed.get_backend_name()
    # the message would repeat parts of the url
    except (ArgumentError, NoSuchModuleError, ValueError):
        parsed = None
    server = None if parsed is None or backend == "sqlite" else f"{parsed.host}{parsed.database}"
    if parsed is None or (server and "@" in server):  # part of a password
        raise UsageError(
            "the catalog's url is malformed",
            hint=f"{_URLS}; in a password write @ as %40, / as %2F",
        )
    learn(str(parsed.password or ""), *_secret_values(parsed))
    if backend == "postgresql":
        return parsed.set(drivername="postgresql+psycopg")
    if backend != "sqlite":
        raise UsageError(f"a catalog cannot be kept in {backend}", hint=_URLS)
    return parsed


def _shown(url: URL) -> str:
    """The url without its password, and without the values of parameters that may be secret."""
    query = {name: value if name in _PLAIN else "***" for name, value in url.query.items()}
    return url.set(query=query).render_as_string(hide_password=True).replace("=%2A%2A%2A", "=***")


def _secret_values(url: URL) -> Iterator[str]:
    for name, value in url.query.items():
        if name not in _PLAIN:
            yield from (value,) if isinstance(value, str) else value


#: Parameters of a url that are not secret.
_PLAIN = {
    *(
        "host",
        "hostaddr",
        "port",
        "dbname",
        "user",
        "application_name",
        "client_encoding",
        "connect_timeout",
    ),
    *(
        "sslmode",
        "sslrootcert",
        "sslcert",
        "sslkey",
        "gssencmode",
        "channel_binding",
        "target_session_attrs",
    ),
    *(
        "keepalives",
        "keepalives_idle",
        "keepalives_interval",
        "keepalives_count",
        "tcp_user_timeout",
        "service",
    ),
    *("mode", "cache", "uri", "timeout", "passfile"),
}
_ALMOST = re.compile(r"(postgres|mysql|mariadb|oracle|mssql)[\w+]*:", re.IGNORECASE)
_CREATED = "recording a checkpoint creates it: `ucp register PLACE`"
_URLS = "write a file's path, sqlite:////an/absolute/path.db, or postgresql://user@host/database"


def _file_system(file: Path) -> str:
    """Linux's name for the type of file system that a path is on; empty if it is unknown."""
    try:
        mounts = (
            Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
        )
    except OSError:
        return ""
    real, best, kind = f"{os.path.realpath(file)}/", "", ""
    for line in mounts:
        _, point, mounted, *_ = line.split(" ")
        # the kernel writes a space as \040
        point = point.replace("\\040", " ").rstrip("/") + "/"
        # of two mounts at one point, the later one hides the other
        if real.startswith(point) and len(point) >= len(best):
            best, kind = point, mounted
    return kind


def _begin_sqlite(connection: Connection) -> None:
    """Take the write lock at once, because a transaction that first reads and then writes could not wait for it."""
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
    revision = connection.execute(sa.text(f"select version_num from {VERSION_TABLE}")).scalar()  # noqa: S608 - a constant
    return None if revision is None else str(revision)


def _create(connection: Connection) -> None:
    """Create the tables in the caller's transaction."""
    from alembic import command

    Base.metadata.create_all(connection)
    command.stamp(configuration(connection, Base.metadata, VERSION_TABLE), HEAD)


def _migrate(connection: Connection) -> None:
    """Upgrade the tables in the caller's transaction."""
    from alembic import command

    if connection.dialect.name == "sqlite":
        # batch mode drops tables that are referred to
        connection.exec_driver_sql("PRAGMA defer_foreign_keys = ON")
    command.upgrade(configuration(connection, Base.metadata, VERSION_TABLE), HEAD)


@contextmanager
def translated_errors(url: str) -> Iterator[None]:
    """Turn errors of the database, such as a lost connection or a lock, into UcformatError."""
    try:
        yield
    except DBAPIError as error:
        scrub(error)
        message = str(error.orig).strip().splitlines()[0] if error.orig else str(error)
        raise UcformatError(
            f"the catalog {url}: {redacted(message)}",
            hint=(
                "check that the database is running and that you have access; `ucp catalog "
                "info` shows its url"
            ),
        ) from error
