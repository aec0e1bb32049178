"""The tasks in CONTRIBUTING.md, done as they are printed, in a package of their own or a copy of the repository."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

import ucformat
from tests.patience import PATIENCE
from ucformat.testing import checkpoint_of

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
PACKAGE = "Extend ucformat"
HERE = "Add it to this repository"
PLUGINS = [
    "Add a source",
    "Add an exporter",
    "Add a store",
    "Add a command",
    "Add a live engine",
]
TASKS = ["Add a catalog field"]
BUILD = "from setuptools.build_meta import build_wheel; build_wheel('site')"


def blocks(task: str) -> list[tuple[str, str]]:
    """The language and text of each block of a section; a fence within a block has a `+` before it."""
    section = TEXT.split(f"\n## {task}\n")[1].split("\n## ")[0]
    return re.findall(r"^```(\w+)\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)


def files(*tasks: str) -> Iterator[tuple[str, str]]:
    """The paths and texts of the files that sections print, or of parts of them."""
    for task in tasks:
        for language, text in blocks(task):
            if language in ("python", "toml", "markdown"):
                first, _, rest = text.partition("\n")
                yield first.strip("#<!-> "), rest


def commands(task: str) -> list[list[str]]:
    """The commands that a section prints, without the interpreter."""
    lines = "".join(text for language, text in blocks(task) if language == "console").splitlines()
    return [shlex.split(line.partition("python ")[2]) for line in lines]


def write(root: Path, *tasks: str) -> list[str]:
    """Write the files that sections print; those of Python."""
    found = []
    for name, text in files(*tasks):
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".toml" and file.exists():
            text = f"{file.read_text()}\n{text}"  # noqa: PLW2901
        file.write_text(text)
        found += [name] if file.suffix == ".py" else []
    return found


def change(root: Path, diff: str) -> None:
    """Insert the lines with `+` between the lines around them, which must be in the file once."""
    for file, lines in re.findall(r"^--- (\S+)\n(.*?)(?=^--- |\Z)", diff, re.MULTILINE | re.DOTALL):
        text = (root / file).read_text()
        old = "".join(line[1:] for line in lines.splitlines(keepends=True) if line[0] == " ")
        new = "".join(line[1:] for line in lines.splitlines(keepends=True))
        assert text.count(old) == 1, f"{file} has not just one place to change by\n{lines}"
        (root / file).write_text(text.replace(old, new))


def renumber(revision: Path, before: int) -> None:
    """Let the printed revision, the second, follow all that there are."""
    text = revision.read_text().replace('"2"', f'"{before + 1}"').replace('"1"', f'"{before}"')
    revision.unlink()
    revision.with_name(f"{before + 1:04}_python.py").write_text(text)


def run(
    words: list[str], cwd: Path, *path: Path, code: int = 0
) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder, with others ahead on its path; of tests, the first tier."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "UCP_CATALOG": "none",
        "PYTEST_ADDOPTS": "-m 'not matrix'",
    }
    done = subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def lint(names: list[str], cwd: Path) -> None:
    """Check files with the linter and the formatter, as this repository does."""
    for words in (["check"], ["format", "--check"]):
        run(["-m", "ruff", *words, "--config", str(ROOT / "pyproject.toml"), *names], cwd)


def install(root: Path) -> Path:
    """Install a package into a folder as pip does, which the environment may lack; the folder."""
    run(["-c", BUILD], root)
    (wheel,) = (root / "site").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(root / "site")
    return root / "site"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The package, its tests without their data, and the documents."""
    for folder in ("ucformat", "tests", "docs"):
        shutil.copytree(
            ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "data")
        )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


@pytest.mark.matrix
@pytest.mark.parametrize("task", TASKS)
def test_a_task_is_done_as_it_is_printed(task: str, copy: Path) -> None:
    revisions = len(list((copy / "ucformat/migrations/versions").glob("[0-9]*.py")))
    names = write(copy, task)
    renumber(copy / "ucformat/migrations/versions/0002_python.py", revisions)
    for language, text in blocks(task):
        if language == "diff":
            change(copy, text)
    lint([name for name in names if (copy / name).exists()], copy)
    assert len(commands(task)) == 2
    for words in commands(task):
        run(words, copy, copy)


@pytest.mark.front("Add a source", "Add a live engine")
@pytest.mark.parametrize("task", PLUGINS)
def test_a_package_is_extended_as_it_is_printed(task: str, tmp_path: Path) -> None:
    if task == "Add a live engine":
        pytest.importorskip("torch", reason="pip install 'ucformat[torch]'")
    lint(write(tmp_path, PACKAGE, task), tmp_path)
    site = install(tmp_path)
    (words,) = commands(task)
    run([*words, "-p", "no:cacheprovider"], tmp_path, site, ROOT)


def test_it_is_added_to_this_repository_as_it_is_printed(copy: Path, tmp_path: Path) -> None:
    names = write(copy, PACKAGE, "Add a source", "Add an exporter", "Add a command")
    room = copy / "ucformat" / "engines" / "toy"
    (copy / "ucformat_toy").rename(room)
    (room / "command.py").rename(copy / "ucformat" / "cli" / "commands" / "count.py")
    shutil.copy(ROOT / "pyproject.toml", copy)
    for name in names:
        if name.startswith("tests/"):
            (copy / name).unlink()
    for language, text in blocks(HERE):
        if language == "diff":
            change(copy, text.replace("ucformat_toy", "ucformat.engines.toy"))
    write(copy, HERE)
    for words in commands(HERE):
        run([*words, "-p", "no:cacheprovider"], copy, copy)


class TestToy:
    """The package of the source, the exporter and the command, installed and used."""

    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        write(tmp_path, PACKAGE, "Add a source", "Add an exporter", "Add a command")
        arrays = {("w", "weight"): np.arange(6, dtype="float32"), ("w", "exp_avg"): np.ones(6)}
        ucformat.convert(checkpoint_of(tmp_path / "foreign", arrays), tmp_path / "universal")
        return tmp_path

    def ucp(self, root: Path, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        return run(["-m", "ucformat", *words], root, root / "site", ROOT, code=code)

    def test_it_is_used(self, root: Path) -> None:
        install(root)
        assert "Count the tensors of a checkpoint" in self.ucp(root, "--help").stdout
        assert "toy  " in self.ucp(root, "export", "--help").stdout
        assert "exp_avg of 1 tensor" in self.ucp(root, "export", "toy", "universal", "t").stderr
        shown = self.ucp(root, "show", "t").stdout
        assert "toy" in shown
        self.ucp(root, "convert", "t", "again")
        assert self.ucp(root, "get", "again", "w").stdout == self.ucp(root, "get", "t", "w").stdout
        assert self.ucp(root, "count", "t").stdout == "1 tensor\n"
        assert self.ucp(root, "count", "universal", "-q").stdout == "2\n"
        known = self.ucp(root, "show", "pyproject.toml", code=3).stderr
        assert ", Toy" in known

    def test_one_that_cannot_be_imported_is_named_and_hides_no_other(self, root: Path) -> None:
        for module in ("source", "exporter", "command"):
            with (root / "ucformat_toy" / f"{module}.py").open("a") as file:
                file.write("\nraise RuntimeError('out of date')\n")
        install(root)
        named = "of ucformat-toy cannot be used: RuntimeError: out of date"
        shown = self.ucp(root, "show", "universal")
        assert "w" in shown.stdout
        exported = self.ucp(root, "export", "npz", "universal", "w.npz")
        assert "w.npz" in exported.stdout
        opened = self.ucp(root, "show", "w.npz", code=3).stderr
        assert (
            opened.count(f"the source 'toy' {named}") == 2
        )  # when it is looked for, and in the error
        helped = self.ucp(root, "--help")
        assert helped.stderr.count(f"the command 'count' {named}") == 1
        assert "average" in helped.stdout
        helped = self.ucp(root, "export", "--help")
        assert helped.stderr.count(f"the export to 'toy' {named}") == 1
        assert "npz" in helped.stdout
        for words, what in (
            (("count", "universal"), "command 'count'"),
            (("export", "toy", "universal", "t"), "export to 'toy'"),
        ):
            failed = self.ucp(root, *words, code=1).stderr
            assert failed.count(f"the {what} {named}") == 1
            assert "Traceback" not in failed

    def test_the_name_of_one_of_our_own_is_ours(self, root: Path) -> None:
        text = (root / "pyproject.toml").read_text()
        for ours in ('toy = "ucformat_toy.source', 'toy = "ucformat_toy.exporter'):
            text = text.replace(ours, ours.replace("toy", "safetensors", 1))
        (root / "pyproject.toml").write_text(text.replace("count =", "show =") + 'merge = "x:y"\n')
        install(root)
        done = self.ucp(root, "export", "safetensors", "universal", "st")
        assert "ucformat-toy registers 'safetensors' in ucformat.exporters" in done.stderr
        shown = self.ucp(root, "show", "st")
        assert "safetensors" in shown.stdout
        assert "ucformat-toy registers 'safetensors' in ucformat.sources" in shown.stderr
        helped = self.ucp(root, "--help")
        assert "Show the contents of a checkpoint" in helped.stdout
        assert "ucformat-toy registers the command 'show'" in helped.stderr
        assert "ucformat-toy registers 'merge' in ucformat.commands" in helped.stderr

    def test_a_source_of_another_kind_than_its_name_is_not_used(self, root: Path) -> None:
        text = (root / "pyproject.toml").read_text()
        text = text.replace('toy = "ucformat_toy.source', 'other = "ucformat_toy.source')
        (root / "pyproject.toml").write_text(text)
        install(root)
        self.ucp(root, "export", "safetensors", "universal", "st")
        told = self.ucp(root, "show", "st").stderr
        assert "the source 'other' of ucformat-toy is not used: its kind is 'toy'" in told


def test_every_command_names_what_is_there() -> None:
    for line in re.findall(r"^\$ (.*)$", TEXT, re.MULTILINE):
        if line.startswith("make "):
            assert f"\n{line.removeprefix('make ')}:" in (ROOT / "Makefile").read_text(), line
    tested = TEXT.split(f"\n## {PACKAGE}\n")[0]
    for path in re.findall(r"(?<=pytest )tests/\S+", tested):
        assert (ROOT / path).exists(), path
