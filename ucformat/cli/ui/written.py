"""What commands print that have written a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ucformat.cli.ui.text import bytes_text, plural

if TYPE_CHECKING:
    from ucformat.checkpoint import Checkpoint
    from ucformat.cli.ui.output import Output


def print_written(ck: Checkpoint, seconds: float, out: Output, *, nothing: bool = False) -> None:
    """Print the place, id and size of a checkpoint, and how fast it was written."""
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
