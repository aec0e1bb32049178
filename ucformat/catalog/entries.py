"""The values that queries of the catalog return, and the queries that load them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from ucformat.catalog.lines import load_continuations
from ucformat.catalog.models import (
    Alias,
    AliasMove,
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
from ucformat.catalog.rows import MAX_IN_LIST

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from datetime import datetime

    from sqlalchemy import BindParameter, Connection, Row


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
#: Built once: SQLAlchemy takes longer to build a query than the database to answer it.
_ROWS = {
    t: sa.select(t.__table__).where(t.checkpoint.in_(_SERIALS)).order_by(o)
    for t, o in _TABLE_ORDER.items()
}
_CHECKPOINTS = (
    sa.select(Checkpoint.__table__, Run.name.label("run"), Config.document.label("config"))
    .outerjoin(Run, Run.id == Checkpoint.run_id)
    .outerjoin(Config, Config.id == Checkpoint.config_id)
    .where(Checkpoint.serial.in_(_SERIALS))
)


@dataclass(frozen=True, slots=True)
class HoldEntry:
    """A hold: why a checkpoint must not be deleted, and until when (None: until it is released)."""

    id: int
    reason: str
    until: datetime | None
    created: datetime
    who: str


@dataclass(frozen=True, slots=True)
class NoteEntry:
    """A note on a checkpoint."""

    text: str
    created: datetime
    who: str


@dataclass(frozen=True, slots=True)
class VerificationEntry:
    """The result of a verification; `problems` has the first 100."""

    at: datetime
    ok: bool
    url: str
    bytes_verified: int
    bytes_unverified: int
    problems: tuple[str, ...]
    tool: str


@dataclass(frozen=True, slots=True)
class Entry:
    """A checkpoint in the catalog.

    `kind` is `ucformat`, or the engine that wrote it; `state` is committed, deleted, purging,
    purged or replaced. `urls` are its places. `files` and `files_nbytes` are the number and bytes
    of a foreign checkpoint's files. `holds` are those that are neither released nor expired.
    `from_documents` names the annotations that come from documents beside it and not from this
    catalog: `tag good`, `hold 3`. `launch` is the id of the launch that saved it, or the folder
    with a slash at the end if it records none, `continues` the positions up to which that continues
    others, and `family` the name of the first of the launches that continue each other.
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
    launch: str | None = None
    continues: Mapping[str, int] = field(default_factory=dict)
    family: str | None = None

    @property
    def url(self) -> str | None:
        """Its first place; None if it is gone."""
        return self.urls[0] if self.urls else None

    @property
    def name(self) -> str:
        """Its short name: `run7@1000`, else the name of its folder or file, else the beginning of its id."""
        if self.run is not None and self.step is not None:
            return f"{self.run}@{self.step}"
        return (self.url or "").rstrip("/").rpartition("/")[2] or self.id[:12]


@dataclass(frozen=True, slots=True)
class LineEntry:
    """A line of a run: its newest checkpoint, how many there are behind it, with it, and their bytes."""

    run: str
    head: Entry
    checkpoints: int
    nbytes: int


def load_entries(connection: Connection, serials: Sequence[int], now: datetime) -> list[Entry]:
    """Load the entries of checkpoints."""
    found: dict[int, Entry] = {}
    for at in range(0, len(serials), MAX_IN_LIST):
        found |= _load_page(connection, serials[at : at + MAX_IN_LIST], now)
    return [found[s] for s in serials]


def load_by_id(connection: Connection, ids: Sequence[str], now: datetime) -> list[Entry]:
    """As `load_entries`, by id."""
    serials: dict[str, int] = {}
    for at in range(0, len(ids), MAX_IN_LIST):
        page = Checkpoint.id.in_(ids[at : at + MAX_IN_LIST])
        serials |= dict(
            connection.execute(sa.select(Checkpoint.id, Checkpoint.serial).where(page)).all()
        )
    return load_entries(connection, [serials[i] for i in ids], now)


def _load_page(connection: Connection, serials: Sequence[int], now: datetime) -> dict[int, Entry]:
    documented: dict[int, list[str]] = {}

    def many(
        table: Any, name: str | None, value: Callable[[Row[Any]], Any]
    ) -> dict[int, list[Any]]:
        grouped: dict[int, list[Any]] = {}
        for row in connection.execute(_ROWS[table], {"serials": serials}):
            grouped.setdefault(row.checkpoint, []).append(value(row))
            if name is not None and row.document_url is not None:
                documented.setdefault(row.checkpoint, []).append(
                    f"{table.__tablename__} {getattr(row, name)}"
                )
        return grouped

    metrics = many(Metric, "name", lambda r: (r.name, float("nan") if r.value is None else r.value))
    tags = many(Tag, "name", lambda r: r.name)
    aliases = many(Alias, "name", lambda r: r.name)
    urls = many(Location, None, lambda r: r.url)
    holds = many(Hold, "id", lambda r: r)
    notes = many(Note, "text", lambda r: NoteEntry(r.text, r.created, r.who))
    verified = many(Verification, None, _verification)
    rows = connection.execute(_CHECKPOINTS, {"serials": serials}).all()
    launches = load_continuations(connection, {r.launch_id for r in rows})
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
            from_documents=tuple(sorted(documented.get(r.serial, ()))),
            launch=launches[r.launch_id][0],
            family=launches[r.launch_id][1],
            continues=launches[r.launch_id][2],
        )
        for r in rows
    }


def _tuple(found: Iterable[Any] | None) -> tuple[Any, ...]:
    return tuple(found or ())


def _verification(r: Row[Any]) -> VerificationEntry:
    return VerificationEntry(
        r.at, r.ok, r.url, r.bytes_verified, r.bytes_unverified, tuple(r.problems), r.tool
    )


@dataclass(frozen=True, slots=True)
class AliasEntry:
    """An alias and the id of the checkpoint that it points to."""

    name: str
    id: str
    version: int
    moved: datetime


@dataclass(frozen=True, slots=True)
class MoveEntry:
    """A move of an alias between the ids of checkpoints: `source` None creates it, `target` None removes it."""

    name: str
    version: int
    source: str | None
    target: str | None
    moved: datetime
    who: str


def load_aliases(connection: Connection) -> list[AliasEntry]:
    """All aliases, sorted by name."""
    rows = connection.execute(
        sa.select(Alias.name, Checkpoint.id, Alias.version, Alias.moved)
        .join(Checkpoint, Checkpoint.serial == Alias.checkpoint)
        .order_by(Alias.name)
    )
    return [AliasEntry(*r) for r in rows]


def load_alias_history(connection: Connection, name: str) -> list[MoveEntry]:
    """The moves of an alias, oldest first."""
    source, target = Checkpoint.__table__.alias(), Checkpoint.__table__.alias()
    rows = connection.execute(
        sa.select(
            AliasMove.name,
            AliasMove.version,
            source.c.id,
            target.c.id,
            AliasMove.moved,
            AliasMove.who,
        )
        .outerjoin(source, source.c.serial == AliasMove.source)
        .outerjoin(target, target.c.serial == AliasMove.target)
        .where(AliasMove.name == name)
        .order_by(AliasMove.version)
    )
    return [MoveEntry(*r) for r in rows]
