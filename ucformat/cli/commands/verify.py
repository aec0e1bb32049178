"""`ucp verify`: checking every byte against checksums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from ucformat.cli.ui.options import CATALOG, SOURCE, SRC, bundle, command
from ucformat.cli.ui.output import Heading
from ucformat.cli.ui.where import DRY_RUN, ON, Work, print_cost, work_options, workers_option
from ucformat.errors import UsageError
from ucformat.texts import bytes_text, plural

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucformat.checkpoint import Checkpoint
    from ucformat.cli.ui.output import Output
    from ucformat.jobs.run import Report


@dataclass(frozen=True)
class _SignedBy:
    """Whose signature the manifest must have."""

    signed_by: tuple[str, ...]
    signature: str | None
    signature_only: bool


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
@bundle(
    "by",
    _SignedBy,
    click.option(
        "--signed-by",
        metavar="WHO",
        multiple=True,
        help="First check that the manifest is signed by WHO: the file of a public key or of an "
        "authority's certificates, sigstore:ISSUER,IDENTITY, or `trusted`. May be repeated.",
    ),
    click.option(
        "--signature", metavar="FILE", help="The signature.  [default: beside the manifest]"
    ),
    click.option("--signature-only", is_flag=True, help="Check the signature, and read no data."),
)
@SOURCE
@CATALOG
def verify(
    src: str, work: Work, by: _SignedBy, options: dict[str, Any] | None, out: Output
) -> None:
    """Read every byte of a checkpoint and check it against its checksums and digests.

    Prints one line for each problem and exits with 5 if there are any. Files of a foreign
    checkpoint without checksums are only checked to exist. Exits with 6 if the manifest is not
    signed as --signed-by demands.
    """
    import ucformat
    from ucformat.errors import ChecksumError

    if work.dry_run:
        print_cost(
            ucformat.estimate("verify", ucformat.open(src, options=options), workers=work.workers),
            out,
        )
        return
    if not by.signed_by and (by.signature or by.signature_only):
        raise UsageError("a signature is checked only with --signed-by")
    if by.signature_only:
        _check_signature(ucformat.open(src, options=options), by, out)
        return
    with out.progress("verifying") as progress:
        report = ucformat.verify(
            src,
            work.workers,
            options=options,
            signed_by=by.signed_by or None,
            signature=by.signature,
            on=work.where,
            progress=progress,
        )
    out.result(lambda: _describe(report), lambda: _data(report), lambda: map(str, report.problems))
    if not report:
        what = {"bases" if p.kind == "base" else "files" for p in report.problems}
        raise ChecksumError(
            f"{report.url} is damaged: {plural(len(report.problems), 'problem')}",
            hint=f"restore the {' and '.join(sorted(what, reverse=True))} named in brackets from "
            "another copy of the checkpoint",
        )


def _check_signature(ck: Checkpoint, by: _SignedBy, out: Output) -> None:
    from ucformat.signatures import check_signed

    signed = check_signed(ck, by.signed_by, by.signature)
    data = {"url": ck.url, "id": ck.id, "signed_by": signed.by}
    out.result(
        lambda: [f"the manifest of {ck.url} is signed by {signed.by}; its files were not read"],
        lambda: data,
        lambda: [signed.by],
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
    if report.signed_by:
        besides = plural(report.signed_files, "file") if report.signed_files else ""
        yield f"  signed by {report.signed_by}: the manifest" + (
            f" and {besides}" if besides else ""
        )
    yield f"  {plural(report.tensors, 'tensor')}"
    if report.bytes_verified or not report.bytes_unverified:
        yield f"  {bytes_text(report.bytes_verified)} verified"
    if report.bytes_unverified:
        yield f"  {bytes_text(report.bytes_unverified)} without checksums"
    if report.part_of:
        yield f"  only a part of a checkpoint: {report.part_of}"
    for place, number in report.bases.items():
        yield f"  {plural(number, 'tensor')} of them in the base {place}"
    if report.older:
        yield f"  {plural(report.older, 'tensor')} of them older than the checkpoint's step: `ucp show`"
    for place in report.unprotected:
        yield f"  unprotected: there is no record in {place} that its files are needed"


def _data(report: Report) -> dict[str, Any]:
    return {
        "url": report.url,
        "kind": report.kind,
        "ok": bool(report),
        "signed_by": report.signed_by or None,
        "signed_files": report.signed_files,
        "tensors": report.tensors,
        "bytes_verified": report.bytes_verified,
        "bytes_unverified": report.bytes_unverified,
        "unprotected": list(report.unprotected),
        "bases": dict(report.bases),
        "older": report.older,
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
