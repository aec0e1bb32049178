from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.storage.faulty import FaultyStore
from ucformat.errors import UcformatError
from ucformat.storage.memory import MemoryStore
from ucformat.testing.stores import keys, put

if TYPE_CHECKING:
    from ucformat.storage.base import Store


def _put_and_flush(store: Store) -> None:
    put(store, "f")
    store.flush()


def test_fails_each_write_in_turn() -> None:
    for n in range(1, 5):
        inner = MemoryStore(f"test_faulty/{n}")
        store = FaultyStore(inner, fail_write=n)
        with pytest.raises(UcformatError, match="No space left"):
            _put_and_flush(store)
        assert keys(inner) == (["f"] if n == 4 else [])
        put(store, "f")  # works again
        inner.delete("f")


def test_the_dead_stay_dead() -> None:
    store = FaultyStore(
        MemoryStore("test_faulty"), fail_write=2, dead=True, error=KeyboardInterrupt()
    )
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            put(store, "f")
    with pytest.raises(KeyboardInterrupt):
        store.read("f")


def test_fails_one_read() -> None:
    store = FaultyStore(MemoryStore("test_faulty"), fail_read=2)
    put(store, "f", b"abc")
    assert store.read("f") == b"abc"
    with pytest.raises(UcformatError):
        store.read_versioned("f")
    store.read_into("f", 0, [memoryview(bytearray(3))])
    assert (store.reads, store.writes) == (3, 3)
    store.delete("f")
