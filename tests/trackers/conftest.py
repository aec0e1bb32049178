"""A catalog of two runs, and imports into it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import ucformat
from tests.catalog.manifests import manifest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ucformat.catalog.entries import Entry

    Fill = Callable[..., None]

STEPS = (100, 200, 300)


@pytest.fixture
def catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ucformat.Catalog]:
    """A catalog of run7 and run8, with a checkpoint at each of STEPS."""
    file = str(tmp_path / "catalog.db")
    monkeypatch.setenv("UCP_CATALOG", file)
    with ucformat.Catalog(file) as opened:
        fill(opened)
        yield opened


def fill(catalog: ucformat.Catalog) -> None:
    """Record run7 and run8, with a checkpoint at each of STEPS."""
    for number, run in enumerate(("run7", "run8")):
        for k, step in enumerate(STEPS):
            doc = manifest(number * 10 + k, run, step, metrics={"recorded": 0.1})
            catalog.record(doc, f"/nowhere/{run}/{step}")


def of_run(catalog: ucformat.Catalog, run: str = "run7") -> dict[int | None, Entry]:
    """The entries of a run by step."""
    return {entry.step: entry for entry in catalog.find(f"run = '{run}'", sort="step")}


def metric(catalog: ucformat.Catalog, name: str, run: str = "run7") -> dict[int | None, Any]:
    """The values of a metric by step."""
    return {step: entry.metrics.get(name) for step, entry in of_run(catalog, run).items()}
