"""A run: the folders of its checkpoints, those that are committed, and the signals that ask it to stop."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, cast

from ucformat.catalog.lines import contradictions
from ucformat.catalog.newest import newest_first
from ucformat.errors import (
    IntegrityError,
    MissingData,
    NotACheckpoint,
    NotFound,
    UpgradeNeeded,
    UsageError,
)
from ucformat.format.audit import Check, ZarrJson, block_problems, items, wrong_digests
from ucformat.format.structure import Problem, read_manifest
from ucformat.geometry.tensor import Key, single_extents
from ucformat.jobs.record import record_verification
from ucformat.jobs.run import Report, run
from ucformat.schema.documents import TOMBSTONE
from ucformat.schema.manifest import MANIFEST
from ucformat.storage.concurrency import map_io
from ucformat.storage.url import open_store
from ucformat.torch.comm.wire import message
from ucformat.torch.loading.load import load
from ucformat.torch.loading.match import edge_of, holds_training
from ucformat.torch.loading.share import open_together

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType

    from ucformat.checkpoint import Checkpoint
    from ucformat.format.universal import Universal
    from ucformat.torch.comm.group import Group
    from ucformat.torch.loading.load import LoadReport

    Mode = Literal["full", "quick"]


_FOLDER = re.compile(r"step-(\d{8,})(?:\.(\d+))?", re.ASCII)


@message
class RunStep:
    """A committed checkpoint of a run, as its manifest describes it, without the tensors."""

    url: str
    step: int
    id: str
    created: datetime
    nbytes: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    commits: int | None = None
    launch: str | None = None
    continues: Mapping[str, int] = field(default_factory=dict)

    @property
    def family(self) -> None:
        """None: the counts of a folder are comparable, since each launch has listed it."""

    @property
    def run(self) -> str:
        """Empty: all checkpoints of one folder belong to one run."""
        return ""


@message
class RunContents:
    """The checkpoints of a run, the newest first, and their greatest commit count.

    `unreadable` are those whose manifests cannot be read: url, step and reason. `being_purged` are
    the urls of checkpoints of which an interrupted purge has left files.
    """

    steps: tuple[RunStep, ...]
    unreadable: tuple[tuple[str, int, str], ...]
    being_purged: tuple[str, ...] = ()
    commits: int = 0


def folder_of(step: int, again: int = 0) -> str:
    """Return the name of a step's folder; names sort as steps do.

    Args:
        again: distinguishes several checkpoints of one step (0: the first).
    """
    if step < 0:
        raise UsageError(f"the training step {step} is negative", hint="steps count from 0")
    return f"step-{step:08d}" + (f".{again}" if again else "")


def step_of(folder: str) -> int | None:
    """The step of a folder's name; None for other names."""
    match = _FOLDER.fullmatch(folder)
    return int(match[1]) if match else None


def list_steps(root: str) -> RunContents:
    """List the committed checkpoints of a run.

    Lists all files below `root`, and reads the manifest of each checkpoint.
    """
    store = open_store(root)
    folders: dict[str, int] = {}
    being_purged: list[str] = []
    for info in store.list():
        folder, _, file = info.key.partition("/")
        step = step_of(folder)
        if file == MANIFEST and step is not None:
            folders[f"{store.url}/{folder}"] = step
        elif file == TOMBSTONE and step is not None:
            being_purged.append(f"{store.url}/{folder}")

    def read(url: str) -> RunStep | str | None:
        try:
            return read_step(url, folders[url])
        except NotACheckpoint:
            return None
        except (IntegrityError, UpgradeNeeded) as error:
            return error.message

    answers = dict(zip(folders, map_io(read, folders), strict=True))
    steps = newest_first(s for s in answers.values() if isinstance(s, RunStep))
    unreadable = tuple((u, folders[u], why) for u, why in answers.items() if isinstance(why, str))
    commits = max((s.commits for s in steps if s.commits is not None), default=0)
    return RunContents(tuple(steps), unreadable, tuple(being_purged), commits)


def read_step(url: str, step: int) -> RunStep:
    """Read the checkpoint of a step from its manifest."""
    manifest, _ = read_manifest(open_store(url))
    nbytes, launch = manifest.tensors.nbytes, manifest.launch
    about = (None, {}) if launch is None else (launch.id, launch.continues)
    return RunStep(
        url, step, manifest.id, manifest.created, nbytes, manifest.metrics, manifest.commits, *about
    )


def continued_here(steps: Sequence[RunStep]) -> dict[str, int]:
    """Return what a launch continues that is about to save where these checkpoints are, whichever of them it loaded.

    A folder has one training at a time, which counts on from all that is there.
    """
    launches: dict[str, int] = {}
    for step in steps:
        here = (
            step.continues
            if step.launch is None
            else {**step.continues, step.launch: step.commits or 0}
        )
        for launch, count in here.items():
            launches[launch] = max(count, launches.get(launch, 0))
    return {launch: count for launch, count in launches.items() if count}


_log = logging.getLogger("ucformat")


class Signals:
    """Records that a signal was received, and then calls the handler that was installed before.

    Handlers can only be installed in the main thread; in any other a warning is logged. In
    processes that are forked later (of a data loader), the handlers that were installed before take
    effect.
    """

    def __init__(self, signals: Sequence[int]) -> None:
        self.caught = False
        self._pid = os.getpid()
        self._handler = self._handle  # one object, to compare with the installed handler
        self._before: dict[int, Any] = {}
        if signals and threading.current_thread() is not threading.main_thread():
            names = ", ".join(signal.Signals(s).name for s in signals)
            _log.warning(
                "%s will end this process without a last save: the manager was not created in the main thread",
                names,
            )
            return
        for number in signals:
            self._before[number] = signal.signal(number, self._handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        before = self._before.get(number)
        if os.getpid() != self._pid:
            signal.signal(number, before if before is not None else signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        again, self.caught = self.caught, True
        # The first Ctrl-C asks to save and stop; only the second one raises KeyboardInterrupt.
        if callable(before) and (again or before is not signal.default_int_handler):
            before(number, frame)

    def close(self) -> None:
        """Restore the previous handlers, except where another one has been installed since."""
        for number, before in self._before.items():
            if signal.getsignal(number) is self._handler:
                signal.signal(number, before if before is not None else signal.SIG_DFL)
        self._before.clear()


# Verifies and restores the newest intact checkpoint of a run, the same one on all ranks.

#: Errors that show that a checkpoint is damaged. Any other is a failure of the storage, and is
#: raised.
_DAMAGE = (IntegrityError, NotFound, UpgradeNeeded)


@message
class _CheckResult:
    """The results of one rank."""

    problems: list[Problem] = field(default_factory=list)
    leaves: list[tuple[Key, tuple[int, ...], bytes]] = field(default_factory=list)
    nbytes: int = 0


def verify_on_all_ranks(
    step: RunStep, mode: Mode, ranks: Group, threads: int | None = None
) -> tuple[Checkpoint | None, Report]:
    """Open a checkpoint and verify it; all ranks call this together, and get the same report.

    Args:
        mode: `full` reads every byte once, on all ranks together, and compares it with checksums
            and digests. `quick` reads only the documents (manifest, sidecar, objects) and checks
            the size of each file.
        threads: how many threads read on each rank (default: as many as the storage can use).

    Returns:
        the checkpoint, or None if it cannot be opened, and the report.
    """
    ck = None
    try:
        ck = open_together(step.url, ranks)
        if ck.id != step.id:
            raise MissingData(f"{step.url} now contains another checkpoint")  # noqa: TRY301 - one of several kinds of damage
        result: _CheckResult | Exception = _verify(ck, mode, ranks, threads)
    except _DAMAGE as error:
        result = _CheckResult([Problem(MANIFEST, error.message)])
    except Exception as error:  # noqa: BLE001 - raised on all ranks
        result = error

    def report_all(all_found: Sequence[_CheckResult]) -> list[Report]:
        problems = {str(p): p for f in all_found for p in f.problems}
        if ck is not None and ck.universal and mode == "full" and not problems:
            leaves: dict[Key, dict[tuple[int, ...], bytes]] = {}
            for key, shard, digests in (leaf for f in all_found for leaf in f.leaves):
                leaves.setdefault(key, {})[shard] = digests
            problems = {str(p): p for p in wrong_digests(ck.universal, leaves)}
        nbytes = sum(f.nbytes for f in all_found)
        report = Report(
            step.url, "ucformat", len(ck.tensors) if ck else 0, nbytes, 0, tuple(problems.values())
        )
        return [report] * ranks.size

    report: Report = ranks.gather_scatter(result, report_all, _CheckResult, Report)
    return ck, report


def _verify(ck: Checkpoint, mode: Mode, ranks: Group, threads: int | None) -> _CheckResult:
    """This rank's part of the checks; every rank reads the documents, which it needs to load."""
    source = cast("Universal", ck.universal)  # it has a manifest
    if source.manifest.sidecar is not None:
        source.sidecar()
    _ = ck.objects
    tasks = sorted(
        _full_checks(source) if mode == "full" else _quick_checks(source), key=lambda t: -t.nbytes
    )
    result = _CheckResult()
    mine = tasks[ranks.rank :: ranks.size]
    for task, (leaves, problems) in run(lambda t: t.run(), mine, threads):
        result.problems.extend(problems)
        if task.key is not None and task.shard is not None:
            result.leaves.append((task.key, task.shard, leaves))
    return _CheckResult(result.problems, result.leaves, sum(t.nbytes for t in mine))


def _full_checks(source: Universal) -> Iterator[Check]:
    """Checks of all bytes: by file, and by tensor for tensors that are not arrays."""
    for item in items(source):
        yield Check.of(item, source.store, _DAMAGE)
    for key, tensor in source.docs.items():
        if tensor.path is None:
            yield Check(tensor.nbytes, lambda k=key: (b"", _block_problems(source, k)))  # type: ignore[misc]


def _block_problems(source: Universal, key: Key) -> list[Problem]:
    """The problems of the blocks of a tensor that is not an array."""
    blocks = ((e.file, e.block) for e in single_extents(source.extents(key)) if e.block is not None)
    return block_problems(source.store, key, blocks, _DAMAGE)


def _quick_checks(source: Universal) -> Iterator[Check]:
    """Checks of the size of each file."""
    ends = {item.file: item.nbytes for item in items(source) if not isinstance(item, ZarrJson)}
    for key, tensor in source.docs.items():
        if tensor.path is None:
            for e in single_extents(source.extents(key)):
                if e.box.size:
                    ends[e.file] = max(ends.get(e.file, 0), e.last + 1)

    def check_size(file: str, expected: int) -> None:
        size = source.store.info(file).size
        if size < expected:
            raise MissingData(
                f"{source.store.url}/{file} has {size} bytes, expected at least {expected}"
            )

    for file, end in ends.items():
        yield Check(0, lambda f=file, n=end: (b"", _problems_of(f, lambda: check_size(f, n))))  # type: ignore[misc]


def _problems_of(file: str, check: Callable[[], object]) -> list[Problem]:
    """The problem that a check of a file raises, if any."""
    try:
        check()
    except _DAMAGE as error:
        return [Problem(file, error.message)]
    return []


@dataclass(frozen=True, slots=True)
class Restored:
    """The checkpoint that was restored, and the other checkpoints of the run.

    `later_steps` are the steps after it that hold a checkpoint, intact or not, and `damaged` the
    urls of damaged ones.
    """

    step: RunStep
    report: LoadReport
    later_steps: frozenset[int]
    damaged: frozenset[str]
    listed: RunContents


def restore_newest(
    root: str, state: Mapping[str, Any], verify: Mode, ranks: Group, options: Mapping[str, Any]
) -> Restored | None:
    """Load the newest intact checkpoint of a run; damaged ones are skipped, with a warning on rank 0."""
    listed: RunContents = ranks.combine(None, then=lambda _: _list(root), answer_kind=RunContents)
    damaged: dict[str, str] = {}
    if not ranks.rank:
        for text in contradictions(listed.steps, attrgetter("url")):
            _log.warning("%s", text)

    def skip(url: str, why: str) -> None:
        damaged[url] = why
        if not ranks.rank:
            _log.warning("the checkpoint %s is skipped: %s", url, why)

    for url, _, why in listed.unreadable:
        skip(url, why)
    for step in listed.steps:
        ck, checked = verify_on_all_ranks(step, verify, ranks, options.get("threads"))
        if verify == "full" and ck is not None and not ranks.rank:
            record_verification(ck, checked)
        if ck is None or not checked:
            more = len(checked.problems) - 1
            skip(step.url, str(checked.problems[0]) + (f", and {more} more" if more else ""))
            continue
        try:
            report = load(state, ck, verify="whole" if verify == "full" else "always", **options)
        except IntegrityError as error:  # raised on all ranks
            skip(step.url, error.message)
            continue
        if not holds_training(ck):  # the run has no optimizer state, so none was left out
            report = replace(report, lineage=edge_of(ck, report.layout, continues=True))
        steps = [s.step for s in listed.steps] + [s for _, s, _ in listed.unreadable]
        return Restored(
            step, report, frozenset(s for s in steps if s > step.step), frozenset(damaged), listed
        )
    if damaged:
        raise IntegrityError(
            f"all checkpoints below {root} are damaged:\n  "
            + "\n  ".join(f"{url}: {why}" for url, why in damaged.items()),
            hint="restore the files from another copy, or start again in another folder",
        )
    return None


def _list(root: str) -> RunContents:
    """The committed checkpoints of a run that were not deleted in the catalog."""
    from ucformat.torch.manager.retention import deleted_ids  # imports sqlalchemy

    listed = list_steps(root)
    deleted = deleted_ids(root) if listed.steps else frozenset()
    return replace(listed, steps=tuple(s for s in listed.steps if s.id not in deleted))
