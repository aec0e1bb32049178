"""Telling the catalog what happened, without ever failing what happened: it can be told again by `ucp reindex`."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ucformat._version import __version__
from ucformat.errors import NotFound

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucformat.catalog.catalog import Catalog
    from ucformat.checkpoint import Checkpoint
    from ucformat.jobs.verify import Report
    from ucformat.schema.manifest import Manifest

__all__ = ["keep_documents", "record_commit", "record_commits", "record_verification"]

_log = logging.getLogger("ucformat")


def record_commits() -> None:
    """Have every commit of this process recorded."""
    from ucformat.format.commit import on_commit

    if record_commit not in on_commit:
        on_commit.append(record_commit)


def keep_documents() -> None:
    """Have every change that is made through a catalog written beside the checkpoints."""
    from ucformat.catalog.catalog import on_change
    from ucformat.jobs.documents import write_documents

    if write_documents not in on_change:
        on_change.append(write_documents)


def record_commit(url: str, manifest: Manifest) -> None:
    """Record a checkpoint that was just committed, in the catalog that the settings name."""
    with _catalog(f"the checkpoint {url} is committed, but not in the catalog", f"`ucp reindex {url}`") as catalog:
        if catalog is not None:
            catalog.record(manifest, url)


def record_verification(ck: Checkpoint, report: Report) -> None:
    """Note what a verification found, if the catalog knows the checkpoint."""
    with _catalog(f"the verification of {ck.url} is not in the catalog", "`ucp verify` again") as catalog:
        if catalog is None:
            return
        try:
            catalog.verified(
                ck.id,
                url=ck.home,
                ok=bool(report),
                bytes_verified=report.bytes_verified,
                bytes_unverified=report.bytes_unverified,
                problems=[str(p) for p in report.problems],
                tool=f"ucformat {__version__}",
            )
        except NotFound:
            return


@contextmanager
def _catalog(failed: str, remedy: str) -> Iterator[Catalog | None]:
    """The catalog of the settings, None if it is off; whatever goes wrong in the block becomes a warning."""
    try:
        from ucformat.catalog.catalog import Catalog
        from ucformat.settings import load_settings

        url = load_settings().catalog_url()
        if url is None:
            yield None
            return
        with Catalog(url) as catalog:
            yield catalog
    except Exception as error:  # noqa: BLE001 - the checkpoint is committed, whatever the catalog says
        _log.warning("%s: %s; %s makes up for it", failed, getattr(error, "message", error), remedy)
