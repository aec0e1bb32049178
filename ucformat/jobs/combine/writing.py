"""Opening the inputs of a combination, and writing it as a new checkpoint."""

from __future__ import annotations

import math
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from ucformat.checkpoint import Checkpoint
from ucformat.errors import UsageError
from ucformat.format.commit import begin, commit
from ucformat.format.universal import Universal
from ucformat.jobs.combine.job import CombineJob
from ucformat.jobs.convert import write
from ucformat.jobs.finished import discard_finished
from ucformat.jobs.record import lineage_to
from ucformat.reading.readable import PART_OF
from ucformat.references import expand_references, open_reference
from ucformat.settings import allowed_roots
from ucformat.storage.url import as_store

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ucformat.jobs.combine.job import Combination
    from ucformat.jobs.shards import How
    from ucformat.storage.base import Store

Place: TypeAlias = "str | PathLike[str] | Checkpoint"


def open_inputs(places: Place | Iterable[Place]) -> tuple[list[Place], list[Checkpoint]]:
    """Open the inputs of a combination."""
    listed: list[Place] = [places] if isinstance(places, str | PathLike | Checkpoint) else list(places)
    given: list[Place] = []
    for place in listed:
        given += [place] if isinstance(place, Checkpoint) else expand_references([place])
    opened = [place if isinstance(place, Checkpoint) else open_reference(place) for place in given]
    seen: set[str] = set()
    for ck in opened:
        if ck.home in seen:
            raise UsageError(f"{ck.home} is given twice", hint="give it once, and more weight by `weights`")
        seen.add(ck.home)
    return given, opened


def checked_weights(weights: Sequence[float] | None, count: int) -> tuple[float, ...]:
    """The weights of inputs."""
    found = (1.0,) * count if weights is None else tuple(map(float, weights))
    if len(found) != count:
        raise UsageError(f"there are {len(found)} weights for {count} inputs", hint="give one for each, in their order")
    for weight in found:
        if not math.isfinite(weight):
            raise UsageError(f"the weight {weight} is not finite")
    return found


@dataclass(frozen=True, slots=True)
class Planned:
    """A combination that is not written yet.

    Attributes:
        about: what the lineage says of each input, beside what the method does.
    """

    combination: Combination
    kind: Literal["average", "merge"]
    about: Sequence[Mapping[str, Any]]

    def write(
        self,
        dst: str | PathLike[str] | Store,
        how: How,
        *,
        overwrite: bool = False,
        run: str | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> Checkpoint:
        """Write the combination and commit it.

        It has no step, since it is no point of a training, and no metrics, since nobody has measured it. Everything
        else that is not a tensor is that of the first input.
        """
        store = as_store(dst)
        sources, method, plan = self.combination.sources, self.combination.method, self.combination.plan(how)
        attempt = how.where.begin(lambda: begin(store, plan, overwrite=overwrite))
        made, recorded = write(CombineJob(self.combination, store, attempt.id, how), attempt)
        lineage = tuple(
            lineage_to(source, self.kind, {**method.about(), **role, **more})
            for source, role, more in zip(sources, method.roles(), self.about, strict=True)
        )
        parts = [source.metadata.part_of for source in sources if source.metadata.part_of]
        layout = {**made.layout, **({PART_OF: parts[0]} if parts else {})}
        new = {
            "run": run,
            "layout": layout,
            "step": None,
            "launch": None,
            "metrics": dict(metrics or {}),
            "lineage": lineage,
        }
        done = commit(store, attempt, made.model_copy(update=new))
        if recorded:
            discard_finished(store, attempt.id)
        return Checkpoint(Universal(store, allowed_roots, done))
