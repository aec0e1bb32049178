"""From retention's plans to rows and back: what a plan is made of, soft deletion, restoring, and what `gc` notes.

    committed --delete--> deleted --begin_purge--> purging --end_purge--> purged
              <--restore--        <--stop_purge---

Until `purging` nothing has touched storage. Whoever deletes or says something of a checkpoint locks its row first, so
of an alias and a deletion that come at once, the later one sees the earlier.
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
    "places_of",
    "protections_at",
    "restore",
    "retention_rows",
    "stop_purge",
]

_LIVE = ("committed", "deleted", "purging")
_AFTER = "0"  # the character after the slash: all that begins with `a/` lies from `a/` to `a0`
_FEW = 100  # checkpoints and places of which edges are looked up by index
_SERIALS: BindParameter[Any] = sa.bindparam("serials", expanding=True)
_PLACES = sa.select(Location.url, Location.checkpoint)
_PLACES_OF = _PLACES.where(Location.checkpoint.in_(_SERIALS))
_CHILD = Checkpoint.__table__.alias()
_EDGES = (  # without a condition on the state, by which SQLite would begin, with nearly all
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
    """What retention has to know of all checkpoints that are not purged, or of these.

    `needed` are the ids of those who need some of them, by what is said beside these.
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
    """What is said in a table of all checkpoints that are not purged, or of those of `serials`; made once."""
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
    """The ids of those whose bytes lie in a checkpoint's files, by its serial: of all checkpoints, or of these.

    Also where only the place tells: the child names a folder that the checkpoint lies in, or that lies in it. Two
    queries, however many edges there are.
    """
    at = connection.execute(_PLACES) if serials is None else connection.execute(_PLACES_OF, {"serials": serials})
    places: dict[str, int] = dict(at.all())
    edges = _EDGES
    if serials is not None and len(serials) + len(places) <= _FEW:  # of more, it is quicker to look through all
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
    """The checkpoints that lie at a place, in it, or around it; `urls` are their places, sorted."""
    inside = urls[bisect_left(urls, f"{place}/") : bisect_left(urls, f"{place}{_AFTER}")]
    return [places[url] for url in (*inside, *(url for url in _folders(place) if url in places))]


def _folders(place: str) -> Iterator[str]:
    """A place and all folders above it."""
    while place:
        yield place
        place = place.rpartition("/")[0]


def _near(connection: Connection, url: str) -> ColumnElement[bool]:
    """Whether an edge names a place, a folder above it, or what is in it; not by LIKE, for which there is no index."""
    named: ColumnElement[str] = Edge.parent_url
    if connection.dialect.name == "postgresql":  # which may sort as people do
        named = sa.collate(named, "C")
    inside = sa.and_(named >= f"{url}/", named < f"{url}{_AFTER}")
    return sa.or_(Edge.parent_url.in_([*_folders(url)]), inside)


def protections_at(
    connection: Connection, checkpoint: str, url: str, now: datetime, *, said: bool = True
) -> tuple[str, ...]:
    """As `Catalog.protections`, in a transaction.

    Args:
        connection: of the transaction.
        checkpoint: the id.
        url: the place, as the catalog holds it.
        now: the time at which holds and what is deleted are looked at.
        said: as there.
    """
    serial = connection.scalar(sa.select(Checkpoint.serial).where(Checkpoint.id == checkpoint))
    found = retention_rows(connection, now, serials=[serial]) if serial is not None and said else []
    child = Checkpoint.__table__.alias()
    here = _near(connection, url) if serial is None else sa.or_(Edge.parent == serial, _near(connection, url))
    others = sa.select(child.c.id).join(Edge, child.c.serial == Edge.child).where(Edge.depends, here)
    live = others.where(child.c.state.in_(_LIVE), child.c.id != checkpoint).distinct().order_by(child.c.id)
    why = [reason for row in found for reason in protections(row, now)]
    return tuple(dict.fromkeys([*why, *needed_by(connection.scalars(live).all())]))


def places_of(connection: Connection, serials: Sequence[int]) -> dict[str, list[str]]:
    """Where these checkpoints lie.

    Args:
        connection: of the transaction.
        serials: the checkpoints.

    Returns:
        the urls, sorted, by id; one that lies nowhere is left out.
    """
    found: dict[str, list[str]] = {}
    for at in range(0, len(serials), MAX_IN_LIST):
        some = Location.checkpoint.in_(serials[at : at + MAX_IN_LIST])
        here = sa.select(Checkpoint.id, Location.url).join(Location, Location.checkpoint == Checkpoint.serial)
        for name, url in connection.execute(here.where(some).order_by(Location.url)):
            found.setdefault(name, []).append(url)
    return found


def ignore_dependent(
    connection: Connection, dependent: str, url: str, stamp: Stamp, *, beside: bool, why: Mapping[str, Any]
) -> bool:
    """Forget that a checkpoint needs files of a place, and write that into the log, if it was said at all.

    Args:
        connection: of the transaction.
        dependent: the id of the checkpoint.
        url: the place, as the catalog holds it.
        stamp: who ends it.
        beside: it was said beside the files.
        why: for the log.

    Returns:
        whether it was said, beside the files or here.
    """
    parent = connection.scalar(sa.select(Location.checkpoint).where(Location.url == url))
    child = sa.select(Checkpoint.serial).where(Checkpoint.id == dependent).scalar_subquery()
    here = _near(connection, url) if parent is None else sa.or_(Edge.parent == parent, _near(connection, url))
    known = sa.update(Edge).where(Edge.child == child, Edge.depends, here).values(depends=False)
    found = connection.execute(known).rowcount > 0 or beside
    if found:
        event(connection, "ignore-dependent", stamp.who, stamp.now, parent, dependent=dependent, url=url, **why)
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
    """Delete softly: they can be restored until their grace is over, and nothing touches storage until then.

    Raises:
        PermissionDenied: one is protected, not ours, or not there to be deleted; then none is.
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
                hint="nothing was deleted; docs/retention.md says what protects",
            )
    over = stamp.now + grace
    shown = clocks(connection)
    update_checkpoints(connection, serials, state="deleted", deleted=stamp.now, purge_after=over, deleted_clocks=shown)
    _forget_said(connection, serials)
    events(connection, "delete", stamp.who, stamp.now, serials, purge_after=over.isoformat(), **why)
    touch(connection, serials)


def _obstacles(row: RetentionRow, now: datetime) -> list[str]:
    found = [] if row.kind == "ucformat" else [f"not ours: written by {row.kind}"]
    if row.state != "committed":
        found.append(f"it is {row.state}")
    return [*found, *protections(row, now)]


def restore(connection: Connection, serials: Sequence[int], stamp: Stamp) -> None:
    """Take a deletion back.

    Raises:
        PermissionDenied: one is not deleted, or is being purged; then none is restored.
    """
    for state in lock(connection, serials).values():
        if state != "deleted":
            raise PermissionDenied(
                f"a checkpoint that is {state} cannot be restored", hint="only deleted ones can, until gc purges them"
            )
    update_checkpoints(connection, serials, state="committed", deleted=None, purge_after=None)
    _forget_said(connection, serials)
    events(connection, "restore", stamp.who, stamp.now, serials)
    touch(connection, serials)


def _forget_said(connection: Connection, serials: Sequence[int]) -> None:
    """Forget what is known of the deletion of single places: what is said here counts for all."""
    for at in range(0, len(serials), MAX_IN_LIST):
        some = Location.checkpoint.in_(serials[at : at + MAX_IN_LIST])
        connection.execute(sa.update(Location).where(some).values(deleted=None, purge_after=None, spared=False))


def begin_purge(connection: Connection, serial: int, stamp: Stamp) -> list[str] | None:
    """Decide for good that a deleted checkpoint goes; the places where it lies, or None if it is protected by now."""
    state = lock(connection, [serial])[serial]
    if state not in ("deleted", "purging"):
        return None
    row = retention_rows(connection, stamp.now, serials=[serial])[0]
    if state == "deleted":
        end = end_of_grace(row, timedelta(0), stamp.now, clocks(connection))
        over = end is None or end <= stamp.now
        if row.kind != "ucformat" or not over or protections(row, stamp.now):
            return None
        connection.execute(sa.update(Checkpoint).where(Checkpoint.serial == serial).values(state="purging"))
        event(connection, "purge", stamp.who, stamp.now, serial, nbytes=row.nbytes)
    places = sa.select(Location.url).where(Location.checkpoint == serial, ~Location.spared)
    return list(connection.scalars(places.order_by(Location.url)))


def stop_purge(connection: Connection, serial: int, gone: Sequence[str], needed: Sequence[str], stamp: Stamp) -> None:
    """Note that a checkpoint whose purge was begun is needed and stays, deleted as before.

    Args:
        connection: of the transaction, which writes.
        serial: the checkpoint.
        gone: the urls of places where it was removed all the same.
        needed: the ids of those who need it, for the log.
        stamp: who notes it, and when.
    """
    lock(connection, [serial])
    connection.execute(sa.delete(Location).where(Location.checkpoint == serial, Location.url.in_(gone)))
    connection.execute(sa.update(Checkpoint).where(Checkpoint.serial == serial).values(state="deleted"))
    event(connection, "purge-stopped", stamp.who, stamp.now, serial, needed=list(needed), gone=list(gone))


def end_purge(connection: Connection, serial: int, stamp: Stamp) -> None:
    """Note that nothing of a checkpoint is left in storage; what lineage needs of it stays in the catalog.

    If it lies in a place that came to light after it was deleted, there it is an ordinary checkpoint from now on.
    """
    lock(connection, [serial])
    connection.execute(sa.delete(Location).where(Location.checkpoint == serial, ~Location.spared))
    event(connection, "purged", stamp.who, stamp.now, serial)
    if connection.scalar(sa.select(sa.exists().where(Location.checkpoint == serial))):
        update_checkpoints(connection, [serial], state="committed", deleted=None, purge_after=None)
        _forget_said(connection, [serial])
        touch(connection, [serial])
        return
    remove_digests(connection, serial)
    update_checkpoints(connection, [serial], state="purged")
