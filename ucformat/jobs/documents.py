"""The documents beside checkpoints, which hold what the catalog records and the manifest does not; and protections.

A checkpoint that is held, tagged, has an alias, or is needed by others is not removed or replaced.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING

from pydantic import ValidationError

from ucformat.catalog.document import MAX_REVISION, compose, mark_written, reasons_at, stale
from ucformat.catalog.refs import Ref, resolve
from ucformat.checkpoint import open_checkpoint
from ucformat.errors import (
    Conflict,
    IntegrityError,
    NotFound,
    UcformatError,
    UpgradeNeeded,
)
from ucformat.format.attempts import TRIES, contended, replacing_attempts
from ucformat.format.commit import settle
from ucformat.format.digest import encoded
from ucformat.format.structure import find_manifest
from ucformat.jobs.dependents import (
    copy_kept,
    keep,
    put_version,
    read_versioned,
    reasons_beside,
    take_over,
)
from ucformat.jobs.listing import check_removed, is_empty
from ucformat.schema import CATALOG_DOCUMENT, TOMBSTONE
from ucformat.schema.documents import CatalogDoc
from ucformat.schema.values import parsed
from ucformat.settings import load_settings
from ucformat.storage.base import exists
from ucformat.storage.url import open_store

if TYPE_CHECKING:
    from collections.abc import Collection

    from ucformat.catalog.catalog import Catalog
    from ucformat.catalog.document import StaleDocument
    from ucformat.schema.documents import ReasonDoc
    from ucformat.schema.manifest import Manifest
    from ucformat.storage.base import Store

_AT_ONCE = 20  # documents that are brought up to date along with those of a change
_log = logging.getLogger("ucformat")


def write_documents(
    catalog: Catalog, limit: int | None = _AT_ONCE, *, changed: Collection[int] = ()
) -> int:
    """Bring documents up to date: those of changed checkpoints, and the newest others.

    A document that cannot be written is a warning, and due again the next time. Returns the number
    that were due.

    Args:
        limit: the most documents besides those that changed (default 20; None: all).
    """
    with catalog.database.reading() as c:
        due = stale(c, limit, changed)
    failures = {
        url: error
        for checkpoint in due
        for url, error in _write_everywhere(catalog, checkpoint).items()
    }
    if failures:
        first, error = min(failures.items(), key=lambda failure: failure[0])
        others = f", and of {len(failures) - 1:,} other checkpoints," if len(failures) > 1 else ""
        why = error.message if error.hint is None else f"{error.message} ({error.hint})"
        _log.warning(
            "the catalog's document beside %s%s could not be updated: %s", first, others, why
        )
    return len(due)


def read_document(store: Store) -> CatalogDoc | None:
    """Read the catalog's document beside a checkpoint; None if there is none."""
    try:
        data = store.read(CATALOG_DOCUMENT)
    except NotFound:
        return None
    return _parse(data, store)


def find_document(store: Store) -> CatalogDoc | None:
    """Read the catalog's document beside a checkpoint; None, and a warning, if that fails."""
    try:
        return read_document(store)
    except UcformatError as error:
        _log.warning("%s", error.message)
        return None


def copy_document(src: Store, dst: Store, checkpoint: str) -> None:
    """Copy the catalog's document beside a checkpoint to a copy that has none; failures are warnings.

    The document of a deleted checkpoint is not copied: the copy would be purged.
    """
    try:
        doc = find_document(src)
        if doc is None or doc.id != checkpoint or doc.deleted is not None:
            return
        existing, version = _versioned(dst)
        if existing is None or existing.id != checkpoint:
            put_version(dst, CATALOG_DOCUMENT, encoded(doc), version)
            copy_kept(src, dst)
    except UcformatError as error:
        _log.warning("the catalog's document was not copied to %s: %s", dst.url, error.message)


def _parse(data: bytes, store: Store) -> CatalogDoc:
    try:
        return parsed(CatalogDoc, data)
    except ValueError as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise IntegrityError(
            f"{store.url}/{CATALOG_DOCUMENT} cannot be read, and is left alone: {reason}",
            hint="a newer ucformat may be able to read it; otherwise move it away",
        ) from None


def _write_everywhere(catalog: Catalog, checkpoint: StaleDocument) -> dict[str, UcformatError]:
    """Write the document of a checkpoint in all its places; returns the failures."""
    revisions, failures = [], {}
    for url in checkpoint.urls:
        try:
            revisions.append(_write(catalog, checkpoint.serial, url))
        except UcformatError as error:
            failures[url] = error
    if revisions and len(revisions) == len(checkpoint.urls):
        catalog.database.write(lambda c: mark_written(c, checkpoint.serial, min(revisions)))
    return failures


def take_over_document(catalog: Catalog, checkpoint: str, url: str) -> None:
    """Keep at a place what a trusted document there says, instead of the catalogs that said it."""
    with catalog.database.reading() as c:
        serial = resolve(c, Ref(checkpoint, id=checkpoint))
    store = open_store(url)
    doc, reasons = _composed(catalog, serial, url)
    try:
        _keep(store, doc, reasons)
        take_over(store, doc.catalog, reasons)
    except UcformatError as error:
        _log.warning("other catalogs still keep %s: %s", url, error.message)


def _composed(catalog: Catalog, serial: int, url: str) -> tuple[CatalogDoc, tuple[ReasonDoc, ...]]:
    """The document for a place, and why the catalog keeps the checkpoint there."""
    with catalog.database.reading() as c:
        return compose(c, serial, url), reasons_at(c, serial, url)


def _write(catalog: Catalog, serial: int, url: str) -> int:
    """Write a document at one place, with other writers possible; returns the revision that is there now."""
    store = open_store(url)
    for _ in range(TRIES):
        existing, version = _versioned(store)
        doc, reasons = _composed(catalog, serial, url)
        if existing is None:
            if is_empty(store):
                check_removed(store, begun=False)
                if reasons:
                    raise Conflict(
                        "the checkpoint is gone from there",
                        hint="`ucp reindex` makes the catalog know it",
                    )
                return doc.revision  # nothing to keep a document for
            with suppress(IntegrityError, UpgradeNeeded):
                manifest = find_manifest(store)
                if manifest is not None and manifest.id != doc.id:
                    raise _replaced()
        elif existing.id != doc.id:
            if open_checkpoint(store).id != doc.id:
                raise _replaced()
        else:
            if existing.catalog != doc.catalog or existing.revision > doc.revision:
                catalog.import_document(doc.id, existing, url)
                doc, reasons = _composed(catalog, serial, url)
            if doc.revision <= existing.revision <= MAX_REVISION:
                # its writer may have been killed before it was durable
                settle(store, CATALOG_DOCUMENT)
                _keep(store, doc, reasons)
                return existing.revision
        try:
            put_version(store, CATALOG_DOCUMENT, encoded(doc), version)
        except Conflict:
            continue
        _keep(store, doc, reasons)
        return doc.revision
    raise contended(store, CATALOG_DOCUMENT)


def _keep(store: Store, doc: CatalogDoc, reasons: tuple[ReasonDoc, ...]) -> None:
    """Record beside a checkpoint that the catalog keeps it, or no longer does.

    Raises:
        Conflict: it is being removed or replaced by a process that may not have seen the record.
            Such a process marks that before it reads the records: so it sees this one, or this sees
            the mark.
    """
    keep(store, doc.id, doc.catalog, reasons, doc.revision)
    if not reasons:
        return
    if exists(store, TOMBSTONE):
        raise Conflict("the checkpoint there is being removed, perhaps in spite of this protection")
    if others := replacing_attempts(store):
        manifest = find_manifest(store)
        if manifest is None or manifest.id != doc.id or others - {manifest.attempt}:
            raise Conflict(
                "the checkpoint there is being replaced, perhaps in spite of this protection"
            )


def _replaced() -> Conflict:
    return Conflict(
        "there is another checkpoint there by now", hint="`ucp reindex` makes the catalog know it"
    )


def _versioned(store: Store) -> tuple[CatalogDoc | None, str | None]:
    """The current document, and the version of its file."""
    data, version = read_versioned(store, CATALOG_DOCUMENT)
    return None if data is None else _parse(data, store), version


def refuse_protected(store: Store, there: Manifest, new: str | None) -> None:
    """Raise Conflict if something protects the checkpoint at a place from being replaced.

    The same protections prevent its deletion. If the id stays the same (`new`), only the files are
    replaced, so that only dependents matter.
    """
    if why := protections_of(store.url, there.id, annotations=there.id != new):
        raise Conflict(
            f"the checkpoint {there.id} at {store.url} is not replaced: {'; '.join(why)}",
            hint="choose another place, or remove the protections (docs/retention.md)",
        )


def protections_of(
    url: str, checkpoint: str, *, known: bool = True, annotations: bool = True
) -> tuple[str, ...]:
    """The reasons why a checkpoint must not be removed: the records beside it, and the rows of the catalog.

    Args:
        known: whether the catalog of the settings is asked (default: yes).
        annotations: whether holds, tags and aliases count, not only who needs the files (default:
            yes).
    """
    beside = reasons_beside(open_store(url), checkpoint, annotations=annotations).values()
    rows = _protections_in_catalog(url, checkpoint, annotations=annotations) if known else ()
    return tuple(dict.fromkeys((*chain.from_iterable(beside), *rows)))


def _protections_in_catalog(
    url: str, checkpoint: str, *, annotations: bool = True
) -> tuple[str, ...]:
    """The reasons in the catalog, or its error if it is unavailable; without `annotations` only the dependents."""
    catalog_url = load_settings().catalog_url()
    if catalog_url is None:
        return ()
    from ucformat.catalog.catalog import Catalog

    try:
        with Catalog(catalog_url, read_only=True) as catalog:
            return catalog.protections(checkpoint, url, annotations=annotations)
    except NotFound:  # no catalog yet
        return ()
    except Exception as error:  # noqa: BLE001 - any error of the database
        return (f"the catalog is unavailable: {getattr(error, 'message', error)}",)
