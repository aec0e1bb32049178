"""`ucp sql`: queries of the catalog in SQL."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from ucformat.cli.ui.catalogs import opened_catalog
from ucformat.cli.ui.options import CATALOG, TIME, command
from ucformat.cli.ui.output import terminal_width
from ucformat.cli.ui.text import tabbed, table
from ucformat.texts import plural

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import timedelta

    from ucformat.catalog.sql import QueryResult
    from ucformat.cli.ui.output import Output

_MAX_ROWS = 100
_MEMORY = 1 << 30  # of SQLite


@command
@click.argument("statement", metavar="STATEMENT")
@click.option(
    "-n",
    "--limit",
    type=click.IntRange(min=0),
    metavar="N",
    help=f"Maximum number of rows; 0 for all.  [default: {_MAX_ROWS}; all with -q or --json]",
)
@click.option(
    "--timeout",
    type=TIME,
    default="60s",
    show_default=True,
    metavar="TIME",
    help="Time limit of the query.",
)
@click.option(
    "--trust-role",
    is_flag=True,
    help="Allow a PostgreSQL role that may do more than read tables (docs/catalog.md).",
)
@CATALOG
def sql(
    statement: str, limit: int | None, timeout: timedelta, *, trust_role: bool, out: Output
) -> None:
    """Query the catalog with SQL, read-only.

    Example: ucp sql 'select run.name, max(step) from checkpoint join run on run.id = run_id group
    by 1'. docs/catalog.md describes the tables, which may change between versions; `ucp ls` is
    stable.
    """
    if limit is None and not (out.quiet or out.as_json):
        limit = _MAX_ROWS
    with opened_catalog() as catalog:
        result = catalog.sql(
            statement,
            limit or None,
            timeout=timeout.total_seconds(),
            memory=_MEMORY,
            trust_role=trust_role,
        )
    out.result(
        lambda: _table(result),
        lambda: {
            "columns": list(result.columns),
            "rows": [[_plain(v) for v in row] for row in result.rows],
            "truncated": result.truncated,
        },
        lambda: (tabbed(_text(v, "") for v in row) for row in result.rows),
    )
    if result.truncated:
        out.note(f"there are more than {plural(len(result.rows), 'row')}; -n 0 shows all")


def _table(result: QueryResult) -> Iterator[str]:
    columns = range(len(result.columns))
    numbers = [
        i for i in columns if all(isinstance(row[i], int | float | None) for row in result.rows)
    ]
    left = [i for i in columns if i not in numbers or not result.rows]
    rows = [[_text(v, "-") for v in row] for row in result.rows]
    yield from table(result.columns, rows, left=left, shrink=left, width=terminal_width())
    if not result.rows:
        yield "no rows"


def _plain(value: Any) -> Any:
    """The JSON of a value: bytes as hexadecimal digits."""
    return value.hex() if isinstance(value, bytes) else value


def _text(value: Any, null: str) -> str:
    match value:
        case None:
            return null
        case str():
            return value
        case bytes():
            return value.hex()
        case int() | float():
            return str(value)
    return json.dumps(value, ensure_ascii=False)
