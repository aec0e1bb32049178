"""`ucp materialize`: in place or elsewhere, one line when done, and on with the same command when stopped."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import ucformat
from tests.cli.conftest import object_of
from tests.cli.interrupting import interrupted
from tests.fakes import ODD, random_array, same
from tests.packed import write_packed
from tests.patience import PATIENCE
from tests.zero_files import FLAT, write_zero3
from ucformat.jobs.materialize import is_packed
from ucformat.storage.local import LocalStore

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import Run


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """A packed checkpoint."""
    write_packed(LocalStore(tmp_path / "packed"), ODD)
    return tmp_path / "packed"


def test_in_place_and_again(run: Run, packed: Path) -> None:
    before = ucformat.open(packed).id
    result = run("materialize", packed, "--chunk-bytes", "64", "--shard-bytes", "1KiB", "-w", 2)
    assert result.stdout.count("\n") == 1
    assert result.stdout.startswith(f"{packed}  {before}  {len(ODD)} tensors, ")
    assert result.stdout.endswith(" MB/s\n")
    assert result.stderr == ""
    ck = ucformat.open(packed)
    assert not is_packed(ck)
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
    again = run("materialize", packed)
    assert again.stdout.startswith(f"{packed}  {before}  0 tensors, ")
    assert again.stderr == f"note: {packed} is not packed: nothing to do\n"
    assert ucformat.open(packed).manifest == ck.manifest


def test_elsewhere(run: Run, packed: Path, tmp_path: Path) -> None:
    found = object_of(run("materialize", packed, tmp_path / "a", "--json").stdout)
    assert list(found) == ["url", "id", "tensors", "bytes", "seconds", "mb_per_s"]
    ck = ucformat.open(tmp_path / "a")
    assert (found["id"], found["tensors"], found["bytes"]) == (
        ck.id,
        len(ODD),
        sum(a.nbytes for a in ODD.values()),
    )
    assert is_packed(ucformat.open(packed))
    assert "--overwrite" in run("materialize", packed, tmp_path / "a", code=4).stderr
    assert run("materialize", packed, tmp_path / "a", "-q", "--overwrite").stdout != f"{ck.id}\n"
    assert (
        run("materialize", tmp_path / "a", tmp_path / "b", "-q").stdout
        == f"{ucformat.open(tmp_path / 'b').id}\n"
    )


def test_json_and_quiet_where_nothing_is_to_do(run: Run, committed: Path) -> None:
    ck = ucformat.open(committed)
    result = run("materialize", committed, "--json")
    found = object_of(result.stdout)
    assert (found["id"], found["tensors"], found["bytes"]) == (ck.id, 0, 0)
    assert result.stderr == ""
    assert run("materialize", committed, "-q").stdout == f"{ck.id}\n"


def test_a_foreign_checkpoint_needs_a_destination(run: Run, tmp_path: Path) -> None:
    arrays = {("w", s): random_array((4, 6), "float32", i) for i, s in enumerate(FLAT)}
    source = write_zero3(tmp_path / "source", arrays, ranks=2)
    result = run("materialize", source, code=6)
    assert "deepspeed" in result.stderr
    assert "ucp materialize SRC DST" in result.stderr
    run("materialize", source, tmp_path / "dst")
    assert same(ucformat.open(tmp_path / "dst")["w", "master"][...], arrays["w", "master"])


def test_a_damaged_packed_file_is_named(run: Run, packed: Path) -> None:
    file = next(packed.rglob("rank1.bin"))
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)
    error = json.loads(run("materialize", packed, "--json", code=5).stderr)["error"]
    assert error["type"] == "ChecksumError"
    assert str(file) in error["message"]
    assert is_packed(ucformat.open(packed))


def test_ctrl_c_leaves_it_packed_and_the_same_command_continues(tmp_path: Path) -> None:
    arrays = {(f"w{i}", "weight"): random_array((1000, 500), "float32", i) for i in range(20)}
    place = tmp_path / "packed"
    packed = write_packed(LocalStore(place), arrays, block_bytes=1 << 18)
    command = [sys.executable, "-m", "ucformat.cli", "materialize", str(place), "-w", "1"]
    command += ["--chunk-bytes", "1KiB", "--shard-bytes", "64KiB"]
    code, out, err = interrupted(command[3:], place)
    assert code == 130, err
    assert out == ""
    assert err == f"interrupted: {place} is intact; run the same command again and it continues\n"
    left = ucformat.open(place)
    assert left.manifest == packed.manifest
    (attempt,) = {p.stem for p in (place / "attempts").glob("*.json")} - {packed.manifest.attempt}
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert done.stdout.startswith(f"{place}  {packed.id}  20 tensors")
    ck = ucformat.open(place)
    assert ck.manifest.attempt == attempt
    for key, a in arrays.items():
        assert same(ck[key][...], a)
