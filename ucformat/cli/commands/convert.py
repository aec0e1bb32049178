"""`ucp convert`, `ucp copy`, `ucp materialize`: writing universal checkpoints."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

import click

from ucformat.cli.ui.options import (
    CATALOG,
    IGNORE_DEPENDENT,
    OPENING,
    SRC,
    STATES,
    Opening,
    RecordedFacts,
    command,
    facts_options,
    ignore_dependents_of,
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
from ucformat.errors import UsageError
from ucformat.texts import bytes_text, plural

if TYPE_CHECKING:
    from ucformat.cli.ui.output import Output


def _pattern_and_encoding(text: str) -> tuple[str, str]:
    pattern, equals, encoding = text.rpartition("=")
    if not equals:
        raise click.BadParameter(
            f"{text!r} is not PATTERN=ENCODING, such as 'exp_avg*=int8-blockwise'",
            param_hint="--encode",
        )
    return pattern, encoding


def _refuse_base(_ctx: click.Context, _param: click.Parameter, base: str | None) -> None:
    if base is not None:
        raise UsageError(
            "a copy has the id and the manifest of SRC, so it cannot refer to another base",
            hint="`ucp convert SRC DST --base REF` writes a checkpoint with an id of its own; "
            "--with-bases copies the bases that SRC has",
        )


_SIZES = (CHUNK_BYTES, SHARD_BYTES, CODEC, OVERWRITE, workers_option("shards to write"), NO_VERIFY)
_JOB = (ON, PART, DRY_RUN, IGNORE_DEPENDENT)


@command
@SRC
@click.argument("dst", metavar="DST")
@STATES
@work_options(
    click.option(
        "--encode",
        multiple=True,
        metavar="PATTERN=ENCODING",
        help=(
            "Encode states with loss, such as 'exp_avg*=int8-blockwise' or "
            "'exp_avg=adaptive:3'. May be repeated.  [default: none]"
        ),
    ),
    *_SIZES,
    *_JOB,
    click.option(
        "--weights",
        type=click.Choice(["safetensors"]),
        help="Store the weights as safetensors files that Hugging Face's tools load, with the configuration and the "
        "tokenizer beside them.  [default: as arrays]",
    ),
    BASE,
)
@facts_options("The training run to record in the catalog.  [default: SRC's, else DST's folder]")
@OPENING
@CATALOG
def convert(
    src: str,
    dst: str,
    states: tuple[str, ...],
    work: Work,
    facts: RecordedFacts,
    opening: Opening,
    out: Output,
) -> None:
    """Convert SRC to a universal checkpoint at DST.

    Resumable: if interrupted, nothing is visible at DST, and running the same command again writes
    only what is missing.
    """
    import ucformat
    from ucformat.views.outdated import outdated

    chosen: dict[str, Any] = {
        "states": list(states) or None,
        "weights": work.weights,
        "base": work.base,
        "encode": dict(_pattern_and_encoding(text) for text in work.encode),
    }
    if work.dry_run:
        sizes = work.arguments("chunk_bytes", "shard_bytes", "workers", "verify", "codec")
        print_cost(ucformat.estimate("convert", opening.open(src), dst, **chosen, **sizes), out)
        return
    begun = time.perf_counter()
    ignore_dependents_of(work.ignored, [dst], out, "convert")
    with work.running("converting", out, f"nothing is committed at {dst}") as progress:
        source = opening.open(src)
        arguments = work.arguments(
            "chunk_bytes", "shard_bytes", "codec", "overwrite", "workers", "verify", "on"
        )
        ck = ucformat.convert(
            source,
            dst,
            **chosen,
            **arguments,
            **asdict(facts),
            progress=progress,
        )
    seconds = time.perf_counter() - begun
    for name in outdated(source.viewed, source.assets, source.objects):
        out.note(
            f"{name} is copied unchanged: it has the sizes of the whole model, not of the view"
        )
    verified = ck.manifest.verified
    if verified is not None and (verified.but or not verified.default):
        but = set(verified.but)
        bare = sum(
            not doc.is_referenced and ((doc.name, doc.state) in but) == verified.default
            for doc in ck.manifest.tensors
        )
        why = (
            "--no-verify was given" if work.no_verify else "SRC's files have no checksums for them"
        )
        if bare:
            out.note(f"{plural(bare, 'tensor')} converted without verification: {why}")
    print_written(ck, seconds, out)


@command
@SRC
@click.argument("dst", metavar="DST")
@work_options(
    click.option(
        "--overwrite",
        is_flag=True,
        help=(
            "Replace another checkpoint at DST, which stays intact until the copy is committed; "
            "repair the same one."
        ),
    ),
    workers_option("files to copy"),
    click.option(
        "--codec",
        type=click.Choice(["blosc", "none"]),
        help=(
            "Write the arrays compressed, or not compressed, instead of copying their files.  "
            "[default: as they are]"
        ),
    ),
    click.option(
        "--with-bases",
        is_flag=True,
        help="Copy the checkpoints beside SRC on which it is based, too, to beside DST.",
    ),
    *_JOB,
    click.option(
        "--base",
        metavar="REF",
        expose_value=False,
        callback=_refuse_base,
        help="Not of a copy, which keeps the manifest: use `ucp convert SRC DST --base REF`.",
    ),
)
@CATALOG
def copy(src: str, dst: str, work: Work, out: Output) -> None:
    """Copy a universal checkpoint to another place, keeping its id.

    Every byte is checked against its checksum. Resumable: if interrupted, nothing is visible at
    DST, and running the same command again copies only what is missing. If DST is already the same
    checkpoint, nothing is done.
    """
    import ucformat

    if work.dry_run:
        job: Literal["copy", "materialize"] = "materialize" if work.codec else "copy"
        cost = ucformat.estimate(
            job,
            src,
            dst,
            workers=work.workers,
            codec=work.codec,
            with_bases=work.with_bases,
        )
        print_cost(cost, out)
        return
    begun = time.perf_counter()
    ignore_dependents_of(work.ignored, [dst], out, "copy")
    with work.running("copying", out, f"nothing is committed at {dst}") as progress:
        arguments = work.arguments("overwrite", "workers", "codec", "on")
        done = ucformat.copy(src, dst, **arguments, with_bases=work.with_bases, progress=progress)
    seconds = time.perf_counter() - begun
    data = {
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
    speed = f"{seconds:.1f} s, {data['mb_per_s']:,.0f} MB/s"
    amount = f"{plural(done.files, 'file')}, {bytes_text(done.nbytes)} in {speed}"
    out.result(lambda: [f"{done.url}  {done.id}  {amount}{kept}"], lambda: data, lambda: [done.id])


@command
@SRC
@click.argument("dst", metavar="[DST]", required=False)
@work_options(*_SIZES, *_JOB)
@CATALOG
def materialize(src: str, dst: str | None, work: Work, out: Output) -> None:
    """Convert the packed checkpoint SRC to arrays: in place, or as a new checkpoint at DST.

    In place, the checkpoint keeps its id, and the packed files are deleted once the arrays are
    committed. Resumable: if interrupted, SRC is intact, and running the same command again
    continues.
    """
    import ucformat
    from ucformat.jobs.materialize import is_packed

    sizes = work.arguments("chunk_bytes", "shard_bytes", "workers", "verify", "codec")
    if work.dry_run:
        print_cost(ucformat.estimate("materialize", src, dst, **sizes), out)
        return
    begun = time.perf_counter()
    source = ucformat.open(src)
    ignore_dependents_of(work.ignored, [source.home if dst is None else dst], out, "materialize")
    nothing = dst is None and source.kind == "ucformat" and not is_packed(source)
    left = f"{source.url} is intact" if dst is None else f"nothing is committed at {dst}"
    with work.running("materialising", out, left) as progress:
        arguments = work.arguments("overwrite", "on")
        ck = ucformat.materialize(source, dst, **sizes, **arguments, progress=progress)
    if nothing:
        out.note(f"{ck.url} is not packed: nothing to do")
    print_written(ck, time.perf_counter() - begun, out, nothing=nothing)
