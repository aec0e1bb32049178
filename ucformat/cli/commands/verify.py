"""`ucp verify`: checking every byte against checksums."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ucformat.cli.ui.options import CATALOG, SOURCE, SRC, command
from ucformat.cli.ui.output import Heading
from ucformat.cli.ui.text import bytes_text, plural
from ucformat.cli.ui.where import DRY_RUN, ON, Work, print_cost, work_options, workers_option

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucformat.cli.ui.output import Output
    from ucformat.jobs.run import Report


@command
@SRC
@work_options(
    workers_option("files to read"),
    ON,
    click.option(
        "--part",
        metavar="I/N",
        help="Verify one of N parts, I from 0 on; parts are cut by tensors.",
    ),
    DRY_RUN,
)
@SOURCE
@CATALOG
def verify(src: str, work: Work, options: dict[str, Any] | None, out: Output) -> None:
    """Read every byte of a checkpoint and check it against its checksums and digests.

    Prints one line for each problem and exits with 5 if there are any. Files of a foreign
    checkpoint without checksums are only checked to exist.
    """
    import ucformat
    from ucformat.errors import ChecksumError

    if work.dry_run:
        print_cost(
            ucformat.estimate("verify", ucformat.open(src, options=options), workers=work.workers),
            out,
        )
        return
    with out.progress("verifying") as progress:
        report = ucformat.verify(
            src, work.workers, options=options, on=work.where, progress=progress
        )
    out.result(lambda: _describe(report), lambda: _data(report), lambda: map(str, report.problems))
    if not report:
        raise ChecksumError(
            f"{report.url} is damaged: {plural(len(report.problems), 'problem')}",
            hint="restore the files named in brackets from another copy of the checkpoint",
        )


def _describe(report: Report) -> Iterator[str]:
    if report.problems:
        yield from map(str, report.problems)
        return
    yield Heading(
        f"part {report.part} of {report.url} is intact"
        if report.part
        else f"{report.url} is intact"
    )
    yield f"  {plural(report.tensors, 'tensor')}"
    if report.bytes_verified or not report.bytes_unverified:
        yield f"  {bytes_text(report.bytes_verified)} verified"
    if report.bytes_unverified:
        yield f"  {bytes_text(report.bytes_unverified)} without checksums"
    if report.part_of:
        yield f"  only a part of a checkpoint: {report.part_of}"
    for place in report.unprotected:
        yield f"  unprotected: there is no record in {place} that its files are needed"


def _data(report: Report) -> dict[str, Any]:
    return {
        "url": report.url,
        "kind": report.kind,
        "ok": bool(report),
        "tensors": report.tensors,
        "bytes_verified": report.bytes_verified,
        "bytes_unverified": report.bytes_unverified,
        "unprotected": list(report.unprotected),
        "part": report.part or None,
        "part_of": report.part_of or None,
        "problems": [
            {
                "file": p.file,
                "reason": p.reason,
                "name": p.name,
                "state": p.state,
                "chunk": None if p.chunk is None else list(p.chunk),
            }
            for p in report.problems
        ],
    }
