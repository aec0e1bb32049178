"""Attempts: the files that belong to an attempt, and its record, through which writers and `gc` coordinate.

Removing an attempt removes only its own files (docs/security.md, rule 5). Anybody may have written
a record, tombstone or manifest, so the names in them are trusted only if they lead to folders that
no program other than a writer of this format creates, and these folders are removed only if nothing
in them belongs to another checkpoint.
"""

from __future__ import annotations

import os
import re
import socket
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from pydantic import BaseModel, ValidationError

from ucformat.errors import (
    Conflict,
    NotFound,
    PermissionDenied,
    UnsafeError,
    UnsupportedError,
    UpgradeNeeded,
)
from ucformat.format.digest import encoded
from ucformat.schema import ATTEMPT, CATALOG_DOCUMENT, MANIFEST, TOMBSTONE
from ucformat.schema.manifest import AttemptDoc
from ucformat.schema.values import parsed, version_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ucformat.schema.manifest import Manifest
    from ucformat.storage.base import Store

#: The folders that a writer creates in a checkpoint's root; the first three contain a folder for
#: each attempt.
FOLDERS = (*(KINDS := ("data", "objects", "assets")), "attempts")

_NAME = re.compile(ATTEMPT)
_INSIDE = re.compile(rf"(^|.*?/)({'|'.join(KINDS)})/({ATTEMPT})(/|$)", re.DOTALL)
_DOCUMENTS = (MANIFEST, TOMBSTONE, CATALOG_DOCUMENT)


class _FormatField(BaseModel):
    """The field that every document of the format begins with."""

    format: str


def record_key(attempt: str) -> str:
    """The key of an attempt's record."""
    _check_name(attempt)
    return f"attempts/{attempt}.json"


def folders_of(attempt: str) -> tuple[str, ...]:
    """The folders of an attempt's files."""
    _check_name(attempt)
    return tuple(f"{kind}/{attempt}" for kind in KINDS)


def attempt_of(key: str) -> str | None:
    """The name of the attempt whose record a file is; None if it is not a record.

    Args:
        key: the key of a file in the folder `attempts`, or its last part.
    """
    name = key.rpartition("/")[2].removesuffix(".json")
    return name if key.endswith(".json") and _NAME.fullmatch(name) else None


def _check_name(attempt: str) -> None:
    if not _NAME.fullmatch(attempt):
        raise UnsafeError(
            f"{attempt!r} is not the name of an attempt, which has 20 hexadecimal digits",
            hint="the checkpoint is damaged or malicious; nothing was removed or written",
        )


def is_inside_attempt(folder: str) -> bool:
    """Whether a folder is inside the folder of an attempt, so that it is not a checkpoint of its own."""
    return _INSIDE.match(folder) is not None


def outside_attempts(folders: Iterable[str], keys: Iterable[str]) -> set[str]:
    """The folders that are not inside the folder of an attempt whose record is there, committed or not."""
    inside = {folder: match for folder in folders if (match := _INSIDE.match(folder)) is not None}
    if not inside:
        return set(folders)
    existing_keys = set(keys)
    return {
        f
        for f in folders
        if f not in inside or inside[f][1] + record_key(inside[f][3]) not in existing_keys
    }


def refuse_others(store: Store, attempt: str, committed: Manifest | None) -> None:
    """Refuse an attempt whose folders contain something else.

    They may contain another checkpoint, an attempt at one, or a catalog's document about one. The
    checkpoint committed at the place may also have files in the folders of an attempt that its
    manifest does not name.
    """
    folders = folders_of(attempt)
    if committed is not None:
        for folder in folders:
            if committed.attempt == attempt or names_below(store, committed, folder):
                raise _refused(store, folder, f"the committed checkpoint {committed.id} needs it")
    for folder in folders:
        for info in store.list(folder):
            if _is_document(info.key) and _is_ours(store, info.key):
                raise _refused(
                    store, folder, f"{info.key} shows that it contains another checkpoint"
                )


def _refused(store: Store, folder: str, why: str) -> UnsafeError:
    return UnsafeError(
        f"{store.url}/{folder} is not removed: {why}",
        hint="inspect the folder, and delete by hand what is no longer needed",
    )


def _is_document(key: str) -> bool:
    *folders, name = key.split("/")
    return name in _DOCUMENTS or (folders[-1:] == ["attempts"] and attempt_of(name) is not None)


def _is_ours(store: Store, key: str) -> bool:
    """Whether this is a document of this format rather than an asset with the same name."""
    try:
        return _FormatField.model_validate_json(store.read(key)).format.startswith("ucformat")
    except (NotFound, ValidationError):
        return False


def names_below(store: Store, manifest: Manifest, folder: str) -> bool:
    """Whether a checkpoint has files inside a folder, or the folder is inside one of its arrays."""
    return any(
        f"{path}/".startswith(f"{folder}/") or folder.startswith(f"{path}/")
        for path in _paths(store, manifest)
    )


def _paths(store: Store, manifest: Manifest) -> Iterable[str]:
    """The files and array folders that a manifest, or its sidecar, names."""
    yield from (tensor.path for tensor in manifest.tensors if tensor.path is not None)
    yield from (doc.path for doc in manifest.files)
    if manifest.sidecar is not None:
        from ucformat.format.sidecar import decode

        path = manifest.sidecar.path
        yield from decode(store.read(path), manifest.tensors, f"{store.url}/{path}").files


TRIES = 10  # to replace a file that others replace too


def put_record(
    store: Store, attempt: str, plan: str, needs: Sequence[str], checkpoint: str
) -> tuple[str | None, str | None]:
    """Write the record of an attempt; if the attempt was begun before, replace the record in order to continue it.

    A process that is about to remove the attempt as abandoned then finds a record that differs from
    the one it read. The fields that others rely on are kept. If the attempt needs files elsewhere,
    the record has the checkpoint's id: `checkpoint`, or the one that the first writer recorded.

    Returns:
        The id in the record (None if it has none), and the version of the record (None if it
        existed before).

    Raises:
        Conflict: the attempt is being removed, or others kept changing its record.
    """
    key, owner = record_key(attempt), f"{socket.gethostname()}:{os.getpid()}"
    doc = AttemptDoc(
        attempt=attempt, plan=plan, owner=owner, started=datetime.now(UTC), needs=tuple(needs)
    )
    if needs:
        doc = doc.model_copy(update={"id": checkpoint})
    for _ in range(TRIES):
        with suppress(Conflict):
            return doc.id, store.put_if_absent(key, record_bytes(doc))
        try:
            data, version = store.read_versioned(key)
        except NotFound:  # removed at this instant
            continue
        if (existing := parse_record(data)) is not None:
            if existing.removed is not None:
                raise being_removed(store, attempt)
            kept = {"id": existing.id or doc.id, "replacing": existing.replacing}
            doc = doc.model_copy(
                update={**kept, "needs": tuple(dict.fromkeys((*existing.needs, *needs)))}
            )
        if _replaced(store, key, doc, version):
            return doc.id, None
    raise contended(store, key)


def parse_record(data: bytes) -> AttemptDoc | None:
    """Parse the record of an attempt.

    Returns:
        The record; None if it is not a valid one.

    Raises:
        UpgradeNeeded: it is of a later version, so only a later ucformat may touch its attempt.
    """
    try:
        return parsed(AttemptDoc, data)
    except ValueError:
        version = version_of(data, "ucformat-attempt")
        if version is None or version <= 1:
            return None
        reason = f"the record of an attempt has version {version}; this ucformat knows version 1"
        raise UpgradeNeeded(reason) from None


def record_bytes(doc: AttemptDoc) -> bytes:
    """The file of a record, as `parse_record` reads it."""
    return encoded(doc)


def being_removed(store: Store, attempt: str) -> Conflict:
    """The error of a writer whose attempt is being removed."""
    return Conflict(
        f"this attempt ({attempt}) at {store.url} was considered abandoned, and is being removed",
        hint=(
            "run it again after that; if the removal was interrupted, `ucp gc PLACE --apply "
            "--grace 0s` completes it"
        ),
    )


def mark_replacing(store: Store, attempt: str) -> None:
    """Mark an attempt's record: it is about to replace the committed checkpoint.

    Those who begin to need or protect that checkpoint see the mark. It is never removed, because
    others may run the same plan at the same time.
    """
    key = record_key(attempt)
    for _ in range(TRIES):
        try:
            data, version = store.read_versioned(key)
        except NotFound:
            return  # `commit` reads the record once more, and reports that
        record = parse_record(data)
        if record is None or record.removed is not None or record.replacing is not None:
            return
        if _replaced(
            store, key, record.model_copy(update={"replacing": datetime.now(UTC)}), version
        ):
            return
    raise contended(store, key)


def replacing_attempts(store: Store) -> frozenset[str]:
    """The attempts that are marked as about to replace the committed checkpoint, including those that have done so."""
    attempts = set()
    for info in store.list("attempts"):
        with suppress(NotFound):  # removed at this instant
            record = parse_record(store.read(info.key))
            if record is not None and record.replacing is not None:
                attempts.add(record.attempt)
    return frozenset(attempts)


def _replaced(store: Store, key: str, doc: AttemptDoc, version: str) -> bool:
    """Replace a record; False if another writer replaced it since it was read."""
    try:
        store.replace(key, record_bytes(doc), version)
    except Conflict:
        return False
    # a store without replacement: nobody can mark a record or replace a checkpoint there
    except (PermissionDenied, UnsupportedError):
        pass
    return True


def contended(store: Store, key: str) -> Conflict:
    """The error of a writer that failed to replace a file because others replaced it first, `TRIES` times."""
    return Conflict(f"others kept changing {store.url}/{key}", hint="try again later")
