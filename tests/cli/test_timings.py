"""How long ranks took, in `ucp show --timings` and `ucp runs --timings`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import ucformat
from tests.cli.conftest import object_of
from tests.packed import write_packed
from ucformat.catalog.catalog import Catalog
from ucformat.geometry.tensor import Key
from ucformat.schema.manifest import LineageDoc, ReaderDoc, WriterDoc
from ucformat.storage.url import open_store

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import Run
    from tests.fakes import Arrays

ARRAYS: Arrays = {Key("w", "weight"): np.arange(12, dtype="f4")}


def writers(slow: float, ranks: int = 4) -> tuple[WriterDoc, ...]:
    """Ranks of which number 2 is slow."""
    return tuple(
        WriterDoc(
            rank=rank,
            nbytes=1 << 20,
            seconds=slow if rank == 2 else 0.5,
            stall=0.25,
            phases={"plan": 0.125, "write": 0.375, "sync": 0.125},
            retries=3 if rank == 2 else 0,
        )
        for rank in range(ranks)
    )


def loaded(url: str) -> LineageDoc:
    reader = ReaderDoc(rank=0, nbytes=2 << 20, seconds=2.0, phases={"plan": 0.5, "read": 1.5})
    return LineageDoc(kind="resume", url=url, id="0" * 32, readers=(reader,))


@pytest.fixture
def run7(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of 3 saves of 4 ranks, of which rank 2 is slow in the last two, and a conversion."""
    monkeypatch.setenv("UCP_CATALOG", str(tmp_path / "c.db"))
    with Catalog(str(tmp_path / "c.db")) as catalog:
        for step, slow in ((1, 0.5), (2, 1.0), (3, 2.0)):
            folder = tmp_path / "run7" / str(step)
            facts: dict[str, Any] = {"run": "run7", "step": step, "layout": {"world": 4}}
            facts["lineage"] = (loaded(f"../{step - 1}"),) if step > 1 else ()
            write_packed(open_store(folder), ARRAYS, writers=writers(slow), **facts)
            ucformat.register(folder, catalog)
        folder = tmp_path / "run7" / "4"
        write_packed(open_store(folder), ARRAYS, run="run7", step=4, writers=(), lineage=())
        ucformat.register(folder, catalog)
    return tmp_path / "run7"


def test_what_ranks_did(run: Run, run7: Path) -> None:
    lines = run("show", run7 / "3", "--timings").stdout.splitlines()
    assert lines[0] == "saved: 2.00 s; the ranks below wrote 4.0 MiB, 2.0 MiB per second"
    assert lines[1].split() == [
        "rank",
        "bytes",
        "plan",
        "write",
        "sync",
        "stall",
        "retries",
        "seconds",
    ]
    assert lines[4].split()[:-1] == ["2", "1.0", "MiB", "0.12", "0.38", "0.12", "0.25", "3", "2.00"]
    assert lines[4].count("#") == 4 * lines[3].count("#")
    assert lines[6] == "rank 2 is a straggler: the median of the ranks above is 0.50 s"
    assert lines[7].startswith("loaded ../2: 2.00 s; the ranks below read 2.0 MiB")
    assert lines[8].split() == ["rank", "bytes", "plan", "read", "seconds"]
    data = object_of(run("show", run7 / "3", "--timings", "--json").stdout)
    assert data["save"]["stragglers"] == [2]
    assert data["save"]["writers"][2]["phases"] == {"plan": 0.125, "write": 0.375, "sync": 0.125}
    assert [load["url"] for load in data["loads"]] == ["../2"]
    assert "straggler" not in run("show", run7 / "1", "--timings").stdout


def test_of_what_no_training_has_saved(run: Run, run7: Path) -> None:
    assert "no training has recorded" in run("show", run7 / "4", "--timings").stdout
    data = object_of(run("show", run7 / "4", "--timings", "--json").stdout)
    assert (data["save"], data["loads"]) == (None, [])
    assert "exclude" in run("show", run7 / "4", "--timings", "-t", "*", code=2).stderr


def test_the_heat_map_of_a_run(run: Run, run7: Path) -> None:
    lines = run("runs", "--timings").stdout.splitlines()
    assert lines[0] == "run7: 3 saves"
    assert [line.split("|")[1] for line in lines[1:5]] == ["---", "---", "-+@", "---"]
    assert "rank 2 is a straggler in 2 of 3 saves" in lines[-1]
    data = object_of(run("runs", "--timings", "--json").stdout)
    assert [save["step"] for save in data["runs"][0]["saves"]] == [1, 2, 3]
    assert [save["stragglers"] for save in data["runs"][0]["saves"]] == [[], [2], [2]]
    chosen = object_of(run("runs", "step < 3", "--timings", "--json").stdout)
    assert [save["step"] for save in chosen["runs"][0]["saves"]] == [1, 2]
