"""Two exports to one place at once: one of them is there as a whole, and the other one says that it is not."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import ucformat
from tests.exporters.sources import opened
from tests.exporters.test_export import tensors_of
from ucformat.errors import UcformatError, UnsupportedError
from ucformat.exporters.base import Target, TargetFile
from ucformat.storage.url import open_store

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ucformat.storage.base import Store

NAMES = ("a", "b", "c")
SHARDS = {"max_shard_bytes": 100}  # one file for each tensor


def source(value: int, names: tuple[str, ...] = NAMES) -> Any:
    """A model whose elements are all equal."""
    return opened({(name, "weight"): np.full((7, 3), value, np.float32) for name in names})


def models_in(folder: Path) -> set[float]:
    """The values of all tensors that a loader finds there."""
    try:
        tensors = tensors_of(folder)
    except (
        FileNotFoundError
    ):  # the loader fails, too: a shard has been removed, and the index not yet
        return set()
    return {float(v) for array in tensors.values() for v in np.unique(array.view(np.float32))}


class Interrupted(BaseException):
    """The process has ended."""


#: No store has conditional deletions and renames: what follows a look at the claim at once is one
#: step with it.
STEPS = ("read_versioned", "put_if_absent", "replace", "list", "info", "create", "flush")


class Watched:
    """A store that calls a function before one of its operations."""

    def __init__(self, store: Store, at: int, then: Callable[[], None]) -> None:
        self.store, self.at, self.then, self.count = store, at, then, 0

    def step(self) -> None:
        self.count += 1
        if self.count == self.at + 1:
            self.then()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.store, name)
        if name not in STEPS:
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            self.step()
            return found(*args, **kwargs)

        return call


def export(what: Any, where: Any, **options: Any) -> bool:
    """Whether an export succeeds."""
    try:
        ucformat.export(what, where, "safetensors", workers=1, **options)
    except UcformatError:
        return False
    return True


@pytest.mark.parametrize("one_file", [False, True], ids=["folder", "file"])
@pytest.mark.parametrize(
    ("overwrite", "first"),
    [(False, False), (True, False), (True, True)],
    ids=["into an empty place", "both overwrite", "both replace another"],
)
def test_an_export_meanwhile(
    tmp_path: Path, *, overwrite: bool, one_file: bool, first: bool
) -> None:
    """The other one runs as a whole between any two operations of an export."""
    options: dict[str, Any] = {"name": "model.safetensors"} if one_file else dict(SHARDS)
    steps, number = None, 0
    while steps is None or number <= steps:
        folder = tmp_path / f"{number}"
        if first:
            assert export(source(3, ("a", "b", "c", "d")), folder, **options)
        done: dict[int, bool] = {}

        def meanwhile(folder: Path = folder, done: dict[int, bool] = done) -> None:
            done[2] = export(source(2, NAMES[:2]), folder, overwrite=overwrite, **options)

        store = Watched(open_store(folder), number, meanwhile)
        done[1] = export(source(1), store, overwrite=overwrite, **options)
        assert any(done.values()), number
        if steps is None:
            steps = store.count
        found = models_in(folder)
        assert len(found) == 1, number  # never a mixture
        (value,) = found
        assert done.get(int(value)), number  # what is there is what an export has said is there
        assert len(tensors_of(folder)) == (3 if value == 1 else 2)
        if not overwrite:
            assert sum(done.values()) == 1, number
        assert {p.suffix for p in folder.rglob("*") if p.is_file()} <= {".safetensors", ".json"}
        assert not (folder / "ucformat-export").exists(), number
        names = {p.name for p in folder.iterdir()}
        assert len(names) == (1 if one_file else 4 if value == 1 else 3), (number, names)
        number += 1


@pytest.mark.parametrize("one_file", [False, True], ids=["folder", "file"])
def test_exports_that_are_killed(tmp_path: Path, *, one_file: bool) -> None:
    """One is killed while another one is: there is no mixture, and the same continues, or a third one replaces them."""
    options: dict[str, Any] = {"name": "model.safetensors"} if one_file else dict(SHARDS)
    chance = random.Random(one_file)

    def killed(value: int, folder: Path, other: int | None = None) -> None:
        def end() -> None:
            if other is not None:
                killed(other, folder)
            raise Interrupted

        with suppress(Interrupted):
            store = Watched(open_store(folder), chance.randrange(60), end)
            export(source(value, NAMES[:value]), store, overwrite=chance.random() < 0.5, **options)

    ended = []
    for number in range(60):
        folder = tmp_path / f"{number}"
        first, second, last = (chance.randrange(1, 4) for _ in range(3))
        killed(first, folder, second)
        assert models_in(folder) <= {first} or models_in(folder) <= {second}
        ended.append(bool(models_in(folder)))
        export(source(first, NAMES[:first]), folder, **options)
        assert models_in(folder) <= {first} or models_in(folder) <= {second}
        assert export(source(last, NAMES[:last]), folder, overwrite=True, **options)
        assert models_in(folder) == {last}
        assert len(list(folder.iterdir())) == (1 if one_file or last == 1 else last + 1)
    assert set(ended) == {True, False}


def test_two_files_of_one_path() -> None:
    with pytest.raises(UnsupportedError, match=r"the path a\.bin"):
        Target((TargetFile.of("a.bin", b"1"), TargetFile.of("a.bin", b"2")))
