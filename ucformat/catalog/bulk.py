"""Many rows at once, in the fastest way of each engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy.exc import DBAPIError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Connection

__all__ = ["insert_rows"]


def insert_rows(
    connection: Connection, table: str, columns: Sequence[str], rows: Sequence[tuple[str | int | None, ...]]
) -> None:
    """Insert rows in the caller's transaction; no column's type has a say, so texts must be plain.

    Measured while 10,000 tensors of a new structure were recorded: 100 ms instead of 150 on SQLite, and by COPY 140
    instead of 330 on PostgreSQL.
    """
    if not rows:
        return
    names = ", ".join(columns)
    if connection.dialect.name == "postgresql":
        _copy(connection, f"COPY {table} ({names}) FROM STDIN", rows)
    else:
        marks = ", ".join("?" * len(columns))
        connection.exec_driver_sql(f"INSERT INTO {table} ({names}) VALUES ({marks})", list(rows))  # noqa: S608 - constants


def _copy(connection: Connection, statement: str, rows: Sequence[tuple[Any, ...]]) -> None:
    """By the driver itself; what it says of the database becomes what SQLAlchemy would have said."""
    import psycopg

    driver = connection.connection.driver_connection
    assert isinstance(driver, psycopg.Connection)  # noqa: S101
    text = _text(rows)
    try:
        with driver.cursor() as cursor, cursor.copy(statement) as copy:
            if text is not None:
                copy.write(text)
            else:
                for row in rows:
                    copy.write_row(row)
    except psycopg.Error as error:
        raise DBAPIError(statement, None, error) from error


def _text(rows: Sequence[tuple[Any, ...]]) -> str | None:
    """What COPY reads; None where a value would have to be written in another way, which takes four times as long."""
    columns = len(rows[0])
    line = "\t".join(["%s"] * columns) + "\n"
    text = "".join([line % row for row in rows])
    special = (
        "\\" in text or "\r" in text or text.count("\n") > len(rows) or text.count("\t") > len(rows) * (columns - 1)
    )
    return None if special or any(None in row for row in rows) else text
