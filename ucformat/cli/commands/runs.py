"""`ucp runs`: the runs of the catalog."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ucformat.catalog.as_json import data_of
from ucformat.catalog.filter.syntax import quoted
from ucformat.cli.ui.catalogs import opened_catalog
from ucformat.cli.ui.options import CATALOG, command
from ucformat.cli.ui.output import terminal_width
from ucformat.cli.ui.text import table
from ucformat.cli.ui.timings import heat_lines
from ucformat.errors import UcformatError, UsageError
from ucformat.texts import ago, bytes_text, count, plural

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ucformat.catalog.catalog import Catalog
    from ucformat.catalog.entries import Entry, RunEntry
    from ucformat.cli.ui.output import Output

_MAX_ROWS = 50
_SAVES = 24  # of a run, whose manifests `--timings` reads


@command
@click.argument("where", metavar="[FILTER]", default="")
@click.option("--metric", metavar="NAME", help="Also show the best value of this metric.")
@click.option("--max", "highest", is_flag=True, help="More of the metric is better, not less.")
@click.option(
    "-n",
    "--limit",
    type=click.IntRange(min=0),
    metavar="N",
    help=f"Maximum number of runs; 0 for all.  [default: {_MAX_ROWS}; all with -q or --json]",
)
@click.option(
    "--offset", type=click.IntRange(min=0), default=0, metavar="N", help="Skip the first N."
)
@click.option(
    "--timings",
    is_flag=True,
    help=f"Show how long ranks took in the newest {_SAVES} saves of each run.",
)
@CATALOG
def runs(
    where: str,
    metric: str | None,
    highest: bool,  # noqa: FBT001
    limit: int | None,
    offset: int,
    timings: bool,  # noqa: FBT001
    out: Output,
) -> None:
    """List the runs in the catalog, those that were saved last first.

    FILTER says which of their checkpoints count, as for `ucp ls`.
    """
    if highest and metric is None:
        raise UsageError("--max needs a metric", hint="name it: --metric NAME --max")
    if limit is None and not (out.quiet or out.as_json):
        limit = _MAX_ROWS
    more = 1 if limit else 0  # shows that there are more, which costs less than counting them
    with opened_catalog() as catalog:
        listed = catalog.runs(
            where,
            metric=metric,
            mode="max" if highest else "min",
            limit=None if not limit else limit + more,
            offset=offset,
        )
        shown = listed[:limit] if limit else listed
        saves = {run.name: _saves(catalog, run.name, where, out) for run in shown if timings}
    out.result(
        lambda: _heat(saves) if timings else _table(shown, metric),
        lambda: {
            "runs": [
                data_of(run) | ({"saves": saves[run.name]} if timings else {}) for run in shown
            ],
            "more": len(listed) > len(shown),
        },
        lambda: (run.name for run in shown),
    )
    if len(listed) > len(shown):
        out.note(f"the first {plural(len(shown), 'run')}; -n {2 * len(shown)} shows more, -n 0 all")


def _table(listed: Sequence[RunEntry], metric: str | None) -> Iterator[str]:
    if not listed:
        return iter(("no runs",))
    best = [] if metric is None else [metric, "at"]
    rows = []
    for run in listed:
        cells = [run.name, count(run.checkpoints), _steps(run)]
        if metric is not None and run.best is None:
            cells += ["-", "-"]
        elif run.best is not None:
            step = run.best.step
            cells += [f"{run.best.value:.6g}", "-" if step is None else count(step)]
        rows.append([*cells, bytes_text(run.disk_nbytes), ago(run.last_saved)])
    headings = ["run", "checkpoints", "steps", *best, "disk", "saved"]
    return table(headings, rows, left=1, width=terminal_width())


def _saves(catalog: Catalog, run: str, where: str, out: Output) -> list[dict[str, Any]]:
    """What the newest saves of a run recorded of their ranks, the oldest first."""
    from ucformat.jobs.timings import save_timings
    from ucformat.references import open_entry
    from ucformat.storage.concurrency import map_io

    own = f"run = {quoted(run)} and kind = 'ucformat'"
    chosen = f"({where}) and {own}" if where.strip() else own
    entries = catalog.find(chosen, limit=_SAVES)

    def read(entry: Entry) -> dict[str, Any] | None:
        try:
            universal = open_entry(catalog, entry, entry.name)[0].universal
        except UcformatError as error:
            out.note(f"{entry.name} is left out: {error.message}")
            return None
        timings = None if universal is None else save_timings(universal.manifest)
        about = {"id": entry.id, "name": entry.name, "step": entry.step}
        return None if timings is None else about | timings

    return [save for save in map_io(read, reversed(entries)) if save is not None]


def _heat(saves: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[str]:
    if not saves:
        yield "no runs"
    for run, of_run in saves.items():
        if of_run:
            yield from heat_lines(run, of_run)
        else:
            yield f"{run}: no save has recorded how long ranks took"


def _steps(run: RunEntry) -> str:
    if run.first_step is None or run.last_step is None:
        return "-"
    if run.first_step == run.last_step:
        return count(run.first_step)
    return f"{count(run.first_step)} to {count(run.last_step)}"
