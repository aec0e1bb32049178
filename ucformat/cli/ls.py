"""`ucp ls`: the checkpoints that the catalog knows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ucformat.cli.catalogs import entry_data, opened_catalog
from ucformat.cli.options import CATALOG, command
from ucformat.cli.output import terminal_width
from ucformat.cli.text import count, plural, table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ucformat.catalog.catalog import Catalog
    from ucformat.catalog.entries import Entry
    from ucformat.cli.columns import Column
    from ucformat.cli.output import Output

__all__ = ["ls"]

_MOST = 50


@command
@click.argument("where", metavar="[FILTER]", default="")
@click.option(
    "--sort",
    default="newest",
    metavar="KEYS",
    help="By these keys, a minus sign for descending: '-metric.val_loss,step'; `newest` is the newest first, of a run "
    "by its count of commits.  [default: newest]",
)
@click.option(
    "-n",
    "--limit",
    type=click.IntRange(min=0),
    metavar="N",
    help=f"At most so many; 0 for all.  [default: {_MOST}, with -q and --json all]",
)
@click.option("--offset", type=click.IntRange(min=0), default=0, metavar="N", help="Leave out the first N.")
@click.option("--columns", metavar="KEYS", help="What to show: run,step,metric.val_loss,config.optimizer.lr,url, …")
@click.option("-a", "--all", "deleted", is_flag=True, help="Those that are deleted, purged or replaced, too.")
@CATALOG
def ls(
    where: str,
    sort: str,
    limit: int | None,
    offset: int,
    columns: str | None,
    deleted: bool,  # noqa: FBT001
    out: Output,
) -> None:
    """List the checkpoints that the catalog knows, or those that FILTER takes.

    For one: ucp ls "run = 'run7' and step > 1000 and metric.val_loss < 2.1". docs/filters.md describes the language.
    """
    from ucformat.catalog.entries import NEWEST
    from ucformat.catalog.newest import contradictions
    from ucformat.cli.columns import parse_columns

    chosen = None if columns is None else parse_columns(columns)
    if limit is None and not (out.quiet or out.as_json):
        limit = _MOST
    with opened_catalog() as catalog:
        found = catalog.find(where, sort=sort, limit=limit or None, offset=offset, deleted=deleted)
        full = limit and len(found) == limit
        total = catalog.count(where, deleted=deleted) if full or offset else len(found)
        for column in chosen or ():
            if column.path and column.empty(found):
                _check_known(catalog, column.key, out)
    out.result(
        lambda: _table(found, chosen or _default(found, deleted=deleted)),
        lambda: {"checkpoints": [entry_data(e) for e in found], "total": total},
        lambda: (e.id for e in found),
    )
    if sort == NEWEST:
        for text in contradictions(found, lambda entry: entry.name):
            out.warn(text)
    if full and total > offset + len(found):
        out.note(f"{count(len(found))} of {plural(total, 'checkpoint')}; -n {total} shows more, or a narrower filter")


def _check_known(catalog: Catalog, key: str, out: Output) -> None:
    """Tell if no checkpoint at all has such a key: it may be misspelled."""
    from ucformat.errors import UsageError

    try:
        catalog.count(f"{key} is null")
    except UsageError as error:
        out.note(f"{error.message.splitlines()[0]}{f'; {error.hint}' if error.hint else ''}")


def _default(found: Sequence[Entry], *, deleted: bool) -> list[Column]:
    """The columns that are shown unasked; of these, people see only the ones in which anything stands."""
    from ucformat.cli.columns import parse_columns

    columns = parse_columns(f"name,id,kind,{'state,' if deleted else ''}size,age,alias,tag")
    return columns if terminal_width() is None else [c for c in columns if not c.empty(found)]


def _table(found: Sequence[Entry], columns: Sequence[Column]) -> Iterator[str]:
    if not found:
        return iter(("no checkpoints",))
    width = terminal_width()
    return table(
        [c.key for c in columns],
        [[c.text(e, short=width is not None) for c in columns] for e in found],
        left=[i for i, c in enumerate(columns) if not c.right(found)],
        shrink=[i for i, c in enumerate(columns) if c.shrinks],
        width=width,
    )
