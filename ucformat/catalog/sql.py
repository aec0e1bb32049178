"""SQL queries written by users, which the database itself prevents from writing."""

from __future__ import annotations

import socket
import sqlite3
import sys
import threading
import time as clock
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import date, datetime, time
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy.exc import DBAPIError

from ucformat.catalog.database import translated_errors
from ucformat.errors import PermissionDenied, UcformatError, UnsafeError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from sqlalchemy import Connection

    from ucformat.catalog.database import Database

TIMEOUT = 60.0  # seconds
_MAX_RESULT = 256 << 20  # bytes of all the values of a result


@dataclass(frozen=True, slots=True)
class QueryResult:
    """The result of a query; with `truncated`, there were more rows than the limit.

    Values are text, numbers, bytes, lists, dicts and None. PostgreSQL's times are text in ISO 8601;
    SQLite returns times and JSON as text, as it stores them.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    truncated: bool


def run_sql(
    database: Database,
    statement: str,
    limit: int | None = None,
    *,
    timeout: float | None = TIMEOUT,
    memory: int | None = None,
    trust_role: bool = False,
) -> QueryResult:
    """Run one query; see `Catalog.sql`."""
    if limit is not None and limit < 0:
        raise UsageError(f"the limit cannot be {limit}", hint="leave it out for all rows")
    if timeout is not None and not 0 < timeout <= _MAX_TIMEOUT:
        raise UsageError(
            f"the time limit cannot be {timeout:g} s",
            hint="the default is 60 s; None means no limit",
        )
    if not statement.strip():
        raise UsageError(
            "the statement is empty", hint="write a query, such as: select id from checkpoint"
        )
    if any(c == "\0" or "\ud800" <= c <= "\udfff" for c in statement):
        raise UsageError("SQL cannot contain NUL or unpaired surrogates")
    if database.sqlite:
        return _sqlite(database, statement, limit, timeout, memory)
    return _postgresql(database, statement, limit, timeout, trust_role=trust_role)


_MAX_TIMEOUT = 1_000_000  # seconds: PostgreSQL counts milliseconds in 31 bits


def _late(timeout: float | None) -> UcformatError:
    return UcformatError(
        f"the query was cancelled after {timeout:g} s",
        hint="narrow it, or allow more time: `ucp sql --timeout 10m`",
    )


def _refused(reason: str) -> PermissionDenied:
    return PermissionDenied(
        f"only a single read-only query can be run: {reason}",
        hint="write SELECT, VALUES or WITH … SELECT; other commands of `ucp` change the catalog",
    )


def _table(columns: Iterable[str], rows: Iterable[Iterable[Any]], limit: int | None) -> QueryResult:
    values: list[tuple[Any, ...]] = []
    room = _MAX_RESULT
    for row in islice(rows, None if limit is None else limit + 1):
        values.append(tuple(map(_plain, row)))
        room -= _nbytes(values[-1])
        if room < 0:
            raise UcformatError(
                f"the result has more than {_MAX_RESULT >> 20} MiB, at row {len(values)}",
                hint="ask for fewer rows (`-n`), or fewer columns",
            )
    return QueryResult(
        tuple(columns), tuple(values[:limit]), limit is not None and len(values) > limit
    )


def _nbytes(value: Any) -> int:
    """The approximate memory of a value."""
    match value:
        case list() | tuple():
            return 64 + sum(map(_nbytes, value))
        case dict():
            return 64 + sum(_nbytes(k) + _nbytes(v) for k, v in value.items())
    return 8 + sys.getsizeof(value)


def _plain(value: Any) -> Any:
    match value:
        case None | bool() | int() | float() | str() | bytes():
            return value
        case Decimal():
            return (
                int(value)
                if value.is_finite() and value == value.to_integral_value()
                else float(value)
            )
        case datetime() | date() | time():
            return value.isoformat()
        case list() | tuple():
            return [_plain(v) for v in value]
        case dict():
            return {str(k): _plain(v) for k, v in value.items()}
    return str(value)


# SQLite: a separate read-only connection with an authorizer that allows only reading. A read-only
# connection alone could attach other files and change its settings. Limits keep single steps of the
# query short, so that the progress handler, which is called between steps, can cancel it.

_STEPS = 100  # of SQLite's virtual machine between calls of the progress handler
_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: 16 << 20,  # bytes of a value, and of a row
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 1000,
    sqlite3.SQLITE_LIMIT_COLUMN: 500,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}

_READS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE}
_PRAGMAS = {
    "foreign_key_list",
    "index_info",
    "index_list",
    "index_xinfo",
    "table_info",
    "table_list",
    "table_xinfo",
}
_BROKEN = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_NOTADB,
}


def _allowed(action: int, first: str, second: str) -> bool:
    match action:
        case sqlite3.SQLITE_PRAGMA:
            return first.lower() in _PRAGMAS
        case sqlite3.SQLITE_FUNCTION:
            return second.lower() != "load_extension"
        # table functions such as json_each declare their columns so; nothing is written
        case sqlite3.SQLITE_UPDATE:
            return first in ("sqlite_master", "sqlite_temp_master")
    return action in _READS


def _sqlite(
    database: Database, statement: str, limit: int | None, timeout: float | None, memory: int | None
) -> QueryResult:
    with database.reading() as c:
        file = next(
            Path(path)
            for _, name, path in c.exec_driver_sql("PRAGMA database_list")
            if name == "main"
        )
    denied = []

    def authorize(action: int, first: str | None, second: str | None, *_: str | None) -> int:
        if _allowed(action, first or "", second or ""):
            return sqlite3.SQLITE_OK
        denied.append(action)
        return sqlite3.SQLITE_DENY

    end = None if timeout is None else clock.monotonic() + timeout
    late = False

    # also set without a time limit, else Ctrl-C would take effect only at the end
    def out_of_time() -> bool:
        nonlocal late
        late = end is not None and clock.monotonic() > end
        return late

    try:
        with closing(
            sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True, isolation_level=None)
        ) as connection:
            connection.execute("PRAGMA query_only = ON")
            if memory is not None:
                # so that the limit covers sorting and joining
                connection.execute("PRAGMA temp_store = MEMORY")
                connection.execute(f"PRAGMA hard_heap_limit = {memory}")
            for category, most in _LIMITS.items():
                connection.setlimit(category, most)
            connection.set_authorizer(authorize)
            connection.set_progress_handler(out_of_time, _STEPS)
            connection.text_factory = lambda data: data.decode(errors="replace")
            cursor = connection.execute(statement)
            if cursor.description is None:
                raise _refused("this returns no rows")
            return _table([column[0] for column in cursor.description], cursor, limit)
    except (sqlite3.Error, sqlite3.Warning, MemoryError) as error:
        if late:
            raise _late(timeout) from error
        raise _meaning(error, database, denied=bool(denied)) from error


def _meaning(error: Exception, database: Database, *, denied: bool) -> BaseException:
    """The exception to raise for an error of SQLite; before Python 3.12, several statements are a warning."""
    # the primary code, without the bits of extended ones
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    if isinstance(error, MemoryError):
        return UcformatError(
            "the query needs more memory than its limit", hint="narrow it, or select fewer rows"
        )
    # Ctrl-C in the progress handler ends the query, and sqlite3 drops the exception
    if code == sqlite3.SQLITE_INTERRUPT:
        return KeyboardInterrupt()
    if denied or code == sqlite3.SQLITE_READONLY:
        return _refused(str(error))
    if code in _BROKEN:
        return UcformatError(f"the catalog {database.url}: {error}")
    return UsageError(f"SQLite: {error}", hint=_TABLES)


# PostgreSQL: DECLARE CURSOR accepts only a query, and psycopg's protocol only one statement, so
# that the read-only transaction around it cannot be ended or changed. But functions with effects
# beyond tables run in such a transaction too, and with set_config() a query can leave the role and
# the time limit that are set for its session. Therefore, the roles that the connection may assume
# are checked, and the time is measured in this process.

# syntax error, not supported, invalid cursor: the message is about the cursor
_NO_CURSOR = {"42601", "0A000", "42P11"}
# read-only transaction, mode set too late, insufficient privilege
_WRITES = {"25006", "25001", "42501"}
# not the query's: deadlock, no room, locks, shutdown, system, bugs
_FAILURES = {"40", "53", "55", "57", "58", "XX"}
_MESSAGE = ord("M")  # a field of PostgreSQL's errors
_GRACE = 5.0  # seconds that PostgreSQL has to cancel a query
_RIGHTS = """
with mine as (
  select oid, rolname, rolsuper, rolreplication from pg_roles where pg_has_role(session_user, oid, 'member')
)
select 'it is a superuser, or may become one (' || rolname || ')' from mine where rolsuper
union all
select 'it may start replication' || case rolname when session_user then '' else ' as ' || rolname end
from mine where rolreplication
union all
select 'it is a member of ' || rolname from mine
where rolname in ('pg_read_server_files', 'pg_write_server_files', 'pg_execute_server_program', 'pg_signal_backend')
union all
select 'it may call ' || min(proname) from mine, pg_proc
where pronamespace = 'pg_catalog'::regnamespace and proacl is not null
and has_function_privilege(mine.oid, pg_proc.oid, 'execute')
and not has_function_privilege('public', pg_proc.oid, 'execute')
and not has_function_privilege('pg_monitor', pg_proc.oid, 'execute')
having count(*) > 0
"""  # functions that are not public, except those of pg_monitor, which only show the server's activity


def _excess_rights(driver: Any) -> str | None:
    excess = driver.execute(_RIGHTS).fetchone()
    return (
        None
        if excess is None
        else f"role {driver.info.user!r} may do more than read tables: {excess[0]}"
    )


def excess_rights(database: Database) -> str | None:
    """What else than reading tables a PostgreSQL role may do; None if nothing, and for SQLite."""
    if database.sqlite:
        return None
    with database.reading() as c:
        return _excess_rights(c.connection.driver_connection)


def _postgresql(
    database: Database,
    statement: str,
    limit: int | None,
    timeout: float | None,
    *,
    trust_role: bool,
) -> QueryResult:
    with translated_errors(database.url), database.engine.connect() as opened:
        c = opened.execution_options(
            postgresql_readonly=True,
            isolation_level="REPEATABLE READ",
            stream_results=True,
            no_parameters=True,
        )
        c.detach()  # closed afterwards, since a query can change the session
        driver: Any = c.connection.dbapi_connection
        rights = None if trust_role else _excess_rights(driver)
        if rights is not None:
            raise UnsafeError(
                f"PostgreSQL's {rights}",
                hint=(
                    "connect with a read-only role (docs/catalog.md shows how to create one), "
                    "or pass --trust-role"
                ),
            )
        late = threading.Event()
        try:
            with _ending(driver, timeout, late), closing(c.exec_driver_sql(statement)) as result:
                return _table(result.keys(), _until(late, result), limit)
        except (DBAPIError, _Late) as error:
            if late.is_set():
                c.invalidate()  # do not wait for the query
                driver.close()
                raise _late(timeout) from error
            if isinstance(error, _Late):
                raise
            raise _explained(c, statement, error) from error


class _Late(Exception):
    """The time limit was reached between two rows."""


def _until(late: threading.Event, rows: Iterable[Iterable[Any]]) -> Iterator[Iterable[Any]]:
    for row in rows:
        if late.is_set():
            raise _Late
        yield row


@contextmanager
def _ending(driver: Any, timeout: float | None, late: threading.Event) -> Iterator[None]:
    """Cancel the query at the time limit: first by the server, then by closing the connection."""
    if timeout is None:
        yield
        return
    # Also ends a query whose connection was closed, unless it has changed this setting.
    driver.execute(f"SET LOCAL statement_timeout = {int((timeout + _GRACE) * 1000)}")
    done = threading.Event()

    def end() -> None:
        if done.wait(timeout):
            return
        late.set()
        with suppress(Exception):  # if this fails, the connection is closed
            driver.cancel_safe(timeout=_GRACE)
        if not done.wait(_GRACE):
            with (
                suppress(OSError),
                socket.fromfd(driver.pgconn.socket, socket.AF_INET, socket.SOCK_STREAM) as line,
            ):
                line.shutdown(socket.SHUT_RDWR)

    watch = threading.Thread(target=end, name="ucformat-sql", daemon=True)
    watch.start()
    try:
        yield
    finally:
        done.set()
        watch.join()


def _explained(connection: Connection, statement: str, error: DBAPIError) -> Exception:
    """The exception to raise: PermissionDenied, UsageError, or the error itself if the connection failed."""
    state = getattr(error.orig, "sqlstate", None)
    message = str(error.orig).strip().partition("\n")[0]
    if state in _WRITES:
        return _refused(message)
    if state in _NO_CURSOR:  # parse it without running it, to find out whether it is SQL at all
        connection.rollback()
        driver: Any = connection.connection.dbapi_connection
        parsed = driver.pgconn.prepare(b"", statement.encode(driver.info.encoding))
        error_message = parsed.error_field(_MESSAGE)
        if error_message is None:
            return _refused("this is another command" if state == "42601" else message)
        message = error_message.decode(driver.info.encoding, "replace")
    elif error.connection_invalidated or (state or "")[:2] in _FAILURES:
        return error
    return UsageError(f"PostgreSQL: {message}", hint=_TABLES)


_TABLES = "docs/catalog.md lists the tables and their columns"
