"""`ucp patch` and `ucp compact`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

import ucformat
from tests.cli.conftest import object_of
from tests.packed import write_packed
from ucformat.storage.local import LocalStore

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import Run


@pytest.fixture
def run7(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of three checkpoints, of whose tensors one stays."""
    for step in range(3):
        tensors = {
            ("frozen", "weight"): np.arange(50, dtype=np.float32),
            ("up", "weight"): np.linspace(1, 2, 9000, dtype=np.float32)
            * np.float32(1 + step / 1e6),
        }
        write_packed(LocalStore(tmp_path / "packed" / str(step)), tensors)
        ucformat.convert(tmp_path / "packed" / str(step), tmp_path / "run7" / str(step))
    monkeypatch.chdir(tmp_path / "run7")
    return tmp_path / "run7"


def test_a_chain_and_back(run: Run, run7: Path) -> None:
    before = ucformat.open(run7 / "2")["up"].read()
    done = run("patch", "0", "1", "p1").stdout
    id_ = ucformat.open(run7 / "p1").id
    assert done.startswith(f"{run7}/p1  {id_}  2 tensors, 35.2 KiB written as ")
    assert ", 200 B in bases, in " in done
    found = object_of(run("patch", "p1", "2", "p2", "--json").stdout)
    assert found["bytes"] == 36200
    assert (found["bytes_plain"], found["bytes_referenced"]) == (36000, 200)
    assert found["bytes_written"] < 18000
    assert [base["url"] for base in found["bases"]] == ["../0", "../p1"]
    shown = run("show", "p2").stdout
    assert "0 tensors, 0 B in ../p1" in shown
    assert "patches of 1 others" in shown
    assert "`ucp compact` makes it whole" in shown

    assert run("compact", "p2", "-q", "--fold").stdout.strip() == found["id"]
    again = run("compact", "p2", "--fold").stderr
    assert "depends on one whole checkpoint at most: nothing to do" in again
    whole = object_of(run("compact", "p2", "--codec", "none", "--json").stdout)
    assert (whole["id"], whole["bases"], whole["bytes_plain"]) == (found["id"], [], 36200)
    assert "depends on no other checkpoint: nothing to do" in run("compact", "p2").stderr
    assert ucformat.open(run7 / "p2")["up"].read().tobytes() == before.tobytes()
    refused = run("compact", "0", "x", code=2).stderr
    assert "`ucp copy SRC DST` copies it as it is" in refused
