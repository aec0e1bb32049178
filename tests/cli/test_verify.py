"""`ucp verify`: whole is 0, damaged is 5, and every problem has its line."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

from tests.cli.conftest import object_of
from tests.fakes import ODD

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import Run


def _damaged(committed: Path, place: Path) -> Path:
    """A copy with a flipped bit in one shard, and another shard gone."""
    shutil.copytree(committed, place)
    shards = sorted(p for p in (place / "data").rglob("*") if p.is_file() and p.name != "zarr.json")
    data = bytearray(shards[0].read_bytes())
    data[5] ^= 1
    shards[0].write_bytes(data)
    shards[-1].unlink()
    return place


def test_a_whole_checkpoint(run: Run, committed: Path) -> None:
    lines = run("verify", committed).stdout.splitlines()
    assert lines[0] == f"{committed} is intact"
    assert lines[1] == f"  {len(ODD)} tensors"
    assert run("verify", committed, "-q").stdout == ""
    found = object_of(run("verify", committed, "--json", "-w", 1).stdout)
    assert found["ok"] is True
    assert found["problems"] == []
    assert found["bytes_verified"] > sum(a.nbytes for a in ODD.values())


def test_every_problem_is_named_on_a_line_of_its_own(
    run: Run, committed: Path, tmp_path: Path
) -> None:
    place = _damaged(committed, tmp_path / "bad")
    result = run("verify", place, code=5)
    assert len(result.stdout.splitlines()) == 2
    assert "crc32c differs" in result.stdout
    assert result.stderr.startswith(f"error: {place} is damaged: 2 problems\nhint: restore")
    assert run("verify", place, "-q", code=5).stdout == result.stdout


def test_json_of_a_damaged_one(run: Run, committed: Path, tmp_path: Path) -> None:
    result = run("verify", _damaged(committed, tmp_path / "bad"), "--json", code=5)
    found = object_of(result.stdout)
    assert found["ok"] is False
    assert [sorted(p) for p in found["problems"]] == [
        ["chunk", "file", "name", "reason", "state"]
    ] * 2
    assert json.loads(result.stderr)["error"]["exit_code"] == 5


def test_what_is_no_checkpoint_is_not_found(run: Run, tmp_path: Path) -> None:
    assert run("verify", tmp_path, code=3).stderr.startswith("error: ")
