"""The queries that load the values of `catalog.entries`."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from ucformat.catalog.entries import (
    AliasEntry,
    CertificationEntry,
    Entry,
    HoldEntry,
    MoveEntry,
    NoteEntry,
    VerificationEntry,
)
from ucformat.catalog.launches import load_continuations
from ucformat.catalog.models import (
    AliasMove,
    AliasRow,
    CertificateRow,
    CheckpointRow,
    Config,
    Hold,
    Location,
    Metric,
    Note,
    RunRow,
    Tag,
    Verification,
)
from ucformat.catalog.rows import pages

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import datetime

    from sqlalchemy import BindParameter, Connection, Row


_SERIALS: BindParameter[Any] = sa.bindparam("serials", expanding=True)
_TABLE_ORDER: dict[Any, Any] = {
    AliasRow: AliasRow.name,
    CertificateRow: CertificateRow.id,
    Hold: Hold.id,
    Location: Location.id,
    Metric: Metric.name,
    Note: Note.id,
    Tag: Tag.name,
    Verification: Verification.id,
}
#: Columns of which entries say nothing.
_UNREAD: dict[Any, tuple[str, ...]] = {
    Location: ("seen", "listing", "deleted", "purge_after", "spared"),
    Metric: ("measured",),
    Tag: ("created", "who", "permanent"),
}
#: Built once: SQLAlchemy takes longer to build a query than the database to answer it.
_ROWS = {
    t: sa.select(*(c for c in t.__table__.c if c.name not in _UNREAD.get(t, ())))
    .where(t.checkpoint.in_(_SERIALS))
    .order_by(o)
    for t, o in _TABLE_ORDER.items()
}
#: The attributes of an entry that are columns of the same name. Documents are mostly the same of all
#: checkpoints of a run, so that each is parsed once.
_DOCUMENTS = ("producer", "topology")
_COLUMNS = [
    f.name
    for f in fields(Entry)
    if f.name in CheckpointRow.__table__.c and f.name not in _DOCUMENTS
]
_CHECKPOINTS = (
    sa.select(
        CheckpointRow.serial,
        CheckpointRow.launch_id,
        CheckpointRow.config_id,
        RunRow.name.label("run"),
        *(CheckpointRow.__table__.c[name] for name in _COLUMNS),
        *(sa.cast(CheckpointRow.__table__.c[name], sa.Text).label(name) for name in _DOCUMENTS),
    )
    .outerjoin(RunRow, RunRow.id == CheckpointRow.run_id)
    .where(CheckpointRow.serial.in_(_SERIALS))
)
_CONFIGS = sa.select(Config.id, Config.document).where(Config.id.in_(_SERIALS))


def load_entries(connection: Connection, serials: Sequence[int], now: datetime) -> list[Entry]:
    """Load the entries of checkpoints."""
    entries: dict[int, Entry] = {}
    for page in pages(serials):
        entries |= _load_page(connection, page, now)
    return [entries[s] for s in serials]


def load_by_id(connection: Connection, ids: Sequence[str], now: datetime) -> list[Entry]:
    """As `load_entries`, by id."""
    serials: dict[str, int] = {}
    for page in pages(ids):
        chosen = sa.select(CheckpointRow.id, CheckpointRow.serial).where(CheckpointRow.id.in_(page))
        serials |= dict(connection.execute(chosen).all())
    return load_entries(connection, [serials[i] for i in ids], now)


def _load_page(connection: Connection, serials: Sequence[int], now: datetime) -> dict[int, Entry]:
    documented: dict[int, list[str]] = {}

    def many(
        table: Any, name: str | None, value: Callable[[Row[Any]], Any]
    ) -> dict[int, list[Any]]:
        grouped: dict[int, list[Any]] = {s: [] for s in serials}
        for row in connection.execute(_ROWS[table], {"serials": serials}):
            grouped[row.checkpoint].append(value(row))
            if name is not None and row.document_url is not None:
                documented.setdefault(row.checkpoint, []).append(
                    f"{table.__tablename__} {getattr(row, name)}"
                )
        return grouped

    metrics = many(Metric, "name", lambda r: (r.name, float("nan") if r.value is None else r.value))
    tags = many(Tag, "name", lambda r: r.name)
    aliases = many(AliasRow, "name", lambda r: r.name)
    urls = many(Location, None, lambda r: r.url)
    holds = many(Hold, "id", lambda r: r)
    notes = many(Note, "text", lambda r: NoteEntry(r.text, r.created, r.who))
    verified = many(Verification, None, _verification)
    certified = many(
        CertificateRow, None, lambda r: CertificationEntry(r.at, r.ok, r.url, r.document)
    )
    rows = connection.execute(_CHECKPOINTS, {"serials": serials}).all()
    launches = load_continuations(connection, {r.launch_id for r in rows})
    used = sorted({r.config_id for r in rows if r.config_id is not None})
    configs: dict[int, Any] = dict(connection.execute(_CONFIGS, {"serials": used}).all())
    texts = {text for r in rows for text in (r.producer, r.topology)}
    parsed = {text: json.loads(text) for text in texts}
    entries = {}
    for r in rows:
        launch, family, continues = launches[r.launch_id]
        entries[r.serial] = Entry(
            **{name: getattr(r, name) for name in _COLUMNS},
            producer=parsed[r.producer],
            topology=parsed[r.topology],
            run=r.run,
            launch=launch,
            family=family,
            continues=continues,
            config=configs.get(r.config_id) or {},
            urls=tuple(urls[r.serial]),
            metrics=dict(metrics[r.serial]),
            tags=tuple(tags[r.serial]),
            aliases=tuple(aliases[r.serial]),
            holds=tuple(
                HoldEntry(h.id, h.reason, h.until, h.created, h.who)
                for h in holds[r.serial]
                if h.released is None and (h.until is None or h.until > now)
            ),
            notes=tuple(notes[r.serial]),
            verified=next(reversed(verified[r.serial]), None),
            certified=next(reversed(certified[r.serial]), None),
            from_documents=tuple(sorted(documented.get(r.serial, ()))),
        )
    return entries


def _verification(r: Row[Any]) -> VerificationEntry:
    return VerificationEntry(
        r.at, r.ok, r.url, r.bytes_verified, r.bytes_unverified, tuple(r.problems), r.tool
    )


def load_aliases(connection: Connection) -> list[AliasEntry]:
    """All aliases, sorted by name."""
    rows = connection.execute(
        sa.select(AliasRow.name, CheckpointRow.id, AliasRow.version, AliasRow.moved)
        .join(CheckpointRow, CheckpointRow.serial == AliasRow.checkpoint)
        .order_by(AliasRow.name)
    )
    return [AliasEntry(*r) for r in rows]


def load_alias_history(connection: Connection, name: str) -> list[MoveEntry]:
    """The moves of an alias, oldest first."""
    source, target = CheckpointRow.__table__.alias(), CheckpointRow.__table__.alias()
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
