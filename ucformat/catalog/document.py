"""Between the catalog and the documents beside checkpoints: what goes into one, and what is taken from one.

The document is written after the change, by whoever has storage at hand (`stale` lists what is due), and taken in when
a checkpoint is recorded: a catalog that is made anew, or another team's, finds it all again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from ucformat.catalog.locks import lock, take_turns
from ucformat.catalog.models import (
    Alias,
    AliasMove,
    Checkpoint,
    Edge,
    Hold,
    Identity,
    Location,
    Metric,
    Note,
    Run,
    Tag,
)
from ucformat.catalog.names import alias_here, touch
from ucformat.catalog.recording import event, insert_edge, insert_if_absent, set_run
from ucformat.schema.catalog_document import (
    AliasDoc,
    CatalogDoc,
    EdgeDoc,
    HoldDoc,
    MetricDoc,
    NoteDoc,
    TagDoc,
)

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from ucformat.catalog.names import Stamp

__all__ = ["Stale", "absorb", "compose", "stale", "written"]


@dataclass(frozen=True, slots=True)
class Stale:
    """A checkpoint whose document has to be written, and the places where it lies."""

    serial: int
    urls: tuple[str, ...]


def stale(connection: Connection, limit: int | None) -> list[Stale]:
    """The checkpoints whose documents are behind the catalog."""
    due = sa.select(Checkpoint.serial).where(
        Checkpoint.document_revision > Checkpoint.document_written, Checkpoint.state.in_(("committed", "deleted"))
    )
    serials = connection.scalars(due.order_by(Checkpoint.serial.desc()).limit(limit)).all()
    urls: dict[int, list[str]] = {s: [] for s in serials}
    for row in connection.execute(sa.select(Location.checkpoint, Location.url).where(Location.checkpoint.in_(serials))):
        urls[row.checkpoint].append(row.url)
    return [Stale(s, tuple(u)) for s, u in urls.items()]


def written(connection: Connection, serial: int, revision: int) -> None:
    """Note that the document of this revision lies beside the checkpoint."""
    connection.execute(
        sa.update(Checkpoint)
        .where(Checkpoint.serial == serial, Checkpoint.document_written < revision)
        .values(document_written=revision)
    )


def compose(connection: Connection, serial: int) -> CatalogDoc:
    """The document of a checkpoint as the catalog has it now."""

    def rows(table: Any, *where: Any) -> Any:
        chosen = sa.select(table.__table__).where(table.checkpoint == serial, *where)
        return connection.execute(chosen.order_by(*table.__table__.primary_key.columns))

    row = connection.execute(
        sa.select(Checkpoint.__table__, Run.name.label("run"))
        .outerjoin(Run, Run.id == Checkpoint.run_id)
        .where(Checkpoint.serial == serial)
    ).one()
    edges = connection.execute(sa.select(Edge.__table__).where(Edge.child == serial).order_by(Edge.id))
    return CatalogDoc(
        id=row.id,
        catalog=_identity(connection),
        revision=row.document_revision,
        run=row.run,
        deleted=row.deleted,
        purge_after=row.purge_after,
        aliases=tuple(AliasDoc(name=r.name, version=r.version, moved=r.moved) for r in rows(Alias)),
        tags=tuple(TagDoc(name=r.name, created=r.created, who=r.who) for r in rows(Tag)),
        holds=tuple(
            HoldDoc(reason=r.reason, until=r.until, created=r.created, who=r.who)
            for r in rows(Hold, Hold.released.is_(None))
        ),
        metrics={r.name: MetricDoc(value=r.value, measured=r.measured) for r in rows(Metric)},
        notes=tuple(NoteDoc(text=r.text, created=r.created, who=r.who) for r in rows(Note)),
        lineage=tuple(
            EdgeDoc.model_validate({"kind": r.kind, "url": r.parent_url, "id": r.parent_id, "depends": r.depends})
            for r in edges
        ),
    )


def _identity(connection: Connection) -> str:
    return connection.execute(sa.select(Identity.id)).scalar_one()


def absorb(connection: Connection, serial: int, doc: CatalogDoc, stamp: Stamp) -> bool:
    """Take from a document what the catalog does not know; whether there was anything it could not know yet.

    A document that this catalog itself wrote, and that is not ahead of it, says nothing new.
    """
    take_turns(connection, *(f"alias {a.name}" for a in doc.aliases), *(e.id or e.url for e in doc.lineage))
    lock(connection, [serial])
    row = connection.execute(sa.select(Checkpoint.__table__).where(Checkpoint.serial == serial)).one()
    if doc.id != row.id or (doc.catalog == _identity(connection) and doc.revision <= row.document_written):
        return False
    if doc.run is not None:
        set_run(connection, serial, doc.run, stamp.now)
    _absorb_words(connection, serial, doc)
    for alias in doc.aliases:
        _absorb_alias(connection, serial, alias, stamp)
    for edge in doc.lineage:
        insert_edge(connection, serial, edge.kind, edge.url, edge.id, depends=edge.depends)
    latest = max(row.document_revision, doc.revision)
    behind = row.document_revision > row.document_written  # something of ours is not in it
    values: dict[str, Any] = {"document_revision": latest + behind, "document_written": latest}
    if doc.deleted is not None and row.state == "committed":
        values |= {"state": "deleted", "deleted": doc.deleted, "purge_after": doc.purge_after}
    connection.execute(sa.update(Checkpoint).where(Checkpoint.serial == serial).values(**values))
    event(connection, "absorb", stamp.who, stamp.now, serial, catalog=doc.catalog, revision=doc.revision)
    return True


def _absorb_words(connection: Connection, serial: int, doc: CatalogDoc) -> None:
    for tag in doc.tags:
        keys = {"checkpoint": serial, "name": tag.name}
        insert_if_absent(connection, Tag, keys, {"created": tag.created, "who": tag.who}, Tag.name)
    for name, metric in doc.metrics.items():
        values = {"value": metric.value, "measured": metric.measured}
        keys = {"checkpoint": serial, "name": name}
        if insert_if_absent(connection, Metric, keys, values, Metric.name) is None:
            older = (Metric.checkpoint == serial, Metric.name == name, Metric.measured < metric.measured)
            connection.execute(sa.update(Metric).where(*older).values(**values))
    for hold in doc.holds:
        _absorb_row(
            connection,
            Hold,
            serial,
            {"reason": hold.reason, "created": hold.created, "who": hold.who},
            until=hold.until,
        )
    for note in doc.notes:
        _absorb_row(connection, Note, serial, {"text": note.text, "created": note.created, "who": note.who})


def _absorb_row(connection: Connection, table: Any, serial: int, keys: dict[str, Any], **values: Any) -> None:
    """Insert a row unless one with these values is there, released or not."""
    same = [getattr(table, k) == v for k, v in keys.items()]
    if connection.scalar(sa.select(table.id).where(table.checkpoint == serial, *same).limit(1)) is None:
        connection.execute(sa.insert(table).values(checkpoint=serial, **keys, **values))


def _absorb_alias(connection: Connection, serial: int, alias: AliasDoc, stamp: Stamp) -> None:
    """Point an alias here, unless the catalog knows of a later move."""
    here = alias_here(connection, alias.name)
    last = connection.scalar(sa.select(sa.func.max(AliasMove.version)).where(AliasMove.name == alias.name)) or 0
    if last >= alias.version:
        return
    values = {"checkpoint": serial, "version": alias.version, "moved": alias.moved}
    if here is None:
        connection.execute(sa.insert(Alias).values(name=alias.name, **values))
    else:
        connection.execute(sa.update(Alias).where(Alias.name == alias.name).values(**values))
        touch(connection, [here])
    connection.execute(
        sa.insert(AliasMove).values(
            name=alias.name,
            version=alias.version,
            source=here,
            target=serial,
            moved=alias.moved,
            who=stamp.who,
        )
    )
