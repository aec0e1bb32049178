"""`ucp thin`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import ucformat
from tests.cli.conftest import object_of
from tests.fakes import ODD
from tests.packed import write_packed
from ucformat.signatures import SIGNATURE
from ucformat.storage.local import LocalStore

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import Run, Terminal


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A checkpoint with a master, a moment and a step of one tensor."""
    write_packed(LocalStore(tmp_path / "it"), ODD)
    return tmp_path / "it"


def test_it_is_shown_and_then_applied(run: Run, place: Path) -> None:
    before = ucformat.open(place).id
    shown = run("thin", place, "--drop", "exp*", "--drop", "step").stdout.splitlines()
    assert shown[0] == str(place)
    assert [line.split() for line in shown[2:6]] == [
        ["weight", "keep", "7", "83.9", "KiB"],
        ["master", "keep", "1", "24.7", "KiB"],
        ["exp_avg", "drop", "1", "24.7", "KiB"],
        ["step", "drop", "1", "4", "B"],
    ]
    assert shown[7:9] == ["run        keep      drop", "run7  108.6 KiB  24.7 KiB"]
    assert shown[-1] == "nothing was removed; --apply does it"
    assert ucformat.open(place).id == before

    (place / SIGNATURE).write_text("{}")
    done = run("thin", place, "--drop", "exp*", "--drop", "step", "--apply")
    assert done.stdout.splitlines()[-1] == "thinned 1 checkpoint"
    assert "sign it again" in done.stderr
    assert set(ucformat.open(place).dropped) == {"exp_avg", "step"}
    again = run("thin", place, "--drop", "exp*", "--apply").stdout
    assert "it has none of these states any more: nothing to do" in again
    lines = run("show", place).stdout
    assert "dropped   exp_avg (1 tensor, 24.7 KiB) by thin on " in lines
    found = object_of(run("show", place, "--json").stdout)["dropped"]
    assert [(d["state"], d["tensors"], d["bytes"], d["reason"]) for d in found] == [
        ("exp_avg", 1, 25320, "drop exp*, step"),
        ("step", 1, 4, "drop exp*, step"),
    ]


def test_json_and_ids(run: Run, place: Path) -> None:
    before = ucformat.open(place).id
    shown = object_of(run("thin", place, "--drop", "master", "--json").stdout)
    assert list(shown) == ["applied", "checkpoints", "runs"]
    (one,) = shown["checkpoints"]
    assert (one["id"], one["new_id"], one["run"]) == (before, None, "run7")
    assert one["dropped"] == [{"state": "master", "tensors": 1, "bytes": 25320}]
    assert shown["runs"] == [
        {"run": "run7", "bytes_kept": one["bytes_kept"], "bytes_dropped": 25320}
    ]
    assert run("thin", place, "--drop", "master", "-q").stdout == f"{before}\n"
    done = object_of(run("thin", place, "--drop", "master", "--json", "--apply").stdout)
    assert done["checkpoints"][0]["new_id"] == ucformat.open(place).id != before


def test_what_is_refused(run: Run, place: Path, tmp_path: Path) -> None:
    ucformat.convert(place, tmp_path / "virtual", virtual=True)
    needed = f"needed by {ucformat.open(tmp_path / 'virtual').id}"
    assert needed in run("thin", place, "--drop", "step").stderr
    assert needed in run("thin", place, "--drop", "step", "--apply", code=4).stderr
    assert (
        "would have no tensor left"
        in run("thin", place, "--drop", "*", "--drop", "weight", code=2).stderr
    )
    assert (
        "--ignore-dependent goes with --apply"
        in run("thin", place, "--drop", "step", "--ignore-dependent", "x", code=2).stderr
    )
    child = ucformat.open(tmp_path / "virtual").id
    run("thin", place, "--drop", "step", "--apply", "--ignore-dependent", child)
    assert set(ucformat.open(place).dropped) == {"step"}


@pytest.mark.parametrize(("answer", "gone"), [("y\n", True), ("n\n", False)])
def test_at_a_terminal_one_is_asked(
    terminal: Terminal, place: Path, answer: str, gone: bool
) -> None:
    text = terminal(["thin", place, "--drop", "step", "--apply"], answer=answer)
    assert "permanently remove 4 B of 1 checkpoint? [y/N]: " in text
    assert bool(ucformat.open(place).dropped) == gone


@pytest.mark.usefixtures("catalog")
def test_gc_keeps_what_others_need(run: Run, place: Path, tmp_path: Path) -> None:
    """Of a deleted base only the tensors stay that are read there."""
    base = tmp_path / "base"
    ucformat.convert(place, base)
    run("register", base)
    ucformat.convert(base, tmp_path / "weights", base=base, states=["weight"])
    run("register", tmp_path / "weights")
    before = ucformat.open(base)
    needed = f"needed by {ucformat.open(tmp_path / 'weights').id}"
    assert needed in run("delete", before.id, "--grace", "0s", code=6).stderr
    run("delete", before.id, "--grace", "0s", "--thin")
    assert needed in run("gc").stdout
    shown = run("gc", "--thin").stdout.splitlines()
    assert shown[2].startswith("thin 1 checkpoint: keep about ")
    assert shown[-1] == "nothing was removed; --apply does it"
    [planned] = object_of(run("gc", "--thin", "--json").stdout)["thin"]
    assert (planned["id"], planned["bytes_kept"] < planned["bytes_stored"]) == (before.id, True)
    done = run("gc", "--thin", "--apply", "-y").stdout.splitlines()
    assert done[-1] == "removed 0 checkpoints, thinned 1"
    left = ucformat.open(base)
    assert left.id == before.id
    assert {key.state for key in left.tensors} == {"weight"}
    assert ": it was deleted, and others need the rest" in run("show", base).stdout
    assert "thinned" in run("restore", before.id, code=6).stderr
    assert ucformat.verify(tmp_path / "weights")
