"""What may not be replaced: checkpoints that are held, tagged, have an alias, or are needed by others."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ucformat.catalog.retention import OURS, Held, Row, protections
from ucformat.errors import Conflict, IntegrityError, NotACheckpoint, NotFound, UpgradeNeeded
from ucformat.format.commit import read_manifest
from ucformat.settings import load_settings
from ucformat.storage.url import open_store

if TYPE_CHECKING:
    from ucformat.storage.base import Store

__all__ = ["protections_of", "refuse_protected"]


def refuse_protected(store: Store) -> None:
    """Conflict where a committed checkpoint lies that something protects."""
    try:
        there, _ = read_manifest(store)
    except (NotACheckpoint, IntegrityError, UpgradeNeeded):  # nothing to protect, or what `begin` refuses
        return
    if why := protections_of(store.url, there.id):
        raise Conflict(
            f"the checkpoint {there.id} at {store.url} is not replaced: {'; '.join(why)}",
            hint="choose another place, or end what protects it (docs/retention.md)",
        )


def protections_of(url: str, checkpoint: str, *, known: bool = True) -> tuple[str, ...]:
    """Why nobody may remove a checkpoint: what catalogs wrote beside it, and if asked for, what ours knows of it."""
    from ucformat.jobs.documents import read_document

    try:
        doc = read_document(open_store(url))
    except IntegrityError as error:
        return (error.message,)
    found: tuple[str, ...] = ()
    now = datetime.now(UTC)
    if doc is not None and doc.id == checkpoint:
        row = Row(
            *(0, checkpoint, OURS, "committed", None, None, now, 0),
            holds=tuple(Held(h.reason, h.until) for h in doc.holds),
            aliases=tuple(a.name for a in doc.aliases),
            tags=tuple(t.name for t in doc.tags),
        )
        found = protections(row, now)
    return found + _known_protections(checkpoint) if known else found


def _known_protections(checkpoint: str) -> tuple[str, ...]:
    url = load_settings().catalog_url()
    if url is None:
        return ()
    from ucformat.catalog.catalog import Catalog
    from ucformat.catalog.deletion import retention_rows
    from ucformat.catalog.refs import Ref, resolve

    try:
        with Catalog(url, read_only=True) as catalog, catalog.database.reading() as c:
            serial = resolve(c, Ref(checkpoint, id=checkpoint))
            now = datetime.now(UTC)
            return tuple(why for row in retention_rows(c, now, serials=[serial]) for why in protections(row, now))
    except NotFound:
        return ()
    except Exception as error:  # noqa: BLE001 - whatever the database says
        return (f"the catalog cannot be asked: {getattr(error, 'message', error)}",)
