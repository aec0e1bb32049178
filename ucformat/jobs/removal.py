"""Removes one checkpoint from one place, so that one who is stopped at any instant leaves it whole, or goes on.

A tombstone names the attempt that goes. It is put first, and removed last; between the two goes the manifest, before
all else. When it is put, and before the manifest goes, those are asked for who need the files (`jobs/dependents.py`):
if there is one, the tombstone is taken away again. Of several who remove a checkpoint at once, each goes by the
tombstone's stage.
"""

from __future__ import annotations

import errno
import hashlib
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING

from pydantic import ValidationError

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
from ucformat.format.commit import MANIFEST, abandon
from ucformat.format.structure import find_manifest, read_manifest
from ucformat.jobs.dependents import dependents_at, forget_dependents
from ucformat.jobs.documents import read_document
from ucformat.jobs.listing import check_removed
from ucformat.schema.documents import CATALOG_DOCUMENT, NEEDED_BY, TOMBSTONE, TombstoneDoc, is_tombstone

if TYPE_CHECKING:
    from ucformat.schema.documents import CatalogDoc
    from ucformat.schema.manifest import Manifest
    from ucformat.storage.base import Store

__all__ = ["bury", "orphaned_document", "read_tombstone", "remove", "remove_orphaned_document"]


def remove(store: Store, checkpoint: str) -> tuple[str, ...]:
    """Remove a checkpoint from a place, if it is still there, and then its folder if that is empty.

    Args:
        store: the place.
        checkpoint: the checkpoint's id.

    Returns:
        because of whom it stays: the ids of those who need its files.
    """
    needed = _remove(store, checkpoint)
    store.prune("")
    return needed


def _remove(store: Store, checkpoint: str) -> tuple[str, ...]:
    tombstone = read_tombstone(store)
    try:
        manifest, version = read_manifest(store)
    except NotACheckpoint:
        tombstone = tombstone or read_tombstone(store)  # somebody else may have put it since, and the manifest gone
        if tombstone is None:
            check_removed(store, begun=True)
            store.delete(TOMBSTONE)  # an interrupted purge ended here, or somebody else removed it: that it lasts
            store.flush()
            store.sweep()
        elif tombstone.id == checkpoint:  # of an interrupted purge: nobody writes here until it is done
            bury(store, tombstone)
        return ()
    if manifest.id == checkpoint:
        return _remove_this(store, manifest, version)
    if tombstone is not None and tombstone.id == checkpoint:  # another one replaced it, and removed its files
        store.delete(TOMBSTONE)
    return ()


def _remove_this(store: Store, manifest: Manifest, version: str) -> tuple[str, ...]:
    """Put the tombstone, take the manifest away, and then all else, unless somebody needs it: who."""
    refuse_others(store, manifest.attempt, None)  # before anything is gone
    tombstone = TombstoneDoc(id=manifest.id, attempt=manifest.attempt, created=make_stamp().now)
    try:
        needed = _settle(store, tombstone)
    except UcformatError as error:
        if not _is_full(error):
            raise
        needed = _dependents(store, tombstone)
        if not needed:
            _delete_manifest(store, version)  # which makes room for it
            with suppress(UcformatError):  # if not even that does, others write there, and what goes now makes more
                _put(store, tombstone)
            bury(store, tombstone)
    else:
        if not needed and _end(store, tombstone, version):
            bury(store, tombstone)
    return needed


def _settle(store: Store, tombstone: TombstoneDoc) -> tuple[str, ...]:
    """Put the tombstone, and ask who needs the files: where nobody does, that is settled; else it goes again.

    Whoever begins to need them now sees the tombstone. It goes only as long as nothing is settled: nobody takes it away
    from one who has asked before, and is about to remove the files.
    """
    for _ in range(TRIES):
        there, version = _put(store, tombstone)
        if there.stage == "settled":
            return ()
        needed = _dependents(store, tombstone)
        stage = "withdrawn" if needed or there.stage == "withdrawn" else "settled"
        try:
            store.replace(TOMBSTONE, _dump(tombstone.model_copy(update={"stage": stage})), version)
        except Conflict:  # somebody else removes the checkpoint, too
            continue
        except UcformatError as error:
            if not isinstance(error, PermissionDenied | UnsupportedError) and not _is_full(error):
                raise
        if stage == "withdrawn":
            store.delete(TOMBSTONE)
        if stage == "settled" or needed:
            return needed
    raise contended(store, TOMBSTONE)


def _dependents(store: Store, tombstone: TombstoneDoc) -> tuple[str, ...]:
    return tuple(who for who in dependents_at(store) if who != tombstone.id)


def _put(store: Store, tombstone: TombstoneDoc) -> tuple[TombstoneDoc, str]:
    """Put the tombstone, unless there is one of this checkpoint; the one that is there, and its version."""
    data = _dump(tombstone)
    try:
        return tombstone, store.put_if_absent(TOMBSTONE, data)
    except Conflict:
        try:
            there, version = store.read_versioned(TOMBSTONE)
        except NotFound:  # taken away at this instant
            return _put(store, tombstone)
        found = _parse(there, store)
        if found.id != tombstone.id:
            raise
        return found, version


def _dump(tombstone: TombstoneDoc) -> bytes:
    return tombstone.model_dump_json(indent=1).encode()


def _end(store: Store, tombstone: TombstoneDoc, version: str) -> bool:
    """Take the manifest away; False if another one replaced it at this instant."""
    try:
        _replace_manifest(store, _dump(tombstone), version)
    except Conflict:
        now = find_manifest(store)
        if now is not None and now.id == tombstone.id:
            raise
        if now is not None:
            store.delete(TOMBSTONE)
            return False
    return True  # if the manifest is gone, somebody else removes the checkpoint, too


def _replace_manifest(store: Store, data: bytes, version: str) -> None:
    """Take the manifest away, if it is still this one."""
    try:
        store.replace(MANIFEST, data, version)
    except (PermissionDenied, UnsupportedError):  # then nobody can replace it here
        store.delete(MANIFEST)
        store.flush()
    except UcformatError as error:
        if not _is_full(error):
            raise
        _delete_manifest(store, version)


def _delete_manifest(store: Store, version: str) -> None:
    """Delete the manifest, where there is no room to replace it by anything."""
    if store.read_versioned(MANIFEST)[1] != version:
        raise Conflict(f"{store.url}/{MANIFEST} was changed by somebody else since it was read")
    store.delete(MANIFEST)
    store.flush()  # before anything goes that it names


def _is_full(error: UcformatError) -> bool:
    """Whether there was no room for what was to be written."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in (errno.ENOSPC, errno.EDQUOT)


def bury(store: Store, tombstone: TombstoneDoc) -> None:
    """Remove the checkpoint that a tombstone names, the tombstone last.

    Args:
        store: the place.
        tombstone: the tombstone.
    """
    with suppress(NotFound):
        if is_tombstone(store.read(MANIFEST)):
            store.delete(MANIFEST)
    abandon(store, tombstone.attempt)
    with suppress(IntegrityError):  # what is no document of ours stays, as does one of another checkpoint
        doc = read_document(store)
        if doc is not None and doc.id == tombstone.id:
            store.delete(CATALOG_DOCUMENT)
    forget_dependents(store)
    store.prune(NEEDED_BY)
    store.flush()
    store.delete(TOMBSTONE)
    store.flush()
    store.sweep()


def orphaned_document(store: Store) -> CatalogDoc | None:
    """The catalog's document, if the place has nothing else: it was written when its checkpoint had just gone.

    Args:
        store: the place.

    Raises:
        IntegrityError: it is none of ours.
    """
    return read_document(store) if _keys(store) == {CATALOG_DOCUMENT} else None


def remove_orphaned_document(store: Store) -> None:
    """Remove such a document, unless another writer begins a checkpoint at the place.

    Args:
        store: the place.
    """
    doc = orphaned_document(store)
    if doc is None:
        return
    nobody = hashlib.sha256(doc.id.encode()).hexdigest()[:20]  # an attempt that has no files
    tombstone = TombstoneDoc(id=doc.id, attempt=nobody, created=make_stamp().now)
    store.put_if_absent(TOMBSTONE, _dump(tombstone))
    if _keys(store) == {CATALOG_DOCUMENT, TOMBSTONE}:  # who begins from now on sees the tombstone
        bury(store, tombstone)
        store.prune("")
    else:
        store.delete(TOMBSTONE)


def _keys(store: Store) -> set[str]:
    """The keys of a place, no more than three."""
    return {info.key for info in islice(store.list(), 3)}


def read_tombstone(store: Store) -> TombstoneDoc | None:
    """The tombstone of a place, if there is one.

    Args:
        store: the place.
    """
    try:
        return _parse(store.read(TOMBSTONE), store)
    except NotFound:
        return None


def _parse(data: bytes, store: Store) -> TombstoneDoc:
    try:
        return TombstoneDoc.model_validate_json(data)
    except ValidationError:
        raise IntegrityError(
            f"{store.url}/{TOMBSTONE} cannot be read",
            hint="look at it; delete the checkpoint's folder by hand if it may go",
        ) from None
