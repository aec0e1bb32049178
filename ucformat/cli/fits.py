"""`ucp fits`: whether checkpoints can be resumed under a layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ucformat.cli.options import CATALOG, command, ref_argument
from ucformat.cli.output import terminal_width
from ucformat.cli.source_options import SOURCE
from ucformat.cli.text import bytes_text, plural, table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ucformat.cli.output import Output
    from ucformat.jobs.fits import Fit

__all__ = ["data", "fits", "misfit_lines"]

_MOST = 20  # misfits that are shown of one checkpoint


@command
@ref_argument("ref", "[REF]", optional=True)
@click.option("-l", "--layout", "file", required=True, metavar="FILE", help="The layout file, YAML or JSON.")
@click.option("--where", metavar="FILTER", help="All checkpoints of the catalog that FILTER takes, instead of REF.")
@SOURCE
@CATALOG
def fits(ref: str | None, file: str, where: str | None, options: dict[str, Any] | None, out: Output) -> None:
    """Say whether a checkpoint can be resumed under a layout, and if not, which tensors, by which rule, and why.

    Reads no tensor. Exits with 1 where one does not fit.
    """
    import ucformat
    from ucformat.errors import UsageError

    if (ref is None) == (where is None):
        raise UsageError("give either REF or --where FILTER", hint="ucp fits run7@latest --layout target.yaml")
    if where is not None and options:
        raise UsageError("--source goes with REF: what it says is of one checkpoint", hint="leave out --where")
    layout = ucformat.Layout.load(file)
    if ref is not None:
        found = ucformat.fits(ref, layout, options=options)
        out.result(
            lambda: _one(found), lambda: data(found), lambda: ["fits"] if found else [m.name for m in found.misfits]
        )
        if not found:
            raise click.exceptions.Exit(1)
        return
    several = _all(str(where), layout, out)
    out.result(
        lambda: _table(several),
        lambda: {"checkpoints": [{"ref": r, **d} for r, _, d in several]},
        lambda: (ref for ref, fit, _ in several if fit),
    )
    if not all(fit for _, fit, _ in several):
        raise click.exceptions.Exit(1)


def _all(where: str, layout: Any, out: Output) -> list[tuple[str, bool, dict[str, Any]]]:
    """Of each checkpoint that a filter takes its reference, whether it fits, and what is to be said of it."""
    import ucformat
    from ucformat.cli.catalogs import opened_catalog
    from ucformat.errors import UcformatError

    with opened_catalog() as catalog:
        entries = catalog.find(where)
    found: list[tuple[str, bool, dict[str, Any]]] = []
    with out.progress("checking", "checkpoints") as progress:
        for done, entry in enumerate(entries, 1):
            try:
                fit = ucformat.fits(entry.id, layout)
                found.append((entry.name, bool(fit), data(fit)))
            except UcformatError as error:  # it is gone from its place, or cannot be read: not a reason to stop
                found.append((entry.name, False, {"fits": False, "error": error.message}))
            progress(done, len(entries))
    return found


def data(fit: Fit) -> dict[str, Any]:
    """A fit as JSON."""
    return {
        "url": fit.url,
        "fits": bool(fit),
        "ranks": fit.ranks,
        "tensors": fit.tensors,
        "memory": fit.memory,
        "misfits": [
            {"name": m.name, "states": list(m.states), "rules": list(m.rules), "reason": m.reason} for m in fit.misfits
        ],
    }


def _one(fit: Fit) -> Iterator[str]:
    if fit.memory is not None:
        low, high = fit.memory
        memory = bytes_text(high) if low == high else f"{bytes_text(low)} to {bytes_text(high)}"
        yield f"{fit.url} fits: {plural(fit.tensors, 'tensor')} on {plural(fit.ranks, 'rank')}, {memory} each"
        return
    yield f"{fit.url} does not fit {plural(fit.ranks, 'rank')}:"
    yield from misfit_lines(fit)


def misfit_lines(fit: Fit) -> Iterator[str]:
    """What does not fit, the first of it."""
    yield from (f"  {misfit}" for misfit in fit.misfits[:_MOST])
    if len(fit.misfits) > _MOST:
        yield f"  and {plural(len(fit.misfits) - _MOST, 'more tensor')}; --json lists them all"


def _table(several: Sequence[tuple[str, bool, dict[str, Any]]]) -> Iterator[str]:
    rows = []
    for ref, fit, found in several:
        first = next((f"{m['name']}: {m['reason']}" for m in found.get("misfits", ())), found.get("error", ""))
        rows.append((ref, "fits" if fit else "no", first))
    return table(("checkpoint", "", "why not"), rows, width=terminal_width(), left=3)
