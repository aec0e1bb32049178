"""`ucp thin`: removes states from checkpoints, in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ucformat.cli.ui.options import (
    CATALOG,
    IGNORE_DEPENDENT,
    command,
    ignore_dependents_of,
    ref_argument,
)
from ucformat.cli.ui.output import Heading, terminal_width
from ucformat.cli.ui.text import table
from ucformat.cli.ui.where import NO_VERIFY, workers_option
from ucformat.errors import UsageError
from ucformat.texts import bytes_text, count, plural

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ucformat.checkpoint import Checkpoint
    from ucformat.cli.ui.output import Output
    from ucformat.jobs.thin import ThinPlan


@command
@ref_argument("refs", "REF…", many=True)
@click.option(
    "--drop",
    metavar="STATE",
    multiple=True,
    required=True,
    help="A state to remove, or a glob: 'exp_avg*', master. `weight` only by its own name. May be repeated.",
)
@click.option("--apply", is_flag=True, help="Permanently remove them.  [default: only show them]")
@workers_option("shards to write")
@NO_VERIFY
@IGNORE_DEPENDENT
@click.option("-y", "--yes", is_flag=True, help="With --apply, do not ask for confirmation.")
@CATALOG
def thin(
    refs: tuple[str, ...],
    drop: tuple[str, ...],
    apply: bool,  # noqa: FBT001
    workers: int | None,
    no_verify: bool,  # noqa: FBT001
    ignored: tuple[str, ...],
    yes: bool,  # noqa: FBT001
    out: Output,
) -> None:
    """Show what would remain of checkpoints without some states; with --apply, remove these, permanently.

    Everything else stays: weights, step, metrics, configuration, objects, optimizer groups. Each
    checkpoint gets a new id. Checkpoints that have an alias, tag or hold, or that others need, are
    refused. Interrupted at any instant, a checkpoint is whole or thinned.
    """
    import ucformat
    from ucformat.jobs.documents import protections_of
    from ucformat.jobs.thin import plan_thin
    from ucformat.signatures import SIGNATURE
    from ucformat.storage.base import exists

    if ignored and not apply:
        raise UsageError("--ignore-dependent goes with --apply")
    plans = [plan_thin(ref, drop) for ref in refs]
    work = [plan for plan in plans if plan.dropped]
    if not (out.as_json or out.quiet):
        out.result(lambda: _lines(plans), dict)
    left: dict[str, Checkpoint] = {}
    if apply and work:
        dropped = bytes_text(sum(plan.bytes_dropped for plan in work))
        if not out.confirm(
            f"permanently remove {dropped} of {plural(len(work), 'checkpoint')}?", yes=yes
        ):
            raise click.exceptions.Exit(1)
        ignore_dependents_of(ignored, [plan.checkpoint.url for plan in work], out, "thin")
        from ucformat.cli.program import interruptible

        again = "interrupted: each checkpoint is whole or thinned; run the same command again"
        for plan in work:
            with interruptible(again), out.progress("thinning") as progress:
                ck = ucformat.thin(
                    plan.checkpoint, drop, workers=workers, verify=not no_verify, progress=progress
                )
            left[plan.checkpoint.id] = ck
            if exists(ck.store, SIGNATURE):
                out.note(f"the signature beside {ck.url} is not of what is left: sign it again")
    elif not apply:
        for plan in work:
            for why in protections_of(plan.checkpoint.url, plan.checkpoint.id):
                out.warn(f"{plan.checkpoint.url} will be refused: {why}")
    thinned = f"thinned {plural(len(left), 'checkpoint')}"
    done = thinned if apply else "nothing was removed; --apply does it"
    out.result(
        lambda: ["", done] if work else [],
        lambda: {
            "applied": apply,
            "checkpoints": [_data(plan, left.get(plan.checkpoint.id)) for plan in plans],
            "runs": [
                {"run": run, "bytes_kept": kept, "bytes_dropped": gone}
                for run, kept, gone in _runs(plans)
            ],
        },
        lambda: [left.get(plan.checkpoint.id, plan.checkpoint).id for plan in plans],
    )


def _runs(plans: Sequence[ThinPlan]) -> list[tuple[str | None, int, int]]:
    """The bytes that are kept and dropped of each run."""
    runs: dict[str | None, tuple[int, int]] = {}
    for plan in plans:
        kept, dropped = runs.get(plan.checkpoint.manifest.run, (0, 0))
        runs[plan.checkpoint.manifest.run] = kept + plan.bytes_kept, dropped + plan.bytes_dropped
    return [(run, *amounts) for run, amounts in runs.items()]


def _lines(plans: Sequence[ThinPlan]) -> Iterator[str]:
    width = terminal_width()
    for plan in plans:
        yield Heading(plan.checkpoint.url)
        rows = [
            (state, what, count(tensors), bytes_text(nbytes))
            for what, states in (("keep", plan.kept), ("drop", plan.dropped))
            for state, (tensors, nbytes) in states.items()
        ]
        yield from table(("state", "", "tensors", "size"), rows, left=2, width=width)
        if not plan.dropped:
            yield "it has none of these states any more: nothing to do"
        yield ""
    head = ("run", "keep", "drop")
    rows_of_runs = [(run or "", *map(bytes_text, amounts)) for run, *amounts in _runs(plans)]
    yield from table(head, rows_of_runs, width=width)


def _data(plan: ThinPlan, left: Checkpoint | None) -> dict[str, Any]:
    def states(amounts: dict[str, tuple[int, int]]) -> list[dict[str, Any]]:
        return [
            {"state": state, "tensors": tensors, "bytes": nbytes}
            for state, (tensors, nbytes) in amounts.items()
        ]

    return {
        "url": plan.checkpoint.url,
        "id": plan.checkpoint.id,
        "new_id": None if left is None else left.id,
        "run": plan.checkpoint.manifest.run,
        "kept": states(plan.kept),
        "dropped": states(plan.dropped),
        "bytes_kept": plan.bytes_kept,
        "bytes_dropped": plan.bytes_dropped,
    }
