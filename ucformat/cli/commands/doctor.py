"""`ucp doctor`: the capabilities of a storage location."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ucformat.cli.ui.options import command
from ucformat.cli.ui.output import Heading, terminal_width
from ucformat.cli.ui.text import field

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucformat.cli.ui.output import Output
    from ucformat.jobs.doctor import Diagnosis


@command
@click.argument("url", metavar="URL")
@click.option(
    "--read-only",
    is_flag=True,
    help="Write nothing; only check whether the files there can be read.",
)
def doctor(url: str, read_only: bool, out: Output) -> None:  # noqa: FBT001
    """Test the capabilities of a storage location, and show what they mean for checkpoints there.

    URL is a path or URL, which need not exist. About 30 MiB, on a disk 100, are written to a folder
    `ucf-doctor-…` and removed again. The measured speed is kept for the estimates of --dry-run, and
    whether reads that bypass the page cache are faster, which large ones then do. Exits with 1
    unless checkpoints can be read and committed there; with --read-only, unless the files there can
    be read.
    """
    import ucformat
    from ucformat.cli.program import interruptible

    with interruptible("interrupted: the test files were removed"):
        diagnosis = ucformat.doctor(url, read_only=read_only)
    bad = [p.name for p in diagnosis.probes if p.status != "ok"]
    out.result(lambda: _describe(diagnosis), lambda: _data(diagnosis), lambda: bad or ["ok"])
    if not diagnosis:
        raise click.exceptions.Exit(1)


def _describe(diagnosis: Diagnosis) -> Iterator[str]:
    width = terminal_width()
    yield Heading(diagnosis.url)
    access = diagnosis.access
    labels = {
        "endpoint": "endpoint",
        "region": "region",
        "credentials": "keys from",
        "cache": "cache",
    }
    for label, text in ((label, getattr(access, name)) for name, label in labels.items()):
        if text is not None:
            yield from field(label, text, width)
    if diagnosis.latency_ms is not None:
        yield from field("latency", f"{diagnosis.latency_ms:.3g} ms for a small read", width)
    if diagnosis.mb_per_s is not None:
        yield from field("one read", f"{diagnosis.mb_per_s:,.0f} MB/s", width)
    if diagnosis.write_mb_per_s is not None:
        yield from field("one write", f"{diagnosis.write_mb_per_s:,.0f} MB/s", width)
    if diagnosis.disk_mb_per_s is not None:
        speed = (
            f"{diagnosis.disk_mb_per_s:,.0f} MB/s, {diagnosis.direct_mb_per_s:,.0f} past the page "
            f"cache, which large reads {'bypass' if diagnosis.reads_direct else 'use'}"
        )
        yield from field("from disk", speed, width)
    yield ""
    longest = max(len(p.name) for p in diagnosis.probes)
    for probe in diagnosis.probes:
        yield f"  {probe.status:<7}  {probe.name:<{longest}}  {probe.text}"
    yield ""
    yield from _verdict(diagnosis)


def _verdict(diagnosis: Diagnosis) -> Iterator[str]:
    if diagnosis.can_read is None:
        yield "  it is unknown whether checkpoints there can be read: there are none"
    else:
        yield f"  checkpoints there can{'' if diagnosis.can_read else 'not'} be read"
    if diagnosis.can_save is not None:
        yield f"  checkpoints can{'' if diagnosis.can_save else 'not'} be saved there"
    if diagnosis.can_overwrite is not None:
        safe = "safe" if diagnosis.can_overwrite else "not safe"
        yield f"  overwrite=True (--overwrite) is {safe} there"


def _data(diagnosis: Diagnosis) -> dict[str, Any]:
    def rounded(value: float | None) -> float | None:
        return None if value is None else round(value, 3)

    return {
        "url": diagnosis.url,
        "ok": bool(diagnosis),
        "read_only": diagnosis.read_only,
        "can_read": diagnosis.can_read,
        "can_save": diagnosis.can_save,
        "can_overwrite": diagnosis.can_overwrite,
        "endpoint": diagnosis.access.endpoint,
        "region": diagnosis.access.region,
        "credentials": diagnosis.access.credentials,
        "cache": diagnosis.access.cache,
        "latency_ms": rounded(diagnosis.latency_ms),
        "mb_per_s": rounded(diagnosis.mb_per_s),
        "write_mb_per_s": rounded(diagnosis.write_mb_per_s),
        "disk_mb_per_s": rounded(diagnosis.disk_mb_per_s),
        "direct_mb_per_s": rounded(diagnosis.direct_mb_per_s),
        "reads_direct": diagnosis.reads_direct,
        "probes": [{"name": p.name, "status": p.status, "text": p.text} for p in diagnosis.probes],
    }
