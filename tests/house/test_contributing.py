"""The tasks in CONTRIBUTING.md, done as they are printed in a copy of the repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
TASKS = ["Add a source", "Add a store", "Add a command", "Add a catalog field"]


def blocks(task: str) -> list[tuple[str, str]]:
    """The language and text of each block of a section; a fence within a block has a `+` before it."""
    section = TEXT.split(f"\n## {task}\n")[1].split("\n## ")[0]
    return re.findall(r"^```(\w+)\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)


def change(root: Path, diff: str) -> None:
    """Insert the lines with `+` between the lines around them, which must be in the file once."""
    for file, lines in re.findall(r"^--- (\S+)\n(.*?)(?=^--- |\Z)", diff, re.MULTILINE | re.DOTALL):
        text = (root / file).read_text()
        old = "".join(line[1:] for line in lines.splitlines(keepends=True) if line[0] == " ")
        new = "".join(line[1:] for line in lines.splitlines(keepends=True))
        assert text.count(old) == 1, f"{file} has not just one place to change by\n{lines}"
        (root / file).write_text(text.replace(old, new))


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The package, its tests without their data, and the documents."""
    for folder in ("ucformat", "tests", "docs"):
        shutil.copytree(
            ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "data")
        )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


@pytest.mark.parametrize("task", TASKS)
def test_a_task_is_done_as_it_is_printed(task: str, copy: Path) -> None:
    commands, files = [], []
    for language, text in blocks(task):
        if language == "python":
            file = copy / text.splitlines()[0].removeprefix("# ")
            file.parent.mkdir(exist_ok=True)
            file.write_text(text.partition("\n")[2])
            files.append(str(file))
        elif language == "diff":
            change(copy, text)
        else:
            assert language == "console"
            commands += [
                line.removeprefix("$ .venv/bin/python ").split() for line in text.splitlines()
            ]
    assert len(commands) == 2
    lint = [["-m", "ruff", *words, *files] for words in (["check"], ["format", "--check"])]
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    for words in [*lint, *commands]:
        done = subprocess.run(
            [sys.executable, *words],
            cwd=copy,
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_command_names_what_is_there() -> None:
    for line in re.findall(r"^\$ (.*)$", TEXT, re.MULTILINE):
        if line.startswith("make "):
            assert f"\n{line.removeprefix('make ')}:" in (ROOT / "Makefile").read_text(), line
    tested = TEXT.split("\n## Add a source\n")[0]
    for path in re.findall(r"(?<=pytest )tests/\S+", tested):
        assert (ROOT / path).exists(), path
