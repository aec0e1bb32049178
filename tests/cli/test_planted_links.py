"""Symbolic links that somebody planted where a command writes or removes: what they lead to stays as it is.

The command does without them, or fails and says which link it is (docs/security.md, rule 11a).
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from tests.fakes import random_array
from tests.links import looks
from tests.packed import write_packed
from ucformat.cli.main import ucp
from ucformat.errors import UcformatError
from ucformat.format.arrays import put_file
from ucformat.format.commit import begin
from ucformat.schema import CATALOG_DOCUMENT, MANIFEST, NEEDED_BY
from ucformat.storage.local import LocalStore

if TYPE_CHECKING:
    from pathlib import Path

FOLDERS = ("data", "objects", "assets", "attempts", NEEDED_BY)
FILES = (MANIFEST, CATALOG_DOCUMENT, ".ucf-lock")
#: What is done to a checkpoint that is there, or to a place where none is; `{other}` is another
#: checkpoint.
TO_ONE = {
    "convert": ["convert {other} {place} --overwrite"],
    "copy": ["copy {other} {place} --overwrite"],
    "materialize": ["materialize {place}"],
    "save": ["save {place} --overwrite"],
    "register": ["register {place}"],
    "register --virtual": ["register {place} {other}-virtual --virtual"],
    "reindex": ["reindex {place}"],
    "tag": ["tag {place} good"],
    "delete": ["delete {place} --grace 0s", "gc {place} --apply --yes --grace 0s"],
    "gc": ["gc {place} --apply --yes --grace 0s"],
}
TO_NONE = {
    "convert": ["convert {other} {place}"],
    "copy": ["copy {other} {place}"],
    "materialize": ["materialize {other} {place}"],
    "save": ["save {place}"],
    "gc": ["gc {place} --apply --yes --grace 0s"],
}


def plant(place: Path, name: str, outside: Path) -> None:
    """Make what has this name in a place a link to a copy of it elsewhere, or to what might have been there."""
    there, elsewhere = place / name, outside / name
    elsewhere.parent.mkdir(exist_ok=True)
    if there.is_dir():
        shutil.copytree(there, elsewhere)
        shutil.rmtree(there)
    elif there.exists():
        shutil.copy(there, elsewhere)
        there.unlink()
    elif name in FOLDERS:
        (elsewhere / "below").mkdir(parents=True)
        (elsewhere / "below" / "file.json").write_text("{}")
    there.symlink_to(elsewhere)


def run(command: str, place: Path) -> str:
    """What a command of `ucp` says of its failure, or `save` of the library; nothing where it works."""
    words = command.format(place=place, other=place.parent / "other").split()
    if words[0] == "save":
        torch = pytest.importorskip("torch", reason="pip install 'ucformat[torch]'")
        from ucformat.torch import save

        try:
            save({"model": {"w": torch.ones(2)}}, words[1], overwrite="--overwrite" in words)
        except UcformatError as error:
            return str(error)
        return ""
    done = CliRunner().invoke(ucp, words)
    return "" if done.exit_code == 0 else done.output


def check(tmp_path: Path, place: Path, name: str, commands: list[str]) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    plant(place, name, outside)
    before = looks(outside)
    for command in commands:
        said = run(command, place)
        assert looks(outside) == before
        assert not said or f"{place}/{name}" in said


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a checkpoint is to be, beside another one, which has all kinds of files."""
    monkeypatch.setenv("UCP_CATALOG", str(tmp_path / "catalog.db"))
    arrays = {(name, "weight"): random_array((5, 7), "float32", i) for i, name in enumerate("vw")}
    write_packed(LocalStore(tmp_path / "runs" / "other"), arrays)
    return tmp_path / "runs" / "1"


def begun(place: Path) -> str:
    """Leave there what somebody began, and was killed; its name."""
    store = LocalStore(place)
    attempt = begin(store, {"begun": 1}, overwrite=True)
    for kind in ("data", "objects", "assets"):
        put_file(store, f"{kind}/{attempt.id}/file", b"left")
    store.flush()
    return attempt.id


@pytest.mark.front("convert-*", "*-data", "*-attempts")
@pytest.mark.parametrize("name", [*FOLDERS, *FILES])
@pytest.mark.parametrize("command", TO_ONE)
def test_in_a_checkpoint(tmp_path: Path, place: Path, command: str, name: str) -> None:
    write_packed(LocalStore(place), {("w", "weight"): random_array((5, 7), "float32", 1)})
    begun(place)
    assert run("register {place} --metric loss=1", place) == ""
    assert (place / CATALOG_DOCUMENT).exists()
    check(tmp_path, place, name, TO_ONE[command])


@pytest.mark.front("convert-*", "gc-*", "*-data")
@pytest.mark.parametrize("name", [*FOLDERS, *FILES])
@pytest.mark.parametrize("command", TO_NONE)
def test_where_there_is_none_yet(tmp_path: Path, place: Path, command: str, name: str) -> None:
    place.mkdir()
    if command == "gc":
        begun(place)
    check(tmp_path, place, name, TO_NONE[command])


@pytest.mark.parametrize("kind", ["data", "objects", "assets"])
def test_in_the_place_of_an_attempts_own_folder(tmp_path: Path, place: Path, kind: str) -> None:
    place.mkdir()
    name = f"{kind}/{begun(place)}"
    check(tmp_path, place, name, TO_NONE["gc"])
