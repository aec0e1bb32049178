"""Attempts: which files are an attempt's own, and its record, by which writers and `gc` agree.

Only what is an attempt's own is removed with it (docs/security.md, rule 5). Records, tombstones and manifests may have
been written by anybody. So their names are believed only where they lead to folders that no program but a writer of
this format makes, and these go only if nothing in them is another's.
"""

from __future__ import annotations

import os
import re
import socket
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from pydantic import BaseModel, ValidationError

from ucformat.errors import Conflict, NotFound, PermissionDenied, UnsafeError, UnsupportedError
from ucformat.schema.documents import CATALOG_DOCUMENT, TOMBSTONE
from ucformat.schema.manifest import ATTEMPT, MANIFEST, AttemptDoc

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ucformat.schema.manifest import Manifest
    from ucformat.storage.base import Store

__all__ = [
    "FOLDERS",
    "KINDS",
    "TRIES",
    "attempt_of",
    "being_removed",
    "contended",
    "folders_of",
    "is_inside_attempt",
    "mark_replacing",
    "names_below",
    "parse_record",
    "put_record",
    "record_bytes",
    "record_key",
    "refuse_others",
    "replacing_attempts",
]

#: The folders that a writer makes below a checkpoint's root, besides those for each attempt in the first three.
FOLDERS = (*(KINDS := ("data", "objects", "assets")), "attempts")

_NAME = re.compile(ATTEMPT)
_INSIDE = re.compile(rf"(^|/)({'|'.join(KINDS)})/{ATTEMPT}(/|$)")
_DOCUMENTS = (MANIFEST, TOMBSTONE, CATALOG_DOCUMENT)


class _FormatField(BaseModel):
    """What every document of ours begins with."""

    format: str


def record_key(attempt: str) -> str:
    """Where the record of an attempt lies."""
    _check_name(attempt)
    return f"attempts/{attempt}.json"


def folders_of(attempt: str) -> tuple[str, ...]:
    """Where an attempt keeps its files.

    Raises:
        UnsafeError: no attempt has this name, so that the folders may be anybody's.
    """
    _check_name(attempt)
    return tuple(f"{kind}/{attempt}" for kind in KINDS)


def attempt_of(key: str) -> str | None:
    """Whose record a file is that lies in `attempts`; None if it is none."""
    name = key.rpartition("/")[2].removesuffix(".json")
    return name if key.endswith(".json") and _NAME.fullmatch(name) else None


def _check_name(attempt: str) -> None:
    if not _NAME.fullmatch(attempt):
        raise UnsafeError(
            f"{attempt!r} is not the name of an attempt: that is 20 digits of 0-9 and a-f",
            hint="the checkpoint was damaged or made to do harm; nothing was removed or written",
        )


def is_inside_attempt(folder: str) -> bool:
    """Whether a folder lies in one of an attempt, where what looks like a place is a file of that."""
    return _INSIDE.search(folder) is not None


def refuse_others(store: Store, attempt: str, standing: Manifest | None) -> None:
    """UnsafeError where something in an attempt's folders is not its own.

    Another checkpoint may lie in them, or an attempt at one, or what a catalog knows of one; and the checkpoint that
    stands at the place, whoever wrote it, may lie in the folders of another attempt than its manifest says.

    Args:
        store: the place.
        attempt: whose folders are looked through.
        standing: the manifest of what stands at the place.

    Raises:
        UnsafeError: it says which folder, and what is in it.
    """
    folders = folders_of(attempt)
    if standing is not None:
        for folder in folders:
            if standing.attempt == attempt or names_below(store, standing, folder):
                raise _refused(store, folder, f"the checkpoint {standing.id}, which stands there, needs it")
    for folder in folders:
        for info in store.list(folder):
            if _is_document(info.key) and _is_ours(store, info.key):
                raise _refused(store, folder, f"{info.key} shows that another's checkpoint lies in it")


def _refused(store: Store, folder: str, why: str) -> UnsafeError:
    return UnsafeError(
        f"{store.url}/{folder} is not removed: {why}",
        hint="look at it; what really may go is to be deleted by hand",
    )


def _is_document(key: str) -> bool:
    *folders, name = key.split("/")
    return name in _DOCUMENTS or (folders[-1:] == ["attempts"] and attempt_of(name) is not None)


def _is_ours(store: Store, key: str) -> bool:
    """Whether this is a document of this format, and no asset that is called so."""
    try:
        return _FormatField.model_validate_json(store.read(key)).format.startswith("ucformat")
    except (NotFound, ValidationError):
        return False


def names_below(store: Store, manifest: Manifest, folder: str) -> bool:
    """Whether a checkpoint has files below a folder, or an array around it.

    Args:
        store: the checkpoint's place.
        manifest: the checkpoint's.
        folder: the folder's key in the place.
    """
    return any(f"{path}/".startswith(f"{folder}/") or folder.startswith(f"{path}/") for path in _paths(store, manifest))


def _paths(store: Store, manifest: Manifest) -> Iterable[str]:
    """The files and folders of arrays that a manifest, or its sidecar, names."""
    yield from (tensor.path for tensor in manifest.tensors if tensor.path is not None)
    yield from (doc.path for doc in (manifest.objects, *manifest.assets.values()) if doc is not None)
    if manifest.sidecar is not None:
        from ucformat.format.sidecar import decode

        path = manifest.sidecar.path
        yield path
        yield from decode(store.read(path), [len(t.shape) for t in manifest.tensors], f"{store.url}/{path}").files


TRIES = 10  # to replace what others replace, too


def put_record(
    store: Store, attempt: str, plan: str, needs: Sequence[str], checkpoint: str
) -> tuple[str | None, str | None]:
    """Put the record of an attempt, or replace that of one that was begun before, by this plan: it is to be continued.

    Whoever takes it for one that was left, and is about to remove it, then finds another record than he judged. What
    others go by stays in it. Of one that needs files elsewhere it has an id: `checkpoint`, or that of who began it.

    Args:
        store: the place.
        attempt: the attempt's name.
        plan: the digest of what it is to write; who has the same continues it.
        needs: the urls of places whose files it needs.
        checkpoint: the id of what is to be committed.

    Returns:
        the id in the record, and the version of the record if nobody had put it before.

    Raises:
        Conflict: the attempt is being removed, or others changed its record again and again.
    """
    key, owner = record_key(attempt), f"{socket.gethostname()}:{os.getpid()}"
    doc = AttemptDoc(attempt=attempt, plan=plan, owner=owner, started=datetime.now(UTC), needs=tuple(needs))
    if needs:
        doc = doc.model_copy(update={"id": checkpoint})
    for _ in range(TRIES):
        with suppress(Conflict):
            return doc.id, store.put_if_absent(key, record_bytes(doc))
        try:
            data, version = store.read_versioned(key)
        except NotFound:  # removed at this instant
            continue
        if (there := parse_record(data)) is not None:
            if there.removed is not None:
                raise being_removed(store, attempt)
            kept = {"id": there.id or doc.id, "replacing": there.replacing}
            doc = doc.model_copy(update={**kept, "needs": tuple(dict.fromkeys((*there.needs, *needs)))})
        if _replaced(store, key, doc, version):
            return doc.id, None
    raise contended(store, key)


def parse_record(data: bytes) -> AttemptDoc | None:
    """The record in these bytes; None if it is none of ours."""
    try:
        return AttemptDoc.model_validate_json(data)
    except ValidationError:
        return None


def record_bytes(doc: AttemptDoc) -> bytes:
    """As `parse_record` reads it."""
    return doc.model_dump_json(indent=1).encode()


def being_removed(store: Store, attempt: str) -> Conflict:
    """The error of who writes to an attempt that is being removed.

    Args:
        store: the place.
        attempt: the attempt's name.
    """
    return Conflict(
        f"what was written at {store.url} for this attempt ({attempt}) is taken for left over, and is being removed",
        hint="run it again when that is done; if it was interrupted, `ucp gc PLACE --apply --grace 0s` ends it",
    )


def mark_replacing(store: Store, attempt: str) -> None:
    """Say in the attempt's record that it is about to replace what is there, for who begins to need or to protect that.

    It is never taken back, for others may run the same plan at once.

    Args:
        store: the place.
        attempt: the attempt's name.

    Raises:
        Conflict: others changed the record again and again.
    """
    key = record_key(attempt)
    for _ in range(TRIES):
        try:
            data, version = store.read_versioned(key)
        except NotFound:
            return  # which is told where the record is looked at once more
        record = parse_record(data)
        if record is None or record.removed is not None or record.replacing is not None:
            return
        if _replaced(store, key, record.model_copy(update={"replacing": datetime.now(UTC)}), version):
            return
    raise contended(store, key)


def replacing_attempts(store: Store) -> frozenset[str]:
    """The attempts at a place that are marked as about to replace what is there; one that has done so is among them.

    Args:
        store: the place.
    """
    found = set()
    for info in store.list("attempts"):
        with suppress(NotFound):  # removed at this instant
            record = parse_record(store.read(info.key))
            if record is not None and record.replacing is not None:
                found.add(record.attempt)
    return frozenset(found)


def _replaced(store: Store, key: str, doc: AttemptDoc, version: str) -> bool:
    """Replace a record; False if somebody else replaced it since it was read."""
    try:
        store.replace(key, record_bytes(doc), version)
    except Conflict:
        return False
    except (
        PermissionDenied,
        UnsupportedError,
    ):  # where nothing can be replaced, nobody marks a record, and nobody replaces a checkpoint
        pass
    return True


def contended(store: Store, key: str) -> Conflict:
    """The error of who read a file and was to replace it so many times, and somebody else was quicker each time.

    Args:
        store: the place.
        key: the file's.
    """
    return Conflict(f"{store.url}/{key} was changed again and again by others", hint="try again later")
