"""`ucp plan`: what ranks of a layout would read, before any of it is read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import click

from ucformat.cli.options import CATALOG, SRC, STATES, VIEW, command
from ucformat.cli.output import terminal_width
from ucformat.cli.source_options import SOURCE
from ucformat.cli.text import bytes_text, count, table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ucformat.cli.output import Output
    from ucformat.reading.rank import ReadPlan

__all__ = ["plan"]

_TOP = 5
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
@click.option("-l", "--layout", "file", required=True, metavar="FILE", help="The layout file, YAML or JSON.")
@click.option("-r", "--rank", default="all", metavar="N|all", help="One rank, or all of them.  [default: all]")
@STATES
@click.option(
    "--verify",
    type=click.Choice(["whole", "always", "never"]),
    default="whole",
    help="Which checksums reading checks: of chunks it reads whole, of all (reads whole chunks for it), or none.  "
    "[default: whole]",
)
@VIEW
@SOURCE
@CATALOG
def plan(
    src: str,
    file: str,
    rank: str,
    states: tuple[str, ...],
    verify: Literal["whole", "always", "never"],
    view: str | None,
    options: dict[str, Any] | None,
    out: Output,
) -> None:
    """Say what ranks of a layout would read: bytes, requests, files and memory. No tensor is read for it."""
    import ucformat

    ck = ucformat.open(src, view=view, options=options)
    layout = ucformat.Layout.load(file)
    ranks = range(layout.mesh.size) if rank == "all" else [_rank(rank)]
    found, described = [], ""
    with out.progress("planning", "ranks") as progress:
        for done, n in enumerate(ranks, 1):
            read = ck.plan(layout, n, list(states) or None, verify=verify)
            found.append(_data(read))
            described = str(read)
            progress(done, len(ranks))
    total = {key: sum(p[key] for p in found) for key in _SUMS}
    out.result(
        lambda: _table(found, total) if rank == "all" else _one(described, found[0]),
        lambda: {"url": ck.url, "layout": file, "verify": verify, "ranks": found, "total": total},
        lambda: (str(p["bytes_read"]) for p in found),
    )


def _rank(text: str) -> int:
    if not text.isdecimal():
        raise click.BadParameter(f"{text!r} is neither a rank, 0 or more, nor 'all'", param_hint="'--rank'")
    return int(text)


def _data(plan: ReadPlan) -> dict[str, Any]:
    return {
        "rank": plan.rank,
        "tensors": len(plan.held),
        "memory": plan.memory,
        "bytes_needed": plan.bytes_needed,
        "bytes_read": plan.bytes_read,
        "bytes_unverified": plan.bytes_unverified,
        "bytes_besides": plan.bytes_besides,
        "requests": plan.requests,
        "zero_filled": sum(plan.zero_filled.values()),
        "files": dict(plan.files),
    }


def _one(described: str, found: dict[str, Any]) -> Iterator[str]:
    yield from described.splitlines()
    files = sorted(found["files"].items(), key=lambda f: (-f[1], f[0]))
    if files:
        yield ""
        yield from table(("file", "read"), [(f, bytes_text(n)) for f, n in files[:_TOP]], width=terminal_width())
    if len(files) > _TOP:
        yield f"and {bytes_text(sum(n for _, n in files[_TOP:]))} of {count(len(files) - _TOP)} more"


def _table(found: Sequence[dict[str, Any]], total: dict[str, Any]) -> Iterator[str]:
    head = ("rank", "tensors", "memory", "needed", "read", "ratio", "requests", "files")
    files = {f for p in found for f in p["files"]}
    return table(
        head,
        [_row(str(p["rank"]), p, len(p["files"])) for p in found],
        left=0,
        total=_row("total", total, len(files)),
    )


def _row(label: str, p: dict[str, Any], files: int) -> tuple[str, ...]:
    ratio = p["bytes_read"] / p["bytes_needed"] if p["bytes_needed"] else 1.0
    sizes = [bytes_text(p[key]) for key in ("memory", "bytes_needed", "bytes_read")]
    return label, count(p["tensors"]), *sizes, f"{ratio:.3f}", count(p["requests"]), count(files)
