"""`ucp layout`: about layout files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ucformat.cli.options import CATALOG, command
from ucformat.cli.output import Heading, terminal_width
from ucformat.cli.source_options import SOURCE
from ucformat.cli.text import plural, table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ucformat.cli.output import Output
    from ucformat.geometry.layout import Layout
    from ucformat.jobs.fits import Fit

__all__ = ["check", "schema"]

_SHOWN = 3  # tensors of a rule that are named


@command
@click.argument("file", metavar="FILE")
@click.option("--against", metavar="SRC", help="A checkpoint to try it on: a path or url, run@step, alias:name, an id.")
@SOURCE
@CATALOG
def check(file: str, against: str | None, options: dict[str, Any] | None, out: Output) -> None:
    """Check a layout file; with --against, say which rule takes which tensor of a checkpoint, and what none takes.

    Reads no tensor. Exits with 1 where a tensor is taken by no rule, or by one that does not fit it.
    """
    import ucformat
    from ucformat.cli.fits import data
    from ucformat.views.document import load

    if against is None and options:
        raise click.UsageError("--source says what the files of --against do not")
    found = load(file)
    if against is None:
        text = f"{file} is a layout for {plural(found.mesh.size, 'rank')}" if found else f"{file} is a view"
        out.result(
            lambda: [text], lambda: {"layout": file, "ranks": found.mesh.size if found else None}, lambda: [file]
        )
        return
    if found is None:
        _check_view(file, against, options, out)
        return
    fit = ucformat.fits(against, found, options=options)
    rules = [{"rule": r.rule, "tensors": list(r.names)} for r in fit.rules]
    out.result(
        lambda: _describe(fit, found), lambda: data(fit) | {"rules": rules}, lambda: [m.name for m in fit.misfits]
    )
    if not fit:
        raise click.exceptions.Exit(1)


def _check_view(file: str, against: str, options: dict[str, Any] | None, out: Output) -> None:
    """A file with a view and no rules: what its steps take and make."""
    import ucformat

    steps = ucformat.open(against, view=file, options=options).steps
    rows = [(t.step, _named(t.took), _named(t.made)) for t in steps]
    out.result(
        lambda: table(("step", "takes", "makes"), rows, left=3, shrink=(0, 1, 2), width=terminal_width()),
        lambda: {"steps": [{"step": t.step, "took": list(t.took), "made": list(t.made)} for t in steps]},
        lambda: (name for t in steps for name in t.made),
    )


def _describe(fit: Fit, layout: Layout) -> Iterator[str]:
    from ucformat.cli.fits import misfit_lines

    rows = [(r.rule, str(len(r.names)), _named(r.names)) for r in fit.rules]
    yield from table(("rule", "tensors", ""), rows, left={0, 2}, shrink=(0, 2), width=terminal_width())
    yield ""
    if fit:
        yield Heading(
            f"every one of {plural(fit.tensors, 'tensor')} has its place on {plural(layout.mesh.size, 'rank')}"
        )
        return
    yield Heading(f"{plural(len(fit.misfits), 'tensor')} of {fit.tensors:,} cannot be placed")
    yield from misfit_lines(fit)


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


@command
def schema(out: Output) -> None:
    """Print the JSON Schema of layout files, with which editors complete and check them."""
    from ucformat.cli.output import dumps
    from ucformat.schema.layout import json_schema

    found = json_schema()

    def lines() -> list[str]:
        return dumps(found, indent=2).splitlines()

    out.result(lines, lambda: found, lines)
