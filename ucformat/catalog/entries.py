"""What the catalog gives back: frozen values, never rows of the database."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from ucformat.catalog.models import (
    Alias,
    Checkpoint,
    Config,
    Hold,
    Location,
    Metric,
    Note,
    Run,
    Tag,
    Verification,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from datetime import datetime

    from sqlalchemy import BindParameter, Connection, Row

__all__ = ["Entry", "HoldEntry", "NoteEntry", "VerificationEntry", "load", "load_ids"]

_PAGE = 5000  # serials in one IN list
_SERIALS: BindParameter[Any] = sa.bindparam("serials", expanding=True)
_ORDER: dict[Any, Any] = {
    Alias: Alias.name,
    Hold: Hold.id,
    Location: Location.id,
    Metric: Metric.name,
    Note: Note.id,
    Tag: Tag.name,
    Verification: Verification.id,
}
#: What is made once: to put a query together takes SQLAlchemy longer than the database takes to answer it.
_ROWS = {t: sa.select(t.__table__).where(t.checkpoint.in_(_SERIALS)).order_by(o) for t, o in _ORDER.items()}
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


def load(connection: Connection, serials: Sequence[int], now: datetime) -> list[Entry]:
    """The entries of these checkpoints, in this order."""
    found: dict[int, Entry] = {}
    for at in range(0, len(serials), _PAGE):
        found |= _load_page(connection, serials[at : at + _PAGE], now)
    return [found[s] for s in serials]


def load_ids(connection: Connection, ids: Sequence[str], now: datetime) -> list[Entry]:
    """The entries of the checkpoints of these ids, in this order."""
    serials: dict[str, int] = {}
    for at in range(0, len(ids), _PAGE):
        page = Checkpoint.id.in_(ids[at : at + _PAGE])
        serials |= dict(connection.execute(sa.select(Checkpoint.id, Checkpoint.serial).where(page)).all())
    return load(connection, [serials[i] for i in ids], now)


def _load_page(connection: Connection, serials: Sequence[int], now: datetime) -> dict[int, Entry]:
    said: dict[int, list[str]] = {}

    def many(table: Any, name: str | None, value: Callable[[Row[Any]], Any]) -> dict[int, list[Any]]:
        grouped: dict[int, list[Any]] = {}
        for row in connection.execute(_ROWS[table], {"serials": serials}):
            grouped.setdefault(row.checkpoint, []).append(value(row))
            if name is not None and row.said_at is not None:
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
