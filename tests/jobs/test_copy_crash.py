"""Copies that are killed at random instants, on disk and in an object store, and how much memory one takes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import ucformat
from tests.fakes import FakeSource, random_array, same
from tests.jobs.forks import Forks
from tests.packed import write_packed
from ucformat.checkpoint import Checkpoint
from ucformat.errors import NotFound
from ucformat.storage.local import LocalStore
from ucformat.storage.memory import MemoryStore
from ucformat.storage.url import open_store

if TYPE_CHECKING:
    from tests.s3 import Bucket
    from ucformat.storage.base import Store

WORK = """
import resource, ucformat
ucformat.copy
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
def work(src, dst, overwrite="False", workers="0"):
    if workers != "0":
        ucformat.copy(src, dst + "-first", workers=1)  # what is imported and connected stays
    before = peak()
    ucformat.copy(src.replace("small", "large"), dst, overwrite == "True", int(workers) or None)
    return f"done {peak() - before}"
"""


def contents(store: Store) -> dict[str, bytes]:
    return {i.key: store.read(i.key) for i in store.list() if not i.key.startswith("attempts/")}


def arrays(seed: int, scale: int) -> dict[tuple[str, str], Any]:
    shapes = {"a": (100 * scale, 401), "b": (64, 64), "c": (7,), "d": (32 * scale, 257)}
    return {
        (n, s): random_array(shape, "float32", seed + 10 * i + j)
        for i, (n, shape) in enumerate(shapes.items())
        for j, s in enumerate(("weight", "exp_avg"))
    }


@pytest.fixture(params=["arrays", "packed"])
def src(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    truth = arrays(0, 8)
    if request.param == "packed":
        write_packed(LocalStore(tmp_path / "src"), truth, ranks=5, block_bytes=1 << 14)
    else:
        source = Checkpoint(FakeSource.write(MemoryStore(tmp_path.name), truth))
        ucformat.convert(source, tmp_path / "src", chunk_bytes=4096, shard_bytes=1 << 17)
    return tmp_path / "src"


def kill_at_random(
    src: Path, places: list[str], seed: int, *, overwrite: bool = False
) -> dict[str, int]:
    """Copy to each place, are killed, look, and copy again; how often there was what."""
    truth, chance = contents(LocalStore(src)), random.Random(seed)
    identity = ucformat.open(src).id
    seen = {"nothing": 0, "old": 0, "copy": 0}
    with Forks(WORK) as forks:
        assert forks.run(src, f"{places[0]}-measured")[1][0] == "done"
        whole = forks.seconds
        for place in places:
            forks.run(
                src,
                place,
                overwrite,
                kill_after=chance.uniform(0, whole) if place != places[0] else 0,
            )
            try:
                ck = ucformat.open(place)
            except NotFound:
                seen["nothing"] += 1
            else:
                seen["copy" if ck.id == identity else "old"] += 1
                ucformat.verify(ck).raise_if_damaged()
            ucformat.copy(src, place, overwrite)
            store = open_store(place)
            found = contents(store)
            assert {key: found.pop(key) for key in truth} == truth
            attempts = {
                i.key.removeprefix("attempts/").removesuffix(".json")
                for i in store.list("attempts")
            }
            assert ucformat.open(place).manifest.attempt in attempts
            assert overwrite or found == {}
            assert all(
                key.split("/")[1] in attempts for key in found
            )  # of the replaced one, for `ucp gc`
            if not place.startswith("s3://"):
                assert list(Path(place).rglob(".ucf-*.tmp")) == []
    return seen


@pytest.mark.front("arrays")
def test_kill_9_at_any_instant(src: Path, tmp_path: Path) -> None:
    seen = kill_at_random(src, [str(tmp_path / f"dst{k}") for k in range(8)], 1)
    assert seen["nothing"] > 0
    assert seen["old"] == 0


@pytest.mark.matrix
def test_kill_9_while_another_is_replaced(src: Path, tmp_path: Path) -> None:
    places = [str(tmp_path / f"dst{k}") for k in range(6)]
    for place in places:
        ucformat.convert(Checkpoint(FakeSource.write(MemoryStore("old"), arrays(5, 1))), place)
    seen = kill_at_random(src, places, 2, overwrite=True)
    assert seen["nothing"] == 0
    assert seen["old"] > 0


@pytest.mark.matrix
def test_kill_9_on_the_way_to_an_object_store(src: Path, bucket: Bucket) -> None:
    seen = kill_at_random(src, [bucket.place() for _ in range(4)], 3)
    assert seen["old"] == 0


@pytest.mark.front("disk")
@pytest.mark.parametrize("where", ["disk", "object store"])
def test_memory_does_not_grow_with_the_files(where: str, tmp_path: Path, bucket: Bucket) -> None:
    """A packed file, which no checksum cuts in pieces that were small enough to hold."""
    for name, nbytes in (("small", 1 << 20), ("large", 192 << 20)):
        write_packed(
            LocalStore(tmp_path / name),
            {("w", "weight"): random_array((nbytes // 4,), "float32")},
            1,
            1 << 30,
        )
    dst = str(tmp_path / "dst") if where == "disk" else bucket.place()
    with Forks(WORK) as forks:
        said = forks.run(tmp_path / "small", dst, False, 2)[1]
    assert said[0] == "done"
    assert int(said[1]) < 100 << 20
    key = ("w", "weight")
    assert same(ucformat.open(dst)[key][:1000], ucformat.open(tmp_path / "large")[key][:1000])
