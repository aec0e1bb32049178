"""Attempts and the commit: what makes a set of files a checkpoint, all at once or not at all (docs/spec.md, "Commit").

    1. `begin`   refuses a committed place (unless it is to be replaced), and puts or replaces the attempt's record.
    2. the writer puts everything below `data/<attempt>`, `objects/<attempt>` and `assets/<attempt>`.
    3. `commit`  makes that durable, then puts `manifest.json` if there is none, or in place of the one `begin` saw.

A removal of an uncommitted attempt first marks its record, on condition that it is the one that was judged: so either
the writer who continues it is refused, or the removal. A replacement marks its own record before it asks for dependents
and protections: so it sees them, or they see the mark (`jobs/dependents.py`, `jobs/documents.py`).

The name of an attempt is made from the digest of its plan, so whoever runs the same plan again continues it, and
every file is put whole under its name: two writers of one attempt write the same bytes.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from ucformat.errors import Conflict, IntegrityError, NotACheckpoint, NotFound, UcformatError, Uncertain, UpgradeNeeded
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
from ucformat.format.digest import document_digest, own_digest
from ucformat.format.hooks import may_replace, on_abandon
from ucformat.format.structure import find_manifest, manifest_bytes, read_manifest
from ucformat.schema.documents import TOMBSTONE
from ucformat.schema.manifest import MANIFEST, Manifest
from ucformat.storage.base import content_version

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ucformat.storage.base import Store

__all__ = [
    "MANIFEST",
    "Attempt",
    "abandon",
    "announce",
    "begin",
    "commit",
    "discard",
    "give_up",
    "new_id",
    "on_commit",
    "settle",
]

_log = logging.getLogger("ucformat")

#: Called with the url and the manifest of every checkpoint that this process commits (the catalog listens here).
on_commit: list[Callable[[str, Manifest], None]] = []


@dataclass(frozen=True, slots=True)
class Attempt:
    """One writer's try. `replaces` is the manifest that it will take the place of, with its version.

    `keeps` is the id that the checkpoint will have, where that is known from the beginning: its own in another form, or
    that which the record has, of one that needs files elsewhere. `began` is the version of the record where nobody had
    put it before.
    """

    id: str
    replaces: tuple[Manifest, str] | None
    keeps: str | None = None
    began: str | None = field(default=None, compare=False)

    def folder(self, kind: str) -> str:
        """Where this attempt keeps its `data`, `objects` or `assets`."""
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
    """Start or continue the attempt at this plan, a JSON value that tells apart all that is to be written.

    Args:
        store: the place.
        plan: what is to be written.
        overwrite: replace a checkpoint that is committed there, unless something protects it.
        name: the attempt's, where it is not to be made of the plan: of a copy, whose files lie where the original's do.
        keeps: the id that the new checkpoint will have, where it takes that of another.
        needs: the places whose files it will need. All who continue such an attempt make a checkpoint of one id.

    Raises:
        Conflict: a checkpoint is committed there already and `overwrite` is false, or it is protected, or one is being
            removed, or what an earlier try at this plan left.
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
    _refuse_tombstone(store)  # looked for last: whoever removes a checkpoint puts it before the manifest goes
    if replaces is not None and not overwrite:
        same = name is None and replaces[0].attempt == _id(_digest(plan, None))
        settle(store)  # whoever hears that it is there relies on it, and its writer may have been killed
        raise Conflict(
            f"{store.url} already holds the committed checkpoint {replaces[0].id}"
            f"{' made by this very plan: nothing is left to do' if same else ''}",
            hint="choose another place, or say overwrite=True (--overwrite) to replace it",
        )
    digest = _digest(plan, replaces and replaces[0].id)
    attempt = Attempt(_id(digest) if name is None else name, replaces, keeps)
    _ask(store, attempt)
    made, began = put_record(store, attempt.id, digest, needs, new_id())
    return replace(attempt, keeps=made or keeps, began=began)


def _refuse_removed(store: Store, attempt: str) -> None:
    """Conflict where somebody removes this attempt, or has removed it; what was written since then goes, too."""
    try:
        record = parse_record(store.read(record_key(attempt)))
        if record is None or record.removed is None:
            return
    except NotFound:
        discard(store, attempt)
    raise being_removed(store, attempt)


def _ask(store: Store, attempt: Attempt) -> None:
    """Ask whether what the attempt replaces may go; of a copy over itself nothing goes."""
    if attempt.replaces is not None and attempt.replaces[0].attempt != attempt.id:
        for ask in may_replace:
            ask(store, attempt.replaces[0], attempt.keeps)


def _refuse_tombstone(store: Store) -> None:
    with suppress(NotFound):
        store.info(TOMBSTONE)
        raise Conflict(
            f"what lay at {store.url} was deleted, and is not yet removed as a whole",
            hint="`ucp gc --apply` ends that; or choose another place",
        )


def _digest(plan: dict[str, Any], replaces: str | None) -> str:
    return document_digest({"plan": plan, "replaces": replaces})


def _id(digest: str) -> str:
    return digest.removeprefix("sha256:")[:20]


def commit(store: Store, attempt: Attempt, manifest: Manifest, data: bytes | None = None) -> Manifest:
    """Make the attempt's files durable and commit them, then drop what they replace; the manifest that stands.

    `data` is the manifest as it is to be written, where that is known to the byte.

    Raises:
        Conflict: somebody else committed there in the meantime, and this attempt's files are dropped; or one that was
            committed there is being removed, or this attempt itself, or what it replaces is protected by now.
        Uncertain: no answer came, so that it may be committed; this attempt's files must stay.
    """
    store.flush()
    store.sweep()
    data = data or manifest_bytes(manifest)
    manifest = manifest.model_copy(update={"digest": own_digest(data)})
    _refuse_tombstone(store)  # of one that was committed and deleted since this began
    if attempt.replaces is not None and attempt.replaces[0].attempt != attempt.id:
        mark_replacing(store, attempt.id)
    _ask(store, attempt)  # once more: a checkpoint may have got a name while this was written
    _refuse_removed(store, attempt.id)
    try:
        if attempt.replaces is None:
            store.put_if_absent(MANIFEST, data)
        else:
            store.replace(MANIFEST, data, attempt.replaces[1])
    except Uncertain as error:
        raise Uncertain(
            f"it cannot be told whether the checkpoint at {store.url} was committed: {error.message}",
            hint="open it: if it is there, it is whole; if not, run this again",
        ) from error
    except Conflict as error:
        winner = find_manifest(store)
        if winner is not None and winner.attempt == attempt.id:  # somebody ran the same plan: it is this checkpoint
            settle(store)
            return winner
        discard(store, attempt.id, keep_record=_is_shared(store, attempt))
        if winner is None:
            raise Conflict(
                f"the checkpoint at {store.url} that was to be replaced was deleted meanwhile",
                hint="this one's files were removed; run it again",
            ) from error
        raise Conflict(
            f"{store.url} was committed by somebody else (checkpoint {winner.id}) while this one was written",
            hint="their checkpoint is whole; this one's files were removed; choose another place and run it again",
        ) from error
    if attempt.replaces is not None and attempt.replaces[0].attempt != attempt.id:
        discard(store, attempt.replaces[0].attempt)
    announce(store.url, manifest)
    return manifest


def settle(store: Store, key: str = MANIFEST) -> None:
    """End what a writer may have left who was killed just after he put a file: that it lasts, and hidden files."""
    with suppress(NotFound):  # replaced, or removed, at this instant
        store.adopt(key)
    store.flush()
    store.sweep()


def announce(url: str, manifest: Manifest) -> None:
    """Tell those who listen that a checkpoint is committed at a place."""
    for listener in on_commit:
        listener(url, manifest)


def _is_shared(store: Store, attempt: Attempt) -> bool:
    """Whether others began this attempt before, or continue it, and may write on after this one has ended."""
    try:
        record = parse_record(store.read(record_key(attempt.id)))
    except NotFound:
        return True
    own = record and record.model_copy(update={"replacing": None})  # as it was put
    return own is None or content_version(record_bytes(own)) != attempt.began


def discard(store: Store, attempt: str, *, keep_record: bool = False) -> None:
    """As `abandon`, where a failure to do so must not hide what happened before."""
    try:
        abandon(store, attempt, keep_record=keep_record)
    except UcformatError as error:
        _log.warning("the attempt %s could not be removed: %s; `ucp gc` ends that", attempt, error.message)


def give_up(store: Store, attempt: Attempt) -> None:
    """As `discard`, of an attempt that was not committed, if nobody else has continued it or is going to.

    Args:
        store: the place.
        attempt: what `begin` gave; one that was begun before stays, and so does one that cannot be removed.
    """
    key = record_key(attempt.id)
    try:
        record = parse_record(store.read(key))
        if attempt.began is None or record is None:
            return
        dying = record_bytes(record.model_copy(update={"removed": datetime.now(UTC)}))
        version = store.replace(key, dying, attempt.began)
        there = find_manifest(store)
        try:
            if there is None or there.attempt != attempt.id:
                abandon(store, attempt.id)
                return
        except UcformatError as error:
            _log.debug("the attempt %s could not be removed: %s", attempt.id, error.message)
        store.replace(key, record_bytes(record), version)  # so that the same command continues it
    except UcformatError as error:
        _log.debug("the attempt %s stays: %s", attempt.id, error.message)


def abandon(store: Store, attempt: str, *, keep_record: bool = False) -> None:
    """Delete all that an attempt wrote, its record last, and the folders that a writer makes, if they are empty then.

    What it needed elsewhere it needs no more.

    Args:
        store: the place.
        attempt: the attempt's name.
        keep_record: leave the record, by which `gc` finds what others who run the same plan write yet.

    Raises:
        UnsafeError: it cannot be told that all of it is this attempt's.
    """
    refuse_others(store, attempt, find_manifest(store))
    record = None
    with suppress(NotFound):
        record = parse_record(store.read(record_key(attempt)))
    for folder in folders_of(attempt):
        store.delete_prefix(folder)
    if keep_record:
        return
    store.flush()  # for after a power failure, nobody would know whose files they are without the record
    if record is not None and record.needs:
        for tell in on_abandon:
            tell(store, record)
    store.delete(record_key(attempt))
    for folder in FOLDERS:
        store.prune(folder)


def new_id() -> str:
    """A fresh checkpoint id."""
    return uuid4().hex
