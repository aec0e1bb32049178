"""`ucp copy`: the same checkpoint at another place."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from ucformat.cli.options import CATALOG, IGNORE, SRC, command, ignore
from ucformat.cli.text import bytes_text, plural

if TYPE_CHECKING:
    from ucformat.cli.output import Output

__all__ = ["copy"]


@command
@SRC
@click.argument("dst", metavar="DST")
@click.option(
    "--overwrite",
    is_flag=True,
    help="Replace another checkpoint at DST; it stays whole until the copy is. Repair the same one.",
)
@click.option(
    "-w",
    "--workers",
    type=click.IntRange(min=1),
    metavar="N",
    help="Files copied at once.  [default: one for each core, at most 16; at least 8 for object stores]",
)
@IGNORE
@CATALOG
def copy(
    src: str,
    dst: str,
    overwrite: bool,  # noqa: FBT001
    workers: int | None,
    ignored: tuple[str, ...],
    out: Output,
) -> None:
    """Copy a universal checkpoint to another place, under the same id, and commit it there.

    Every byte is compared with its checksum on the way. Stopped at any instant, it leaves nothing that opens; the same
    command again continues, and keeps the files that are whole. A checkpoint that is there already is no error.
    """
    import ucformat
    from ucformat.cli.program import Interrupted

    begun = time.perf_counter()
    ignore(ignored, [dst], out, "copy")
    try:
        with out.progress("copying") as progress:
            done = ucformat.copy(src, dst, overwrite, workers, progress=progress)
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
        out.note(f"{done.url} holds this checkpoint already: nothing to do")
    kept = f"; {plural(done.kept, 'file')} of these, {bytes_text(done.kept_nbytes)}, were there" if done.kept else ""
    amount = (
        f"{plural(done.files, 'file')}, {bytes_text(done.nbytes)} in {seconds:.1f} s, {found['mb_per_s']:,.0f} MB/s"
    )
    out.result(lambda: [f"{done.url}  {done.id}  {amount}{kept}"], lambda: found, lambda: [done.id])
