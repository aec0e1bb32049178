"""What policies keep and delete."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.catalog.rows import HOUR, INF, NAN, NOW, keeps, lasts, policy, row, row_lists, scopes
from ucformat.catalog.retention import (
    RetentionHold,
    RetentionPlan,
    RetentionRow,
    load_policy,
    plan_retention,
)

if TYPE_CHECKING:
    from ucformat.schema.policy import Policy


def kept(keep: dict[str, Any], *rows: RetentionRow, **more: Any) -> list[int]:
    return sorted(k.row.serial for k in plan_retention(policy(keep, **more), rows, NOW).keep)


def deleted(plan: RetentionPlan) -> set[int]:
    return {r.serial for r in plan.delete}


def after(rows: list[RetentionRow], plan: RetentionPlan) -> list[RetentionRow]:
    """The checkpoints once the plan is applied."""
    gone = deleted(plan)
    return [replace(r, state="deleted", deleted=NOW) if r.serial in gone else r for r in rows]


def test_a_plan_says_all_there_is_to_say() -> None:
    rows = [
        row(1, tags=("good",), aliases=("best", "again")),
        row(2, metrics={"loss": 1.0}),
        row(3),
        row(
            4,
            holds=(
                RetentionHold("paper"),
                RetentionHold("audit", NOW + 48 * HOUR),
                RetentionHold("over", NOW),
            ),
        ),
        row(5, kind="deepspeed"),
        row(6, state="deleted"),
        row(7, dependents=("c8", "c6")),
        row(8, run="b", matches=frozenset({1})),
        row(9),
    ]
    rules = {
        "last": [1, {"count": 2, "group": "all"}],
        "every": 30,
        "best": [
            {"metric": "loss", "count": 2, "mode": "min"},
            {"metric": "acc", "count": 1, "mode": "max", "group": "all"},
        ],
        "younger": "92h",
        "where": ["step > 1000", "tag = 'x'"],
    }
    plan = plan_retention(policy(rules, grace="3d"), rows, NOW)
    assert [(k.row.serial, k.reasons) for k in plan.keep] == [
        (1, ("alias again", "alias best", "tag good")),
        (2, ("best 2 of its run by min loss",)),
        (3, ("step divisible by 30",)),
        (4, ("held: paper", "held until 2026-02-02: audit")),
        (7, ("needed by c6", "needed by c8")),
        (9, ("last of its run", "last 2 of all", "step divisible by 30", "younger than 92h")),
        (8, ("last of its run", "last 2 of all", "where tag = 'x'")),
    ]
    assert plan.delete == ()
    assert [(k.row.serial, k.reasons) for k in plan.untouched] == [
        (5, ("not ours: written by deepspeed",)),
        (6, ("already deleted",)),
    ]
    assert plan.idle == ("best of all by max acc", "where step > 1000")
    assert plan.grace == timedelta(days=3)
    assert (plan.bytes_kept, plan.bytes_deleted) == (700 + 34, 0)
    less = plan_retention(policy({"every": 30}), rows[:3], NOW)
    assert (less.bytes_kept, less.bytes_deleted) == (101 + 103, 102)


def test_the_order_is_by_run_and_step() -> None:
    rows = [
        row(1, run="b"),
        row(2, run="a"),
        row(3, run="a", step=5),
        row(4, run=None),
        row(5, run="a", step=None),
    ]
    plan = plan_retention(policy({"every": 1000}), rows, NOW)
    assert [r.serial for r in plan.delete] == [4, 5, 3, 2, 1]


def test_out_of_scope_is_not_judged() -> None:
    rows = [
        row(1, matches=frozenset({0})),
        row(2, matches=frozenset({1})),
        row(3, matches=frozenset({0, 1})),
    ]
    plan = plan_retention(policy({"where": "tag = 'x'"}, scope="run = 'a'"), rows, NOW)
    assert [r.serial for r in plan.delete] == [1]
    assert [k.row.serial for k in plan.keep] == [3]
    assert [(k.row.serial, k.reasons) for k in plan.untouched] == [(2, ("out of scope",))]


def test_the_last_of_a_run_taken_back_to_an_earlier_step() -> None:
    rows = [*(row(i) for i in range(1, 9)), row(11, step=51), row(12, step=52)]
    assert kept({"last": 2}, *rows) == [7, 8, 11, 12]


def test_the_last_without_steps_are_by_time() -> None:
    rows = [row(1), row(2), row(3, step=None), row(4, step=None), row(5, step=None)]
    assert kept({"last": 1}, *rows) == [2, 5]
    assert kept({"last": 2}, *rows) == [1, 2, 4, 5]
    assert kept({"last": 2}, *rows[2:]) == [4, 5]


def test_over_all_runs_only_time_makes_the_last() -> None:
    rows = [row(1, step=900), row(2, run="b"), row(3, run="c", step=1)]
    assert kept({"last": {"count": 2, "group": "all"}}, *rows) == [2, 3]


def test_what_is_not_judged_displaces_nothing() -> None:
    rows = [row(1, matches=frozenset({0})), row(2), row(3, kind="fsdp"), row(4, state="deleted")]
    assert kept({"last": 1}, *rows, scope="x") == [1]


def test_what_is_protected_counts_among_the_last() -> None:
    assert kept({"last": 2}, row(1), row(2), row(3, tags=("x",))) == [2, 3]


def test_checkpoints_of_no_run_do_not_compete() -> None:
    rows = [row(i, run=None, metrics={"m": float(i)}) for i in range(1, 4)]
    assert kept({"last": 1}, *rows) == [1, 2, 3]
    assert kept({"best": {"metric": "m", "count": 1, "mode": "min"}}, *rows) == [1, 2, 3]
    assert kept({"last": {"count": 1, "group": "all"}}, *rows) == [3]


def test_every_needs_a_step() -> None:
    assert kept({"every": 20}, row(1), row(2), row(3, step=None), row(4, step=0)) == [2, 4]


@pytest.mark.parametrize(
    ("values", "mode", "best"),
    [
        ([3.0, 1.0, 2.0], "min", [1, 2]),
        ([3.0, 1.0, 2.0], "max", [0, 2]),
        ([1.0, 2.0, 2.0, 2.0, 3.0], "min", [0, 1, 2, 3]),  # tied with the second
        ([1.0, 1.0, 1.0, 2.0], "min", [0, 1, 2]),
        ([NAN, None, -INF, 5.0, INF, 4.0, 6.0], "min", [3, 5]),
        ([NAN, None, -INF, 5.0, INF, 4.0, 6.0], "max", [3, 6]),
        ([NAN, None, INF, 9.0], "min", [3]),
        ([NAN, None, INF], "max", []),
    ],
)
def test_the_best(values: list[float | None], mode: str, best: list[int]) -> None:
    rows = [row(i, metrics={"m": v}) for i, v in enumerate(values)]
    assert kept({"best": {"metric": "m", "count": 2, "mode": mode}}, *rows, row(9)) == best


def test_younger_means_less_than_that_ago() -> None:
    rows = [
        row(1, created=NOW - HOUR),
        row(2, created=NOW - 0.99 * HOUR),
        row(3, created=NOW + HOUR),
    ]
    assert kept({"younger": "1h"}, *rows) == [2, 3]


def test_what_a_deleted_checkpoint_needs_stays_until_that_is_purged() -> None:
    source, copy = row(1, dependents=("c2",)), row(2)
    assert deleted(plan_retention(policy({"every": 1000}), [source, copy], NOW)) == {2}
    assert kept({"every": 1000}, source, replace(copy, state="deleted")) == [1]
    purged = [replace(source, dependents=()), replace(copy, state="purged")]
    assert deleted(plan_retention(policy({"every": 1000}), purged, NOW)) == {1}


def test_the_id_stands_for_what_is_deleted_and_by_which_policy() -> None:
    rows = [row(i) for i in range(1, 6)]
    plan = plan_retention(policy({"last": 2}), rows, NOW)
    assert plan.id == plan_retention(policy({"last": 2}), rows[::-1], NOW + HOUR).id
    assert (
        plan.id == plan_retention(policy({"last": {"count": 2}}), [*rows, row(6, run="b")], NOW).id
    )
    renamed = [replace(r, run="z") if r.serial == 1 else r for r in rows]
    every = policy({"every": 1000})
    assert plan_retention(every, renamed, NOW).id == plan_retention(every, rows, NOW).id
    others = [
        plan_retention(policy({"last": 2}, grace="0s"), rows, NOW),
        plan_retention(policy({"last": [2, 1]}), rows, NOW),
        plan_retention(policy({"last": 2}), [row(1, tags=("x",)), *rows[1:]], NOW),
        plan_retention(policy({"last": 2}), [*rows, row(6)], NOW),
    ]
    assert len({plan.id, *(p.id for p in others)}) == 5


# Properties, over random checkpoints and policies.


def judged(p: Policy, r: RetentionRow) -> bool:
    return r.kind == "ucformat" and r.state == "committed" and (p.scope is None or 0 in r.matches)


def protected(r: RetentionRow) -> bool:
    holds = [h for h in r.holds if h.until is None or h.until > NOW]
    return bool(r.aliases or r.tags or holds or r.dependents)


def rivals(rule: Any, r: RetentionRow, rows: list[RetentionRow]) -> list[RetentionRow]:
    """The others that a checkpoint competes with."""
    others = [o for o in rows if o.serial != r.serial]
    return (
        others
        if rule.group == "all"
        else [o for o in others if r.run is not None and o.run == r.run]
    )


def is_last(rule: Any, r: RetentionRow, rows: list[RetentionRow]) -> bool:
    def time(x: RetentionRow) -> Any:
        return (x.created, -1 if x.step is None else x.step, x.serial)

    others = rivals(rule, r, rows)
    newer = [o for o in others if time(o) > time(r)]
    if len(newer) < rule.count:
        return True
    if rule.group == "all" or r.step is None:
        return False
    higher = [
        o
        for o in others
        if o.step is not None and (o.step, o.created, o.serial) > (r.step, r.created, r.serial)
    ]
    return len(higher) < int(rule.count)


def is_best(rule: Any, r: RetentionRow, rows: list[RetentionRow]) -> bool:
    def value(x: RetentionRow) -> float | None:
        v = x.metrics.get(rule.metric)
        return v if v in (0.0, 1.0, 2.0) else None

    own = value(r)
    if own is None:
        return False
    others = [v for o in rivals(rule, r, rows) if (v := value(o)) is not None]
    better = [v for v in others if (v < own if rule.mode == "min" else v > own)]
    return len(better) < int(rule.count)


def is_kept(p: Policy, r: RetentionRow, rows: list[RetentionRow]) -> bool:
    first = 0 if p.scope is None else 1
    (keep,) = p.keep
    return (
        protected(r)
        or any(is_last(rule, r, rows) for rule in keep.last)
        or (keep.every is not None and r.step is not None and r.step % keep.every == 0)
        or any(is_best(rule, r, rows) for rule in keep.best)
        or (keep.younger is not None and r.created > NOW - keep.younger)
        or any(first + i in r.matches for i in range(len(keep.where)))
    )


@given(row_lists(), keeps, scopes)
def test_a_plan_agrees_with_the_rules_read_one_checkpoint_at_a_time(
    rows: list[RetentionRow], keep: dict[str, Any], scope: dict[str, Any]
) -> None:
    p = policy(keep, **scope)
    of = [r for r in rows if judged(p, r)]
    plan = plan_retention(p, rows, NOW)
    assert deleted(plan) == {r.serial for r in of if not is_kept(p, r, of)}
    assert {k.row.serial for k in plan.keep} == {r.serial for r in of if is_kept(p, r, of)}
    assert {k.row.serial for k in plan.untouched} == {r.serial for r in rows if not judged(p, r)}
    assert all(k.reasons for k in (*plan.keep, *plan.untouched))


def test_states_of_what_no_other_rule_keeps() -> None:
    sizes = {"weight": 20, "master": 40, "exp_avg": 41}
    rows = [
        row(1, states=sizes),
        row(2, states=sizes, tags=("x",)),
        row(3, states=sizes),
        row(4, states=sizes, places=("/a", "/b")),
        row(5, states={"weight": 105}),
        row(6, states={"exp_avg": 106}),
        row(7, states=sizes, matches=frozenset({1})),
        row(8, run="b", states=sizes, matches=frozenset({0})),
        row(9, run="b", states=sizes),
    ]
    keep = [
        {"where": "step = 80"},
        {"every": 10, "states": "weight"},
        {"where": "step = 70", "states": ["weight", "m*"]},
    ]
    plan = plan_retention(load_policy({"version": 1, "keep": keep}), rows, NOW)
    assert [(t.row.serial, t.states, t.bytes_kept, t.dropped) for t in plan.thin] == [
        (1, ("weight",), 20, {"master": 40, "exp_avg": 41}),
        (3, ("weight",), 20, {"master": 40, "exp_avg": 41}),
        (7, ("weight", "master"), 60, {"exp_avg": 41}),
        (9, ("weight",), 20, {"master": 40, "exp_avg": 41}),
    ]
    only = "step divisible by 10: only weight"
    assert plan.thin[2].reasons == (only, "where step = 70: only weight, m*")
    assert [(k.row.serial, k.reasons) for k in plan.keep] == [
        (2, ("tag x", only)),
        (4, (only, "whole: it has several locations")),
        (5, (only,)),
        (6, (only, "whole: it stores none of weight")),
        (8, ("where step = 80", only)),
    ]
    assert [(r.run, r.kept, r.dropped, r.deleted) for r in plan.runs] == [
        ("a", 102 + 104 + 105 + 106 + 100, 81 + 81 + 41, 0),
        ("b", 108 + 20, 81, 0),
    ]
    assert (plan.bytes_kept, plan.bytes_dropped) == (537 + 108, 284)
    fewer = plan_retention(load_policy({"version": 1, "keep": keep}), rows[1:], NOW)
    assert fewer.id != plan.id


@given(row_lists(), keeps, scopes)
def test_nothing_protected_is_deleted(
    rows: list[RetentionRow], keep: dict[str, Any], scope: dict[str, Any]
) -> None:
    p = policy(keep, **scope)
    for r in plan_retention(p, rows, NOW).delete:
        assert judged(p, r)
        assert not protected(r)
        assert not [o for o in rows if o.id in r.dependents]


@given(row_lists(), keeps, keeps, scopes)
def test_another_rule_never_deletes_more(
    rows: list[RetentionRow], keep: dict[str, Any], more: dict[str, Any], scope: dict[str, Any]
) -> None:
    fewer = plan_retention(policy(keep, **scope), rows, NOW)
    both = {**more, **keep}  # what `keep` has, with what only `more` has
    assert deleted(plan_retention(policy(both, **scope), rows, NOW)) <= deleted(fewer)


@given(row_lists(), keeps, scopes)
def test_the_same_policy_deletes_nothing_more(
    rows: list[RetentionRow], keep: dict[str, Any], scope: dict[str, Any]
) -> None:
    p = policy(keep, **scope)
    plan = plan_retention(p, rows, NOW)
    assert plan_retention(p, after(rows, plan), NOW).delete == ()


@given(row_lists(), keeps, scopes)
def test_nor_once_the_deleted_are_purged(
    rows: list[RetentionRow], keep: dict[str, Any], scope: dict[str, Any]
) -> None:
    rows = [replace(r, dependents=()) for r in rows]
    p = policy(keep, **scope)
    plan = plan_retention(p, rows, NOW)
    assert plan_retention(p, [r for r in rows if r not in plan.delete], NOW).delete == ()


@given(st.data(), row_lists(), keeps, scopes)
def test_the_order_of_the_rows_does_not_matter(
    data: st.DataObject, rows: list[RetentionRow], keep: dict[str, Any], scope: dict[str, Any]
) -> None:
    p = policy(keep, **scope)
    assert plan_retention(p, data.draw(st.permutations(rows)), NOW) == plan_retention(p, rows, NOW)


@given(row_lists(), st.integers(1, 4))
def test_last_keeps_so_many_of_each_run(rows: list[RetentionRow], n: int) -> None:
    """Exactly n where steps grow with time, else never fewer, and never more than n by step and n by time."""
    bare = [row(r.serial, run=r.run or "c", step=r.step, created=r.created) for r in rows]
    plan = plan_retention(policy({"last": n}), bare, NOW)
    in_order = plan_retention(
        policy({"last": n}), [replace(r, step=int(r.created.timestamp())) for r in bare], NOW
    )
    for run in {r.run for r in bare}:
        there = min(n, sum(r.run == run for r in bare))
        assert there <= sum(k.row.run == run for k in plan.keep) <= 2 * n
        assert sum(k.row.run == run for k in in_order.keep) == there


@given(row_lists(), lasts)
def test_the_newest_checkpoint_of_a_run_survives_last(
    rows: list[RetentionRow], last: dict[str, Any]
) -> None:
    plan = plan_retention(policy({"last": last["count"]}), rows, NOW)
    for r in plan.delete:
        assert any(k.row.run == r.run and k.row.created >= r.created for k in plan.keep)
