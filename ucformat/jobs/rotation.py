"""Removing a checkpoint at once, as a training does that keeps only a few: here and in the catalog."""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING

from ucformat.catalog.refs import same_url
from ucformat.errors import NotACheckpoint
from ucformat.format.structure import read_manifest
from ucformat.jobs.documents import protections_of
from ucformat.jobs.record import with_catalog
from ucformat.jobs.removal import remove
from ucformat.storage.url import open_store

if TYPE_CHECKING:
    from ucformat.catalog.catalog import Catalog

_log = logging.getLogger("ucformat")


def discard(url: str) -> bool:
    """Remove a checkpoint, and its place from the catalog, unless it is protected, which is a warning.

    Returns whether it is gone.
    """
    store = open_store(url)
    try:
        manifest, _ = read_manifest(store)
    except NotACheckpoint:
        return True  # already removed
    reasons = protections_of(store.url, manifest.id) or tuple(f"needed by {d}" for d in remove(store, manifest.id))
    if reasons:
        _warn(store.url, "; ".join(reasons))
        return False

    def forget(catalog: Catalog) -> None:
        catalog.forget([place for place in catalog.places(store.url) if place.url == same_url(store.url)])

    with_catalog(
        forget, f"{store.url} was removed, but not from the catalog", f"run `ucp reindex {store.url} --forget`"
    )
    return True


@cache
def _warn(url: str, reasons: str) -> None:
    """Warn once: a training tries again after each save."""
    _log.warning("%s is not removed: %s", url, reasons)
