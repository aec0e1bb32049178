"""Writes the documents beside checkpoints: what the catalog knows of each and its manifest does not."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pydantic import ValidationError

from ucformat.catalog.document import compose, stale, written
from ucformat.errors import Conflict, NotFound, UcformatError
from ucformat.schema.catalog_document import CATALOG_DOCUMENT, CatalogDoc
from ucformat.storage.url import open_store

if TYPE_CHECKING:
    from ucformat.catalog.catalog import Catalog
    from ucformat.catalog.document import Stale
    from ucformat.storage.base import Store

__all__ = ["read_document", "write_documents"]

_TRIES = 10
_AT_ONCE = 20  # documents that are brought up to date along with one's own
_log = logging.getLogger("ucformat")


def write_documents(catalog: Catalog, limit: int | None = _AT_ONCE) -> int:
    """Bring documents up to date, the newest checkpoints first; how many were due.

    One that cannot be written is a warning, and due again the next time.
    """
    with catalog.database.reading() as c:
        due = stale(c, limit)
    for checkpoint in due:
        for url in checkpoint.urls:
            try:
                _write(catalog, checkpoint, open_store(url))
            except UcformatError as error:
                _log.warning("what the catalog knows of %s is not kept beside it: %s", url, error.message)
    return len(due)


def read_document(store: Store) -> CatalogDoc | None:
    """The document of a checkpoint; None if there is none, or none of ours."""
    try:
        return _parse(store.read(CATALOG_DOCUMENT), store.url)
    except NotFound:
        return None


def _parse(data: bytes, url: str) -> CatalogDoc | None:
    try:
        return CatalogDoc.model_validate_json(data)
    except ValidationError:
        _log.warning("%s/%s cannot be read, and is left alone", url, CATALOG_DOCUMENT)
        return None


def _composed(catalog: Catalog, serial: int) -> CatalogDoc:
    with catalog.database.reading() as c:
        return compose(c, serial)


def _write(catalog: Catalog, checkpoint: Stale, store: Store) -> None:
    """Write one document at one place, whoever else writes it at the same time."""
    for _ in range(_TRIES):
        try:
            data, version = store.read_versioned(CATALOG_DOCUMENT)
        except NotFound:
            data, version = b"", ""
        there = _parse(data, store.url) if data else None
        if data and there is None:
            return
        if not data and next(iter(store.list()), None) is None:
            return  # the checkpoint is gone: nothing to keep a document for
        doc = _composed(catalog, checkpoint.serial)
        if there is not None and (there.catalog != doc.catalog or there.revision > doc.revision):
            catalog.absorb(doc.id, there)
            doc = _composed(catalog, checkpoint.serial)
        if there is None or there.catalog != doc.catalog or there.revision < doc.revision:
            made = doc.model_dump_json(indent=1).encode()
            try:
                if data:
                    store.replace(CATALOG_DOCUMENT, made, version)
                else:
                    store.put_if_absent(CATALOG_DOCUMENT, made)
            except Conflict:
                continue
        catalog.database.write(lambda c, r=doc.revision: written(c, checkpoint.serial, r))  # type: ignore[misc]
        return
    raise Conflict(f"{store.url}/{CATALOG_DOCUMENT} was changed again and again by others", hint="try again later")
