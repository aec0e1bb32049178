"""Foreign readers on what the encoder writes: every dtype, odd shapes, chunks from a few bytes on."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tensorstore
import zarr

import ucformat
from tests.fakes import FakeSource, random_array, same
from ucformat.checkpoint import Checkpoint
from ucformat.errors import UsageError
from ucformat.format.arrays import array_json, shard_key
from ucformat.format.chunking import Grid
from ucformat.format.shard import check_shard, write_shard
from ucformat.geometry.tensor import Key, Piece
from ucformat.reading.dtypes import dtype_name, fill_value, numpy_dtype, zarr_dtype
from ucformat.schema import ITEMSIZE, ZARR_DTYPES, ZARR_EXTENSIONS
from ucformat.storage.local import LocalStore
from ucformat.storage.memory import MemoryStore

if TYPE_CHECKING:
    from pathlib import Path

SHAPES: list[tuple[int, ...]] = [
    (),
    (0,),
    (5,),
    (3, 0, 2),
    (7, 9),
    (64, 48),
    (33, 17, 5),
    (16, 16, 16, 3),
    (1, 1),
]
SIZES: list[tuple[int | None, int | None]] = [(64, 1024), (4096, 1 << 16), (None, None), (24, 100)]


def write_array(
    store: LocalStore, name: str, a: Any, grid: Grid, codec: str | None = None
) -> list[bytes]:
    """Write an array as our writers do, and return the digests of its shards."""

    def fill(piece: Piece, raw: Any) -> None:
        box, strides = piece.box, [s * a.itemsize for s in piece.strides]
        raw[:] = 0
        np.ndarray(box.shape, a.dtype, raw, 0, strides)[...] = a[
            tuple(slice(x, y) for x, y in zip(box.start, box.stop, strict=True))
        ]

    with store.create(f"{name}/zarr.json") as out:
        out.write(array_json(Key("a", "weight"), dtype_name(a.dtype), grid, codec))
    digests = []
    for shard in grid.shards():
        key = shard_key(name, shard)
        digests.append(write_shard(store, key, grid, shard, fill, codec))
        assert check_shard(store, key, grid, shard, codec=codec) == (digests[-1], [])
    return digests


@pytest.mark.front("bool", "uint64", "bfloat16", "float4_e2m1fn", "complex32", "bits4x2")
@pytest.mark.parametrize("dtype", ITEMSIZE)
def test_foreign_readers_read_what_we_write(dtype: str, tmp_path: Path) -> None:
    ucformat.register_zarr_dtypes()
    store = LocalStore(tmp_path)
    for n, shape in enumerate(SHAPES):
        a = random_array(shape, dtype, n)
        chunk, shard = SIZES[n % len(SIZES)]
        a.reshape(-1)[: a.size // 2] = a.dtype.type(0)  # some chunks shrink, others do not
        grid = Grid.of(shape, ITEMSIZE[dtype], chunk, shard)
        digests = write_array(store, f"a{n}", a, grid)
        assert write_array(store, f"b{n}", a, grid, "blosc") == digests
        stored = a.view(numpy_dtype(zarr_dtype(dtype)))  # the dtype itself, or unsigned integers
        for path in (tmp_path / f"a{n}", tmp_path / f"b{n}"):
            spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path)}}
            assert same(np.asarray(tensorstore.open(spec).result().read().result()), stored), shape
            array = zarr.open_array(path, mode="r")
            assert same(np.asarray(array[...]), stored), shape
            if "float8" not in zarr_dtype(dtype):  # which zarrs leaves to zarr-python
                with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}):
                    opened = zarr.open_array(path, mode="r")
                    assert same(np.asarray(opened[...]), stored), shape
            more = {} if dtype in ZARR_DTYPES else {"dtype": dtype}
            assert array.attrs["ucformat"] == {"name": "a", "state": "weight"} | more


_OPENED = """
import json, sys, zarr

def opened():
    names = []
    for name in json.loads(sys.argv[2]):
        try:
            zarr.open_array(sys.argv[1] + "/" + name, mode="r")[...]
            names.append(name)
        except Exception:
            pass
    return names

before = opened()
assert "ucformat" not in sys.modules or zarr.__version__ >= "3.4"
import ucformat
ucformat.open(sys.argv[3]).zarr_store()
print(json.dumps([zarr.__version__, before, opened()]))
"""


def test_which_arrays_a_zarr_reader_opens_by_itself(tmp_path: Path) -> None:
    """All but those of extensions, which it opens when somebody has asked for a store."""
    arrays = {(dtype, "weight"): random_array((3,), dtype, 1) for dtype in ITEMSIZE}
    source = Checkpoint(FakeSource.write(MemoryStore("zarr-source"), arrays))
    ck = ucformat.convert(source, tmp_path / "ck")
    folder = f"{tmp_path}/ck/data/{ck.manifest.attempt}/weight"
    done = subprocess.run(
        [sys.executable, "-c", _OPENED, folder, json.dumps([*ITEMSIZE]), str(tmp_path / "ck")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    version, before, after = json.loads(done.stdout)
    extensions = {} if tuple(map(int, version.split(".")[:2])) >= (3, 4) else ZARR_EXTENSIONS
    assert before == [dtype for dtype in ITEMSIZE if dtype not in extensions]
    assert after == [*ITEMSIZE]


@pytest.mark.parametrize("dtype", ZARR_EXTENSIONS)
def test_tensorstore_reads_what_zarr_python_writes_with_our_types(
    dtype: str, tmp_path: Path
) -> None:
    ucformat.register_zarr_dtypes()
    a = np.arange(63).reshape(9, 7).astype(numpy_dtype(dtype))
    array = zarr.create_array(
        str(tmp_path / "z"),
        shape=a.shape,
        dtype=a.dtype,
        chunks=(4, 4),
        fill_value=numpy_dtype(dtype).type("nan"),
    )
    array[...] = a
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(tmp_path / "z")}}
    assert same(np.asarray(tensorstore.open(spec).result().read().result()), a)
    assert np.isnan(float(zarr.open_array(tmp_path / "z", mode="r").fill_value))


@pytest.mark.parametrize("dtype", [d for d in ZARR_DTYPES if "float" in d])
def test_a_missing_shard_never_reads_as_zeros(dtype: str, tmp_path: Path) -> None:
    assert fill_value(dtype) == "NaN"
    ucformat.register_zarr_dtypes()
    a = np.zeros((40, 40), numpy_dtype(dtype))
    write_array(LocalStore(tmp_path), "a", a, Grid.of(a.shape, a.itemsize, 256, 1024))
    next(p for p in (tmp_path / "a" / "c").rglob("*") if p.is_file()).unlink()
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(tmp_path / "a")}}
    assert np.isnan(np.asarray(tensorstore.open(spec).result().read().result()).astype("f8")).any()
    assert np.isnan(np.asarray(zarr.open_array(tmp_path / "a", mode="r")[...]).astype("f8")).any()


def test_unknown_dtypes_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match="cannot store the dtype 'datetime64"):
        dtype_name(np.dtype("M8[s]"))
    with pytest.raises(UsageError, match="unknown dtype 'float7'"):
        numpy_dtype("float7")
