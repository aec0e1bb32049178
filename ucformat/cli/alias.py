"""`ucp alias`: names that point to checkpoints, and can be moved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ucformat.cli.catalogs import instant, opened_catalog
from ucformat.cli.options import CATALOG, REF, command
from ucformat.cli.output import terminal_width
from ucformat.cli.text import moment, table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ucformat.catalog.labels import AliasEntry, MoveEntry
    from ucformat.cli.output import Output

__all__ = ["list_", "log", "rm", "set_"]

_NAME = click.argument("name", metavar="NAME")
_EXPECT = click.option(
    "--expect", metavar="REF", help="Only if it points to this checkpoint now; else that is a conflict, exit code 4."
)


@command
@_NAME
@REF
@_EXPECT
@click.option("--new", is_flag=True, help="Only if there is no alias of this name yet.")
@CATALOG
def set_(
    name: str,
    ref: str,
    expect: str | None,
    new: bool,  # noqa: FBT001
    out: Output,
) -> None:
    """Point an alias to a checkpoint; one that exists is moved.

    Write run/NAME for an alias of one run, which run@NAME then means.
    """
    from ucformat.catalog.labels import ANY

    if new and expect is not None:
        raise click.UsageError("--new and --expect exclude each other")
    with opened_catalog() as catalog:
        entry = catalog.get(ref)
        catalog.alias(name, entry.id, expect=None if new else ANY if expect is None else expect)
        last = catalog.alias_history(name)[-1]
    out.result(
        lambda: [f"{name} -> {entry.name}  {entry.id}"],
        lambda: {"alias": name, "id": entry.id, "name": entry.name, "version": last.version, "previous": last.source},
        lambda: [entry.id],
    )


@command
@_NAME
@_EXPECT
@CATALOG
def rm(name: str, expect: str | None, out: Output) -> None:
    """Remove an alias; the checkpoint and the history of the alias stay."""
    from ucformat.catalog.labels import ANY

    with opened_catalog() as catalog:
        catalog.unalias(name, expect=ANY if expect is None else expect)
        last = catalog.alias_history(name)[-1]
    out.result(
        lambda: [f"{name} is removed; it pointed to {last.source}"],
        lambda: {"alias": name, "version": last.version, "previous": last.source},
    )


@command
@CATALOG
def list_(out: Output) -> None:
    """List the aliases and where they point."""
    with opened_catalog() as catalog:
        found = catalog.aliases()
        pointed = {e.id: e.name for e in catalog.find("alias is not null", deleted=True)} if found else {}

    def data() -> dict[str, Any]:
        return {"aliases": [_alias(a, pointed.get(a.id)) for a in found]}

    out.result(lambda: _list(found, pointed), data, lambda: (a.name for a in found))


def _alias(alias: AliasEntry, name: str | None) -> dict[str, Any]:
    return {
        "alias": alias.name,
        "id": alias.id,
        "name": name,
        "version": alias.version,
        "moved": instant(alias.moved),
    }


def _list(found: Sequence[AliasEntry], pointed: dict[str, str]) -> Iterator[str]:
    if not found:
        return iter(("no aliases",))
    width = terminal_width()
    rows = [(a.name, pointed.get(a.id, ""), a.id if width is None else a.id[:12], moment(a.moved)) for a in found]
    return table(("alias", "checkpoint", "id", "moved"), rows, left=4, shrink=(0, 1), width=width)


@command
@_NAME
@CATALOG
def log(name: str, out: Output) -> None:
    """Show where an alias has pointed, when, and who moved it; the first move first."""
    from ucformat.errors import NotFound

    with opened_catalog() as catalog:
        moves = catalog.alias_history(name)
    if not moves:
        raise NotFound(f"there was never an alias {name!r}", hint="`ucp alias list` shows those there are")

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
    rows = [(str(m.version), (m.source or "-")[:cut], (m.target or "-")[:cut], moment(m.moved), m.who) for m in moves]
    return table(("version", "from", "to", "moved", "by"), rows, left=range(1, 5), shrink=(4,), width=width)
