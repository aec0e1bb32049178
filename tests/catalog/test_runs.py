"""The runs of a catalog, with what their checkpoints have."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING
from unittest import mock

import pytest

from tests.catalog.acts import put
from tests.catalog.manifests import manifest
from ucformat.catalog import search
from ucformat.catalog.entries import BestEntry
from ucformat.errors import UsageError

if TYPE_CHECKING:
    from ucformat.catalog.catalog import Catalog

NAN = float("nan")


def fill(catalog: Catalog) -> None:
    """A run with a NaN, a tie and a checkpoint without the metric, one of an engine, and one that was deleted."""
    for n, loss in enumerate((4.0, NAN, 2.0, 2.0)):
        put(catalog, n, step=10 * n, metrics={"loss": loss, "f1": -loss})
    put(catalog, 4, step=5)
    catalog.record(
        manifest(10, "other", 7), "/data/other/7", kind="deepspeed", run="other", files=(3, 999)
    )
    put(catalog, 20, run="gone", step=1, metrics={"loss": 0.0})
    catalog.delete("gone@1")


def test_each_run_has_its_numbers(catalog: Catalog) -> None:
    fill(catalog)
    listed = {run.name: run for run in catalog.runs(metric="loss")}
    assert sorted(listed) == ["other", "run7"]
    entries = catalog.find("run = 'run7'")
    run = listed["run7"]
    assert (run.checkpoints, run.first_step, run.last_step) == (5, 0, 30)
    assert run.nbytes == run.disk_nbytes == sum(e.nbytes for e in entries)
    assert run.first_saved == min(e.created for e in entries)
    assert run.last_saved == max(e.created for e in entries)
    assert run.best == BestEntry(2.0, catalog.get("run7@20").id, 20), "not NaN, the first of two"
    assert listed["other"].disk_nbytes == 999
    assert listed["other"].best is None
    assert catalog.runs()[0].best is None


def test_more_may_be_better(catalog: Catalog) -> None:
    fill(catalog)
    (run,) = catalog.runs("run = 'run7'", metric="loss", mode="max")
    assert run.best is not None
    assert (run.best.value, run.best.step) == (4.0, 0)


def test_of_equal_values_one_without_a_step_comes_first(catalog: Catalog) -> None:
    put(catalog, 1, step=3, metrics={"loss": 1.0})
    put(catalog, 2, step=None, metrics={"loss": 1.0})
    (run,) = catalog.runs(metric="loss")
    assert run.best == BestEntry(1.0, manifest(2).id, None)


def test_a_filter_chooses_the_checkpoints_that_count(catalog: Catalog) -> None:
    fill(catalog)
    (run,) = catalog.runs("step >= 20", metric="loss", mode="max")
    assert (run.name, run.checkpoints, run.first_step) == ("run7", 2, 20)
    assert run.best is not None
    assert run.best.value == 2.0
    assert [r.name for r in catalog.runs("state = 'deleted'")] == ["gone"]
    assert catalog.runs("step > 1000") == []


def test_the_last_saved_comes_first(catalog: Catalog) -> None:
    for n, run in enumerate(("b", "a", "c")):
        put(catalog, n, run=run, created=datetime(2026, 1, 1 + n % 2, tzinfo=UTC))
    assert [run.name for run in catalog.runs()] == ["a", "b", "c"], "of equal times by name"
    assert [run.name for run in catalog.runs(limit=1, offset=1)] == ["b"]
    assert [run.name for run in catalog.runs("step >= 0", limit=2)] == ["a", "b"]


def test_the_best_is_found_wherever_it_is(catalog: Catalog) -> None:
    fill(catalog)
    for n in range(6):
        put(catalog, 30 + n, run="worse", step=n, metrics={"loss": 100.0 - (n % 3)})
    put(catalog, 40, run="nothing", metrics={"loss": NAN})
    with mock.patch.object(search, "_WALKED", (1, 2)):  # as if there were many better ones
        for where in ("", "step >= 0"):
            best = {run.name: run.best for run in catalog.runs(where, metric="loss")}
            assert best["worse"] == BestEntry(98.0, catalog.get("worse@2").id, 2)
            assert best["run7"] == BestEntry(2.0, catalog.get("run7@20").id, 20)
            assert best["other"] is None
        assert best["nothing"] is None


def test_a_metric_that_nothing_has_is_an_error(catalog: Catalog) -> None:
    fill(catalog)
    for name in ("los", 'lo"ss', "loss' or 1"):
        with pytest.raises(UsageError, match="unknown key"):
            catalog.runs(metric=name)


def test_an_infinite_value_is_a_value(catalog: Catalog) -> None:
    put(catalog, 0, metrics={"a.b": float("inf")})
    (run,) = catalog.runs(metric="a.b")
    assert run.best is not None
    assert run.best.value == float("inf")
