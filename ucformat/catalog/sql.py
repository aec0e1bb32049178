"""SQL of the user's own, which the database engine itself keeps from writing."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from datetime import date, datetime, time
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy.exc import DBAPIError

from ucformat.catalog.engine import explaining
from ucformat.errors import Refused, UcformatError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sqlalchemy import Connection

    from ucformat.catalog.engine import Database

__all__ = ["Table", "run_sql"]


@dataclass(frozen=True, slots=True)
class Table:
    """The rows that a query gave; with `truncated`, there were more than the limit.

    Values are texts, numbers, bytes, lists, dicts and None; PostgreSQL's times are texts as ISO 8601 has them. SQLite
    gives what it stores: times and JSON as text.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    truncated: bool


def run_sql(database: Database, statement: str, limit: int | None = None) -> Table:
    """The rows of one query, at most `limit` of them.

    What PostgreSQL lets a role do outside of tables (files of the server, other sessions) is for its grants to say.

    Raises:
        Refused: it is not a query, or one that writes.
        UsageError: the engine cannot make sense of it.
    """
    if limit is not None and limit < 0:
        raise UsageError(f"the limit cannot be {limit}", hint="leave it out for all rows")
    if not statement.strip():
        raise UsageError("there is no SQL in it", hint="write a query, such as: select id from checkpoint")
    if any(c == "\0" or "\ud800" <= c <= "\udfff" for c in statement):
        raise UsageError("SQL cannot hold NUL, or what is not Unicode text")
    return (_sqlite if database.sqlite else _postgresql)(database, statement, limit)


def _refused(said: str) -> Refused:
    return Refused(
        f"only one query that reads can be run here: {said}",
        hint="write SELECT, VALUES or WITH … SELECT; what the catalog holds is changed by the commands of `ucp`",
    )


def _table(columns: Iterable[str], rows: Iterable[Iterable[Any]], limit: int | None) -> Table:
    found = [tuple(map(_plain, row)) for row in islice(rows, None if limit is None else limit + 1)]
    return Table(tuple(columns), tuple(found[:limit]), limit is not None and len(found) > limit)


def _plain(value: Any) -> Any:
    match value:
        case None | bool() | int() | float() | str() | bytes():
            return value
        case Decimal():
            return int(value) if value.is_finite() and value == value.to_integral_value() else float(value)
        case datetime() | date() | time():
            return value.isoformat()
        case list() | tuple():
            return [_plain(v) for v in value]
        case dict():
            return {str(k): _plain(v) for k, v in value.items()}
    return str(value)


# SQLite: a connection of its own, opened to be read only, on which an authorizer allows nothing but reading. The first
# alone would let it attach other files, and change its own settings.

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
        case sqlite3.SQLITE_UPDATE:  # how table functions, json_each for one, declare their columns; it writes nothing
            return first in ("sqlite_master", "sqlite_temp_master")
    return action in _READS


def _sqlite(database: Database, statement: str, limit: int | None) -> Table:
    with database.reading() as c:
        file = next(Path(path) for _, name, path in c.exec_driver_sql("PRAGMA database_list") if name == "main")
    denied = []

    def authorize(action: int, first: str | None, second: str | None, *_: str | None) -> int:
        if _allowed(action, first or "", second or ""):
            return sqlite3.SQLITE_OK
        denied.append(action)
        return sqlite3.SQLITE_DENY

    try:
        with closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True, isolation_level=None)) as connection:
            connection.execute("PRAGMA query_only = ON")
            connection.set_authorizer(authorize)
            connection.set_progress_handler(lambda: 0, 1_000_000)  # else Ctrl-C would wait for the end of the query
            connection.text_factory = lambda data: data.decode(errors="replace")
            cursor = connection.execute(statement)
            if cursor.description is None:
                raise _refused("this gives no rows")
            return _table([column[0] for column in cursor.description], cursor, limit)
    except (sqlite3.Error, sqlite3.Warning) as error:  # a warning is what several statements are, before Python 3.12
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
        if code == sqlite3.SQLITE_INTERRUPT:
            raise KeyboardInterrupt from error
        if denied or code == sqlite3.SQLITE_READONLY:
            raise _refused(str(error)) from error
        if code in _BROKEN:
            raise UcformatError(f"the catalog {database.url}: {error}") from error
        raise UsageError(f"SQLite: {error}", hint=_TABLES) from error


# PostgreSQL: DECLARE CURSOR takes nothing but a query, and the protocol that psycopg sends it by takes one statement,
# so that the read-only transaction around it cannot be ended or changed.

_NO_CURSOR = {"42601", "0A000", "42P11"}  # syntax error, not supported, invalid cursor: what it says is not the point
_WRITES = {"25006", "25001", "42501"}  # read-only transaction, mode set too late, insufficient privilege
_FAILURES = {"40", "53", "55", "57", "58", "XX"}  # not of the query: deadlock, no room, locks, shutdown, system, bugs
_MESSAGE = ord("M")  # a field of PostgreSQL's errors


def _postgresql(database: Database, statement: str, limit: int | None) -> Table:
    with explaining(database.url), database.engine.connect() as opened:
        c = opened.execution_options(
            postgresql_readonly=True, isolation_level="REPEATABLE READ", stream_results=True, no_parameters=True
        )
        c.detach()  # it is closed afterwards, with all that a query can do to a session
        try:
            with closing(c.exec_driver_sql(statement)) as result:
                return _table(result.keys(), result, limit)
        except DBAPIError as error:
            raise _explained(c, statement, error) from error


def _explained(connection: Connection, statement: str, error: DBAPIError) -> Exception:
    """What to raise: Refused, UsageError, or the error itself where it is the connection that failed."""
    state = getattr(error.orig, "sqlstate", None)
    said = str(error.orig).strip().partition("\n")[0]
    if state in _WRITES:
        return _refused(said)
    if state in _NO_CURSOR:  # is it SQL at all? It is parsed alone, and not run
        connection.rollback()
        driver: Any = connection.connection.dbapi_connection
        parsed = driver.pgconn.prepare(b"", statement.encode(driver.info.encoding))
        message = parsed.error_field(_MESSAGE)
        if message is None:
            return _refused("this is another command" if state == "42601" else said)
        said = message.decode(driver.info.encoding, "replace")
    elif error.connection_invalidated or (state or "")[:2] in _FAILURES:
        return error
    return UsageError(f"PostgreSQL: {said}", hint=_TABLES)


_TABLES = "docs/catalog.md lists the tables and their columns"
