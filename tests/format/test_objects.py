"""Values of each rank, in ranges of one file."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ucformat
from tests.fakes import FakeSource
from ucformat.checkpoint import Checkpoint
from ucformat.errors import IntegrityError, MissingData
from ucformat.storage.memory import MemoryStore

RANKS = 300


class Counting(MemoryStore):
    """Counts the bytes that are read of the file with the values of ranks."""

    read_bytes = 0

    def read(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        data = super().read(key, offset, nbytes)
        self.read_bytes += len(data) * key.endswith("per_rank.bin")
        return data


def stored(values: dict[str, list[Any]]) -> Counting:
    """A checkpoint with values of each rank."""
    name = uuid4().hex
    source = Checkpoint(FakeSource.write(MemoryStore(f"{name}-from"), {("w", "weight"): np.ones(2, np.float32)}))
    source.__dict__["per_rank"] = values
    store = Counting(name)
    ucformat.convert(source, store)
    return store


def values_of(ranks: int) -> dict[str, list[Any]]:
    """Values of different sizes."""
    return {"rng": [{"$bytes": "A" * 4 * (n % 7 + 100)} for n in range(ranks)], "at": list(range(ranks))}


def test_a_rank_reads_the_index_and_its_range() -> None:
    store = stored(values_of(RANKS))
    ck = ucformat.open(store)
    store.read_bytes = 0
    assert {name: values[7] for name, values in ck.per_rank.items()} == {k: v[7] for k, v in values_of(RANKS).items()}
    assert 16 * RANKS < store.read_bytes < 16 * RANKS + 600
    assert [len(values) for values in ck.per_rank.values()] == [RANKS] * 2
    assert ck.per_rank["at"][-1] == RANKS - 1
    assert ck.per_rank["at"][2:4] == [2, 3]
    with pytest.raises(IndexError):
        ck.per_rank["at"][RANKS]
    with pytest.raises(KeyError):
        ck.per_rank["none"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(st.integers(1, 5).flatmap(lambda n: st.dictionaries(st.text(), st.lists(JSON, min_size=n, max_size=n))))
def test_values_come_back_under_their_names(values: dict[str, list[Any]]) -> None:
    store = stored(values)
    once = ucformat.open(store)
    assert {name: list(found) for name, found in once.per_rank.items()} == values
    copied = MemoryStore(uuid4().hex)
    ucformat.convert(once, copied)
    assert {name: list(found) for name, found in ucformat.open(copied).per_rank.items()} == values


@pytest.mark.parametrize("at", [0, 3, -1, -5, -30])
def test_damage_is_found(at: int) -> None:
    store = stored(values_of(3))
    (key,) = (i.key for i in store.list("objects") if i.key.endswith("per_rank.bin"))
    data = bytearray(store.read(key))
    data[at] ^= 1
    store.delete(key)
    store.put_if_absent(key, bytes(data))
    ck = ucformat.open(store)
    with pytest.raises(IntegrityError, match=r"per_rank\.bin"):
        list(ck.per_rank["at"])
    assert "per_rank.bin" in str(ucformat.verify(store).problems)
    if at in (0, 3):  # of rank 0
        assert ck.per_rank["at"][1] == 1
    with pytest.raises(IntegrityError, match="differs from its checksum"):
        ck.per_rank["at"][0]


def test_a_missing_file_is_named() -> None:
    store = stored(values_of(3))
    (key,) = (i.key for i in store.list("objects") if i.key.endswith("per_rank.bin"))
    store.delete(key)
    with pytest.raises(MissingData, match=r"per_rank\.bin"):
        ucformat.open(store).per_rank["at"][1]
    assert "per_rank.bin" in str(ucformat.verify(store).problems)
