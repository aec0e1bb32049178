"""`ucp import`: what it prints of what it brings to checkpoints."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import ucformat
from tests.catalog.acts import put
from tests.trackers.conftest import fill, metric
from tests.trackers.test_tensorboard import write

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from tests.cli.conftest import Run


def test_an_import(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCP_CATALOG", str(tmp_path / "catalog.db"))
    write(tmp_path / "logs/lr=0.1", {"loss": {100: 1.0, 250: 2.0}})
    with ucformat.Catalog() as catalog:
        fill(catalog)
        catalog.metric("run7@100", {"loss": 9.0})
    command = ("import", "tensorboard", tmp_path / "logs")
    shown = run(*command, "--run", "lr=0.1=run7", "--dry-run").stdout
    assert "2 of 3 checkpoints would be changed" in shown
    assert "kept          metric.loss of run7@100" in shown
    assert "from earlier  loss of 2 checkpoints" in shown
    assert (
        "not imported  lr=0.1: the catalog has no run" in run(*command, "--run", "lr=0.1=").stdout
    )
    assert "no run 'lr'" in run(*command, "--run", "lr=0.1", code=3).stderr
    twice = ("--run", "lr=0.1=run7", "--run", "lr=0.1=run8")
    assert "--run lr=0.1 is given twice" in run(*command, *twice, code=2).stderr
    data = json.loads(run(*command, "--run", "lr=0.1=run7", "--json").stdout)
    assert [c["metrics"] for c in data["checkpoints"]] == [{}, {"loss": 1.0}, {"loss": 2.0}]
    assert run(*command, "--run", "lr=0.1=run7", "-q").stdout == ""
    with ucformat.Catalog() as catalog:
        assert metric(catalog, "loss") == {100: 9.0, 200: 1.0, 300: 2.0}
    assert "'a=b'" in run(*command, "--run", 'lr=0.1="a=b"', code=3).stderr
    with ucformat.Catalog() as catalog:
        put(catalog, 77, run="a=b", step=100)
    shown = json.loads(run(*command, "--run", 'lr=0.1="a=b"', "--json").stdout)
    assert [c["name"] for c in shown["checkpoints"]] == ["a=b@100"]
    run(*command, "--run", "lr=0.1=run7", "--replace")
    with ucformat.Catalog() as catalog:
        assert metric(catalog, "loss")[100] == 1.0
