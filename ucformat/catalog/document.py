"""Between the catalog and the documents beside checkpoints: what goes into one, and what is taken from one.

The document is written after the change, by whoever has storage at hand (`stale` lists what is due), and taken in when
a checkpoint is recorded: a catalog that is made anew, or another team's, finds it all again.

Whoever can write beside a checkpoint writes its document, so it is believed as docs/security.md says: it speaks for its
own place, may protect, and undoes nothing that was said to this catalog, unless it is trusted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from ucformat.catalog.deletion import retention_rows
from ucformat.catalog.labels import alias_target, record_untag, set_tag
from ucformat.catalog.models import (
    Alias,
    AliasClaim,
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
from ucformat.catalog.recording import insert_edge, set_run, stored_metric
from ucformat.catalog.retention import protections
from ucformat.catalog.rows import MAX_IN_LIST, event, insert_if_absent, lock, take_turns, touch
from ucformat.catalog.stamp import GRACE, clocks
from ucformat.schema.documents import AliasDoc, CatalogDoc, EdgeDoc, HoldDoc, MetricDoc, NoteDoc, TagDoc, UntagDoc

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from sqlalchemy import ColumnElement, Connection

    from ucformat.catalog.stamp import Stamp

__all__ = ["MAX_REVISION", "Stale", "absorb", "compose", "mark_written", "stale"]

#: A revision or version beyond this is nobody's count of changes, and would leave no room to count on.
MAX_REVISION = 2**30


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
    for at in range(0, len(chosen), MAX_IN_LIST):
        some = Location.checkpoint.in_(chosen[at : at + MAX_IN_LIST])
        for row in connection.execute(sa.select(Location.checkpoint, Location.url).where(some)):
            urls[row.checkpoint].append(row.url)
    return [Stale(s, tuple(u)) for s, u in urls.items()]


def mark_written(connection: Connection, serial: int, revision: int) -> None:
    """Note that the document of this revision lies beside the checkpoint."""
    connection.execute(
        sa.update(Checkpoint)
        .where(Checkpoint.serial == serial, Checkpoint.document_written < revision)
        .values(document_written=revision)
    )


def compose(connection: Connection, serial: int, url: str | None = None) -> CatalogDoc:
    """The document of a checkpoint at one of its places, as the catalog has it now.

    What the document there said for itself is in it again, and what those of other places said of theirs is not.
    """

    def rows(table: Any, *where: Any) -> Any:
        chosen = sa.select(table.__table__).where(table.checkpoint == serial, *where)
        return connection.execute(chosen.order_by(*table.__table__.primary_key.columns))

    row = connection.execute(
        sa.select(Checkpoint.__table__, Run.name.label("run"))
        .outerjoin(Run, Run.id == Checkpoint.run_id)
        .where(Checkpoint.serial == serial)
    ).one()
    edges = connection.execute(sa.select(Edge.__table__).where(Edge.child == serial).order_by(Edge.id))
    its_own = sa.or_(Location.spared, Location.deleted.is_not(None))
    here = (Location.checkpoint == serial, Location.url == url, its_own)
    deletion = connection.execute(sa.select(Location.deleted, Location.purge_after).where(*here)).one_or_none() or row
    aliases = {r.name: AliasDoc(name=r.name, version=r.version, moved=r.moved) for r in rows(Alias)}
    for r in rows(AliasClaim, AliasClaim.document_url == url):
        aliases.setdefault(r.name, AliasDoc(name=r.name, version=r.version, moved=r.moved))
    removed = sa.or_(Untag.document_url.is_(None), Untag.document_url == url)
    return CatalogDoc(
        id=row.id,
        catalog=_identity(connection),
        revision=row.document_revision,
        run=row.run,
        deleted=deletion.deleted,
        purge_after=deletion.purge_after,
        aliases=tuple(aliases.values()),
        tags=tuple(TagDoc(name=r.name, created=r.created, who=r.who, permanent=r.permanent) for r in rows(Tag)),
        untags=tuple(
            UntagDoc(name=r.name, removed=r.removed, who=r.who, reason=r.reason) for r in rows(Untag, removed)
        ),
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


def absorb(
    connection: Connection, serial: int, doc: CatalogDoc, url: str, stamp: Stamp, *, trust: bool = False
) -> list[str]:
    """Take from the document at a place what the catalog does not know; what of it was refused.

    A document that this catalog itself wrote, and that is not ahead of it, says nothing new.

    Args:
        connection: a transaction that writes.
        serial: the checkpoint.
        doc: what lies beside it at `url`.
        url: one of its places.
        stamp: who takes it in.
        trust: believe it as if all had been said here: names move, and what is deleted keeps the grace that it has.
    """
    take_turns(connection, *(f"alias {a.name}" for a in doc.aliases), *(e.id or e.url for e in doc.lineage))
    lock(connection, [serial])
    row = connection.execute(sa.select(Checkpoint.__table__).where(Checkpoint.serial == serial)).one()
    ours = doc.catalog == _identity(connection) and doc.revision <= row.document_written
    if doc.id != row.id or (ours and not trust):  # which may hold what was refused before
        return []
    before = _content(compose(connection, serial, url))
    unsaid = row.document_revision > row.document_written  # something of ours is in no document yet
    said = _Origin(connection, serial, url, stamp, trust)
    _absorb_words(said, doc)
    refused = _absorb_aliases(said, doc.aliases)
    for edge in doc.lineage:
        insert_edge(connection, serial, edge.kind, edge.url, edge.id, depends=edge.depends)
    if doc.run is not None and not unsaid and doc.revision > row.document_written:
        set_run(connection, serial, doc.run, stamp.now)
    if doc.revision >= row.document_written:  # several places have documents of one revision
        _absorb_deletion(said, row, doc, unsaid=unsaid)
    after = _content(compose(connection, serial, url))
    latest = max(row.document_revision, min(doc.revision, MAX_REVISION))
    due = unsaid or after != _content(doc)
    values = {"document_revision": latest + due, "document_written": latest}
    connection.execute(sa.update(Checkpoint).where(Checkpoint.serial == serial).values(**values))
    if after != before:
        event(connection, "absorb", stamp.who, stamp.now, serial, catalog=doc.catalog, revision=doc.revision, url=url)
    return refused


@dataclass(frozen=True, slots=True)
class _Origin:
    """Where something of a checkpoint is said, and whether it is believed like what is said here."""

    connection: Connection
    serial: int
    url: str
    stamp: Stamp
    trust: bool

    @property
    def mark(self) -> str | None:
        """What marks it in the catalog."""
        return None if self.trust else self.url

    def changes(self, document_url: str | None) -> bool:
        """Whether it may take back what was said at a place, or here."""
        return self.trust or document_url == self.url


def _content(doc: CatalogDoc) -> dict[str, Any]:
    """What a document says, whoever wrote it, in whatever order."""
    said = doc.model_dump(exclude={"catalog", "revision"}, mode="json")
    return {k: sorted(v, key=repr) if isinstance(v, list) else v for k, v in said.items()}


def _absorb_deletion(said: _Origin, row: Any, doc: CatalogDoc, *, unsaid: bool) -> None:
    """Note that the others deleted it at this place, or restored it; gone from everywhere, it is deleted here as well.

    But never what is protected here, or what was restored here since. Its grace begins anew: the one that a document
    tells may be over before anybody here has heard of the deletion.
    """
    connection, stamp = said.connection, said.stamp
    places = sa.update(Location).where(Location.checkpoint == said.serial)
    here = places.where(Location.url == said.url)
    if doc.deleted is None:
        connection.execute(here.values(deleted=None, purge_after=None))
        spared = sa.exists().where(Location.checkpoint == said.serial, Location.url == said.url, Location.spared)
        if row.state != "deleted" or unsaid or connection.scalar(sa.select(spared)):
            return
        values: dict[str, Any] = {"state": "committed", "deleted": None, "purge_after": None}
    else:
        [now] = retention_rows(connection, stamp.now, serials=[row.serial]) if row.state == "committed" else [None]
        since = (Event.checkpoint == row.serial, Event.action == "restore", Event.at >= doc.deleted)
        if now is None or protections(now, stamp.now) or connection.scalar(sa.select(sa.exists().where(*since))):
            return
        connection.execute(here.values(deleted=doc.deleted, purge_after=doc.purge_after))
        if connection.scalar(
            sa.select(sa.exists().where(Location.checkpoint == said.serial, Location.deleted.is_(None)))
        ):
            return
        over = doc.purge_after if said.trust else stamp.now + GRACE
        values = {"state": "deleted", "deleted": doc.deleted if said.trust else stamp.now, "purge_after": over}
        values["deleted_clocks"] = {} if said.trust else clocks(connection)
    connection.execute(sa.update(Checkpoint).where(Checkpoint.serial == row.serial).values(**values))


def _absorb_words(said: _Origin, doc: CatalogDoc) -> None:
    connection, serial = said.connection, said.serial
    _absorb_tags(said, doc)
    created = sa.select(Checkpoint.created).where(Checkpoint.serial == serial).scalar_subquery()
    for name, metric in doc.metrics.items():
        value = None if metric.value is None else stored_metric(metric.value)
        values = {"value": value, "measured": metric.measured, "document_url": said.mark}
        keys = {"checkpoint": serial, "name": name}
        if insert_if_absent(connection, Metric, keys, values, Metric.name) is None:
            manifests = Metric.measured == created
            older = Metric.measured < metric.measured if said.trust else _older_said(metric)
            here = (Metric.checkpoint == serial, Metric.name == name)
            connection.execute(sa.update(Metric).where(*here, sa.or_(older, manifests)).values(**values))
    for hold in doc.holds:
        keys = {"reason": hold.reason, "created": hold.created, "who": hold.who}
        _absorb_row(said, Hold, keys, until=hold.until)
    for note in doc.notes:
        _absorb_row(said, Note, {"text": note.text, "created": note.created, "who": note.who})


def _older_said(metric: MetricDoc) -> ColumnElement[bool]:
    """Of metrics that documents said, the later one is right."""
    return sa.and_(Metric.document_url.is_not(None), Metric.measured < metric.measured)


def _absorb_tags(said: _Origin, doc: CatalogDoc) -> None:
    """Of a tag and its removal the later one is right, if one place says both; a permanent tag in any case."""
    connection, serial = said.connection, said.serial
    gone = connection.execute(
        sa.select(Untag.name, Untag.removed, Untag.document_url).where(Untag.checkpoint == serial)
    )
    removed = {r.name: r.removed for r in gone if r.document_url is None or said.changes(r.document_url)}
    for tag in doc.tags:
        if tag.permanent or tag.name not in removed or tag.created > removed[tag.name]:
            set_tag(connection, serial, tag.name, tag.created, tag.who, permanent=tag.permanent, document_url=said.mark)
    here = sa.select(Tag.name, Tag.created, Tag.permanent, Tag.document_url).where(Tag.checkpoint == serial)
    borne = {r.name: r for r in connection.execute(here)}
    for untag in doc.untags:
        tag_here = borne.get(untag.name)
        stays = tag_here is not None and (
            tag_here.permanent or tag_here.created > untag.removed or not said.changes(tag_here.document_url)
        )
        if not stays and (untag.name not in removed or untag.removed > removed[untag.name]):
            record_untag(connection, serial, untag.name, untag.removed, untag.who, untag.reason, said.mark)


def _absorb_row(said: _Origin, table: Any, keys: dict[str, Any], **values: Any) -> None:
    """Insert a row unless one with these values is there, released or not."""
    connection, serial = said.connection, said.serial
    same = [getattr(table, k) == v for k, v in keys.items()]
    if connection.scalar(sa.select(table.id).where(table.checkpoint == serial, *same).limit(1)) is None:
        connection.execute(sa.insert(table).values(checkpoint=serial, **keys, **values, document_url=said.mark))


def _absorb_aliases(said: _Origin, aliases: Iterable[AliasDoc]) -> list[str]:
    """Take the names that are free, and note the others as claims; what was refused."""
    connection = said.connection
    connection.execute(
        sa.delete(AliasClaim).where(AliasClaim.checkpoint == said.serial, AliasClaim.document_url == said.url)
    )
    refused = []
    for alias in {a.name: a for a in aliases}.values():
        here = alias_target(connection, alias.name)
        past = (AliasMove.name == alias.name, AliasMove.target == said.serial, AliasMove.version == alias.version)
        last = connection.scalar(sa.select(sa.func.max(AliasMove.version)).where(AliasMove.name == alias.name)) or 0
        if connection.scalar(sa.select(sa.exists().where(*past))) or (last >= alias.version and here == said.serial):
            continue  # we know of that move, and of what came after
        free = here is None or here == said.serial or said.trust
        if free and last < alias.version <= MAX_REVISION:
            _take_alias(said, alias, here)
        elif not said.trust:
            values = {"checkpoint": said.serial, "name": alias.name, "document_url": said.url}
            connection.execute(sa.insert(AliasClaim).values(**values, version=alias.version, moved=alias.moved))
            if here is not None:
                refused.append(
                    f"the document at {said.url} says that {alias.name!r} points there: it stays where it points"
                )
    return refused


def _take_alias(said: _Origin, alias: AliasDoc, here: int | None) -> None:
    connection = said.connection
    values = {"checkpoint": said.serial, "version": alias.version, "moved": alias.moved}
    if here is None:
        connection.execute(sa.insert(Alias).values(name=alias.name, **values, document_url=said.mark))
    else:
        connection.execute(sa.update(Alias).where(Alias.name == alias.name).values(**values))
        touch(connection, [here])
    connection.execute(
        sa.insert(AliasMove).values(
            name=alias.name,
            version=alias.version,
            source=here,
            target=said.serial,
            moved=alias.moved,
            who=said.stamp.who,
        )
    )
