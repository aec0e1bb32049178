"""`ucp retain`: deleting what a policy does not keep."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import click

from ucformat.cli.catalogs import opened_catalog
from ucformat.cli.options import CATALOG, IGNORE, command
from ucformat.cli.output import Heading
from ucformat.cli.rows import YES, agreed, ignore_in, row_data, row_table
from ucformat.cli.text import bytes_text, count, plural
from ucformat.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucformat.catalog.retention import RetentionPlan
    from ucformat.cli.output import Output

__all__ = ["retain"]


@command
@click.option("-p", "--policy", "file", required=True, metavar="FILE", help="The policy, YAML or JSON.")
@click.option("--apply", is_flag=True, help="Delete what the plan says; without it, the plan is only shown.")
@IGNORE
@YES
@CATALOG
def retain(
    file: str,
    apply: bool,  # noqa: FBT001
    ignored: tuple[str, ...],
    yes: bool,  # noqa: FBT001
    out: Output,
) -> None:
    """Show what a policy keeps and deletes, and with --apply delete it.

    What is deleted can be restored until its grace is over; until `ucp gc`, not a byte is touched. What is aliased,
    tagged, held or needed by others is always kept. docs/retention.md describes policies.
    """
    from ucformat.catalog.retention import load_policy

    policy = load_policy(file)
    if ignored and not apply:
        raise UsageError("--ignore-dependent goes with --apply")
    applied = False
    with opened_catalog() as catalog:
        plan = catalog.retain(policy)
        if ignored:
            ignore_in([kept.row for kept in plan.keep], ignored, catalog, out, "retain")
            plan = catalog.retain(policy)
        if not (out.as_json or out.quiet):
            out.result(lambda: _lines(plan), dict)
        for rule in plan.idle:
            out.note(f"the rule keeps nothing: {rule}")
        for text in plan.contradictions:
            out.warn(text)
        amount = f"{plural(len(plan.delete), 'checkpoint')}, {bytes_text(plan.bytes_deleted)}"
        if apply and plan.delete:
            if not agreed(f"delete {amount}?", out, yes=yes):
                raise click.exceptions.Exit(1)
            catalog.retain(policy, apply=plan.id)
        applied = apply
    done = f"deleted {amount}" if applied else "nothing was deleted; --apply does it"
    out.result(
        lambda: ["", done] if plan.delete else [],
        lambda: _data(plan, applied=applied),
        lambda: (row.id for row in plan.delete),
    )


def _lines(plan: RetentionPlan) -> Iterator[str]:
    yield Heading(f"keep {plural(len(plan.keep), 'checkpoint')}, {bytes_text(plan.bytes_kept)}")
    if plan.keep:
        yield from row_table([(kept.row, kept.reasons) for kept in plan.keep], "because")
    yield ""
    yield Heading(f"delete {plural(len(plan.delete), 'checkpoint')}, {bytes_text(plan.bytes_deleted)}")
    if plan.delete:
        yield from row_table([(row, ()) for row in plan.delete])
    if plan.untouched:
        yield ""
        yield Heading(f"not judged: {plural(len(plan.untouched), 'checkpoint')}")
        for why, n in Counter("; ".join(kept.reasons) for kept in plan.untouched).most_common():
            yield f"  {count(n):>6}  {why}"


def _data(plan: RetentionPlan, *, applied: bool) -> dict[str, Any]:
    return {
        "plan": plan.id,
        "applied": applied,
        "delete": [row_data(row) for row in plan.delete],
        "keep": [row_data(kept.row, reasons=list(kept.reasons)) for kept in plan.keep],
        "untouched": [row_data(kept.row, reasons=list(kept.reasons)) for kept in plan.untouched],
        "idle": list(plan.idle),
        "bytes_deleted": plan.bytes_deleted,
        "bytes_kept": plan.bytes_kept,
        "grace_seconds": int(plan.grace.total_seconds()),
    }
