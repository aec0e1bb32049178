"""`ucp materialize`: arrays of a packed checkpoint."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from ucformat.cli.options import CATALOG, IGNORE, SIZE, SRC, command, ignore
from ucformat.cli.text import bytes_text, plural

if TYPE_CHECKING:
    from ucformat.cli.output import Output

__all__ = ["materialize"]


@command
@SRC
@click.argument("dst", metavar="[DST]", required=False)
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
@IGNORE
@CATALOG
def materialize(
    src: str,
    dst: str | None,
    chunk_bytes: int | None,
    shard_bytes: int | None,
    overwrite: bool,  # noqa: FBT001
    workers: int | None,
    no_verify: bool,  # noqa: FBT001
    ignored: tuple[str, ...],
    out: Output,
) -> None:
    """Make arrays of the packed checkpoint SRC: in place, or as a new checkpoint at DST.

    In place the packed files are deleted once the arrays are committed, and the checkpoint keeps its id. Stopped at any
    instant, SRC is whole; the same command again continues.
    """
    import ucformat
    from ucformat.cli.program import Interrupted
    from ucformat.jobs.materialize import is_packed

    begun = time.perf_counter()
    source = ucformat.open(src)
    ignore(ignored, [source.home if dst is None else dst], out, "materialize")
    nothing = dst is None and source.kind == "ucformat" and not is_packed(source)
    try:
        with out.progress("materialising") as progress:
            ck = ucformat.materialize(
                source, dst, chunk_bytes, shard_bytes, overwrite, workers, verify=not no_verify, progress=progress
            )
    except KeyboardInterrupt:
        whole = f"{source.url} is whole" if dst is None else f"nothing is committed at {dst}"
        raise Interrupted(f"interrupted: {whole}; run the same command again and it continues") from None
    if nothing:
        out.note(f"{ck.url} is arrays already: nothing to do")
    seconds = time.perf_counter() - begun
    tensors = 0 if nothing else len(ck.tensors)
    nbytes = 0 if nothing else sum(info.nbytes for info in ck.tensors.values())
    found = {
        "url": ck.url,
        "id": ck.manifest.id,
        "tensors": tensors,
        "bytes": nbytes,
        "seconds": round(seconds, 3),
        "mb_per_s": round(nbytes / seconds / 1e6, 3),
    }
    amount = f"{plural(tensors, 'tensor')}, {bytes_text(nbytes)} in {seconds:.1f} s, {found['mb_per_s']:,.0f} MB/s"
    out.result(lambda: [f"{ck.url}  {ck.manifest.id}  {amount}"], lambda: found, lambda: [ck.manifest.id])
