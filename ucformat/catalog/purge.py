"""What may be removed from storage for good: a pure function of the deleted checkpoints and the time."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ucformat.catalog.retention import OURS, Row, digest, order, protections

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from datetime import timedelta

__all__ = ["PurgePlan", "Waiting", "plan_purge"]


_LAST = datetime.max.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Waiting:
    """A deleted checkpoint that stays in storage for now, all the reasons why, and when it may be purged.

    Without `until` somebody has to do something first, as release a hold. What is needed by others is purged in a later
    run than they are, at the earliest.
    """

    row: Row
    reasons: tuple[str, ...]
    until: datetime | None


@dataclass(frozen=True, slots=True)
class PurgePlan:
    """What to purge; each deleted row is in one of `purge` and `wait`. Plans of the same `id` purge the same."""

    id: str
    purge: tuple[Row, ...]
    wait: tuple[Waiting, ...]

    @property
    def bytes_purged(self) -> int:
        """How much becomes free."""
        return sum(row.nbytes for row in self.purge)


def plan_purge(rows: Iterable[Row], now: datetime, default_grace: timedelta) -> PurgePlan:
    """Which of the deleted checkpoints may be purged; rows in other states are passed over.

    What another one needs is not purged in the same plan, so that a crash between the two leaves no broken checkpoint.
    """
    deleted = sorted((row for row in rows if row.state == "deleted"), key=order)
    ends = {row.id: _end_of_grace(row, default_grace) for row in deleted}
    times = _times(deleted, ends, now)
    purge, wait = [], []
    for row in deleted:
        reasons = _reasons(row, ends[row.id], now)
        if reasons:
            wait.append(Waiting(row, reasons, times.get(row.id)))
        else:
            purge.append(row)
    return PurgePlan(digest("purge", purge), tuple(purge), tuple(wait))


def _end_of_grace(row: Row, default: timedelta) -> datetime | None:
    if row.purge_after is not None:
        return row.purge_after
    if row.deleted is None:
        return None
    return row.deleted + min(default, _LAST - row.deleted)


def _reasons(row: Row, end: datetime | None, now: datetime) -> tuple[str, ...]:
    found = [] if row.kind == OURS else [f"not ours: written by {row.kind}"]
    if end is None:
        found.append("it is not known when it was deleted")
    elif now < end:
        found.append("can be restored")
    return (*found, *protections(row, now))


def _times(rows: Sequence[Row], ends: Mapping[str, datetime | None], now: datetime) -> dict[str, datetime | None]:
    """When each may be purged if nothing else happens; None if that is never."""
    missing = {row.id: len(row.dependents) for row in rows}
    needed: dict[str, list[Row]] = defaultdict(list)
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


def _time(row: Row, end: datetime | None, times: Mapping[str, datetime | None], now: datetime) -> datetime | None:
    if row.kind != OURS or row.aliases or row.claims or row.tags:
        return None
    holds = [hold.until for hold in row.holds if hold.until is None or hold.until > now]
    conditions = [end, *holds, *(times[d] for d in row.dependents)]
    known = [at for at in conditions if at is not None]
    return max([now, *known]) if len(known) == len(conditions) else None
