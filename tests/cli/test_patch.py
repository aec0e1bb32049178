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


def test_what_is_not_converted_is_not_unverified(run: Run, run7: Path) -> None:
    run("export", "safetensors", "0", run7 / "exported")
    note = "converted without verification"
    assert f"2 tensors {note}" in run("convert", "exported", "x").stderr
    assert note not in run("convert", "exported", "y", "--base", "0").stderr


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
    assert "patches of 1 other\n" in shown
    assert "`ucp compact` makes it whole" in shown

    assert run("compact", "p2", "-q", "--fold").stdout.strip() == found["id"]
    again = run("compact", "p2", "--fold")
    assert "depends on one whole checkpoint at most: nothing to do" in again.stderr
    assert "written" not in again.stdout
    whole = object_of(run("compact", "p2", "--codec", "none", "--json").stdout)
    assert (whole["id"], whole["bases"], whole["bytes_plain"]) == (found["id"], [], 36200)
    assert "depends on no other checkpoint: nothing to do" in run("compact", "p2").stderr
    assert ucformat.open(run7 / "p2")["up"].read().tobytes() == before.tobytes()
    refused = run("compact", "0", "x", code=2).stderr
    assert "`ucp copy SRC DST` copies it as it is" in refused


def test_dry_runs(run: Run, run7: Path) -> None:
    """Each says what would be written, as far as that is known, and writes nothing."""
    run("patch", "0", "1", "p1")
    run("patch", "p1", "2", "p2")
    up, frozen = 36000, 200
    encode = ("--encode", "exp_avg=int8-blockwise")
    both = {("frozen", "weight"): np.ones(50, "f4"), ("up", "exp_avg"): np.ones(9000, "f4")}
    write_packed(LocalStore(run7 / "moments"), both)
    words = {
        "patch": (["patch", "0", "1", "x"], (up, frozen, True)),
        "unrecorded": (["patch", "0", "../packed/1", "x"], (up + frozen, 0, True)),
        "base": (["convert", "1", "x", "--base", "0"], (up, frozen, False)),
        "codec": (["convert", "1", "x", "--codec", "blosc"], (up + frozen, 0, True)),
        "encode": (["convert", "moments", "x", *encode], (up + frozen, 0, True)),
        "compact": (["compact", "p2"], (up + frozen, 0, True)),
        "plain": (["compact", "p2", "x", "--codec", "none"], (up + frozen, 0, False)),
        "fold": (["compact", "p2", "--fold"], (up, frozen, True)),
        "whole": (["compact", "0"], (0, 0, False)),
        "folded": (["compact", "p1", "--fold"], (0, 0, False)),
        "average": (["average", "0", "1", "x", "--base", "0"], (up + frozen, 0, False)),
    }
    before = {path: path.stat().st_mtime_ns for path in run7.parent.rglob("*")}
    for name, (command, (written, referenced, encoded)) in words.items():
        found = object_of(run(*command, "--dry-run", "--json").stdout)
        footers = 200  # of arrays
        assert written <= found["bytes_written"] <= written + footers, name
        assert (found["bytes_referenced"], found["encoded"]) == (referenced, encoded), name
        assert found["unread"] == {"unrecorded": 2, "average": 1}.get(name, 0), name
        assert (found["tasks"] == 0) == (not written), name
        assert {path: path.stat().st_mtime_ns for path in run7.parent.rglob("*")} == before, name
    shown = run("patch", "0", "1", "x", "--dry-run").stdout
    assert "35.2 KiB before encoding" in shown
    assert "1 tensor, 200 B, not written" in shown
    shown = run("average", "0", "1", "x", "--base", "0", "--dry-run").stdout
    assert "1 tensor, counted as written: whether they equal the base's shows when read" in shown
    refused = run("patch", "0", "moments", "x", "-s", "exp_avg", "--dry-run", code=2).stderr
    assert "so nothing would be a patch" in refused
    refused = run("compact", "p2", "--fold", "--codec", "none", "--dry-run", code=2).stderr
    assert "leave out one of fold and codec" in refused
    refused = run("convert", "1", "x", "--encode", "*=int8-blockwise", "--dry-run", code=2).stderr
    assert "weight" in refused
