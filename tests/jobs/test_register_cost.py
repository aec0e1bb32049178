"""What registering is said to cost, from a sample, is what it then does; and it changes nothing."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.jobs.conftest import foreign, universal
from tests.zero_files import FLAT, write_zero3
from ucformat.checkpoint import open_checkpoint
from ucformat.jobs import listing
from ucformat.jobs.cost import _KINDS, _OPENED, estimate_register
from ucformat.jobs.register import register
from ucformat.storage.local import LocalStore
from ucformat.storage.profiles import Profile, keep_profile

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ucformat.catalog.catalog import Catalog

STEPS = 5 * _OPENED


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if all files were an hour old when the test begins."""
    monkeypatch.setattr(listing, "_FINE", -3600.0)
    monkeypatch.setattr(listing, "_COARSE", -3600.0)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The places that were opened."""
    seen: list[str] = []

    def noting(root: str, **more: Any) -> Any:
        seen.append(str(root))
        return open_checkpoint(root, **more)

    monkeypatch.setattr("ucformat.jobs.opening.open_checkpoint", noting)
    return seen


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The files that were read, and the bytes of each read."""
    seen: list[tuple[str, int]] = []
    real = LocalStore.read

    def noting(store: LocalStore, key: str, *where: Any) -> bytes:
        data = real(store, key, *where)
        seen.append((f"{store.url}/{key}", len(data)))
        return data

    monkeypatch.setattr(LocalStore, "read", noting)
    return seen


def steps(folder: Path, count: int, names: str = "ab", first: int = 100) -> None:
    """Steps of DeepSpeed's that differ in nothing that has a size."""
    for step in range(first, first + count):
        arrays = {(n, s): np.full((2, 3), step, np.float32) for n in names for s in FLAT}
        write_zero3(folder, arrays, 2, step)


def files_of(folder: Path) -> Iterator[tuple[str, int, int]]:
    for path in sorted(folder.rglob("*")):
        found = path.stat()
        yield str(path), found.st_mtime_ns, found.st_size


def test_a_sample_tells_what_is_read(
    tmp_path: Path, catalog: Catalog, opened: list[str], read: list[tuple[str, int]]
) -> None:
    tree = tmp_path / "tree"
    steps(tree / "a", STEPS)
    steps(tree / "b", 2, "abcdefgh")
    for step in range(3):
        universal(tree / "c" / str(step), step)
    before = list(files_of(tree))
    cost = estimate_register(tree, catalog)
    assert list(files_of(tree)) == before
    assert cost.sampled is not None
    assert (
        len(set(opened)) <= cost.sampled + 3 < STEPS
    )  # and one of each kind, to import what it needs
    opened.clear()
    read.clear()
    found = register([tree], catalog, recursive=True)
    assert cost.tasks == len(opened) == len(found.ids) == STEPS + 5
    assert not found.failures
    nbytes = sum(n for _, n in read)
    assert abs(cost.bytes_read - nbytes) <= 0.05 * nbytes
    assert (
        len({path for path, _ in read}) * 0.95
        <= cost.files
        <= len({path for path, _ in read}) * 1.3
    )
    assert cost.bytes_written == 0
    assert cost.requests >= len(read) * 0.95


def test_what_the_catalog_knows_is_left_out(
    tmp_path: Path, catalog: Catalog, opened: list[str]
) -> None:
    steps(tmp_path / "tree" / "a", 6)
    register([tmp_path / "tree"], catalog, recursive=True)
    opened.clear()
    cost = estimate_register(tmp_path / "tree", catalog)
    assert (cost.tasks, cost.sampled, opened) == (0, 0, [])
    assert estimate_register(tmp_path / "tree", catalog, rescan=True).tasks == 6
    assert estimate_register(tmp_path / "tree", None).tasks == 6
    steps(tmp_path / "tree" / "a", 3, first=200)
    assert estimate_register(tmp_path / "tree", catalog).tasks == 3


@pytest.mark.parametrize("names", ["ab", "abcdefghijklmnopqrstuvwxyz"])
def test_what_is_inside_of_something_else_counts_too(
    tmp_path: Path, catalog: Catalog, names: str
) -> None:
    """A run into which any program has put a manifest.json; and a checkpoint with another one inside."""
    tree = tmp_path / "tree"
    steps(tree / "a", STEPS, names)
    (tree / "a" / "manifest.json").write_text("{}")
    foreign(tree / "b", 1)
    shutil.copytree(tree / "b" / "global_step1", tree / "b" / "global_step1" / "old" / "kept")
    universal(tree / "c", 1)
    cost = estimate_register(tree, catalog)
    found = register([tree], catalog, recursive=True)
    assert cost.tasks == len(found.ids) + len(found.failures)
    assert [failure.url for failure in found.failures] == [str(tree / "a")]


def test_many_kinds_open_few(tmp_path: Path, catalog: Catalog, opened: list[str]) -> None:
    tree = tmp_path / "tree"
    for kind in range(3 * _KINDS):
        steps(tree / f"run{kind}", 3)
        for place in (tree / f"run{kind}").glob("global_step*"):
            (place / ("x" * kind)).mkdir(exist_ok=True)
            (place / f"note{'x' * kind}.txt").write_text("a name of its own")
    cost = estimate_register(tree, catalog)
    assert cost.tasks == 9 * _KINDS
    assert cost.sampled is not None
    assert cost.sampled <= _KINDS * _OPENED
    assert len(opened) == cost.sampled + _KINDS


def test_time_is_that_of_the_processor_and_of_requests(
    tmp_path: Path, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    tree = tmp_path / "tree"
    steps(tree, STEPS)
    cost = estimate_register(tree, catalog)
    assert (cost.seconds, cost.unmeasured) == (None, (str(tree),))
    keep_profile(str(tree), Profile(1000.0, 1000.0))
    cost = estimate_register(tree, catalog)
    assert cost.unmeasured == ()
    assert cost.seconds is not None
    assert cost.seconds > cost.requests  # a second for each, one after the other, and the processor
