"""`ucp delete`, `ucp restore`, `ucp retain`, `ucp gc`: nothing goes unasked, and each says why it stays."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest

from tests.cli.conftest import LONG_RUN, object_of
from ucformat.errors import UcformatError
from ucformat.storage.local import LocalStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.cli.conftest import Run, Terminal
    from ucformat.catalog.entries import Entry

ROW = ["id", "name", "run", "step", "created", "bytes"]


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    file = tmp_path / "policy.yaml"
    file.write_text(
        "version: 1\nkeep: {last: 1, best: {metric: nonsense, count: 1, mode: min}}\ngrace: 2d\n"
    )
    return file


@pytest.fixture
def stored(run: Run, committed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint that can really be removed, of run9 in a catalog of its own."""
    monkeypatch.setenv("UCP_CATALOG", str(tmp_path / "own.db"))
    place = tmp_path / "run9" / "1700"
    shutil.copytree(committed, place)
    run("register", place)
    return place


def test_delete_and_restore(run: Run, catalog: Path, entry: Callable[[str], Entry]) -> None:
    one, two = entry("run7@1000").id, entry("run7@2000").id
    assert run("delete", "run7@1000").stdout.startswith(
        "run7@1000: deleted; can be restored until 20"
    )
    assert entry(one).state == "deleted"
    assert "it is deleted" in run("delete", "run7@1000", code=6).stderr
    found = object_of(run("delete", "run7@2000", "--grace", "48h", "--json").stdout)
    assert [list(d) for d in found["deleted"]] == [["id", "name", "purge_after"]]
    assert run("restore", "run7@1000", "-q").stdout == f"{one}\n"
    assert object_of(run("restore", two[:10], "--json").stdout) == {
        "restored": [{"id": two, "name": "run7@2000"}]
    }
    assert entry("run7@1000").state == "committed"
    assert "cannot be restored" in run("restore", "run7@1000", code=6).stderr
    assert "--grace" in run("delete", "run7@1000", "--grace", "soon", code=2).stderr


def test_all_are_deleted_or_none(run: Run, catalog: Path, entry: Callable[[str], Entry]) -> None:
    run("tag", "run7@2000", "paper")
    assert "tag paper" in run("delete", "run7@1000", "run7@2000", code=6).stderr
    assert entry("run7@1000").state == "committed"
    assert run("delete", "run7@1000", "run7@3000", "run7@3000", "-q").stdout.count("\n") == 2


def test_a_policy_is_shown_and_then_applied(
    run: Run, catalog: Path, policy: Path, entry: Callable[[str], Entry]
) -> None:
    run("alias", "set", "best", "run7@1000")
    two = entry("run7@2000").id
    result = run("retain", "--policy", policy)
    lines = result.stdout.splitlines()
    assert lines[0] == "keep 3 checkpoints, 96 B"
    assert lines[1].split() == ["name", "id", "size", "age", "because"]
    assert {line.split()[0]: line.split("d  ")[-1] for line in lines[2:5]} == {
        "run7@1000": "alias best",
        "run7@3000": "last of its run",
        f"{LONG_RUN}@4000": "last of its run",
    }
    assert lines[6] == "delete 1 checkpoint, 32 B"
    assert lines[8].startswith(f"run7@2000  {two}  32 B")
    assert lines[-1] == "nothing was deleted; --apply does it"
    assert result.stderr == "note: the rule keeps nothing: best of its run by min nonsense\n"
    assert entry("run7@2000").state == "committed"
    assert run("retain", "-p", policy, "-q").stdout == f"{two}\n"
    assert (
        run("retain", "-p", policy, "--apply").stdout.splitlines()[-1]
        == "deleted 1 checkpoint, 32 B"
    )
    assert entry(two).state == "deleted"
    again = run("retain", "-p", policy, "--apply").stdout.splitlines()
    assert again[-3:] == [
        "",
        "not covered by the policy: 1 checkpoint",
        "       1  already deleted",
    ]


def test_a_plan_as_json(run: Run, catalog: Path, policy: Path) -> None:
    found = object_of(run("retain", "-p", policy, "--json").stdout)
    assert list(found) == [
        "plan", "applied", "delete", "keep", "thin", "runs", "untouched", "idle", "bytes_deleted", "bytes_dropped",
        "bytes_kept", "grace_seconds",
    ]  # fmt: skip
    assert found["applied"] is False
    assert [list(d) for d in found["delete"]] == [ROW, ROW]
    assert list(found["keep"][0]) == [*ROW, "reasons"]
    assert (found["bytes_deleted"], found["bytes_kept"], found["grace_seconds"]) == (64, 64, 172800)
    applied = object_of(run("retain", "-p", policy, "--json", "--apply").stdout)
    assert applied == found | {"applied": True}


def test_a_policy_that_cannot_be_read(run: Run, catalog: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("version: 1\nkeep: {}\n")
    assert run("retain", "-p", tmp_path / "bad.yaml", code=2).stdout == ""
    assert run("retain", "-p", tmp_path / "none.yaml", code=3).stdout == ""
    assert "--policy" in run("retain", code=2).stderr


@pytest.mark.parametrize(
    ("answer", "state"), [("y\n", "deleted"), ("n\n", "committed"), ("\n", "committed")]
)
def test_at_a_terminal_one_is_asked(
    terminal: Terminal,
    catalog: Path,
    policy: Path,
    entry: Callable[[str], Entry],
    answer: str,
    state: str,
) -> None:
    id_ = entry("run7@2000").id
    text = terminal(["retain", "-p", policy, "--apply"], answer=answer)
    assert text.index("delete 2 checkpoints, 64 B\n") < text.index(
        "delete 2 checkpoints, 64 B? [y/N]: "
    )
    assert entry(id_).state == state
    assert ("nothing was done" in text) is (state == "committed")
    assert max(len(line) for line in text.splitlines() if "warning:" not in line) <= 80


def test_at_a_terminal_with_yes_nobody_is_asked(
    terminal: Terminal, catalog: Path, policy: Path, entry: Callable[[str], Entry]
) -> None:
    id_ = entry("run7@2000").id
    assert "[y/N]" not in terminal(["retain", "-p", policy, "--apply", "-y"])
    assert entry(id_).state == "deleted"


def test_storage_is_freed_when_the_grace_is_over(
    run: Run, stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("delete", "run9@1700", "--grace", "2d")
    id_ = object_of(run("show", stored, "--json").stdout)["id"]
    result = run("gc", "--apply")
    lines = result.stdout.splitlines()
    assert lines[0] == "remove 0 checkpoints, 0 B"
    assert lines[2].startswith("wait for 1 checkpoint, ")
    assert "can be restored; until 20" in lines[4]
    assert stored.exists()
    run("restore", id_)
    run("delete", id_, "--grace", "0s")
    assert run("gc").stdout.splitlines()[-1] == "nothing was removed; --apply does it"
    assert run("gc", "-q").stdout == f"{id_}\n"
    assert stored.exists()
    found = object_of(run("gc", "--json", "--apply").stdout)
    assert list(found) == [
        "plan", "applied", "purge", "resumed", "leftovers", "waiting", "thin", "thinned", "purged", "failures", "bytes",
    ]  # fmt: skip
    assert found["purged"] == [id_]
    assert list(found["purge"][0]) == ROW
    assert not stored.exists()
    assert run("gc").stdout == "remove 0 checkpoints, 0 B\n"
    assert "  state     purged" in run("show", id_).stdout.splitlines()


def test_a_removal_that_fails_is_told(
    run: Run, stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: Any) -> None:
        raise UcformatError("the storage is away")

    run("delete", "run9@1700", "--grace", "0s")
    monkeypatch.setattr(LocalStore, "delete", away)
    result = run("gc", "--apply", code=1)
    assert "the storage is away" in result.stdout.splitlines()[-1]
    assert result.stderr.startswith("error: 1 removal failed\n")


def test_what_was_removed_by_hand_is_told_with_the_command_that_forgets_it(
    run: Run, stored: Path
) -> None:
    run("delete", "run9@1700", "--grace", "0s")
    shutil.rmtree(stored.parent)
    result = run("gc", "--apply", code=1)
    assert f"ucp reindex {stored.parent} --forget" in result.stdout
    run("reindex", stored.parent, "--forget")
    assert "failed" not in run("gc", "--apply").stdout


def test_a_policy_tells_which_of_those_it_keeps_a_program_has_removed(
    run: Run, stored: Path
) -> None:
    policy = stored.parent.parent / "policy.yaml"
    policy.write_text("version: 1\nkeep: {last: 1}\nscope: \"run = 'others'\"\n")
    for step in ("1", "2"):
        run("convert", stored, stored.parent / "others" / step, "--run", "others")
    assert "no longer exist" not in run("retain", "-p", policy).stderr
    kept = object_of(run("retain", "-p", policy, "--json").stdout)["keep"]
    (place,) = object_of(run("show", kept[0]["id"], "--json").stdout)["catalog"]["urls"]
    shutil.rmtree(place)
    told = run("retain", "-p", policy).stderr
    assert "of those to keep, 1 checkpoint no longer exists in storage" in told
    assert f"; ucp reindex {stored.parent / 'others'} --forget, and plan again" in told
    run("reindex", stored.parent / "others", "--forget")
    after = run("retain", "-p", policy)
    assert "keep 1 checkpoint" in after.stdout
    assert "no longer exist" not in after.stderr


def test_many_folders_that_are_gone_are_one_warning(run: Run, stored: Path) -> None:
    for step in range(1701, 1706):
        run("copy", stored, stored.parent.parent / "gone" / str(step))
        run("convert", stored, stored.parent.parent / "gone" / f"{step}-new")
    shutil.rmtree(stored.parent.parent / "gone")
    policy = stored.parent / "policy.yaml"
    policy.write_text("version: 1\nkeep: {where: \"run = 'none'\"}\n")
    told = run("retain", "-p", policy, "--apply", "--yes").stderr
    assert told.count("could not be updated") == 1
    assert "other checkpoints" in told
    assert f"ucp reindex {stored.parent.parent / 'gone'} --forget" in told


def test_interrupted_the_next_one_goes_on(
    run: Run, stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    run("delete", "run9@1700", "--grace", "0s")
    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "delete", interrupted)
        assert "again to remove the rest" in run("gc", "--apply", code=130).stderr
    assert "removal was interrupted" in run("gc").stdout
    assert object_of(run("gc", "--json").stdout)["resumed"] == run("gc", "-q").stdout.split()
    assert run("gc", "--apply").stdout.splitlines()[-1] == "removed 1 checkpoint"
    assert not stored.exists()


def test_what_a_writer_left_is_found_below_a_place(run: Run, stored: Path, tmp_path: Path) -> None:
    (stored / "manifest.json").unlink()
    found = object_of(run("gc", tmp_path / "run9", "--json", "--grace", "0s").stdout)
    assert [list(left) for left in found["leftovers"]] == [["url", "attempt", "bytes", "started"]]
    assert found["leftovers"][0]["url"] == str(stored)
    lines = run("gc", tmp_path / "run9", "--grace", "0s").stdout.splitlines()
    assert lines[0].startswith("remove 0 checkpoints and 1 leftover, ")
    assert lines[3].startswith(str(stored))
    assert run("gc", tmp_path / "run9").stdout == "remove 0 checkpoints, 0 B\n"
    run("gc", tmp_path / "run9", "--grace", "0s", "--apply")
    assert not list(stored.rglob("c/*"))
