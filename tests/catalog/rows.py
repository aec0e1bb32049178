"""Checkpoints and policies for the tests of retention, by hand and at random."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from ucformat.catalog.retention import RetentionHold, RetentionRow, load_policy

if TYPE_CHECKING:
    from ucformat.schema.policy import Policy

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)
NAN, INF = float("nan"), float("inf")


def row(serial: int, **change: Any) -> RetentionRow:
    """A checkpoint of a run, without protection: step 10 x serial, one made each hour."""
    usual: dict[str, Any] = {
        "id": f"c{serial}",
        "kind": "ucformat",
        "state": "committed",
        "run": "a",
        "step": 10 * serial,
        "created": NOW - 100 * HOUR + serial * HOUR,
        "nbytes": 100 + serial,
    }
    return RetentionRow(serial, **{**usual, **change})


def policy(keep: dict[str, Any], **more: Any) -> Policy:
    return load_policy({"version": 1, "keep": keep, **more})


instants = st.integers(-8, 4).map(lambda h: NOW + h * HOUR)


@st.composite
def row_lists(draw: st.DrawFn) -> list[RetentionRow]:
    """Some checkpoints, many of them equal in something, some protected, some that need others, even in circles."""
    ids = [f"c{i}" for i in range(draw(st.integers(0, 9)))]
    rarely = st.sampled_from([(), (), (), (), ("x",), ("x", "y")])
    value = st.sampled_from([None, NAN, INF, -INF, 0.0, 1.0, 1.0, 2.0])
    return [
        row(
            i,
            kind=draw(st.sampled_from(["ucformat"] * 7 + ["deepspeed"])),
            state=draw(
                st.sampled_from(["committed"] * 6 + ["deleted"] * 3 + ["purged", "replaced"])
            ),
            run=draw(st.sampled_from(["a", "a", "b", None])),
            step=draw(st.none() | st.integers(0, 6)),
            created=draw(instants),
            metrics=draw(st.dictionaries(st.sampled_from(["m", "n"]), value)),
            aliases=draw(rarely),
            tags=draw(rarely),
            holds=tuple(
                RetentionHold("why", until)
                for until in draw(st.lists(st.none() | instants, max_size=1))
            ),
            dependents=tuple(draw(st.lists(st.sampled_from(ids), max_size=2, unique=True)))
            if draw(booleans)
            else (),
            matches=draw(st.frozensets(st.integers(0, 2))),
            deleted=draw(st.none() | instants),
            purge_after=draw(st.none() | instants),
        )
        for i in range(len(ids))
    ]


booleans = st.booleans()
groups = st.sampled_from(["run", "all"])
lasts = st.fixed_dictionaries({"count": st.integers(1, 3), "group": groups})
bests = st.fixed_dictionaries(
    {
        "metric": st.sampled_from(["m", "n"]),
        "count": st.integers(1, 3),
        "mode": st.sampled_from(["min", "max"]),
        "group": groups,
    }
)
keeps = st.fixed_dictionaries(
    {},
    optional={
        "last": st.lists(lasts, min_size=1, max_size=2),
        "every": st.integers(1, 4),
        "best": st.lists(bests, min_size=1, max_size=2),
        "younger": st.sampled_from(["1h", "3h"]),
        "where": st.lists(st.just("x"), min_size=1, max_size=2),
    },
).filter(bool)
scopes = st.sampled_from([{}, {}, {"scope": "s"}])
