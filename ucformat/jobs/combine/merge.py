"""Merges of models by task arithmetic, slerp, TIES and DARE, and of LoRA adapters into their base."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ucformat.errors import UsageError
from ucformat.jobs.combine.job import Combination
from ucformat.jobs.combine.lora import Lora
from ucformat.jobs.combine.methods import Dare, Slerp, TaskArithmetic, Ties
from ucformat.jobs.combine.writing import Planned, checked_weights, open_inputs
from ucformat.jobs.record import record_commits
from ucformat.jobs.shards import How
from ucformat.jobs.where import Where
from ucformat.storage.url import as_strings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from os import PathLike

    from ucformat.checkpoint import Checkpoint
    from ucformat.jobs.combine.methods import Method
    from ucformat.jobs.combine.writing import Place
    from ucformat.storage.base import Store

__all__ = ["merge", "plan_merge"]

record_commits()  # on import, because `format` does not depend on the catalog

#: The parameters that each method takes, and their defaults; None: it must be given.
_TAKES: dict[str, dict[str, Any]] = {
    "task-arithmetic": {"base": None, "weights": (), "scale": 1.0},
    "slerp": {"t": 0.5},
    "ties": {"base": None, "weights": (), "scale": 1.0, "density": 0.2},
    "dare": {"base": None, "weights": (), "scale": 1.0, "density": None, "seed": None},
    "lora": {"base": None, "weights": ()},
}


def merge(
    method: str,
    sources: Place | Iterable[Place],
    dst: str | PathLike[str] | Store,
    *,
    base: Place | None = None,
    weights: Sequence[float] | None = None,
    scale: float | None = None,
    density: float | None = None,
    t: float | None = None,
    seed: int | None = None,
    states: str | Iterable[str] | None = None,
    take: str | Iterable[str] = (),
    cast: str | None = None,
    chunk_bytes: int | None = None,
    shard_bytes: int | None = None,
    overwrite: bool = False,
    workers: int | None = None,
    run: str | None = None,
    metrics: Mapping[str, float] | None = None,
    verify: bool = True,
    on: str = "threads",
    progress: Callable[[int, int], None] | None = None,
) -> Checkpoint:
    """Merge models, or LoRA adapters and their base, into a new checkpoint, and commit it.

    The formulas are those of `ucformat.jobs.combine.formulas`, with b the base, x the sources, w their weights and λ
    the scale, computed in float64, block by block, and rounded once. Resumable as `convert`. Memory: less than 128 MiB
    for each worker, whatever the number of sources and the sizes of tensors.

    Args:
        method: `task-arithmetic`, `b + λ Σ w (x - b)`; `slerp` of exactly two sources; `ties`, which trims the
            differences from the base, elects a sign for each element, and takes the mean of those that have it; `dare`,
            task arithmetic of which random elements are dropped, and the others rescaled; `lora`, the base with the
            adapters of PEFT that the sources are.
        sources: the checkpoints, or their paths, urls or references; `run7@1000..2000` are all of a run in a range of
            steps. They have the tensors of the base.
        dst: the path, url or store of the new checkpoint.
        base: what the sources were fine-tuned from; all methods but slerp need it. What is not a tensor is that of the
            base, of slerp that of the first source.
        weights: a weight for each source (default: 1 for each).
        scale: the factor λ of all differences (default 1).
        density: the share of elements to keep: of ties those with the greatest magnitudes (default 0.2), of dare random
            ones (1 minus the probability of dropping one; it must be given).
        t: of slerp, 0 for the first source, 1 for the second (default 0.5).
        seed: of dare; the elements that are dropped depend only on it, the tensor's name, and the number of the source.
        states: the state, or states, to merge (default: `weight`, or `master` where only that is stored).
        take: globs or `/regex/`es of names: these tensors are taken from the base (of slerp the first source) as they
            are.
        cast: the dtype of merged tensors (default: that of the base, of slerp of the first source).
        chunk_bytes: the most bytes of a chunk, the unit of reading (default 1 MiB).
        shard_bytes: the most bytes of a shard, the unit of writing (default 128 MiB).
        overwrite: replace a checkpoint that is committed at `dst`; it stays whole until the new one is.
        workers: shards written at once (default: one for each core; for object stores eight at least).
        run: the name of the run, for the catalog (default: none, so that it takes that of the folder).
        metrics: measured numbers by name.
        verify: compare the bytes that are read with the checksums in the files of the sources.
        on: where shards are written, as for `convert`.
        progress: called with the bytes done and the bytes in all.

    Raises:
        NotFinished: this process has done its part, and another one commits.
        UsageError: a parameter is missing, or not one of the method; or the checkpoints differ in more than values; the
            message lists the tensors.
        UnsupportedError: an adapter asks for what cannot be merged; the message names it.
        ChecksumError: a checkpoint is damaged; the message names file, record and tensors.
        Conflict: a checkpoint is committed at `dst` already, or a file of a source was changed since it was opened.
    """
    how = How(chunk_bytes, shard_bytes, workers, progress, verify, Where.parse(on))
    given = {"base": base, "weights": weights, "scale": scale, "density": density, "t": t, "seed": seed}
    planned = plan_merge(method, sources, given, states=states, take=take, cast=cast)
    return planned.write(dst, how, overwrite=overwrite, run=run, metrics=metrics)


def plan_merge(
    method: str,
    sources: Place | Iterable[Place],
    parameters: Mapping[str, Any],
    *,
    states: str | Iterable[str] | None = None,
    take: str | Iterable[str] = (),
    cast: str | None = None,
) -> Planned:
    """Plan a merge; reads no tensors, and writes nothing.

    Args:
        parameters: `base`, `weights`, `scale`, `density`, `t` and `seed`; None as if it were not there.
    """
    found = _parameters(method, {name: value for name, value in parameters.items() if value is not None})
    base: Place | None = found.get("base")
    chosen = None if states is None else as_strings(states)
    if chosen is not None and not {"weight", "master"}.issuperset(chosen):
        raise UsageError("only weights are merged, not optimizer states", hint="choose the states weight or master")
    if chosen is not None and method == Lora.name:
        raise UsageError("adapters are merged into the weights, so there are no states to choose")
    _, opened = open_inputs(sources)
    _, bases = open_inputs([] if base is None else [base])
    if any(ck.home == bases[0].home for ck in opened if bases):
        raise UsageError(f"{bases[0].home} is the base, and a source too", hint="leave it out of the sources")
    formula = _method(method, [*bases, *opened], len(opened), found)
    combination = Combination([*bases, *opened], formula, chosen, as_strings(take), cast)
    return Planned(combination, "merge", [{}] * len(combination.sources))


def _parameters(method: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a method, with defaults."""
    if method not in _TAKES:
        raise UsageError(f"{method!r} is no method of merging", hint=f"there are: {', '.join(_TAKES)}")
    takes = _TAKES[method]
    for name in given:
        if name not in takes:
            raise UsageError(f"{method} takes no {name}", hint=f"it takes: {', '.join(takes)}")
    for name, default in takes.items():
        if name not in given and default is None:
            raise UsageError(f"{method} needs a {name}", hint=f"--{name} ({name}=)")
    found = {**takes, **given}
    density, t, scale = found.get("density", 1.0), found.get("t", 0.0), found.get("scale", 1.0)
    if not 0 < density <= 1:
        raise UsageError(f"the density must be above 0 and at most 1, not {density}")
    if not 0 <= t <= 1:
        raise UsageError(f"t must be from 0 to 1, not {t}")
    if not math.isfinite(scale):
        raise UsageError(f"the scale must be finite, not {scale}")
    return found


def _method(name: str, sources: Sequence[Checkpoint], count: int, found: Mapping[str, Any]) -> Method:
    if name == "slerp":
        if count != 2:
            raise UsageError(f"slerp takes exactly two checkpoints, not {count}")
        return Slerp(weights=(1 - found["t"], found["t"]), t=found["t"])
    if not count:
        raise UsageError(f"{name} needs a checkpoint besides the base")
    weights = checked_weights(found["weights"] or None, count)
    if name == "lora":
        return Lora(sources, weights)
    if name == "task-arithmetic":
        return TaskArithmetic(weights=weights, scale=found["scale"])
    if name == "dare":
        return Dare(weights=weights, scale=found["scale"], density=found["density"], seed=found["seed"])
    if min(weights) <= 0:
        raise UsageError("the weights of ties must be above 0: they are those of a mean")
    return Ties(weights=weights, scale=found["scale"], density=found["density"])
