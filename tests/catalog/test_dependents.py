"""Who needs a checkpoint: found by a few queries, however many edges there are."""

from __future__ import annotations

from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa

from tests.catalog.acts import put
from ucformat.catalog import deletion
from ucformat.catalog.deletion import begin_purge
from ucformat.catalog.models import CheckpointRow, Edge, Location
from ucformat.catalog.retention import load_policy, protections, retention_rows
from ucformat.catalog.rows import lock
from ucformat.catalog.stamp import make_stamp, now
from ucformat.errors import PermissionDenied

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucformat.catalog.catalog import Catalog


@contextmanager
def statements(catalog: Catalog) -> Iterator[list[tuple[str, Any]]]:
    """What is executed meanwhile, and with what."""
    seen: list[tuple[str, Any]] = []

    def note(_c: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        seen.append((statement, parameters))

    sa.event.listen(catalog.database.engine, "before_cursor_execute", note)
    try:
        yield seen
    finally:
        sa.event.remove(catalog.database.engine, "before_cursor_execute", note)


def needing(catalog: Catalog, base: str, numbers: range) -> None:
    """Checkpoints whose bytes lie in another one's files, as virtual ones of it."""
    serials = {n: put(catalog, n) for n in numbers}
    with catalog.database.writing() as c:
        of = dict(c.execute(sa.select(CheckpointRow.id, CheckpointRow.serial)).all())
        parent = c.scalar(sa.select(Location.checkpoint).where(Location.url == base))
        edge = {
            "parent": parent,
            "parent_id": None,
            "parent_url": base,
            "kind": "convert",
            "depends": True,
        }
        c.execute(sa.insert(Edge), [{**edge, "child": of[e.id]} for e in serials.values()])


def test_the_number_of_queries_does_not_grow_with_the_edges(catalog: Catalog) -> None:
    base = put(catalog, 0)
    policy = load_policy({"version": 1, "keep": {"last": 1}})
    counts: dict[str, list[int]] = {}
    for numbers in (range(1, 3), range(3, 40)):
        needing(catalog, str(base.url), numbers)
        with statements(catalog) as seen:
            catalog.retain(policy)
        counts.setdefault("retain", []).append(len(seen))
        with statements(catalog) as seen:
            catalog.purgeable()
        counts.setdefault("purgeable", []).append(len(seen))
        with statements(catalog) as seen, pytest.raises(PermissionDenied, match="needed by"):
            catalog.delete(base.id)
        counts.setdefault("delete", []).append(len(seen))
    assert all(few == many for few, many in counts.values()), counts


def test_the_number_of_statements_does_not_grow_with_what_is_deleted(catalog: Catalog) -> None:
    entries = [put(catalog, n) for n in range(30)]
    counts = []
    for some in (entries[:2], entries[2:]):
        with statements(catalog) as seen, catalog.database.writing() as c:
            serials = [*lock(c, [catalog_serial(c, e.id) for e in some])]
            before = len(seen)
            deletion.delete(c, serials, timedelta(1), make_stamp(), why={})
            deletion.restore(c, serials, make_stamp())
        counts.append(len(seen) - before)
    assert counts[0] == counts[1]
    assert [e.action for e in catalog.events(entries[5].id)] == ["restore", "delete", "record"]


def catalog_serial(connection: sa.Connection, checkpoint: str) -> int:
    return connection.execute(
        sa.select(CheckpointRow.serial).where(CheckpointRow.id == checkpoint)
    ).scalar_one()


def test_edges_of_one_checkpoint_are_looked_up_by_index(catalog: Catalog) -> None:
    base = put(catalog, 0)
    needing(catalog, str(base.url), range(1, 20))
    with statements(catalog) as seen, catalog.database.reading() as c:
        retention_rows(c, now(), serials=[catalog_serial(c, base.id)])
    [(statement, parameters)] = [s for s in seen if "FROM edge" in s[0]]
    if not catalog.database.sqlite:
        return  # which takes for a small table what is quickest
    with catalog.database.reading() as c:
        plan = [r[-1] for r in c.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)]
    assert not [step for step in plan if "SCAN" in step], plan
    assert any("MULTI-INDEX OR" in step for step in plan), plan


PLACES = [
    "/a",
    "/a/b",
    "/a/b/c",
    "/a/b%",
    "/a/b_c",
    "/a/bXc",
    "/A/b",
    "/a/b0",
    "/a/b/0",
    "/a/b.",
    "/b",
    "s3://x/a",
    "s3://x",
]


@pytest.mark.parametrize("few", [0, 100])
@pytest.mark.parametrize("root", [*PLACES, "/a/b/c/d", "/", "s3://x/a/b", "/a/bX"])
def test_a_place_needs_what_lies_at_it_in_it_and_around_it(
    catalog: Catalog, root: str, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ucformat.catalog.retention._FEW", few)
    for n, url in enumerate(PLACES):
        put(catalog, n, url)
    child = put(catalog, 99, "/elsewhere")
    with catalog.database.writing() as c:
        edge = {
            "child": catalog_serial(c, child.id),
            "parent_url": root,
            "kind": "convert",
            "depends": True,
        }
        c.execute(sa.insert(Edge).values(parent=None, parent_id=None, **edge))
    with catalog.database.reading() as c:
        rows = [*retention_rows(c, now())]
        alone = [*(r for row in rows for r in retention_rows(c, now(), serials=[row.serial]))]
        of = dict(c.execute(sa.select(Location.checkpoint, Location.url)).all())
    wanted = {
        u
        for u in PLACES
        if f"{u}/".startswith(f"{root.rstrip('/')}/") or f"{root}/".startswith(f"{u}/")
    }
    if root == "/":
        wanted = {
            u for u in PLACES if u.startswith("//")
        }  # as ever: the root of a file system is no checkpoint's place
    for found in (rows, alone):
        assert {of[r.serial] for r in found if r.dependents} == wanted
        assert all(r.dependents in ((), (child.id,)) for r in found)


def test_a_purge_asks_for_its_own_edges(catalog: Catalog) -> None:
    base = put(catalog, 0)
    catalog.delete(base.id, grace=timedelta(0))
    needing(catalog, str(base.url), range(1, 4))
    with catalog.database.writing() as c:
        assert begin_purge(c, catalog_serial(c, base.id), make_stamp()) is None


def test_of_many_that_need_it_the_first_are_named(catalog: Catalog) -> None:
    base = put(catalog, 0)
    needing(catalog, str(base.url), range(1, 16))
    with catalog.database.reading() as c:
        [row] = retention_rows(c, now(), serials=[catalog_serial(c, base.id)])
    said = protections(row, now())
    assert said == (*(f"needed by {n}" for n in row.dependents[:10]), "needed by 5 more")
