"""`ucp patch`, `ucp compact`: checkpoints as patches of others, and without these."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from ucformat.cli.ui.options import (
    CATALOG,
    IGNORE_DEPENDENT,
    OPENING,
    SRC,
    STATES,
    Opening,
    command,
    ignore_dependents_of,
)
from ucformat.cli.ui.where import (
    DRY_RUN,
    NO_VERIFY,
    ON,
    OVERWRITE,
    PART,
    Work,
    print_cost,
    work_options,
    workers_option,
)
from ucformat.texts import bytes_text, plural

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucformat.checkpoint import Checkpoint
    from ucformat.cli.ui.output import Output

_JOB = (OVERWRITE, workers_option("files to write"), NO_VERIFY, ON, PART, DRY_RUN, IGNORE_DEPENDENT)
_ARGUMENTS = ("overwrite", "workers", "verify", "on")


@command
@click.argument("base", metavar="BASE")
@SRC
@click.argument("dst", metavar="DST")
@STATES
@work_options(*_JOB)
@OPENING
@CATALOG
def patch(
    base: str,
    src: str,
    dst: str,
    states: tuple[str, ...],
    work: Work,
    opening: Opening,
    out: Output,
) -> None:
    """Write SRC as a patch of BASE, at DST.

    The checkpoint at DST has the content of SRC, and stores only what differs from BASE, which must
    stay. BASE and SRC may be of any form, and need not be neighbors. Resumable: if interrupted,
    nothing is visible at DST, and running the same command again continues.
    """
    import ucformat

    chosen = list(states) or None
    if work.dry_run:
        sizes = work.arguments("workers", "verify")
        cost = ucformat.estimate("patch", opening.open(src), dst, chosen, base=base, **sizes)
        print_cost(cost, out)
        return
    begun = time.perf_counter()
    ignore_dependents_of(work.ignored, [dst], out, "patch")
    with work.running("patching", out, f"nothing is committed at {dst}") as progress:
        arguments = work.arguments(*_ARGUMENTS)
        source = opening.open(src)
        ck = ucformat.patch(base, source, dst, chosen, **arguments, progress=progress)
    _print_stored(ck, time.perf_counter() - begun, out)


@command
@SRC
@click.argument("dst", metavar="[DST]", required=False)
@click.option(
    "--fold",
    is_flag=True,
    help="Keep one base: make one patch of the whole checkpoint from which SRC's chain of patches begins.",
)
@work_options(
    *_JOB,
    click.option(
        "--codec",
        type=click.Choice(["blosc", "none"]),
        help="Compress the chunks, or do not.  [default: if SRC stores tensors with a codec]",
    ),
)
@CATALOG
def compact(src: str, dst: str | None, fold: bool, work: Work, out: Output) -> None:  # noqa: FBT001
    """Make SRC, which depends on other checkpoints, whole: in place, or as a new checkpoint at DST.

    In place it keeps its id, and checkpoints that are based on it stay valid; its bases are then no
    longer needed for it. Resumable: if interrupted, SRC is intact, and running the same command
    again continues.
    """
    import ucformat

    if work.dry_run:
        sizes = work.arguments("workers", "verify", "codec")
        print_cost(ucformat.estimate("compact", src, dst, fold=fold, **sizes), out)
        return
    begun = time.perf_counter()
    source = ucformat.open(src)
    before = source.manifest.attempt
    ignore_dependents_of(work.ignored, [source.home if dst is None else dst], out, "compact")
    left = f"{source.url} is intact" if dst is None else f"nothing is committed at {dst}"
    with work.running("compacting", out, left) as progress:
        arguments: dict[str, Any] = work.arguments(*_ARGUMENTS)
        ck = ucformat.compact(
            source, dst, fold=fold, codec=work.codec, **arguments, progress=progress
        )
    is_left = ck.manifest.attempt == before
    if is_left:
        what = "one whole checkpoint at most" if fold else "no other checkpoint"
        out.note(f"{ck.url} depends on {what}: nothing to do")
    _print_stored(ck, time.perf_counter() - begun, out, is_left=is_left)


def _print_stored(ck: Checkpoint, seconds: float, out: Output, *, is_left: bool = False) -> None:
    """Print the place and id of a checkpoint, and what it stores itself.

    Args:
        is_left: nothing was written.
    """
    from ucformat.jobs.patch import stored_bytes

    stored = stored_bytes(ck)
    data = {
        "url": ck.url,
        "id": ck.id,
        "tensors": len(ck.tensors),
        "bytes": stored.plain + stored.referenced,
        "bytes_plain": stored.plain,
        "bytes_written": stored.written,
        "bytes_referenced": stored.referenced,
        "bases": [{"id": base.id, "url": base.url} for base in ck.manifest.bases],
        "seconds": round(seconds, 3),
    }

    def lines() -> Iterator[str]:
        in_bases = f", {bytes_text(stored.referenced)} in bases" if stored.referenced else ""
        done = "stored" if is_left else "written"
        amount = f"{bytes_text(stored.plain)} {done} as {bytes_text(stored.written)}{in_bases}"
        time_taken = "" if is_left else f", in {seconds:.1f} s"
        yield f"{ck.url}  {ck.id}  {plural(len(ck.tensors), 'tensor')}, {amount}{time_taken}"

    out.result(lambda: list(lines()), lambda: data, lambda: [ck.id])
