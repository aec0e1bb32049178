"""What may not be replaced: checkpoints that are held, tagged, have an alias, or are needed by others."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ucformat.catalog.retention import OURS, Held, Row, needed_by, protections
from ucformat.errors import Conflict, IntegrityError, NotFound
from ucformat.jobs.dependents import dependents_at
from ucformat.jobs.documents import read_document
from ucformat.settings import load_settings
from ucformat.storage.url import open_store

if TYPE_CHECKING:
    from ucformat.schema.manifest import Manifest
    from ucformat.storage.base import Store

__all__ = ["protections_of", "refuse_protected"]


def refuse_protected(store: Store, there: Manifest, new: str | None) -> None:
    """Conflict where something protects the checkpoint at a place from being replaced.

    The same as keeps it from being deleted. By what has the id `new`, the checkpoint itself in another form, only the
    files are replaced, which others may need.
    """
    if there.id == new:
        why = tuple(dict.fromkeys((*_beside(store, there.id), *_known(store.url, there.id, said=False))))
    else:
        why = protections_of(store.url, there.id)
    if why:
        raise Conflict(
            f"the checkpoint {there.id} at {store.url} is not replaced: {'; '.join(why)}",
            hint="choose another place, or end what protects it (docs/retention.md)",
        )


def _beside(store: Store, checkpoint: str) -> tuple[str, ...]:
    """Who needs files of a place, as is said beside them."""
    return tuple(needed_by([who for who in dependents_at(store) if who != checkpoint]))


def protections_of(url: str, checkpoint: str, *, known: bool = True) -> tuple[str, ...]:
    """Why nobody may remove a checkpoint: what is said beside it, and if asked for, what our catalog knows of it."""
    store = open_store(url)
    try:
        doc = read_document(store)
    except IntegrityError as error:
        return (error.message,)
    found = _beside(store, checkpoint)
    now = datetime.now(UTC)
    if doc is not None and doc.id == checkpoint:
        row = Row(
            *(0, checkpoint, OURS, "committed", None, None, now, 0),
            holds=tuple(Held(h.reason, h.until) for h in doc.holds),
            aliases=tuple(a.name for a in doc.aliases),
            tags=tuple(t.name for t in doc.tags),
        )
        found = (*protections(row, now), *found)
    return tuple(dict.fromkeys((*found, *_known(url, checkpoint)))) if known else found


def _known(url: str, checkpoint: str, *, said: bool = True) -> tuple[str, ...]:
    """What the catalog knows, and its fault where it cannot be asked; without `said` only who needs the files."""
    catalog_url = load_settings().catalog_url()
    if catalog_url is None:
        return ()
    from ucformat.catalog.catalog import Catalog

    try:
        with Catalog(catalog_url, read_only=True) as catalog:
            return catalog.protections(checkpoint, url, said=said)
    except NotFound:  # no catalog yet
        return ()
    except Exception as error:  # noqa: BLE001 - whatever the database says
        return (f"the catalog cannot be asked: {getattr(error, 'message', error)}",)
