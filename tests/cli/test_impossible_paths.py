"""Paths that no file can have: an error of ours for commands and functions that take one, and no traceback."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

import ucformat
from ucformat.cli.main import ucp
from ucformat.errors import NotFound, UcformatError

if TYPE_CHECKING:
    from pathlib import Path

NEVER = ["~nouserofthisname/x", "a\0b", "/a\0b", "\ud800", ""]
PATHS = [*NEVER, "x" * 300, "/" + "x/" * 3000, "a\nb", "file:///nonexistent-a"]
SHELL = [p for p in PATHS if "\0" not in p and "\ud800" not in p]  # no shell can give the others


@pytest.mark.parametrize("path", PATHS, ids=range(len(PATHS)))
def test_functions(path: str, tmp_path: Path) -> None:
    for act in (
        lambda: ucformat.open(path),
        lambda: ucformat.verify(path),
        lambda: ucformat.convert(path, tmp_path / "x"),
        lambda: ucformat.copy(path, tmp_path / "x"),
        lambda: ucformat.fits(path, "llama"),
    ):
        with pytest.raises(UcformatError):
            act()


@pytest.mark.parametrize("path", NEVER, ids=range(len(NEVER)))
def test_destinations_and_catalogs(path: str, committed: Path) -> None:
    for act in (lambda: ucformat.convert(committed, path), lambda: ucformat.copy(committed, path)):
        with pytest.raises(UcformatError):
            act()
    if path:
        with pytest.raises(UcformatError):
            ucformat.Catalog(path)


@pytest.mark.parametrize("path", SHELL, ids=range(len(SHELL)))
def test_commands(path: str, tmp_path: Path) -> None:
    for words in (
        ("show", path),
        ("verify", path),
        ("get", path, "w"),
        ("plan", path, "--layout", path),
        ("convert", path, str(tmp_path / "x")),
        ("copy", path, str(tmp_path / "x")),
        ("materialize", path),
        ("diff", path, path),
        ("layout", "check", path),
    ):
        result = CliRunner().invoke(ucp, list(words))
        assert result.exit_code in (2, 3, 6), (words, result.output)
        assert result.stderr.startswith("error: ")


@pytest.mark.parametrize(
    "url", ["file:///nonexistent-a", "file:///nonexistent-a/", "file:///nonexistent-a/b", "/none-a"]
)
def test_what_is_not_there_is_not_found(url: str) -> None:
    with pytest.raises(NotFound, match="does not exist"):
        ucformat.open(url)
    assert CliRunner().invoke(ucp, ["show", url]).exit_code == 3
