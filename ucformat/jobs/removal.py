"""Removes one checkpoint from one place, so that one who is stopped at any instant leaves it whole, or goes on.

A tombstone names all that goes. It is put first, and removed last; between the two goes the manifest, before all else.
"""

from __future__ import annotations

import errno
from contextlib import suppress
from typing import TYPE_CHECKING

from pydantic import ValidationError

from ucformat.catalog.reader import make_stamp
from ucformat.errors import Conflict, IntegrityError, NotACheckpoint, NotFound, Refused, UcformatError
from ucformat.format.commit import MANIFEST, abandon, read_manifest
from ucformat.jobs.absence import check_removed
from ucformat.jobs.documents import read_document
from ucformat.schema.catalog_document import CATALOG_DOCUMENT
from ucformat.schema.tombstone import TOMBSTONE, TombstoneDoc, is_tombstone
from ucformat.storage.base import check_key

if TYPE_CHECKING:
    from ucformat.schema.manifest import Manifest
    from ucformat.storage.base import Store

__all__ = ["bury", "folders_of", "read_tombstone", "remove", "standing"]


def remove(store: Store, checkpoint: str) -> None:
    """Remove a checkpoint from one place, if it is still that one which lies there."""
    tombstone = read_tombstone(store)
    try:
        manifest, version = read_manifest(store)
    except NotACheckpoint:
        if tombstone is None:
            check_removed(store, begun=True)
            store.sweep()  # an interrupted purge ended here, or somebody else removed it
            store.prune()
        elif tombstone.id == checkpoint:  # of an interrupted purge: nobody writes here until it is done
            bury(store, tombstone)
        return
    if manifest.id == checkpoint:
        tombstone = _begin(store, manifest, version)
        if tombstone is not None:
            bury(store, tombstone)
    elif tombstone is not None and tombstone.id == checkpoint:  # another one replaced it, and removed its files
        store.delete(TOMBSTONE)


def _begin(store: Store, manifest: Manifest, version: str) -> TombstoneDoc | None:
    """Put the tombstone, then take the manifest away; None if another one replaced it at this instant."""
    tombstone = TombstoneDoc(id=manifest.id, attempt=manifest.attempt, files=_files(manifest), created=make_stamp().now)
    for key in (*folders_of(tombstone.attempt), *tombstone.files):
        check_key(key)  # before anything is gone
    data = tombstone.model_dump_json(indent=1).encode()
    try:
        _put(store, data, manifest.id)
    except UcformatError as error:
        if not _is_full(error):
            raise
        _delete_manifest(store, version)  # which makes room for it
        with suppress(UcformatError):  # if not even that does, others write there, and what goes now makes more
            _put(store, data, manifest.id)
        return tombstone
    try:
        _replace_manifest(store, data, version)
    except Conflict:
        now = standing(store)
        if now is not None and now.id == manifest.id:
            raise
        if now is not None:
            store.delete(TOMBSTONE)
            return None
    return tombstone  # if the manifest is gone, somebody else removes the checkpoint, too


def _put(store: Store, data: bytes, checkpoint: str) -> None:
    """Put the tombstone, unless there is one of this checkpoint."""
    try:
        store.put_if_absent(TOMBSTONE, data)
    except Conflict:
        other = read_tombstone(store)
        if other is None or other.id != checkpoint:
            raise


def _replace_manifest(store: Store, data: bytes, version: str) -> None:
    """Take the manifest away, if it is still this one."""
    try:
        store.replace(MANIFEST, data, version)
    except Refused:  # then nobody can replace it here
        store.delete(MANIFEST)
    except UcformatError as error:
        if not _is_full(error):
            raise
        _delete_manifest(store, version)


def _delete_manifest(store: Store, version: str) -> None:
    """Delete the manifest, where there is no room to replace it by anything."""
    if store.read_versioned(MANIFEST)[1] != version:
        raise Conflict(f"{store.url}/{MANIFEST} was changed by somebody else since it was read")
    store.delete(MANIFEST)


def _is_full(error: UcformatError) -> bool:
    """Whether there was no room for what was to be written."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in (errno.ENOSPC, errno.EDQUOT)


def folders_of(attempt: str) -> tuple[str, ...]:
    """Where an attempt keeps its files."""
    return tuple(f"{kind}/{attempt}" for kind in ("data", "objects", "assets"))


def _files(manifest: Manifest) -> tuple[str, ...]:
    """The files that a manifest names and that may lie outside of the attempt's folders."""
    files = [*manifest.assets.values(), *(f for f in (manifest.objects, manifest.sidecar) if f is not None)]
    return tuple(f.path for f in files)


def bury(store: Store, tombstone: TombstoneDoc) -> None:
    """Remove all that a tombstone names, itself last."""
    with suppress(NotFound):
        if is_tombstone(store.read(MANIFEST)):
            store.delete(MANIFEST)
    for file in tombstone.files:
        store.delete(file)
    abandon(store, tombstone.attempt)
    with suppress(IntegrityError):  # what is no document of ours stays
        if read_document(store) is not None:
            store.delete(CATALOG_DOCUMENT)
    store.delete(TOMBSTONE)
    store.sweep()
    store.prune()


def read_tombstone(store: Store) -> TombstoneDoc | None:
    """The tombstone of a place, if there is one."""
    try:
        return TombstoneDoc.model_validate_json(store.read(TOMBSTONE))
    except NotFound:
        return None
    except ValidationError:
        raise IntegrityError(
            f"{store.url}/{TOMBSTONE} cannot be read",
            hint="look at it; delete the checkpoint's folder by hand if it may go",
        ) from None


def standing(store: Store) -> Manifest | None:
    """The manifest of a place; None if there is no checkpoint."""
    try:
        return read_manifest(store)[0]
    except NotACheckpoint:
        return None
