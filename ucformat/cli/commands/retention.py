"""`ucp delete`, `ucp restore`, `ucp retain`, `ucp gc`: deletion with a grace period, and removal from storage."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import click

from ucformat.catalog.as_json import instant, retention_data
from ucformat.cli.ui.catalogs import opened_catalog
from ucformat.cli.ui.options import (
    CATALOG,
    IGNORE_DEPENDENT,
    TIME,
    command,
    ignore_dependents_of,
    ref_argument,
)
from ucformat.cli.ui.output import Heading, terminal_width
from ucformat.cli.ui.text import table
from ucformat.errors import UsageError
from ucformat.texts import ago, bytes_text, count, moment, plural

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from datetime import timedelta

    from ucformat.catalog.catalog import Catalog
    from ucformat.catalog.deletion import Deferred
    from ucformat.catalog.retention import RetentionPlan, RetentionRow
    from ucformat.cli.ui.output import Output
    from ucformat.jobs.gc import Collected

_REFS = ref_argument("refs", "REF…", many=True)

_THIN = click.option(
    "--thin",
    is_flag=True,
    help="Also what others need; `ucp gc --thin` keeps of it only what they need.",
)
_YES = click.option("-y", "--yes", is_flag=True, help="With --apply, do not ask for confirmation.")


@command
@_REFS
@click.option(
    "--grace",
    type=TIME,
    default="7d",
    metavar="TIME",
    help="Grace period in which they can be restored.  [default: 7d]",
)
@_THIN
@IGNORE_DEPENDENT
@click.option(
    "-y",
    "--yes",
    is_flag=True,
    expose_value=False,
    help="For scripts: nothing is asked in any case.",
)
@CATALOG
def delete(
    refs: tuple[str, ...],
    grace: timedelta,
    thin: bool,  # noqa: FBT001
    ignored: tuple[str, ...],
    out: Output,
) -> None:
    """Delete checkpoints, all of them or none; `ucp restore` undoes it.

    Storage is not touched until `ucp gc` runs after the grace period. Checkpoints that have an
    alias, tag or hold, that others need, or that ucformat did not write are refused.
    """
    with opened_catalog() as catalog:
        entries = {e.id: e for e in map(catalog.get, refs)}
        ids = list(entries)
        ignore_dependents_of(
            ignored, [url for e in entries.values() for url in e.urls], out, "delete"
        )
        catalog.delete(*ids, grace=grace, thin_needed=thin)
        gone = [catalog.get(i) for i in ids]
    out.result(
        lambda: (
            f"{e.name}: deleted; can be restored until {moment(e.purge_after)}"
            for e in gone
            if e.purge_after
        ),
        lambda: {
            "deleted": [
                {"id": e.id, "name": e.name, "purge_after": instant(e.purge_after)} for e in gone
            ]
        },
        lambda: (e.id for e in gone),
    )


@command
@_REFS
@CATALOG
def restore(refs: tuple[str, ...], out: Output) -> None:
    """Restore deleted checkpoints, all of them or none, before `ucp gc` removes them."""
    with opened_catalog() as catalog:
        entries = {e.id: e for e in (catalog.get(ref) for ref in refs)}
        catalog.restore(*entries)
    out.result(
        lambda: (f"{e.name}: restored" for e in entries.values()),
        lambda: {"restored": [{"id": e.id, "name": e.name} for e in entries.values()]},
        lambda: entries,
    )


def _ignore_dependents(
    rows: Iterable[RetentionRow], ignored: Sequence[str], catalog: Catalog, out: Output, name: str
) -> None:
    """Apply `--ignore-dependent` to the checkpoints of a plan that these need."""
    needed = [row for row in rows if {*ignored} & {*row.dependents}]
    ignore_dependents_of(
        ignored, [url for row in needed for url in catalog.get(row.id).urls], out, name
    )


def _row_table(rows: Iterable[tuple[RetentionRow, Sequence[str]]], why: str = "") -> Iterator[str]:
    """A line for each checkpoint, with the reasons in a column named `why`."""
    width = terminal_width()
    cut = None if width is None else 12
    head = ["name", "id", "size", "age", *([why] if why else [])]
    body = [
        [
            r.name,
            r.id[:cut],
            bytes_text(r.nbytes),
            ago(r.created),
            *(["; ".join(reasons)] if why else []),
        ]
        for r, reasons in rows
    ]
    return table(head, body, left=(0, 1, 4), shrink=(0, 4) if why else (0,), width=width)


@command
@click.option(
    "-p", "--policy", "file", required=True, metavar="FILE", help="The policy, YAML or JSON."
)
@click.option(
    "--apply",
    is_flag=True,
    help="Thin and delete what the plan lists.  [default: only show the plan]",
)
@_THIN
@IGNORE_DEPENDENT
@_YES
@CATALOG
def retain(
    file: str,
    apply: bool,  # noqa: FBT001
    thin: bool,  # noqa: FBT001
    ignored: tuple[str, ...],
    yes: bool,  # noqa: FBT001
    out: Output,
) -> None:
    """Show what a policy keeps, thins and deletes; with --apply, do it.

    Deleted checkpoints can be restored in their grace period; their files stay until `ucp gc`.
    States that the policy drops from others are removed at once, and cannot be restored.
    Checkpoints that have an alias, tag or hold, or that others need, are always kept whole.
    docs/retention.md describes policies.
    """
    from ucformat.catalog.retention import load_policy
    from ucformat.jobs.listing import warning_of_gone

    policy = load_policy(file)
    if ignored and not apply:
        raise UsageError("--ignore-dependent goes with --apply")
    applied = False
    with opened_catalog() as catalog:
        plan = catalog.retain(policy, thin_needed=thin)
        if ignored:
            _ignore_dependents([kept.row for kept in plan.keep], ignored, catalog, out, "retain")
            plan = catalog.retain(policy, thin_needed=thin)
        if not (out.as_json or out.quiet):
            out.result(lambda: _retain_lines(plan), dict)
        for rule in plan.idle:
            out.note(f"the rule keeps nothing: {rule}")
        for text in plan.contradictions:
            out.warn(text)
        if gone := warning_of_gone([kept.row for kept in plan.keep]):
            out.warn(gone)
        work = bool(plan.thin or plan.delete)
        if apply and work:
            if not out.confirm(f"{_and('delete', 'permanently thin', plan)}?", yes=yes):
                raise click.exceptions.Exit(1)
            catalog.retain(policy, apply=plan.id, thin_needed=thin)
        applied = apply
    done = _and("deleted", "thinned", plan) if applied else "nothing was deleted; --apply does it"
    out.result(
        lambda: ["", done] if work else [],
        lambda: retention_data(plan, applied=applied),
        lambda: (row.id for row in (*(t.row for t in plan.thin), *plan.delete)),
    )


def _and(delete: str, thin: str, plan: RetentionPlan) -> str:
    """What a plan does, with these verbs: `deleted 2 checkpoints, 4 GiB; thinned 1 checkpoint, 2 GiB`."""
    parts = (
        (delete, len(plan.delete), plan.bytes_deleted),
        (thin, len(plan.thin), plan.bytes_dropped),
    )
    return "; ".join(
        f"{verb} {plural(n, 'checkpoint')}, {bytes_text(nbytes)}" for verb, n, nbytes in parts if n
    )


def _retain_lines(plan: RetentionPlan) -> Iterator[str]:
    yield Heading(f"keep {plural(len(plan.keep), 'checkpoint')}, {bytes_text(plan.bytes_kept)}")
    if plan.keep:
        yield from _row_table([(kept.row, kept.reasons) for kept in plan.keep], "because")
    if plan.thin:
        yield ""
        kept, dropped = (
            bytes_text(n) for n in (sum(t.bytes_kept for t in plan.thin), plan.bytes_dropped)
        )
        yield Heading(f"thin {plural(len(plan.thin), 'checkpoint')}: keep {kept}, drop {dropped}")
        rows = [(t.row, (f"drop {', '.join(sorted(t.dropped))}", *t.reasons)) for t in plan.thin]
        yield from _row_table(rows, "because")
    yield ""
    yield Heading(
        f"delete {plural(len(plan.delete), 'checkpoint')}, {bytes_text(plan.bytes_deleted)}"
    )
    if plan.delete:
        yield from _row_table([(row, ()) for row in plan.delete])
    if plan.thin:
        yield ""
        head = ("run", "keep", "drop", "delete")
        amounts = [
            (r.run or "", *(bytes_text(n) for n in (r.kept, r.dropped, r.deleted)))
            for r in plan.runs
        ]
        yield from table(head, amounts, width=terminal_width())
    if plan.untouched:
        yield ""
        yield Heading(f"not covered by the policy: {plural(len(plan.untouched), 'checkpoint')}")
        for why, n in Counter("; ".join(kept.reasons) for kept in plan.untouched).most_common():
            yield f"  {count(n):>6}  {why}"


@command
@click.argument("places", metavar="[PLACE…]", nargs=-1)
@click.option(
    "--apply", is_flag=True, help="Permanently remove what is listed.  [default: only list it]"
)
@click.option(
    "--thin",
    is_flag=True,
    help="Also thin deleted checkpoints that only others protect, to what these need.",
)
@click.option(
    "--grace",
    type=TIME,
    default="7d",
    metavar="TIME",
    help="Minimum age of unfinished writes, and grace period of deleted checkpoints that have none of their own.  "
    "[default: 7d]",
)
@IGNORE_DEPENDENT
@_YES
@CATALOG
def gc(
    places: tuple[str, ...],
    apply: bool,  # noqa: FBT001
    thin: bool,  # noqa: FBT001
    grace: timedelta,
    ignored: tuple[str, ...],
    yes: bool,  # noqa: FBT001
    out: Output,
) -> None:
    """Show what can be removed from storage; with --apply, remove it permanently.

    This includes deleted checkpoints whose grace period is over and that nothing protects, and
    files below each PLACE that interrupted writers left; with --thin also what nobody needs of deleted
    checkpoints that others need. An interrupted gc is completed by the next
    one.
    """
    from ucformat.cli.program import interruptible
    from ucformat.errors import UcformatError, UsageError
    from ucformat.jobs.gc import collect, collected_data

    if ignored and not apply:
        raise UsageError("--ignore-dependent goes with --apply")
    with opened_catalog() as catalog:
        if ignored:
            _ignore_dependents(
                [waiting.row for waiting in catalog.purgeable(grace).wait],
                ignored,
                catalog,
                out,
                "gc",
            )
        collected = collect(catalog, places, thin=thin, grace=grace)
        if not (out.as_json or out.quiet):
            out.result(lambda: _gc_lines(collected), dict)
        work = bool(
            collected.plan.purge or collected.resumed or collected.leftovers or collected.thin
        )
        if apply and work:
            if not out.confirm(f"permanently remove {_amount(collected)}?", yes=yes):
                raise click.exceptions.Exit(1)
            rest = "interrupted: run the same command again to remove the rest"
            with interruptible(rest), out.progress("removing", "checkpoints") as progress:
                collected = collect(
                    catalog,
                    places,
                    thin=thin,
                    apply=True,
                    expect=collected.id,
                    grace=grace,
                    progress=progress,
                )
    done = (
        f"removed {plural(len(collected.purged), 'checkpoint')}"
        + (f", thinned {len(collected.thinned)}" if thin else "")
        if apply
        else "nothing was removed; --apply does it"
    )
    out.result(
        lambda: ["", done, *(f"  failed    {f}" for f in collected.failures)] if work else [],
        lambda: collected_data(collected, applied=apply),
        lambda: (
            (*collected.purged, *collected.thinned)
            if apply
            else [
                *collected.resumed,
                *(row.id for row in collected.plan.purge),
                *(t.row.id for t in collected.thin),
            ]
        ),
    )
    if collected.failures:
        raise UcformatError(
            f"{plural(len(collected.failures), 'removal')} failed",
            hint="run the same command again to retry them",
        )


def _amount(collected: Collected) -> str:
    size = collected.plan.bytes_purged + sum(left.nbytes for left in collected.leftovers)
    parts = [plural(len(collected.plan.purge) + len(collected.resumed), "checkpoint")]
    if collected.leftovers:
        parts.append(plural(len(collected.leftovers), "leftover"))
    text = f"{' and '.join(parts)}, {bytes_text(size)}"
    if collected.thin:
        dropped = bytes_text(sum(t.stored - t.left for t in collected.thin))
        text += f", and {dropped} of {plural(len(collected.thin), 'other')}"
    return text


def _gc_lines(collected: Collected) -> Iterator[str]:
    from ucformat.catalog.retention import needed_by

    plan = collected.plan
    yield Heading(f"remove {_amount(collected)}")
    if plan.purge:
        yield from _row_table([(row, ()) for row in plan.purge])
    for checkpoint in collected.resumed:
        yield f"{checkpoint}  removal was interrupted"
    if collected.leftovers:
        yield ""
        yield from _leftovers(collected)
    if collected.thin:
        yield ""
        kept, stored = (
            sum(n) for n in zip(*((t.left, t.stored) for t in collected.thin), strict=True)
        )
        yield Heading(
            f"thin {plural(len(collected.thin), 'checkpoint')}: keep about {bytes_text(kept)}, "
            f"remove {bytes_text(stored - kept)}"
        )
        yield from _row_table(
            [(t.row, tuple(needed_by(t.row.dependents))) for t in collected.thin], "because"
        )
    wait = collected.waiting
    if wait:
        yield ""
        size = sum(w.row.nbytes for w in wait)
        yield Heading(f"wait for {plural(len(wait), 'checkpoint')}, {bytes_text(size)}")
        yield from _row_table([(w.row, _reasons(w, collected)) for w in wait], "because")


def _reasons(waiting: Deferred, collected: Collected) -> tuple[str, ...]:
    until = () if waiting.until is None else (f"until {moment(waiting.until)}",)
    whole = collected.whole.get(waiting.row.id)
    return (*waiting.reasons, *(() if whole is None else (f"not thinned: {whole}",)), *until)


def _leftovers(collected: Collected) -> Iterator[str]:
    rows = [
        (left.url, left.attempt or "", bytes_text(left.nbytes), moment(left.started))
        for left in collected.leftovers
    ]
    return table(
        ("left by a writer in", "attempt", "size", "begun"),
        rows,
        left=(0, 1, 3),
        width=terminal_width(),
    )
