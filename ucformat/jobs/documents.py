"""The documents beside checkpoints, which hold what the catalog records and the manifest does not; and protections.

A checkpoint that is held, tagged, has an alias, or is needed by others is not removed or replaced.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from pydantic import ValidationError

from ucformat.catalog.document import MAX_REVISION, compose, mark_written, stale
from ucformat.catalog.retention import OWN_KIND, RetentionHold, RetentionRow, needed_by, protections
from ucformat.checkpoint import open_checkpoint
from ucformat.errors import (
    Conflict,
    IntegrityError,
    NotFound,
    PermissionDenied,
    UcformatError,
    UnsupportedError,
    UpgradeNeeded,
)
from ucformat.format.attempts import TRIES, contended, replacing_attempts
from ucformat.format.commit import settle
from ucformat.format.digest import encoded
from ucformat.format.structure import find_manifest
from ucformat.jobs.dependents import dependents_at
from ucformat.jobs.listing import check_removed, is_empty
from ucformat.schema.documents import CATALOG_DOCUMENT, CatalogDoc
from ucformat.schema.values import parsed
from ucformat.settings import load_settings
from ucformat.storage.url import open_store

if TYPE_CHECKING:
    from collections.abc import Collection

    from ucformat.catalog.catalog import Catalog
    from ucformat.catalog.document import Stale
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
        more = f", and of {len(failures) - 1:,} other checkpoints," if len(failures) > 1 else ""
        why = error.message if error.hint is None else f"{error.message} {error.hint}"
        _log.warning(
            "the catalog's document beside %s%s could not be updated: %s", first, more, why
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
    """Read the catalog's document beside a checkpoint; if it cannot be read, warn and return None."""
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
        there, version = _versioned(dst)
        if there is None or there.id != checkpoint:
            _put(dst, encoded(doc), version)
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


def _write_everywhere(catalog: Catalog, checkpoint: Stale) -> dict[str, UcformatError]:
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


def _composed(catalog: Catalog, serial: int, url: str) -> CatalogDoc:
    with catalog.database.reading() as c:
        return compose(c, serial, url)


def _write(catalog: Catalog, serial: int, url: str) -> int:
    """Write a document at one place, with other writers possible; returns the revision that is there now."""
    store = open_store(url)
    for _ in range(TRIES):
        there, version = _versioned(store)
        doc = _composed(catalog, serial, url)
        if there is None:
            if is_empty(store):
                check_removed(store, begun=False)
                if _protects(doc):
                    raise Conflict(
                        "the checkpoint is gone from there",
                        hint="`ucp reindex` makes the catalog know it",
                    )
                return doc.revision  # nothing to keep a document for
            with suppress(IntegrityError, UpgradeNeeded):
                found = find_manifest(store)
                if found is not None and found.id != doc.id:
                    raise _replaced()
        elif there.id != doc.id:
            if open_checkpoint(store).id != doc.id:
                raise _replaced()
        else:
            if there.catalog != doc.catalog or there.revision > doc.revision:
                catalog.import_document(doc.id, there, url)
                doc = _composed(catalog, serial, url)
            if doc.revision <= there.revision <= MAX_REVISION:
                settle(
                    store, CATALOG_DOCUMENT
                )  # its writer may have been killed before it was durable
                _refuse_replacing(store, doc)
                return there.revision
        try:
            _put(store, encoded(doc), version)
        except Conflict:
            continue
        _refuse_replacing(store, doc)
        return doc.revision
    raise contended(store, CATALOG_DOCUMENT)


def _refuse_replacing(store: Store, doc: CatalogDoc) -> None:
    """Raise Conflict if a protected checkpoint is being replaced by a writer that may not have seen the document.

    A writer marks its attempt before it reads the document: so it sees the document, or this sees
    the mark.
    """
    if not _protects(doc):
        return
    if others := replacing_attempts(store):
        found = find_manifest(store)
        if found is None or found.id != doc.id or others - {found.attempt}:
            raise Conflict(
                "the checkpoint there is being replaced, perhaps in spite of this protection"
            )


def _protects(doc: CatalogDoc) -> bool:
    return bool(doc.holds or doc.tags or doc.aliases)


def _replaced() -> Conflict:
    return Conflict(
        "there is another checkpoint there by now", hint="`ucp reindex` makes the catalog know it"
    )


def _versioned(store: Store) -> tuple[CatalogDoc | None, str | None]:
    """The current document, and the version of its file."""
    try:
        data, version = store.read_versioned(CATALOG_DOCUMENT)
    except NotFound:
        return None, None
    return _parse(data, store), version


def _put(store: Store, data: bytes, version: str | None) -> None:
    """Write the document if it is unchanged since it was read."""
    if version is None:
        store.put_if_absent(CATALOG_DOCUMENT, data)
        return
    try:
        store.replace(CATALOG_DOCUMENT, data, version)
    except (
        PermissionDenied,
        UnsupportedError,
    ):  # without conditional writes the last writer wins, so check whether it was this one
        with store.create(CATALOG_DOCUMENT) as out:
            out.write(data)
        store.flush()
        if store.read(CATALOG_DOCUMENT) != data:
            raise Conflict(
                f"{store.url}/{CATALOG_DOCUMENT} was written by another process at the same time"
            ) from None


def refuse_protected(store: Store, there: Manifest, new: str | None) -> None:
    """Raise Conflict if something protects the checkpoint at a place from being replaced.

    The same protections prevent its deletion. If the id stays the same (`new`), only the files are
    replaced, so that only dependents matter.

    Args:
        new: the id of the checkpoint that replaces it; None if it is new.
    """
    if there.id == new:
        why = tuple(
            dict.fromkeys(
                (*_beside(store, there.id), *_known(store.url, there.id, annotations=False))
            )
        )
    else:
        why = protections_of(store.url, there.id)
    if why:
        raise Conflict(
            f"the checkpoint {there.id} at {store.url} is not replaced: {'; '.join(why)}",
            hint="choose another place, or remove the protections (docs/retention.md)",
        )


def _beside(store: Store, checkpoint: str) -> tuple[str, ...]:
    """The dependents that are recorded beside the files, as reasons."""
    return tuple(
        needed_by([dependent for dependent in dependents_at(store) if dependent != checkpoint])
    )


def protections_of(url: str, checkpoint: str, *, known: bool = True) -> tuple[str, ...]:
    """The reasons why a checkpoint must not be removed, from its documents and the catalog."""
    store = open_store(url)
    try:
        doc = read_document(store)
    except IntegrityError as error:
        return (error.message,)
    found = _beside(store, checkpoint)
    now = datetime.now(UTC)
    if doc is not None and doc.id == checkpoint:
        row = RetentionRow(
            *(0, checkpoint, OWN_KIND, "committed", None, None, now, 0),
            holds=tuple(RetentionHold(h.reason, h.until) for h in doc.holds),
            aliases=tuple(a.name for a in doc.aliases),
            tags=tuple(t.name for t in doc.tags),
        )
        found = (*protections(row, now), *found)
    return tuple(dict.fromkeys((*found, *_known(url, checkpoint)))) if known else found


def _known(url: str, checkpoint: str, *, annotations: bool = True) -> tuple[str, ...]:
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
