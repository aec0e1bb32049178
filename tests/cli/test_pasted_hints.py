"""What a hint says to set, pasted before the command in a shell, lets it succeed, whatever folders are called."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import ucformat
from tests.jobs.conftest import universal
from tests.patience import PATIENCE
from ucformat.settings import load_settings

if TYPE_CHECKING:
    from tests.cli.conftest import Run

ROOT = Path(ucformat.__file__).parents[1]
NAMES = ["plain", "a b", "a,b", 'it\'s "$HOME" `id` ~ \\ *', "[e]", "two\nlines, é"]


def pasted(said: str, variable: str, *command: str) -> subprocess.CompletedProcess[str]:
    """Run `ucp` after what a hint says to set."""
    found = re.search(rf"({variable}=.*?), (or )?`", said, re.DOTALL)
    assert found is not None, said
    return subprocess.run(
        ["sh", "-c", f'{found[1]} "$@"', "sh", sys.executable, "-m", "ucformat.cli", *command],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=False,
    )


@pytest.fixture(autouse=True)
def _nothing_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCP_CATALOG", "none")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


@pytest.mark.parametrize("name", NAMES)
def test_where_a_link_leads(tmp_path: Path, run: Run, name: str) -> None:
    place = tmp_path / "place"
    universal(place)
    (tmp_path / name).mkdir()
    (place / "data").rename(tmp_path / name / "moved")
    (place / "data").symlink_to(tmp_path / name / "moved")
    done = pasted(run("get", place, "w", code=6).stderr, "UCP_ROOTS", "get", str(place), "w")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_where_a_virtual_checkpoint_has_its_files(
    tmp_path: Path, run: Run, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).mkdir()
    universal(tmp_path / name / "source")
    place = str(tmp_path / "virtual")
    ucformat.convert(tmp_path / name / "source", place, virtual=True)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "stranger"))
    monkeypatch.setenv("UCP_ROOTS", "/what,/was set")
    said = run("get", place, "w", code=6).stderr
    done = pasted(said, "UCP_ROOTS", "get", place, "w")
    assert done.returncode == 0, done.stderr
    assert "/what" in said.partition("UCP_ROOTS=")[2]
    assert "/was set" in said.partition("UCP_ROOTS=")[2]


@pytest.mark.skipif(
    os.geteuid() != 0, reason="needs root, who alone gives files away: run it as root"
)
@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_a_colleague(
    tmp_path: Path, run: Run, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / name)
    place = str(universal(tmp_path / "place").url)
    Path("ucformat.toml").write_text("requests = 7")
    os.chown("ucformat.toml", 54321, 54321)
    done = pasted(run("get", place, "w", code=6).stderr, "UCP_TRUSTED", "get", place, "w")
    assert done.returncode == 0, done.stderr


def test_places_may_be_a_list_in_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCP_ROOTS", '["/a,b", "", "/c"]')
    assert load_settings().roots == ("/a,b", "/c")
