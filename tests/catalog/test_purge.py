"""When what was deleted may be removed for good."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from hypothesis import given

from tests.catalog.rows import HOUR, NOW, instants, row, row_lists
from ucformat.catalog.deletion import PurgePlan, plan_purge
from ucformat.catalog.retention import RetentionHold, RetentionRow

GRACE = timedelta(hours=2)
FAR = NOW + timedelta(days=36500)


def dead(serial: int, **change: Any) -> RetentionRow:
    """A checkpoint deleted three hours ago."""
    return row(serial, **{"state": "deleted", "deleted": NOW - 3 * HOUR, **change})


def waits(*rows: RetentionRow) -> list[tuple[int, tuple[str, ...], datetime | None]]:
    return [(w.row.serial, w.reasons, w.until) for w in plan_purge(rows, NOW, GRACE, {}).wait]


def purged(plan: PurgePlan) -> list[int]:
    return [r.serial for r in plan.purge]


def test_a_checkpoint_is_purged_after_its_grace() -> None:
    rows = [
        dead(1),
        dead(2, deleted=NOW - GRACE),
        dead(3, deleted=NOW - HOUR),
        dead(4, deleted=NOW - HOUR, purge_after=NOW),
        dead(5, purge_after=NOW + HOUR),
        dead(6, deleted=None),
        dead(7, deleted=None, purge_after=NOW),
        row(8),
        row(9, state="purged"),
    ]
    plan = plan_purge(rows, NOW, GRACE, {})
    assert purged(plan) == [1, 2, 4, 7]
    assert plan.bytes_purged == 101 + 102 + 104 + 107
    assert waits(*rows) == [
        (3, ("can be restored",), NOW + HOUR),
        (5, ("can be restored",), NOW + HOUR),
        (6, ("it is not known when it was deleted",), None),
    ]


def test_what_is_protected_since_waits() -> None:
    assert waits(
        dead(1, aliases=("best",)),
        dead(2, tags=("good",)),
        dead(3, holds=(RetentionHold("paper"),)),
        dead(4, holds=(RetentionHold("audit", NOW + 5 * HOUR), RetentionHold("over", NOW))),
        dead(5, kind="fsdp"),
        dead(6, holds=(RetentionHold("over", NOW),)),
    ) == [
        (1, ("alias best",), None),
        (2, ("tag good",), None),
        (3, ("held: paper",), None),
        (4, ("held until 2026-01-31: audit",), NOW + 5 * HOUR),
        (5, ("not ours: written by fsdp",), None),
    ]


def test_what_is_needed_waits_for_a_later_run_than_what_needs_it() -> None:
    base, middle, top = dead(1, dependents=("c2",)), dead(2, dependents=("c3",)), dead(3)
    assert purged(plan_purge([base, middle, top], NOW, GRACE, {})) == [3]
    assert waits(base, middle, top) == [(1, ("needed by c2",), NOW), (2, ("needed by c3",), NOW)]
    late = replace(top, purge_after=NOW + HOUR)
    assert waits(base, middle, late)[0] == (1, ("needed by c2",), NOW + HOUR)
    assert waits(base, middle, row(3)) == [
        (1, ("needed by c2",), None),
        (2, ("needed by c3",), None),
    ]


def test_a_circle_is_never_purged() -> None:
    rows = [dead(1, dependents=("c2",)), dead(2, dependents=("c1",)), dead(3)]
    assert purged(plan_purge(rows, NOW, GRACE, {})) == [3]
    assert waits(*rows) == [(1, ("needed by c2",), None), (2, ("needed by c1",), None)]


def test_the_id_stands_for_what_is_purged() -> None:
    plan = plan_purge([dead(1), dead(2)], NOW, GRACE, {})
    assert (
        plan.id
        == plan_purge([dead(2), row(3), dead(1), dead(4, tags=("x",))], NOW + HOUR, GRACE, {}).id
    )
    assert plan.id != plan_purge([dead(1)], NOW, GRACE, {}).id


def everything_until(rows: list[RetentionRow], now: datetime) -> set[str]:
    """The ids that are gone once `gc` was run as often as it does anything."""
    gone: set[str] = set()
    while plan := plan_purge(rows, now, GRACE, {}).purge:
        gone |= {r.id for r in plan}
        rows = [
            replace(r, dependents=tuple(set(r.dependents) - gone)) for r in rows if r.id not in gone
        ]
    return gone


@given(row_lists(), instants)
def test_nothing_is_purged_early_or_while_protected(
    rows: list[RetentionRow], now: datetime
) -> None:
    plan = plan_purge(rows, now, GRACE, {})
    for r in plan.purge:
        end = r.purge_after or (r.deleted and r.deleted + GRACE)
        assert end is not None
        assert end <= now
        assert (r.kind, r.state, r.aliases, r.tags, r.dependents) == (
            "ucformat",
            "deleted",
            (),
            (),
            (),
        )
        assert all(h.until is not None and h.until <= now for h in r.holds)
    assert sorted(r.serial for r in rows if r.state == "deleted") == sorted(
        [*purged(plan), *(w.row.serial for w in plan.wait)]
    )
    assert all(w.reasons for w in plan.wait)
    assert plan == plan_purge(rows[::-1], now, GRACE, {})


@given(row_lists())
def test_what_waits_is_purged_at_the_time_that_the_plan_names(rows: list[RetentionRow]) -> None:
    for w in plan_purge(rows, NOW, GRACE, {}).wait:
        if w.until is None:
            assert w.row.id not in everything_until(rows, FAR)
        else:
            assert w.row.id in everything_until(rows, w.until)
            assert w.until <= NOW or w.row.id not in everything_until(rows, w.until - HOUR / 2)
