"""`ucp average`, `ucp merge`: making one checkpoint of several."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from ucformat.cli.ui.options import (
    CATALOG,
    IGNORE_DEPENDENT,
    METRIC,
    OPENING,
    STATES,
    Opening,
    RecordedFacts,
    apply_options,
    bundle,
    command,
    ignore_dependents_of,
    open_any,
    ref_argument,
)
from ucformat.cli.ui.where import (
    BASE,
    CHUNK_BYTES,
    CODEC,
    DRY_RUN,
    NO_VERIFY,
    ON,
    OVERWRITE,
    PART,
    SHARD_BYTES,
    Work,
    print_cost,
    print_written,
    work_options,
    workers_option,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ucformat.cli.ui.output import Output
    from ucformat.jobs.combine.combining import Planned


def _numbers(
    _ctx: click.Context, _param: click.Parameter, numbers: str | None
) -> list[float] | None:
    if numbers is None:
        return None
    try:
        return [float(text) for text in numbers.split(",")]
    except ValueError:
        raise click.BadParameter(
            f"{numbers!r} is not a list of numbers, such as 0.5,0.3,0.2"
        ) from None


_REFS = ref_argument("refs", "REF...", many=True)
_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.argument("dst", metavar="DST"),
    click.option(
        "--weights",
        metavar="W,W,…",
        callback=_numbers,
        help="A weight for each REF, in their order.  [default: equal weights]",
    ),
)


@dataclass(frozen=True)
class Chosen:
    """Which tensors are combined, and to which dtype."""

    states: tuple[str, ...] = ()
    take: tuple[str, ...] = ()
    cast: str | None = None


_MORE: tuple[Callable[[Any], Any], ...] = (
    bundle(
        "chosen",
        Chosen,
        STATES,
        click.option(
            "--take",
            metavar="PATTERN",
            multiple=True,
            help=(
                "Take the tensors with such names from the base or first REF as they are. May "
                "be repeated."
            ),
        ),
        click.option(
            "--cast",
            metavar="DTYPE",
            help="The dtype to round to.  [default: that of the base or first REF]",
        ),
    ),
    work_options(
        CHUNK_BYTES,
        SHARD_BYTES,
        CODEC,
        OVERWRITE,
        workers_option("shards to write"),
        NO_VERIFY,
        ON,
        PART,
        DRY_RUN,
        IGNORE_DEPENDENT,
    ),
    bundle(
        "facts",
        RecordedFacts,
        click.option(
            "--run",
            metavar="NAME",
            help="The training run to record in the catalog.  [default: DST's folder]",
        ),
        METRIC,
    ),
    OPENING,
    CATALOG,
)


@command
@_REFS
@apply_options(*_OPTIONS)
@click.option(
    "--by",
    metavar="METRIC",
    help="Weights from a metric in the catalog, as metric.val_loss, by softmax.",
)
@click.option(
    "--min/--max", "least", default=None, help="With --by: whether less or more is better."
)
@click.option(
    "--temperature",
    type=float,
    metavar="T",
    help="With --by: divide the metric by T.  [default: 1]",
)
@click.option(
    "--ema",
    type=float,
    metavar="DECAY",
    help="Exponential moving average in order of steps, as 0.99.",
)
@BASE
@apply_options(*_MORE)
def average(
    refs: tuple[str, ...],
    dst: str,
    least: bool | None,  # noqa: FBT001
    opening: Opening,
    chosen: Chosen,
    out: Output,
    **given: Any,
) -> None:
    """Average checkpoints, and write the result as a new one at DST.

    REF may also be the checkpoints of a run in a range of steps: run7@1000..2000. Resumable: if
    interrupted, nothing is visible at DST, and running the same command again writes only what is
    missing.
    """
    from ucformat.jobs.combine.combining import plan_average

    parameters = {n: given.pop(n) for n in ("base", "by", "temperature", "ema", "weights")}
    parameters["best"] = None if least is None else "min" if least else "max"
    _run(
        "average",
        dst,
        lambda: plan_average(_opened(refs, opening), parameters, **_arguments(chosen)),
        out,
        **given,
    )


@command
@_REFS
@apply_options(*_OPTIONS)
@click.option(
    "--method",
    required=True,
    type=click.Choice(["task-arithmetic", "slerp", "ties", "dare", "lora"]),
    help="How to merge; with lora, each REF is an adapter of PEFT.",
)
@click.option(
    "--base", metavar="REF", help="What the REFs were fine-tuned from; for all methods but slerp."
)
@click.option(
    "--increment",
    is_flag=True,
    help="Do not write tensors that equal those of the base, but read them there.",
)
@click.option(
    "--scale",
    type=float,
    metavar="X",
    help="A factor of all differences from the base.  [default: 1]",
)
@click.option(
    "--density",
    type=float,
    metavar="P",
    help="The share of differences to keep.  [default: ties 0.2]",
)
@click.option(
    "--t",
    type=float,
    metavar="T",
    help="With slerp: 0 for the first REF, 1 for the second.  [default: 0.5]",
)
@click.option(
    "--seed", type=int, metavar="N", help="With dare: determines which differences are kept."
)
@apply_options(*_MORE)
def merge(
    refs: tuple[str, ...],
    dst: str,
    method: str,
    base: str | None,
    increment: bool,  # noqa: FBT001
    opening: Opening,
    chosen: Chosen,
    **given: Any,
) -> None:
    """Merge models, or adapters into their base, and write the result as a new checkpoint at DST.

    Resumable: if interrupted, nothing is visible at DST, and running the same command again writes
    only what is missing.
    """
    from ucformat.jobs.combine.combining import plan_merge

    parameters = {n: given.pop(n) for n in ("weights", "scale", "density", "t", "seed")}

    def plan() -> Planned:
        bases = _opened([base], opening) if base is not None else [None]
        sources = refs if method == "lora" else _opened(refs, opening)  # adapters have no view
        more = {"base": bases[0], "increment": increment or None}
        return plan_merge(method, sources, {**parameters, **more}, **_arguments(chosen))

    _run("merge", dst, plan, **given)


def _arguments(chosen: Chosen) -> dict[str, Any]:
    return {**asdict(chosen), "states": list(chosen.states) or None}


def _opened(refs: Sequence[str], opening: Opening) -> Sequence[Any]:
    """The checkpoints of references, opened if that takes a view or options."""
    from ucformat.references import expand_references

    if opening.view is None and opening.options is None:
        return refs
    checkpoints = [open_any(str(ref), opening.options) for ref in expand_references(refs)]
    return checkpoints if opening.view is None else [ck.view(opening.view) for ck in checkpoints]


def _run(
    name: str,
    dst: str,
    plan: Callable[[], Planned],
    out: Output,
    *,
    work: Work,
    facts: RecordedFacts,
) -> None:
    from ucformat.jobs.shards import WriteOptions
    from ucformat.jobs.where import Where

    options = WriteOptions(
        work.chunk_bytes,
        work.shard_bytes,
        work.workers,
        None,
        not work.no_verify,
        Where.parse(work.where),
        work.codec,
    )
    if work.dry_run:
        print_cost(plan().estimate(dst, options), out)
        return
    begun = time.perf_counter()
    ignore_dependents_of(work.ignored, [dst], out, name)
    with work.running("combining", out, f"nothing is committed at {dst}") as progress:
        planned = plan()
        ck = planned.write(
            dst,
            replace(options, progress=progress),
            overwrite=work.overwrite,
            run=facts.run,
            metrics=facts.metrics,
        )
    print_written(ck, time.perf_counter() - begun, out)
