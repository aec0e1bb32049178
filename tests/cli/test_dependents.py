"""`--unprotected`, and `--ignore-dependent` wherever the refusal is met."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import ucformat
from tests.fakes import random_array
from tests.jobs.conftest import universal
from tests.packed import write_packed
from ucformat.storage.url import open_store

if TYPE_CHECKING:
    from tests.cli.conftest import Run

POLICY = '{"version": 1, "scope": "run = \\"run\\"", "keep": {"every": 1000}, "grace": "0s"}'


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A checkpoint that the catalog of the settings is going to know."""
    monkeypatch.setenv("UCP_CATALOG", str(tmp_path / "catalog.db"))
    return universal(tmp_path / "run" / "1", 1).url


@pytest.fixture
def gone(run: Run, parent: str, tmp_path: Path) -> str:
    """One that needed its files, and whose folder somebody has removed: its id."""
    found = run("register", parent, tmp_path / "v", "--virtual", "--json")
    shutil.rmtree(tmp_path / "v")
    return str(json.loads(found.stdout)["id"])


def test_where_nothing_can_be_written(run: Run, parent: str, tmp_path: Path) -> None:
    (Path(parent) / "needed-by").write_text("in the way")
    v = tmp_path / "v"
    assert "--unprotected" in run("register", parent, v, "--virtual", code=6).stderr
    run("register", parent, v, "--virtual", "--unprotected")
    assert f"its files in {parent}: there is no record that" in run("show", v).stdout
    assert json.loads(run("show", v, "--json").stdout)["unprotected"] == [parent]
    assert f"unprotected: there is no record in {parent} that" in run("verify", v).stdout
    assert json.loads(run("verify", v, "--json").stdout)["unprotected"] == [parent]


def test_what_is_protected_is_not_told(run: Run, parent: str, tmp_path: Path) -> None:
    run("register", parent, tmp_path / "v", "--virtual")
    for command in ("show", "verify"):
        assert "unprotected" not in run(command, tmp_path / "v").stdout
        assert json.loads(run(command, tmp_path / "v", "--json").stdout)["unprotected"] == []


def test_a_replacement(run: Run, parent: str, gone: str, tmp_path: Path) -> None:
    source = universal(tmp_path / "source", 2).url
    for command in ("convert", "copy"):
        assert f"needed by {gone}" in run(command, source, parent, "--overwrite", code=4).stderr
    typo = run("convert", source, parent, "--overwrite", "--ignore-dependent", "b" * 32, code=4)
    assert f"there is no record that {'b' * 32} needs these files" in typo.stderr
    run("copy", source, parent, "--overwrite", "--ignore-dependent", gone)
    assert ucformat.verify(parent)


def test_a_packed_one_in_place(run: Run, gone: str, tmp_path: Path) -> None:
    packed = write_packed(
        open_store(tmp_path / "packed"), {("w", "weight"): random_array((5, 7), "float32", 1)}
    )
    found = run("register", packed.url, tmp_path / "w", "--virtual", "--json")
    again = json.loads(found.stdout)["id"]
    assert again != gone
    assert f"needed by {again}" in run("materialize", packed.url, code=4).stderr
    run("materialize", packed.url, "--ignore-dependent", again)


def test_a_deletion(run: Run, parent: str, gone: str) -> None:
    run("register", parent)
    assert f"needed by {gone}" in run("delete", parent, code=6).stderr
    run("delete", parent, "--grace", "0s", "--ignore-dependent", gone)
    assert "ignore-dependent" in run("log", parent).stdout
    run("gc", "--apply", "--yes")
    assert not Path(parent).exists()


def test_a_policy_and_gc(run: Run, parent: str, gone: str, tmp_path: Path) -> None:
    run("register", parent)
    (tmp_path / "policy.json").write_text(POLICY)
    words = ("retain", "--policy", tmp_path / "policy.json")
    assert f"needed by {gone}" in run(*words).stdout
    for asked in ((*words, "--ignore-dependent", gone), ("gc", "--ignore-dependent", gone)):
        run(*asked, code=2)  # without --apply nothing changes
    done = run(*words, "--apply", "--yes", "--ignore-dependent", gone, "--json")
    assert len(json.loads(done.stdout)["delete"]) == 1
    again = ucformat.convert(parent, tmp_path / "w", virtual=True)
    shutil.rmtree(tmp_path / "w")
    assert f"needed by {again.id}" in run("gc").stdout
    run("gc", "--apply", "--yes", "--ignore-dependent", again.id)
    assert not Path(parent).exists()


def test_it_goes_with_virtual(run: Run, parent: str) -> None:
    for option in (("--unprotected",), ("--ignore-dependent", "x")):
        run("register", parent, *option, code=2)
