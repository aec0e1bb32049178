"""Files that several processes write at once."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING

import pytest

from ucformat.errors import UcformatError, UnsafeError
from ucformat.storage.in_place import InPlaceFile, way_of
from ucformat.storage.local import LocalStore
from ucformat.storage.memory import MemoryStore

if TYPE_CHECKING:
    from pathlib import Path

SIZE = 10_000


@pytest.mark.parametrize("seed", range(5))
def test_writers_in_any_order_write_one_file(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    data = chance.randbytes(SIZE)
    cuts = sorted({0, SIZE, *(chance.randrange(SIZE) for _ in range(20))})
    parts = list(itertools.pairwise(cuts))
    chance.shuffle(parts)
    stores = [LocalStore(tmp_path / "root") for _ in range(3)]  # as of three processes
    files = [InPlaceFile(store, "data/w/f", SIZE) for store in stores]
    for number, (start, stop) in enumerate(parts):
        file = files[number % 3]
        file.write(start, data[start:stop])
    for file, store in zip(files, stores, strict=True):
        file.close()
        store.flush()
    assert (tmp_path / "root/data/w/f").read_bytes() == data
    assert [i.key for i in stores[0].list()] == ["data/w/f"]


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "f").write_bytes(b"mine")
    root = tmp_path / "root"
    (root / "data").mkdir(parents=True)
    (root / "data/f").symlink_to(elsewhere / "f")
    (root / "linked").symlink_to(elsewhere)
    store = LocalStore(root)
    with pytest.raises(UcformatError, match="data/f"):
        InPlaceFile(store, "data/f", 4)
    with pytest.raises(UnsafeError):
        InPlaceFile(store, "linked/f", 4)
    with pytest.raises(UnsafeError):
        InPlaceFile(store, "../f", 4)
    assert [f.name for f in elsewhere.iterdir()] == ["f"]
    assert (elsewhere / "f").read_bytes() == b"mine"


def test_a_file_of_another_size_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"12345")
    with pytest.raises(UcformatError, match="is not the file that was to be written"):
        InPlaceFile(LocalStore(tmp_path), "f", 4)
    assert (tmp_path / "f").read_bytes() == b"12345"


def test_what_was_read_before_is_read_anew(tmp_path: Path) -> None:
    """A store keeps a file open that it has read, which another process may since have removed."""
    store = LocalStore(tmp_path)
    store.put_if_absent("f", b"before")
    found = bytearray(6)
    store.read_into("f", 0, [memoryview(found)])
    assert found == b"before"
    (tmp_path / "f").unlink()
    with InPlaceFile(store, "f", 6) as file:
        file.write(0, b"behind")
    store.read_into("f", 0, [memoryview(found)])
    assert found == b"behind"


def test_how_files_of_a_store_are_written() -> None:
    assert way_of(LocalStore("x")) == ("in place", None)
    assert way_of(MemoryStore("in-place")) == ("whole", None)
