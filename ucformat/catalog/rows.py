"""What all share that write rows into the catalog."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from ucformat.catalog.locks import PAGE, lock
from ucformat.catalog.models import Checkpoint, Event
from ucformat.catalog.plain import storable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from datetime import datetime

    from sqlalchemy import ColumnElement, Connection

__all__ = ["TOUCHED", "begins_with", "event", "events", "insert_if_absent", "one_id", "touch", "update"]

#: Where a connection keeps the checkpoints that `touch` was called for.
TOUCHED = "touched"


def event(connection: Connection, action: str, who: str, now: datetime, checkpoint: int | None, **detail: Any) -> None:
    """Write into the audit log."""
    events(connection, action, who, now, [checkpoint], **detail)


def events(
    connection: Connection, action: str, who: str, now: datetime, checkpoints: Sequence[int | None], **detail: Any
) -> None:
    """Write into the audit log what was done to each of many."""
    values = {"at": now, "who": who, "action": action, "detail": storable(detail)}
    if checkpoints:
        connection.execute(sa.insert(Event), [{**values, "checkpoint": c} for c in checkpoints])


def touch(connection: Connection, serials: Iterable[int]) -> None:
    """Note that the documents beside these checkpoints have to be written again."""
    serials = set(serials)
    connection.info.setdefault(TOUCHED, set()).update(serials)
    lock(connection, serials)
    update(connection, serials, document_revision=Checkpoint.document_revision + 1)


def update(connection: Connection, serials: Iterable[int], **values: Any) -> None:
    """Change checkpoints that are locked."""
    chosen = sorted(serials)
    for at in range(0, len(chosen), PAGE):
        page = Checkpoint.serial.in_(chosen[at : at + PAGE])
        connection.execute(sa.update(Checkpoint).where(page).values(**values))


def one_id(connection: Connection, table: Any, keys: Mapping[str, Any], values: Mapping[str, Any]) -> int:
    """The id of the row with these unique values, which is made if nobody has it yet."""
    where = [getattr(table, k) == v for k, v in keys.items()]
    found = connection.scalar(sa.select(table.id).where(*where))
    if found is None:
        found = insert_if_absent(connection, table, keys, values, table.id)
    if found is None:  # somebody else made it at this instant
        found = connection.execute(sa.select(table.id).where(*where)).scalar_one()
    return int(found)


def insert_if_absent(
    connection: Connection, table: Any, keys: Mapping[str, Any], values: Mapping[str, Any], returning: Any
) -> int | None:
    """Insert a row unless one with these unique values is there; what `returning` says of it, or None."""
    insert: Any
    if connection.dialect.name == "postgresql":  # each dialect is imported only where it is spoken
        from sqlalchemy.dialects.postgresql import insert
    else:
        from sqlalchemy.dialects.sqlite import insert
    statement = (
        insert(table).values(**keys, **values).on_conflict_do_nothing(index_elements=list(keys)).returning(returning)
    )
    found: int | None = connection.execute(statement).scalar()
    return found


def begins_with(column: Any, text: Any) -> ColumnElement[bool]:
    """Whether a text begins with another, to the letter: LIKE has wildcards, and on SQLite takes `A` for `a`."""
    found: ColumnElement[bool] = sa.func.substr(column, 1, sa.func.length(text)) == text
    return found
