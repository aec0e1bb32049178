"""Questions to the catalog that are one statement each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from ucformat.catalog.models import Checkpoint, Digest, Event, Tensor
from ucformat.catalog.newest import select_newest_first

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from sqlalchemy import ColumnElement, Connection

__all__ = ["NEWEST", "EventEntry", "TensorEntry", "count", "events", "find", "holding", "tensors"]


#: The order unless another is asked for (`catalog.newest`).
NEWEST = "newest"


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a checkpoint, as its manifest lists it."""

    name: str
    state: str
    dtype: str
    shape: tuple[int, ...]
    chunk: tuple[int, ...] | None
    shard: tuple[int, ...] | None
    nbytes: int
    digest: str | None


@dataclass(frozen=True, slots=True)
class EventEntry:
    """A line of the audit log."""

    at: datetime
    who: str
    action: str
    id: str | None
    detail: Mapping[str, Any]


def find(
    connection: Connection,
    where: str,
    now: datetime,
    *,
    sort: str,
    limit: int | None,
    offset: int,
    deleted: bool,
) -> list[int]:
    """The serials of the checkpoints that a filter takes, in order."""
    conditions = _where(connection, where, now, deleted=deleted)
    if sort == NEWEST:
        chosen = select_newest_first(*conditions, first=None if limit is None else offset + limit)
    else:
        chosen = sa.select(Checkpoint.serial).where(*conditions).order_by(*_order(connection, sort, now))
    return list(connection.scalars(chosen.limit(limit).offset(offset)))


def _order(connection: Connection, sort: str, now: datetime) -> list[ColumnElement[Any]]:
    from ucformat.catalog.filter import check_names, compile_sort, parse_sort

    by = parse_sort(sort)
    check_names(connection, by, sort)
    return compile_sort(by, now=now)


def count(connection: Connection, where: str, now: datetime, *, deleted: bool) -> int:
    """How many checkpoints a filter takes."""
    chosen = sa.select(sa.func.count()).select_from(Checkpoint).where(*_where(connection, where, now, deleted=deleted))
    return connection.execute(chosen).scalar_one()


def _where(connection: Connection, where: str, now: datetime, *, deleted: bool) -> list[ColumnElement[bool]]:
    found: list[ColumnElement[bool]] = []
    keys: set[str] = set()
    if where.strip():
        from ucformat.catalog.filter import check_names, compile_filter, parse, used_keys

        node = parse(where)
        check_names(connection, node, where)
        found.append(compile_filter(node, now=now))
        keys = used_keys(node)
    if not deleted and "state" not in keys:
        found.append(Checkpoint.state == "committed")
    return found


def tensors(connection: Connection, serial: int) -> list[TensorEntry]:
    """The tensors of a checkpoint, in the manifest's order."""
    rows = connection.execute(
        sa.select(Tensor.__table__)
        .join(Checkpoint, Checkpoint.tensor_set_id == Tensor.tensor_set_id)
        .where(Checkpoint.serial == serial)
        .order_by(Tensor.position)
    ).all()
    digests = dict(connection.execute(_digests(serial)).all())
    return [_tensor(r, digests.get(r.position)) for r in rows]


def _digests(serial: int) -> Any:
    """Position and digest of the tensors of a checkpoint."""
    block = sa.select(Checkpoint.digest_block).where(Checkpoint.serial == serial).scalar_subquery()
    return sa.select(Digest.position, Digest.digest).where(Digest.block == block, Digest.checkpoint == serial)


def holding(connection: Connection, digest: str) -> dict[int, list[TensorEntry]]:
    """The serials of the checkpoints that hold a tensor with this digest, and the tensors."""
    blocks = sa.select(Checkpoint.__table__.alias().c.digest_block)  # IN: for a join SQLite would scan all digests
    query = (
        sa.select(Digest.checkpoint, Tensor.__table__, Digest.digest)
        .join(Checkpoint, Checkpoint.serial == Digest.checkpoint)
        .join(Tensor, sa.and_(Tensor.tensor_set_id == Checkpoint.tensor_set_id, Tensor.position == Digest.position))
        .where(Digest.block.in_(blocks), Digest.digest == digest)
        .order_by(Digest.checkpoint, Digest.position)
    )
    found: dict[int, list[TensorEntry]] = {}
    for r in connection.execute(query):
        found.setdefault(r.checkpoint, []).append(_tensor(r, r.digest))
    return found


def _tensor(r: Any, digest: str | None) -> TensorEntry:
    return TensorEntry(
        r.name, r.state, r.dtype, _split(r.shape) or (), _split(r.chunk), _split(r.shard), r.nbytes, digest
    )


def _split(text: str | None) -> tuple[int, ...] | None:
    return None if text is None else tuple(map(int, text.split(","))) if text else ()


def events(connection: Connection, serial: int | None, limit: int) -> list[EventEntry]:
    """The audit log, the newest first."""
    query = (
        sa.select(Event.at, Event.who, Event.action, Checkpoint.id, Event.detail)
        .outerjoin(Checkpoint, Checkpoint.serial == Event.checkpoint)
        .order_by(Event.id.desc())
        .limit(limit)
    )
    if serial is not None:
        query = query.where(Event.checkpoint == serial)
    return [EventEntry(*r) for r in connection.execute(query)]
