"""`ucp delete`, `ucp restore`: deletion with a grace period."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ucformat.cli.ui.catalogs import instant, opened_catalog
from ucformat.cli.ui.options import CATALOG, IGNORE_DEPENDENT, TIME, command, ignore_dependents_of, ref_argument
from ucformat.cli.ui.text import moment

if TYPE_CHECKING:
    from datetime import timedelta

    from ucformat.cli.ui.output import Output

__all__ = ["delete", "restore"]

_REFS = ref_argument("refs", "REF…", many=True)


@command
@_REFS
@click.option(
    "--grace",
    type=TIME,
    default="7d",
    metavar="TIME",
    help="Grace period in which they can be restored.  [default: 7d]",
)
@IGNORE_DEPENDENT
@CATALOG
def delete(refs: tuple[str, ...], grace: timedelta, ignored: tuple[str, ...], out: Output) -> None:
    """Delete checkpoints, all of them or none; `ucp restore` undoes it.

    Storage is not touched until `ucp gc` runs after the grace period. Checkpoints that have an alias, tag or hold, that
    others need, or that ucformat did not write are refused.
    """
    with opened_catalog() as catalog:
        found = {e.id: e for e in map(catalog.get, refs)}
        ids = list(found)
        ignore_dependents_of(ignored, [url for e in found.values() for url in e.urls], out, "delete")
        catalog.delete(*ids, grace=grace)
        gone = [catalog.get(i) for i in ids]
    out.result(
        lambda: (f"{e.name}: deleted; can be restored until {moment(e.purge_after)}" for e in gone if e.purge_after),
        lambda: {"deleted": [{"id": e.id, "name": e.name, "purge_after": instant(e.purge_after)} for e in gone]},
        lambda: (e.id for e in gone),
    )


@command
@_REFS
@CATALOG
def restore(refs: tuple[str, ...], out: Output) -> None:
    """Restore deleted checkpoints, all of them or none, before `ucp gc` removes them."""
    with opened_catalog() as catalog:
        found = {e.id: e for e in (catalog.get(ref) for ref in refs)}
        catalog.restore(*found)
    out.result(
        lambda: (f"{e.name}: restored" for e in found.values()),
        lambda: {"restored": [{"id": e.id, "name": e.name} for e in found.values()]},
        lambda: found,
    )
