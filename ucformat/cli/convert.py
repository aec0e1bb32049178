"""`ucp convert`: a universal checkpoint of any checkpoint."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from ucformat.cli.options import CATALOG, IGNORE, SIZE, SRC, STATES, VIEW, command, ignore
from ucformat.cli.said_options import CONFIG, METRIC
from ucformat.cli.source_options import SOURCE
from ucformat.cli.text import bytes_text, plural

if TYPE_CHECKING:
    from ucformat.cli.output import Output

__all__ = ["convert"]


@command
@SRC
@click.argument("dst", metavar="DST")
@STATES
@click.option("--chunk-bytes", type=SIZE, help="Most bytes of a chunk, the unit of reading.  [default: 1MiB]")
@click.option("--shard-bytes", type=SIZE, help="Most bytes of a shard, the unit of writing.  [default: 128MiB]")
@click.option("--overwrite", is_flag=True, help="Replace the checkpoint at DST; it stays whole until the new one is.")
@click.option(
    "-w",
    "--workers",
    type=click.IntRange(min=1),
    metavar="N",
    help="Shards written at once.  [default: one for each core, at most 16]",
)
@click.option(
    "--no-verify", is_flag=True, help="Do not compare what is read with the checksums that the files of SRC carry."
)
@click.option("--run", metavar="NAME", help="The training run, for the catalog.  [default: SRC's, else DST's folder]")
@CONFIG
@METRIC
@VIEW
@SOURCE
@IGNORE
@CATALOG
def convert(
    src: str,
    dst: str,
    states: tuple[str, ...],
    chunk_bytes: int | None,
    shard_bytes: int | None,
    overwrite: bool,  # noqa: FBT001
    workers: int | None,
    no_verify: bool,  # noqa: FBT001
    run: str | None,
    config: dict[str, Any] | None,
    metrics: dict[str, float],
    view: str | None,
    options: dict[str, Any] | None,
    ignored: tuple[str, ...],
    out: Output,
) -> None:
    """Make a universal checkpoint at DST of what SRC holds, and commit it.

    Stopped at any instant, it leaves nothing that opens; the same command again continues, and writes only what is not
    there yet.
    """
    import ucformat
    from ucformat.cli.program import Interrupted

    begun = time.perf_counter()
    ignore(ignored, [dst], out, "convert")
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
                verify=not no_verify,
                progress=progress,
            )
    except KeyboardInterrupt:
        raise Interrupted(
            f"interrupted: nothing is committed at {dst}; run the same command again and it continues"
        ) from None
    seconds = time.perf_counter() - begun
    nbytes = sum(info.nbytes for info in ck.tensors.values())
    found = {
        "url": ck.url,
        "id": ck.manifest.id,
        "tensors": len(ck.tensors),
        "bytes": nbytes,
        "seconds": round(seconds, 3),
        "mb_per_s": round(nbytes / seconds / 1e6, 3),
    }
    amount = (
        f"{plural(len(ck.tensors), 'tensor')}, {bytes_text(nbytes)} in {seconds:.1f} s, {found['mb_per_s']:,.0f} MB/s"
    )
    verified = ck.manifest.verified
    if verified is not None and (verified.but or not verified.default):
        bare = len(verified.but) if verified.default else len(ck.tensors) - len(verified.but)
        why = "as was asked for" if no_verify else "SRC's files carry no checksums of them"
        out.note(f"{plural(bare, 'tensor')} came in unverified: {why}")
    out.result(lambda: [f"{ck.url}  {ck.manifest.id}  {amount}"], lambda: found, lambda: [ck.manifest.id])
