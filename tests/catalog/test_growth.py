"""No question reads all checkpoints, however many there are."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import sqlalchemy as sa

from bench.catalog_fill import Plan, fill
from tests.catalog.acts import put
from tests.catalog.rows import policy
from tests.catalog.test_dependents import needing, statements
from ucformat.catalog import search
from ucformat.catalog.catalog import Catalog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

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


@contextmanager
def counted_instructions() -> Iterator[list[int]]:
    """The instructions of SQLite's machine meanwhile, in tens: how much is read, whatever the time."""
    number = [0]

    def tick() -> int:
        number[0] += 1
        return 0

    def before(connection: sa.Connection, *_: Any) -> None:
        driver = connection.connection.driver_connection
        assert isinstance(driver, sqlite3.Connection)
        driver.set_progress_handler(tick, 10)

    sa.event.listen(sa.Engine, "before_cursor_execute", before)
    try:
        yield number
    finally:
        sa.event.remove(sa.Engine, "before_cursor_execute", before)


RUN = "run = 'run03'"
PAGES: dict[str, Callable[[Catalog], Any]] = {
    "the newest": lambda c: c.page(limit=11, counted=20),
    "of a run": lambda c: c.page(RUN, limit=11, counted=20),
    "a rare tag of a run": lambda c: c.page(f"tag = 'good' and {RUN}", limit=3, counted=3),
    "the best": lambda c: c.page(sort="metric.val_loss", limit=5, counted=10),
    "curves": lambda c: c.curves("run03", most=20),
    "losses": lambda c: c.series({f"run{n:02}": "val_loss" for n in range(8)}, most=5),
}


def test_no_page_reads_more_of_a_larger_catalog(tmp_path: Path) -> None:
    read: dict[str, list[int]] = {page: [] for page in PAGES}
    for size in (400, 1600):
        with (
            closing(Catalog(f"sqlite:///{tmp_path}/{size}.db")) as catalog,
            mock.patch.object(search, "_WALKED", (20, 100, 200)),
            mock.patch.object(search, "_COUNTED", 50),
        ):
            fill(catalog, Plan(size, 1, runs=8))
            for page, ask in PAGES.items():
                with counted_instructions() as number:
                    ask(catalog)
                read[page].append(number[0])
    for page, (small, large) in read.items():
        assert 0 < large <= 1.2 * small + 20, (page, read)


def test_the_best_of_a_run_is_not_sought_in_all_values(tmp_path: Path) -> None:
    numbers = []
    with closing(Catalog(f"sqlite:///{tmp_path}/c.db")) as catalog:
        fill(catalog, Plan(1600, 1, runs=8))
        for metric in (None, "val_loss", "tokens"):
            with counted_instructions() as number, mock.patch.object(search, "_WALKED", (100,)):
                catalog.runs(metric=metric, mode="max" if metric == "tokens" else "min")
            numbers.append(number[0])
    without, *asked = numbers
    assert max(asked) < without + 1000, numbers
