"""A catalog for a moment: comparing checkpoints that the catalog does not know, as it compares those it does."""

from __future__ import annotations

from contextlib import suppress
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ucformat.catalog.catalog import Catalog
    from ucformat.catalog.diff import Diff

__all__ = ["diff_opened"]


def diff_opened(a: str, b: str, known: Catalog | None, options: dict[str, Any] | None) -> Diff:
    """In what two checkpoints differ, from their manifests; with the metrics that the catalog `known` has of either."""
    from ucformat.catalog.catalog import Catalog

    with TemporaryDirectory(prefix="ucformat-") as folder, Catalog(f"{folder}/catalog.db") as scratch:
        return scratch.diff(*(_note(ref, scratch, known, options) for ref in (a, b)))


def _note(ref: str, scratch: Catalog, known: Catalog | None, options: dict[str, Any] | None) -> str:
    """Record a checkpoint, which is opened for that, in the scratch catalog; its id."""
    from ucformat.cli.source_options import open_any
    from ucformat.errors import NotFound

    ck = open_any(ref, options)
    manifest = ck.manifest.model_copy(update={"id": ck.id})
    if known is not None:
        with suppress(NotFound):
            manifest = manifest.model_copy(update={"metrics": dict(known.get(ck.id).metrics)})
    scratch.record(manifest, ck.home, kind=ck.kind)
    return ck.id
