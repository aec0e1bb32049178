"""Removes one checkpoint from one place: interrupted at any instant, it is whole, or the removal is resumable.

A tombstone names the attempt that is removed. It is written first and deleted last; between the two
the manifest is deleted before all other files. After the tombstone is written, and before the
manifest is deleted, the dependents are listed (`jobs/dependents.py`): if there is one, the
tombstone is deleted again. Concurrent removals of a checkpoint coordinate by the tombstone's stage.
"""

from __future__ import annotations

import errno
import hashlib
import logging
from contextlib import suppress
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING

from ucformat.catalog.refs import same_url
from ucformat.catalog.stamp import make_stamp
from ucformat.errors import (
    Conflict,
    IntegrityError,
    NotACheckpoint,
    NotFound,
    PermissionDenied,
    UcformatError,
    UnsupportedError,
)
from ucformat.format.attempts import TRIES, contended, refuse_others
from ucformat.format.commit import abandon
from ucformat.format.digest import encoded
from ucformat.format.structure import find_manifest, read_manifest
from ucformat.jobs.dependents import dependents_at, forget_dependents, kept_keys
from ucformat.jobs.documents import protections_of, read_document
from ucformat.jobs.listing import check_removed
from ucformat.jobs.record import with_catalog
from ucformat.schema import CATALOG_DOCUMENT, MANIFEST, NEEDED_BY, TOMBSTONE
from ucformat.schema.documents import TombstoneDoc, is_tombstone
from ucformat.schema.values import parsed
from ucformat.signatures import SIGNATURE
from ucformat.storage.url import open_store

if TYPE_CHECKING:
    from ucformat.catalog.catalog import Catalog
    from ucformat.schema.documents import CatalogDoc
    from ucformat.schema.manifest import Manifest
    from ucformat.storage.base import Store


# Removing a checkpoint at once, as a training does that keeps only a few: here and in the catalog.


_MAX_KEYS = 100  # of a place where nothing is left but documents of catalogs
_log = logging.getLogger("ucformat")


def discard(url: str) -> bool:
    """Remove a checkpoint, and its place from the catalog, unless it is protected, which is a warning.

    A removal that was interrupted is finished. Returns whether it is gone.
    """
    store = open_store(url)
    reasons: tuple[str, ...] = ()
    try:
        manifest, _ = read_manifest(store)
    except NotACheckpoint:
        tombstone = read_tombstone(store)
        if tombstone is None:
            return True  # already removed
        checkpoint = tombstone.id
    else:
        checkpoint = manifest.id
        reasons = protections_of(store.url, checkpoint)
    reasons = reasons or tuple(f"needed by {d}" for d in remove(store, checkpoint))
    if reasons:
        _warn(store.url, "; ".join(reasons))
        return False

    def forget(catalog: Catalog) -> None:
        catalog.forget(
            [place for place in catalog.places(store.url) if place.url == same_url(store.url)]
        )

    with_catalog(
        forget,
        f"{store.url} was removed, but not from the catalog",
        f"run `ucp reindex {store.url} --forget`",
    )
    return True


@cache
def _warn(url: str, reasons: str) -> None:
    """Warn once: a training tries again after each save."""
    _log.warning("%s is not removed: %s", url, reasons)


def remove(store: Store, checkpoint: str) -> tuple[str, ...]:
    """Remove a checkpoint from a place, if it is still there, and then its folder if that is empty.

    Returns:
        The ids of the dependents that prevent the removal; empty if it was removed.
    """
    needed = _remove(store, checkpoint)
    store.prune("")
    return needed


def _remove(store: Store, checkpoint: str) -> tuple[str, ...]:
    tombstone = read_tombstone(store)
    try:
        manifest, version = read_manifest(store)
    except NotACheckpoint:
        # another process may have removed the manifest since
        tombstone = tombstone or read_tombstone(store)
        if tombstone is None:
            check_removed(store, begun=True)
            store.delete(TOMBSTONE)  # durably, after an interrupted or concurrent purge
            store.flush()
            store.sweep()
        elif tombstone.id == checkpoint:  # of an interrupted purge: writers wait until it is done
            bury(store, tombstone)
        return ()
    if manifest.id == checkpoint:
        return _remove_this(store, manifest, version)
    # replaced by another, and its files removed
    if tombstone is not None and tombstone.id == checkpoint:
        store.delete(TOMBSTONE)
    return ()


def _remove_this(store: Store, manifest: Manifest, version: str) -> tuple[str, ...]:
    """Write the tombstone, then delete the manifest and all else; returns the dependents if there are any."""
    refuse_others(store, manifest.attempt, None)  # before anything is deleted
    tombstone = TombstoneDoc(id=manifest.id, attempt=manifest.attempt, created=make_stamp().now)
    try:
        needed = _settle(store, tombstone)
    except UcformatError as error:
        if not _is_full(error):
            raise
        needed = dependents_at(store, tombstone.id)
        if not needed:
            _delete_manifest(store, version)  # to make room for the tombstone
            # if others filled that room, the files that are deleted next make more
            with suppress(UcformatError):
                _put(store, tombstone)
            bury(store, tombstone)
    else:
        if not needed and _take_manifest(store, tombstone, version):
            bury(store, tombstone)
    return needed


def _settle(store: Store, tombstone: TombstoneDoc) -> tuple[str, ...]:
    """Write the tombstone, and list the dependents: if there are none it is settled, else it is withdrawn.

    New dependents see the tombstone. Only one that is not settled is withdrawn: otherwise another
    process that found no dependents before may be about to remove the files.
    """
    for _ in range(TRIES):
        existing, version = _put(store, tombstone)
        if existing.stage == "settled":
            return ()
        needed = dependents_at(store, tombstone.id)
        stage = "withdrawn" if needed or existing.stage == "withdrawn" else "settled"
        try:
            store.replace(
                TOMBSTONE, encoded(tombstone.model_copy(update={"stage": stage})), version
            )
        except Conflict:  # another process removes the checkpoint, too
            continue
        except UcformatError as error:
            if not isinstance(error, PermissionDenied | UnsupportedError) and not _is_full(error):
                raise
        if stage == "withdrawn":
            store.delete(TOMBSTONE)
        if stage == "settled" or needed:
            return needed
    raise contended(store, TOMBSTONE)


def _put(store: Store, tombstone: TombstoneDoc) -> tuple[TombstoneDoc, str]:
    """Write the tombstone, unless this checkpoint has one; returns the one that is there, and its version."""
    data = encoded(tombstone)
    try:
        return tombstone, store.put_if_absent(TOMBSTONE, data)
    except Conflict:
        try:
            current, version = store.read_versioned(TOMBSTONE)
        except NotFound:  # withdrawn in the meantime
            return _put(store, tombstone)
        existing = _parse(current, store)
        if existing.id != tombstone.id:
            raise
        return existing, version


def _take_manifest(store: Store, tombstone: TombstoneDoc, version: str) -> bool:
    """Remove the manifest; False if another checkpoint replaced it in the meantime."""
    try:
        _replace_manifest(store, encoded(tombstone), version)
    except Conflict:
        now = find_manifest(store)
        if now is not None and now.id == tombstone.id:
            raise
        if now is not None:
            store.delete(TOMBSTONE)
            return False
    return True  # if the manifest is gone, another process removes the checkpoint, too


def _replace_manifest(store: Store, data: bytes, version: str) -> None:
    """Replace the manifest by the tombstone, or delete it, if it is unchanged."""
    try:
        store.replace(MANIFEST, data, version)
    except (PermissionDenied, UnsupportedError):  # then no other process can replace it either
        store.delete(MANIFEST)
        store.flush()
    except UcformatError as error:
        if not _is_full(error):
            raise
        _delete_manifest(store, version)


def _delete_manifest(store: Store, version: str) -> None:
    """Delete the manifest if it is unchanged, where there is no room to replace it."""
    if store.read_versioned(MANIFEST)[1] != version:
        raise Conflict(f"{store.url}/{MANIFEST} was changed by another process since it was read")
    store.delete(MANIFEST)
    store.flush()  # before any file that it names is deleted


def _is_full(error: UcformatError) -> bool:
    """Whether a write failed because the disk or the quota is full."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in (
        errno.ENOSPC,
        errno.EDQUOT,
    )


def bury(store: Store, tombstone: TombstoneDoc) -> None:
    """Remove the checkpoint that a tombstone names, the tombstone last."""
    with suppress(NotFound):
        if is_tombstone(store.read(MANIFEST)):
            store.delete(MANIFEST)
    abandon(store, tombstone.attempt)
    with suppress(IntegrityError):  # an invalid document stays, as does one of another checkpoint
        doc = read_document(store)
        if doc is not None and doc.id == tombstone.id:
            store.delete(CATALOG_DOCUMENT)
    # of the manifest that is gone: nobody commits here before the tombstone is
    store.delete(SIGNATURE)
    forget_dependents(store)
    store.prune(NEEDED_BY)
    store.flush()
    store.delete(TOMBSTONE)
    store.flush()
    store.sweep()


def orphaned_document(store: Store) -> CatalogDoc | None:
    """The catalog's document where nothing else is, but what catalogs keep: its checkpoint was removed meanwhile."""
    return read_document(store) if _keys(store) == {CATALOG_DOCUMENT} else None


def remove_orphaned_document(store: Store) -> None:
    """Remove an orphaned document, unless a writer begins a checkpoint at the place."""
    doc = orphaned_document(store)
    if doc is None:
        return
    attempt = hashlib.sha256(doc.id.encode()).hexdigest()[:20]  # one without files
    tombstone = TombstoneDoc(id=doc.id, attempt=attempt, created=make_stamp().now)
    store.put_if_absent(TOMBSTONE, encoded(tombstone))
    if _keys(store) == {CATALOG_DOCUMENT, TOMBSTONE}:  # new writers see the tombstone
        bury(store, tombstone)
        store.prune("")
    else:
        store.delete(TOMBSTONE)


def _keys(store: Store) -> set[str]:
    """The first keys of a place, without the records of what catalogs keep."""
    keys = {info.key for info in islice(store.list(), _MAX_KEYS)}
    return keys - kept_keys(store) if keys - {CATALOG_DOCUMENT, TOMBSTONE} else keys


def read_tombstone(store: Store) -> TombstoneDoc | None:
    """The tombstone of a place, if there is one."""
    try:
        return _parse(store.read(TOMBSTONE), store)
    except NotFound:
        return None


def _parse(data: bytes, store: Store) -> TombstoneDoc:
    try:
        return parsed(TombstoneDoc, data)
    except ValueError:
        raise IntegrityError(
            f"{store.url}/{TOMBSTONE} cannot be read",
            hint="inspect it; delete the checkpoint's folder by hand if it is not needed",
        ) from None
