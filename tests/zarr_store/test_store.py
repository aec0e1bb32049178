"""The Zarr store of any checkpoint: what zarr-python, dask and xarray read through it is what the checkpoint holds."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from zarr.abc.store import OffsetByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import MemoryStore as ZarrMemoryStore

import ucformat
from tests.fakes import ODD, FakeSource, random_array, same
from tests.packed import write_packed
from tests.zero_files import write_zero3
from ucformat.checkpoint import Checkpoint
from ucformat.errors import ChecksumError, Conflict, UsageError
from ucformat.format.chunking import row_block
from ucformat.storage.local import LocalStore
from ucformat.storage.memory import MemoryStore
from ucformat.storage.url import open_store
from ucformat.storage.wrappers import find_watched
from ucformat.zarr_store.store import CheckpointStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.s3 import Bucket

ROOT = Path(__file__).parents[2]
LARGE = {
    ("rows", "weight"): random_array(
        (1027, 640), "float32", 20
    ),  # three chunks, the last one partly outside
    ("column", "weight"): random_array(
        (3, 300_001), "float32", 21
    ),  # cut along its second dim, too
    ("a/b %c.é", "weight"): random_array((5, 7), "int16", 22),
    ("wide", "exp_avg"): random_array((700_000,), "float32", 23),
}
ARRAYS = ODD | LARGE


def fake(folder: Path) -> Checkpoint:
    return Checkpoint(FakeSource.write(LocalStore(folder), ARRAYS))


def zarr_form(folder: Path) -> Checkpoint:
    return ucformat.convert(
        fake(folder / "source"), folder / "zarr", chunk_bytes=1 << 17, shard_bytes=1 << 19
    )


def packed(folder: Path) -> Checkpoint:
    return write_packed(LocalStore(folder), ARRAYS, block_bytes=1 << 17)


def view(folder: Path) -> Checkpoint:
    steps = [
        {"rename": "rows", "to": "renamed"},
        {"cast": "column", "dtype": "float64"},
        {"transpose": "experts.w1"},
    ]
    return zarr_form(folder).view(steps)


def zero3(folder: Path) -> Checkpoint:
    arrays = {(n, s): random_array(a.shape, "float32", i) for n, a in (("w", LARGE["rows", "weight"]),)
              for i, s in enumerate(("master", "exp_avg", "exp_avg_sq"))}  # fmt: skip
    return ucformat.open(write_zero3(folder, arrays, 3))


KINDS = [fake, zarr_form, packed, view, zero3]


@pytest.fixture(scope="module", params=KINDS, ids=lambda f: f.__name__)
def ck(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    make: Callable[[Path], Checkpoint] = request.param
    return make(tmp_path_factory.mktemp(make.__name__))


def arrays_of(group: zarr.Group) -> dict[tuple[str, str], zarr.Array[Any]]:
    """All arrays, by the name and state in their attributes."""
    out: dict[tuple[str, str], zarr.Array[Any]] = {}
    for _, state in group.groups():
        for _, array in state.arrays():
            told: Any = array.attrs["ucformat"]
            out[told["name"], told["state"]] = array
    return out


def test_an_object_store_is_read_in_ranges(bucket: Bucket, tmp_path: Path) -> None:
    place = bucket.place()
    for folder in (zero3(tmp_path / "z").home, packed(tmp_path / "p").home):
        local, remote = open_store(folder), open_store(f"{place}/{Path(folder).name}")
        for info in local.list():
            remote.put_if_absent(info.key, local.read(info.key))
        ck = ucformat.open(remote.url)
        for key, array in arrays_of(zarr.open_group(ck.zarr_store())).items():
            assert same(np.asarray(array[...]), np.asarray(ck[key])), key
            if array.ndim and array.shape[0] > 2:
                assert same(np.asarray(array[1:-1]), np.asarray(ck[key][1:-1])), key


def test_every_array_is_the_tensor(ck: Checkpoint) -> None:
    found = arrays_of(zarr.open_group(ck.zarr_store()))
    assert found.keys() == ck.tensors.keys()
    for key, array in found.items():
        assert same(np.asarray(array[...]), np.asarray(ck[key])), key
        assert array.shards is None


@given(st.data())
def test_every_slice_is_that_of_the_tensor(ck: Checkpoint, data: st.DataObject) -> None:
    key = data.draw(st.sampled_from(sorted(k for k in ck.tensors if ck.tensors[k].shape)))
    array = arrays_of(zarr.open_group(ck.zarr_store()))[key]
    at = tuple(
        data.draw(st.slices(n).filter(lambda s: s.step is None or s.step > 0)) for n in array.shape
    )
    assert same(np.asarray(array[at]), np.asarray(ck[key])[at])


@pytest.fixture(scope="module")
def copy(ck: Checkpoint) -> ZarrMemoryStore:
    """Everything in the store, in a store of zarr-python."""
    store, out = ck.zarr_store(), ZarrMemoryStore()

    async def fill() -> None:
        async for key in store.list():
            value = await store.get(key, default_buffer_prototype())
            assert value is not None
            await out.set(key, value)

    sync(fill())
    return out


@given(st.data())
def test_it_answers_as_a_store_that_holds_the_bytes(
    ck: Checkpoint, copy: ZarrMemoryStore, data: st.DataObject
) -> None:
    store, keys = ck.zarr_store(), sorted(copy._store_dict)
    key = data.draw(st.sampled_from(keys))
    size = len(copy._store_dict[key])
    number = st.integers(0, size + 3)
    spans = st.one_of(
        st.none(),
        st.tuples(number, number).map(lambda ab: RangeByteRequest(min(ab), max(ab))),
        number.map(OffsetByteRequest),
        number.map(lambda n: SuffixByteRequest(min(n, size) or 1)),
    )
    span = data.draw(spans)
    cut = key[: data.draw(st.integers(0, len(key)))]
    odd = data.draw(
        st.sampled_from(
            [cut, key + "/0", key.replace("0", "00"), key.replace("0", "+0"), key + "9" * 5000]
        )
    )

    async def answers(asked: Any) -> Any:
        value = await asked.get(key, default_buffer_prototype(), span)
        other = await asked.get(odd, default_buffer_prototype())
        return (
            value and value.to_bytes(),
            other and other.to_bytes(),
            await asked.exists(odd),
            await asked.getsize(key),
            {k async for k in asked.list_prefix(cut)},
            {k async for k in asked.list_dir(cut)}
            if "/" not in cut or cut.endswith("/") or cut in dirs
            else None,
        )

    dirs = {k[:n] for k in keys for n in range(len(k)) if k[n] == "/"}
    assert sync(answers(store)) == sync(answers(copy))


@pytest.mark.parametrize("form", [zarr_form, packed])
def test_every_byte_is_verified(form: Callable[[Path], Checkpoint], tmp_path: Path) -> None:
    made = form(tmp_path)
    folder = tmp_path if form is packed else tmp_path / "zarr"
    files = [f for f in folder.rglob("*") if f.is_file() and f.stat().st_size > 1 << 18]
    assert files
    group = zarr.open_group(made.zarr_store())
    for key, array in arrays_of(group).items():
        assert same(np.asarray(array[...]), ARRAYS[key])
    for file in files:
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    damaged = 0
    for key, array in arrays_of(zarr.open_group(ucformat.open(made.url).zarr_store())).items():
        try:
            assert same(np.asarray(array[...]), ARRAYS[key])
        except ChecksumError:
            damaged += 1
    assert damaged


def test_a_damaged_chunk_does_not_take_the_others_with_it(tmp_path: Path) -> None:
    arrays = {("w", "weight"): random_array((2048, 1024), "float32")}
    made = ucformat.convert(
        Checkpoint(FakeSource.write(LocalStore(tmp_path / "source"), arrays)), tmp_path / "ck"
    )
    (shard,) = [f for f in (tmp_path / "ck" / "data").rglob("0") if f.is_file()]
    data = bytearray(shard.read_bytes())
    data[3] ^= 1
    shard.write_bytes(data)
    store = ucformat.open(made.url).zarr_store()
    keys = sorted(k for k in store._keys("weight/w/c"))
    assert len(keys) > 4

    async def read() -> list[Any]:
        got = (store.get(key, default_buffer_prototype()) for key in keys)
        return await asyncio.gather(*got, return_exceptions=True)

    first, *others = asyncio.run(read())
    assert isinstance(first, ChecksumError)
    array = zarr.open_array(ucformat.open(made.url).zarr_store(), path="weight/w")
    rows = array.chunks[0]
    assert [o.to_bytes() for o in others] == [
        arrays["w", "weight"][
            rows * i : rows * i + rows, array.chunks[1] * j : array.chunks[1] * (j + 1)
        ].tobytes()
        for i, j in (map(int, key.split("/")[-2:]) for key in keys[1:])
    ]


@pytest.mark.parametrize("loop", ["zarr's own", "another"])
def test_a_file_that_changes_is_a_conflict(loop: str, tmp_path: Path) -> None:
    arrays = {
        ("w", s): random_array((2048, 300), "float32") for s in ("master", "exp_avg", "exp_avg_sq")
    }
    folder = write_zero3(tmp_path, arrays, 2)
    store = ucformat.open(folder).zarr_store()
    array = zarr.open_array(store, path="exp_avg/w")
    assert same(np.asarray(array[:5]), arrays["w", "exp_avg"][:5])
    (file,) = folder.rglob("bf16_zero_pp_rank_1_*")
    data = file.read_bytes()
    file.unlink()
    file.write_bytes(data[:-1] + b"x")
    last, run = (
        f"exp_avg/w/c/{array.cdata_shape[0] - 1}/0",
        asyncio.run if loop == "another" else sync,
    )
    with pytest.raises(Conflict, match="changed since"):
        run(store.get(last, default_buffer_prototype()))
    assert same(
        np.asarray(array[:5]), arrays["w", "exp_avg"][:5]
    )  # of the other rank, whose file did not change


def test_only_the_bytes_asked_for_are_read(tmp_path: Path) -> None:
    ck = ucformat.open(write_zero3(tmp_path, {("w", s): random_array((999, 500), "float32") for s in
                                              ("master", "exp_avg", "exp_avg_sq")}, 2))  # fmt: skip
    watched, seen = find_watched(ck.store), [0]
    assert watched is not None
    store = ck.zarr_store()
    size = sync(store.getsize("master/w/c/0/0"))

    def read(span: Any) -> int:
        seen[0] = 0
        with watched.observed(lambda _key, _at, data: seen.__setitem__(0, seen[0] + data.nbytes)):
            sync(store.get("master/w/c/0/0", default_buffer_prototype(), span))
        return seen[0]

    assert read(None) == size
    assert read(RangeByteRequest(10, 21)) == 16  # whole elements
    assert read(SuffixByteRequest(4000)) == 4000
    assert read(OffsetByteRequest(size)) == 0


def test_metadata_and_listings_read_no_tensors(tmp_path: Path) -> None:
    ck = ucformat.open(write_zero3(tmp_path, {("w", s): random_array((999, 500), "float32") for s in
                                              ("master", "exp_avg", "exp_avg_sq")}, 2))  # fmt: skip
    watched = find_watched(ck.store)
    assert watched is not None

    def refuse(*_: object) -> None:
        raise AssertionError("a tensor was read")

    with watched.observed(refuse):
        group = zarr.open_group(ck.zarr_store(), mode="r")
        assert [a.shape for _, a in group["exp_avg"].arrays()] == [(999, 500)]  # type: ignore[union-attr]
        assert sync(ck.zarr_store().exists("master/w/c/0/0"))


def test_the_chunks_are_those_of_the_files(tmp_path: Path) -> None:
    made = zarr_form(tmp_path)
    docs = {(d.name, d.state): d for d in made.manifest.tensors}
    for key, array in arrays_of(zarr.open_group(made.zarr_store())).items():
        if array.nbytes > 1 << 16:
            assert array.chunks == docs[key].chunk
    for array in arrays_of(zarr.open_group(fake(tmp_path / "fake").zarr_store())).values():
        assert array.chunks == row_block(array.shape, array.dtype.itemsize)
        assert np.prod(array.chunks) * array.dtype.itemsize <= 1 << 20


def test_the_names_are_those_of_the_zarr_form(tmp_path: Path) -> None:
    made = zarr_form(tmp_path)
    assert made.zarr_url is not None
    stored = zarr.open_group(made.zarr_url, mode="r")
    mine = zarr.open_group(made.zarr_store())
    paths = sorted(path for path, _ in stored.members(max_depth=None))
    assert paths == sorted(path for path, _ in mine.members(max_depth=None))
    for path, array in stored.members(max_depth=None):
        if isinstance(array, zarr.Array):
            other = mine[path]
            assert isinstance(other, zarr.Array)
            assert (array.dtype, dict(array.attrs)) == (other.dtype, dict(other.attrs))
            assert same(np.asarray(array[...]), np.asarray(other[...]))


def test_a_group_of_any_mode_but_none_that_writes(tmp_path: Path) -> None:
    store = zarr_form(tmp_path).zarr_store()
    before = {f: f.stat().st_mtime_ns for f in tmp_path.rglob("*")}
    for mode in ("r", "r+", "a"):
        assert "weight/rows" in zarr.open_group(store, mode=mode)
    with pytest.raises(ValueError, match="does not support writing"):
        zarr.open_group(store, mode="w")
    group: Any = zarr.open_group(store)
    for write in (
        lambda: group.create_array("new", shape=(3,), dtype="int8"),
        lambda: group["weight/rows"].__setitem__(0, 1),
        lambda: group.__delitem__("weight"),
        lambda: group.attrs.__setitem__("a", 1),
        lambda: zarr.consolidate_metadata(store),
    ):
        with pytest.raises(ValueError, match="does not support writing"):
            write()
    assert {f: f.stat().st_mtime_ns for f in tmp_path.rglob("*")} == before
    reader = store.with_read_only(True)
    assert reader.read_only
    assert "weight/rows" in zarr.open_group(reader, mode="r")


def test_it_is_pickled_as_the_place_options_and_views(tmp_path: Path) -> None:
    path = zarr_form(tmp_path).url
    made = ucformat.open(path, view=[{"rename": "rows", "to": "renamed"}], roots=[tmp_path])
    store = made.zarr_store(verify="always")
    assert pickle.loads(pickle.dumps(store)) == store  # noqa: S301
    assert store != ucformat.open(path).zarr_store(verify="always")
    assert store != made.zarr_store()
    assert pickle.loads(pickle.dumps(made)).roots == (str(tmp_path),)  # noqa: S301
    (tmp_path / "store").write_bytes(pickle.dumps(store))
    script = (
        "import pickle, sys, zarr; store = pickle.load(open(sys.argv[1], 'rb'));"
        "sys.stdout.buffer.write(zarr.open_group(store)['weight/renamed'][...].tobytes())"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "store")]
    done = subprocess.run(
        command, capture_output=True, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.stdout == ARRAYS["rows", "weight"].tobytes()


def test_what_is_in_this_process_alone_is_not_pickled(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="another process"):
        pickle.dumps(fake(tmp_path).zarr_store())
    with pytest.raises(UsageError, match="another process"):
        pickle.dumps(ucformat.convert(fake(tmp_path), MemoryStore("pickled")).zarr_store())


def test_many_threads_and_loops_at_once(ck: Checkpoint) -> None:
    store = ck.zarr_store()
    found = arrays_of(zarr.open_group(store))
    keys = sorted(found)

    def read(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(10):
            key = keys[random.integers(len(keys))]
            if seed % 2:
                assert same(np.asarray(found[key][...]), np.asarray(ck[key]))
            else:
                opened = asyncio.run(
                    zarr.api.asynchronous.open_array(store=store, path=found[key].path)
                )
                assert same(np.asarray(asyncio.run(opened.getitem(...))), np.asarray(ck[key]))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(read, range(8)))


def test_dask_reads_it(ck: Checkpoint) -> None:
    array = pytest.importorskip("dask.array")
    for key, found in arrays_of(zarr.open_group(ck.zarr_store())).items():
        if found.dtype.kind in "fiu" and found.dtype.isnative:
            lazy = array.from_zarr(found)
            assert same(lazy.compute(scheduler="threads"), np.asarray(ck[key]))


@pytest.mark.parametrize("make", [zarr_form, zero3], ids=lambda f: f.__name__)
def test_xarray_reads_it(make: Callable[[Path], Checkpoint], tmp_path: Path) -> None:
    xarray = pytest.importorskip("xarray")
    ck = make(tmp_path)
    for state in {key.state for key in ck.tensors}:
        data = xarray.open_zarr(ck.zarr_store(), group=state, consolidated=False, chunks=None)
        for found in data.variables.values():
            told = found.attrs["ucformat"]
            assert same(found.values, np.asarray(ck[told["name"], told["state"]]))


def test_the_sentence_of_the_documentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = {("model.norm.weight", s): random_array((64,), "float32", i) for i, s in
              enumerate(("master", "exp_avg", "exp_avg_sq"))}  # fmt: skip
    write_zero3(tmp_path, arrays, 2, step=100)
    monkeypatch.chdir(tmp_path)
    found: Any = zarr.open_group(ucformat.open("global_step100").zarr_store())[
        "master/model.norm.weight"
    ]
    assert same(found[0:8], arrays["model.norm.weight", "master"][0:8])
    document = json.loads(sync(ucformat.open("global_step100").zarr_store()._get_bytes(
        "master/model.norm.weight/zarr.json", prototype=default_buffer_prototype())))  # fmt: skip
    assert document["codecs"] == [{"name": "bytes", "configuration": {"endian": "little"}}]
    assert document["attributes"] == {"ucformat": {"name": "model.norm.weight", "state": "master"}}


def test_the_store_is_what_the_method_returns(tmp_path: Path) -> None:
    assert isinstance(fake(tmp_path).zarr_store(), CheckpointStore)
