"""Between the catalog and the documents beside checkpoints: what goes into one, and what is taken from one.

The document is written after the change, by whoever has storage at hand (`stale` lists what is due), and taken in when
a checkpoint is recorded: a catalog that is made anew, or another team's, finds it all again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from ucformat.catalog.deletion import retention_rows
from ucformat.catalog.locks import lock, take_turns
from ucformat.catalog.models import (
    Alias,
    AliasMove,
    Checkpoint,
    Edge,
    Event,
    Hold,
    Identity,
    Location,
    Metric,
    Note,
    Run,
    Tag,
    Untag,
)
from ucformat.catalog.names import alias_here, put_tag, take_off
from ucformat.catalog.recording import insert_edge, set_run, stored_metric
from ucformat.catalog.retention import protections
from ucformat.catalog.rows import event, insert_if_absent, touch
from ucformat.schema.catalog_document import (
    AliasDoc,
    CatalogDoc,
    EdgeDoc,
    HoldDoc,
    MetricDoc,
    NoteDoc,
    TagDoc,
    UntagDoc,
)

if TYPE_CHECKING:
    from collections.abc import Collection

    from sqlalchemy import Connection

    from ucformat.catalog.names import Stamp

__all__ = ["Stale", "absorb", "compose", "stale", "written"]

_PAGE = 5000  # serials in one IN list


@dataclass(frozen=True, slots=True)
class Stale:
    """A checkpoint whose document has to be written, and the places where it lies."""

    serial: int
    urls: tuple[str, ...]


def stale(connection: Connection, limit: int | None, first: Collection[int] = ()) -> list[Stale]:
    """Checkpoints whose documents are behind the catalog: these first, then the newest; so many besides these."""
    due = sa.select(Checkpoint.serial).where(
        Checkpoint.document_revision > Checkpoint.document_written, Checkpoint.state.in_(("committed", "deleted"))
    )
    chosen = list(connection.scalars(due.where(Checkpoint.serial.in_(first)))) if first else []
    others = due.where(Checkpoint.serial.not_in(chosen)) if chosen else due
    chosen += connection.scalars(others.order_by(Checkpoint.serial.desc()).limit(limit))
    urls: dict[int, list[str]] = {s: [] for s in chosen}
    for at in range(0, len(chosen), _PAGE):
        some = Location.checkpoint.in_(chosen[at : at + _PAGE])
        for row in connection.execute(sa.select(Location.checkpoint, Location.url).where(some)):
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
        tags=tuple(TagDoc(name=r.name, created=r.created, who=r.who, permanent=r.permanent) for r in rows(Tag)),
        untags=tuple(UntagDoc(name=r.name, removed=r.removed, who=r.who, reason=r.reason) for r in rows(Untag)),
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
    """Take from a document what the catalog does not know; whether there was anything.

    A document that this catalog itself wrote, and that is not ahead of it, says nothing new.
    """
    take_turns(connection, *(f"alias {a.name}" for a in doc.aliases), *(e.id or e.url for e in doc.lineage))
    lock(connection, [serial])
    row = connection.execute(sa.select(Checkpoint.__table__).where(Checkpoint.serial == serial)).one()
    if doc.id != row.id or (doc.catalog == _identity(connection) and doc.revision <= row.document_written):
        return False
    before = _content(compose(connection, serial))
    unsaid = row.document_revision > row.document_written  # something of ours is in no document yet
    _absorb_words(connection, serial, doc)
    for alias in doc.aliases:
        _absorb_alias(connection, serial, alias, stamp)
    for edge in doc.lineage:
        insert_edge(connection, serial, edge.kind, edge.url, edge.id, depends=edge.depends)
    if doc.revision > row.document_written:
        if doc.run is not None and not unsaid:
            set_run(connection, serial, doc.run, stamp.now)
        _absorb_deletion(connection, row, doc, stamp, unsaid=unsaid)
    after = _content(compose(connection, serial))
    latest = max(row.document_revision, doc.revision)
    due = unsaid or after != _content(doc)
    values = {"document_revision": latest + due, "document_written": latest}
    connection.execute(sa.update(Checkpoint).where(Checkpoint.serial == serial).values(**values))
    if after != before:
        event(connection, "absorb", stamp.who, stamp.now, serial, catalog=doc.catalog, revision=doc.revision)
    return after != before


def _content(doc: CatalogDoc) -> dict[str, Any]:
    """What a document says, whoever wrote it, in whatever order."""
    said = doc.model_dump(exclude={"catalog", "revision"}, mode="json")
    return {k: sorted(v, key=repr) if isinstance(v, list) else v for k, v in said.items()}


def _absorb_deletion(connection: Connection, row: Any, doc: CatalogDoc, stamp: Stamp, *, unsaid: bool) -> None:
    """Delete or restore what the others did; but never what is protected here, or what was restored here since."""
    if doc.deleted is not None and row.state == "committed":
        [now] = retention_rows(connection, stamp.now, serials=[row.serial])
        since = (Event.checkpoint == row.serial, Event.action == "restore", Event.at >= doc.deleted)
        if protections(now, stamp.now) or connection.scalar(sa.select(sa.exists().where(*since))):
            return
        values = {"state": "deleted", "deleted": doc.deleted, "purge_after": doc.purge_after}
    elif doc.deleted is None and row.state == "deleted" and not unsaid:
        values = {"state": "committed", "deleted": None, "purge_after": None}
    else:
        return
    connection.execute(sa.update(Checkpoint).where(Checkpoint.serial == row.serial).values(**values))


def _absorb_words(connection: Connection, serial: int, doc: CatalogDoc) -> None:
    _absorb_tags(connection, serial, doc)
    created = sa.select(Checkpoint.created).where(Checkpoint.serial == serial).scalar_subquery()
    for name, metric in doc.metrics.items():
        values = {"value": None if metric.value is None else stored_metric(metric.value), "measured": metric.measured}
        keys = {"checkpoint": serial, "name": name}
        if insert_if_absent(connection, Metric, keys, values, Metric.name) is None:
            here = (Metric.checkpoint == serial, Metric.name == name)
            older = sa.or_(Metric.measured < metric.measured, Metric.measured == created)  # the latter: the manifest's
            connection.execute(sa.update(Metric).where(*here, older).values(**values))
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


def _absorb_tags(connection: Connection, serial: int, doc: CatalogDoc) -> None:
    """Of a tag and its removal the later one is right, whoever knows of which; a permanent tag in any case."""
    removed = dict(connection.execute(sa.select(Untag.name, Untag.removed).where(Untag.checkpoint == serial)).all())
    for tag in doc.tags:
        if tag.permanent or tag.name not in removed or tag.created > removed[tag.name]:
            put_tag(connection, serial, tag.name, tag.created, tag.who, permanent=tag.permanent)
    here = sa.select(Tag.name, Tag.created, Tag.permanent).where(Tag.checkpoint == serial)
    borne = {r.name: r for r in connection.execute(here)}
    for untag in doc.untags:
        tag_here = borne.get(untag.name)
        stays = tag_here is not None and (tag_here.permanent or tag_here.created > untag.removed)
        if not stays and (untag.name not in removed or untag.removed > removed[untag.name]):
            take_off(connection, serial, untag.name, untag.removed, untag.who, untag.reason)


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
