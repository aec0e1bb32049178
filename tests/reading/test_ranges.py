"""Reads from stores that lend what they read: the same as any other, and nothing is kept."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

import ucformat
from tests.fakes import FakeSource, random_array, same
from ucformat.checkpoint import Checkpoint
from ucformat.errors import ChecksumError
from ucformat.reading import execute
from ucformat.storage.base import Costs, read_ranges
from ucformat.storage.memory import MemoryStore
from ucformat.storage.wrappers import CachedListingStore, PrefixStore, WrappedStore

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ucformat.storage.base import Store

A = random_array((60, 50), "float32", 1)
B = random_array((8, 16, 16), "float32", 2)


class Lender(WrappedStore):
    """Counts what is lent, at once and in all; a plan for it makes many ranges and joins few."""

    costs = Costs(gap=0, short=0, request=400, join=100, parallel=4, together=10, in_flight=1000)
    lent = ranges = several = 0

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.asked: list[Sequence[tuple[int, int]]] = []

    @contextmanager
    def read_ranges(
        self, key: str, ranges: Sequence[tuple[int, int]]
    ) -> Iterator[Sequence[memoryview]]:
        self.lent += 1
        self.ranges += len(ranges)
        self.several += len(ranges) > 1
        self.asked.append(ranges)
        yield [memoryview(self.inner.read(key, begin, nbytes)) for begin, nbytes in ranges]
        self.lent -= 1


@pytest.fixture(scope="module")
def place() -> MemoryStore:
    store = MemoryStore("lending")
    source = Checkpoint(
        FakeSource.write(MemoryStore("lending-source"), {("w", "weight"): A, ("b", "weight"): B})
    )
    ucformat.convert(source, store, chunk_bytes=600, overwrite=True)
    return store


@pytest.mark.parametrize(("seconds", "joined"), [(0, False), (0.05, True)])
def test_threads_join_a_read_that_lasts(
    place: MemoryStore, monkeypatch: pytest.MonkeyPatch, seconds: float, *, joined: bool
) -> None:
    monkeypatch.setattr(execute, "_JOINS", 0.05 if joined else 60)

    class Waiting(Lender):
        costs = replace(Lender.costs, together=1, first=1)
        threads: set[int]

        @contextmanager
        def read_ranges(
            self, key: str, ranges: Sequence[tuple[int, int]]
        ) -> Iterator[Sequence[memoryview]]:
            self.threads.add(threading.get_ident())
            time.sleep(seconds)
            with super().read_ranges(key, ranges) as views:
                yield views

    store = Waiting(place)
    tensor = ucformat.open(store)["w"]
    store.threads = set()
    assert same(tensor[:, :], A)
    assert (len(store.threads) > 1) == joined


@pytest.mark.parametrize("verify", ["whole", "always", "never"])
def test_slices_are_the_same(place: MemoryStore, verify: object) -> None:
    store = Lender(place)
    tensor = ucformat.open(store)["w"]
    for box in (np.s_[:, :], np.s_[:, 3:9], np.s_[7:41, 20:21], np.s_[::3, 1:], np.s_[5:6, :]):
        out = np.zeros(A[box].shape, A.dtype)
        assert same(tensor[box], np.ascontiguousarray(A[box]))
        if box == np.s_[:, :]:
            tensor.read(out=out, verify=verify)  # type: ignore[arg-type]
            assert same(out, A)
    for solid in (np.s_[:, 3:6, :], np.s_[1:, 2:5, 4:9], np.s_[:, 1:2, ::2]):
        assert same(ucformat.open(store)["b"][solid], np.ascontiguousarray(B[solid]))
    assert store.ranges > store.several > 0
    assert store.lent == 0


def test_requests_of_one_file_are_made_together(place: MemoryStore) -> None:
    """As far as one may have their bytes, and ten ranges at most."""
    store = Lender(place)
    store.costs = replace(store.costs, request=1000)
    columns = ucformat.Layout({"tp": 5}, [{"match": "*", "place": [{"shard": 1, "over": "tp"}]}])
    plan = ucformat.open(store).plan(columns, 3)
    store.asked.clear()
    found = plan.execute(threads=1)
    assert same(found["w", "weight"], np.ascontiguousarray(A[:, 30:40]))
    assert [len(ranges) for ranges in store.asked] == [3, 3, 2, *[10] * 6]
    assert {ranges[0][1] for ranges in store.asked} == {272, 40}  # chunks of `b`, rows of `w`
    asked = [r for ranges in store.asked for r in ranges]
    assert asked == [
        (r.offset + k * r.step, r.nbytes) for r in plan.plan.requests for k in range(r.count)
    ]


def test_a_damaged_chunk_is_found_in_what_is_lent(place: MemoryStore) -> None:
    class Damaging(Lender):
        @contextmanager
        def read_ranges(
            self, key: str, ranges: Sequence[tuple[int, int]]
        ) -> Iterator[Sequence[memoryview]]:
            with super().read_ranges(key, ranges) as found:
                copies = [bytearray(f) for f in found]
                copies[0][7] ^= 1
                yield [memoryview(c) for c in copies]

    with pytest.raises(ChecksumError, match=r"w \(weight\): the chunk at bytes 0:"):
        ucformat.open(Damaging(place))["w"].read()


def test_neighbouring_chunks_are_verified_where_they_belong(
    place: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although several copies describe where that is; each of them is verified."""

    class Damaging(Lender):
        costs = replace(Lender.costs, request=1 << 20, join=1 << 20)
        at: int | None = None

        @contextmanager
        def read_ranges(
            self, key: str, ranges: Sequence[tuple[int, int]]
        ) -> Iterator[Sequence[memoryview]]:
            with super().read_ranges(key, ranges) as views:
                copies = [bytearray(view) for view in views]
                if self.at is not None and key == request.file:
                    copies[0][self.at] ^= 1
                yield [memoryview(c) for c in copies]

    def copied(*_: object) -> None:
        raise AssertionError("a request was copied")

    monkeypatch.setattr(execute, "_copy_out", copied)
    rows = ucformat.Layout({"tp": 1}, [{"match": "*", "place": ["replicate"]}])
    store = Damaging(place)
    plan = ucformat.open(store).plan(rows, 0)
    _, request = plan.plan.requests
    out = plan.execute(threads=1)
    assert same(out["w", "weight"], A)
    assert same(out["b", "weight"], B)
    assert len(request.copies) > 1
    for copy in request.copies:
        store.at = copy.src + copy.count * copy.src_step // 2
        with pytest.raises(ChecksumError, match="w weight: the chunk"):
            plan.execute(threads=1)


def test_stores_around_it_lend_too_and_others_do_not(place: MemoryStore) -> None:
    manifest = place.read("manifest.json")
    for store in (CachedListingStore(Lender(place)), PrefixStore(Lender(MemoryStore("x")), "y")):
        place_of = "manifest.json"
        if isinstance(store, PrefixStore):
            with store.create(place_of) as out:
                out.write(manifest)
        found = read_ranges(store, place_of, [(0, 5), (3, 4)])
        assert found is not None
        with found as views:
            assert [bytes(v) for v in views] == [manifest[:5], manifest[3:7]]
    assert read_ranges(CachedListingStore(place), "manifest.json", [(0, 5)]) is None
    assert read_ranges(WrappedStore(Lender(place)), "manifest.json", [(0, 5)]) is None
