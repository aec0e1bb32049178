"""`ucp import`: parameters and metrics of experiment trackers for the checkpoints of the catalog."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import click

from ucformat.cli.ui.catalogs import opened_catalog
from ucformat.cli.ui.options import CATALOG, bundle, command
from ucformat.cli.ui.output import terminal_width
from ucformat.cli.ui.text import table
from ucformat.errors import UsageError, first_names
from ucformat.texts import count, plural

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ucformat.cli.ui.output import Output
    from ucformat.trackers.importing import ImportedCheckpoint, ImportedRuns

_MAX_NAMED = 5
_QUOTED = re.compile(r'(.*?)="(.+)"', re.DOTALL)


@dataclass(frozen=True)
class Wanted:
    """Which runs and metrics are imported, and how."""

    runs: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    rewound: Literal["keep", "drop"] | None = None
    replace: bool = False
    dry_run: bool = False


_WANTED = bundle(
    "wanted",
    Wanted,
    click.option(
        "--run",
        "runs",
        multiple=True,
        metavar="RUN[=REF]",
        help="Only this run, by its name or id; with REF, for the checkpoints of that run of the "
        "catalog, or for those that led to that checkpoint.  [default: all; repeatable]",
    ),
    click.option(
        "--metric",
        "metrics",
        multiple=True,
        metavar="PATTERN",
        help="Only metrics whose names fit, such as 'val/*'.  [default: all; repeatable]",
    ),
    click.option(
        "--rewound",
        type=click.Choice(["keep", "drop"]),
        help="Whether values count that a restart has returned before.  [default: an error if it matters]",
    ),
    click.option("--replace", is_flag=True, help="Replace what the catalog has with other values."),
    click.option(
        "--dry-run", is_flag=True, help="Show what would be recorded, and record nothing."
    ),
)


@command
@click.argument("url", metavar="URL")
@click.option(
    "--experiment",
    "experiments",
    multiple=True,
    metavar="NAME",
    help="Only runs of this experiment.  [default: all; repeatable]",
)
@_WANTED
@CATALOG
def mlflow(url: str, experiments: tuple[str, ...], wanted: Wanted, out: Output) -> None:
    """Record parameters and metrics of MLflow's runs with their checkpoints.

    URL is that of a server, sqlite:///FILE, or the folder of a file store. A run belongs to the
    checkpoints that were logged to it, else to those of the run of its name in the catalog. A
    checkpoint gets the value of each metric at its step, else the last one before, and the
    parameters as config.mlflow.params. What is recorded with another value is kept.
    """
    _import("mlflow", url, wanted, out, experiments=experiments)


@command
@click.argument("url", metavar="FOLDER")
@_WANTED
@CATALOG
def tensorboard(url: str, wanted: Wanted, out: Output) -> None:
    """Record hyperparameters and scalars of TensorBoard's runs with their checkpoints.

    FOLDER, a path or URL, is what `tensorboard --logdir` is given; each folder of event files
    below it is a run, by its path. It belongs to the checkpoints that were logged to it, else to
    those of the run of its name in the catalog. A checkpoint gets the value of each scalar at its
    step, else the last one before, and hyperparameters as config.tensorboard.params. What is
    recorded with another value is kept.
    """
    _import("tensorboard", url, wanted, out)


@command
@click.argument("url", metavar="FOLDER")
@click.option(
    "--step-key",
    metavar="NAME",
    help="The name of the training's step in the history, such as train/global_step.  [default: _step, W&B's count]",
)
@_WANTED
@CATALOG
def wandb(url: str, step_key: str | None, wanted: Wanted, out: Output) -> None:
    """Record configuration and history of W&B's offline runs with their checkpoints.

    FOLDER is `wandb`, with its folders of offline runs, or one of these. A run belongs to the
    checkpoints that were logged to it, else to those of the run of its name in the catalog. A
    checkpoint gets the value of each metric at its step, else the last one before, and the
    configuration as config.wandb.params. What is recorded with another value is kept.
    """
    _import("wandb", url, wanted, out, step_key=step_key)


def _import(
    tracker: Literal["mlflow", "wandb", "tensorboard"],
    url: str,
    wanted: Wanted,
    out: Output,
    **options: Any,
) -> None:
    import ucformat

    given = asdict(wanted)
    runs, patterns = _pairs(given.pop("runs")), given.pop("metrics")
    with opened_catalog() as catalog:
        imported = ucformat.import_runs(
            tracker,
            url,
            catalog,
            runs=runs or None,
            metrics=patterns or ("*",),
            **options,
            **given,
        )
    out.result(
        lambda: _lines(imported, wanted),
        lambda: _data(imported),
        lambda: (c.id for c in imported.checkpoints if c.metrics or c.params),
    )


def _pairs(texts: Sequence[str]) -> dict[str, str | None]:
    """What the runs of the tracker belong to."""
    pairs: dict[str, str | None] = {}
    for name, ref in map(_pair, texts):
        if name in pairs:
            raise UsageError(f"--run {name} is given twice", hint="give each run once")
        pairs[name] = ref
    return pairs


def _pair(text: str) -> tuple[str, str | None]:
    """A run of the tracker, and what it belongs to; `NAME=` is a name with an equals sign in it.

    So is a run of the catalog in double quotes.
    """
    if (match := _QUOTED.fullmatch(text)) is not None:
        return match[1], match[2]
    name, equals, ref = text.rpartition("=")
    return (name, ref or None) if equals else (text, None)


def _lines(imported: ImportedRuns, wanted: Wanted) -> Iterator[str]:
    rows = [
        (
            c.name,
            c.run,
            count(len(c.metrics)),
            count(len(c.earlier)),
            count(c.params),
            count(len(c.kept)),
        )
        for c in imported.checkpoints
    ]
    if rows:
        head = ("checkpoint", "tracker's run", "metrics", "from earlier", "params", "kept")
        yield from table(head, rows, left=2, shrink=(0, 1), width=terminal_width())
    would = "would be changed; nothing is, with --dry-run" if wanted.dry_run else "changed"
    total = plural(len(imported.checkpoints), "checkpoint")
    yield f"{count(imported.changed)} of {total} {would}"
    yield from _earlier(imported.checkpoints)
    why = (
        "not of an import"
        if wanted.replace
        else "recorded with another value; --replace replaces it"
    )
    yield from _kept(imported.checkpoints, why)
    for run, reason in imported.unmatched.items():
        yield f"  not imported  {run}: {reason}"
    for what, number in imported.left_out.items():
        yield f"  left out      {count(number)} {what}"


def _earlier(checkpoints: Sequence[ImportedCheckpoint]) -> Iterator[str]:
    """How old the values are that were not logged at the step of their checkpoint."""
    by_metric: dict[str, list[ImportedCheckpoint]] = {}
    for c in checkpoints:
        for name in c.earlier:
            by_metric.setdefault(name, []).append(c)
    for name, theirs in sorted(by_metric.items()):
        c = theirs[0]
        yield (
            f"  from earlier  {name} of {plural(len(theirs), 'checkpoint')}: none was logged at its step, as for "
            f"{c.name}, which has that of step {count(c.earlier[name])}"
        )


def _kept(checkpoints: Sequence[ImportedCheckpoint], why: str) -> Iterator[str]:
    for c in checkpoints:
        if c.kept:
            yield f"  kept          {first_names(c.kept, _MAX_NAMED)} of {c.name}: {why}"


def _data(imported: ImportedRuns) -> dict[str, Any]:
    return {
        "checkpoints": [asdict(c) for c in imported.checkpoints],
        "unmatched": dict(imported.unmatched),
        "left_out": dict(imported.left_out),
    }
