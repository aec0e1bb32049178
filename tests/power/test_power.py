"""The power fails under commands, all of which are part of `make test-all`; and the model of a disk."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.power.commands import COMMANDS
from tests.power.disk import after, visible
from tests.power.failure import Bench
from tests.power.recorder import Recorder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with Bench(tmp_path_factory.mktemp("power")) as bench:
        yield bench


@pytest.mark.matrix
@pytest.mark.parametrize("command", COMMANDS)
def test_the_power_fails_after_each_call(bench: Bench, command: str) -> None:
    found = bench.fail(command)
    assert found.complaints == []
    assert found.judged > found.calls // 4


@pytest.mark.matrix
@pytest.mark.parametrize("command", COMMANDS)
def test_what_was_killed_is_repeated_and_lasts(bench: Bench, command: str) -> None:
    assert bench.kill(command).complaints == []


@pytest.mark.matrix
@pytest.mark.parametrize("command", COMMANDS)
def test_a_sync_that_does_nothing_gives_no_wrong_bytes(bench: Bench, command: str) -> None:
    assert bench.lie(command).complaints == []


# The model itself


def _states(root: Path, recorder: Recorder) -> set[frozenset[tuple[str, bytes]]]:
    return {visible(tree) for _, tree in after(recorder.disk, recorder.calls)}


def test_what_is_renamed_before_it_is_synced_may_be_empty_zeros_or_half(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"old")
    recorder = Recorder(tmp_path)
    with recorder.recording():
        fd = os.open(tmp_path / "g", os.O_WRONLY | os.O_CREAT)
        os.write(fd, b"news")
        os.rename(tmp_path / "g", tmp_path / "f")  # noqa: PTH104
    found = {dict(s)["f"] for s in _states(tmp_path, recorder)}
    assert found == {b"old", b"", b"\0\0\0\0", b"ne", b"news"}
    with recorder.recording():
        os.fsync(fd)
    assert {dict(s)["f"] for s in _states(tmp_path, recorder)} == {b"old", b"news"}
    with recorder.recording():
        folder = os.open(tmp_path, os.O_RDONLY)
        os.fsync(folder)
    assert _states(tmp_path, recorder) == {frozenset({("f", b"news")})}
    os.close(fd)
    os.close(folder)


def test_a_new_folder_lasts_when_the_one_above_it_is_synced(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    with recorder.recording():
        (tmp_path / "a").mkdir()
        fd = os.open(tmp_path / "a" / "f", os.O_WRONLY | os.O_CREAT)
        os.write(fd, b"x")
        os.fsync(fd)
        os.close(fd)
        folder = os.open(tmp_path / "a", os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
    assert _states(tmp_path, recorder) == {frozenset(), frozenset({("a/f", b"x")})}


def test_what_was_removed_may_come_back_in_any_order(tmp_path: Path) -> None:
    for name in ("f", "g"):
        (tmp_path / name).write_bytes(b"x")
    recorder = Recorder(tmp_path)
    with recorder.recording():
        (tmp_path / "f").unlink()
        (tmp_path / "g").unlink()
    assert {frozenset(dict(s)) for s in _states(tmp_path, recorder)} == {
        frozenset(some) for some in (("f", "g"), ("f",), ("g",), ())
    }


def test_a_call_that_escapes_is_noticed(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    with recorder.recording():
        (tmp_path / "f").write_bytes(b"not by os.open")
    assert recorder.now() == {}
    with recorder.recording(), pytest.raises(AssertionError, match="not recorded"):
        os.truncate(tmp_path / "f", 0)
