"""Verifies and restores the newest intact checkpoint of a run, the same one on all ranks."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, cast

from ucformat.catalog.newest import contradictions
from ucformat.checkpoint import open_checkpoint
from ucformat.errors import IntegrityError, MissingData, NotFound, UpgradeNeeded
from ucformat.format.audit import Check, ZarrJson, block_problems, items, wrong_digests
from ucformat.format.commit import MANIFEST
from ucformat.format.structure import Problem
from ucformat.geometry.tensor import Key, single_extents
from ucformat.jobs.record import record_verification
from ucformat.jobs.run import Report, run
from ucformat.torch.comm.wire import message
from ucformat.torch.loading.load import load
from ucformat.torch.loading.match import edge_of, holds_training
from ucformat.torch.manager.steps import RunContents, list_steps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ucformat.checkpoint import Checkpoint
    from ucformat.format.universal import Universal
    from ucformat.torch.comm.group import Group
    from ucformat.torch.loading.load import LoadReport
    from ucformat.torch.manager.steps import RunStep

    Mode = Literal["full", "quick"]

__all__ = ["Mode", "Restored", "restore_newest", "verify_on_all_ranks"]


_DAMAGES = (IntegrityError, NotFound, UpgradeNeeded)  # any other error is of the place, and no reason to go back


@message
class _CheckResult:
    """What one rank found."""

    problems: list[Problem] = field(default_factory=list)
    leaves: list[tuple[Key, tuple[int, ...], bytes]] = field(default_factory=list)
    nbytes: int = 0


def verify_on_all_ranks(
    step: RunStep, mode: Mode, ranks: Group, threads: int | None = None
) -> tuple[Checkpoint | None, Report]:
    """Open a checkpoint and verify it; all ranks call this together, and get the same report.

    `full` reads every byte once, in all ranks together, and compares it with its checksums and digests. `quick` reads
    only the documents (manifest, sidecar, objects) and asks for the size of each file.

    Raises:
        UcformatError: the place cannot be read by some rank; that says nothing about the checkpoint.
    """
    ck = None
    try:
        ck = _open(step)
        found: _CheckResult | Exception = _look(ck, mode, ranks, threads)
    except _DAMAGES as error:
        found = _CheckResult([Problem(MANIFEST, error.message)])
    except Exception as error:  # noqa: BLE001 - told to all ranks
        found = error

    def judge(all_found: Sequence[_CheckResult]) -> list[Report]:
        problems = {str(p): p for f in all_found for p in f.problems}
        if ck is not None and ck.universal and mode == "full" and not problems:
            leaves: dict[Key, dict[tuple[int, ...], bytes]] = {}
            for key, shard, digests in (told for f in all_found for told in f.leaves):
                leaves.setdefault(key, {})[shard] = digests
            problems = {str(p): p for p in wrong_digests(ck.universal, leaves)}
        nbytes = sum(f.nbytes for f in all_found)
        report = Report(step.url, "ucformat", len(ck.tensors) if ck else 0, nbytes, 0, tuple(problems.values()))
        return [report] * ranks.size

    report: Report = ranks.gather_scatter(found, judge, _CheckResult, Report)
    return ck, report


def _open(step: RunStep) -> Checkpoint:
    ck = open_checkpoint(step.url)
    if ck.id != step.id:
        raise MissingData(f"{step.url} now holds another checkpoint")
    return ck


def _look(ck: Checkpoint, mode: Mode, ranks: Group, threads: int | None) -> _CheckResult:
    """This rank's part; every rank reads the documents, which it will need."""
    source = cast("Universal", ck.universal)  # it has a manifest
    if source.manifest.sidecar is not None:
        source.sidecar()
    _ = ck.objects
    tasks = sorted(_full(source) if mode == "full" else _quick(source), key=lambda t: -t.nbytes)
    found = _CheckResult()
    mine = tasks[ranks.rank :: ranks.size]
    for task, (leaves, problems) in run(lambda t: t.run(), mine, threads):
        found.problems.extend(problems)
        if task.key is not None and task.shard is not None:
            found.leaves.append((task.key, task.shard, leaves))
    return _CheckResult(found.problems, found.leaves, sum(t.nbytes for t in mine))


def _full(source: Universal) -> Iterator[Check]:
    """Everything, by files, and by tensors where they are not arrays."""
    for item in items(source):
        yield Check.of(item, source.store, _DAMAGES)
    for key, tensor in source.docs.items():
        if tensor.path is None:
            yield Check(tensor.nbytes, lambda k=key: (b"", _blocks(source, k)))  # type: ignore[misc]


def _blocks(source: Universal, key: Key) -> list[Problem]:
    """What is wrong with the blocks of a tensor that is no array."""
    blocks = ((e.file, e.block) for e in single_extents(source.extents(key)) if e.block is not None)
    return block_problems(source.store, key, blocks, _DAMAGES)


def _quick(source: Universal) -> Iterator[Check]:
    """The size of each file."""
    ends = {item.file: item.nbytes for item in items(source) if not isinstance(item, ZarrJson)}
    for key, tensor in source.docs.items():
        if tensor.path is None:
            for e in single_extents(source.extents(key)):
                if e.box.size:
                    ends[e.file] = max(ends.get(e.file, 0), e.last + 1)

    def look(file: str, least: int) -> None:
        size = source.store.info(file).size
        if size < least:
            raise MissingData(f"{source.store.url}/{file} has {size} bytes, and should have {least}")

    for file, least in ends.items():
        yield Check(0, lambda f=file, n=least: (b"", _reading(f, lambda: look(f, n))))  # type: ignore[misc]


def _reading(file: str, act: Callable[[], object]) -> list[Problem]:
    """What is wrong with a file, if reading it finds that."""
    try:
        act()
    except _DAMAGES as error:
        return [Problem(file, error.message)]
    return []


_log = logging.getLogger("ucformat")


@dataclass(frozen=True, slots=True)
class Restored:
    """What was loaded, and what else lies there.

    `beyond` are the steps beyond it that hold a checkpoint, whole or not, `damaged` the places of the damaged, and
    `commits` is the greatest count of all.
    """

    step: RunStep
    report: LoadReport
    beyond: frozenset[int]
    damaged: frozenset[str]
    commits: int


def restore_newest(
    root: str, state: Mapping[str, Any], verify: Mode, ranks: Group, options: Mapping[str, Any]
) -> Restored | None:
    """Load the newest of a run's checkpoints that is whole; None where none is committed.

    `options` are those of `load`. What is damaged is skipped, with a warning of rank 0.

    Raises:
        IntegrityError: there are checkpoints, and all are damaged.
    """
    listed: RunContents = ranks.gather_scatter(None, lambda _: [_list(root)] * ranks.size, None, RunContents)
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
        ck, found = verify_on_all_ranks(step, verify, ranks, options.get("threads"))
        if verify == "full" and ck is not None and not ranks.rank:
            record_verification(ck, found)
        if ck is None or not found:
            more = len(found.problems) - 1
            skip(step.url, str(found.problems[0]) + (f", and {more} more" if more else ""))
            continue
        try:
            report = load(state, ck, verify="whole" if verify == "full" else "always", **options)
        except IntegrityError as error:  # found by all ranks: they agree on how a load ended
            skip(step.url, error.message)
            continue
        if not holds_training(ck):  # and so nothing of the run was left out
            report = replace(report, lineage=edge_of(ck, report.layout, continues=True))
        steps = [s.step for s in listed.steps] + [s for _, s, _ in listed.unreadable]
        return Restored(step, report, frozenset(s for s in steps if s > step.step), frozenset(damaged), listed.commits)
    if damaged:
        raise IntegrityError(
            f"there are checkpoints below {root}, but none is whole:\n  "
            + "\n  ".join(f"{url}: {why}" for url, why in damaged.items()),
            hint="bring the files back from another copy, or begin anew in another folder",
        )
    return None


def _list(root: str) -> RunContents:
    """What is committed, and was not deleted in the catalog."""
    from ucformat.torch.manager.retention import deleted_ids  # and with it, sqlalchemy

    listed = list_steps(root)
    gone = deleted_ids(root) if listed.steps else frozenset()
    return replace(listed, steps=tuple(s for s in listed.steps if s.id not in gone))
