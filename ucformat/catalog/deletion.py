"""From retention's plans to rows and back: what a plan is made of, soft deletion, restoring, and what `gc` notes.

    committed --delete--> deleted --begin_purge--> purging --end_purge--> purged
              <--restore--

Until `purging` nothing has touched storage. Whoever deletes or says something of a checkpoint locks its row first, so
of an alias and a deletion that come at once, the later one sees the earlier.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from ucformat.catalog.content import remove_digests
from ucformat.catalog.locks import lock
from ucformat.catalog.models import Alias, Checkpoint, Edge, Hold, Location, Metric, Run, Tag
from ucformat.catalog.retention import Held, Row, protections
from ucformat.catalog.rows import begins_with, event, touch
from ucformat.errors import Refused

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from datetime import datetime, timedelta

    from sqlalchemy import Connection

    from ucformat.catalog.names import Stamp

__all__ = ["begin_purge", "delete", "end_purge", "restore", "retention_rows"]

_LIVE = ("committed", "deleted", "purging")


def retention_rows(
    connection: Connection,
    now: datetime,
    *,
    filters: Sequence[str] = (),
    metrics: Collection[str] = (),
    serials: Sequence[int] | None = None,
) -> list[Row]:
    """What retention has to know of all checkpoints that are not purged, or of these."""
    these = sa.true() if serials is None else Checkpoint.serial.in_(serials)
    live = sa.select(Checkpoint.serial).where(Checkpoint.state.in_(_LIVE), these)

    def many(table: Any, value: Callable[[Any], Any], *where: Any) -> dict[int, list[Any]]:
        grouped: dict[int, list[Any]] = {}
        for r in connection.execute(sa.select(table.__table__).where(table.checkpoint.in_(live), *where)):
            grouped.setdefault(r.checkpoint, []).append(value(r))
        return grouped

    aliases, tags = many(Alias, lambda r: r.name), many(Tag, lambda r: r.name)
    holds = many(Hold, lambda r: Held(r.reason, r.until), Hold.released.is_(None))
    measured = many(Metric, lambda r: (r.name, r.value), Metric.name.in_(sorted(metrics)))
    dependents = _dependents(connection)
    matches = [_matching(connection, text, now) for text in filters]
    rows = connection.execute(
        sa.select(Checkpoint.__table__, Run.name.label("run"))
        .outerjoin(Run, Run.id == Checkpoint.run_id)
        .where(Checkpoint.serial.in_(live))
    )
    return [
        Row(
            serial=r.serial,
            id=r.id,
            kind=r.kind,
            state=r.state,
            run=r.run,
            step=r.step,
            created=r.created,
            nbytes=r.nbytes,
            metrics=dict(measured.get(r.serial, ())),
            aliases=tuple(aliases.get(r.serial, ())),
            tags=tuple(tags.get(r.serial, ())),
            holds=tuple(holds.get(r.serial, ())),
            dependents=tuple(dependents.get(r.serial, ())),
            matches=frozenset(i for i, found in enumerate(matches) if r.serial in found),
            deleted=r.deleted,
            purge_after=r.purge_after,
        )
        for r in rows
    ]


def _matching(connection: Connection, text: str, now: datetime) -> set[int]:
    from ucformat.catalog.filter import check_names, compile_filter, parse

    node = parse(text)
    check_names(connection, node, text)
    return set(connection.scalars(sa.select(Checkpoint.serial).where(compile_filter(node, now=now))))


def _dependents(connection: Connection) -> dict[int, list[str]]:
    """The ids of those whose bytes lie in a checkpoint's files, by its serial.

    Also where only the place tells: the child names a folder that the checkpoint lies in, or that lies in it.
    """
    child = Checkpoint.__table__.alias()
    edges = connection.execute(
        sa.select(Edge.parent, Edge.parent_url, Edge.child, child.c.id)
        .join(child, child.c.serial == Edge.child)
        .where(Edge.depends, child.c.state.in_(_LIVE))
    ).all()
    found: dict[int, set[str]] = {}
    for e in edges:
        if e.parent is not None:
            found.setdefault(e.parent, set()).add(e.id)
        inside = begins_with(Location.url, f"{e.parent_url}/")
        around = begins_with(sa.literal(e.parent_url), Location.url + "/")
        at = sa.select(Location.checkpoint).where(sa.or_(Location.url == e.parent_url, inside, around))
        for serial in connection.scalars(at):
            if serial != e.child:
                found.setdefault(serial, set()).add(e.id)
    return {serial: sorted(ids) for serial, ids in found.items()}


def delete(
    connection: Connection, serials: Sequence[int], grace: timedelta, stamp: Stamp, *, why: Mapping[str, Any]
) -> None:
    """Delete softly: they can be restored until their grace is over, and nothing touches storage until then.

    Raises:
        Refused: one is protected, not ours, or not there to be deleted; then none is.
    """
    lock(connection, serials)
    rows = {r.serial: r for r in retention_rows(connection, stamp.now, serials=serials)}
    for serial in serials:
        row = rows.get(serial)
        reasons = ["it is gone already"] if row is None else _obstacles(row, stamp.now)
        if reasons:
            name = "a checkpoint" if row is None else f"the checkpoint {row.id[:12]}"
            raise Refused(
                f"{name} is not deleted: {'; '.join(reasons)}",
                hint="nothing was deleted; docs/retention.md says what protects",
            )
    over = stamp.now + grace
    values = {"state": "deleted", "deleted": stamp.now, "purge_after": over}
    for serial in serials:
        connection.execute(sa.update(Checkpoint).where(Checkpoint.serial == serial).values(**values))
        event(connection, "delete", stamp.who, stamp.now, serial, purge_after=over.isoformat(), **why)
    touch(connection, serials)


def _obstacles(row: Row, now: datetime) -> list[str]:
    found = [] if row.kind == "ucformat" else [f"not ours: written by {row.kind}"]
    if row.state != "committed":
        found.append(f"it is {row.state}")
    return [*found, *protections(row, now)]


def restore(connection: Connection, serials: Sequence[int], stamp: Stamp) -> None:
    """Take a deletion back.

    Raises:
        Refused: one is not deleted, or is being purged; then none is restored.
    """
    for serial, state in lock(connection, serials).items():
        if state != "deleted":
            raise Refused(
                f"a checkpoint that is {state} cannot be restored", hint="only deleted ones can, until gc purges them"
            )
        values = {"state": "committed", "deleted": None, "purge_after": None}
        connection.execute(sa.update(Checkpoint).where(Checkpoint.serial == serial).values(**values))
        event(connection, "restore", stamp.who, stamp.now, serial)
    touch(connection, serials)


def begin_purge(connection: Connection, serial: int, stamp: Stamp) -> list[str] | None:
    """Decide for good that a deleted checkpoint goes; the places where it lies, or None if it is protected by now."""
    state = lock(connection, [serial])[serial]
    if state not in ("deleted", "purging"):
        return None
    row = retention_rows(connection, stamp.now, serials=[serial])[0]
    if state == "deleted":
        over = row.purge_after is None or row.purge_after <= stamp.now
        if row.kind != "ucformat" or not over or protections(row, stamp.now):
            return None
        connection.execute(sa.update(Checkpoint).where(Checkpoint.serial == serial).values(state="purging"))
        event(connection, "purge", stamp.who, stamp.now, serial, nbytes=row.nbytes)
    return list(connection.scalars(sa.select(Location.url).where(Location.checkpoint == serial).order_by(Location.url)))


def end_purge(connection: Connection, serial: int, stamp: Stamp) -> None:
    """Note that nothing of a checkpoint is left in storage; what lineage needs of it stays in the catalog."""
    lock(connection, [serial])
    remove_digests(connection, serial)
    connection.execute(sa.delete(Location).where(Location.checkpoint == serial))
    connection.execute(sa.update(Checkpoint).where(Checkpoint.serial == serial).values(state="purged"))
    event(connection, "purged", stamp.who, stamp.now, serial)
