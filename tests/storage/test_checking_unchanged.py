"""Over a network, files that a load does not read are checked while it runs, and those that it reads afterwards."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from ucformat.errors import Conflict
from ucformat.storage.memory import MemoryStore
from ucformat.storage.wrappers import WatchedStore, checking_unchanged

if TYPE_CHECKING:
    from collections.abc import Callable

    from ucformat.storage.base import Info


class Remote(MemoryStore):
    """A store over a network, which says when it is asked for a version."""

    costs = replace(MemoryStore.costs, parallel=4)

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.asked: list[str] = []
        self.early = threading.Event()

    def info(self, key: str) -> Info:
        self.asked.append(key)
        self.early.set()
        return super().info(key)


def put(store: MemoryStore, key: str, data: bytes) -> None:
    with store.create(key) as file:
        file.write(data)


@pytest.fixture
def remote() -> Remote:
    """A store of a manifest and a file with data."""
    store = Remote("mem")
    put(store, "manifest", b"one")
    put(store, "data", b"1234")
    return store


def opened(remote: Remote) -> WatchedStore:
    """As after opening: all is listed, and the manifest has been read."""
    watched = WatchedStore(remote)
    list(watched.list())
    watched.read("manifest")
    return watched


def load(remote: Remote, during: Callable[[WatchedStore], object]) -> list[str]:
    """The files whose versions were asked for."""
    watched = opened(remote)
    remote.asked.clear()
    remote.early.clear()
    with checking_unchanged(watched, "invalid"):
        assert remote.early.wait(10)  # the block is still running
        during(watched)
    return remote.asked


def test_each_file_is_asked_for_once(remote: Remote) -> None:
    assert load(remote, lambda watched: watched.read("data")) == ["manifest", "data"]


def test_a_file_read_again_is_asked_for_again(remote: Remote) -> None:
    asked = load(remote, lambda watched: watched.read("manifest"))
    assert asked == ["manifest", "manifest"]


def test_a_file_that_changes_before_the_load_is_named(remote: Remote) -> None:
    watched = opened(remote)
    put(remote, "manifest", b"other")
    with (
        pytest.raises(Conflict, match=r"manifest changed since .*; invalid"),
        checking_unchanged(watched, "invalid"),
    ):
        watched.read("data")


@pytest.mark.parametrize("file", ["data", "manifest"])
def test_a_file_that_changes_while_it_is_read_is_named(remote: Remote, file: str) -> None:
    def read_and_change(watched: WatchedStore) -> None:
        watched.read(file)
        put(remote, file, b"other")

    with pytest.raises(Conflict, match=f"{file} changed since"):
        load(remote, read_and_change)
