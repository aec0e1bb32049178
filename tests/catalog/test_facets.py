"""What the page of checkpoints counts and draws."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.catalog.acts import put

if TYPE_CHECKING:
    from ucformat.catalog.catalog import Catalog


def test_facets_count_the_newest(catalog: Catalog) -> None:
    for n in range(6):
        put(catalog, n, run="a" if n < 4 else "b")
    for n in (0, 1, 5):
        catalog.tag(catalog.get(f"{'b' if n == 5 else 'a'}@{n}").id, "good", *["old"] * (n == 0))
    assert catalog.facets() == {
        "run": {"a": 4, "b": 2},
        "kind": {"ucformat": 6},
        "tag": {"good": 3, "old": 1},
    }
    assert catalog.facets("run = 'a'", most=2)["run"] == {"a": 2}
    assert catalog.facets("run = 'c'") == {"run": {}, "kind": {}, "tag": {}}


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
