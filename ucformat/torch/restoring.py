"""Restores the newest checkpoint of a run that is whole: all ranks the same one."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from ucformat.catalog.newest import contradictions
from ucformat.errors import IntegrityError
from ucformat.jobs.record import record_verification
from ucformat.torch.edges import edge_of, holds_training
from ucformat.torch.loading import load
from ucformat.torch.steps import Listed, list_steps
from ucformat.torch.verifying import verify_together

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ucformat.torch.group import Group
    from ucformat.torch.loading import LoadReport
    from ucformat.torch.steps import Step
    from ucformat.torch.verifying import Mode

__all__ = ["Restored", "restore_newest"]

_log = logging.getLogger("ucformat")


@dataclass(frozen=True, slots=True)
class Restored:
    """What was loaded, and what else lies there.

    `beyond` are the steps beyond it that hold a checkpoint, whole or not, `damaged` the places of the damaged, and
    `commits` is the greatest count of all.
    """

    step: Step
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
    listed: Listed = ranks.meet(None, lambda _: [_list(root)] * ranks.size, None, Listed)
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
        ck, found = verify_together(step, verify, ranks, options.get("threads"))
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


def _list(root: str) -> Listed:
    """What is committed, and was not deleted in the catalog."""
    from ucformat.torch.keeping import deleted_ids  # and with it, sqlalchemy

    listed = list_steps(root)
    gone = deleted_ids(root) if listed.steps else frozenset()
    return replace(listed, steps=tuple(s for s in listed.steps if s.id not in gone))
