"""Attempts and the commit, which turns files into a checkpoint atomically (docs/spec/protocol.md).

    1. `begin`   refuses a place that has a checkpoint (unless replacing it), and writes the attempt's record.
    2. The writer puts all files below `data/<attempt>`, `objects/<attempt>` and `assets/<attempt>`.
    3. `commit`  makes these durable, then writes `manifest.json` if there is none, or replaces the one `begin` saw.

A removal of an uncommitted attempt first marks its record, on condition that the record has not
changed: so either the removal is refused, or a writer that continues the attempt. A replacement
marks its own record before it looks for dependents and protections: so it sees them, or they see
the mark (`jobs/dependents.py`, `jobs/documents.py`).

The name of an attempt is the digest of its plan, so running the same plan again continues the
attempt. Each file appears as a whole: two writers of one attempt write the same bytes.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from ucformat.errors import (
    Conflict,
    IntegrityError,
    NotACheckpoint,
    NotFound,
    UcformatError,
    Uncertain,
    UpgradeNeeded,
)
from ucformat.format import may_replace, on_abandon
from ucformat.format.attempts import (
    FOLDERS,
    being_removed,
    folders_of,
    mark_replacing,
    parse_record,
    put_record,
    record_bytes,
    record_key,
    refuse_others,
)
from ucformat.format.digest import document_digest
from ucformat.format.structure import checked_manifest, find_manifest, read_manifest
from ucformat.schema import MANIFEST, TOMBSTONE
from ucformat.storage.base import content_version

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ucformat.schema.manifest import Manifest
    from ucformat.storage.base import Store

_log = logging.getLogger("ucformat")

#: Called with the url and the manifest of every checkpoint that this process commits (the catalog
#: subscribes).
on_commit: list[Callable[[str, Manifest], None]] = []


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt to write a checkpoint.

    Attributes:
        replaces: the manifest that it will replace, with the version of that file; None if there is
            none.
        keeps: the id of the future checkpoint if it is known already: that of the checkpoint that
            is written in another form, or the one in the record of a checkpoint that needs files
            elsewhere.
        began: the version of the record if this writer was the first one; None if the attempt is
            continued.
    """

    id: str
    replaces: tuple[Manifest, str] | None
    keeps: str | None = None
    began: str | None = field(default=None, compare=False)

    def folder(self, kind: str) -> str:
        """The folder of this attempt's files of a kind."""
        return f"{kind}/{self.id}"


def begin(
    store: Store,
    plan: dict[str, Any],
    *,
    overwrite: bool,
    name: str | None = None,
    keeps: str | None = None,
    needs: Sequence[str] = (),
) -> Attempt:
    """Begin an attempt, or continue the one with the same plan.

    Args:
        overwrite: replace a checkpoint that is committed there, unless something protects it.
        name: the attempt's name (default: a digest of the plan). A copy has that of the original,
            whose files have the same keys.
        keeps: the id of the new checkpoint if it takes over that of another (default: a new id).
        needs: the urls of the places whose files the checkpoint will need (default: none).
            Everybody who continues such an attempt writes a checkpoint with the same id.

    Raises:
        Conflict: a checkpoint is committed there and `overwrite` is false, or it is protected, or
            it or an earlier attempt at this plan is being removed.
    """
    replaces = None
    try:
        replaces = read_manifest(store)
    except NotACheckpoint:
        pass
    except (IntegrityError, UpgradeNeeded) as error:
        raise Conflict(
            f"{store.url} holds a manifest that this ucformat cannot read: {error.message}",
            hint="choose another place, or delete that checkpoint first",
        ) from error
    _refuse_tombstone(store)  # last: a removal writes the tombstone before it deletes the manifest
    if replaces is not None and not overwrite:
        by_this_plan = name is None and replaces[0].attempt == _id(_digest(plan, None))
        # the caller will rely on that checkpoint, and its writer may have been killed
        settle(store)
        raise Conflict(
            f"{store.url} already holds the committed checkpoint {replaces[0].id}"
            f"{' made by this very plan: nothing is left to do' if by_this_plan else ''}",
            hint="choose another place, or pass overwrite=True (--overwrite) to replace it",
        )
    digest = _digest(plan, replaces and replaces[0].id)
    attempt = Attempt(_id(digest) if name is None else name, replaces, keeps)
    _check_replaceable(store, attempt)
    recorded_id, began = put_record(store, attempt.id, digest, needs, keeps or new_id())
    return replace(attempt, keeps=recorded_id or keeps, began=began)


def unrecorded(plan: dict[str, Any]) -> Attempt:
    """An attempt at a plan whose files are written where nothing is committed or removed."""
    return Attempt(_id(_digest(plan, None)), None, keeps=new_id(), began="")


def _refuse_removed(store: Store, attempt: str) -> None:
    """Raise Conflict if this attempt is being removed, or was; then delete what was written since, too."""
    try:
        record = parse_record(store.read(record_key(attempt)))
        if record is None or record.removed is None:
            return
    except NotFound:
        discard(store, attempt)
    raise being_removed(store, attempt)


def _check_replaceable(store: Store, attempt: Attempt) -> None:
    """Have the subscribers refuse the replacement; a copy over itself removes nothing, and is not checked."""
    if attempt.replaces is not None and attempt.replaces[0].attempt != attempt.id:
        for check in may_replace:
            check(store, attempt.replaces[0], attempt.keeps)


def _refuse_tombstone(store: Store) -> None:
    with suppress(NotFound):
        store.info(TOMBSTONE)
        raise Conflict(
            f"the checkpoint at {store.url} was deleted, but its removal is incomplete",
            hint="`ucp gc --apply` completes it; or choose another place",
        )


def _digest(plan: dict[str, Any], replaces: str | None) -> str:
    return document_digest({"plan": plan, "replaces": replaces})


def _id(digest: str) -> str:
    return digest.removeprefix("sha256:")[:20]


def commit(
    store: Store,
    attempt: Attempt,
    manifest: Manifest,
    data: bytes | None = None,
    *,
    announced: bool = True,
) -> Manifest:
    """Make the attempt's files durable, commit them, and then remove the checkpoint that they replace.

    Args:
        data: the file of the manifest (default: the manifest as JSON with its digest).
        announced: whether the subscribers of `on_commit` are told.

    Returns:
        The committed manifest: this one, or an equal one that another writer of the attempt
        committed first.

    Raises:
        Conflict: another checkpoint was committed there in the meantime, and this attempt's files
            were removed; or this attempt or a checkpoint that was committed there is being removed;
            or the one to replace is protected now.
    """
    data, manifest = checked_manifest(manifest, data)
    store.flush()
    store.sweep()
    # of a checkpoint that was committed and deleted since this attempt began
    _refuse_tombstone(store)
    if attempt.replaces is not None and attempt.replaces[0].attempt != attempt.id:
        mark_replacing(store, attempt.id)
    _check_replaceable(store, attempt)  # once more: it may have got a name in the meantime
    _refuse_removed(store, attempt.id)
    try:
        if attempt.replaces is None:
            store.put_if_absent(MANIFEST, data)
        else:
            store.replace(MANIFEST, data, attempt.replaces[1])
    except Uncertain as error:
        raise Uncertain(
            f"it is unknown whether the checkpoint at {store.url} was committed: {error.message}",
            hint="open it: if it exists, it is complete; if not, run this again",
        ) from error
    except Conflict as error:
        winner = find_manifest(store)
        if winner is not None and winner.attempt == attempt.id:  # another writer of the same plan
            settle(store)
            return winner
        discard(store, attempt.id, keep_record=_is_shared(store, attempt))
        if winner is None:
            raise Conflict(
                f"the checkpoint at {store.url} that was to be replaced was deleted in the "
                "meantime",
                hint="the new files were removed; run it again",
            ) from error
        raise Conflict(
            f"{store.url} was committed by another writer (checkpoint {winner.id}) in the meantime",
            hint=(
                "that checkpoint is complete; the new files were removed; choose another place "
                "and run it again"
            ),
        ) from error
    if attempt.replaces is not None and attempt.replaces[0].attempt != attempt.id:
        discard(store, attempt.replaces[0].attempt)
    if announced:
        announce(store.url, manifest)
    return manifest


def settle(store: Store, key: str = MANIFEST) -> None:
    """Make a file durable and remove hidden files, in case its writer was killed before it did so."""
    with suppress(NotFound):  # replaced, or removed, at this instant
        store.adopt(key)
    store.flush()
    store.sweep()


def announce(url: str, manifest: Manifest) -> None:
    """Tell the subscribers of `on_commit` that a checkpoint is committed."""
    for listener in on_commit:
        listener(url, manifest)


def _is_shared(store: Store, attempt: Attempt) -> bool:
    """Whether others began or continued this attempt, and may still be writing."""
    try:
        record = parse_record(store.read(record_key(attempt.id)))
    except (NotFound, UpgradeNeeded):
        return True
    own = record and record.model_copy(update={"replacing": None})  # as `begin` wrote it
    return own is None or content_version(record_bytes(own)) != attempt.began


def discard(store: Store, attempt: str, *, keep_record: bool = False) -> None:
    """Remove an attempt as `abandon` does, but log errors, so that they do not hide an earlier one."""
    try:
        abandon(store, attempt, keep_record=keep_record)
    except UcformatError as error:
        _log.warning(
            "the attempt %s could not be removed: %s; `ucp gc` removes it", attempt, error.message
        )


def give_up(store: Store, attempt: Attempt) -> None:
    """Remove an uncommitted attempt as `discard` does, unless another writer has continued it."""
    key = record_key(attempt.id)
    try:
        record = parse_record(store.read(key))
        if attempt.began is None or record is None:
            return
        dying = record_bytes(record.model_copy(update={"removed": datetime.now(UTC)}))
        # fails if another writer has continued the attempt, and so changed the record
        version = store.replace(key, dying, attempt.began)
        committed = find_manifest(store)
        try:
            if committed is None or committed.attempt != attempt.id:
                abandon(store, attempt.id)
                return
        except UcformatError as error:
            _log.debug("the attempt %s could not be removed: %s", attempt.id, error.message)
        store.replace(key, record_bytes(record), version)  # so that the same command continues it
    except UcformatError as error:
        _log.debug("the attempt %s stays: %s", attempt.id, error.message)


def abandon(store: Store, attempt: str, *, keep_record: bool = False) -> None:
    """Delete all files of an attempt, its record last, and then the writer's folders if they are empty.

    Places whose files the attempt needed are told that it no longer does.

    Args:
        keep_record: leave the record, so that `gc` finds what others with the same plan still write
            (default: false).
    """
    refuse_others(store, attempt, find_manifest(store))
    record = None
    with suppress(NotFound):
        record = parse_record(store.read(record_key(attempt)))
    for folder in folders_of(attempt):
        store.delete_prefix(folder)
    if keep_record:
        return
    store.flush()  # after a power failure nobody would know whose files these are without the record
    if record is not None and record.needs:
        for tell in on_abandon:
            tell(store, record)
    store.delete(record_key(attempt))
    for folder in FOLDERS:
        store.prune(folder)


def new_id() -> str:
    """A new random checkpoint id: 32 hexadecimal digits."""
    return uuid4().hex
