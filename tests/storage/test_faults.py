"""Faults between ucformat and an object store: committed and whole, or cleanly failed, and never anything else."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

from tests.storage.fault_runs import OUTCOMES, converted, saved, source
from tests.storage.proxy import FAULTS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.storage.conftest import Faulty

SEEDS, FEW, AT_ONCE = 200, 5, 20
_RUNS = [
    pytest.param(range(FEW), id="few"),
    *(
        pytest.param(range(k, min(k + AT_ONCE, SEEDS)), marks=pytest.mark.matrix)
        for k in range(FEW, SEEDS, AT_ONCE)
    ),
]


def _all(
    seeds: range, faulty: Faulty, run: Callable[[int], str], record: Callable[[str, object], None]
) -> None:
    """Run all seeds; faults must have been made, and both outcomes seen."""
    faulty.proxy.done.clear()
    outcomes: Counter[str] = Counter()
    for seed in seeds:
        found = run(seed)
        assert found in OUTCOMES
        outcomes[found] += 1
    for name, count in (*outcomes.items(), *faulty.proxy.done.items()):
        record(name, count)
    assert outcomes["committed"] >= len(seeds) // 2
    assert sum(faulty.proxy.done[fault] for fault in FAULTS) > len(seeds)


@pytest.mark.parametrize("seeds", _RUNS)
def test_conversions(
    seeds: range,
    faulty: Faulty,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    src = source(tmp_path)
    for file in src.rglob("*"):
        if file.is_file():
            key = f"{tmp_path.name}/{file.relative_to(tmp_path)}"
            faulty.bucket.client.put_object(
                Bucket=faulty.bucket.name, Key=key, Body=file.read_bytes()
            )
    stored = f"s3://{faulty.bucket.name}/{tmp_path.name}/{src.name}"
    _all(
        seeds,
        faulty,
        lambda seed: converted(seed, src, stored, faulty, monkeypatch),
        record_property,
    )


@pytest.mark.parametrize("seeds", _RUNS)
def test_saves(
    seeds: range,
    faulty: Faulty,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    _all(seeds, faulty, lambda seed: saved(seed, faulty, monkeypatch), record_property)
