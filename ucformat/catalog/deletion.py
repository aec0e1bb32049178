"""Deletion in the catalog: the rows from which plans are made, deleting and restoring, and the progress of `gc`.

    committed --delete--> deleted --begin_purge--> purging --end_purge--> purged
              <--restore--        <--stop_purge---

What others need can be reduced to that, by a purge that is stopped: then it is `thinned` instead of deleted, stays so
until nothing needs it, and cannot be restored.

Storage is not touched before `purging`. Deleting or annotating a checkpoint locks its row first, so
that of a concurrent alias and deletion, the later one sees the earlier.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from ucformat.catalog.content import remove_digests
from ucformat.catalog.models import LIVE, REMOVED, CheckpointRow, Edge, Location
from ucformat.catalog.retention import (
    OWN_KIND,
    RetentionPlan,
    RetentionRow,
    near,
    needed_by,
    plan_id,
    plan_order,
    plan_retention,
    protections,
    retention_rows,
)
from ucformat.catalog.rows import (
    COMMITTED_AGAIN,
    event,
    events,
    exists,
    lock,
    pages,
    serial_at,
    serial_of,
    touch,
    update_checkpoints,
)
from ucformat.catalog.stamp import clocks
from ucformat.errors import Conflict, PermissionDenied

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from sqlalchemy import ColumnElement, Connection

    from ucformat.catalog.stamp import Stamp
    from ucformat.schema.policy import Policy


# Which deleted checkpoints may be removed from storage: a pure function of the checkpoints and the
# time.

_LAST = datetime.max.replace(tzinfo=UTC)
_SECOND, _DISAGREE = timedelta(seconds=1), timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class Deferred:
    """A deleted checkpoint that stays in storage for now, all the reasons why, and when it may be purged.

    `until` is None if a user has to act first, for instance to release a hold. A checkpoint that
    others need is purged in a later run than these.
    """

    row: RetentionRow
    reasons: tuple[str, ...]
    until: datetime | None


@dataclass(frozen=True, slots=True)
class PurgePlan:
    """What to purge; each deleted row is in one of `purge` and `wait`. Plans with the same `id` purge the same rows.

    `begun` has the ids of the checkpoints whose purge was begun and interrupted; ending those needs
    no plan.
    """

    id: str
    purge: tuple[RetentionRow, ...]
    wait: tuple[Deferred, ...]
    begun: tuple[str, ...]

    @property
    def bytes_purged(self) -> int:
        """The bytes that are freed."""
        return sum(row.nbytes for row in self.purge)


def plan_purge(
    rows: Iterable[RetentionRow],
    now: datetime,
    default_grace: timedelta,
    clocks: Mapping[str, float],
) -> PurgePlan:
    """Plan which deleted checkpoints may be purged.

    A checkpoint that another one needs is not purged in the same plan, so that no crash leaves a
    broken checkpoint.

    Args:
        clocks: the time by other clocks, in seconds; a grace period is over when all clocks that
            saw it begin agree.
    """
    due = sorted((row for row in rows if row.state in REMOVED), key=plan_order)
    deleted = [row for row in due if row.state != "purging"]
    ends = {row.id: end_of_grace(row, default_grace, now, clocks) for row in deleted}
    times = _times(deleted, ends, now)
    purge, wait = [], []
    for row in deleted:
        reasons = _reasons(row, ends[row.id], now, clocks)
        if reasons:
            wait.append(Deferred(row, reasons, times.get(row.id)))
        else:
            purge.append(row)
    begun = tuple(row.id for row in due if row.state == "purging")
    return PurgePlan(plan_id("purge", purge), tuple(purge), tuple(wait), begun)


def end_of_grace(
    row: RetentionRow, default: timedelta, now: datetime, clocks: Mapping[str, float]
) -> datetime | None:
    """When the grace period of a deleted checkpoint is over by all available clocks.

    Returns:
        The time by this host's clock; None if it is unknown when the checkpoint was deleted.
    """
    end = row.purge_after
    if end is None and row.deleted is not None:
        # a grace of thousands of years ends at the last possible time instead of overflowing
        end = row.deleted + min(default, _LAST - row.deleted)
    if end is None or row.deleted is None:
        return end
    grace = end - row.deleted
    left = (grace - age for age in _ages(row, clocks).values())
    return max((end, *(now + min(t, _LAST - now) for t in left)))


def _ages(row: RetentionRow, clocks: Mapping[str, float]) -> dict[str, timedelta]:
    """How long ago a checkpoint was deleted, by each clock that was read then and now."""
    return {
        name: timedelta(seconds=clocks[name] - then)
        for name, then in row.deleted_clocks.items()
        if name in clocks
    }


def _reasons(
    row: RetentionRow, end: datetime | None, now: datetime, clocks: Mapping[str, float]
) -> tuple[str, ...]:
    reasons = [] if row.kind == OWN_KIND else [f"not ours: written by {row.kind}"]
    if end is None:
        reasons.append("it is not known when it was deleted")
    elif now < end:
        reasons.append("can be restored")
        ages = (
            {"this host's clock": now - row.deleted, **_ages(row, clocks)}
            if row.deleted is not None
            else {}
        )
        if ages and max(ages.values()) - min(ages.values()) > _DISAGREE:
            each = (
                f"{timedelta(seconds=max(0, age // _SECOND))} ago by {name}"
                for name, age in ages.items()
            )
            reasons.append(f"clocks disagree: it was deleted {', '.join(each)}")
    return (*reasons, *protections(row, now))


def _times(
    rows: Sequence[RetentionRow], ends: Mapping[str, datetime | None], now: datetime
) -> dict[str, datetime | None]:
    """When each may be purged if nothing else happens; None for never."""
    # Dependents that are not deleted count, too, and are never counted down: as long as they are
    # there, what they need has no time.
    missing = {row.id: len(row.dependents) for row in rows}
    needed: dict[str, list[RetentionRow]] = defaultdict(list)
    for row in rows:
        for dependent in row.dependents:
            needed[dependent].append(row)
    times: dict[str, datetime | None] = {}
    ready = deque(row for row in rows if not row.dependents)
    while ready:
        row = ready.popleft()
        times[row.id] = _time(row, ends[row.id], times, now)
        for other in needed[row.id]:
            missing[other.id] -= 1
            if not missing[other.id]:
                ready.append(other)
    return times


def _time(
    row: RetentionRow, end: datetime | None, times: Mapping[str, datetime | None], now: datetime
) -> datetime | None:
    if row.kind != OWN_KIND or row.aliases or row.claims or row.tags:
        return None
    holds = [hold.until for hold in row.holds if hold.until is None or hold.until > now]
    conditions = [end, *holds, *(times[d] for d in row.dependents)]
    dates = [at for at in conditions if at is not None]
    return max([now, *dates]) if len(dates) == len(conditions) else None


def protections_at(
    connection: Connection, checkpoint: str, url: str, now: datetime, *, annotations: bool = True
) -> tuple[str, ...]:
    """As `Catalog.protections`, in a transaction."""
    serial = serial_of(connection, checkpoint)
    rows = (
        retention_rows(connection, now, serials=[serial])
        if serial is not None and annotations
        else []
    )
    child = CheckpointRow.__table__.alias()
    others = (
        sa.select(child.c.id)
        .join(Edge, child.c.serial == Edge.child)
        .where(Edge.depends, _needs(serial, url))
    )
    live = others.where(child.c.state.in_(LIVE), child.c.id != checkpoint).distinct()
    why = [reason for row in rows for reason in protections(row, now)]
    return tuple(
        dict.fromkeys([*why, *needed_by(connection.scalars(live.order_by(child.c.id)).all())])
    )


def _needs(parent: int | None, url: str) -> ColumnElement[bool]:
    """Whether an edge refers to a checkpoint, or to files at its place."""
    return near(url) if parent is None else sa.or_(Edge.parent == parent, near(url))


def ignore_dependent(
    connection: Connection,
    dependent: str,
    url: str,
    stamp: Stamp,
    *,
    beside: bool,
    why: Mapping[str, Any],
) -> bool:
    """Remove the record that a checkpoint needs files of a place, and log the removal if there was a record.

    Returns:
        Whether there was a record, beside the files or in the catalog.
    """
    parent = serial_at(connection, url)
    child = Edge.child == serial_of(connection, dependent)
    update = sa.update(Edge).where(child, Edge.depends, _needs(parent, url)).values(depends=False)
    had_record = connection.execute(update).rowcount > 0 or beside
    if had_record:
        event(connection, "ignore-dependent", stamp, parent, dependent=dependent, url=url, **why)
    return had_record


def delete(
    connection: Connection,
    serials: Sequence[int],
    grace: timedelta,
    stamp: Stamp,
    *,
    why: Mapping[str, Any],
    needed: Mapping[str, Collection[str]] = MappingProxyType({}),
    thin_needed: bool = False,
) -> None:
    """Mark checkpoints as deleted, all of them or none; storage is not touched before the grace period is over.

    Args:
        thin_needed: also those that others need.
    """
    lock(connection, serials)
    rows = {
        r.serial: r for r in retention_rows(connection, stamp.now, serials=serials, needed=needed)
    }
    for serial in serials:
        row = rows.get(serial)
        if row is not None and thin_needed:
            row = replace(row, dependents=())
        reasons = ["it is gone already"] if row is None else _obstacles(row, stamp.now)
        if reasons:
            name = "a checkpoint" if row is None else f"the checkpoint {row.id[:12]}"
            raise PermissionDenied(
                f"{name} is not deleted: {'; '.join(reasons)}",
                hint="nothing was deleted; docs/retention.md lists what protects checkpoints",
            )
    end = stamp.now + grace
    update_checkpoints(
        connection,
        serials,
        state="deleted",
        deleted=stamp.now,
        purge_after=end,
        deleted_clocks=clocks(connection),
    )
    _reset_locations(connection, serials)
    events(
        connection, "delete", stamp, {s: {"purge_after": end.isoformat(), **why} for s in serials}
    )
    touch(connection, serials)


def plan(
    connection: Connection,
    policy: Policy,
    now: datetime,
    *,
    needed: Mapping[str, Collection[str]] = MappingProxyType({}),
    thin_needed: bool = False,
) -> RetentionPlan:
    """Plan what a policy keeps, thins and deletes."""
    rows = retention_rows(connection, now, policy=policy, needed=needed)
    return plan_retention(policy, rows, now, thin_needed=thin_needed)


def apply_plan(
    connection: Connection,
    policy: Policy,
    plan_id: str,
    stamp: Stamp,
    *,
    needed: Mapping[str, Collection[str]],
    thin_needed: bool = False,
) -> RetentionPlan:
    """Delete what a plan of a policy deletes, if planning again gives the same plan; nothing is thinned here."""
    # The first plan finds the rows to lock; the second one sees what changed before that.
    how: Any = {"needed": needed, "thin_needed": thin_needed}
    lock(connection, [r.serial for r in plan(connection, policy, stamp.now, **how).delete])
    current = plan(connection, policy, stamp.now, **how)
    if current.id != plan_id:
        raise Conflict(
            "the plan has changed since it was shown: nothing was deleted",
            hint="review the new plan and apply that",
        )
    serials = [r.serial for r in current.delete]
    delete(connection, serials, current.grace, stamp, why={"plan": current.id}, **how)
    return current


def _obstacles(row: RetentionRow, now: datetime) -> list[str]:
    obstacles = [] if row.kind == OWN_KIND else [f"not ours: written by {row.kind}"]
    if row.state != "committed":
        obstacles.append(f"it is {row.state}")
    return [*obstacles, *protections(row, now)]


def restore(connection: Connection, serials: Sequence[int], stamp: Stamp) -> None:
    """Restore deleted checkpoints, all of them or none."""
    for state in lock(connection, serials).values():
        if state != "deleted":
            raise PermissionDenied(
                f"a checkpoint that is {state} cannot be restored",
                hint="only deleted ones can, until gc purges or thins them",
            )
    update_checkpoints(connection, serials, **COMMITTED_AGAIN)
    _reset_locations(connection, serials)
    events(connection, "restore", stamp, {s: {} for s in serials})
    touch(connection, serials)


def _reset_locations(connection: Connection, serials: Sequence[int]) -> None:
    """Clear the deletion state of single places, since the change in this catalog applies to all of them."""
    for page in pages(serials):
        places = sa.update(Location).where(Location.checkpoint.in_(page))
        connection.execute(places.values(deleted=None, purge_after=None, spared=False))


def begin_purge(
    connection: Connection, serial: int, stamp: Stamp, *, thin_needed: bool = False
) -> list[str] | None:
    """Mark a checkpoint as being purged, which cannot be undone, and return its places.

    None if it is not deleted, or protected by now, or if its grace is not over, or not known.

    Args:
        thin_needed: also if others need it: it is thinned.
    """
    state = lock(connection, [serial])[serial]
    if state not in REMOVED:
        return None
    row = retention_rows(connection, stamp.now, serials=[serial])[0]
    if thin_needed:
        row = replace(row, dependents=())
    if state != "purging":
        # The plan has applied the default grace. This is about a checkpoint that was restored and
        # deleted again since, with a grace of its own.
        end = end_of_grace(row, timedelta(0), stamp.now, clocks(connection))
        expired = end is not None and end <= stamp.now
        if row.kind != OWN_KIND or not expired or protections(row, stamp.now):
            return None
        update_checkpoints(connection, [serial], state="purging")
        event(connection, "purge", stamp, serial, nbytes=row.nbytes)
    places = sa.select(Location.url).where(Location.checkpoint == serial, ~Location.spared)
    return list(connection.scalars(places.order_by(Location.url)))


def stop_purge(
    connection: Connection,
    serial: int,
    gone: Sequence[str],
    needed: Sequence[str],
    stamp: Stamp,
    *,
    left: int | None = None,
) -> None:
    """Mark a checkpoint that was being purged as deleted again, because others need it.

    Args:
        left: the bytes of the tensors that are left, if it was thinned.
    """
    lock(connection, [serial])
    connection.execute(
        sa.delete(Location).where(Location.checkpoint == serial, Location.url.in_(gone))
    )
    values = {"state": "deleted"} if left is None else {"state": "thinned", "nbytes": left}
    update_checkpoints(connection, [serial], **values)
    action = "purge-stopped" if left is None else "purge-thinned"
    event(connection, action, stamp, serial, needed=list(needed), gone=list(gone))


def end_purge(connection: Connection, serial: int, stamp: Stamp) -> None:
    """Mark a checkpoint as purged; the catalog keeps what lineage needs.

    If it has a place that was found after it was deleted, it is committed again, with only that
    place.
    """
    lock(connection, [serial])
    connection.execute(sa.delete(Location).where(Location.checkpoint == serial, ~Location.spared))
    event(connection, "purged", stamp, serial)
    if exists(connection, Location.checkpoint == serial):
        update_checkpoints(connection, [serial], **COMMITTED_AGAIN)
        _reset_locations(connection, [serial])
        touch(connection, [serial])
        return
    remove_digests(connection, serial)
    update_checkpoints(connection, [serial], state="purged")
