"""`ucp ls`: the checkpoints in the catalog."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from ucformat.catalog.as_json import entry_data
from ucformat.catalog.columns import ID_LENGTH, Column, parse_columns
from ucformat.cli.ui.catalogs import opened_catalog
from ucformat.cli.ui.options import CATALOG, bundle, command
from ucformat.cli.ui.output import terminal_width
from ucformat.cli.ui.text import ago, bytes_text, count, plural, table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ucformat.catalog.catalog import Catalog
    from ucformat.catalog.entries import Entry
    from ucformat.cli.ui.output import Output

_MAX_ROWS = 50


@dataclass(frozen=True)
class Shown:
    """Which of the checkpoints that match are shown, in which order, and what of them."""

    sort: str
    limit: int | None
    offset: int
    columns: str | None
    deleted: bool


@command
@click.argument("where", metavar="[FILTER]", default="")
@bundle(
    "shown",
    Shown,
    click.option(
        "--sort",
        default="newest",
        metavar="KEYS",
        help=(
            "Sort keys, with a minus sign for descending: '-metric.val_loss,step'; `newest` is "
            "newest first, within a run by its count of commits.  [default: newest]"
        ),
    ),
    click.option(
        "-n",
        "--limit",
        type=click.IntRange(min=0),
        metavar="N",
        help=(
            f"Maximum number of checkpoints; 0 for all.  [default: {_MAX_ROWS}; all with -q or --json]"
        ),
    ),
    click.option(
        "--offset", type=click.IntRange(min=0), default=0, metavar="N", help="Skip the first N."
    ),
    click.option(
        "--columns",
        metavar="KEYS",
        help="Columns to show: run,step,metric.val_loss,config.optimizer.lr,url, …",
    ),
    click.option(
        "-a",
        "--all",
        "deleted",
        is_flag=True,
        help="Include deleted, purged and replaced checkpoints.",
    ),
)
@click.option(
    "--runs",
    is_flag=True,
    help="List runs and their lines: launches that do not continue each other.",
)
@CATALOG
def ls(
    where: str,
    shown: Shown,
    runs: bool,  # noqa: FBT001
    out: Output,
) -> None:
    """List the checkpoints in the catalog, or those that match FILTER.

    Example: ucp ls "run = 'run7' and step > 1000 and metric.val_loss < 2.1". docs/filters.md
    describes the language.
    """
    from ucformat.catalog.lines import contradictions
    from ucformat.catalog.search import NEWEST

    if runs:
        _list_runs(where, out)
        return
    chosen = None if shown.columns is None else parse_columns(shown.columns)
    limit, offset, deleted = shown.limit, shown.offset, shown.deleted
    if limit is None and not (out.quiet or out.as_json):
        limit = _MAX_ROWS
    with opened_catalog() as catalog:
        entries = catalog.find(
            where, sort=shown.sort, limit=limit or None, offset=offset, deleted=deleted
        )
        full = limit and len(entries) == limit
        total: int | None = len(entries)
        if full or offset:  # counting may take longer than finding
            total = (catalog.count if out.as_json else catalog.count_few)(where, deleted=deleted)
        for column in chosen or ():
            if column.path and column.empty(entries):
                _check_known(catalog, column.text, out)
    out.result(
        lambda: _table(entries, chosen or _default(entries, deleted=deleted)),
        lambda: {"checkpoints": [entry_data(e) for e in entries], "total": total},
        lambda: (e.id for e in entries),
    )
    if shown.sort == NEWEST:
        for text in contradictions(entries, lambda entry: entry.name):
            out.warn(text)
    if full and total is None:
        out.note(
            f"the first {count(len(entries))}; -n {2 * len(entries)} shows more, or a narrower "
            "filter"
        )
    elif full and total is not None and total > offset + len(entries):
        out.note(
            f"{count(len(entries))} of {plural(total, 'checkpoint')}; -n {total} shows more, or a "
            "narrower filter"
        )


def _list_runs(where: str, out: Output) -> None:
    """Print the lines of all runs."""
    from ucformat.catalog.lines import launch_label

    with opened_catalog() as catalog:
        lines = catalog.lines(where)
    headings = ["run", "launch", "newest", "id", "checkpoints", "size", "age", "folder"]
    rows = [
        [
            line.run,
            launch_label(line.head.launch),
            line.head.name,
            line.head.id[:ID_LENGTH],
            count(line.checkpoints),
            bytes_text(line.nbytes),
            ago(line.head.created),
            (line.head.url or "-").rpartition("/")[0] or "-",
        ]
        for line in lines
    ]
    out.result(
        lambda: table(
            headings, rows, left=(0, 1, 2, 3, 7), shrink=(0, 2, 7), width=terminal_width()
        ),
        lambda: {
            "lines": [
                {
                    "run": line.run,
                    "launch": line.head.launch,
                    "newest": entry_data(line.head),
                    "checkpoints": line.checkpoints,
                    "bytes": line.nbytes,
                }
                for line in lines
            ]
        },
        lambda: (line.head.id for line in lines),
    )


def _check_known(catalog: Catalog, key: str, out: Output) -> None:
    """Print a note if no checkpoint in the catalog has a key, which may be misspelled."""
    from ucformat.errors import UsageError

    try:
        catalog.find(f"{key} is null", limit=1)
    except UsageError as error:
        out.note(f"{error.message.splitlines()[0]}{f'; {error.hint}' if error.hint else ''}")


def _default(entries: Sequence[Entry], *, deleted: bool) -> list[Column]:
    """The default columns; on a terminal without those that are empty."""
    launches = {(e.run, e.launch) for e in entries if e.run is not None}
    several = len(launches) > len({run for run, _ in launches})
    extra = ("state," if deleted else "") + ("launch," if several else "")
    columns = parse_columns(f"name,id,kind,{extra}size,age,alias,tag,metrics,url")
    width = terminal_width()
    if width is None:
        return columns
    columns = [c for c in columns if not c.empty(entries)]
    for key in ("url", "metrics"):  # the last to be shown where there is little room
        widths = (
            max(len(text) for text in (c.text, *(c.cell(e, short=True) for e in entries)))
            for c in columns
        )
        if sum(widths) + 2 * (len(columns) - 1) > width:
            columns = [c for c in columns if c.text != key]
    return columns


def _table(entries: Sequence[Entry], columns: Sequence[Column]) -> Iterator[str]:
    if not entries:
        return iter(("no checkpoints",))
    width = terminal_width()
    return table(
        [c.text for c in columns],
        [[c.cell(e, short=width is not None) for c in columns] for e in entries],
        left=[i for i, c in enumerate(columns) if not c.right(entries)],
        shrink=[i for i, c in enumerate(columns) if c.shrinks],
        width=width,
    )
