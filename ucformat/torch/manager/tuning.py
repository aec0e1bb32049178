"""How often a training with deltas saves everything, and how many steps at a time: the least time that is wasted.

Of each second of training, a save of everything takes its time once in `full` steps, and one of deltas once in `batch`
steps. A failure, one in `mtbf` seconds, costs the start again, the replay of half of the steps between whole saves, and
half a batch of steps that are trained again. LowDiff's model is the same, but for deltas that are added up in batches
before they are applied.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from ucformat.errors import MissingData, UsageError
from ucformat.format.structure import read_manifest
from ucformat.schema.limits import MAX_CHAIN
from ucformat.storage.url import open_store
from ucformat.torch.manager.steps import list_steps
from ucformat.torch.saving.deltas import Deltas

if TYPE_CHECKING:
    from collections.abc import Sequence
    from os import PathLike

    from ucformat.schema.manifest import Manifest

__all__ = ["DeltaCosts", "tune_deltas"]

_MAX_BATCH = 1024


@dataclass(frozen=True, slots=True)
class DeltaCosts:
    """What a training with deltas takes, all in seconds.

    Attributes:
        iteration: of a step of training.
        whole: for which training stands still for a save of everything.
        batch: for which it stands still for a save of a batch of deltas.
        start: from a failure until everything is loaded.
        step: of the replay of one step.
    """

    iteration: float
    whole: float
    batch: float
    start: float
    step: float

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not 0 <= getattr(self, name) < math.inf:
                raise UsageError(f"{name}={getattr(self, name)!r} is no number of seconds")
        if not self.iteration:
            raise UsageError("an iteration takes no time")

    @classmethod
    def measured(
        cls, run: str | PathLike[str], *, start: float, step: float | None = None
    ) -> DeltaCosts:
        """Take them from what the checkpoints of a run record of their saves, the medians of all.

        Args:
            run: the folder of the run, of one launch or several.
            start: seconds from a failure until everything is loaded, which no checkpoint knows.
            step: seconds of the replay of one step (default: an iteration, which takes longer).

        Raises:
            MissingData: the run has not saved everything, deltas, or two checkpoints in one launch.
        """
        places = [s.url for s in list_steps(open_store(run).url).steps]
        manifests = [read_manifest(open_store(place))[0] for place in places]
        whole = [_stall(m) for m in manifests if m.deltas is None and m.writers]
        batches = [_stall(m) for m in manifests if m.deltas is not None and m.writers]
        iterations = _iterations(manifests)
        for seconds, what in (
            (whole, "save of everything"),
            (batches, "save of deltas"),
            (iterations, "pair of checkpoints of one launch"),
        ):
            if not seconds:
                raise MissingData(
                    f"{run} has no {what} from which speeds could be taken",
                    hint="train some batches with Manager(partial=Deltas(…)), or give DeltaCosts(…) yourself",
                )
        iteration = median(iterations)
        replayed = iteration if step is None else step
        return cls(iteration, median(whole), median(batches), start, replayed)


def tune_deltas(
    costs: DeltaCosts, mtbf: float, *, max_batch: int = 64, max_chain: int = MAX_CHAIN - 1
) -> Deltas:
    """Choose after how many steps to save everything, and how many deltas at a time, so that least time is wasted.

    Args:
        costs: what the training takes.
        mtbf: seconds between failures of the whole job, on average.
        max_batch: the most steps of a batch, which host memory has to hold.
        max_chain: the most batches between saves of everything.

    Raises:
        UsageError: a number is not positive.
    """
    if (
        not 0 < mtbf < math.inf
        or not 1 <= max_batch <= _MAX_BATCH
        or not 1 <= max_chain < MAX_CHAIN
    ):
        raise UsageError(
            f"mtbf={mtbf!r}, max_batch={max_batch}, max_chain={max_chain}",
            hint=f"positive seconds, a batch of at most {_MAX_BATCH}, and a chain of at most {MAX_CHAIN - 1}",
        )

    batch, full = min(
        (
            (b, full)
            for b in range(1, max_batch + 1)
            for full in _candidates(costs, mtbf, b, max_chain)
        ),
        key=lambda chosen: wasted_share(costs, mtbf, *chosen),
    )
    return Deltas(batch=batch, full=full, max_chain=max_chain)


def wasted_share(costs: DeltaCosts, mtbf: float, batch: int, full: int) -> float:
    """The seconds that are wasted of each second of training, on average."""
    saves = costs.whole / full + costs.batch / batch
    again = costs.start + costs.step * full / 2 + costs.iteration * batch / 2
    return saves / costs.iteration + again / mtbf


def _candidates(costs: DeltaCosts, mtbf: float, batch: int, max_chain: int) -> Sequence[int]:
    """The numbers of steps between whole saves among which the best one is, for a batch."""
    most = batch * (max_chain + 1)
    best = math.inf
    if costs.step:
        best = math.sqrt(2 * costs.whole * mtbf / (costs.iteration * costs.step))
    if best >= most:
        return (most,)
    return tuple(max(batch, min(most, n)) for n in (math.floor(best), math.ceil(best)))


def _stall(manifest: Manifest) -> float:
    """The seconds for which training stood still for a save: those of the slowest rank."""
    return max(writer.stall for writer in manifest.writers)


def _iterations(manifests: Sequence[Manifest]) -> list[float]:
    """The seconds of a step between checkpoints of one launch."""
    by_launch: dict[str | None, list[Manifest]] = {}
    for manifest in manifests:
        launch = None if manifest.launch is None else manifest.launch.id
        by_launch.setdefault(launch, []).append(manifest)
    out = []
    for of_launch in by_launch.values():
        ordered = sorted(of_launch, key=lambda m: m.step or 0)
        for a, b in pairwise(ordered):
            steps = (b.step or 0) - (a.step or 0)
            seconds = (b.created - a.created).total_seconds()
            if steps > 0 and seconds > 0:
                out.append(seconds / steps)
    return out
