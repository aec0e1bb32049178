"""`ucp ls`: the checkpoints in the catalog."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from ucformat.catalog.as_json import entry_data
from ucformat.catalog.columns import ID_LENGTH, Column, parse_columns
from ucformat.cli.ui.catalogs import opened_catalog
from ucformat.cli.ui.options import CATALOG, bundle, command
from ucformat.cli.ui.output import terminal_width
from ucformat.cli.ui.plot import MAX_SERIES, plot
from ucformat.cli.ui.text import tabbed, table
from ucformat.errors import UsageError
from ucformat.texts import ago, bytes_text, count, plural

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from ucformat.catalog.catalog import Catalog
    from ucformat.catalog.entries import Entry
    from ucformat.cli.ui.output import Output

_MAX_ROWS, _MAX_POINTS = 50, 1000
_WIDTH_OF_PIPES = 80


@dataclass(frozen=True)
class Shown:
    """Which of the checkpoints that match are shown, in which order, and what of them."""

    sort: str
    limit: int | None
    offset: int
    columns: str | None
    deleted: bool
    plotted: str | None


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
    click.option(
        "--plot",
        "plotted",
        metavar="KEY",
        help="Draw a number, such as metric.loss, along the steps instead, a mark for each run.",
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
    plotted = shown.plotted is not None
    if plotted and shown.columns is not None:
        raise UsageError("--plot and --columns exclude each other")
    chosen = None if shown.columns is None else parse_columns(shown.columns)
    if shown.plotted is not None:
        chosen = parse_columns(shown.plotted)
    offset, deleted = shown.offset, shown.deleted
    with opened_catalog() as catalog:
        entries, total, full = _find(catalog, where, shown, out)
        for column in chosen or ():
            if column.path and column.empty(entries):
                _check_known(catalog, column.text, out)
    if plotted and chosen is not None:
        _plot(entries, chosen, out)
    else:
        _print(entries, chosen, total, out, deleted=deleted)
    if shown.sort == NEWEST:
        for text in contradictions(entries, lambda entry: entry.name):
            out.warn(text)
    if full:
        _tell_of_more(len(entries), offset, total, out)


def _find(
    catalog: Catalog, where: str, shown: Shown, out: Output
) -> tuple[list[Entry], int | None, bool]:
    """The checkpoints, how many match (None: it would take long to count them), and whether there may be more."""
    plain = out.quiet or out.as_json
    most = _MAX_ROWS if shown.plotted is None else _MAX_POINTS
    limit = None if plain and shown.limit is None else most if shown.limit is None else shown.limit
    entries = catalog.find(
        where, sort=shown.sort, limit=limit or None, offset=shown.offset, deleted=shown.deleted
    )
    full = bool(limit) and len(entries) == limit
    total: int | None = len(entries)
    if full or shown.offset:  # counting may take longer than finding
        total = (catalog.count if out.as_json else catalog.count_few)(where, deleted=shown.deleted)
    return entries, total, full


def _tell_of_more(listed: int, offset: int, total: int | None, out: Output) -> None:
    """Print a note if there are more than are listed."""
    if total is None:
        out.note(f"the first {count(listed)}; -n {2 * listed} shows more, or a narrower filter")
    elif total > offset + listed:
        out.note(
            f"{count(listed)} of {plural(total, 'checkpoint')}; -n {total} shows more, or a "
            "narrower filter"
        )


def _print(
    entries: Sequence[Entry],
    chosen: Sequence[Column] | None,
    total: int | None,
    out: Output,
    *,
    deleted: bool,
) -> None:
    """Print checkpoints as a table."""
    out.result(
        lambda: _table(entries, chosen or _default(entries, deleted=deleted)),
        lambda: {"checkpoints": [entry_data(e) for e in entries], "total": total},
        lambda: (e.id for e in entries),
    )


def _plot(entries: Sequence[Entry], chosen: Sequence[Column], out: Output) -> None:
    """Draw the values of a column along the steps, those of each run together."""
    if len(chosen) != 1:
        raise UsageError("--plot draws one key", hint="such as: --plot metric.loss")
    column = chosen[0]
    series: dict[str, list[tuple[int, float | None]]] = {}
    for entry in sorted((e for e in entries if e.step is not None), key=lambda e: e.created):
        value = column.value(entry)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise UsageError(
                f"{column.text} of {entry.name} is no number",
                hint="draw one, such as: --plot metric.loss",
            )
        points = series.setdefault(entry.run or "-", [])
        points.append((entry.step or 0, None if value is None else float(value)))
    if len(series) > MAX_SERIES:
        raise UsageError(
            f"these checkpoints are of {len(series)} runs, and at most {MAX_SERIES} are drawn",
            hint="choose some with a filter, such as: run like 'run7%'",
        )
    for points in series.values():
        points.sort(key=lambda point: point[0])
    out.result(
        lambda: plot(_title(column, series), series, terminal_width() or _WIDTH_OF_PIPES),
        lambda: {
            "plot": column.text,
            "series": [{"run": run, "points": points} for run, points in series.items()],
        },
        lambda: (
            tabbed((run, str(step), "-" if value is None else repr(value)))
            for run, points in series.items()
            for step, value in points
        ),
    )
    values = [value for points in series.values() for _, value in points]
    gaps = {
        "without a step": len(entries) - len(values),
        "without a value": values.count(None),
        "with a value that is not finite": sum(
            v is not None and not math.isfinite(v) for v in values
        ),
    }
    if told := ", ".join(f"{n} {what}" for what, n in gaps.items() if n):
        out.note(f"not drawn of {plural(len(entries), 'checkpoint')}: {told}")


def _title(column: Column, series: Collection[str]) -> str:
    return f"{column.text} of {next(iter(series))}" if len(series) == 1 else column.text


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
