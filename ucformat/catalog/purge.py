"""Which deleted checkpoints may be removed from storage: a pure function of the checkpoints and the time."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from ucformat.catalog.retention import OWN_KIND, RetentionRow, plan_id, plan_order, protections

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_LAST = datetime.max.replace(tzinfo=UTC)
_SECOND, _DISAGREE = timedelta(seconds=1), timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class Deferred:
    """A deleted checkpoint that stays in storage for now, all the reasons why, and when it may be purged.

    `until` is None if a user has to act first, for instance to release a hold. A checkpoint that others need is purged
    in a later run than these.
    """

    row: RetentionRow
    reasons: tuple[str, ...]
    until: datetime | None


@dataclass(frozen=True, slots=True)
class PurgePlan:
    """What to purge; each deleted row is in one of `purge` and `wait`. Plans with the same `id` purge the same rows.

    `begun` has the ids of the checkpoints whose purge was begun and interrupted; ending those needs no plan.
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
    rows: Iterable[RetentionRow], now: datetime, default_grace: timedelta, clocks: Mapping[str, float]
) -> PurgePlan:
    """Plan which deleted checkpoints may be purged.

    A checkpoint that another one needs is not purged in the same plan, so that no crash leaves a broken checkpoint.

    Args:
        clocks: the time by other clocks, in seconds; a grace period is over when all clocks that saw it begin agree.
    """
    due = sorted((row for row in rows if row.state != "committed"), key=plan_order)
    deleted = [row for row in due if row.state == "deleted"]
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


def end_of_grace(row: RetentionRow, default: timedelta, now: datetime, clocks: Mapping[str, float]) -> datetime | None:
    """When the grace period of a deleted checkpoint is over by all available clocks.

    Returns:
        The time by this host's clock; None if it is unknown when the checkpoint was deleted.
    """
    end = row.purge_after
    if end is None and row.deleted is not None:
        end = row.deleted + min(default, _LAST - row.deleted)
    if end is None or row.deleted is None:
        return end
    grace = end - row.deleted
    left = (grace - age for age in _ages(row, clocks).values())
    return max((end, *(now + min(t, _LAST - now) for t in left)))


def _ages(row: RetentionRow, clocks: Mapping[str, float]) -> dict[str, timedelta]:
    """How long ago a checkpoint was deleted, by each clock that was read then and now."""
    return {name: timedelta(seconds=clocks[name] - then) for name, then in row.deleted_clocks.items() if name in clocks}


def _reasons(row: RetentionRow, end: datetime | None, now: datetime, clocks: Mapping[str, float]) -> tuple[str, ...]:
    found = [] if row.kind == OWN_KIND else [f"not ours: written by {row.kind}"]
    if end is None:
        found.append("it is not known when it was deleted")
    elif now < end:
        found.append("can be restored")
        ages = {"this host's clock": now - row.deleted, **_ages(row, clocks)} if row.deleted is not None else {}
        if ages and max(ages.values()) - min(ages.values()) > _DISAGREE:
            each = (f"{timedelta(seconds=max(0, age // _SECOND))} ago by {name}" for name, age in ages.items())
            found.append(f"clocks disagree: it was deleted {', '.join(each)}")
    return (*found, *protections(row, now))


def _times(
    rows: Sequence[RetentionRow], ends: Mapping[str, datetime | None], now: datetime
) -> dict[str, datetime | None]:
    """When each may be purged if nothing else happens; None for never."""
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
    known = [at for at in conditions if at is not None]
    return max([now, *known]) if len(known) == len(conditions) else None
