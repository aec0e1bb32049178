"""What `ucp retain` and `ucp gc` show of checkpoints, and the one question that they ask."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from ucformat.cli.catalogs import instant
from ucformat.cli.options import ignore
from ucformat.cli.output import terminal_width
from ucformat.cli.text import ago, bytes_text, table

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ucformat.catalog.catalog import Catalog
    from ucformat.catalog.retention import RetentionRow
    from ucformat.cli.output import Output

__all__ = ["YES", "agreed", "ignore_in", "row_data", "row_table"]

YES = click.option("-y", "--yes", is_flag=True, help="With --apply, do not ask.")


def ignore_in(rows: Iterable[RetentionRow], ignored: Sequence[str], catalog: Catalog, out: Output, name: str) -> None:
    """Do what `--ignore-dependent` says of those checkpoints of a plan that are said to be needed so.

    Args:
        rows: the checkpoints that stay.
        ignored: the ids of dependents.
        catalog: of the plan.
        out: where it is noted that nothing needs them.
        name: the command's, for the log.
    """
    needed = [row for row in rows if {*ignored} & {*row.dependents}]
    ignore(ignored, [url for row in needed for url in catalog.get(row.id).urls], out, name)


def row_data(row: RetentionRow, **more: Any) -> dict[str, Any]:
    """A checkpoint of a plan as JSON has it."""
    return {
        "id": row.id,
        "name": row.name,
        "run": row.run,
        "step": row.step,
        "created": instant(row.created),
        "bytes": row.nbytes,
        **more,
    }


def row_table(rows: Iterable[tuple[RetentionRow, Sequence[str]]], why: str = "") -> Iterator[str]:
    """A line for each checkpoint, with the reasons for what happens to it in a column `why`."""
    width = terminal_width()
    cut = None if width is None else 12
    head = ["name", "id", "size", "age", *([why] if why else [])]
    body = [
        [r.name, r.id[:cut], bytes_text(r.nbytes), ago(r.created), *(["; ".join(reasons)] if why else [])]
        for r, reasons in rows
    ]
    return table(head, body, left=(0, 1, 4), shrink=(0, 4) if why else (0,), width=width)


def agreed(question: str, out: Output, *, yes: bool) -> bool:
    """Whether to do it: somebody at a terminal is asked, unless --yes says so; elsewhere --apply has said it."""
    if yes or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return True
    if click.confirm(question, err=True):
        return True
    out.note("nothing was done")
    return False
