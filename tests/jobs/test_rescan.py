"""`register -r` opens again what may have changed, and nothing else."""

from __future__ import annotations

import os
import shutil
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.jobs.conftest import foreign, universal
from ucformat.jobs import listing
from ucformat.jobs import opening as module
from ucformat.jobs.register import register

if TYPE_CHECKING:
    from pathlib import Path

    from ucformat.catalog.catalog import Catalog


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if all files were an hour old when the test begins: their clock is finer than these tests are quick."""
    monkeypatch.setattr(listing, "_FINE", -3600.0)
    monkeypatch.setattr(listing, "_COARSE", -3600.0)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The places that were opened."""
    seen: list[str] = []
    real = module.try_open

    def noting(root: str, options: Any) -> Any:
        seen.append(root)
        return real(root, options)

    monkeypatch.setattr(module, "try_open", noting)
    return seen


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    universal(tmp_path / "t" / "run7" / "1", 1)
    universal(tmp_path / "t" / "run7" / "2", 2)
    foreign(tmp_path / "t" / "ds", 5)
    return tmp_path / "t"


def test_what_is_known_is_not_opened_again(catalog: Catalog, tree: Path, opened: list[str]) -> None:
    first = register([str(tree)], catalog, recursive=True)
    assert len(opened) == 3
    opened.clear()
    again = register([str(tree)], catalog, recursive=True)
    assert opened == []
    assert (again.entries, again.failures) == (first.entries, first.failures)
    assert register([str(tree)], catalog, recursive=True, rescan=True).entries == first.entries
    assert len(opened) == 3
    opened.clear()
    register([str(tree)], catalog, recursive=True, run="other")
    assert len(opened) == 3


def _rewrite(file: Path) -> None:
    """Other bytes of the same number, at the same inode and with the same time of modification."""
    before = file.stat()
    with file.open("r+b") as out:
        data = bytearray(out.read())
        data[len(data) // 2] ^= 1
        out.seek(0)
        out.write(data)
    while True:  # a clock that is finer than its ticks
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        if file.stat().st_ctime_ns != before.st_ctime_ns:
            return


def _grow(file: Path) -> None:
    with file.open("ab") as out:
        out.write(b"x")


def _swap(file: Path) -> None:
    """Another file of the same size and time."""
    before, copy = file.stat(), file.with_name("copy")
    shutil.copyfile(file, copy)
    os.utime(copy, ns=(before.st_atime_ns, before.st_mtime_ns))
    copy.replace(file)


@pytest.mark.parametrize("change", [_rewrite, _grow, _swap, os.remove])
@pytest.mark.parametrize("place", ["ds/global_step5", "run7/1"])
def test_any_file_that_changed_has_it_opened(
    catalog: Catalog, tree: Path, opened: list[str], change: Any, place: str
) -> None:
    register([str(tree)], catalog, recursive=True)
    files = [f for f in sorted((tree / place).rglob("*")) if f.is_file()]
    for file in (files[0], files[-1]):
        opened.clear()
        change(file)
        register([str(tree)], catalog, recursive=True)
        assert opened[:1] == [str(tree / place)]


def test_what_was_forgotten_replaced_or_joined_is_opened(
    catalog: Catalog, tree: Path, opened: list[str]
) -> None:
    register([str(tree)], catalog, recursive=True)
    catalog.forget(catalog.places(str(tree / "run7" / "1")))
    (tree / "run7" / "2" / "more").write_text("x")
    opened.clear()
    assert len(register([str(tree)], catalog, recursive=True).entries) == 3
    assert opened == [str(tree / "run7" / "1"), str(tree / "run7" / "2")]
    catalog.record(
        universal(tree / "run7" / "3", 3).manifest, str(tree / "run7" / "1")
    )  # by hand, wrongly
    opened.clear()
    register([str(tree)], catalog, recursive=True)
    assert opened == [str(tree / "run7" / "1"), str(tree / "run7" / "3")]
    assert catalog.get(str(tree / "run7" / "1")).step == 1


def test_a_file_that_changed_just_now_is_not_trusted(
    catalog: Catalog, tree: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "_FINE", 3600.0)
    for _ in range(2):
        opened.clear()
        register([str(tree)], catalog, recursive=True)
        assert len(opened) == 3
    monkeypatch.setattr("ucformat.jobs.opening.time.time", lambda: time.monotonic() + 1e10)
    register([str(tree)], catalog, recursive=True)
    opened.clear()
    register([str(tree)], catalog, recursive=True)
    assert opened == []
