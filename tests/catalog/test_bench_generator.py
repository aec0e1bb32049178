"""The benchmark of the catalog works, on a small one."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from bench.catalog import ASKED, FILTER, LABELS, SORT, filled, measure, report
from bench.catalog_fill import Plan, made

if TYPE_CHECKING:
    import pytest

PLAN = Plan(checkpoints=60, tensors=40, runs=5)


def test_a_small_catalog_is_filled_and_measured(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with filled(database_url, PLAN) as bench:
        measure([bench], None, rounds=1)
        report(PLAN, {"it": bench}, None, rounds=1)
        assert set(bench.times) == set(LABELS) > set(ASKED)
        assert bench.found["depth"] == PLAN.checkpoints - 1
        assert (
            bench.found["frozen"] == PLAN.checkpoints // PLAN.runs - 1
        )  # but the first, which is recorded
        expected = [
            m for m in made(PLAN) if m.config["optimizer"]["lr"] == 3e-4 and "good" in m.tags
        ]
        expected = [m for m in expected if m.metrics["val_loss"] < 2.1]
        best = sorted(expected, key=lambda m: m.metrics["val_loss"])
        assert bench.found["find"] == [m.name for m in best][:50] != []

        known = bench.catalog.find("run like 'run0%'", sort="created")
        assert [e.name for e in known] == [m.name for m in made(PLAN)]
        for entry, said in zip(known, made(PLAN), strict=True):
            assert (entry.tags, entry.metrics, entry.config) == (
                said.tags,
                said.metrics,
                said.config,
            )
            digests = [t.digest for t in bench.catalog.tensors(entry.id)]
            assert None not in digests
            assert len(set(digests)) == PLAN.tensors == entry.tensors
        places = list(itertools.chain.from_iterable(e.urls for e in known))
        assert len(set(places)) == PLAN.checkpoints
        assert bench.catalog.find(FILTER, sort=SORT)
    assert "target" in capsys.readouterr().out
