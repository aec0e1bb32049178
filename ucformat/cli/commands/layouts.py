"""`ucp plan`, `ucp fits`, `ucp layout`: checks of layouts, which read no tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import click

from ucformat.cli.ui.options import (
    CATALOG,
    OPENING,
    SOURCE,
    SRC,
    STATES,
    Opening,
    command,
    ref_argument,
)
from ucformat.cli.ui.output import Heading, terminal_width
from ucformat.cli.ui.text import table
from ucformat.errors import first_names
from ucformat.texts import bytes_text, count, plural

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ucformat.cli.ui.output import Output
    from ucformat.geometry.layout import Layout
    from ucformat.jobs.fits import Fit

_MAX_FILES = 5
_SUMS = (
    "tensors",
    "memory",
    "bytes_needed",
    "bytes_read",
    "bytes_unverified",
    "bytes_besides",
    "requests",
    "zero_filled",
)


@command
@SRC
@click.option(
    "-l", "--layout", "file", required=True, metavar="FILE", help="The layout file, YAML or JSON."
)
@click.option(
    "-r", "--rank", default="all", metavar="N|all", help="A rank, or all ranks.  [default: all]"
)
@STATES
@click.option(
    "--verify",
    type=click.Choice(["whole", "always", "never"]),
    default="whole",
    help="Which checksums to check: those of chunks that are read completely, all (reads complete chunks), or none.  "
    "[default: whole]",
)
@OPENING
@CATALOG
def plan(
    src: str,
    file: str,
    rank: str,
    states: tuple[str, ...],
    verify: Literal["whole", "always", "never"],
    opening: Opening,
    out: Output,
) -> None:
    """Show what the ranks of a layout would read: bytes, requests, files and memory. Reads no tensor."""
    import ucformat
    from ucformat.reading.rank import plan_data

    ck = opening.open(src).with_lossy().with_older()  # nothing is read
    layout = ucformat.Layout.load(file)
    ranks = range(layout.mesh.size) if rank == "all" else [_rank(rank)]
    plans, described = [], ""
    with out.progress("planning", "ranks") as progress:
        for done, n in enumerate(ranks, 1):
            read = ck.plan(layout, n, list(states) or None, verify=verify)
            plans.append(plan_data(read))
            described = str(read)
            progress(done, len(ranks))
    total = {key: sum(p[key] for p in plans) for key in _SUMS}
    out.result(
        lambda: _plan_table(plans, total) if rank == "all" else _plan_lines(described, plans[0]),
        lambda: {"url": ck.url, "layout": file, "verify": verify, "ranks": plans, "total": total},
        lambda: (str(p["bytes_read"]) for p in plans),
    )


def _rank(text: str) -> int:
    if not text.isdecimal():
        raise click.BadParameter(
            f"{text!r} is neither a rank, 0 or more, nor 'all'", param_hint="'--rank'"
        )
    return int(text)


def _plan_lines(described: str, plan_data: dict[str, Any]) -> Iterator[str]:
    yield from described.splitlines()
    files = sorted(plan_data["files"].items(), key=lambda f: (-f[1], f[0]))
    if files:
        yield ""
        yield from table(
            ("file", "read"),
            [(f, bytes_text(n)) for f, n in files[:_MAX_FILES]],
            width=terminal_width(),
        )
    if len(files) > _MAX_FILES:
        yield f"and {bytes_text(sum(n for _, n in files[_MAX_FILES:]))} of {count(len(files) - _MAX_FILES)} more"


def _plan_table(plans: Sequence[dict[str, Any]], total: dict[str, Any]) -> Iterator[str]:
    head = ("rank", "tensors", "memory", "needed", "read", "ratio", "requests", "files")
    files = {f for p in plans for f in p["files"]}
    return table(
        head,
        [_plan_row(str(p["rank"]), p, len(p["files"])) for p in plans],
        left=0,
        total=_plan_row("total", total, len(files)),
    )


def _plan_row(label: str, p: dict[str, Any], files: int) -> tuple[str, ...]:
    ratio = p["bytes_read"] / p["bytes_needed"] if p["bytes_needed"] else 1.0
    sizes = [bytes_text(p[key]) for key in ("memory", "bytes_needed", "bytes_read")]
    return label, count(p["tensors"]), *sizes, f"{ratio:.3f}", count(p["requests"]), count(files)


_MAX_MISFITS = 20  # misfits of one checkpoint that are shown


@command
@ref_argument("ref", "[REF]", optional=True)
@click.option(
    "-l", "--layout", "file", required=True, metavar="FILE", help="The layout file, YAML or JSON."
)
@click.option(
    "--where",
    metavar="FILTER",
    help="Check all checkpoints in the catalog that match FILTER, instead of REF.",
)
@SOURCE
@CATALOG
def fits(
    ref: str | None, file: str, where: str | None, options: dict[str, Any] | None, out: Output
) -> None:
    """Check whether a checkpoint can be loaded under a layout; if not, show the tensors and rules that do not fit.

    Reads no tensor. Exits with 1 if any tensor does not fit.
    """
    import ucformat
    from ucformat.errors import UsageError

    if (ref is None) == (where is None):
        raise UsageError(
            "give either REF or --where FILTER", hint="ucp fits run7@latest --layout target.yaml"
        )
    if where is not None and options:
        raise UsageError(
            "--source needs REF: it describes one checkpoint", hint="leave out --where"
        )
    layout = ucformat.Layout.load(file)
    if ref is not None:
        result = ucformat.fits(ref, layout, options=options)
        out.result(
            lambda: _fit_lines(result),
            lambda: _fit_data(result),
            lambda: ["fits"] if result else [m.name for m in result.misfits],
        )
        if not result:
            raise click.exceptions.Exit(1)
        return
    several = _fit_all(str(where), layout, out)
    out.result(
        lambda: _fits_table(several),
        lambda: {"checkpoints": [{"ref": r, **d} for r, _, d in several]},
        lambda: (ref for ref, fit, _ in several if fit),
    )
    if not all(fit for _, fit, _ in several):
        raise click.exceptions.Exit(1)


def _fit_all(where: str, layout: Any, out: Output) -> list[tuple[str, bool, dict[str, Any]]]:
    """The reference of each checkpoint that matches a filter, whether it fits, and its JSON."""
    import ucformat
    from ucformat.cli.ui.catalogs import opened_catalog
    from ucformat.errors import UcformatError

    with opened_catalog() as catalog:
        entries = catalog.find(where)
    results: list[tuple[str, bool, dict[str, Any]]] = []
    with out.progress("checking", "checkpoints") as progress:
        for done, entry in enumerate(entries, 1):
            try:
                fit = ucformat.fits(entry.id, layout)
                results.append((entry.name, bool(fit), _fit_data(fit)))
            except UcformatError as error:  # it is missing or unreadable: continue with the others
                results.append((entry.name, False, {"fits": False, "error": error.message}))
            progress(done, len(entries))
    return results


def _fit_data(fit: Fit) -> dict[str, Any]:
    """The JSON of a fit."""
    return {
        "url": fit.url,
        "fits": bool(fit),
        "ranks": fit.ranks,
        "tensors": fit.tensors,
        "memory": fit.memory,
        "misfits": [
            {"name": m.name, "states": list(m.states), "rules": list(m.rules), "reason": m.reason}
            for m in fit.misfits
        ],
    }


def _fit_lines(fit: Fit) -> Iterator[str]:
    if fit.memory is not None:
        low, high = fit.memory
        memory = bytes_text(high) if low == high else f"{bytes_text(low)} to {bytes_text(high)}"
        yield f"{fit.url} fits: {plural(fit.tensors, 'tensor')} on {plural(fit.ranks, 'rank')}, {memory} each"
        return
    yield f"{fit.url} does not fit {plural(fit.ranks, 'rank')}:"
    yield from _misfit_lines(fit)


def _misfit_lines(fit: Fit) -> Iterator[str]:
    """The first misfits, and the number of the others."""
    yield from (f"  {misfit}" for misfit in fit.misfits[:_MAX_MISFITS])
    if len(fit.misfits) > _MAX_MISFITS:
        yield f"  and {plural(len(fit.misfits) - _MAX_MISFITS, 'more tensor')}; --json lists them all"


def _fits_table(several: Sequence[tuple[str, bool, dict[str, Any]]]) -> Iterator[str]:
    rows = []
    for ref, fit, data in several:
        first = next(
            (f"{m['name']}: {m['reason']}" for m in data.get("misfits", ())),
            data.get("error", ""),
        )
        rows.append((ref, "fits" if fit else "no", first))
    return table(("checkpoint", "", "why not"), rows, width=terminal_width(), left=3)


_MAX_NAMED = 3  # tensors of a rule that are shown


@command
@click.argument("file", metavar="FILE")
@click.option(
    "--against",
    metavar="SRC",
    help="A checkpoint to test it against: a path or URL, run@step, alias:name, or an id.",
)
@SOURCE
@CATALOG
def check(file: str, against: str | None, options: dict[str, Any] | None, out: Output) -> None:
    """Validate a layout file; with --against, show which rule matches which tensor of a checkpoint.

    Reads no tensor. Exits with 1 if a tensor matches no rule, or a rule that does not fit it.
    """
    import ucformat
    from ucformat.views.document import load

    if against is None and options:
        raise click.UsageError("--source needs --against: it describes that checkpoint")
    layout = load(file)
    if against is None:
        text = (
            f"{file} is a layout for {plural(layout.mesh.size, 'rank')}"
            if layout
            else f"{file} is a view"
        )
        out.result(
            lambda: [text],
            lambda: {"layout": file, "ranks": layout.mesh.size if layout else None},
            lambda: [file],
        )
        return
    if layout is None:
        _check_view(file, against, options, out)
        return
    fit = ucformat.fits(against, layout, options=options)
    rules = [{"rule": r.rule, "tensors": list(r.names)} for r in fit.rules]
    out.result(
        lambda: _describe(fit, layout),
        lambda: _fit_data(fit) | {"rules": rules},
        lambda: [m.name for m in fit.misfits],
    )
    if not fit:
        raise click.exceptions.Exit(1)


def _check_view(file: str, against: str, options: dict[str, Any] | None, out: Output) -> None:
    """Show the tensors that the steps of a view consume and produce."""
    import ucformat

    steps = ucformat.open(against, view=file, options=options).steps
    rows = [
        (t.step, first_names(t.took, _MAX_NAMED), first_names(t.made, _MAX_NAMED)) for t in steps
    ]
    out.result(
        lambda: table(
            ("step", "takes", "makes"), rows, left=3, shrink=(0, 1, 2), width=terminal_width()
        ),
        lambda: {
            "steps": [{"step": t.step, "took": list(t.took), "made": list(t.made)} for t in steps]
        },
        lambda: (name for t in steps for name in t.made),
    )


def _describe(fit: Fit, layout: Layout) -> Iterator[str]:

    rows = [(r.rule, str(len(r.names)), first_names(r.names, _MAX_NAMED)) for r in fit.rules]
    yield from table(
        ("rule", "tensors", ""), rows, left={0, 2}, shrink=(0, 2), width=terminal_width()
    )
    yield ""
    if fit:
        yield Heading(
            f"every one of {plural(fit.tensors, 'tensor')} has its place on "
            f"{plural(layout.mesh.size, 'rank')}"
        )
        return
    yield Heading(f"{plural(len(fit.misfits), 'tensor')} of {fit.tensors:,} cannot be placed")
    yield from _misfit_lines(fit)


@command
def schema(out: Output) -> None:
    """Print the JSON Schema of layout files, for completion and validation in editors."""
    from ucformat.cli.ui.output import dumps
    from ucformat.schema.layout import json_schema

    document = json_schema()

    def lines() -> list[str]:
        return dumps(document, indent=2).splitlines()

    out.result(lines, lambda: document, lines)
