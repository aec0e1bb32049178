"""What the page of checkpoints counts and draws."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING
from unittest import mock

from tests.catalog.acts import put
from ucformat.catalog import search

if TYPE_CHECKING:
    from ucformat.catalog.catalog import Catalog


def test_values_are_counted_among_the_first(catalog: Catalog) -> None:
    for n in range(6):
        put(catalog, n, run="a" if n < 4 else "b")
    for n in (0, 1, 5):
        catalog.tag(catalog.get(f"{'b' if n == 5 else 'a'}@{n}").id, "good", *["old"] * (n == 0))
    assert catalog.page().counts == {
        "run": {"a": 4, "b": 2},
        "kind": {"ucformat": 6},
        "tag": {"good": 3, "old": 1},
    }
    assert catalog.page("run = 'a'", counted=2).counts["run"] == {"a": 2}
    assert catalog.page("run = 'c'").counts == {"run": {}, "kind": {}, "tag": {}}


def test_a_series_has_the_last_numbers(catalog: Catalog) -> None:
    for n in range(6):
        put(catalog, n, metrics={"loss": float("nan") if n == 3 else n / 2, "other": 9.0})
    put(catalog, 7, run="run8", metrics={"eval": 1.0})
    catalog.tag("run7@1", "good")
    assert catalog.series({}) == {}
    assert catalog.series({"run7": "loss", "run8": "eval", "none": "loss"}, most=3) == {
        "run7": [(2, 1.0), (4, 2.0), (5, 2.5)],
        "run8": [(7, 1.0)],
        "none": [],
    }
    assert catalog.series({"run7": "loss"}, "tag = 'good'") == {"run7": [(1, 0.5)]}
    catalog.delete("run7@5")
    assert catalog.series({"run7": "loss"}, most=1) == {"run7": [(4, 2.0)]}


def test_a_page_is_what_is_found(catalog: Catalog) -> None:
    for n in range(12):
        put(catalog, n, run="ab"[n % 2], metrics={"loss": float(n % 5)})
    catalog.delete("a@4")
    for where in ("", "run = 'a'", "run in ('b') and metric.loss < 3", "run = 'none'"):
        for sort in ("newest", "metric.loss"):
            for offset in (0, 3, 100):
                for counted in (1, 50):
                    page = catalog.page(where, sort=sort, limit=2, offset=offset, counted=counted)
                    assert page.entries == catalog.find(where, sort=sort, limit=2, offset=offset)
                    first = catalog.find(where, sort=sort, limit=counted)
                    assert page.counts["run"] == dict(Counter(e.run for e in first).most_common())
                    assert page.total == catalog.count(where)


def test_a_run_of_an_or_is_not_the_only_one(catalog: Catalog) -> None:
    for n in range(6):
        put(catalog, n, run="ab"[n % 2])
    for where, number in (
        ("run = 'a' or run = 'b'", 6),
        ("run = 'a' and run = 'b'", 0),
        ("run != 'a' and step >= 0", 3),
        ("run in ('a', 'b') and step >= 0", 6),
        ("run not in ('a') and step >= 0", 3),
        ("not (run = 'a') and step >= 0", 3),
        ("run like 'a' and step >= 0", 3),
    ):
        with mock.patch.object(search, "_WALKED", (0, 1)):
            assert len(catalog.find(where, limit=9)) == number, where
        assert len(catalog.find(where, limit=9)) == number, where


def test_documents_are_those_of_each_checkpoint(catalog: Catalog) -> None:
    put(catalog, 0, config={"lr": 0.1, "nan": float("nan"), "\u20ac": [1, 2.0]})
    put(catalog, 1, config={"lr": 0.2}, layout={"mesh": {"dp": 2}})
    put(catalog, 2, layout={"mesh": {"dp": 4.5, "\u00e9": None}})
    entries = {e.step: e for e in catalog.find()}
    assert entries[0].config == {"lr": 0.1, "nan": {"$float": "nan"}, "\u20ac": [1, 2.0]}
    assert (entries[1].config, entries[2].config) == ({"lr": 0.2}, {})
    assert entries[1].topology["mesh"] == {"dp": 2}
    assert entries[2].topology["mesh"] == {"dp": 4.5, "\u00e9": None}


def test_curves_are_of_all_steps_of_a_short_run(catalog: Catalog) -> None:
    for n in range(6):
        loss = float("nan") if n == 3 else n / 2
        put(catalog, n, metrics={"loss": loss} | ({"rare": 1.0} if n == 4 else {}))
    put(catalog, 10, step=2, metrics={"loss": 9.0})
    put(catalog, 11, step=None, metrics={"loss": 9.0})
    put(catalog, 12, run="run8", metrics={"other": 1.0})
    catalog.delete("run7@5")
    curves = catalog.curves("run7")
    assert curves.every == 1
    assert list(curves.points) == ["loss", "rare"]
    assert repr(curves.points["loss"]) == repr(
        [(0, 0.0), (1, 0.5), (2, 1.0), (2, 9.0), (3, float("nan")), (4, 2.0)]
    )
    assert catalog.curves("run7", "step < 2").points == {"loss": [(0, 0.0), (1, 0.5)]}
    few = catalog.curves("run7", drawn=1)
    assert (list(few.points), few.others, few.unnamed) == (["loss"], ["rare"], 0)
    with mock.patch.object(search, "_NAMED", 0):
        assert catalog.curves("run7", drawn=1).unnamed == 1
    assert catalog.curves("none").points == {}


def test_curves_of_a_long_run_are_of_the_first_of_each_so_many_steps(catalog: Catalog) -> None:
    steps = [-5, 0, 1, 2, 30, 31, 32, 33, 90, 91, 99]
    for n, step in enumerate(steps):
        put(catalog, n, step=step, metrics={"loss": float(step)})
    catalog.delete("run7@90")
    for most in (1, 3, 5, 9):
        curves = catalog.curves("run7", most=most)
        assert curves.every == 104 // most + 1
        expected: dict[int, int] = {}
        for step in steps:
            if step != 90:
                expected.setdefault((step + 5) // curves.every, step)
        assert [step for step, _ in curves.points["loss"]] == list(expected.values())
        assert len(expected) <= most
    assert catalog.curves("run7", "step >= 30", most=2).points["loss"] == [(30, 30.0), (91, 91.0)]
