"""Averaging and merging checkpoints: what users call, and how it is planned and written."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, Unpack

from ucformat.checkpoint import Checkpoint
from ucformat.errors import NotFound, UsageError, check_keywords
from ucformat.format.commit import begin, commit
from ucformat.format.universal import Universal
from ucformat.geometry.tensor import Key
from ucformat.jobs.combine.formulas import ema_weights, softmax_weights
from ucformat.jobs.combine.increment import compare_outputs, find_references
from ucformat.jobs.combine.job import Combination, CombineJob
from ucformat.jobs.combine.lora import Lora
from ucformat.jobs.combine.methods import Average, Dare, Slerp, TaskArithmetic, Ties
from ucformat.jobs.convert import write
from ucformat.jobs.finished import discard_finished
from ucformat.jobs.increments import NO_REFERENCES, Comparison, open_base
from ucformat.jobs.record import lineage_to
from ucformat.jobs.shards import NO_ATTEMPT, WriteOptions
from ucformat.jobs.where import JobArguments, Where
from ucformat.reading.readable import PART_OF
from ucformat.references import expand_references, open_catalog, open_reference
from ucformat.settings import allowed_roots
from ucformat.storage.url import as_store, as_strings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from ucformat.jobs.combine.methods import Method
    from ucformat.jobs.cost import Cost
    from ucformat.storage.base import Store


__all__ = ["average", "merge", "plan_average", "plan_merge"]

_METRIC = "metric."


class CombineArguments(JobArguments, total=False):
    """The arguments that `average` and `merge` share.

    Attributes:
        states: the state, or states, to combine (default: `weight`, or `master` where only that is
            stored). `average` takes those of optimizers, too, but only if they are listed here.
        take: globs or `/regex/`es of names: these tensors are taken from the first checkpoint, or
            from the base, as they are.
        cast: the dtype of combined tensors (default: that of the first checkpoint, or of the base).
        chunk_bytes: the most bytes of a chunk, the unit of reading (default 1 MiB).
        shard_bytes: the most bytes of a shard, the unit of writing (default 128 MiB).
        codec: as for `convert`.
        run: the name of the run, for the catalog (default: none, so that it takes that of the
            folder).
        metrics: measured numbers by name.
    """

    states: str | Iterable[str] | None
    take: str | Iterable[str]
    cast: str | None
    chunk_bytes: int | None
    shard_bytes: int | None
    codec: Literal["blosc"] | None
    run: str | None
    metrics: Mapping[str, float] | None


class AverageArguments(CombineArguments, total=False):
    """The arguments of `average` besides the sources and the destination.

    Attributes:
        base: as for `convert`: what equals this checkpoint is not written, but read there. Tensors are computed to
            compare them if all inputs equal the base's.
        weights: a weight for each checkpoint; they are divided by their sum (default: equal
            weights).
        by: instead of weights, a metric in the catalog, such as `metric.val_loss`: the weights are
            the softmax of its values, with the sign that `best` gives them.
        best: with `by`, whether the least (`min`) or the greatest (`max`) value is the best.
        temperature: with `by`, the values are divided by it (default 1): the lower, the more the
            best one weighs.
        ema: instead of weights, the decay d of an exponential moving average in order of steps: e₀
            = x₀, eₜ = d eₜ₋₁ + (1 - d) xₜ.
    """

    base: Place | None
    weights: Sequence[float] | None
    by: str | None
    best: Literal["min", "max"] | None
    temperature: float | None
    ema: float | None


class MergeArguments(CombineArguments, total=False):
    """The arguments of `merge` besides the method, the sources and the destination.

    Attributes:
        base: what the sources were fine-tuned from; all methods but slerp need it. What is not a
            tensor is that of the base, of slerp that of the first source.
        increment: do not write what equals the base, but read it there, as `average` with `base`; the base must then
            stay.
        weights: a weight for each source (default: 1 for each).
        scale: the factor λ of all differences (default 1).
        density: the share of elements to keep: of ties those with the greatest magnitudes (default
            0.2), of dare random ones (1 minus the probability of dropping one; it must be given).
        t: of slerp, 0 for the first source, 1 for the second (default 0.5).
        seed: of dare; the elements that are dropped depend only on it, the tensor's name, and the
            number of the source.
    """

    base: Place | None
    increment: bool
    weights: Sequence[float] | None
    scale: float | None
    density: float | None
    t: float | None
    seed: int | None


_SHARED = frozenset(CombineArguments.__annotations__)


def average(
    sources: Place | Iterable[Place],
    dst: str | PathLike[str] | Store,
    **arguments: Unpack[AverageArguments],
) -> Checkpoint:
    """Write the weighted mean of checkpoints as a new checkpoint, and commit it.

    Means are computed in float64, block by block, and rounded once, to the dtype of the first
    checkpoint. Resumable as `convert`. Memory: less than 128 MiB for each worker, whatever the
    number of checkpoints and the sizes of tensors.

    Args:
        sources: the checkpoints, or their paths, urls or references; `run7@1000..2000` are all of a
            run in a range of steps. They have the same tensors. What is not a tensor is that of the
            first.
        dst: the path, url or store of the new checkpoint.
        arguments: see `AverageArguments`.

    Raises:
        NotFinished: this process has done its part, and another one commits.
        NotFound: a checkpoint is in no catalog, with `by`.
        UsageError: the checkpoints differ in more than values; the message lists the tensors. Or
            weights, metrics or steps are missing, or are no finite numbers.
        UnsupportedError: the base is no universal checkpoint, or has no fingerprints.
        ChecksumError: a checkpoint is damaged; the message names file, record and tensors.
        Conflict: a checkpoint is committed at `dst` already, or a file of a source was changed
            since it was opened.
    """
    check_keywords("average", arguments, AverageArguments)
    return _combine(dst, partial(plan_average, sources), arguments)


def _combine(
    dst: str | PathLike[str] | Store,
    plan: Callable[..., Planned],
    arguments: AverageArguments | MergeArguments,
) -> Checkpoint:
    """Write what is planned; `plan` gets the arguments that the two do not share as a mapping."""
    shared: dict[str, Any] = {n: v for n, v in arguments.items() if n in _SHARED}
    parameters = {n: v for n, v in arguments.items() if n not in _SHARED}
    where = Where.parse(shared.pop("on", "threads"))
    chosen, recorded = (
        {name: shared.pop(name) for name in names if name in shared}
        for names in (("states", "take", "cast"), ("overwrite", "run", "metrics"))
    )
    return plan(parameters, **chosen).write(dst, WriteOptions(**shared, where=where), **recorded)


def plan_average(
    sources: Place | Iterable[Place],
    parameters: Mapping[str, Any],
    *,
    states: str | Iterable[str] | None = None,
    take: str | Iterable[str] = (),
    cast: str | None = None,
) -> Planned:
    """Plan an average; reads no tensors, and writes nothing.

    Args:
        parameters: `base`, `weights`, `by`, `best`, `temperature` and `ema`; None as if it were not there.
    """
    check_keywords("plan_average", parameters, AverageArguments)
    chosen = None if states is None else as_strings(states)
    weights, by, best, temperature, ema = map(
        parameters.get, ("weights", "by", "best", "temperature", "ema")
    )
    _check_options(weights, by, best, temperature, ema)
    places, opened = open_inputs(sources)
    if len(opened) < 2:
        raise UsageError(
            f"an average needs two checkpoints or more, and {len(opened)} is given",
            hint=(
                "ucp average REF REF … DST; run7@1000..2000 are all checkpoints of a run in a "
                "range of steps"
            ),
        )
    if by is not None and best is not None:
        weighted = _by_metric(places, opened, by, best, 1.0 if temperature is None else temperature)
    elif ema is not None:
        weighted = _along_a_run(opened, ema)
    else:
        weighted = _Weighted(opened, checked_weights(weights, len(opened)), [{}] * len(opened))
    total = math.fsum(weighted.weights)
    if not total or not math.isfinite(1 / total):
        raise UsageError(
            "the weights add up to 0, so there is no mean", hint="give weights whose sum is not 0"
        )
    if (
        chosen is not None
        and min(weighted.weights) / total < 0
        and not {"weight", "master"}.issuperset(chosen)
    ):
        raise UsageError(
            "optimizer states are averaged with weights of 0 or more: second moments must not "
            "become negative",
            hint="average the weights alone, without `states`",
        )
    combination = Combination(
        weighted.sources, Average(weights=weighted.weights), chosen, as_strings(take), cast
    )
    return Planned(combination, "average", weighted.about, parameters.get("base"))


@dataclass(frozen=True, slots=True)
class _Weighted:
    """Inputs with their weights, and what the lineage says of the origin of each weight."""

    sources: Sequence[Checkpoint]
    weights: tuple[float, ...]
    about: Sequence[Mapping[str, Any]]


def _check_options(
    weights: Sequence[float] | None,
    by: str | None,
    best: str | None,
    temperature: float | None,
    ema: float | None,
) -> None:
    exclusive = [
        name
        for name, value in (("weights", weights), ("by", by), ("ema", ema))
        if value is not None
    ]
    if len(exclusive) > 1:
        raise UsageError(
            f"{' and '.join(exclusive)} exclude each other: each of them gives the weights"
        )
    if by is None and (best is not None or temperature is not None):
        raise UsageError(
            "a direction and a temperature are those of a metric",
            hint="name it: --by metric.val_loss (by=)",
        )
    if by is not None and not by.removeprefix(_METRIC):
        raise UsageError("no metric is named", hint="write metric.NAME, such as metric.val_loss")
    if by is not None and not by.startswith(_METRIC):
        raise UsageError(
            f"{by!r} is not a metric", hint=f"write metric.NAME, such as {_METRIC}{by}"
        )
    if by is not None and best not in ("min", "max"):
        raise UsageError(
            f"whether less or more of {by} is better is not known",
            hint="--min or --max (best='min', best='max')",
        )
    if temperature is not None and not (math.isfinite(temperature) and temperature > 0):
        raise UsageError(f"the temperature must be a finite number above 0, not {temperature}")
    if ema is not None and not 0 <= ema < 1:
        raise UsageError(f"the decay of a moving average is from 0 to below 1, not {ema}")


def _by_metric(
    places: Sequence[Place], opened: Sequence[Checkpoint], by: str, best: str, temperature: float
) -> _Weighted:
    name, values = by.removeprefix(_METRIC), []
    with open_catalog(str(places[0])) as catalog:
        for place, ck in zip(places, opened, strict=True):
            try:
                entry = catalog.get(
                    Checkpoint(ck.origin).id if isinstance(place, Checkpoint) else str(place)
                )
            except NotFound as error:
                raise NotFound(
                    f"the metric {name} of {ck.home} is not known: {error.message}",
                    hint=f"`ucp register {ck.home}` records it in the catalog",
                ) from None
            value = entry.metrics.get(name)
            if value is None or not math.isfinite(value):
                what = "has no metric" if value is None else f"has the value {value} of the metric"
                raise UsageError(
                    f"the checkpoint {entry.name} ({ck.home}) {what} {name}, so it has no weight",
                    hint=f"leave it out, or set it: ucp metric {entry.id[:12]} {name}=VALUE",
                )
            values.append(value)
    sign = -1 if best == "min" else 1
    weights = softmax_weights([sign * value for value in values], temperature)
    about = [{"by": by, "best": best, "temperature": temperature, name: value} for value in values]
    return _Weighted(opened, tuple(weights), about)


def _along_a_run(opened: Sequence[Checkpoint], decay: float) -> _Weighted:
    steps: dict[int, Checkpoint] = {}
    for ck in opened:
        step = ck.metadata.step
        if step is None:
            raise UsageError(
                f"{ck.home} has no step, so it has no place in a moving average",
                hint="leave it out, or give weights",
            )
        if step in steps:
            raise UsageError(
                f"{steps[step].home} and {ck.home} are both of step {step}, and have no order",
                hint="leave out one of them",
            )
        steps[step] = ck
    ordered = sorted(steps)
    return _Weighted(
        [steps[step] for step in ordered],
        tuple(ema_weights(decay, len(ordered))),
        [{"ema": decay, "step": step} for step in ordered],
    )


# Merges of models by task arithmetic, slerp, TIES and DARE, and of LoRA adapters into their base.

#: The parameters that each method takes, and their defaults; None: it must be given.
_TAKES: dict[str, dict[str, Any]] = {
    "task-arithmetic": {"base": None, "increment": False, "weights": (), "scale": 1.0},
    "slerp": {"t": 0.5},
    "ties": {"base": None, "increment": False, "weights": (), "scale": 1.0, "density": 0.2},
    "dare": {
        "base": None,
        "increment": False,
        "weights": (),
        "scale": 1.0,
        "density": None,
        "seed": None,
    },
    "lora": {"base": None, "increment": False, "weights": ()},
}


def merge(
    method: str,
    sources: Place | Iterable[Place],
    dst: str | PathLike[str] | Store,
    **arguments: Unpack[MergeArguments],
) -> Checkpoint:
    """Merge models, or LoRA adapters and their base, into a new checkpoint, and commit it.

    The formulas are those of `ucformat.jobs.combine.formulas`, with b the base, x the sources, w
    their weights and λ the scale, computed in float64, block by block, and rounded once. Resumable
    as `convert`. Memory: less than 128 MiB for each worker, whatever the number of sources and the
    sizes of tensors.

    Args:
        method: `task-arithmetic`, `b + λ Σ w (x - b)`; `slerp` of exactly two sources; `ties`,
            which trims the differences from the base, elects a sign for each element, and takes the
            mean of those that have it; `dare`, task arithmetic of which random elements are
            dropped, and the others rescaled; `lora`, the base with the adapters of PEFT that the
            sources are.
        sources: the checkpoints, or their paths, urls or references; `run7@1000..2000` are all of a
            run in a range of steps. They have the tensors of the base.
        dst: the path, url or store of the new checkpoint.
        arguments: see `MergeArguments`.

    Raises:
        NotFinished: this process has done its part, and another one commits.
        UsageError: a parameter is missing, or not one of the method; or the checkpoints differ in
            more than values; the message lists the tensors.
        UnsupportedError: an adapter asks for what cannot be merged; the message names it. Or with
            `increment`, the base is no universal checkpoint, or has no fingerprints.
        ChecksumError: a checkpoint is damaged; the message names file, record and tensors.
        Conflict: a checkpoint is committed at `dst` already, or a file of a source was changed
            since it was opened.
    """
    check_keywords("merge", arguments, MergeArguments)
    return _combine(dst, partial(plan_merge, method, sources), arguments)


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
        parameters: `base`, `increment`, `weights`, `scale`, `density`, `t` and `seed`; None as if it were not
            there.
    """
    values = _parameters(
        method, {name: value for name, value in parameters.items() if value is not None}
    )
    base: Place | None = values.get("base")
    chosen = None if states is None else as_strings(states)
    if chosen is not None and not {"weight", "master"}.issuperset(chosen):
        raise UsageError(
            "only weights are merged, not optimizer states",
            hint="choose the states weight or master",
        )
    if chosen is not None and method == Lora.name:
        raise UsageError("adapters are merged into the weights, so there are no states to choose")
    _, opened = open_inputs(sources)
    _, bases = open_inputs([] if base is None else [base])
    if any(ck.home == bases[0].home for ck in opened if bases):
        raise UsageError(
            f"{bases[0].home} is the base, and a source too", hint="leave it out of the sources"
        )
    formula = _method(method, [*bases, *opened], len(opened), values)
    combination = Combination([*bases, *opened], formula, chosen, as_strings(take), cast)
    about: list[dict[str, Any]] = [{}] * len(combination.sources)
    return Planned(combination, "merge", about, bases[0] if values.get("increment") else None)


def _parameters(method: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a method, with defaults."""
    if method not in _TAKES:
        raise UsageError(
            f"{method!r} is no method of merging", hint=f"there are: {', '.join(_TAKES)}"
        )
    takes = _TAKES[method]
    for name in given:
        if name not in takes:
            raise UsageError(f"{method} takes no {name}", hint=f"it takes: {', '.join(takes)}")
    for name, default in takes.items():
        if name not in given and default is None:
            raise UsageError(f"{method} needs a {name}", hint=f"--{name} ({name}=)")
    values = {**takes, **given}
    density, t, scale = values.get("density", 1.0), values.get("t", 0.0), values.get("scale", 1.0)
    if not 0 < density <= 1:
        raise UsageError(f"the density must be above 0 and at most 1, not {density}")
    if not 0 <= t <= 1:
        raise UsageError(f"t must be from 0 to 1, not {t}")
    if not math.isfinite(scale):
        raise UsageError(f"the scale must be finite, not {scale}")
    return values


def _method(
    name: str, sources: Sequence[Checkpoint], count: int, values: Mapping[str, Any]
) -> Method:
    if name == "slerp":
        if count != 2:
            raise UsageError(f"slerp takes exactly two checkpoints, not {count}")
        return Slerp(weights=(1 - values["t"], values["t"]), t=values["t"])
    if not count:
        raise UsageError(f"{name} needs a checkpoint besides the base")
    weights = checked_weights(values["weights"] or None, count)
    if name == "lora":
        return Lora(sources, weights)
    if name == "task-arithmetic":
        return TaskArithmetic(weights=weights, scale=values["scale"])
    if name == "dare":
        return Dare(
            weights=weights, scale=values["scale"], density=values["density"], seed=values["seed"]
        )
    if min(weights) <= 0:
        raise UsageError("the weights of ties must be above 0: they are those of a mean")
    return Ties(weights=weights, scale=values["scale"], density=values["density"])


# Opening the inputs of a combination, and writing it as a new checkpoint.

Place: TypeAlias = "str | PathLike[str] | Checkpoint"


def open_inputs(places: Place | Iterable[Place]) -> tuple[list[Place], list[Checkpoint]]:
    """Open the inputs of a combination."""
    listed: list[Place] = (
        [places] if isinstance(places, str | PathLike | Checkpoint) else list(places)
    )
    expanded: list[Place] = []
    for place in listed:
        expanded += [place] if isinstance(place, Checkpoint) else expand_references([place])
    opened = [
        place if isinstance(place, Checkpoint) else open_reference(place) for place in expanded
    ]
    seen: set[str] = set()
    for ck in opened:
        if ck.home in seen:
            raise UsageError(
                f"{ck.home} is given twice", hint="give it once, and more weight by `weights`"
            )
        seen.add(ck.home)
    return expanded, opened


def checked_weights(weights: Sequence[float] | None, count: int) -> tuple[float, ...]:
    """The weights of inputs."""
    values = (1.0,) * count if weights is None else tuple(map(float, weights))
    if len(values) != count:
        raise UsageError(
            f"there are {len(values)} weights for {count} inputs",
            hint="give one for each, in their order",
        )
    for weight in values:
        if not math.isfinite(weight):
            raise UsageError(f"the weight {weight} is not finite")
    return values


@dataclass(frozen=True, slots=True)
class Planned:
    """A combination that is not written yet.

    Attributes:
        about: what the lineage says of each input, beside what the method does.
        base: the checkpoint whose equal tensors are referenced, and not written.
    """

    combination: Combination
    kind: Literal["average", "merge"]
    about: Sequence[Mapping[str, Any]]
    base: Place | None = None

    def estimate(self, dst: str | PathLike[str], options: WriteOptions) -> Cost:
        """Estimate what `write` costs; of `ties` without the further scan that few tensors need."""
        from ucformat.jobs.cost import estimate_shards  # with all other jobs

        store, combination, comparison = as_store(dst), self.combination, Comparison()
        if self.base is not None:
            comparison = compare_outputs(combination, open_base(self.base, store.url))
            combination = combination.without(Key(d.name, d.state) for d in comparison.equal)
        with CombineJob(combination, store, NO_ATTEMPT, options) as job:
            return estimate_shards(job).on_base(comparison)

    def write(
        self,
        dst: str | PathLike[str] | Store,
        options: WriteOptions,
        *,
        overwrite: bool = False,
        run: str | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> Checkpoint:
        """Write the combination and commit it.

        It has no step, since it is no point of a training, and no metrics, since nobody has
        measured it. Everything else that is not a tensor is that of the first input.
        """
        store = as_store(dst)
        combination, references = self.combination, NO_REFERENCES
        sources, method = combination.sources, combination.method
        if self.base is not None:
            base = open_base(self.base, store.url)
            references = find_references(combination, base, store, options)
            combination = combination.without(references.keys)
        plan = combination.plan(options) | references.plan
        needs = references.urls
        attempt = options.where.begin(lambda: begin(store, plan, overwrite=overwrite, needs=needs))
        references.protect(str(attempt.keeps))
        job = CombineJob(combination, store, attempt.id, options)
        manifest, recorded = write(job, attempt, references=references)
        lineage = tuple(
            lineage_to(source, self.kind, {**method.about(), **role, **extra})
            for source, role, extra in zip(sources, method.roles(), self.about, strict=True)
        )
        parts = [source.metadata.part_of for source in sources if source.metadata.part_of]
        layout = {**manifest.layout, **({PART_OF: parts[0]} if parts else {})}
        new = {
            "run": run,
            "layout": layout,
            "step": None,
            "launch": None,
            "metrics": dict(metrics or {}),
            "lineage": lineage,
        }
        done = commit(store, attempt, manifest.model_copy(update=new))
        if recorded:
            discard_finished(store, attempt.id)
        return Checkpoint(Universal(store, allowed_roots, done))
