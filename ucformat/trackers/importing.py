"""`import_runs`: parameters and metrics of a tracker's runs are recorded with the checkpoints of the catalog."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from ucformat.catalog.filter.syntax import Text
from ucformat.catalog.labels import is_name
from ucformat.catalog.lines import line_to, lines, path_of
from ucformat.catalog.models import storable_json
from ucformat.catalog.tracked import TrackedValues
from ucformat.errors import NotFound, UsageError, check_choice, first_names
from ucformat.sources.configuration import plain_config
from ucformat.trackers.content import Series, is_same, joined

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from ucformat.catalog.catalog import Catalog
    from ucformat.catalog.entries import Entry
    from ucformat.trackers.content import TrackedContent, TrackedRun, TrackedRuns

__all__ = ["ImportedCheckpoint", "ImportedRuns", "import_runs"]

_MOST_NAMED = 5
#: How each tracker is spelled in messages.
_TITLES = {"mlflow": "MLflow", "wandb": "W&B", "tensorboard": "TensorBoard"}


@dataclass(frozen=True, slots=True)
class ImportedCheckpoint:
    """What a checkpoint got from a run of a tracker.

    `metrics` are those that were recorded, `earlier` the steps of the values of which none was
    logged at the checkpoint's own step, `kept` what the catalog had already with another value, by
    name, and `params` the number of parameters if these are new.
    """

    id: str
    name: str
    run: str
    metrics: Mapping[str, float]
    earlier: Mapping[str, int]
    kept: tuple[str, ...]
    params: int


@dataclass(frozen=True, slots=True)
class ImportedRuns:
    """What an import has recorded, or would record.

    `checkpoints` are those that runs belong to, in order of runs and steps. `unmatched` has the
    reason for each run of the tracker that belongs to none, and `left_out` counts what else was not
    imported, by what it is.
    """

    checkpoints: tuple[ImportedCheckpoint, ...]
    unmatched: Mapping[str, str]
    left_out: Mapping[str, int]

    @property
    def changed(self) -> int:
        """How many checkpoints got anything that the catalog did not have."""
        return sum(bool(c.metrics or c.params) for c in self.checkpoints)


@dataclass(slots=True)
class _Match:
    """Checkpoints, and the runs of the tracker that belong to them, in the order in which they continue each other."""

    runs: list[TrackedRun]
    entries: list[Entry]
    absent: int = 0  # references to checkpoints that the catalog does not have


@dataclass(slots=True)
class _Choice:
    """How runs of a tracker are matched with checkpoints."""

    title: str
    catalog: Catalog
    unmatched: dict[str, str] = field(default_factory=dict)

    def by_name(self, tracked: Sequence[TrackedRun]) -> list[_Match]:
        """Match runs with the checkpoints that were logged to them, else with the run of their name."""
        matches: list[_Match] = []
        named: dict[str, list[TrackedRun]] = defaultdict(list)
        for run in tracked:
            if references := run.references():
                matches.append(self._referenced(run, references))
            else:
                named[run.name].append(run)
        in_catalog = {entry.name for entry in self.catalog.runs()}
        for name, runs in named.items():
            if name not in in_catalog:
                reason = f"the catalog has no run {name!r}, and no checkpoint was logged to it"
                self.unmatched |= {str(run): reason for run in runs}
                continue
            if len(runs) > 1:
                ids = [run.id for run in runs]
                raise UsageError(
                    f"{self.title} has {len(runs)} runs {name!r}: {first_names(ids, _MOST_NAMED)}",
                    hint=f"choose one: {_option(ids[0])}; or give those that continue each other, in "
                    f"their order: {_option(ids[0], name)} {_option(ids[1], name)}",
                )
            matches.append(_Match(runs, self._path(name, f"--run {runs[0].id}=REF")))
        return matches

    def given(self, pairs: Iterable[tuple[TrackedRun, str]]) -> list[_Match]:
        """Match runs as the user says."""
        targets: dict[str, list[TrackedRun]] = {}
        for run, target in pairs:
            targets.setdefault(target, []).append(run)
        return [
            _Match(runs, self._path(target, f"--run {runs[0].id}=REF"))
            for target, runs in targets.items()
        ]

    def _referenced(self, run: TrackedRun, references: Iterable[str]) -> _Match:
        ids = sorted(references)
        committed = [e for e in self.catalog.with_ids(ids) if e.state == "committed"]
        absent = len(ids) - len(committed)
        if not committed:
            self.unmatched[str(run)] = "the catalog has none of the checkpoints logged to it"
        return _Match([run], sorted(committed, key=_by_step), absent)

    def _path(self, target: str, option: str) -> list[Entry]:
        """The checkpoints on the path to the newest one of a run, or to the one that a reference names."""
        entries = self._of_run(target)
        head = None
        if not entries:
            head = self.catalog.get(target)
            if head.state != "committed":
                raise NotFound(
                    f"the checkpoint {target!r} is {head.state}",
                    hint=f"name one that is there: {option}",
                )
            entries = [head] if head.run is None else self._of_run(head.run)
        began = self.catalog.beginnings(entries[0].run or "")
        if head is None:
            all_lines = lines(entries)
            if len(all_lines) > 1:
                heads = [f"{first.name} {first.id[:12]}" for first, _ in all_lines]
                raise UsageError(
                    f"the run {target!r} has {len(heads)} lines that do not continue each other; "
                    f"their newest checkpoints are {first_names(heads, _MOST_NAMED)}",
                    hint=f"name the one to which the tracker's run led: {option}",
                )
            line = all_lines[0][1]
        else:
            line = line_to(entries, head)
        on_path = {(e.launch, e.step, e.commits) for e in path_of(line, began)}
        # a checkpoint may be there in several forms
        chosen = [e for e in line if (e.launch, e.step, e.commits) in on_path]
        return sorted(chosen, key=_by_step)

    def _of_run(self, name: str) -> list[Entry]:
        return self.catalog.find(f"run = {Text(name)}", sort="step")


def _option(run: str, target: str = "") -> str:
    """The option of the command line that chooses a run; `NAME=` is a name with an equals sign in it."""
    if "=" in target:
        return f"--run '{run}=\"{target}\"'"
    return f"--run {run}={target}" if target or "=" in run else f"--run {run}"


def _by_step(entry: Entry) -> tuple[int, str]:
    return (-1 if entry.step is None else entry.step, entry.id)


def _by_run(entry: Entry) -> tuple[str, int, str]:
    return (entry.run or "", *_by_step(entry))


def import_runs(
    tracker: Literal["mlflow", "wandb", "tensorboard"],
    url: str,
    catalog: Catalog,
    *,
    runs: Mapping[str, str | None] | None = None,
    experiments: Sequence[str] = (),
    step_key: str | None = None,
    metrics: Sequence[str] = ("*",),
    rewound: Literal["keep", "drop"] | None = None,
    replace: bool = False,
    dry_run: bool = False,
) -> ImportedRuns:
    """Record parameters and metrics of a tracker's runs with the checkpoints of the catalog.

    A run belongs to the checkpoints whose references were logged to it (`log_to` of saves,
    `log_reference`), else to those of the catalog's run of its name. A checkpoint gets of each
    metric the value at its step, else the last one before. The parameters are recorded in its
    configuration, below the name of the tracker.

    Args:
        tracker: `mlflow` (extra `mlflow`), `tensorboard` or `wandb`.
        url: of MLflow a server, `sqlite:///FILE`, or the folder of a file store; of TensorBoard a
            folder of event files, and of W&B one of offline runs, both on any storage.
        catalog: where they are recorded.
        runs: names or ids of the tracker's runs, in the order in which they continue each other,
            and which run or reference of the catalog each belongs to; None for the default (default:
            all runs of the tracker).
        experiments: of MLflow, the names of experiments (default: all).
        step_key: of W&B, under which name the step of the training was logged; `_step` for its own
            count of rows (default: that, unless another one was logged that differs).
        metrics: patterns of the names of metrics.
        rewound: whether values count that were logged at steps to which a restart has returned
            since: `keep` or `drop` (default: that is an error, where it makes a difference).
        replace: replace metrics that the catalog has with other values, and parameters of another
            run (default: these are kept).
        dry_run: record nothing.

    Raises:
        UsageError: it is ambiguous which checkpoints a run belongs to, or which value counts;
            nothing is recorded.
        NotFound: there is no such run, experiment or checkpoint.
        UnsupportedError: the tracker, or this kind of url, cannot be read.
    """
    check_choice("rewound", rewound, (None, "keep", "drop"))
    wanted = partial(_fits, patterns=metrics)
    tracked = _runs_of(tracker, url, experiments, step_key, wanted)
    choice = _Choice(_TITLES[tracker], catalog)
    left_out = Counter(tracked.left_out)
    matches = _matches(choice, tracked.runs, runs)
    _check_disjoint(choice.title, matches)
    checkpoints, values = [], dict[str, TrackedValues]()
    names = set[str]()
    for match in sorted(matches, key=lambda m: [_by_run(entry) for entry in m.entries[:1]]):
        left_out["references to checkpoints that the catalog does not have"] += match.absent
        if not match.entries:  # what nobody gets need not be readable
            continue
        content = joined([run.read() for run in match.runs])
        left_out.update(content.ignored)
        left_out["checkpoints without a step"] += sum(e.step is None for e in match.entries)
        names |= content.metrics.keys()
        chosen, unprintable = _chosen(content.metrics, metrics)
        left_out["metrics whose names are not printable"] += unprintable
        series = {name: Series(points) for name, points in chosen.items()}
        part = _config_part(match.runs[-1], content)
        for entry in match.entries:
            last = _last_values(entry, series, rewound)
            imported = _compared(entry, match.runs[-1], last, content, part, tracker, replace)
            checkpoints.append(imported)
            if imported.metrics or imported.params:
                values[entry.id] = TrackedValues(
                    imported.metrics, part if imported.params else None
                )
    if checkpoints:
        _check_patterns(choice.title, metrics, names)
    if not dry_run and values:
        catalog.add_tracked(tracker, values, replace=replace)
    return ImportedRuns(tuple(checkpoints), choice.unmatched, dict(+left_out))


def _runs_of(
    tracker: str,
    url: str,
    experiments: Sequence[str],
    step_key: str | None,
    wanted: Callable[[str], bool],
) -> TrackedRuns:
    check_choice("tracker", tracker, tuple(_TITLES))
    if experiments and tracker != "mlflow":
        raise UsageError(f"{_TITLES[tracker]} has no experiments", hint="leave them out")
    if step_key is not None and tracker != "wandb":
        raise UsageError(f"{_TITLES[tracker]} logs steps under no name", hint="leave step_key out")
    if tracker == "mlflow":
        from ucformat.trackers.mlflow import mlflow_runs

        return mlflow_runs(url, experiments, wanted)
    if tracker == "wandb":
        from ucformat.trackers.wandb import wandb_runs

        return wandb_runs(url, step_key)
    from ucformat.trackers.tensorboard import tensorboard_runs

    return tensorboard_runs(url)


def _matches(
    choice: _Choice, tracked: Sequence[TrackedRun], wanted: Mapping[str, str | None] | None
) -> list[_Match]:
    if wanted is None:
        return choice.by_name(tracked)
    chosen = [(_find(choice.title, tracked, name), target) for name, target in wanted.items()]
    for run_id, number in Counter(run.id for run, _ in chosen).items():
        if number > 1:
            raise UsageError(
                f"the run {run_id!r} of {choice.title} is given {number} times",
                hint="give it once, by its name or its id",
            )
    return [
        *choice.by_name([run for run, target in chosen if target is None]),
        *choice.given((run, target) for run, target in chosen if target is not None),
    ]


def _find(title: str, tracked: Sequence[TrackedRun], name: str) -> TrackedRun:
    fitting = [r for r in tracked if r.id == name] or [r for r in tracked if r.name == name]
    if len(fitting) != 1:
        ids = first_names([str(run) for run in fitting or tracked], _MOST_NAMED)
        what = f"{len(fitting)} runs" if fitting else "no run"
        raise (UsageError if fitting else NotFound)(
            f"{title} has {what} {name!r}", hint=f"give one of the ids: {ids}"
        )
    return fitting[0]


def _check_disjoint(title: str, matches: Iterable[_Match]) -> None:
    """Raise UsageError if two matches have a checkpoint in common."""
    owners: dict[str, TrackedRun] = {}
    for match in matches:
        for entry in match.entries:
            other = owners.setdefault(entry.id, match.runs[0])
            if other is not match.runs[0]:
                raise UsageError(
                    f"{entry.name} {entry.id[:12]} belongs to two runs of {title}: {other}, and "
                    f"{match.runs[0]}",
                    hint=f"choose one: {_option(other.id)}; or give those that continue each other, "
                    f"in their order: --run {other.id}=REF --run {match.runs[0].id}=REF",
                )


def _fits(name: str, patterns: Sequence[str]) -> bool:
    """Whether a metric's name fits one of the patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _chosen(metrics: Mapping[str, Any], patterns: Sequence[str]) -> tuple[dict[str, Any], int]:
    """The metrics that patterns fit, and the number of those whose names no catalog takes."""
    fitting = {name: points for name, points in metrics.items() if _fits(name, patterns)}
    good = {name: points for name, points in fitting.items() if is_name(name)}
    return good, len(fitting) - len(good)


def _check_patterns(title: str, patterns: Sequence[str], names: Collection[str]) -> None:
    """Raise NotFound if a pattern fits none of the metrics."""
    for pattern in patterns:
        if pattern != "*" and not any(fnmatchcase(name, pattern) for name in names):
            raise NotFound(
                f"{title} has no metric {pattern!r} of these runs",
                hint=f"it has {first_names(sorted(names), _MOST_NAMED)}" if names else None,
            )


def _config_part(run: TrackedRun, content: TrackedContent) -> dict[str, Any]:
    params = plain_config(dict(content.params))
    # as the catalog keeps it, with which it is compared
    part: dict[str, Any] = storable_json({"run_id": run.id, "run_name": run.name, "params": params})
    return part


def _last_values(
    entry: Entry, series: Mapping[str, Series], rewound: str | None
) -> dict[str, tuple[int, float]]:
    """Of each metric, the step and the value that a checkpoint gets."""
    out: dict[str, tuple[int, float]] = {}
    if entry.step is None:
        return out
    for name, values in series.items():
        last = values.last(entry.step)
        if last.kept != last.dropped and rewound is None:
            at = "no value" if last.dropped is None else f"that of step {last.dropped[0]}"
            kept = "none" if last.kept is None else last.kept[0]
            raise UsageError(
                f"which value of {name!r} belongs to {entry.name}: that of step {kept}, which was "
                f"logged before a restart returned to an earlier step, or {at}?",
                hint="say whether values before a restart count: --rewound drop or --rewound keep",
            )
        point = last.dropped if rewound == "drop" else last.kept
        if point is not None:
            out[name] = point
    return out


def _compared(
    entry: Entry,
    run: TrackedRun,
    last: Mapping[str, tuple[int, float]],
    content: TrackedContent,
    part: Mapping[str, Any],
    tracker: str,
    replace: bool,  # noqa: FBT001
) -> ImportedCheckpoint:
    """What a checkpoint gets that it does not have."""
    kept, new = list[str](), dict[str, float]()
    for name, (_, value) in last.items():
        recorded = entry.metrics.get(name)
        if recorded is not None and is_same(recorded, value, is_single=content.is_single):
            continue
        if recorded is None or replace:
            new[name] = value
        else:
            kept.append(f"metric.{name}")
    there = entry.config.get(tracker)
    number = len(part["params"]) if part["params"] and there != part else 0
    # what has no id of a run is no import's, but the training's
    run_id = there.get("run_id") if isinstance(there, dict) else None
    replaceable = run_id == part["run_id"] or (run_id is not None and replace)
    if number and there is not None and not replaceable:
        kept.append(f"config.{tracker}")
        number = 0
    earlier = {name: last[name][0] for name in new if last[name][0] != entry.step}
    return ImportedCheckpoint(entry.id, entry.name, str(run), new, earlier, tuple(kept), number)
