"""Conversion: exact for any chunk size, resumable, one winner, nothing lost."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import ucformat
from tests.fakes import ODD, FakeSource, random_array, same
from ucformat.checkpoint import Checkpoint
from ucformat.errors import Conflict, NotACheckpoint, UnsupportedError, UsageError
from ucformat.storage.local import LocalStore
from ucformat.storage.memory import MemoryStore
from ucformat.storage.wrappers import RecordingStore

if TYPE_CHECKING:
    from pathlib import Path

GROUPS = (
    {"params": ["embed.weight"], "lr": 0.1, "betas": [0.9, 0.95]},
    {"params": ["norm.bias"], "lr": 0.2},
)


@pytest.fixture
def source(tmp_path: Path) -> Checkpoint:
    facts: dict[str, Any] = {
        "groups": GROUPS,
        "aliases": {"head.weight": "embed.weight"},
        "objects": {"scheduler": {"last": 3}, "nan": {"$float": "nan"}},
        "step": 17,
        "layout": {"zero": 3, "dp": 3},
        "engine": {"name": "fake", "version": "1"},
    }
    return Checkpoint(FakeSource.write(LocalStore(tmp_path / "src"), ODD, **facts))


@pytest.mark.parametrize("sizes", [(64, 256), (4096, 1 << 14), (None, None), (100, 101)])
def test_every_tensor_survives_bit_for_bit(
    source: Checkpoint, tmp_path: Path, sizes: tuple[Any, Any]
) -> None:
    ck = ucformat.convert(source, tmp_path / "dst", chunk_bytes=sizes[0], shard_bytes=sizes[1])
    assert ck.kind == "ucformat"
    assert {(k.name, k.state) for k in ck.tensors} == set(ODD)
    for key, a in ODD.items():
        assert same(ck[key][...], a), key
        assert same(np.asarray(ck[key]), a)
    assert ucformat.verify(tmp_path / "dst")


@pytest.mark.parametrize("sizes", [(64, 256), (4096, 1 << 14), (None, None)])
def test_zarr_python_and_tensorstore_read_everything(
    source: Checkpoint, tmp_path: Path, sizes: tuple[Any, Any]
) -> None:
    tensorstore = pytest.importorskip("tensorstore", reason="pip install 'ucformat[zarr]'")
    zarr = pytest.importorskip("zarr", reason="pip install 'ucformat[zarr]'")
    ucformat.register_zarr_dtypes()
    ck = ucformat.convert(source, tmp_path / "dst", chunk_bytes=sizes[0], shard_bytes=sizes[1])
    group = zarr.open_group(ck.zarr_url, mode="r")
    for doc in ck.manifest.tensors:
        a = ODD[doc.name, doc.state]
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{ck.url}/{doc.path}"}}
        assert same(np.asarray(tensorstore.open(spec).result().read().result()), a), doc.name
        array = group[str(doc.path).removeprefix(f"data/{ck.manifest.attempt}/")]
        assert same(np.asarray(array[...]), a), doc.name
        assert array.attrs["ucformat"] == {"name": doc.name, "state": doc.state}


def test_facts_survive(source: Checkpoint, tmp_path: Path) -> None:
    ck = ucformat.convert(source, tmp_path / "dst")
    assert ck.objects == source.objects
    assert ck.aliases == {"head.weight": "embed.weight"}
    assert same(ck["head.weight"][...], ODD["embed.weight", "weight"])
    assert ck.metadata.step == 17
    assert [dict(g) for g in ck.metadata.groups] == [dict(g) for g in GROUPS]
    assert ck.metadata.engine == {"name": "fake", "version": "1"}
    assert ck.manifest.lineage[0].kind == "convert"
    assert ck.manifest.lineage[0].url == source.url
    again = ucformat.convert(ck, tmp_path / "again", chunk_bytes=128)
    assert same(again["table"][...], ODD["table", "weight"])
    assert again.metadata.groups == ck.metadata.groups
    assert again.objects == ck.objects
    assert again.manifest.lineage[0].id == ck.manifest.id


def test_states_can_be_chosen(source: Checkpoint, tmp_path: Path) -> None:
    ck = ucformat.convert(source, tmp_path / "dst", states=["weight"])
    assert {k.state for k in ck.tensors} == {"weight"}
    assert {
        k.state for k in ucformat.convert(source, tmp_path / "one", states="weight").tensors
    } == {"weight"}
    for momentum in (["momentum"], "momentum"):
        with pytest.raises(UsageError, match="stores no tensor in state 'momentum'"):
            ucformat.convert(source, tmp_path / "other", states=momentum)
    assert not (tmp_path / "other").exists()


def test_digests_do_not_depend_on_shards(source: Checkpoint, tmp_path: Path) -> None:
    one = ucformat.convert(source, tmp_path / "one", chunk_bytes=64, shard_bytes=128)
    two = ucformat.convert(source, tmp_path / "two", chunk_bytes=64, shard_bytes=1 << 20)
    assert [t.digest for t in one.manifest.tensors] == [t.digest for t in two.manifest.tensors]
    assert len({t.digest for t in one.manifest.tensors}) == len(ODD)


def test_a_committed_place_is_refused_before_anything_is_written(
    source: Checkpoint, tmp_path: Path
) -> None:
    ucformat.convert(source, tmp_path / "dst", states=["weight"])
    before = sorted(p for p in (tmp_path / "dst").rglob("*"))
    with pytest.raises(Conflict, match="already holds the committed checkpoint") as caught:
        ucformat.convert(source, tmp_path / "dst")
    assert "overwrite" in str(caught.value)
    assert sorted(p for p in (tmp_path / "dst").rglob("*")) == before


def test_overwrite_replaces_and_drops_the_old_attempt(source: Checkpoint, tmp_path: Path) -> None:
    old = ucformat.convert(source, tmp_path / "dst")
    new = ucformat.convert(source, tmp_path / "dst", overwrite=True)
    assert old.manifest.attempt != new.manifest.attempt
    assert [p.name for p in (tmp_path / "dst" / "data").iterdir()] == [new.manifest.attempt]
    assert [p.stem for p in (tmp_path / "dst" / "attempts").glob("*.json")] == [
        new.manifest.attempt
    ]
    assert ucformat.verify(tmp_path / "dst")


class Interrupted(Exception):
    pass


def test_an_interrupted_conversion_is_not_seen_and_continues(
    source: Checkpoint, tmp_path: Path
) -> None:
    steps: list[int] = []

    def stop(done: int, total: int) -> None:
        steps.append(done)
        if done > total / 2:
            raise Interrupted

    with pytest.raises(Interrupted):
        ucformat.convert(
            source, tmp_path / "dst", chunk_bytes=64, shard_bytes=256, workers=1, progress=stop
        )
    with pytest.raises(NotACheckpoint, match="interrupted"):
        ucformat.open(tmp_path / "dst")
    recorder = RecordingStore(source.store)
    source.source.store = recorder
    ck = ucformat.convert(source, tmp_path / "dst", chunk_bytes=64, shard_bytes=256)
    total = sum(a.nbytes for a in ODD.values())
    assert recorder.nbytes < 0.6 * total  # what was whole was not read again
    for key, a in ODD.items():
        assert same(ck[key][...], a), key
    assert ucformat.verify(tmp_path / "dst")


def test_a_damaged_shard_of_an_interrupted_attempt_is_written_anew(
    source: Checkpoint, tmp_path: Path
) -> None:
    def stop(done: int, total: int) -> None:
        if done == total:
            raise Interrupted

    with pytest.raises(Interrupted):
        ucformat.convert(source, tmp_path / "dst", progress=stop)
    shards = sorted(p for p in (tmp_path / "dst" / "data").rglob("*") if p.is_file())
    data = bytearray(shards[0].read_bytes())
    data[3] ^= 1
    shards[0].write_bytes(data)
    shards[1].write_bytes(shards[1].read_bytes()[:-3])
    ucformat.convert(source, tmp_path / "dst")
    assert ucformat.verify(tmp_path / "dst")


def test_two_writers_of_different_checkpoints_one_wins_whole() -> None:
    for round_ in range(20):
        place = MemoryStore(f"race{round_}")
        values = [random_array((40, 40), "float32", k) for k in range(2)]
        sources = [
            Checkpoint(
                FakeSource.write(
                    MemoryStore(f"src{round_}_{k}"),
                    {("w", "weight"): random_array((40, 40), "float32", k)},
                )
            )
            for k in range(2)
        ]
        won: list[int] = []
        lost: list[Conflict] = []
        barrier = threading.Barrier(2)

        def work(k: int, place: MemoryStore = place, sources: list[Checkpoint] = sources) -> None:
            barrier.wait()  # noqa: B023
            try:
                ucformat.convert(sources[k], place, chunk_bytes=64, workers=1)
                won.append(k)  # noqa: B023
            except Conflict as error:
                lost.append(error)  # noqa: B023

        threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert len(won) == len(lost) == 1
        ck = ucformat.open(place)
        assert same(ck["w"][...], values[won[0]])
        assert ucformat.verify(place)
        assert {i.key.split("/")[1] for i in place.list("data")} == {ck.manifest.attempt}


def test_names_become_folders_that_do_no_harm(tmp_path: Path) -> None:
    names = [
        "../../x",
        "a",
        "a/b",
        "zarr.json",
        "c",
        "n" * 300,
        "Case",
        "case",
        "__x",
        "",
        "ü/ß",
        ".hidden",
        "a\0b",
        "~",
    ]
    arrays = {(n, "weight"): random_array((3, 3), "float32", i) for i, n in enumerate(names)}
    arrays["a", "../../state"] = random_array((2,), "float32")
    source = Checkpoint(FakeSource.write(MemoryStore("hostile"), arrays))
    ck = ucformat.convert(source, tmp_path / "deep" / "dst")
    assert [p.name for p in tmp_path.iterdir()] == ["deep"]
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["dst"]
    for key, a in arrays.items():
        assert same(ck[key][...], a), key
    folders = [str(t.path).lower() for t in ck.manifest.tensors]
    assert len(set(folders)) == len(folders)
    assert ucformat.verify(ck)


def test_progress_counts_every_byte(source: Checkpoint, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    ucformat.convert(
        source, tmp_path / "dst", progress=lambda done, total: seen.append((done, total))
    )
    total = sum(a.nbytes for a in ODD.values())
    assert seen[-1] == (total, total)
    assert [d for d, _ in seen] == sorted(d for d, _ in seen)


def test_the_number_of_files_is_bounded_by_bytes_and_arrays(tmp_path: Path) -> None:
    arrays = {
        ("w", "weight"): random_array((1000, 1000), "float32"),
        ("v", "weight"): random_array((3,), "float32"),
    }
    ck = ucformat.convert(
        Checkpoint(FakeSource.write(MemoryStore("count"), arrays)),
        tmp_path / "dst",
        shard_bytes=1 << 20,
    )
    files = [p for p in (tmp_path / "dst").rglob("*") if p.is_file()]
    assert len(files) <= 4_000_012 / (1 << 19) + 2 * len(arrays) + 5
    assert json.loads((tmp_path / "dst" / "manifest.json").read_text())["id"] == ck.manifest.id


def test_more_dims_than_an_array_may_have(tmp_path: Path) -> None:
    save_file({"w": np.zeros((1,) * 30 + (2, 2, 1), np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(
        UnsupportedError, match=r"w \(weight\) has 33 dims; an array has at most 32"
    ):
        ucformat.convert(tmp_path, tmp_path / "u")
