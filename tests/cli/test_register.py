"""`ucp register`, `ucp reindex`: the catalog learns what lies in storage."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.cli.conftest import object_of
from ucformat.checkpoint import open_checkpoint
from ucformat.errors import UcformatError
from ucformat.jobs import listing
from ucformat.storage.local import LocalStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.cli.conftest import Run
    from ucformat.catalog.entries import Entry


@pytest.fixture
def tree(committed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a checkpoint of run9, and a catalog that knows nothing."""
    monkeypatch.setenv("UCP_CATALOG", str(tmp_path / "catalog.db"))
    shutil.copytree(committed, tmp_path / "tree" / "run9" / "1700")
    return tmp_path / "tree"


def _damage(tree: Path) -> None:
    (tree / "run9" / "x").mkdir()
    (tree / "run9" / "x" / "manifest.json").write_text("no")


def test_one_checkpoint(run: Run, tree: Path) -> None:
    place = tree / "run9" / "1700"
    lines = run("register", place).stdout.splitlines()
    assert lines[0].split() == ["name", "id", "kind", "size", "url"]
    assert lines[1].startswith("run9@1700  ")
    assert lines[1].endswith(f"  {place}")
    found = object_of(run("register", place, "--run", "other", "--json").stdout)
    assert list(found) == ["checkpoints", "failures", "unread"]
    assert found["checkpoints"][0]["name"] == "other@1700"
    assert run("register", place, "-q").stdout == f"{found['checkpoints'][0]['id']}\n"
    assert run("register", tree, code=3).stdout == ""


def test_files_that_are_not_read_are_named(run: Run, tree: Path) -> None:
    place = tree.parent / "model"
    place.mkdir()
    save_file({"w": np.ones(3, "float32")}, place / "model.safetensors")
    (place / "loader.bin").write_bytes(b"x")
    result = run("register", place)
    assert f"  not read  loader.bin of {place}" in result.stdout.splitlines()
    found = object_of(run("register", "-r", place, "--rescan", "--json").stdout)
    assert found["unread"] == {str(place): ["loader.bin"]}


def test_fingerprints_of_a_foreign_one(run: Run, tree: Path) -> None:
    place = tree / "model.safetensors"
    save_file({"w": np.ones(3, "float32")}, place)
    assert (
        "estimates no --fingerprint"
        in run("register", tree, "-r", "--dry-run", "--fingerprint", code=2).stderr
    )
    found = object_of(run("register", tree, "-r", "--fingerprint", "--json").stdout)
    assert (len(found["checkpoints"]), found["failures"]) == (2, [])
    universal = tree / "u"
    run("convert", place, universal)
    place.write_bytes(b"")  # neither is read
    for file in universal.rglob("data/**/c/*"):
        file.unlink()
    (ours,) = [c["id"] for c in found["checkpoints"] if c["kind"] == "safetensors"]
    pair = ("diff", ours, universal)
    assert run(*pair, "--what", "tensors", "--exit-code").stdout.endswith("are equal in tensors\n")


def test_a_tree_with_one_that_cannot_be_read(run: Run, tree: Path) -> None:
    _damage(tree)
    result = run("register", "-r", tree, "--json", code=1)
    found = object_of(result.stdout)
    assert [c["name"] for c in found["checkpoints"]] == ["run9@1700"]
    assert [list(f) for f in found["failures"]] == [["url", "message"]]
    assert found["failures"][0]["url"] == f"{tree}/run9/x"
    result = run("register", "-r", tree, code=1)
    assert f"  failed    {tree}/run9/x: " in result.stdout
    assert "error: 1 place could not be read, and 1 could" in result.stderr


def test_a_tree_again_opens_nothing_and_rescan_everything(
    run: Run, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "_FINE", -3600.0)  # as if no file had been changed just now
    monkeypatch.setattr(listing, "_COARSE", -3600.0)
    opened: list[str] = []

    def noting(root: str, *rest: Any, **more: Any) -> Any:
        opened.append(root)
        return open_checkpoint(root, *rest, **more)

    monkeypatch.setattr("ucformat.jobs.opening.open_checkpoint", noting)
    place = str(tree / "run9" / "1700")
    for words, expected in (
        ((), [place]),
        ((), []),
        (("--rescan",), [place]),
        (("--run", "other"), [place]),
    ):
        opened.clear()
        found = object_of(run("register", "-r", tree, *words, "--json").stdout)["checkpoints"]
        assert [c["step"] for c in found] == [1700]
        assert opened == expected, words


def test_a_lost_catalog_comes_back(run: Run, tree: Path, tmp_path: Path) -> None:
    run("register", "-r", tree)
    run("tag", "run9@1700", "good")
    run("alias", "set", "best", "run9@1700")
    (tmp_path / "catalog.db").unlink()
    found = object_of(run("reindex", tree, "--json").stdout)
    assert list(found) == ["checkpoints", "failures", "unread", "missing", "forgotten"]
    assert found["checkpoints"][0]["tags"] == ["good"]
    assert found["checkpoints"][0]["aliases"] == ["best"]
    assert run("reindex", tree).stdout.splitlines()[0].startswith("1 checkpoint, ")
    shutil.rmtree(tree / "run9" / "1700")
    assert (
        "is empty, and the catalog knows 1 checkpoint there" in run("reindex", tree, code=3).stderr
    )
    (tree / "README").write_text("no checkpoint")
    for _ in range(2):
        result = run("reindex", tree, code=1)
        assert result.stdout == f"0 checkpoints, 0 B\n  missing   {tree}/run9/1700\n"
        assert (
            "has checkpoints in 1 place where there are none: nothing was forgotten"
            in result.stderr
        )
        assert f"ucp reindex {tree} --forget" in result.stderr
    assert (
        run("reindex", tree, "--forget").stdout
        == f"0 checkpoints, 0 B\n  forgotten {tree}/run9/1700\n"
    )
    assert run("reindex", tree, "-q").stdout == ""
    _damage(tree)
    assert "  failed    " in run("reindex", tree, code=1).stdout


def test_interrupted_what_is_recorded_stays(
    run: Run, tree: Path, entry: Callable[[str], Entry], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ucformat.jobs.register.write_documents", interrupted)
    for command in ("register", "reindex"):
        assert "is kept" in run(command, tree / "run9" / "1700", code=130).stderr


def test_what_goes_wrong_beside_it_is_a_warning(
    run: Run, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise UcformatError("the disk is full")

    run("register", "-r", tree)
    monkeypatch.setattr(LocalStore, "put_if_absent", full)
    monkeypatch.setattr(LocalStore, "replace", full)
    result = run("tag", "run9@1700", "good")
    assert result.stdout == "run9@1700: good\n"
    assert result.stderr.startswith("warning: ")
    result = run("tag", "run9@1700", "better", "--json")
    assert "the disk is full" in object_of(result.stderr)["warning"]["message"]


def test_what_it_would_cost(run: Run, tree: Path, tmp_path: Path) -> None:
    _damage(tree)
    found = object_of(run("register", "-r", tree, "--dry-run", "--json").stdout)
    assert (found["tasks"], found["sampled"], found["bytes_written"]) == (2, 2, 0)
    lines = run("register", "-r", tree, "--dry-run").stdout.splitlines()
    assert lines[0] == "2 tasks; nothing was done"
    assert lines[1].split(None, 1) == ["estimate", "from a sample: 2 of the 2 tasks"]
    assert not (tmp_path / "catalog.db").exists()
    run("register", "-r", tree, code=1)
    assert (
        object_of(run("register", "-r", tree, "--dry-run", "--run", "other", "--json").stdout)[
            "tasks"
        ]
        == 2
    )
    for words in (("--part", "0/2"), ("--on", "dask://127.0.0.1:1")):
        assert (
            "--dry-run goes with -r"
            in run("register", "-r", tree, "--dry-run", *words, code=2).stderr
        )
    assert (
        "--dry-run goes with -r"
        in run("register", tree / "run9" / "1700", "--dry-run", code=2).stderr
    )
