"""`ucp log`: the audit log of the catalog."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from ucformat.catalog.as_json import data_of, instant
from ucformat.cli.ui.catalogs import opened_catalog
from ucformat.cli.ui.options import CATALOG, command, ref_argument
from ucformat.cli.ui.output import terminal_width
from ucformat.cli.ui.text import tabbed, table
from ucformat.texts import moment

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ucformat.catalog.rows import EventEntry
    from ucformat.cli.ui.output import Output


@command
@ref_argument("ref", "[REF]", optional=True)
@click.option(
    "-n",
    "--limit",
    type=click.IntRange(min=1),
    default=100,
    metavar="N",
    help="Maximum number of entries.  [default: 100]",
)
@CATALOG
def log(ref: str | None, limit: int, out: Output) -> None:
    """Show the audit log of a checkpoint or of all checkpoints, newest first."""
    with opened_catalog() as catalog:
        events = catalog.events(ref, limit)
    out.result(
        lambda: _table(events),
        lambda: {"events": [data_of(e) for e in events]},
        lambda: (tabbed(_row(e)) for e in events),
    )


def _row(event: EventEntry) -> tuple[str, ...]:
    return (
        str(instant(event.at)),
        event.who,
        event.action,
        event.id or "",
        json.dumps(dict(event.detail), ensure_ascii=False),
    )


def _table(events: Sequence[EventEntry]) -> Iterator[str]:
    if not events:
        return iter(("no events",))
    width = terminal_width()
    cut = None if width is None else 12
    rows = [(moment(e.at), e.action, (e.id or "")[:cut], e.who, _detail(e)) for e in events]
    return table(
        ("when", "what", "checkpoint", "who", "detail"), rows, left=5, shrink=(3, 4), width=width
    )


def _detail(event: EventEntry) -> str:
    return ", ".join(
        f"{k} {v if isinstance(v, str) else json.dumps(v)}" for k, v in event.detail.items()
    )
