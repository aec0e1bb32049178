"""`ucp register`, `ucp reindex`: making the catalog know what lies in storage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ucformat.cli.catalogs import entry_data, opened_catalog
from ucformat.cli.options import CATALOG, command
from ucformat.cli.output import Heading, terminal_width
from ucformat.cli.text import bytes_text, plural, table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucformat.cli.output import Output
    from ucformat.jobs.register import Registered, Reindexed

__all__ = ["register", "reindex"]


@command
@click.argument("places", metavar="PLACE…", nargs=-1, required=True)
@click.option("-r", "--recursive", is_flag=True, help="Search the folders below, too.")
@click.option(
    "--run", metavar="NAME", help="The run they belong to.  [default: theirs, else the folder that theirs is in]"
)
@CATALOG
def register(
    places: tuple[str, ...],
    recursive: bool,  # noqa: FBT001
    run: str | None,
    out: Output,
) -> None:
    """Make checkpoints known to the catalog, universal ones and those of DeepSpeed, as they lie.

    PLACE is a path or a url. Nothing is converted, copied or changed. What is known already stays as it is, and with
    --run gets into that run.
    """
    import ucformat
    from ucformat.cli.program import Interrupted

    try:
        with opened_catalog() as catalog, out.progress("registering", "checkpoints") as progress:
            found = ucformat.register(places, catalog, recursive=recursive, run=run, progress=progress)
    except KeyboardInterrupt:
        raise Interrupted("interrupted: what was registered until now stays; the same command continues") from None
    out.result(lambda: _list(found), lambda: _data(found), lambda: (e.id for e in found.entries))
    _raise_failures(found)


@command
@click.argument("place", metavar="PLACE")
@CATALOG
def reindex(place: str, out: Output) -> None:
    """Make the catalog know what lies below PLACE, and forget what no longer does.

    A catalog that was lost comes back this way, with the tags, aliases, holds, metrics and notes that were written
    beside the checkpoints.
    """
    import ucformat
    from ucformat.cli.program import Interrupted

    try:
        with opened_catalog() as catalog, out.progress("reindexing", "checkpoints") as progress:
            found = ucformat.reindex(place, catalog, progress=progress)
    except KeyboardInterrupt:
        raise Interrupted("interrupted: what was recorded until now stays; the same command again does all") from None
    out.result(
        lambda: _summary(found),
        lambda: _data(found) | {"missing": list(found.missing)},
        lambda: (e.id for e in found.entries),
    )
    _raise_failures(found)


def _list(found: Registered) -> Iterator[str]:
    width = terminal_width()
    cut = None if width is None else 12
    rows = [(e.name, e.id[:cut], e.kind, bytes_text(e.nbytes), e.url or "-") for e in found.entries]
    if rows:
        head = ("name", "id", "kind", "size", "url")
        yield from table(head, rows, left=(0, 1, 2, 4), shrink=(0, 4), width=width)
    yield from _failures(found)


def _summary(found: Reindexed) -> Iterator[str]:
    size = bytes_text(sum(e.nbytes for e in found.entries))
    yield Heading(f"{plural(len(found.entries), 'checkpoint')}, {size}")
    for url in found.missing:
        yield f"  missing   {url}"
    yield from _failures(found)


def _failures(found: Registered) -> Iterator[str]:
    for failure in found.failures:
        yield f"  failed    {failure.url}: {failure.message}"


def _data(found: Registered) -> dict[str, Any]:
    return {
        "checkpoints": [entry_data(e) for e in found.entries],
        "failures": [{"url": f.url, "message": f.message} for f in found.failures],
    }


def _raise_failures(found: Registered) -> None:
    """Fail if a place that looked like a checkpoint could not be read; the others are recorded."""
    from ucformat.errors import UcformatError

    if found.failures:
        raise UcformatError(
            f"{plural(len(found.failures), 'place')} could not be read, and {len(found.entries)} could",
            hint="`ucp show PLACE` says more about each",
        )
