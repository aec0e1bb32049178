"""Paths that no file can have: an error of ours for commands and functions that take one, and no traceback."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file

import ucformat
from ucformat.cli.main import ucp
from ucformat.errors import NotFound, UcformatError
from ucformat.storage.url import open_store

if TYPE_CHECKING:
    from pathlib import Path

    from ucformat.storage.base import Store

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
def test_commands(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCP_CATALOG", str(tmp_path / "catalog.db"))
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
        ("layout", "check", "llama", "--against", path),
        ("fits", path, "--layout", "llama"),
        ("register", path),
        ("register", "-r", path),
        ("register", path, path, "--virtual"),
        ("reindex", path),
        ("gc", path),
        ("gc", path, "--apply"),
        ("retain", path),
        ("tag", path, "a"),
        ("untag", path, "a", "--reason", "b"),
        ("metric", path, "a=1"),
        ("note", path, "a"),
        ("hold", path, "a"),
        ("release", path),
        ("link", path, path),
        ("lineage", path),
        ("log", path),
        ("delete", path),
        ("restore", path),
        ("alias", "set", "a", path),
        ("convert", path, path, "--config", path),
        ("register", str(tmp_path), "--config", path),
        ("show", str(tmp_path), "--source", f"groups={path}"),
        ("show", str(tmp_path), "--source", f"layout={path}"),
        ("show", str(tmp_path), "--view", path),
    ):
        result = CliRunner().invoke(ucp, list(words))
        codes = (
            (1, 2, 3, 6) if words[0] == "gc" else (2, 3, 6)
        )  # a removal that failed is no wrong word
        assert result.exit_code in codes, (words, result.output, result.exception)
        assert result.stderr.startswith("error: ")


@pytest.mark.parametrize(
    "path", ["~nouserofthisname/x", "", "x" * 300, "/" + "x/" * 3000], ids=range(4)
)
def test_places_to_probe(path: str) -> None:
    result = CliRunner().invoke(ucp, ["doctor", path])
    assert result.exit_code in (1, 2, 3, 6)
    assert result.stderr.startswith("error: ")


@pytest.mark.parametrize(
    "url", ["file:///nonexistent-a", "file:///nonexistent-a/", "file:///nonexistent-a/b", "/none-a"]
)
def test_what_is_not_there_is_not_found(url: str) -> None:
    with pytest.raises(NotFound, match="does not exist"):
        ucformat.open(url)
    assert CliRunner().invoke(ucp, ["show", url]).exit_code == 3


@pytest.mark.parametrize("scheme", ["file://", "FILE://", "file://localhost"])
def test_a_file_directly_in_the_root_folder(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = open_store

    def in_root(place: str) -> Store:
        return real(tmp_path if place.lower().removeprefix(scheme.lower()) == "/" else place)

    for module in ("storage.url", "sources.opening"):
        monkeypatch.setattr(f"ucformat.{module}.open_store", in_root)
    save_file({"w": np.arange(3)}, tmp_path / "lone.safetensors")
    assert ucformat.open(f"{scheme}/lone.safetensors")["w"].read().tolist() == [0, 1, 2]
