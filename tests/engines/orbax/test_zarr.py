from __future__ import annotations

import json
import pickle
import re
import shutil
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numcodecs  # type: ignore[import-untyped]
import numpy as np
import pytest
import tensorstore as ts
import zarr
import zarr.codecs as codecs
from hypothesis import given, settings
from hypothesis import strategies as st

import ucformat
from tests.sources.suite import SourceSuite
from ucformat.checkpoint import Checkpoint, open_checkpoint
from ucformat.engines.orbax import zarr_chunks as chunks_module
from ucformat.engines.orbax.source import Zarr
from ucformat.engines.orbax.zarr_array import parse_v3
from ucformat.engines.orbax.zarr_chunks import Chunks
from ucformat.errors import (
    IntegrityError,
    MissingData,
    NotACheckpoint,
    UcformatError,
    UnsupportedError,
)
from ucformat.format.zarr_types import register_zarr_dtypes
from ucformat.geometry.box import Box
from ucformat.reading.dtypes import dtype_name
from ucformat.storage.concurrency import Cache
from ucformat.storage.decoded import DECODED
from ucformat.storage.local import LocalStore
from ucformat.storage.memory import MemoryStore
from ucformat.storage.url import open_store
from ucformat.testing.sources import Sample, read_whole

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

RNG = np.random.default_rng(3)
MATRIX = RNG.standard_normal((13, 9)).astype(np.float32)
CUBE = RNG.integers(-9, 9, (5, 6, 7))
WRITE = {"write_empty_chunks": True}


class Group:
    """A group that is written, and what must be read of it."""

    def __init__(self, folder: Path, version: int) -> None:
        register_zarr_dtypes()
        self.folder, self.truth = folder, dict[tuple[str, str], Any]()
        self.group = zarr.open_group(
            folder,
            mode="w",
            zarr_format=version,  # type: ignore[arg-type]
            attributes={"note": "x", "nan": 1.5},
        )

    def put(self, path: str, value: NDArray[Any], **how: Any) -> None:
        array = self.group.create_array(
            path,
            shape=value.shape,
            dtype=value.dtype,
            config=WRITE,  # type: ignore[arg-type]
            **how,
        )
        array[...] = value
        self.expect(path.replace("/", "."), value)

    def expect(self, name: str, value: NDArray[Any]) -> None:
        little = value.astype(value.dtype.newbyteorder("<"))
        self.truth["weight", name] = dtype_name(value.dtype), value.shape, little.tobytes()

    def close(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # that the v3 specification has no consolidated metadata
            zarr.consolidate_metadata(self.folder)


def v2_raw(folder: Path) -> Group:
    g = Group(folder, 2)
    g.put("edge", MATRIX, chunks=(5, 4), compressors=None)
    g.put("inner/fortran", MATRIX, chunks=(5, 4), compressors=None, order="F")
    g.put("inner/cube", CUBE, chunks=(2, 6, 3), compressors=None, order="F")
    g.put(
        "slashes",
        CUBE,
        chunks=(2, 3, 4),
        compressors=None,
        chunk_key_encoding={"name": "v2", "separator": "/"},
    )
    g.put("scalar", np.array(2.5), compressors=None)
    g.put("empty", np.zeros((0, 3), np.float16), chunks=(1, 3), compressors=None)
    g.put("flags", MATRIX > 0, chunks=(13, 9), compressors=None)
    g.put("complex", (MATRIX + 1j).astype(np.complex64), chunks=(20, 20), compressors=None)
    return g


def v2_encoded(folder: Path) -> Group:
    g = Group(folder, 2)
    for name, codec in {
        "zstd": numcodecs.Zstd(),
        "gzip": numcodecs.GZip(),
        "zlib": numcodecs.Zlib(),
        "bz2": numcodecs.BZ2(),
        "blosc": numcodecs.Blosc(cname="zstd", shuffle=2),
    }.items():
        g.put(f"{name}", MATRIX, chunks=(5, 4), compressors=codec)
        g.put(f"{name}_fortran", CUBE, chunks=(5, 4, 3), compressors=codec, order="F")
        g.put(f"{name}_scalar", np.array(7), compressors=codec)
        g.put(f"{name}_big", MATRIX.astype(">f4"), chunks=(5, 9), compressors=codec)
    g.put("big", CUBE.astype(">i2"), chunks=(5, 4, 3), compressors=None)
    g.put("big_complex", (MATRIX + 1j).astype(">c8"), chunks=(5, 4), compressors=None)
    return g


def v3_raw(folder: Path) -> Group:
    g = Group(folder, 3)
    crc = codecs.Crc32cCodec()
    turn = codecs.TransposeCodec(order=(2, 0, 1))
    for name, packed in {"plain": None, "checked": crc}.items():
        g.put(name, MATRIX, chunks=(5, 4), compressors=packed)
        g.put(f"{name}_turned", CUBE, chunks=(2, 3, 4), compressors=packed, filters=[turn])
        g.put(
            f"{name}_turned_twice", CUBE, chunks=(2, 3, 4), compressors=packed, filters=[turn, turn]
        )
        g.put(f"{name}_shards", MATRIX, chunks=(3, 4), shards=(6, 8), compressors=packed)
        g.put(f"{name}_scalar", np.array(2.5), compressors=packed)
    g.put(
        "deep/er/shards", CUBE, chunks=(1, 2, 7), shards=(4, 6, 7), compressors=crc, filters=[turn]
    )
    g.put("bfloat16", MATRIX.astype(ml_dtypes.bfloat16), chunks=(4, 9), compressors=None)
    g.put("float8", MATRIX.astype(ml_dtypes.float8_e4m3fn), chunks=(4, 9), compressors=None)
    g.put(
        "dotted",
        MATRIX,
        chunks=(5, 4),
        compressors=None,
        chunk_key_encoding={"name": "v2", "separator": "."},
    )
    g.put("empty", np.zeros((4, 0), np.uint8), chunks=(4, 1), compressors=None)
    return g


def v3_encoded(folder: Path) -> Group:
    g = Group(folder, 3)
    for name, packed in {
        "zstd": codecs.ZstdCodec(),
        "gzip": codecs.GzipCodec(),
        "blosc": codecs.BloscCodec(),
        "both": [codecs.ZstdCodec(), codecs.Crc32cCodec()],
    }.items():
        g.put(name, MATRIX, chunks=(5, 4), compressors=packed)
        g.put(f"{name}_shards", MATRIX, chunks=(3, 4), shards=(6, 8), compressors=packed)
        g.put(
            f"{name}_turned",
            CUBE,
            chunks=(2, 3, 4),
            compressors=packed,
            filters=[codecs.TransposeCodec(order=(2, 0, 1))],
        )
    g.put(
        "big", MATRIX, chunks=(5, 4), compressors=None, serializer=codecs.BytesCodec(endian="big")
    )
    inner = codecs.ShardingCodec(
        chunk_shape=(2, 2), codecs=[codecs.BytesCodec(), codecs.ZstdCodec()]
    )
    outer = codecs.ShardingCodec(
        chunk_shape=(4, 4), codecs=[inner], index_location=codecs.ShardingCodecIndexLocation.start
    )
    g.put("nested", MATRIX, chunks=(8, 8), serializer=outer, compressors=None)
    g.put("bfloat16", MATRIX.astype(ml_dtypes.bfloat16), chunks=(4, 9))
    return g


def tensorstore(folder: Path) -> Group:
    """Arrays as TensorStore writes them, in a group."""
    g = Group(folder, 2)
    for dtype in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float32"):
        for packed in (
            None,
            {"id": "zstd", "level": 1},
            {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1},
        ):
            name = f"{dtype}_{packed['id'] if packed else 'raw'}"
            value = MATRIX.astype(getattr(ml_dtypes, dtype, dtype))
            metadata = {"compressor": packed, "chunks": [5, 4]}
            spec: dict[str, Any] = {
                "driver": "zarr",
                "kvstore": f"file://{folder}/{name}/",
                "metadata": metadata,
            }
            spec["store_data_equal_to_fill_value"] = True
            ts.open(spec, create=True, dtype=dtype, shape=value.shape).result()[...] = value
            g.expect(name, value)
    return g


def alone(folder: Path) -> Group:
    """A folder that is an array."""
    g = Group(folder, 3)
    shutil.rmtree(folder)
    array = zarr.create_array(
        folder / "w.zarr", shape=MATRIX.shape, dtype="f4", chunks=(4, 4), compressors=None
    )
    array[...] = MATRIX
    g.expect("w", MATRIX)
    return g


GROUPS: dict[str, Callable[[Path], Group]] = {
    f.__name__: f for f in (v2_raw, v2_encoded, v3_raw, v3_encoded, tensorstore, alone)
}


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Sample]:
    made = {}
    for name, make in GROUPS.items():
        folder = tmp_path_factory.mktemp(name)
        group = make(folder / "group")
        if name not in (
            "alone",
            "tensorstore",
        ):  # zarr-python does not know the latter's data types in v2
            group.close()
        place = "group/w.zarr" if name == "alone" else "group"
        made[name] = Sample(
            folder, place, "zarr", group.truth, encoded=not name.endswith(("raw", "alone"))
        )
    return made


class TestZarr(SourceSuite):
    more_read = 1024  # gaps between the parts of chunks, which are read over

    @pytest.fixture(params=list(GROUPS))
    def sample(self, request: pytest.FixtureRequest, samples: dict[str, Sample]) -> Sample:
        return samples[request.param]

    def damageable(self, copy: Sample) -> list[Path]:
        """The metadata, and of some arrays a file of each kind."""
        first: dict[tuple[str, str], Path] = {}
        for path in super().damageable(copy):
            array = path.relative_to(copy.path).parts[0]
            first.setdefault((array, re.sub(r"\d", "", path.name)), path)
        chosen = sorted({array for array, _ in first})[::6]
        return [path for (array, _), path in first.items() if array in chosen]


@pytest.fixture
def group(tmp_path: Path) -> zarr.Group:
    return zarr.open_group(tmp_path / "g", mode="w", zarr_format=3)


def put(group: zarr.Group, name: str, **how: Any) -> None:
    array = group.create_array(
        name, shape=MATRIX.shape, dtype="f4", **({"chunks": (5, 4), "config": WRITE} | how)
    )
    array[...] = how.get("fill_value", MATRIX)


def test_slices_of_raw_chunks_read_exactly_what_they_need(samples: dict[str, Sample]) -> None:
    ck = samples["v3_raw"].open()
    for name in ("plain", "plain_shards"):
        plan = ck[name].plan(Box((2, 1), (1, 3)))
        assert (plan.bytes_needed, plan.bytes_read, plan.ranges) == (12, 12, 1)
    plan = ck["checked"].plan()
    assert plan.bytes_unverified == 0
    assert plan.bytes_read == 9 * (5 * 4 * 4 + 4), "edge chunks are stored whole"


def test_a_flipped_bit_under_a_checksum_is_found(
    samples: dict[str, Sample], tmp_path: Path
) -> None:
    shutil.copytree(samples["v3_raw"].path, tmp_path / "g")
    chunk = tmp_path / "g/checked/c/0/0"
    chunk.write_bytes(b"\xff" + chunk.read_bytes()[1:])
    (problem,) = ucformat.verify(tmp_path / "g").problems
    assert (problem.name, problem.file) == ("checked", "checked/c/0/0")


def test_a_flipped_bit_of_a_compressed_chunk_is_found(group: zarr.Group, tmp_path: Path) -> None:
    how: Any = [codecs.ZstdCodec(), codecs.Crc32cCodec()]
    array = group.create_array("w", shape=(4, 8), chunks=(2, 8), dtype="f4", compressors=how)
    array[...] = RNG.standard_normal((4, 8))
    report = ucformat.verify(tmp_path / "g")
    assert (bool(report), report.bytes_verified, report.bytes_unverified) == (True, 128, 0)
    chunk = tmp_path / "g/w/c/1/0"
    chunk.write_bytes(chunk.read_bytes()[:-5] + b"\xff" * 5)
    (problem,) = ucformat.verify(tmp_path / "g").problems
    assert (problem.name, "chunk [1, 0]" in problem.reason) == ("w", True)


def test_dots_stand_for_slashes_only_where_that_is_clear(group: zarr.Group, tmp_path: Path) -> None:
    put(group, "a/b")
    put(group, "c.d")
    assert set(open_checkpoint(tmp_path / "g")) == {"a.b", "c.d"}
    put(group, "a.b")
    assert set(open_checkpoint(tmp_path / "g")) == {"a/b", "a.b", "c.d"}


def test_attributes_are_objects(group: zarr.Group, tmp_path: Path) -> None:
    put(group, "a", attributes={"unit": "m"})
    group.attrs["nan"] = float("nan")
    attributes = open_checkpoint(tmp_path / "g").objects["attributes"]
    assert attributes == {"": {"nan": {"$float": "nan"}}, "a": {"unit": "m"}} or "" in attributes


def test_the_arrays_of_a_universal_checkpoint_say_what_they_are(
    samples: dict[str, Sample], tmp_path: Path
) -> None:
    ck = ucformat.convert(samples["v3_raw"].path, tmp_path / "u", chunk_bytes=64)
    again = open_checkpoint(str(ck.zarr_url))
    assert again.kind == "zarr"
    assert read_whole(again) == read_whole(ck)
    assert again["plain"].plan(Box((3, 0), (1, 9))).bytes_read == 36 + 4


def test_an_interrupted_conversion_is_still_no_checkpoint(
    samples: dict[str, Sample], tmp_path: Path
) -> None:
    ucformat.convert(samples["v3_raw"].path, tmp_path / "u")
    (tmp_path / "u/manifest.json").unlink()
    with pytest.raises(NotACheckpoint):
        open_checkpoint(tmp_path / "u")


SHARDED = {"shards": (10, 8)}
RAW = {"compressors": None}


@pytest.mark.parametrize("how", [{}, SHARDED, RAW, SHARDED | RAW])
def test_a_chunk_that_is_not_stored(group: zarr.Group, tmp_path: Path, how: dict[str, Any]) -> None:
    put(group, "a", **how)
    put(group, "b", **how, config={"write_empty_chunks": False}, fill_value=2.5)
    ck = open_checkpoint(tmp_path / "g")
    assert (ck["a"].read() == MATRIX).all()
    with pytest.raises(MissingData, match=r"array b: its chunk \[0, 0\] is not stored") as caught:
        ck["b"].read()
    assert "options={'fill_missing': True}" in str(caught.value.hint)
    filled = Checkpoint(Zarr(fill_missing=True).open(LocalStore(tmp_path / "g")))
    assert (filled["b"].read() == 2.5).all()
    assert (filled["b"][11:, 8:] == 2.5).all()
    assert not ucformat.verify(filled).problems


def test_parts_that_were_lost_are_missed(group: zarr.Group, tmp_path: Path) -> None:
    put(group, "a/b")
    put(group, "empty", config={"write_empty_chunks": False}, fill_value=1)
    (tmp_path / "g/a/b/zarr.json").rename(tmp_path / "aside")
    with pytest.raises(
        MissingData,
        match=r"a/b/c/0/0 seems to be a chunk, but of an array whose metadata are missing",
    ):
        open_checkpoint(tmp_path / "g")
    (tmp_path / "aside").rename(tmp_path / "g/a/b/zarr.json")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        zarr.consolidate_metadata(tmp_path / "g")
    (tmp_path / "g/empty/zarr.json").unlink()
    with pytest.raises(MissingData, match="name the array empty, which does not exist"):
        open_checkpoint(tmp_path / "g")


def test_contradictions_are_refused(group: zarr.Group, tmp_path: Path) -> None:
    put(group, "a")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        zarr.consolidate_metadata(tmp_path / "g")
    doc = json.loads((tmp_path / "g/a/zarr.json").read_text())
    (tmp_path / "g/a/zarr.json").write_text(json.dumps(doc | {"shape": [13, 8]}))
    with pytest.raises(IntegrityError, match="consolidated metadata of a differ"):
        open_checkpoint(tmp_path / "g")
    (tmp_path / "g/a/zarr.json").write_text(json.dumps(doc))
    (tmp_path / "g/a/.zarray").write_text("{}")
    with pytest.raises(UnsupportedError, match=r"a node of Zarr v3 and of v2"):
        open_checkpoint(tmp_path / "g")
    (tmp_path / "g/a/.zarray").unlink()
    shutil.copytree(tmp_path / "g/a", tmp_path / "g/a/inner")
    with pytest.raises(IntegrityError, match="is inside the array 'a'"):
        open_checkpoint(tmp_path / "g")


BYTES: list[Any] = [{"name": "bytes", "configuration": {"endian": "little"}}]
V2: dict[str, Any] = {
    "zarr_format": 2,
    "shape": [4],
    "chunks": [2],
    "dtype": "<f4",
    "compressor": None,
    "fill_value": 0,
    "order": "C",
}
V3: dict[str, Any] = {
    "zarr_format": 3,
    "node_type": "array",
    "shape": [4],
    "data_type": "float32",
    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2]}},
    "chunk_key_encoding": {"name": "default"},
    "fill_value": 0,
    "codecs": BYTES,
}


def sharded(**change: Any) -> list[Any]:
    config = {"chunk_shape": [1], "codecs": BYTES, "index_codecs": BYTES}
    return [{"name": "sharding_indexed", "configuration": config | change}]


def read_only_array(folder: Path) -> None:
    """Read the array; one that is not supported is named, and refused when it is read."""
    ck = open_checkpoint(folder)
    assert not ck.tensors
    ck[next(iter(ck.unreadable)).name]


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"dtype": "|V2"}, UnsupportedError, r"data type '\|V2' is not read"),
        ({"dtype": "<M8[ns]"}, UnsupportedError, "is not read"),
        ({"dtype": [["a", "<f4"]]}, UnsupportedError, "is not read"),
        ({"dtype": "|f4"}, UnsupportedError, "is not read"),
        ({"compressor": {"id": "lz4"}}, UnsupportedError, "'lz4' are not read"),
        ({"filters": [{"id": "delta"}]}, UnsupportedError, "filters delta are not read"),
        ({"order": "A"}, IntegrityError, "order"),
        ({"shape": [-1]}, IntegrityError, "shape"),
        ({"shape": [True]}, IntegrityError, "shape"),
        ({"shape": [1 << 70]}, IntegrityError, "shape"),
        ({"shape": [1 << 61]}, IntegrityError, "is too large"),
        ({"shape": [1] * 40, "chunks": [1] * 40}, IntegrityError, "shape"),
        ({"chunks": [0]}, IntegrityError, "cannot be split"),
        ({"chunks": [2, 2]}, IntegrityError, "cannot be split"),
        ({"dimension_separator": "//"}, IntegrityError, "separated"),
        ({"zarr_format": 1}, IntegrityError, "not the metadata"),
    ],
)
def test_what_v2_metadata_may_not_say(
    tmp_path: Path, change: dict[str, Any], error: type[UcformatError], says: str
) -> None:
    (tmp_path / ".zarray").write_text(json.dumps(V2 | change))
    with pytest.raises(error, match=says):
        read_only_array(tmp_path)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"data_type": "r16"}, UnsupportedError, "data type 'r16' is not read"),
        ({"data_type": "int1"}, UnsupportedError, "data type 'int1' is not read"),
        (
            {"data_type": {"name": "numpy.datetime64", "configuration": {"unit": "s"}}},
            UnsupportedError,
            "is not read",
        ),
        (
            {"data_type": {"name": "float32", "configuration": {"unit": "s"}}},
            UnsupportedError,
            "is not read",
        ),
        (
            {"codecs": [*BYTES, {"name": "numcodecs.lz4"}]},
            UnsupportedError,
            r"'numcodecs\.lz4' are not read",
        ),
        ({"codecs": [{"name": "bytes"}]}, UnsupportedError, "the order of bytes is unknown"),
        ({"codecs": []}, IntegrityError, "none of its codecs converts"),
        ({"codecs": [*BYTES, "transpose"]}, IntegrityError, "in the wrong place"),
        (
            {"codecs": [{"name": "transpose", "configuration": {"order": [1]}}]},
            IntegrityError,
            "order",
        ),
        ({"codecs": sharded(chunk_shape=[3])}, IntegrityError, "split"),
        ({"codecs": sharded(index_location=3)}, IntegrityError, "index at"),
        ({"codecs": sharded(index_codecs=[])}, IntegrityError, "none of its codecs converts"),
        (
            {"chunk_grid": {"name": "rectilinear", "configuration": {}}},
            UnsupportedError,
            "rectilinear",
        ),
        ({"chunk_key_encoding": {"name": "odd"}}, UnsupportedError, "odd"),
        ({"storage_transformers": [{"name": "x"}]}, UnsupportedError, "transformers"),
        ({"surprise": {"name": "x"}}, UnsupportedError, "'surprise'"),
        ({"node_type": "thing"}, IntegrityError, "not the metadata"),
        ({"attributes": 3}, IntegrityError, "attributes"),
    ],
)
def test_what_v3_metadata_may_not_say(
    tmp_path: Path, change: dict[str, Any], error: type[UcformatError], says: str
) -> None:
    (tmp_path / "zarr.json").write_text(json.dumps(V3 | change))
    with pytest.raises(error, match=says):
        read_only_array(tmp_path)


def test_as_many_chunks_are_filled_as_what_is_stored_justifies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chunks_module, "_MIN_CHUNKS", 4)
    monkeypatch.setattr(chunks_module, "_MAX_CHUNKS", 8)

    def fills(count: int, stored: int) -> bool:
        array = parse_v3("a", "a/zarr.json", V3 | {"shape": [2 * count]})
        values = {"index": bytes(stored - 1), "other": bytes(1)}
        with suppress(UnsupportedError):
            return (
                len(list(Chunks(MemoryStore("x"), values, {}, ["a"], "").extents(array))) == count
            )
        return False

    limits = {1: 4, 15: 4, 16: 5, 47: 6, 64: 8, 1000: 8}
    for stored, limit in limits.items():
        assert [fills(limit, stored), fills(limit + 1, stored)] == [True, False]


@pytest.mark.parametrize("dtype", [{"name": "float32"}, {"name": "float32", "configuration": {}}])
def test_a_data_type_may_be_an_object_that_says_no_more(tmp_path: Path, dtype: object) -> None:
    (tmp_path / "zarr.json").write_text(json.dumps(V3 | {"data_type": dtype}))
    assert [info.dtype for info in open_checkpoint(tmp_path).tensors.values()] == ["float32"]


def test_no_size_in_metadata_makes_memory_or_time_go(tmp_path: Path) -> None:
    """Grids of 2⁵⁰ chunks, chunks of petabytes, and streams that decode to more than they should."""
    (tmp_path / "0").write_bytes(bytes(8))
    for change in ({"shape": [1 << 50]}, {"shape": [1 << 50], "chunks": [1 << 50]}):
        (tmp_path / ".zarray").write_text(json.dumps(V2 | change))
        for fill in (False, True):
            ck = Checkpoint(Zarr(fill_missing=fill).open(LocalStore(tmp_path)))
            with pytest.raises(UcformatError):
                ck[next(iter(ck))][:]
    for codec in (
        numcodecs.Zlib(),
        numcodecs.BZ2(),
        numcodecs.GZip(),
        numcodecs.Zstd(),
        numcodecs.Blosc(),
    ):
        for n in (4, 64 << 20):
            (tmp_path / "0").write_bytes(codec.encode(bytes(n)))
            for chunk in (2, 1 << 45):
                changed = V2 | {
                    "shape": [chunk],
                    "chunks": [chunk],
                    "compressor": codec.get_config(),
                }
                (tmp_path / ".zarray").write_text(json.dumps(changed))
                ck = open_checkpoint(tmp_path)
                with pytest.raises(IntegrityError, match=r"decode|too few"):
                    ck[next(iter(ck))][:1]


@settings(max_examples=60)
@given(data=st.data())
def test_hostile_metadata_are_errors_of_ours(tmp_path: Path, data: st.DataObject) -> None:
    file, doc = data.draw(st.sampled_from([(".zarray", V2), ("zarr.json", V3)]))
    junk = st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(1 << 65), 1 << 65)
        | st.floats()
        | st.sampled_from(["", "zstd", "C", "<f4"]),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["name", "id", "configuration", "endian", "codecs", "order"]),
                inner,
                max_size=3,
            )
        ),
        max_leaves=8,
    )
    changed = doc | {data.draw(st.sampled_from(sorted(doc))): data.draw(junk)}
    for old in tmp_path.iterdir():
        old.unlink()
    (tmp_path / file).write_text(json.dumps(changed))
    (tmp_path / "0").write_bytes(bytes(8))
    with suppress(UcformatError):
        for fill in (False, True):
            ck = Checkpoint(Zarr(fill_missing=fill).open(LocalStore(tmp_path)))
            for tensor in ck.values():
                tensor[tuple(slice(0, 2) for _ in tensor.shape)]


def test_any_store_serves_and_the_store_pickles(samples: dict[str, Sample]) -> None:
    root = samples["v3_encoded"].path
    memory = open_store("memory://zarr-test")
    for path in root.rglob("*"):
        if path.is_file():
            memory.put_if_absent(path.relative_to(root).as_posix(), path.read_bytes())
    ck = open_checkpoint(memory)
    assert read_whole(ck) == samples["v3_encoded"].truth
    again = pickle.loads(pickle.dumps(open_checkpoint(root).store))  # noqa: S301
    key = f"{DECODED}zstd/c.0.0"
    assert again.read(key) == ck.store.read(key) == MATRIX[:5, :4].tobytes()
    assert again.info(key).size == 80
    for wrong in (f"{DECODED}zstd/c.0", f"{DECODED}nothing/c.0.0"):
        with pytest.raises(UcformatError):
            again.read(wrong)
    with pytest.raises(MissingData):
        again.read(key, 70, 11)
    rows = [memoryview(bytearray(8)) for _ in range(3)]
    again.read_rows(key, 4, 16, rows)
    assert b"".join(rows) == b"".join(MATRIX[i, 1:3].tobytes() for i in range(3))


def test_threads_decode_a_chunk_once(
    samples: dict[str, Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    ck = samples["v3_encoded"].open()
    decoded: list[str] = []
    chunks = ck.store._decoder  # type: ignore[attr-defined]
    decode = chunks.decode

    def counted(name: str) -> memoryview:
        decoded.append(name)
        found: memoryview = decode(name)
        return found

    monkeypatch.setattr(chunks, "decode", counted)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: ck["zstd"][i % 13], range(52)))
    assert all((row == MATRIX[i % 13]).all() for i, row in enumerate(found))
    assert len(decoded) == len(set(decoded)) == 9


def test_the_cache_is_bounded_and_keeps_no_errors() -> None:
    cache, made = Cache[memoryview](limit=100, min_entries=2), list[str]()

    def make(key: str) -> memoryview:
        made.append(key)
        if len(made) == 1:
            raise IntegrityError("once")
        return memoryview(bytes(60))

    with pytest.raises(IntegrityError):
        cache.get("a", make)
    for key in "aababcbcaa":
        cache.get(key, make)
    assert made == ["a", "a", "b", "c", "a"]
    assert pickle.loads(pickle.dumps(cache)).get("a", make).nbytes == 60  # noqa: S301
