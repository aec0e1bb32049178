"""`ucp convert`, `ucp copy`, `ucp materialize`: writing universal checkpoints."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Literal

import click

from ucformat.cli.ui.catalogs import print_written
from ucformat.cli.ui.options import (
    CATALOG,
    CONFIG,
    IGNORE_DEPENDENT,
    METRIC,
    SOURCE,
    SRC,
    STATES,
    STEP,
    VIEW,
    command,
    ignore_dependents_of,
)
from ucformat.cli.ui.text import bytes_text, plural
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
    from ucformat.cli.ui.output import Output


@command
@SRC
@click.argument("dst", metavar="DST")
@STATES
@CHUNK_BYTES
@SHARD_BYTES
@OVERWRITE
@workers_option("shards to write")
@click.option(
    "--weights",
    type=click.Choice(["safetensors"]),
    help="Store the weights as safetensors files that Hugging Face's tools load, with the configuration and the "
    "tokenizer beside them.  [default: as arrays]",
)
@NO_VERIFY
@click.option(
    "--run",
    metavar="NAME",
    help="The training run to record in the catalog.  [default: SRC's, else DST's folder]",
)
@CONFIG
@METRIC
@STEP
@VIEW
@SOURCE
@ON
@PART
@DRY_RUN
@IGNORE_DEPENDENT
@CATALOG
def convert(
    src: str,
    dst: str,
    states: tuple[str, ...],
    chunk_bytes: int | None,
    shard_bytes: int | None,
    overwrite: bool,  # noqa: FBT001
    workers: int | None,
    weights: Literal["safetensors"] | None,
    no_verify: bool,  # noqa: FBT001
    run: str | None,
    config: dict[str, Any] | None,
    metrics: dict[str, float],
    step: int | None,
    view: str | None,
    options: dict[str, Any] | None,
    on: str | None,
    part: str | None,
    dry_run: bool,  # noqa: FBT001
    ignored: tuple[str, ...],
    out: Output,
) -> None:
    """Convert SRC to a universal checkpoint at DST.

    Resumable: if interrupted, nothing is visible at DST, and running the same command again writes
    only what is missing.
    """
    import ucformat
    from ucformat.cli.program import Interrupted
    from ucformat.views.viewed import outdated

    if dry_run:
        source, sizes = (
            ucformat.open(src, view=view, options=options),
            (chunk_bytes, shard_bytes, workers),
        )
        cost = ucformat.estimate(
            "convert",
            source,
            dst,
            list(states) or None,
            *sizes,
            weights=weights,
            verify=not no_verify,
        )
        print_cost(cost, out)
        return
    begun = time.perf_counter()
    ignore_dependents_of(ignored, [dst], out, "convert")
    try:
        with out.progress("converting") as progress:
            source = ucformat.open(src, view=view, options=options)
            ck = ucformat.convert(
                source,
                dst,
                list(states) or None,
                chunk_bytes,
                shard_bytes,
                overwrite,
                workers,
                run=run,
                config=config,
                metrics=metrics,
                step=step,
                weights=weights,
                verify=not no_verify,
                on=where_of(on, part),
                progress=progress,
            )
    except KeyboardInterrupt:
        raise Interrupted(
            f"interrupted: nothing is committed at {dst}; run the same command again and it continues"
        ) from None
    seconds = time.perf_counter() - begun
    for name in outdated(source.viewed, source.assets, source.objects):
        out.note(
            f"{name} is copied unchanged: it has the sizes of the whole model, not of the view"
        )
    verified = ck.manifest.verified
    if verified is not None and (verified.but or not verified.default):
        bare = len(verified.but) if verified.default else len(ck.tensors) - len(verified.but)
        why = "--no-verify was given" if no_verify else "SRC's files have no checksums for them"
        out.note(f"{plural(bare, 'tensor')} converted without verification: {why}")
    print_written(ck, seconds, out)


@command
@SRC
@click.argument("dst", metavar="DST")
@click.option(
    "--overwrite",
    is_flag=True,
    help="Replace another checkpoint at DST, which stays intact until the copy is committed; repair the same one.",
)
@workers_option("files to copy")
@ON
@PART
@DRY_RUN
@IGNORE_DEPENDENT
@CATALOG
def copy(
    src: str,
    dst: str,
    overwrite: bool,  # noqa: FBT001
    workers: int | None,
    on: str | None,
    part: str | None,
    dry_run: bool,  # noqa: FBT001
    ignored: tuple[str, ...],
    out: Output,
) -> None:
    """Copy a universal checkpoint to another place, keeping its id.

    Every byte is checked against its checksum. Resumable: if interrupted, nothing is visible at
    DST, and running the same command again copies only what is missing. If DST is already the same
    checkpoint, nothing is done.
    """
    import ucformat
    from ucformat.cli.program import Interrupted

    if dry_run:
        print_cost(ucformat.estimate("copy", src, dst, workers=workers), out)
        return
    begun = time.perf_counter()
    ignore_dependents_of(ignored, [dst], out, "copy")
    try:
        with out.progress("copying") as progress:
            done = ucformat.copy(
                src, dst, overwrite, workers, on=where_of(on, part), progress=progress
            )
    except KeyboardInterrupt:
        raise Interrupted(
            f"interrupted: nothing is committed at {dst}; run the same command again and it continues"
        ) from None
    seconds = time.perf_counter() - begun
    found = {
        "url": done.url,
        "id": done.id,
        "already": done.already,
        "files": done.files,
        "bytes": done.nbytes,
        "kept_files": done.kept,
        "kept_bytes": done.kept_nbytes,
        "seconds": round(seconds, 3),
        "mb_per_s": round(done.nbytes / seconds / 1e6, 3),
    }
    if done.already:
        out.note(f"{done.url} is this checkpoint already: nothing to do")
    kept = (
        f"; {plural(done.kept, 'file')} of these, {bytes_text(done.kept_nbytes)}, existed"
        if done.kept
        else ""
    )
    speed = f"{seconds:.1f} s, {found['mb_per_s']:,.0f} MB/s"
    amount = f"{plural(done.files, 'file')}, {bytes_text(done.nbytes)} in {speed}"
    out.result(lambda: [f"{done.url}  {done.id}  {amount}{kept}"], lambda: found, lambda: [done.id])


@command
@SRC
@click.argument("dst", metavar="[DST]", required=False)
@CHUNK_BYTES
@SHARD_BYTES
@OVERWRITE
@workers_option("shards to write")
@NO_VERIFY
@ON
@PART
@DRY_RUN
@IGNORE_DEPENDENT
@CATALOG
def materialize(
    src: str,
    dst: str | None,
    chunk_bytes: int | None,
    shard_bytes: int | None,
    overwrite: bool,  # noqa: FBT001
    workers: int | None,
    no_verify: bool,  # noqa: FBT001
    on: str | None,
    part: str | None,
    dry_run: bool,  # noqa: FBT001
    ignored: tuple[str, ...],
    out: Output,
) -> None:
    """Convert the packed checkpoint SRC to arrays: in place, or as a new checkpoint at DST.

    In place, the checkpoint keeps its id, and the packed files are deleted once the arrays are
    committed. Resumable: if interrupted, SRC is intact, and running the same command again
    continues.
    """
    import ucformat
    from ucformat.cli.program import Interrupted
    from ucformat.jobs.materialize import is_packed

    if dry_run:
        sizes = (chunk_bytes, shard_bytes, workers)
        print_cost(
            ucformat.estimate("materialize", src, dst, None, *sizes, verify=not no_verify), out
        )
        return
    begun = time.perf_counter()
    source = ucformat.open(src)
    ignore_dependents_of(ignored, [source.home if dst is None else dst], out, "materialize")
    nothing = dst is None and source.kind == "ucformat" and not is_packed(source)
    try:
        with out.progress("materialising") as progress:
            ck = ucformat.materialize(
                source,
                dst,
                chunk_bytes,
                shard_bytes,
                overwrite,
                workers,
                verify=not no_verify,
                on=where_of(on, part),
                progress=progress,
            )
    except KeyboardInterrupt:
        state = f"{source.url} is intact" if dst is None else f"nothing is committed at {dst}"
        raise Interrupted(
            f"interrupted: {state}; run the same command again and it continues"
        ) from None
    if nothing:
        out.note(f"{ck.url} is not packed: nothing to do")
    print_written(ck, time.perf_counter() - begun, out, nothing=nothing)
