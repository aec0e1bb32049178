"""`ucp tag`, `untag`, `metric`, `note`, `hold`, `release` and `alias`: annotations of checkpoints."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import click

from ucformat.catalog.as_json import data_of, instant
from ucformat.cli.ui.catalogs import opened_catalog
from ucformat.cli.ui.options import CATALOG, REF, command, parse_metric
from ucformat.cli.ui.output import terminal_width
from ucformat.cli.ui.text import table
from ucformat.texts import moment, plural

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from datetime import datetime, timedelta

    from ucformat.catalog.catalog import Catalog
    from ucformat.catalog.entries import AliasEntry, Entry, MoveEntry
    from ucformat.cli.ui.output import Output


def _changed(ref: str, change: Callable[[Catalog, str], object]) -> Entry:
    """Change a checkpoint in the catalog, by a function of its id; returns its entry then."""
    with opened_catalog() as catalog:
        checkpoint = catalog.get(ref).id
        change(catalog, checkpoint)
        return catalog.get(checkpoint)


@command
@REF
@click.argument("tags", metavar="TAG…", nargs=-1, required=True)
@click.option("--permanent", is_flag=True, help="Make them permanent: they cannot be removed.")
@CATALOG
def tag(ref: str, tags: tuple[str, ...], permanent: bool, out: Output) -> None:  # noqa: FBT001
    """Add tags to a checkpoint.

    A tagged checkpoint is not deleted until `ucp untag` removes its tags. For a name that moves,
    see `ucp alias`.
    """
    entry = _changed(ref, lambda catalog, id_: catalog.tag(id_, *tags, permanent=permanent))
    out.result(
        lambda: [f"{entry.name}: {', '.join(entry.tags)}"],
        lambda: _data(entry, tags=list(entry.tags)),
    )


@command
@REF
@click.argument("tags", metavar="TAG…", nargs=-1, required=True)
@click.option("--reason", required=True, metavar="TEXT", help="Why, for the audit log (ucp log).")
@CATALOG
def untag(ref: str, tags: tuple[str, ...], reason: str, out: Output) -> None:
    """Remove tags from a checkpoint, all of them or none. Permanent tags cannot be removed.

    Without a tag, alias, hold or dependent, a checkpoint may be deleted by the next `ucp retain`.
    """
    entry = _changed(ref, lambda catalog, id_: catalog.untag(id_, *tags, reason=reason))
    out.result(
        lambda: [f"{entry.name}: {', '.join(entry.tags) or 'no tags'}"],
        lambda: _data(entry, tags=list(entry.tags)),
    )


@command
@REF
@click.argument("metrics", metavar="NAME=VALUE…", nargs=-1, required=True)
@CATALOG
def metric(ref: str, metrics: tuple[str, ...], out: Output) -> None:
    """Set metrics of a checkpoint, replacing those with the same names.

    VALUE is a number; nan and inf are allowed.
    """
    values = dict(parse_metric(text, "'NAME=VALUE…'") for text in metrics)
    entry = _changed(ref, lambda catalog, id_: catalog.metric(id_, values))
    out.result(
        lambda: [f"{entry.name}: {', '.join(f'{n} {entry.metrics[n]:g}' for n in values)}"],
        lambda: _data(entry, metrics=dict(entry.metrics)),
    )


@command
@REF
@click.argument("text", metavar="TEXT")
@CATALOG
def note(ref: str, text: str, out: Output) -> None:
    """Add a note to a checkpoint, which `ucp show` prints."""
    entry = _changed(ref, lambda catalog, id_: catalog.note(id_, text))
    out.result(
        lambda: [f"{entry.name}: {plural(len(entry.notes), 'note')}"],
        lambda: _data(entry, notes=[data_of(n) for n in entry.notes]),
    )


@command
@REF
@click.option("--reason", required=True, metavar="TEXT", help="Why it must be kept.")
@click.option(
    "--until",
    metavar="WHEN",
    help="How long: 12h, 30d, or through 2026-12-31 (UTC).  [default: until released]",
)
@CATALOG
def hold(ref: str, reason: str, until: str | None, out: Output) -> None:
    """Protect a checkpoint from deletion until a time or until `ucp release`."""
    end = None if until is None else _until(until)
    with opened_catalog() as catalog:
        entry = catalog.get(ref)
        number = catalog.hold(entry.id, reason, end)
        new_hold = next(h for h in catalog.get(entry.id).holds if h.id == number)
    time = "until it is released" if new_hold.until is None else f"until {moment(new_hold.until)}"
    out.result(
        lambda: [f"{entry.name}: hold {number}, {time}"],
        lambda: _data(entry, hold=data_of(new_hold)),
        lambda: [str(number)],
    )


def _until(text: str) -> datetime | timedelta:
    from datetime import UTC, date, datetime, time

    from ucformat.schema.policy import parse_duration

    try:
        if re.fullmatch(r"\d+[a-z]", text, re.ASCII):
            return parse_duration(text)
        if re.fullmatch(r"\d{4}-\d{2}-\d{2}", text, re.ASCII):
            return datetime.combine(date.fromisoformat(text), time.max, UTC)
        at = datetime.fromisoformat(text)
    except ValueError:
        hint = "write a duration such as 12h or 30d, or a date such as 2026-12-31"
        raise click.BadParameter(
            f"{text!r} is not a time: {hint}", param_hint="'--until'"
        ) from None
    return at if at.tzinfo else at.replace(tzinfo=UTC)


@command
@REF
@click.option(
    "--hold",
    "number",
    type=int,
    metavar="N",
    help="Only the hold with this number.  [default: all]",
)
@CATALOG
def release(ref: str, number: int | None, out: Output) -> None:
    """Release the holds on a checkpoint."""
    from ucformat.errors import NotFound

    with opened_catalog() as catalog:
        entry = catalog.get(ref)
        ended = catalog.release(entry.id, number)
        left = catalog.get(entry.id).holds
    if number is not None and not ended:
        numbers = ", ".join(str(h.id) for h in left)
        raise NotFound(
            f"{entry.name} has no hold {number}", hint=f"its holds: {numbers}" if numbers else None
        )
    out.result(
        lambda: [
            f"{entry.name}: {plural(ended, 'hold')} released{f', {len(left)} left' if left else ''}"
        ],
        lambda: _data(entry, released=ended, holds=[data_of(h) for h in left]),
        lambda: [str(ended)],
    )


def _data(entry: Entry, **annotations: Any) -> dict[str, Any]:
    return {"id": entry.id, "name": entry.name, **annotations}


_NAME = click.argument("name", metavar="NAME")
_EXPECT = click.option(
    "--expect",
    metavar="REF",
    help="Only if it currently points to this checkpoint; otherwise exit with 4 (conflict).",
)


@command
@_NAME
@REF
@_EXPECT
@click.option("--new", is_flag=True, help="Only if the alias does not exist yet.")
@CATALOG
def set_(
    name: str,
    ref: str,
    expect: str | None,
    new: bool,  # noqa: FBT001
    out: Output,
) -> None:
    """Point an alias to a checkpoint; an existing alias is moved.

    An alias named run/NAME belongs to one run, and can also be written as run@NAME.
    """
    from ucformat.catalog.labels import ANY

    if new and expect is not None:
        raise click.UsageError("--new and --expect are mutually exclusive")
    with opened_catalog() as catalog:
        entry = catalog.get(ref)
        catalog.alias(name, entry.id, expect=None if new else ANY if expect is None else expect)
        last = catalog.alias_history(name)[-1]
    out.result(
        lambda: [f"{name} -> {entry.name}  {entry.id}"],
        lambda: {
            "alias": name,
            "id": entry.id,
            "name": entry.name,
            "version": last.version,
            "previous": last.source,
        },
        lambda: [entry.id],
    )


@command
@_NAME
@_EXPECT
@CATALOG
def rm(name: str, expect: str | None, out: Output) -> None:
    """Remove an alias; the checkpoint and the history of the alias are kept."""
    from ucformat.catalog.labels import ANY

    with opened_catalog() as catalog:
        catalog.unalias(name, expect=ANY if expect is None else expect)
        last = catalog.alias_history(name)[-1]
    out.result(
        lambda: [f"{name}: removed; it pointed to {last.source}"],
        lambda: {"alias": name, "version": last.version, "previous": last.source},
    )


@command
@CATALOG
def list_(out: Output) -> None:
    """List the aliases and where they point."""
    with opened_catalog() as catalog:
        aliases = catalog.aliases()
        pointed = (
            {e.id: e.name for e in catalog.find("alias is not null", deleted=True)}
            if aliases
            else {}
        )

    def data() -> dict[str, Any]:
        return {"aliases": [_alias(a, pointed.get(a.id)) for a in aliases]}

    out.result(lambda: _list(aliases, pointed), data, lambda: (a.name for a in aliases))


def _alias(alias: AliasEntry, name: str | None) -> dict[str, Any]:
    return {
        "alias": alias.name,
        "id": alias.id,
        "name": name,
        "version": alias.version,
        "moved": instant(alias.moved),
    }


def _list(aliases: Sequence[AliasEntry], pointed: dict[str, str]) -> Iterator[str]:
    if not aliases:
        return iter(("no aliases",))
    width = terminal_width()
    rows = [
        (a.name, pointed.get(a.id, ""), a.id if width is None else a.id[:12], moment(a.moved))
        for a in aliases
    ]
    return table(("alias", "checkpoint", "id", "moved"), rows, left=4, shrink=(0, 1), width=width)


@command
@_NAME
@CATALOG
def log(name: str, out: Output) -> None:
    """Show where an alias pointed, when, and who moved it, oldest move first."""
    from ucformat.errors import NotFound

    with opened_catalog() as catalog:
        moves = catalog.alias_history(name)
    if not moves:
        raise NotFound(f"there was never an alias {name!r}", hint="`ucp alias list` shows all")

    def data() -> dict[str, Any]:
        return {"alias": name, "moves": [_move(m) for m in moves]}

    out.result(lambda: _log(moves), data, lambda: (m.target or "-" for m in moves))


def _move(move: MoveEntry) -> dict[str, Any]:
    return {
        "version": move.version,
        "from": move.source,
        "to": move.target,
        "moved": instant(move.moved),
        "who": move.who,
    }


def _log(moves: Sequence[MoveEntry]) -> Iterator[str]:
    width = terminal_width()
    cut = None if width is None else 12
    rows = [
        (str(m.version), (m.source or "-")[:cut], (m.target or "-")[:cut], moment(m.moved), m.who)
        for m in moves
    ]
    return table(
        ("version", "from", "to", "moved", "by"), rows, left=range(1, 5), shrink=(4,), width=width
    )
