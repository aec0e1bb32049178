"""Exporting the annotations of checkpoints to the documents beside them, and importing these documents.

A document is written after a change, by the process that made it or a later one (`stale` lists
those that are due). It is imported when the checkpoint is recorded, so that a new catalog, or
another team's, has all annotations again.

Anyone who can write beside a checkpoint can write its document. Therefore, unless it is trusted, a
document applies to its own place only; it can protect a checkpoint, but undo nothing that was
recorded in this catalog (docs/security.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import sqlalchemy as sa
from pydantic import BaseModel

from ucformat.catalog.labels import alias_target, last_version, record_untag, set_tag
from ucformat.catalog.lineage import insert_edge
from ucformat.catalog.models import (
    AliasClaim,
    AliasMove,
    AliasRow,
    CheckpointRow,
    Edge,
    Event,
    Hold,
    Identity,
    Location,
    Metric,
    Note,
    RunRow,
    Tag,
    Untag,
    stored_metric,
)
from ucformat.catalog.recording import set_run
from ucformat.catalog.retention import RetentionHold, protections, retention_rows
from ucformat.catalog.rows import (
    COMMITTED_AGAIN,
    event,
    exists,
    insert_if_absent,
    lock,
    lock_names,
    pages,
    touch,
    unindexed,
    update_checkpoints,
)
from ucformat.catalog.stamp import GRACE, clocks
from ucformat.schema.documents import (
    AliasDoc,
    CatalogDoc,
    EdgeDoc,
    HoldDoc,
    MetricDoc,
    NoteDoc,
    ReasonDoc,
    TagDoc,
    UntagDoc,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from sqlalchemy import ColumnElement, Connection

    from ucformat.catalog.stamp import Stamp

_Doc = TypeVar("_Doc", bound=BaseModel)

#: The largest revision or version that is accepted from a document, which leaves room to count on.
MAX_REVISION = 2**30


@dataclass(frozen=True, slots=True)
class StaleDocument:
    """A checkpoint whose document has to be written, and its places."""

    serial: int
    urls: tuple[str, ...]


def stale(
    connection: Connection, limit: int | None, first: Collection[int] = ()
) -> list[StaleDocument]:
    """Find checkpoints whose documents are out of date.

    Args:
        limit: the maximum number, besides those in `first` (None: all).
        first: serials of checkpoints to list first; the others follow, newest first.
    """
    due = sa.select(CheckpointRow.serial).where(
        CheckpointRow.document_due > 0, unindexed(CheckpointRow.state).in_(("committed", "deleted"))
    )
    chosen = list(connection.scalars(due.where(CheckpointRow.serial.in_(first)))) if first else []
    others = due.where(CheckpointRow.serial.not_in(chosen)) if chosen else due
    chosen += connection.scalars(
        others.order_by(unindexed(CheckpointRow.serial).desc()).limit(limit)
    )
    urls: dict[int, list[str]] = {s: [] for s in chosen}
    for page in pages(chosen):
        places = sa.select(Location.checkpoint, Location.url).where(Location.checkpoint.in_(page))
        for row in connection.execute(places):
            urls[row.checkpoint].append(row.url)
    return [StaleDocument(s, tuple(u)) for s, u in urls.items()]


def mark_written(connection: Connection, serial: int, revision: int) -> None:
    """Record that a document was written."""
    connection.execute(
        sa.update(CheckpointRow)
        .where(CheckpointRow.serial == serial, CheckpointRow.document_written < revision)
        .values(document_written=revision)
    )


def compose(connection: Connection, serial: int, url: str | None = None) -> CatalogDoc:
    """Compose the document of a checkpoint from the current state of the catalog.

    Args:
        url: the place of the document. What the catalog has from it and keeps for this place only,
            such as a deletion, is included; the same from documents of other places is not.
    """

    def rows(table: Any, *where: Any) -> Any:
        chosen = sa.select(table.__table__).where(table.checkpoint == serial, *where)
        return connection.execute(chosen.order_by(*table.__table__.primary_key.columns))

    def docs(kind: type[_Doc], table: Any, *where: Any) -> tuple[_Doc, ...]:
        return tuple(kind.model_validate(r, from_attributes=True) for r in rows(table, *where))

    row = connection.execute(
        sa.select(CheckpointRow.__table__, RunRow.name.label("run"))
        .outerjoin(RunRow, RunRow.id == CheckpointRow.run_id)
        .where(CheckpointRow.serial == serial)
    ).one()
    edges = connection.execute(
        sa.select(Edge.__table__).where(Edge.child == serial).order_by(Edge.id)
    )
    its_own = sa.or_(Location.spared, Location.deleted.is_not(None))
    here = (Location.checkpoint == serial, Location.url == url, its_own)
    deletion = (
        connection.execute(
            sa.select(Location.deleted, Location.purge_after).where(*here)
        ).one_or_none()
        or row
    )
    aliases = {a.name: a for a in docs(AliasDoc, AliasRow)}
    for claim in docs(AliasDoc, AliasClaim, AliasClaim.document_url == url):
        aliases.setdefault(claim.name, claim)
    removed = sa.or_(Untag.document_url.is_(None), Untag.document_url == url)
    return CatalogDoc(
        id=row.id,
        catalog=_identity(connection),
        revision=row.document_revision,
        run=row.run,
        deleted=deletion.deleted,
        purge_after=deletion.purge_after,
        aliases=tuple(aliases.values()),
        tags=docs(TagDoc, Tag),
        untags=docs(UntagDoc, Untag, removed),
        holds=docs(HoldDoc, Hold, Hold.released.is_(None)),
        metrics={r.name: MetricDoc(value=r.value, measured=r.measured) for r in rows(Metric)},
        notes=docs(NoteDoc, Note),
        lineage=tuple(
            EdgeDoc.model_validate(
                {"kind": r.kind, "url": r.parent_url, "id": r.parent_id, "depends": r.depends}
            )
            for r in edges
        ),
    )


def reasons_at(connection: Connection, serial: int, url: str) -> tuple[ReasonDoc, ...]:
    """Why this catalog keeps a checkpoint at a place: by its annotations, without those of the document there.

    The catalog that made those keeps it there itself.
    """

    def rows(table: Any, columns: Sequence[Any], *where: ColumnElement[bool]) -> Any:
        ours = sa.or_(table.document_url.is_(None), table.document_url != url)
        chosen = sa.select(*columns).where(table.checkpoint == serial, ours, *where)
        return connection.execute(chosen.order_by(*table.__table__.primary_key.columns))

    holds = (
        RetentionHold(*hold)
        for hold in rows(Hold, (Hold.reason, Hold.until), Hold.released.is_(None))
    )
    return (
        *(ReasonDoc(text=f"alias {name}") for (name,) in rows(AliasRow, (AliasRow.name,))),
        *(ReasonDoc(text=f"tag {name}") for (name,) in rows(Tag, (Tag.name,))),
        *(ReasonDoc(text=hold.text, until=hold.until) for hold in holds),
    )


def _identity(connection: Connection) -> str:
    return connection.execute(sa.select(Identity.id)).scalar_one()


def import_document(
    connection: Connection,
    serial: int,
    doc: CatalogDoc,
    url: str,
    stamp: Stamp,
    *,
    trust: bool = False,
) -> list[str]:
    """Import the document at a place, and return a message for each alias that was not moved.

    A document that this catalog wrote, and that is not newer, changes nothing.
    """
    lock_names(
        connection, *(f"alias {a.name}" for a in doc.aliases), *(e.id or e.url for e in doc.lineage)
    )
    lock(connection, [serial])
    row = connection.execute(
        sa.select(CheckpointRow.__table__).where(CheckpointRow.serial == serial)
    ).one()
    ours = doc.catalog == _identity(connection) and doc.revision <= row.document_written
    if doc.id != row.id or (ours and not trust):  # our own may contain what was refused before
        return []
    before = _content(compose(connection, serial, url))
    # changes of ours are in no document yet
    unwritten = row.document_revision > row.document_written
    origin = _Origin(connection, serial, url, stamp, trust)
    _import_annotations(origin, doc)
    refused = _import_aliases(origin, doc.aliases)
    for edge in doc.lineage:
        insert_edge(connection, serial, edge.kind, edge.url, edge.id, depends=edge.depends)
    if doc.run is not None and not unwritten and doc.revision > row.document_written:
        set_run(connection, serial, doc.run, stamp)
    # documents at several places may have the same revision
    if doc.revision >= row.document_written:
        _import_deletion(origin, row, doc, unwritten=unwritten)
    after = _content(compose(connection, serial, url))
    latest = max(row.document_revision, min(doc.revision, MAX_REVISION))
    # If the document there lacks something, it is `due`, which adds one to the revision, so that
    # `stale` lists the checkpoint.
    due = unwritten or after != _content(doc)
    update_checkpoints(
        connection, [serial], document_revision=latest + due, document_written=latest
    )
    if after != before:
        event(
            connection, "import", stamp, serial, catalog=doc.catalog, revision=doc.revision, url=url
        )
    return refused


@dataclass(frozen=True, slots=True)
class _Origin:
    """The document that is being imported: its checkpoint and place, and whether it is trusted."""

    connection: Connection
    serial: int
    url: str
    stamp: Stamp
    trust: bool

    @property
    def document_url(self) -> str | None:
        """The value of the column `document_url` in rows that come from it."""
        return None if self.trust else self.url

    def may_change(self, document_url: str | None) -> bool:
        """Whether it may remove a row with this `document_url`."""
        return self.trust or document_url == self.url


def _content(doc: CatalogDoc) -> dict[str, Any]:
    """The content of a document, independent of its writer and of the order of its lists."""
    content = doc.model_dump(exclude={"catalog", "revision"}, mode="json")
    return {k: sorted(v, key=repr) if isinstance(v, list) else v for k, v in content.items()}


def _import_deletion(origin: _Origin, row: Any, doc: CatalogDoc, *, unwritten: bool) -> None:
    """Record that another catalog deleted or restored the checkpoint at this place.

    A checkpoint that is deleted at all its places is deleted here too, unless it is protected here
    or was restored here since. Its grace period starts again: the one in the document may be over
    before this catalog knew of the deletion.
    """
    connection, stamp = origin.connection, origin.stamp
    places = sa.update(Location).where(Location.checkpoint == origin.serial)
    here = places.where(Location.url == origin.url)
    if doc.deleted is None:
        connection.execute(here.values(deleted=None, purge_after=None))
        spared = (Location.checkpoint == row.serial, Location.url == origin.url, Location.spared)
        if row.state != "deleted" or unwritten or exists(connection, *spared):
            return
        values = COMMITTED_AGAIN
    else:
        [current] = (
            retention_rows(connection, stamp.now, serials=[row.serial])
            if row.state == "committed"
            else [None]
        )
        since = (Event.checkpoint == row.serial, Event.action == "restore", Event.at >= doc.deleted)
        if current is None or protections(current, stamp.now) or exists(connection, *since):
            return
        connection.execute(here.values(deleted=doc.deleted, purge_after=doc.purge_after))
        if exists(connection, Location.checkpoint == row.serial, Location.deleted.is_(None)):
            return
        end = doc.purge_after if origin.trust else stamp.now + GRACE
        values = {
            "state": "deleted",
            "deleted": doc.deleted if origin.trust else stamp.now,
            "purge_after": end,
        }
        values["deleted_clocks"] = {} if origin.trust else clocks(connection)
    update_checkpoints(connection, [row.serial], **values)


def _import_annotations(origin: _Origin, doc: CatalogDoc) -> None:
    connection, serial = origin.connection, origin.serial
    _import_tags(origin, doc)
    created = (
        sa.select(CheckpointRow.created).where(CheckpointRow.serial == serial).scalar_subquery()
    )
    for name, metric in doc.metrics.items():
        value = None if metric.value is None else stored_metric(metric.value)
        values = {"value": value, "measured": metric.measured, "document_url": origin.document_url}
        keys = {"checkpoint": serial, "name": name}
        if insert_if_absent(connection, Metric, keys, values, Metric.name) is None:
            from_manifest = Metric.measured == created
            older = Metric.measured < metric.measured if origin.trust else _older_documented(metric)
            here = (Metric.checkpoint == serial, Metric.name == name)
            connection.execute(
                sa.update(Metric).where(*here, sa.or_(older, from_manifest)).values(**values)
            )
    for hold in doc.holds:
        keys = {"reason": hold.reason, "created": hold.created, "who": hold.who}
        _import_row(origin, Hold, keys, until=hold.until)
    for note in doc.notes:
        _import_row(origin, Note, {"text": note.text, "created": note.created, "who": note.who})


def _older_documented(metric: MetricDoc) -> ColumnElement[bool]:
    """Whether a recorded metric is from a document too, and older."""
    return sa.and_(Metric.document_url.is_not(None), Metric.measured < metric.measured)


def _import_tags(origin: _Origin, doc: CatalogDoc) -> None:
    """Import tags and removals of tags: the later of the two wins if both are from one place; permanent tags always."""
    connection, serial = origin.connection, origin.serial
    gone = connection.execute(
        sa.select(Untag.name, Untag.removed, Untag.document_url).where(Untag.checkpoint == serial)
    )
    removed = {
        r.name: r.removed
        for r in gone
        if r.document_url is None or origin.may_change(r.document_url)
    }
    url = origin.document_url
    for tag in doc.tags:
        if tag.permanent or tag.name not in removed or tag.created > removed[tag.name]:
            set_tag(
                connection,
                serial,
                tag.name,
                tag.created,
                tag.who,
                permanent=tag.permanent,
                document_url=url,
            )
    here = sa.select(Tag.name, Tag.created, Tag.permanent, Tag.document_url).where(
        Tag.checkpoint == serial
    )
    present = {r.name: r for r in connection.execute(here)}
    for untag in doc.untags:
        tag_here = present.get(untag.name)
        stays = tag_here is not None and (
            tag_here.permanent
            or tag_here.created > untag.removed
            or not origin.may_change(tag_here.document_url)
        )
        if not stays and (untag.name not in removed or untag.removed > removed[untag.name]):
            record_untag(
                connection, serial, untag.name, untag.removed, untag.who, untag.reason, url
            )


def _import_row(origin: _Origin, table: Any, keys: dict[str, Any], **values: Any) -> None:
    """Insert a row unless one with these keys exists; a released hold counts."""
    connection, serial = origin.connection, origin.serial
    same = [getattr(table, k) == v for k, v in keys.items()]
    if (
        connection.scalar(sa.select(table.id).where(table.checkpoint == serial, *same).limit(1))
        is None
    ):
        row = {"checkpoint": serial, **keys, **values, "document_url": origin.document_url}
        connection.execute(sa.insert(table).values(row))


def _import_aliases(origin: _Origin, aliases: Iterable[AliasDoc]) -> list[str]:
    """Create the aliases that do not exist, and record the others as claims; return a message for each of those."""
    connection = origin.connection
    connection.execute(
        sa.delete(AliasClaim).where(
            AliasClaim.checkpoint == origin.serial, AliasClaim.document_url == origin.url
        )
    )
    refused = []
    for alias in {a.name: a for a in aliases}.values():
        here = alias_target(connection, alias.name)
        past = (
            AliasMove.name == alias.name,
            AliasMove.target == origin.serial,
            AliasMove.version == alias.version,
        )
        last = last_version(connection, alias.name)
        if exists(connection, *past) or (last >= alias.version and here == origin.serial):
            continue  # this move is in our history already
        free = here is None or here == origin.serial or origin.trust
        if free and last < alias.version <= MAX_REVISION:
            _take_alias(origin, alias, here)
        elif not origin.trust:
            values = {"checkpoint": origin.serial, "name": alias.name, "document_url": origin.url}
            connection.execute(
                sa.insert(AliasClaim).values(**values, version=alias.version, moved=alias.moved)
            )
            if here is not None:
                refused.append(
                    f"the alias {alias.name!r} was not moved to {origin.url}, as the document "
                    "there records"
                )
    return refused


def _take_alias(origin: _Origin, alias: AliasDoc, here: int | None) -> None:
    connection = origin.connection
    values = {"checkpoint": origin.serial, "version": alias.version, "moved": alias.moved}
    if here is None:
        connection.execute(
            sa.insert(AliasRow).values(name=alias.name, **values, document_url=origin.document_url)
        )
    else:
        connection.execute(sa.update(AliasRow).where(AliasRow.name == alias.name).values(**values))
        touch(connection, [here])
    connection.execute(
        sa.insert(AliasMove).values(
            name=alias.name,
            version=alias.version,
            source=here,
            target=origin.serial,
            moved=alias.moved,
            who=origin.stamp.who,
        )
    )
