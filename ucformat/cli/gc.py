"""`ucp gc`: removing from storage what was deleted long enough ago, and what interrupted writers left."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ucformat.cli.catalogs import instant, opened_catalog
from ucformat.cli.options import CATALOG, IGNORE, TIME, command
from ucformat.cli.output import Heading, terminal_width
from ucformat.cli.rows import YES, agreed, ignore_in, row_data, row_table
from ucformat.cli.text import bytes_text, moment, plural, table

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import timedelta

    from ucformat.catalog.purge import Deferred
    from ucformat.cli.output import Output
    from ucformat.jobs.gc import Collected

__all__ = ["gc"]


@command
@click.argument("places", metavar="[PLACE…]", nargs=-1)
@click.option("--apply", is_flag=True, help="Remove what is shown, for good; without it, it is only shown.")
@click.option(
    "--grace",
    type=TIME,
    default="7d",
    metavar="TIME",
    help="Leave what writers began less than this ago, and what was deleted so lately and has no grace of its own.  "
    "[default: 7d]",
)
@IGNORE
@YES
@CATALOG
def gc(
    places: tuple[str, ...],
    apply: bool,  # noqa: FBT001
    grace: timedelta,
    ignored: tuple[str, ...],
    yes: bool,  # noqa: FBT001
    out: Output,
) -> None:
    """Show what can be removed from storage, and with --apply remove it, for good.

    These are checkpoints that were deleted, when their grace is over and if nothing protects them, and below each PLACE
    what writers that were interrupted left there. What an interrupted gc left is removed by the next one.
    """
    from ucformat.cli.program import Interrupted
    from ucformat.errors import UcformatError, UsageError
    from ucformat.jobs.gc import collect

    if ignored and not apply:
        raise UsageError("--ignore-dependent goes with --apply")
    with opened_catalog() as catalog:
        if ignored:
            ignore_in([waiting.row for waiting in catalog.purgeable(grace).wait], ignored, catalog, out, "gc")
        found = collect(catalog, places, grace=grace)
        if not (out.as_json or out.quiet):
            out.result(lambda: _lines(found), dict)
        work = bool(found.plan.purge or found.resumed or found.leftovers)
        if apply and work:
            if not agreed(f"remove {_amount(found)} for good?", out, yes=yes):
                raise click.exceptions.Exit(1)
            try:
                with out.progress("removing", "checkpoints") as progress:
                    found = collect(catalog, places, apply=True, expect=found.plan.id, grace=grace, progress=progress)
            except KeyboardInterrupt:
                raise Interrupted("interrupted: the same command again removes the rest") from None
    done = f"removed {plural(len(found.purged), 'checkpoint')}" if apply else "nothing was removed; --apply does it"
    out.result(
        lambda: ["", done, *(f"  failed    {f}" for f in found.failures)] if work else [],
        lambda: _data(found, applied=apply),
        lambda: found.purged if apply else [*found.resumed, *(row.id for row in found.plan.purge)],
    )
    if found.failures:
        raise UcformatError(
            f"{plural(len(found.failures), 'removal')} failed", hint="the same command again tries those once more"
        )


def _amount(found: Collected) -> str:
    size = found.plan.bytes_purged + sum(left.nbytes for left in found.leftovers)
    parts = [plural(len(found.plan.purge) + len(found.resumed), "checkpoint")]
    if found.leftovers:
        parts.append(plural(len(found.leftovers), "leftover"))
    return f"{' and '.join(parts)}, {bytes_text(size)}"


def _lines(found: Collected) -> Iterator[str]:
    plan = found.plan
    yield Heading(f"remove {_amount(found)}")
    if plan.purge:
        yield from row_table([(row, ()) for row in plan.purge])
    for checkpoint in found.resumed:
        yield f"{checkpoint}  its removal was begun before"
    if found.leftovers:
        yield ""
        yield from _leftovers(found)
    if plan.wait:
        yield ""
        size = sum(w.row.nbytes for w in plan.wait)
        yield Heading(f"wait for {plural(len(plan.wait), 'checkpoint')}, {bytes_text(size)}")
        yield from row_table([(w.row, _why(w)) for w in plan.wait], "because")


def _why(waiting: Deferred) -> tuple[str, ...]:
    return waiting.reasons if waiting.until is None else (*waiting.reasons, f"until {moment(waiting.until)}")


def _leftovers(found: Collected) -> Iterator[str]:
    rows = [(left.url, left.attempt or "", bytes_text(left.nbytes), moment(left.started)) for left in found.leftovers]
    return table(("left by a writer in", "attempt", "size", "begun"), rows, left=(0, 1, 3), width=terminal_width())


def _data(found: Collected, *, applied: bool) -> dict[str, Any]:
    plan = found.plan
    return {
        "plan": plan.id,
        "applied": applied,
        "purge": [row_data(row) for row in plan.purge],
        "resumed": list(found.resumed),
        "leftovers": [
            {"url": left.url, "attempt": left.attempt, "bytes": left.nbytes, "started": instant(left.started)}
            for left in found.leftovers
        ],
        "waiting": [row_data(w.row, reasons=list(w.reasons), until=instant(w.until)) for w in plan.wait],
        "purged": list(found.purged),
        "failures": list(found.failures),
        "bytes": plan.bytes_purged + sum(left.nbytes for left in found.leftovers),
    }
