"""No question reads all checkpoints, however many there are."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

from tests.catalog.acts import put
from tests.catalog.rows import policy
from tests.catalog.test_dependents import needing, statements
from ucformat.catalog import search

if TYPE_CHECKING:
    from collections.abc import Callable

    from ucformat.catalog.catalog import Catalog

GROWING = (
    "checkpoint|checkpoint_1|metric|location|tag|edge|digest|event|verification|certificate|note|hold|"
    "alias_move|form"
)
SCAN = re.compile(rf"SCAN ({GROWING})\b")
BY_STATE = "INDEX ix_checkpoint_state_created (state=?)"  # of nearly all checkpoints


def reads_all(plan: list[str]) -> bool:
    """Whether a statement reads a table that grows, or nearly all checkpoints without stopping at some."""
    sorts = any("TEMP B-TREE" in step or "SUBQUERY" in step for step in plan)
    return any(map(SCAN.search, plan)) or (sorts and any(BY_STATE in step for step in plan))


QUESTIONS: dict[str, Callable[[Catalog], Any]] = {
    "the newest": lambda c: c.find(limit=2),
    "the newest of a run": lambda c: c.find("run = 'run7'", limit=2),
    "the newest that match": lambda c: c.find("metric.loss < 3 and tag = 'good'", limit=2),
    "the best": lambda c: c.find(sort="metric.loss", limit=2),
    "the best of those that match": lambda c: c.find(
        "run = 'run7' and tag = 'good'", sort="-metric.loss", limit=1
    ),
    "one": lambda c: c.get("run7@3"),
    "the latest of a run": lambda c: c.get("run7@latest"),
    "ancestors": lambda c: c.lineage("run7@5"),
    "descendants": lambda c: c.lineage("run7@1", "down", depth=100),
    "retention of a run": lambda c: c.retain(
        policy(
            {"last": 1, "best": {"metric": "loss", "count": 1, "mode": "min"}}, scope="run = 'run7'"
        )
    ),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_no_question_reads_a_whole_table(catalog: Catalog, question: str) -> None:
    if not catalog.database.sqlite:
        return  # which takes for a small table what is quickest, and has statistics of large ones
    base = put(catalog, 0, run="base")
    needing(catalog, str(base.url), range(1001, 1004))
    for step in range(10):
        entry = put(catalog, 100 + step, run="run7", step=step, metrics={"loss": float(step)})
        catalog.tag(entry.id, "good")
    with statements(catalog) as seen, mock.patch.object(search, "_WALKED", (2, 5)):
        QUESTIONS[question](catalog)
    with catalog.database.reading() as c:
        for statement, parameters in seen:
            if statement.lstrip().upper().startswith(("SELECT", "WITH")):
                plan = [
                    r[-1] for r in c.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)
                ]
                assert not reads_all(plan), (statement, plan)
