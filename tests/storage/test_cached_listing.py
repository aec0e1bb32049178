"""A place that is listed once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ucformat.errors import NotFound, UnsafeError
from ucformat.storage import wrappers
from ucformat.storage.base import Costs
from ucformat.storage.local import LocalStore
from ucformat.storage.wrappers import CachedListingStore, WrappedStore
from ucformat.testing.stores import keys, put

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ucformat.storage.base import Info


class Far(WrappedStore):
    """A place where each question takes its time; they are counted."""

    asked = 0

    @property
    def costs(self) -> Costs:
        return Costs(parallel=8)

    def info(self, key: str) -> Info:
        self.asked += 1
        return super().info(key)

    def list(self, prefix: str = "") -> Iterator[Info]:
        self.asked += 1
        return super().list(prefix)


@pytest.fixture
def far(tmp_path: Path) -> Far:
    store = Far(LocalStore(tmp_path))
    for key in ("a/b", "a/c/d", "ab", "z"):
        put(store, key, key.encode())
    return store


def test_one_list_answers_all(far: Far) -> None:
    with CachedListingStore(far) as store:
        assert keys(store) == ["a/b", "a/c/d", "ab", "z"]
        assert keys(store, "a") == ["a/b", "a/c/d"]
        assert keys(store, "none") == []
        assert store.info("a/c/d").size == 5
        with pytest.raises(NotFound, match="none does not exist"):
            store.info("none")
        with pytest.raises(UnsafeError):
            store.info("../x")
        assert far.asked == 1
        assert store.read("ab") == b"ab"


def test_afterwards_nothing_is_remembered(far: Far) -> None:
    with CachedListingStore(far) as store:
        assert keys(store, "y") == []
    put(far, "y/new")
    assert keys(store, "y") == ["y/new"]
    assert store.info("y/new").size == 1


def test_a_place_of_too_many_files_is_asked_each_time(
    far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wrappers, "_MAX_FILES", 3)
    with CachedListingStore(far) as store:
        assert keys(store, "a") == ["a/b", "a/c/d"]
        assert store.info("z").size == 1
    assert far.asked == 3


def test_a_local_folder_is_asked_each_time(tmp_path: Path) -> None:
    with CachedListingStore(LocalStore(tmp_path)) as store:
        assert keys(store) == []
        put(store, "new")
        assert keys(store) == ["new"]
