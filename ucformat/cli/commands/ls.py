"""`ucp ls`: the checkpoints in the catalog."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from ucformat.catalog.entries import BY_NAME, KEYS, Kind
from ucformat.cli.ui.catalogs import entry_data, opened_catalog
from ucformat.cli.ui.options import CATALOG, bundle, command
from ucformat.cli.ui.output import terminal_width
from ucformat.cli.ui.text import ago, bytes_text, count, moment, plural, table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ucformat.catalog.catalog import Catalog
    from ucformat.catalog.entries import Entry, EntryKey
    from ucformat.cli.ui.output import Output

_ID_LENGTH = 12  # characters of an id that are shown to people

_PART = re.compile(r'"(?:[^"]|"")*"|[^.,"]+')
_KEY = re.compile(rf"\s*((?:{_PART.pattern})(?:\.(?:{_PART.pattern}))*)\s*(?:,|$)")


class Column:
    """A column of the table.

    Args:
        text: the key as it was given.
        key: the key that it is, or begins with.
        path: where its value is in that of the key.
    """

    def __init__(self, text: str, key: EntryKey, path: Sequence[str] = ()) -> None:
        self.text = text
        self.path = path
        self._key = key

    def value(self, entry: Entry) -> Any:
        """The value of a checkpoint; None if it has none."""
        return _reach(self._key.value(entry), self.path)

    @property
    def shrinks(self) -> bool:
        """Whether its cells may be shortened."""
        return not (self._key.whole or self._key.kind in _FORMATS)

    def right(self, entries: Sequence[Entry]) -> bool:
        """Whether it is aligned right, as it has only numbers."""
        values = [v for e in entries if (v := self.value(e)) is not None]
        return self._key.kind in (Kind.INTEGER, Kind.SIZE, Kind.AGE) or bool(
            values and all(isinstance(v, int | float) for v in values)
        )

    def empty(self, entries: Sequence[Entry]) -> bool:
        """Whether no checkpoint has a value."""
        return not any(self.value(e) not in (None, (), []) for e in entries)

    def cell(self, entry: Entry, *, short: bool) -> str:
        """Format the value of a checkpoint."""
        value = self.value(entry)
        if value is None:
            return "-"
        match self._key.name:
            case "id" if short:
                return str(value)[:_ID_LENGTH]
            case "launch" if short:
                from ucformat.catalog.lines import launch_label

                return launch_label(value)
            case "verified":
                return "ok" if value else "damaged"
        return _FORMATS[self._key.kind](value) if self._key.kind in _FORMATS else _text(value)


_FORMATS: dict[Kind | None, Callable[[Any], str]] = {
    Kind.INTEGER: count,
    Kind.SIZE: bytes_text,
    Kind.AGE: ago,
    Kind.TIME: moment,
}


def _text(value: Any) -> str:
    match value:
        case str():
            return value
        case float():
            return f"{value:.6g}"
        case list() | tuple() if all(isinstance(v, str) for v in value):
            return ", ".join(value) or "-"
    return json.dumps(value, ensure_ascii=False)


def parse_columns(text: str) -> list[Column]:
    """Parse the option --columns."""
    from ucformat.errors import UsageError

    columns, at = [], 0
    while at < len(text):
        match = _KEY.match(text, at)
        if match is None:
            raise UsageError(
                f"{text[at:]!r} is not a list of columns",
                hint='write keys as: run,step,config."a.b".c',
            )
        columns.append(_column(match[1]))
        at = match.end()
    return columns or parse_columns("name,id")


def _column(key: str) -> Column:
    from difflib import get_close_matches

    from ucformat.errors import UsageError

    root, *path = [_plain(part) for part in _PART.findall(key)]
    entry_key = BY_NAME.get(root)
    if entry_key is not None and (entry_key.name != root) is bool(path):
        return Column(key, entry_key, path)
    names = [k.name for k in KEYS if k.root != "tensor"]
    near = get_close_matches(key, names, 1, 0.5)
    hint = f"did you mean {near[0]}?" if near else f"the columns are {', '.join(names)}"
    raise UsageError(f"there is no column {key!r}", hint=hint)


def _plain(part: str) -> str:
    return part[1:-1].replace('""', '"') if part.startswith('"') else part


def _reach(value: Any, path: Sequence[str]) -> Any:
    """The value at a path; None if there is none."""
    for part in path:
        if isinstance(value, list):
            value = value[int(part)] if part.isdecimal() and int(part) < len(value) else None
        else:
            value = value.get(part) if isinstance(value, dict) else None
    return value


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
            line.head.id[:_ID_LENGTH],
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
