"""Verifies and restores the newest intact checkpoint of a run, the same one on all ranks."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from ucformat.catalog.lines import contradictions
from ucformat.errors import IntegrityError, MissingData, NotCertified, NotFound, UpgradeNeeded
from ucformat.format.audit import Check, ZarrJson, block_problems, items, referenced, wrong_digests
from ucformat.format.structure import Problem
from ucformat.geometry.tensor import Extent, Key, Tiles, single_extents
from ucformat.jobs.record import deleted_below, record_verification
from ucformat.jobs.run import Report, run
from ucformat.schema import MANIFEST
from ucformat.storage.base import stored_key
from ucformat.torch.comm.wire import message
from ucformat.torch.loading.load import load
from ucformat.torch.loading.match import edge_of, holds_training
from ucformat.torch.loading.replay import replay
from ucformat.torch.loading.share import open_together
from ucformat.torch.manager.merging import find_merged
from ucformat.torch.manager.steps import RunContents, RunStep, list_steps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ucformat.checkpoint import Checkpoint
    from ucformat.format.universal import Universal
    from ucformat.reading.plan import Verify
    from ucformat.storage.base import Store
    from ucformat.torch.comm.group import Group
    from ucformat.torch.loading.load import LoadReport

    Mode = Literal["full", "quick"]


_log = logging.getLogger("ucformat")

#: Errors that show that a checkpoint is damaged. Any other is a failure of the storage, and is
#: raised.
_DAMAGE = (IntegrityError, NotFound, UpgradeNeeded)


@message
class _CheckResult:
    """The results of some ranks."""

    problems: list[Problem] = field(default_factory=list)
    shards: list[tuple[Key, tuple[int, ...], bytes]] = field(default_factory=list)
    nbytes: int = 0

    def __add__(self, other: _CheckResult) -> _CheckResult:
        return _CheckResult(
            self.problems + other.problems,
            self.shards + other.shards,
            self.nbytes + other.nbytes,
        )


class RunPlaces(Protocol):
    """Where the checkpoints of a run are; all ranks call its methods together."""

    @property
    def root(self) -> str:
        """What errors call it."""

    def list(self, ranks: Group) -> RunContents:
        """Find the committed checkpoints that were not deleted in the catalog, the newest first."""

    def open(self, step: RunStep, ranks: Group) -> Checkpoint:
        """Open one of them."""

    def avoid(self, problems: Sequence[Problem]) -> bool:
        """Read no more what has these problems; returns whether there may be another copy of it."""

    def close(self) -> None:
        """Close what it has opened to read."""


class RunFolder(RunPlaces):
    """The folder of a run, which has one copy of everything."""

    def __init__(self, root: str) -> None:
        self._root = root

    @property
    def root(self) -> str:
        """See RunPlaces."""
        return self._root

    def list(self, ranks: Group) -> RunContents:
        """See RunPlaces."""
        listed: RunContents = ranks.combine(
            None, then=lambda _: _list(self._root), answer_kind=RunContents
        )
        return listed

    def open(self, step: RunStep, ranks: Group) -> Checkpoint:
        """See RunPlaces."""
        return open_together(step.url, ranks)

    def avoid(self, problems: Sequence[Problem]) -> bool:  # noqa: ARG002
        """See RunPlaces."""
        return False

    def close(self) -> None:
        """Do nothing: nothing is kept open."""


def verify_on_all_ranks(
    step: RunStep,
    mode: Mode,
    ranks: Group,
    threads: int | None = None,
    places: RunPlaces | None = None,
) -> tuple[Checkpoint | None, Report]:
    """Open a checkpoint, if that is possible, and verify it; all ranks get the same report.

    Args:
        mode: `full` reads every byte once, on all ranks together, and compares it with checksums
            and digests. `quick` reads only the documents (manifest, sidecar, objects) and checks
            the size of each file.
        places: where the checkpoint is (default: at its url).
    """
    ck = None
    try:
        ck = open_together(step.url, ranks) if places is None else places.open(step, ranks)
        if ck.id != step.id:
            raise MissingData(f"{step.url} now contains another checkpoint")  # noqa: TRY301 - one of several kinds of damage
        result: _CheckResult | Exception = _verify(ck, mode, ranks, threads)
    except _DAMAGE as error:
        result = _CheckResult([Problem(MANIFEST, error.message)])
    except Exception as error:  # noqa: BLE001 - raised on all ranks
        result = error

    def report(results: _CheckResult) -> Report:
        problems = {str(p): p for p in results.problems}
        if ck is not None and ck.universal and mode == "full" and not problems:
            shards: dict[Key, dict[tuple[int, ...], bytes]] = {}
            for key, shard, digests in results.shards:
                shards.setdefault(key, {})[shard] = digests
            problems = {str(p): p for p in wrong_digests(ck.universal, shards)}
        tensors = len(ck.tensors) if ck else 0
        return Report(step.url, "ucformat", tensors, results.nbytes, 0, tuple(problems.values()))

    return ck, ranks.combine(result, _CheckResult.__add__, _CheckResult, report, Report)


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
    # dealt in turn, the largest first, so that ranks read about as much
    own_tasks = tasks[ranks.rank :: ranks.size]
    for task, (digests, problems) in run(lambda t: t.run(), own_tasks, threads):
        result.problems.extend(problems)
        if task.key is not None and task.shard is not None:
            result.shards.append((task.key, task.shard, digests))
    return _CheckResult(result.problems, result.shards, sum(t.nbytes for t in own_tasks))


def _full_checks(source: Universal) -> Iterator[Check]:
    """Checks of all bytes: by file, and by tensor for tensors that are not arrays."""
    for item in items(source):
        yield Check.of(item, source.store, _DAMAGE)
    for key, tensor in source.docs.items():
        if tensor.in_sidecar:
            yield Check(tensor.nbytes, partial(_check_blocks, source, key))
    yield from referenced(source)


def _check_blocks(source: Universal, key: Key) -> tuple[bytes, list[Problem]]:
    """The problems of the blocks of a tensor that is not an array."""
    blocks = ((e.file, e.block) for e in single_extents(source.extents(key)) if e.block is not None)
    return b"", block_problems(source.store, key, blocks, _DAMAGE)


def _quick_checks(source: Universal) -> Iterator[Check]:
    """Checks of the size of each file."""
    ends = {item.file: item.nbytes for item in items(source) if not isinstance(item, ZarrJson)}
    for key, tensor in source.docs.items():
        for e in () if tensor.path is not None else source.extents(key):
            ends[e.file] = max(ends.get(e.file, 0), _end_of(e))
    for file, end in ends.items():
        yield Check(0, partial(_check_size, source.store, file, end))


def _end_of(extent: Extent | Tiles) -> int:
    """The byte after the last one of an extent, or at least one that its file has."""
    if isinstance(extent, Extent):
        return extent.last + 1 if extent.box.size else 0
    if extent.placed:
        return max((e.last + 1 for e in extent.extents() if e.box.size), default=0)
    return extent.offset + extent.pitch * prod(extent.grid)


def _check_size(store: Store, file: str, expected: int) -> tuple[bytes, list[Problem]]:
    """The problem of a file that is not there, or is too short."""
    try:
        size = store.info(file).size
        if size < expected:
            raise MissingData(
                f"{store.url}/{stored_key(file)} has {size} bytes, expected at least {expected}"
            )
    except _DAMAGE as error:
        return b"", [Problem(stored_key(file), error.message)]
    return b"", []


@dataclass(frozen=True, slots=True)
class Restored:
    """The checkpoint that was restored, and the other checkpoints of the run.

    `later_steps` are the steps after it that hold a checkpoint, intact or not, and `damaged` the
    urls of damaged ones. `whole` is the step at which all of it was saved, before deltas, if it was.
    """

    step: RunStep
    report: LoadReport
    later_steps: frozenset[int]
    damaged: frozenset[str]
    listed: RunContents
    whole: int | None


def restore_newest(
    places: RunPlaces,
    state: Mapping[str, Any],
    verify: Mode,
    ranks: Group,
    options: Mapping[str, Any],
    step_fn: Callable[..., Any] | None = None,
    merged: str | None = None,
) -> Restored | None:
    """Load the newest intact checkpoint of a run; damaged ones are skipped, with a warning on rank 0."""
    listed = places.list(ranks)
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
        loaded = _restore(places, step, state, verify, ranks, options, step_fn, merged)
        if isinstance(loaded, str):
            skip(step.url, loaded)
            continue
        report, whole = loaded
        steps = [s.step for s in listed.steps] + [s for _, s, _ in listed.unreadable]
        later = frozenset(s for s in steps if s > step.step)
        return Restored(step, report, later, frozenset(damaged), listed, whole)
    if damaged:
        raise IntegrityError(
            f"all checkpoints below {places.root} are damaged:\n  "
            + "\n  ".join(f"{url}: {why}" for url, why in damaged.items()),
            hint="restore the files from another copy, or start again in another folder",
        )
    return None


def _restore(
    places: RunPlaces,
    step: RunStep,
    state: Mapping[str, Any],
    verify: Mode,
    ranks: Group,
    options: Mapping[str, Any],
    step_fn: Callable[..., Any] | None,
    merged: str | None,
) -> tuple[LoadReport, int | None] | str:
    """Load a checkpoint, from other copies where some are damaged; returns why it cannot be loaded.

    Otherwise returns at which step all of it was saved, too.
    """
    mode = verify
    while True:
        ck, checked = verify_on_all_ranks(step, mode, ranks, options.get("threads"), places)
        if mode == "full" and ck is not None and not ranks.rank:
            record_verification(ck, checked)
        if ck is None or not checked:
            if places.avoid(checked.problems):
                continue
            others = len(checked.problems) - 1
            return str(checked.problems[0]) + (f", and {others} more" if others else "")
        manifest = cast("Universal", ck.universal).manifest
        replayed = manifest.deltas is not None or (
            manifest.window is not None and step_fn is not None
        )
        check: Verify = "whole" if mode == "full" else "always"
        try:
            if replayed:
                replaying = {"verify": check, **options}
                report = _replay(ck, state, step_fn, merged, ranks, replaying)
            else:
                report = load(state, ck, verify=check, **options)
        except IntegrityError as error:  # raised on all ranks
            if mode == "quick" and not isinstance(places, RunFolder):
                mode = "full"  # which finds the copy that is damaged
                continue
            return error.message
        if not holds_training(ck):  # the run has no optimizer state, so none was left out
            readers = report.lineage.readers
            edge = edge_of(ck, report.layout, continues=True, readers=readers)
            report = replace(report, lineage=edge)
        if report.older:
            return report, None  # no deltas lead from it
        return report, step.step if manifest.deltas is None else manifest.deltas.since


def _replay(
    ck: Checkpoint,
    state: Mapping[str, Any],
    step_fn: Callable[..., Any] | None,
    merged: str | None,
    ranks: Group,
    options: Mapping[str, Any],
) -> LoadReport:
    """Replay a checkpoint from the newest merged one, or if that is damaged from the whole one of its chain."""
    start = find_merged(ck.url, merged, ranks) if merged else ""
    if start:
        try:
            return replay(ck, state, step_fn, start=start, **options)
        except (IntegrityError, NotCertified) as error:  # raised on all ranks
            if not ranks.rank:
                _log.warning("the merged checkpoint %s is not used: %s", start, error.message)
    return replay(ck, state, step_fn, **options)


def _list(root: str) -> RunContents:
    """The committed checkpoints of a run that were not deleted in the catalog."""
    listed = list_steps(root)
    deleted = deleted_below(root) if listed.steps else frozenset()
    return replace(listed, steps=tuple(s for s in listed.steps if s.id not in deleted))
