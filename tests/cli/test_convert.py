"""`ucp convert`: one line when done, nothing committed when stopped, and on with the same command."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import ucformat
from tests.cli.conftest import object_of
from tests.cli.interrupting import interrupted
from tests.fakes import ODD, FakeSource, random_array, same
from tests.patience import PATIENCE
from ucformat.checkpoint import Checkpoint
from ucformat.cli.ui.options import SIZE
from ucformat.storage.local import LocalStore

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import Run


def test_one_line_says_what_was_made(run: Run, committed: Path, tmp_path: Path) -> None:
    result = run(
        "convert",
        committed,
        tmp_path / "dst",
        "--chunk-bytes",
        "64",
        "--shard-bytes",
        "1KiB",
        "-w",
        2,
    )
    ck = ucformat.open(tmp_path / "dst")
    assert result.stdout.count("\n") == 1
    assert result.stdout.startswith(f"{tmp_path / 'dst'}  {ck.manifest.id}  {len(ODD)} tensors, ")
    assert result.stdout.endswith(" MB/s\n")
    assert result.stderr == ""
    for key, a in ODD.items():
        assert same(ck[key][...], a)
    assert (
        max(
            t.shard[0] * t.shard[1] * 16
            for t in ck.manifest.tensors
            if t.name == "table" and t.shard
        )
        <= 1024
    )


def test_json_and_quiet(run: Run, committed: Path, tmp_path: Path) -> None:
    found = object_of(run("convert", committed, tmp_path / "a", "-s", "weight", "--json").stdout)
    assert list(found) == ["url", "id", "tensors", "bytes", "seconds", "mb_per_s"]
    ck = ucformat.open(tmp_path / "a")
    assert {k.state for k in ck.tensors} == {"weight"}
    assert (found["id"], found["tensors"]) == (ck.manifest.id, len(ck.tensors))
    assert (
        run("convert", committed, tmp_path / "b", "-q").stdout
        == f"{ucformat.open(tmp_path / 'b').manifest.id}\n"
    )


def test_a_committed_place_is_a_conflict_unless_overwritten(
    run: Run, committed: Path, tmp_path: Path
) -> None:
    first = run("convert", committed, tmp_path / "a", "-q").stdout
    assert "--overwrite" in run("convert", committed, tmp_path / "a", code=4).stderr
    assert run("convert", committed, tmp_path / "a", "-q", "--overwrite").stdout != first


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("7", 7),
        ("64KiB", 65536),
        ("1.5MiB", 3 << 19),
        ("1GB", 10**9),
        ("2g", 2 << 30),
        ("1 TiB", 1 << 40),
        ("9B", 9),
    ],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert SIZE.convert(text, None, None) == nbytes


@pytest.mark.parametrize("text", ["", "-1", "0", "1.5", "4X", "KiB", "1e6", "1,000", "MiB4"])
def test_what_is_no_size(run: Run, committed: Path, tmp_path: Path, text: str) -> None:
    result = run("convert", committed, tmp_path / "dst", f"--chunk-bytes={text}", code=2)
    assert "chunk-bytes" in result.stderr
    assert not (tmp_path / "dst").exists()


def test_ctrl_c_commits_nothing_and_the_same_command_continues(tmp_path: Path) -> None:
    arrays = {(f"w{i}", "weight"): random_array((1000, 500), "float32", i) for i in range(20)}
    ucformat.convert(
        Checkpoint(FakeSource.write(LocalStore(tmp_path / "fake"), arrays)), tmp_path / "src"
    )
    dst = tmp_path / "dst"
    command = [
        sys.executable,
        "-m",
        "ucformat.cli",
        "convert",
        str(tmp_path / "src"),
        str(dst),
        "-w",
        "1",
    ]
    command += ["--chunk-bytes", "1KiB", "--shard-bytes", "64KiB"]
    code, out, err = interrupted(command[3:], dst)
    assert code == 130, err
    assert out == ""
    assert (
        err
        == f"interrupted: nothing is committed at {dst}; run the same command again and it continues\n"
    )
    with pytest.raises(LookupError):
        ucformat.open(dst)
    (attempt,) = (dst / "attempts").iterdir()
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert done.stdout.startswith(f"{dst}  ")
    ck = ucformat.open(dst)
    assert ck.manifest.attempt == attempt.stem
    for key, a in arrays.items():
        assert same(ck[key][...], a)
