"""Deletion in the catalog: the rows from which plans are made, deleting and restoring, and the progress of `gc`.

    committed --delete--> deleted --begin_purge--> purging --end_purge--> purged
              <--restore--        <--stop_purge---

Storage is not touched before `purging`. Deleting or annotating a checkpoint locks its row first, so that of a
concurrent alias and deletion, the later one sees the earlier.
"""

from __future__ import annotations

from bisect import bisect_left
from datetime import timedelta
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from ucformat.catalog.content import remove_digests
from ucformat.catalog.models import Alias, AliasClaim, Checkpoint, Edge, Hold, Location, Metric, Run, Tag
from ucformat.catalog.purge import end_of_grace
from ucformat.catalog.retention import RetentionHold, RetentionRow, needed_by, protections
from ucformat.catalog.rows import MAX_IN_LIST, event, events, lock, touch, update_checkpoints
from ucformat.catalog.stamp import clocks
from ucformat.errors import PermissionDenied

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from datetime import datetime

    from sqlalchemy import BindParameter, ColumnElement, Connection, Executable

    from ucformat.catalog.stamp import Stamp

__all__ = [
    "begin_purge",
    "delete",
    "end_purge",
    "ignore_dependent",
    "protections_at",
    "restore",
    "retention_rows",
    "stop_purge",
]

_LIVE = ("committed", "deleted", "purging")
_AFTER = "0"  # the character after the slash: texts that begin with `a/` are between `a/` and `a0`
_FEW = 100  # checkpoints and places whose edges are looked up by index
_SERIALS: BindParameter[Any] = sa.bindparam("serials", expanding=True)
_PLACES = sa.select(Location.url, Location.checkpoint)
_PLACES_OF = _PLACES.where(Location.checkpoint.in_(_SERIALS))
_CHILD = Checkpoint.__table__.alias()
_EDGES = (  # no condition on the state, which SQLite would evaluate first although it selects nearly all rows
    sa.select(Edge.parent, Edge.parent_url, Edge.child, _CHILD.c.id, _CHILD.c.state)
    .join(_CHILD, _CHILD.c.serial == Edge.child)
    .where(Edge.depends)
)
_NEEDED = (
    Checkpoint.serial,
    Checkpoint.id,
    Checkpoint.kind,
    Checkpoint.state,
    Checkpoint.step,
    Checkpoint.commits,
    Checkpoint.created,
    Checkpoint.nbytes,
    Checkpoint.deleted,
    Checkpoint.purge_after,
    Checkpoint.deleted_clocks,
)


def retention_rows(
    connection: Connection,
    now: datetime,
    *,
    filters: Sequence[str] = (),
    metrics: Collection[str] = (),
    serials: Sequence[int] | None = None,
    needed: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> list[RetentionRow]:
    """Load checkpoints for retention, without those that are purged or replaced.

    Args:
        connection: a transaction.
        now: the time that filters with ages refer to.
        filters: the filters whose matches are needed, as in `policy.filters()`.
        metrics: the metrics that are needed.
        serials: the checkpoints (default: all).
        needed: by id, the ids of checkpoints that need its files according to the documents beside it.
    """
    given = {} if serials is None else {"serials": serials}

    def many(table: Any, value: Callable[[Any], Any], **more: Any) -> dict[int, list[Any]]:
        grouped: dict[int, list[Any]] = {}
        for r in connection.execute(_live_rows(table, some=serials is not None), {**given, **more}):
            grouped.setdefault(r.checkpoint, []).append(value(r))
        return grouped

    aliases, tags = many(Alias, lambda r: r.name), many(Tag, lambda r: r.name)
    claims = many(AliasClaim, lambda r: r.name)
    holds = many(Hold, lambda r: RetentionHold(r.reason, r.until))
    measured = many(Metric, lambda r: (r.name, r.value), metrics=sorted(metrics)) if metrics else {}
    dependents = _dependents(connection, serials)
    matches = [_matching(connection, text, now) for text in filters]
    rows = connection.execute(_live_rows(Checkpoint, some=serials is not None), given)
    return [
        RetentionRow(
            serial=r.serial,
            id=r.id,
            kind=r.kind,
            state=r.state,
            run=r.run,
            step=r.step,
            created=r.created,
            nbytes=r.nbytes,
            commits=r.commits,
            metrics=dict(measured.get(r.serial, ())),
            aliases=tuple(aliases.get(r.serial, ())),
            claims=tuple(sorted({*claims.get(r.serial, ())} - {*aliases.get(r.serial, ())})),
            tags=tuple(tags.get(r.serial, ())),
            holds=tuple(holds.get(r.serial, ())),
            dependents=tuple(sorted({*dependents.get(r.serial, ()), *needed.get(r.id, ())})),
            matches=frozenset(i for i, found in enumerate(matches) if r.serial in found),
            deleted=r.deleted,
            purge_after=r.purge_after,
            deleted_clocks=r.deleted_clocks or {},
        )
        for r in rows
    ]


@cache
def _live_rows(table: Any, *, some: bool) -> Executable:
    """The query for a table's rows of all live checkpoints, or of those in `serials`; cached, as building is slow."""
    these = (Checkpoint.serial.in_(_SERIALS),) if some else ()
    live = sa.select(Checkpoint.serial).where(Checkpoint.state.in_(_LIVE), *these)
    if table is Checkpoint:
        with_run = sa.select(*_NEEDED, Run.name.label("run")).outerjoin(Run, Run.id == Checkpoint.run_id)
        return with_run.where(Checkpoint.serial.in_(live))
    found = sa.select(table.__table__).where(table.checkpoint.in_(live))
    if table is Hold:
        found = found.where(Hold.released.is_(None))
    if table is Metric:
        found = found.where(Metric.name.in_(sa.bindparam("metrics", expanding=True)))
    return found


def _matching(connection: Connection, text: str, now: datetime) -> set[int]:
    from ucformat.catalog.filter import check_names, compile_filter, parse

    node = parse(text)
    check_names(connection, node, text)
    return set(connection.scalars(sa.select(Checkpoint.serial).where(compile_filter(node, now=now))))


def _dependents(connection: Connection, serials: Sequence[int] | None) -> dict[int, set[str]]:
    """The ids of the checkpoints that need another's files, by its serial: of all checkpoints, or of these.

    An edge refers to its parent by serial, or by a folder that contains the parent's place or is inside it. Two
    queries, whatever the number of edges.
    """
    at = connection.execute(_PLACES) if serials is None else connection.execute(_PLACES_OF, {"serials": serials})
    places: dict[str, int] = dict(at.all())
    edges = _EDGES
    if serials is not None and len(serials) + len(places) <= _FEW:  # for more, reading all edges is faster
        edges = edges.where(sa.or_(Edge.parent.in_(serials), *(_near(connection, url) for url in places)))
    chosen = None if serials is None else set(serials)
    urls = sorted(places)
    found: dict[int, set[str]] = {}
    touching: dict[str, list[int]] = {}
    for parent, parent_url, serial, name, state in connection.execute(edges):
        if state not in _LIVE:
            continue
        if parent is not None and (chosen is None or parent in chosen):
            found.setdefault(parent, set()).add(name)
        if parent_url not in touching:
            touching[parent_url] = _touching(parent_url, places, urls)
        for other in touching[parent_url]:
            if other != serial:
                found.setdefault(other, set()).add(name)
    return found


def _touching(place: str, places: Mapping[str, int], urls: Sequence[str]) -> list[int]:
    """The checkpoints at a place, inside it, or in a folder above it; `urls` are the sorted keys of `places`."""
    inside = urls[bisect_left(urls, f"{place}/") : bisect_left(urls, f"{place}{_AFTER}")]
    return [places[url] for url in (*inside, *(url for url in _folders(place) if url in places))]


def _folders(place: str) -> Iterator[str]:
    """A place and all folders above it."""
    while place:
        yield place
        place = place.rpartition("/")[0]


def _near(connection: Connection, url: str) -> ColumnElement[bool]:
    """Whether an edge refers to a place, a folder above it, or something inside it; LIKE would not use the index."""
    named: ColumnElement[str] = Edge.parent_url
    if connection.dialect.name == "postgresql":  # whose collation may not be by code point
        named = sa.collate(named, "C")
    inside = sa.and_(named >= f"{url}/", named < f"{url}{_AFTER}")
    return sa.or_(Edge.parent_url.in_([*_folders(url)]), inside)


def protections_at(
    connection: Connection, checkpoint: str, url: str, now: datetime, *, annotations: bool = True
) -> tuple[str, ...]:
    """As `Catalog.protections`, in a transaction.

    Args:
        connection: a transaction.
        checkpoint: the id.
        url: the place, normalized by `same_url`.
        now: the time that holds are compared with.
        annotations: include its holds, tags and aliases.
    """
    serial = connection.scalar(sa.select(Checkpoint.serial).where(Checkpoint.id == checkpoint))
    found = retention_rows(connection, now, serials=[serial]) if serial is not None and annotations else []
    child = Checkpoint.__table__.alias()
    here = _near(connection, url) if serial is None else sa.or_(Edge.parent == serial, _near(connection, url))
    others = sa.select(child.c.id).join(Edge, child.c.serial == Edge.child).where(Edge.depends, here)
    live = others.where(child.c.state.in_(_LIVE), child.c.id != checkpoint).distinct().order_by(child.c.id)
    why = [reason for row in found for reason in protections(row, now)]
    return tuple(dict.fromkeys([*why, *needed_by(connection.scalars(live).all())]))


def ignore_dependent(
    connection: Connection, dependent: str, url: str, stamp: Stamp, *, beside: bool, why: Mapping[str, Any]
) -> bool:
    """Remove the record that a checkpoint needs files of a place, and log the removal if there was a record.

    Args:
        connection: a transaction that writes.
        dependent: the id of the checkpoint.
        url: the place, normalized by `same_url`.
        stamp: the user and time of the operation.
        beside: whether there was a record beside the files.
        why: details for the log.

    Returns:
        Whether there was a record, beside the files or in the catalog.
    """
    parent = connection.scalar(sa.select(Location.checkpoint).where(Location.url == url))
    child = sa.select(Checkpoint.serial).where(Checkpoint.id == dependent).scalar_subquery()
    here = _near(connection, url) if parent is None else sa.or_(Edge.parent == parent, _near(connection, url))
    update = sa.update(Edge).where(Edge.child == child, Edge.depends, here).values(depends=False)
    found = connection.execute(update).rowcount > 0 or beside
    if found:
        event(connection, "ignore-dependent", stamp, parent, dependent=dependent, url=url, **why)
    return found


def delete(
    connection: Connection,
    serials: Sequence[int],
    grace: timedelta,
    stamp: Stamp,
    *,
    why: Mapping[str, Any],
    needed: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> None:
    """Mark checkpoints as deleted, all of them or none; storage is not touched before the grace period is over.

    Args:
        connection: a transaction that writes.
        serials: the checkpoints.
        grace: how long they can be restored.
        stamp: the user and time of the operation.
        why: details for the log.
        needed: by id, the ids of checkpoints that need its files according to the documents beside it.

    Raises:
        PermissionDenied: one is protected, not committed, or was not written by ucformat.
    """
    lock(connection, serials)
    rows = {r.serial: r for r in retention_rows(connection, stamp.now, serials=serials, needed=needed)}
    for serial in serials:
        row = rows.get(serial)
        reasons = ["it is gone already"] if row is None else _obstacles(row, stamp.now)
        if reasons:
            name = "a checkpoint" if row is None else f"the checkpoint {row.id[:12]}"
            raise PermissionDenied(
                f"{name} is not deleted: {'; '.join(reasons)}",
                hint="nothing was deleted; docs/retention.md lists what protects checkpoints",
            )
    end = stamp.now + grace
    update_checkpoints(
        connection, serials, state="deleted", deleted=stamp.now, purge_after=end, deleted_clocks=clocks(connection)
    )
    _reset_locations(connection, serials)
    events(connection, "delete", stamp, serials, purge_after=end.isoformat(), **why)
    touch(connection, serials)


def _obstacles(row: RetentionRow, now: datetime) -> list[str]:
    found = [] if row.kind == "ucformat" else [f"not ours: written by {row.kind}"]
    if row.state != "committed":
        found.append(f"it is {row.state}")
    return [*found, *protections(row, now)]


def restore(connection: Connection, serials: Sequence[int], stamp: Stamp) -> None:
    """Restore deleted checkpoints, all of them or none.

    Args:
        connection: a transaction that writes.
        serials: the checkpoints.
        stamp: the user and time of the operation.

    Raises:
        PermissionDenied: one is not deleted, or is being purged.
    """
    for state in lock(connection, serials).values():
        if state != "deleted":
            raise PermissionDenied(
                f"a checkpoint that is {state} cannot be restored", hint="only deleted ones can, until gc purges them"
            )
    update_checkpoints(connection, serials, state="committed", deleted=None, purge_after=None)
    _reset_locations(connection, serials)
    events(connection, "restore", stamp, serials)
    touch(connection, serials)


def _reset_locations(connection: Connection, serials: Sequence[int]) -> None:
    """Clear the deletion state of single places, since the change in this catalog applies to all of them."""
    for at in range(0, len(serials), MAX_IN_LIST):
        some = Location.checkpoint.in_(serials[at : at + MAX_IN_LIST])
        connection.execute(sa.update(Location).where(some).values(deleted=None, purge_after=None, spared=False))


def begin_purge(connection: Connection, serial: int, stamp: Stamp) -> list[str] | None:
    """Mark a deleted checkpoint as being purged, after which it cannot be restored.

    Args:
        connection: a transaction that writes.
        serial: the checkpoint.
        stamp: the user and time of the operation.

    Returns:
        The places from which it has to be removed; None if it is not deleted, or protected by now.
    """
    state = lock(connection, [serial])[serial]
    if state not in ("deleted", "purging"):
        return None
    row = retention_rows(connection, stamp.now, serials=[serial])[0]
    if state == "deleted":
        end = end_of_grace(row, timedelta(0), stamp.now, clocks(connection))
        expired = end is None or end <= stamp.now
        if row.kind != "ucformat" or not expired or protections(row, stamp.now):
            return None
        connection.execute(sa.update(Checkpoint).where(Checkpoint.serial == serial).values(state="purging"))
        event(connection, "purge", stamp, serial, nbytes=row.nbytes)
    places = sa.select(Location.url).where(Location.checkpoint == serial, ~Location.spared)
    return list(connection.scalars(places.order_by(Location.url)))


def stop_purge(connection: Connection, serial: int, gone: Sequence[str], needed: Sequence[str], stamp: Stamp) -> None:
    """Mark a checkpoint that was being purged as deleted again, because others need it.

    Args:
        connection: a transaction that writes.
        serial: the checkpoint.
        gone: the urls of places from which it was already removed.
        needed: the ids of the checkpoints that need it, for the log.
        stamp: the user and time of the operation.
    """
    lock(connection, [serial])
    connection.execute(sa.delete(Location).where(Location.checkpoint == serial, Location.url.in_(gone)))
    connection.execute(sa.update(Checkpoint).where(Checkpoint.serial == serial).values(state="deleted"))
    event(connection, "purge-stopped", stamp, serial, needed=list(needed), gone=list(gone))


def end_purge(connection: Connection, serial: int, stamp: Stamp) -> None:
    """Mark a checkpoint as purged; the catalog keeps what lineage needs.

    If it has a place that was found after it was deleted, it is committed again, with only that place.

    Args:
        connection: a transaction that writes.
        serial: the checkpoint.
        stamp: the user and time of the operation.
    """
    lock(connection, [serial])
    connection.execute(sa.delete(Location).where(Location.checkpoint == serial, ~Location.spared))
    event(connection, "purged", stamp, serial)
    if connection.scalar(sa.select(sa.exists().where(Location.checkpoint == serial))):
        update_checkpoints(connection, [serial], state="committed", deleted=None, purge_after=None)
        _reset_locations(connection, [serial])
        touch(connection, [serial])
        return
    remove_digests(connection, serial)
    update_checkpoints(connection, [serial], state="purged")
