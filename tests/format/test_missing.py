"""A file that a checkpoint speaks of and that is not there is damage, however it is noticed; never "nothing found"."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

import ucformat
from tests.fakes import ODD, FakeSource
from tests.golden.make import make_packed
from ucformat.checkpoint import Checkpoint
from ucformat.errors import IntegrityError, MissingData
from ucformat.format import universal
from ucformat.reading import execute as reading
from ucformat.storage.memory import MemoryStore

if TYPE_CHECKING:
    from ucformat.storage.base import Info, Store


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Store:
    name = f"missing-{request.node.name}"
    source = Checkpoint(FakeSource.write(MemoryStore(f"{name}-source"), ODD, objects={"a": 1}))
    ucformat.convert(source, MemoryStore(name), chunk_bytes=256)
    return MemoryStore(name)


def lose(store: Store, part: str) -> None:
    store.delete(next(i.key for i in store.list() if part in i.key))


def test_a_shard_that_reading_needs(store: Store) -> None:
    lose(store, "weight/table/c/")
    with pytest.raises(MissingData, match=r"table \(weight\): .*weight/table/c/") as caught:
        ucformat.open(store)["table"][...]
    assert caught.value.hint


def test_a_shard_that_a_large_plan_asks_the_size_of(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_CHECK_SIZES", 0)
    lose(store, "weight/table/c/")
    with pytest.raises(MissingData, match="weight/table/c/"):
        ucformat.open(store)["table"].read()


def test_a_shard_of_a_large_tensor(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(universal, "_LARGE_BYTES", 0)
    lose(store, "weight/table/c/")
    with pytest.raises(MissingData, match=r"table \(weight\): .*weight/table/c/"):
        ucformat.open(store)["table"].plan()


def test_the_objects(store: Store) -> None:
    lose(store, "objects/")
    with pytest.raises(MissingData, match=r"objects\.json"):
        ucformat.open(store).objects  # noqa: B018
    assert "objects.json" in str(ucformat.verify(store).problems)


@pytest.mark.parametrize("kept", [None, 0, 100])
def test_verify_names_a_packed_file_that_is_gone_or_cut_and_goes_on(kept: int | None) -> None:
    store = MemoryStore(f"missing-packed-{kept}")
    whole = make_packed(store)
    assert ucformat.verify(store)
    attempt = whole.manifest.attempt
    for rank in range(2):
        key = f"data/{attempt}/rank{rank}.bin"
        data = store.read(key)
        store.delete(key)
        if kept is not None:
            with store.create(key) as out:
                out.write(data[:kept])
    problems = ucformat.verify(store).problems
    assert {p.file for p in problems} == {f"data/{attempt}/rank{rank}.bin" for rank in range(2)}
    assert {(p.name, p.state) for p in problems} >= {
        ("square", "weight"),
        ("a", "weight"),
        ("dtypes.int8", "weight"),
    }


def test_damage_always_says_what_to_do() -> None:
    assert "another copy" in str(IntegrityError("x"))
    assert str(MissingData("x", hint="y")) == "x\n  hint: y"


def test_sizes_are_asked_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of large tensors before planning, and of all files of a large plan: each waits for an object store."""
    arrays = {
        (f"t{n}", "weight"): np.arange(12.0, dtype=np.float32).reshape(3, 4) for n in range(24)
    }
    ucformat.convert(
        Checkpoint(FakeSource.write(MemoryStore("at-once-source"), arrays)), MemoryStore("at-once")
    )
    asking, most = 0, 0
    lock = threading.Lock()

    class Slow(MemoryStore):
        def info(self, key: str) -> Info:
            nonlocal asking, most
            with lock:
                asking += 1
                most = max(most, asking)
            time.sleep(0.02)
            with lock:
                asking -= 1
            return super().info(key)

    ck = ucformat.open(Slow("at-once"))
    layout = ucformat.Layout({}, [{"match": "*", "place": ["replicate"]}])
    with monkeypatch.context() as patch:
        patch.setattr(universal, "_LARGE_BYTES", 0)
        ck.plan(layout, 0)
    assert most > 2
    plan = ucformat.open(Slow("at-once")).plan(layout, 0)
    most = 0
    monkeypatch.setattr(reading, "_CHECK_SIZES", 0)
    assert all(np.array_equal(a, arrays[k]) for k, a in plan.execute().items())
    assert most > 2


def test_sizes_are_asked_for_once_and_only_of_files_that_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    array = np.arange(4096.0, dtype=np.float32).reshape(64, 64)
    source = Checkpoint(FakeSource.write(MemoryStore("needed-source"), {("t", "weight"): array}))
    ucformat.convert(source, MemoryStore("needed"), chunk_bytes=1024, shard_bytes=2048)
    asked: list[str] = []

    class Counting(MemoryStore):
        def info(self, key: str) -> Info:
            asked.append(key)
            return super().info(key)

    monkeypatch.setattr(universal, "_LARGE_BYTES", 0)
    monkeypatch.setattr(reading, "_CHECK_SIZES", 0)
    monkeypatch.setattr(
        Counting, "costs", replace(MemoryStore.costs, parallel=8)
    )  # else reading asks, too
    layout = ucformat.Layout({"dp": 8}, [{"match": "*", "place": [{"shard": 0, "over": "dp"}]}])
    ck = ucformat.open(Counting("needed"))
    asked.clear()
    plan = ck.plan(layout, 3)
    assert asked == list(plan.files)
    (found,) = plan.execute().values()
    assert np.array_equal(found, array[24:32])
    assert sorted(asked[1:]) == sorted(
        [*plan.files, "manifest.json"]
    )  # whether they have changed meanwhile
