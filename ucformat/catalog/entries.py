"""What the catalog gives back: frozen values, never rows of the database."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from ucformat.catalog.models import (
    Alias,
    Checkpoint,
    Config,
    Digest,
    Event,
    Hold,
    Location,
    Metric,
    Note,
    Run,
    Tag,
    Tensor,
    Verification,
)
from ucformat.catalog.newest import select_newest_first
from ucformat.catalog.rows import MAX_IN_LIST

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from datetime import datetime

    from sqlalchemy import BindParameter, ColumnElement, Connection, Row

__all__ = [
    "NEWEST",
    "Entry",
    "EventEntry",
    "HoldEntry",
    "NoteEntry",
    "TensorEntry",
    "VerificationEntry",
    "count_checkpoints",
    "find_digest",
    "find_serials",
    "load_by_id",
    "load_entries",
    "load_events",
    "load_tensors",
]

_SERIALS: BindParameter[Any] = sa.bindparam("serials", expanding=True)
_TABLE_ORDER: dict[Any, Any] = {
    Alias: Alias.name,
    Hold: Hold.id,
    Location: Location.id,
    Metric: Metric.name,
    Note: Note.id,
    Tag: Tag.name,
    Verification: Verification.id,
}
#: What is made once: to put a query together takes SQLAlchemy longer than the database takes to answer it.
_ROWS = {t: sa.select(t.__table__).where(t.checkpoint.in_(_SERIALS)).order_by(o) for t, o in _TABLE_ORDER.items()}
_CHECKPOINTS = (
    sa.select(Checkpoint.__table__, Run.name.label("run"), Config.document.label("config"))
    .outerjoin(Run, Run.id == Checkpoint.run_id)
    .outerjoin(Config, Config.id == Checkpoint.config_id)
    .where(Checkpoint.serial.in_(_SERIALS))
)


@dataclass(frozen=True, slots=True)
class HoldEntry:
    """Why a checkpoint must not be deleted; without `until`, as long as nobody releases it."""

    id: int
    reason: str
    until: datetime | None
    created: datetime
    who: str


@dataclass(frozen=True, slots=True)
class NoteEntry:
    """What somebody wrote about a checkpoint."""

    text: str
    created: datetime
    who: str


@dataclass(frozen=True, slots=True)
class VerificationEntry:
    """What a verification found; `problems` are the first of them."""

    at: datetime
    ok: bool
    url: str
    bytes_verified: int
    bytes_unverified: int
    problems: tuple[str, ...]
    tool: str


@dataclass(frozen=True, slots=True)
class Entry:
    """A checkpoint as the catalog knows it.

    `kind` is `ucformat`, or the engine that wrote it; `state` is committed, deleted, purging, purged or replaced. It
    lies at `urls`; a foreign one's extents are in `files` files, `files_nbytes` large. `holds` are those in force. A
    metric that is not a number is NaN. `from_documents` names what documents beside it said, and nobody to this
    catalog: `tag good`, `hold 3`.
    """

    id: str
    kind: str
    state: str
    run: str | None
    step: int | None
    commits: int | None
    created: datetime
    recorded: datetime
    deleted: datetime | None
    purge_after: datetime | None
    tensors: int
    nbytes: int
    files: int | None
    files_nbytes: int | None
    format_version: int | None
    engine: str | None
    producer: Mapping[str, Any] = field(default_factory=dict)
    topology: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    urls: tuple[str, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    holds: tuple[HoldEntry, ...] = ()
    notes: tuple[NoteEntry, ...] = ()
    verified: VerificationEntry | None = None
    from_documents: tuple[str, ...] = ()

    @property
    def url(self) -> str | None:
        """The first place where it lies; None if it is gone."""
        return self.urls[0] if self.urls else None

    @property
    def name(self) -> str:
        """How people call it: `run7@1000`, else the beginning of its id."""
        return self.id[:12] if self.run is None or self.step is None else f"{self.run}@{self.step}"


def load_entries(connection: Connection, serials: Sequence[int], now: datetime) -> list[Entry]:
    """The entries of these checkpoints, in this order."""
    found: dict[int, Entry] = {}
    for at in range(0, len(serials), MAX_IN_LIST):
        found |= _load_page(connection, serials[at : at + MAX_IN_LIST], now)
    return [found[s] for s in serials]


def load_by_id(connection: Connection, ids: Sequence[str], now: datetime) -> list[Entry]:
    """The entries of the checkpoints of these ids, in this order."""
    serials: dict[str, int] = {}
    for at in range(0, len(ids), MAX_IN_LIST):
        page = Checkpoint.id.in_(ids[at : at + MAX_IN_LIST])
        serials |= dict(connection.execute(sa.select(Checkpoint.id, Checkpoint.serial).where(page)).all())
    return load_entries(connection, [serials[i] for i in ids], now)


def _load_page(connection: Connection, serials: Sequence[int], now: datetime) -> dict[int, Entry]:
    said: dict[int, list[str]] = {}

    def many(table: Any, name: str | None, value: Callable[[Row[Any]], Any]) -> dict[int, list[Any]]:
        grouped: dict[int, list[Any]] = {}
        for row in connection.execute(_ROWS[table], {"serials": serials}):
            grouped.setdefault(row.checkpoint, []).append(value(row))
            if name is not None and row.document_url is not None:
                said.setdefault(row.checkpoint, []).append(f"{table.__tablename__} {getattr(row, name)}")
        return grouped

    metrics = many(Metric, "name", lambda r: (r.name, float("nan") if r.value is None else r.value))
    tags = many(Tag, "name", lambda r: r.name)
    aliases = many(Alias, "name", lambda r: r.name)
    urls = many(Location, None, lambda r: r.url)
    holds = many(Hold, "id", lambda r: r)
    notes = many(Note, "text", lambda r: NoteEntry(r.text, r.created, r.who))
    verified = many(Verification, None, _verification)
    rows = connection.execute(_CHECKPOINTS, {"serials": serials})
    return {
        r.serial: Entry(
            id=r.id,
            kind=r.kind,
            state=r.state,
            run=r.run,
            step=r.step,
            commits=r.commits,
            created=r.created,
            recorded=r.recorded,
            deleted=r.deleted,
            purge_after=r.purge_after,
            tensors=r.tensors,
            nbytes=r.nbytes,
            files=r.files,
            files_nbytes=r.files_nbytes,
            format_version=r.format_version,
            engine=r.engine,
            producer=r.producer,
            topology=r.topology,
            config=r.config or {},
            urls=_tuple(urls.get(r.serial)),
            metrics=dict(metrics.get(r.serial, ())),
            tags=_tuple(tags.get(r.serial)),
            aliases=_tuple(aliases.get(r.serial)),
            holds=tuple(
                HoldEntry(h.id, h.reason, h.until, h.created, h.who)
                for h in holds.get(r.serial, ())
                if h.released is None and (h.until is None or h.until > now)
            ),
            notes=_tuple(notes.get(r.serial)),
            verified=verified[r.serial][-1] if r.serial in verified else None,
            from_documents=tuple(sorted(said.get(r.serial, ()))),
        )
        for r in rows
    }


def _tuple(found: Iterable[Any] | None) -> tuple[Any, ...]:
    return tuple(found or ())


def _verification(r: Row[Any]) -> VerificationEntry:
    return VerificationEntry(r.at, r.ok, r.url, r.bytes_verified, r.bytes_unverified, tuple(r.problems), r.tool)


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


def find_serials(
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


def count_checkpoints(connection: Connection, where: str, now: datetime, *, deleted: bool) -> int:
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


def load_tensors(connection: Connection, serial: int) -> list[TensorEntry]:
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


def find_digest(connection: Connection, digest: str) -> dict[int, list[TensorEntry]]:
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


def load_events(connection: Connection, serial: int | None, limit: int) -> list[EventEntry]:
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
