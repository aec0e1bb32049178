"""`ucp copy`: one line when done, both places in the catalog, on with the same command when stopped."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import ucformat
from tests.cli.conftest import object_of
from tests.cli.interrupting import interrupted
from tests.fakes import FakeSource, random_array
from tests.patience import PATIENCE
from tests.s3 import CANARY
from ucformat.checkpoint import Checkpoint
from ucformat.storage.local import LocalStore

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import Run, Shell
    from tests.s3 import Bucket


def test_one_line_says_what_was_copied(run: Run, committed: Path, tmp_path: Path) -> None:
    result = run("copy", committed, tmp_path / "a", "-w", 2)
    ck = ucformat.open(tmp_path / "a")
    files = (
        sum(p.is_file() for p in (tmp_path / "a").rglob("*")) - 2
    )  # the manifest and the attempt's record
    assert result.stdout.startswith(f"{tmp_path / 'a'}  {ck.id}  {files} files, ")
    assert result.stdout.endswith(" MB/s\n")
    assert result.stdout.count("\n") == 1
    assert result.stderr == ""
    again = run("copy", committed, tmp_path / "a")
    assert again.stdout.startswith(f"{tmp_path / 'a'}  {ck.id}  0 files, ")
    assert again.stderr == f"note: {tmp_path / 'a'} is this checkpoint already: nothing to do\n"


def test_json_and_quiet(run: Run, committed: Path, tmp_path: Path) -> None:
    found = object_of(run("copy", committed, tmp_path / "a", "--json").stdout)
    assert list(found) == [
        *(
            "url",
            "id",
            "already",
            "files",
            "bytes",
            "kept_files",
            "kept_bytes",
            "seconds",
            "mb_per_s",
        ),
    ]
    assert (found["already"], found["kept_files"]) == (False, 0)
    (tmp_path / "a" / "manifest.json").unlink()
    again = object_of(run("copy", committed, tmp_path / "a", "--json").stdout)
    assert again["kept_files"] == again["files"] == found["files"]
    assert object_of(run("copy", committed, tmp_path / "a", "--json").stdout)["already"] is True
    assert run("copy", committed, tmp_path / "b", "-q").stdout == f"{found['id']}\n"


def test_another_one_there_is_a_conflict_unless_overwritten(
    run: Run, committed: Path, tmp_path: Path
) -> None:
    run("convert", committed, tmp_path / "a", "-s", "weight")
    assert "--overwrite" in run("copy", committed, tmp_path / "a", code=4).stderr
    run("copy", committed, tmp_path / "a", "--overwrite")
    assert ucformat.open(tmp_path / "a").id == ucformat.open(committed).id


def test_both_places_are_listed_and_shown(
    run: Run, catalog: Path, committed: Path, tmp_path: Path
) -> None:
    run("convert", committed, tmp_path / "run8" / "1700", "--run", "run8")
    run("alias", "set", "best", "run8@1700")
    far = tmp_path / "far"
    identity = run("copy", "alias:best", far, "-q").stdout.strip()
    (listed,) = object_of(run("ls", "run = 'run8'", "--json").stdout)["checkpoints"]
    assert listed["id"] == identity
    assert set(listed["urls"]) == {str(far), str(tmp_path / "run8" / "1700")}
    assert f"  also in   {tmp_path / 'run8' / '1700'}\n" in run("show", far).stdout
    assert f"  also in   {far}\n" in run("show", tmp_path / "run8" / "1700").stdout
    assert run("lineage", identity, "--down", "-q").stdout.count("\n") <= 1


def test_a_damaged_source(run: Run, committed: Path, tmp_path: Path) -> None:
    run("copy", committed, tmp_path / "a")
    file = next(p for p in (tmp_path / "a").rglob("c/*") if p.is_file() and p.stat().st_size)
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
    error = run("copy", tmp_path / "a", tmp_path / "b", code=5).stderr
    assert str(file) in error
    assert (
        "hint: restore it from another copy of the checkpoint; nothing is committed at the destination\n"
        in error
    )
    assert run("show", tmp_path / "b", code=3).stdout == ""


def test_ctrl_c_commits_nothing_and_the_same_command_continues(tmp_path: Path) -> None:
    arrays = {(f"w{i}", "weight"): random_array((1000, 500), "float32", i) for i in range(20)}
    source = Checkpoint(FakeSource.write(LocalStore(tmp_path / "fake"), arrays))
    ucformat.convert(source, tmp_path / "src", chunk_bytes=1024, shard_bytes=1 << 16)
    dst = tmp_path / "dst"
    command = [
        sys.executable,
        "-m",
        "ucformat.cli",
        "copy",
        str(tmp_path / "src"),
        str(dst),
        "-w",
        "1",
    ]
    code, out, err = interrupted(command[3:], dst)
    assert code == 130, err
    assert out == ""
    assert (
        err
        == f"interrupted: nothing is committed at {dst}; run the same command again and it continues\n"
    )
    with pytest.raises(LookupError):
        ucformat.open(dst)
    done = subprocess.run(
        [*command, "--json"], capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    assert json.loads(done.stdout)["kept_files"] > 0
    ucformat.verify(dst).raise_if_damaged()
    assert (dst / "manifest.json").read_bytes() == (tmp_path / "src" / "manifest.json").read_bytes()


def test_to_an_object_store_and_back_in_processes_of_their_own(
    shell: Shell, bucket: Bucket, committed: Path, tmp_path: Path
) -> None:
    place = bucket.place()
    out = ""
    for line in (
        f"ucp copy {committed} {place}",
        f"ucp verify {place}",
        f"ucp copy {place} {tmp_path / 'back'}",
        f"ucp copy {place} {tmp_path / 'back'}",
    ):
        done = shell(line)
        assert done.returncode == 0, done.stderr
        out += done.stdout + done.stderr
    assert "nothing to do" in out
    assert CANARY not in out
    assert (tmp_path / "back" / "manifest.json").read_bytes() == (
        committed / "manifest.json"
    ).read_bytes()


def test_a_copy_is_based_on_no_other_checkpoint(run: Run, tmp_path: Path) -> None:
    refused = run("copy", tmp_path / "a", tmp_path / "b", "--base", tmp_path / "c", code=2).stderr
    assert "`ucp convert SRC DST --base REF` writes a checkpoint with an id of its own" in refused
