"""The record of an attempt, `attempts/<attempt>.json`: who continues it, removes it, or replaces a checkpoint by it."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from pydantic import ValidationError

from ucformat.errors import Conflict, NotFound, Refused
from ucformat.format.ownership import record_key
from ucformat.schema.manifest import AttemptDoc

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucformat.storage.base import Store

__all__ = [
    "TRIES",
    "contended",
    "mark_replacing",
    "parse_record",
    "put_record",
    "record_bytes",
    "removed",
    "replacing_attempts",
]

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
                raise removed(store, attempt)
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


def removed(store: Store, attempt: str) -> Conflict:
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
    except Refused:  # where nothing can be replaced, nobody marks a record, and nobody replaces a checkpoint
        pass
    return True


def contended(store: Store, key: str) -> Conflict:
    """The error of who read a file and was to replace it so many times, and somebody else was quicker each time.

    Args:
        store: the place.
        key: the file's.
    """
    return Conflict(f"{store.url}/{key} was changed again and again by others", hint="try again later")
