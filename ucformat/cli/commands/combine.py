"""`ucp average`, `ucp merge`: making one checkpoint of several."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from ucformat.cli.ui.catalogs import print_written
from ucformat.cli.ui.options import (
    CATALOG,
    IGNORE_DEPENDENT,
    METRIC,
    SOURCE,
    STATES,
    VIEW,
    command,
    ignore_dependents_of,
    open_any,
    ref_argument,
)
from ucformat.cli.ui.where import (
    CHUNK_BYTES,
    DRY_RUN,
    NO_VERIFY,
    ON,
    OVERWRITE,
    PART,
    SHARD_BYTES,
    print_cost,
    where_of,
    workers_option,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ucformat.cli.ui.output import Output
    from ucformat.jobs.combine.combining import Planned

    #: Opens references, through the view if there is one.
    _Opened = Callable[[Sequence[str]], Sequence[Any]]


def _numbers(_ctx: click.Context, _param: click.Parameter, given: str | None) -> list[float] | None:
    if given is None:
        return None
    try:
        return [float(text) for text in given.split(",")]
    except ValueError:
        raise click.BadParameter(
            f"{given!r} is not a list of numbers, such as 0.5,0.3,0.2"
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
_MORE: tuple[Callable[[Any], Any], ...] = (
    STATES,
    click.option(
        "--take",
        metavar="PATTERN",
        multiple=True,
        help="Take the tensors with such names from the base or first REF as they are. May be repeated.",
    ),
    click.option(
        "--cast",
        metavar="DTYPE",
        help="The dtype to round to.  [default: that of the base or first REF]",
    ),
    CHUNK_BYTES,
    SHARD_BYTES,
    OVERWRITE,
    workers_option("shards to write"),
    NO_VERIFY,
    click.option(
        "--run",
        metavar="NAME",
        help="The training run to record in the catalog.  [default: DST's folder]",
    ),
    METRIC,
    VIEW,
    SOURCE,
    ON,
    PART,
    DRY_RUN,
    IGNORE_DEPENDENT,
    CATALOG,
)


def _with(options: Sequence[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    """Apply decorators, the first one outermost."""

    def decorate(function: Any) -> Any:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


@command
@_REFS
@_with(_OPTIONS)
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
@_with(_MORE)
def average(
    refs: tuple[str, ...],
    dst: str,
    weights: list[float] | None,
    by: str | None,
    least: bool | None,  # noqa: FBT001
    temperature: float | None,
    ema: float | None,
    out: Output,
    **options: Any,
) -> None:
    """Average checkpoints, and write the result as a new one at DST.

    REF may also be the checkpoints of a run in a range of steps: run7@1000..2000. Resumable: if
    interrupted, nothing is visible at DST, and running the same command again writes only what is
    missing.
    """
    from ucformat.jobs.combine.combining import plan_average

    best: Any = None if least is None else "min" if least else "max"
    weighting = {"by": by, "best": best, "temperature": temperature, "ema": ema, "weights": weights}
    _run(
        "average",
        dst,
        lambda opened, chosen: plan_average(opened(refs), **weighting, **chosen),
        out,
        **options,
    )


@command
@_REFS
@_with(_OPTIONS)
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
@_with(_MORE)
def merge(
    refs: tuple[str, ...],
    dst: str,
    weights: list[float] | None,
    method: str,
    base: str | None,
    scale: float | None,
    density: float | None,
    t: float | None,
    seed: int | None,
    out: Output,
    **options: Any,
) -> None:
    """Merge models, or adapters into their base, and write the result as a new checkpoint at DST.

    Resumable: if interrupted, nothing is visible at DST, and running the same command again writes
    only what is missing.
    """
    from ucformat.jobs.combine.combining import plan_merge

    given: dict[str, Any] = {
        "weights": weights,
        "scale": scale,
        "density": density,
        "t": t,
        "seed": seed,
    }

    def plan(opened: _Opened, chosen: Mapping[str, Any]) -> Planned:
        bases = opened([base]) if base is not None else [None]
        sources = refs if method == "lora" else opened(refs)  # adapters have no view
        return plan_merge(method, sources, {**given, "base": bases[0]}, **chosen)

    _run("merge", dst, plan, out, **options)


def _run(
    name: str,
    dst: str,
    plan: Callable[[_Opened, Mapping[str, Any]], Planned],
    out: Output,
    *,
    states: tuple[str, ...],
    take: tuple[str, ...],
    cast: str | None,
    chunk_bytes: int | None,
    shard_bytes: int | None,
    overwrite: bool,
    workers: int | None,
    no_verify: bool,
    run: str | None,
    metrics: dict[str, float],
    view: str | None,
    options: dict[str, Any] | None,
    on: str | None,
    part: str | None,
    dry_run: bool,
    ignored: tuple[str, ...],
) -> None:
    from ucformat.cli.program import Interrupted
    from ucformat.jobs.cost import estimate_combination
    from ucformat.jobs.shards import How
    from ucformat.jobs.where import Where
    from ucformat.references import expand_references

    def opened(refs: Sequence[str]) -> Sequence[Any]:
        if view is None and options is None:
            return refs
        found = [open_any(str(ref), options) for ref in expand_references(refs)]
        return found if view is None else [ck.view(view) for ck in found]

    how = How(
        chunk_bytes, shard_bytes, workers, None, not no_verify, Where.parse(where_of(on, part))
    )
    chosen = {"states": list(states) or None, "take": take, "cast": cast}
    if dry_run:
        print_cost(estimate_combination(plan(opened, chosen).combination, dst, how), out)
        return
    begun = time.perf_counter()
    ignore_dependents_of(ignored, [dst], out, name)
    try:
        with out.progress("combining") as progress:
            planned = plan(opened, chosen)
            ck = planned.write(
                dst, replace(how, progress=progress), overwrite=overwrite, run=run, metrics=metrics
            )
    except KeyboardInterrupt:
        raise Interrupted(
            f"interrupted: nothing is committed at {dst}; run the same command again and it continues"
        ) from None
    print_written(ck, time.perf_counter() - begun, out)
