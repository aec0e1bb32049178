"""The sidecar of extents: round trips, and nothing believed that does not fit."""

from __future__ import annotations

import itertools
import json
import struct
import tracemalloc
import zlib
from contextlib import suppress
from dataclasses import fields, replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

import ucformat
from tests.fakes import ODD, FakeSource, same
from ucformat.errors import (
    IntegrityError,
    MissingData,
    UcformatError,
    UnsafeError,
    UpgradeNeeded,
    UsageError,
)
from ucformat.format.commit import begin, commit, new_id
from ucformat.format.digest import bytes_digest
from ucformat.format.extents import extent_problems
from ucformat.format.sidecar import Columns, decode, encode, encode_columns
from ucformat.format.structure import _source_problems as source_problems
from ucformat.geometry.box import Box
from ucformat.geometry.tensor import Block, Extent, single_extents
from ucformat.schema.limits import MAX_SPAN
from ucformat.schema.manifest import Manifest, SidecarDoc
from ucformat.schema.tensors import TensorDoc, TensorTable
from ucformat.storage.memory import MemoryStore

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

N = st.integers(0, 2**40)


ROWS = ("tensor", "file", "offset", "block_offset", "block_nbytes", "crc32c")
DIMS = ("start", "shape", "strides")
GROWING = ("tensor", "file", "offset", "block_offset")
META = {"format": "ucformat-extents", "files": json.dumps(["f"])}


@st.composite
def extents(draw: st.DrawFn) -> list[list[Extent]]:
    tensors = []
    for ndim in draw(st.lists(st.integers(0, 4), max_size=4)):
        dims = st.lists(N, min_size=ndim, max_size=ndim).map(tuple)
        tensors.append(
            [
                Extent(
                    Box(draw(dims), draw(dims)),
                    draw(st.sampled_from(["a", "b/c"])),
                    draw(N),
                    draw(dims),
                    draw(st.none() | st.builds(Block, N, N, st.none() | st.integers(0, 2**32 - 1))),
                )
                for _ in range(draw(st.integers(0, 3)))
            ]
        )
    return tensors


def ndims_of(tensors: list[list[Extent]]) -> list[int]:
    return [len(t[0].box.shape) if t else 0 for t in tensors]


def plain(rows: list[tuple[int, Extent]]) -> tuple[dict[str, list[int]], list[str]]:
    """The columns and the files of these extents, each with the number of its tensor."""
    columns: dict[str, list[int]] = {name: [] for name in (*ROWS, *DIMS)}
    files = sorted({e.file for _, e in rows})
    for number, e in rows:
        block = (-1, 0, 0) if e.block is None else (e.block.offset, e.block.nbytes, e.block.crc32c)
        row = (number, files.index(e.file), e.offset, *block)
        for name, value in zip(ROWS, row, strict=True):
            columns[name].append(-1 if value is None else value)
        for name, values in zip(DIMS, (e.box.start, e.box.shape, e.strides), strict=True):
            columns[name] += values
    return columns, files


def packed_column(name: str, values: list[int]) -> bytes:
    """As docs/spec/format.md says, and in another way than the code does it."""
    if name in GROWING:
        values = [(b - a) for a, b in zip([0, *values], values, strict=False)]
    words = [(v % 2**64).to_bytes(8, "little") for v in values]
    return zlib.compress(b"".join(bytes(w[k] for w in words) for k in range(8)))


def sidecar_of(
    columns: dict[str, list[int]], files: object = ("f",), **changed: bytes | str
) -> bytes:
    """A sidecar of these columns; `changed` are packed columns, or the number of extents."""
    packed = {name: packed_column(name, values) for name, values in columns.items()}
    n = changed.pop("extents", str(len(columns["tensor"])))
    arrays = {name: np.frombuffer(data, np.uint8) for name, data in {**packed, **changed}.items()}  # type: ignore[arg-type]
    data: bytes = save(arrays, {**META, "files": json.dumps(files), "extents": n})
    return data


def tensors_of(ndims: Sequence[int]) -> TensorTable:
    return TensorTable.of(
        TensorDoc(f"t{n}", "weight", "uint8", (1,) * ndim) for n, ndim in enumerate(ndims)
    )


def unpacked(data: bytes) -> tuple[dict[str, list[int]], list[str]]:
    """The columns and the files of a sidecar, by docs/spec/format.md and nothing else."""
    end = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:end])
    meta = header.pop("__metadata__")
    assert meta["format"] == "ucformat-extents"
    out = {}
    for name, entry in header.items():
        a, b = entry["data_offsets"]
        raw = zlib.decompress(data[end + a : end + b])
        rows = len(raw) // 8
        values = [int.from_bytes(raw[k::rows], "little", signed=True) for k in range(rows)]
        if name in GROWING:
            values = list(itertools.accumulate(values))
        out[name] = values
    assert len(out["tensor"]) == int(meta["extents"])
    return out, json.loads(meta["files"])


@given(extents())
def test_what_is_encoded_is_decoded(tensors: list[list[Extent]]) -> None:
    data, ndims = encode(tensors), ndims_of(tensors)
    found = decode(data, tensors_of(ndims), "sidecar")
    assert [found.extents(number) for number in range(len(ndims))] == [tuple(t) for t in tensors]
    assert encode_columns(found.columns, found.files) == data


@given(extents(), st.data())
def test_those_that_meet_a_box(tensors: list[list[Extent]], data: st.DataObject) -> None:
    ndims = ndims_of(tensors)
    found = decode(encode(tensors), tensors_of(ndims), "sidecar")
    for number, ndim in enumerate(ndims):
        sides = st.tuples(*[N] * ndim)
        near = data.draw(
            st.builds(Box, sides, sides) | st.sampled_from([Box((0,) * ndim, (1 << 41,) * ndim)])
        )
        expected = [e for e in tensors[number] if e.box.intersect(near)]
        assert [e for e in found.extents(number, near) if e.box.intersect(near)] == expected


def test_only_those_that_meet_a_box() -> None:
    strides, boxes = (40, 4), [Box((r, c), (1, 5)) for r in range(10) for c in (0, 5)]
    rows = [Extent(box, "f", 40 * box.start[0] + 4 * box.start[1], strides) for box in boxes]
    found = decode(encode([rows]), tensors_of([2]), "sidecar")
    assert [e.box for e in found.extents(0, Box((3, 0), (2, 5)))] == [
        Box((3, 0), (1, 5)),
        Box((4, 0), (1, 5)),
    ]
    assert found.extents(0, Box((10, 0), (1, 5))) == ()


@given(extents())
def test_a_reader_made_from_the_specification_reads_it(tensors: list[list[Extent]]) -> None:
    columns, files = unpacked(encode(tensors))
    expected, named = plain([(number, e) for number, t in enumerate(tensors) for e in t])
    assert [files[k] for k in columns.pop("file")] == [named[k] for k in expected.pop("file")]
    assert columns == expected


@given(extents(), st.randoms())
def test_rows_in_any_order(tensors: list[list[Extent]], chance: random.Random) -> None:
    rows = [(number, e) for number, t in enumerate(tensors) for e in t]
    chance.shuffle(rows)
    columns, files = plain(rows)
    ndims = ndims_of(tensors)
    first = decode(sidecar_of(columns, files), tensors_of(ndims), "sidecar")
    second = decode(encode_columns(first.columns, files), tensors_of(ndims), "sidecar")
    for found in (first, second):
        for number in range(len(ndims)):
            assert found.extents(number) == tuple(e for t, e in rows if t == number)


def many(tensors: int = 1000, shards: int = 100) -> Columns:
    """Tensors of two dims, each cut by rows over as many files."""
    chance = np.random.default_rng(0)
    height, width = chance.integers(shards, 5000, (2, tensors, 1))
    cuts = np.arange(shards + 1) * height // shards
    rows, n = np.diff(cuts), tensors * shards
    nbytes = rows * width * 4
    offset = (np.cumsum(nbytes, axis=0) - nbytes).reshape(n)
    wide = np.broadcast_to(width, (tensors, shards)).reshape(n)
    zero = np.zeros(n, np.int64)
    return Columns(
        tensor=np.repeat(np.arange(tensors), shards),
        file=np.tile(np.arange(shards), tensors),
        offset=offset,
        block_offset=offset,
        block_nbytes=nbytes.reshape(n),
        crc32c=chance.integers(0, 2**32, n),
        start=np.stack([cuts[:, :-1].reshape(n), zero], axis=1).reshape(2 * n),
        shape=np.stack([rows.reshape(n), wide], axis=1).reshape(2 * n),
        strides=np.stack([wide * 4, zero + 4], axis=1).reshape(2 * n),
    )


def test_a_hundred_thousand_extents_are_small() -> None:
    columns = many()
    data = encode_columns(columns, [f"data/0123456789/rank{k}.bin" for k in range(100)])
    assert len(data) < 9 * len(columns)
    found = decode(data, tensors_of([2] * 1000), "sidecar")
    for field in fields(Columns):
        assert (getattr(found.columns, field.name) == getattr(columns, field.name)).all()
    assert encode([single_extents(found.extents(k)) for k in range(1000)]) == data


def test_columns_that_do_not_fit_each_other_are_not_written() -> None:
    columns = many(2, 3)
    for name, rows in (("offset", 5), ("start", 11), ("strides", 13)):
        with pytest.raises(UsageError, match="the column"):
            encode_columns(replace(columns, **{name: np.zeros(rows, np.int64)}), ["f"])


@given(st.binary(max_size=300))
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(IntegrityError):
        decode(noise, tensors_of([1]), "sidecar")


@given(st.data())
def test_a_changed_byte_gives_other_extents_or_an_error_of_ours(data: st.DataObject) -> None:
    whole = bytearray(encode_columns(many(3, 2), ["a", "b"]))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    with suppress(UcformatError):
        found = decode(bytes(whole), tensors_of([2, 2, 2]), "sidecar")
        assert all(isinstance(e, Extent) for number in range(3) for e in found.extents(number))


def columns(**changed: list[int]) -> dict[str, list[int]]:
    return {**{name: [0] for name in (*ROWS, *DIMS)}, **changed}


@pytest.mark.parametrize(
    "changed",
    [
        {"tensor": [7]},
        {"tensor": [-1]},
        {"file": [3]},
        {"file": [-1]},
        {"offset": [-4]},
        {"block_offset": [-2]},
        {"block_nbytes": [-1]},
        {"crc32c": [1 << 32]},
        {"start": [-1]},
        {"shape": [-1]},
        {"strides": [-4]},
        {"shape": [1, 2]},
        {"offset": [1, 2]},
        {"offset": []},
        {"tensor": [], "file": []},
    ],
)
def test_columns_that_do_not_fit_are_refused(changed: dict[str, list[int]]) -> None:
    with pytest.raises(IntegrityError):
        decode(sidecar_of(columns(**changed)), tensors_of([1]), "sidecar")
    assert decode(sidecar_of(columns()), tensors_of([1]), "sidecar").extents(0)


def tiled(**changed: list[int]) -> dict[str, list[int]]:
    """The rows 1 to 4 of a float32 tensor of 5 by 6 in tiles of 2 by 4."""
    box = {"start": [1, 0], "shape": [4, 6], "strides": [0, 4], "tile": [2, 4]}
    return {**columns(offset=[64], block_offset=[-1]), **box, **changed}


def test_tiles_lie_where_the_specification_says() -> None:
    found = single_extents(decode(sidecar_of(tiled()), tensors_of([2]), "sidecar").extents(0))
    at, expected = 64, {}
    for r, rows in ((1, 1), (2, 2), (4, 1)):
        for c, wide in ((0, 4), (4, 2)):
            expected[Box((r, c), (rows, wide))] = (
                at,
                (wide * 4, 4),
                Block(at, rows * wide * 4, placed=True),
            )
            at += rows * wide * 4 + 4
    assert {e.box: (e.offset, e.strides, e.block) for e in found} == expected


@pytest.mark.parametrize(
    "changed",
    [
        {"tile": [2, 0]},
        {"tile": [2, -4]},
        {"tile": [2]},
        {"block_offset": [64]},
        {"strides": [4, 0]},
        {"shape": [1 << 20, 9]},
        {"shape": [1 << 62, 1 << 62]},
    ],
)
def test_impossible_tiles_are_refused(changed: dict[str, list[int]]) -> None:
    assert decode(sidecar_of(tiled()), tensors_of([2]), "sidecar").extents(0)
    with pytest.raises(IntegrityError):
        decode(sidecar_of(tiled(**changed)), tensors_of([2]), "sidecar")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"strides": [0, 8]}, "strides of an extent of tiles"),
        ({"strides": [24, 4]}, "strides of an extent of tiles"),
        ({"start": [2, 0]}, "exceeds the tensor"),
        ({"offset": [1 << 62]}, "impossible offset"),
    ],
)
def test_tiles_that_cannot_be_are_refused(changed: dict[str, list[int]], reason: str) -> None:
    tensors = TensorTable.of([TensorDoc("t", "weight", "float32", (5, 6))])
    doc = SidecarDoc(path="data/x", nbytes=1, digest="sha256:" + "0" * 64)
    assert not list(extent_problems(doc, tensors, decode(sidecar_of(tiled()), tensors, "sidecar")))
    (problem,) = extent_problems(
        doc, tensors, decode(sidecar_of(tiled(**changed)), tensors, "sidecar")
    )
    assert reason in problem.reason


@pytest.mark.parametrize(
    ("dtype", "shape", "rows"),
    [
        ("uint8", 1, {"offset": [MAX_SPAN]}),
        ("uint8", 1, {"block_offset": [MAX_SPAN], "block_nbytes": [1]}),
        ("uint8", 1, {"block_nbytes": [MAX_SPAN]}),
        ("uint8", 2, {"strides": [MAX_SPAN]}),
        ("uint8", MAX_SPAN, {"block_offset": [-1], "tile": [MAX_SPAN]}),
        ("float32", MAX_SPAN // 4, {"block_offset": [-1], "strides": [4], "tile": [MAX_SPAN // 4]}),
    ],
)
def test_offsets_and_sizes_in_files_have_a_limit(
    dtype: str, shape: int, rows: dict[str, list[int]]
) -> None:
    doc = SidecarDoc(path="data/x", nbytes=1, digest="sha256:" + "0" * 64)

    def impossible(shape: int, rows: dict[str, list[int]]) -> bool:
        tensors = TensorTable.of([TensorDoc("t", "weight", dtype, (shape,))])
        extent = columns(**{"shape": [shape], "strides": [1], **rows})
        found = extent_problems(doc, tensors, decode(sidecar_of(extent), tensors, "sidecar"))
        return any("impossible offset" in problem.reason for problem in found)

    assert not impossible(shape, rows)
    larger = {
        name: [n + (n >= 1 << 58) * 1024] for name, (n,) in rows.items()
    }  # 1 more is lost in a float
    assert impossible(shape + (shape > 2) * 1024, larger)


ROOTS = ["/elsewhere", "/other"]


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("roots/0/a", None),
        ("roots/1/a/b\nc", None),
        ("roots/000000001/a", None),
        ("roots/0000000001/a", "not below a root"),
        ("roots/2/a", "not below a root"),
        ("roots/-1/a", "not below a root"),
        ("roots/\N{ARABIC-INDIC DIGIT ZERO}/a", "not below a root"),
        ("roots/0/", "not below a root"),
        ("roots/0", "not below a root"),
        ("root/0/a", "not below a root"),
        ("roots/1/same", "listed twice"),
    ],
)
def test_sources_are_below_the_roots(path: str, reason: str | None) -> None:
    sources = [{"path": p, "nbytes": 1} for p in ("roots/1/same", path)]
    doc = SidecarDoc.model_validate(
        {
            "path": "data/x",
            "nbytes": 1,
            "digest": "sha256:" + "0" * 64,
            "roots": ROOTS,
            "sources": sources,
        }
    )
    reasons = [problem.reason for problem in source_problems(doc)]
    assert len(reasons) == (reason is not None)
    assert all(str(reason) in found for found in reasons)


def test_the_error_names_the_tensor_of_an_impossible_extent() -> None:
    rows = {name: [0, 0, 0] for name in ROWS}
    dims = {name: [0] * 4 for name in DIMS}
    for changed in (
        {"tensor": [0, 1, 2], "offset": [0, 0, -1]},
        {"tensor": [1, 0, 2], "shape": [0, 0, 0, -1]},
    ):
        with pytest.raises(IntegrityError, match="an extent of tensor 2 is impossible"):
            decode(sidecar_of({**rows, **dims, **changed}), tensors_of([0, 2, 2]), "sidecar")


@pytest.mark.parametrize("file", ["/etc/passwd", "s3://other/file", "file:///etc/passwd", 7])
def test_files_outside_the_checkpoint_are_refused(file: object) -> None:
    with pytest.raises(UnsafeError, match="outside its checkpoint"):
        decode(sidecar_of(columns(), [file]), tensors_of([1]), "sidecar")
    for files in ("f", {"f": 1}, 3, None):
        with pytest.raises(IntegrityError, match="does not list the files"):
            decode(sidecar_of(columns(), files), tensors_of([1]), "sidecar")


STREAM = packed_column("offset", [0])


@pytest.mark.parametrize("name", [*ROWS, *DIMS])
def test_a_stream_that_is_not_one_column_is_refused(name: str, subtests: pytest.Subtests) -> None:
    for stream in (
        b"",
        b"noise",
        STREAM[:-1],
        STREAM[:-5],
        STREAM + b"\0",
        STREAM + STREAM,
        zlib.compress(bytes(7)),
        zlib.compress(bytes(9)),
        zlib.compress(bytes(16)),
    ):
        with subtests.test(stream=stream), pytest.raises(IntegrityError, match=f"column {name}"):
            decode(sidecar_of(columns(), **{name: stream}), tensors_of([1]), "sidecar")


@pytest.mark.parametrize(
    "extents", ["-1", "0", "2", str(1 << 27), str(1 << 40), "9" * 5000, "x", ""]
)
def test_a_wrong_number_of_extents_is_refused(extents: str) -> None:
    with pytest.raises(IntegrityError):
        decode(sidecar_of(columns(), extents=extents), tensors_of([1]), "sidecar")
    arrays = {name: np.frombuffer(packed_column(name, [0]), np.uint8) for name in (*ROWS, *DIMS)}
    unsaid = save(arrays, META)
    with pytest.raises(IntegrityError, match="number of its extents"):
        decode(unsaid, tensors_of([1]), "sidecar")


def test_bombs_are_not_inflated() -> None:
    """Neither a stream of more than its rows, nor rows and dims that no stream of its length could give."""
    bomb = zlib.compress(bytes(64 << 20), 9)
    dims = zlib.compress(bytes(8 * 1000), 9)
    hostile = [
        (sidecar_of(columns(), offset=bomb), 1),
        (sidecar_of(columns(), start=bomb), 1),
        (sidecar_of(columns(), extents=str(16 << 20)), 1),
        (sidecar_of({**columns(), "tensor": [0] * 1000}), 64),
        (
            sidecar_of(
                {**{name: [0] * 1000 for name in ROWS}, **{name: [] for name in DIMS}}, start=dims
            ),
            2000,
        ),
    ]
    tracemalloc.start()
    try:
        for data, ndim in hostile:
            tracemalloc.reset_peak()
            with pytest.raises(IntegrityError, match="column"):
                decode(data, tensors_of([ndim]), "sidecar")
            assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_what_is_newer_and_other_files_are_told_apart() -> None:
    arrays = {name: np.zeros(1, np.uint8) for name in (*ROWS, *DIMS)}
    with pytest.raises(IntegrityError, match="is not a ucformat sidecar"):
        decode(save(arrays, {**META, "format": "other"}), tensors_of([1]), "sidecar")
    with pytest.raises(UpgradeNeeded, match="column 'more'"):
        decode(save({**arrays, "more": arrays["file"]}, META), tensors_of([1]), "sidecar")
    with pytest.raises(UpgradeNeeded, match="of the kind -3"):
        decode(sidecar_of(columns(crc32c=[-3])), tensors_of([1]), "sidecar")
    for wrong in ({**arrays, "file": np.zeros(1, "<i8")}, {"file": arrays["file"]}):
        with pytest.raises(IntegrityError, match="columns are missing"):
            decode(save(wrong, {**META, "extents": "1"}), tensors_of([1]), "sidecar")


def packed(name: str, ranks: int = 3) -> MemoryStore:
    """A committed checkpoint whose tensors are extents in files of its own: the packed form."""
    store = MemoryStore(name)
    attempt = begin(store, {"test": name}, overwrite=False)
    source = FakeSource.write(store, ODD, ranks)
    infos = source.metadata.tensor_list.tensors
    data = encode([[checked(store, e, i.itemsize) for e in source.extents(i.key)] for i in infos])
    path = f"data/{attempt.id}/extents.safetensors"
    with store.create(path) as out:
        out.write(data)
    manifest = Manifest(
        id=new_id(),
        attempt=attempt.id,
        created="2026-01-01T00:00:00Z",  # type: ignore[arg-type]
        tensors=TensorTable.of(TensorDoc(i.name, i.state, i.dtype, i.shape) for i in infos),
        requires=("extents",),
        sidecar=SidecarDoc(path=path, nbytes=len(data), digest=bytes_digest(data)),
    )
    commit(store, attempt, manifest)
    return store


def checked(store: MemoryStore, e: Extent, itemsize: int) -> Extent:
    """An extent of contiguous bytes, with their checksum."""
    nbytes = e.box.size * itemsize
    return replace(e, block=Block(e.offset, nbytes, crc32c(store.read(e.file, e.offset, nbytes))))


def test_a_packed_checkpoint_opens_reads_verifies_and_becomes_arrays() -> None:
    ck = ucformat.open(packed("packed"))
    for key, a in ODD.items():
        assert same(ck[key][...], a), key
    assert same(ck["embed.weight"][3:9, 4:], ODD["embed.weight", "weight"][3:9, 4:])
    report = ucformat.verify(ck)
    assert report
    assert not report.bytes_unverified
    arrays = ucformat.convert(ck, MemoryStore("packed-arrays"))
    for key, a in ODD.items():
        assert same(arrays[key][...], a), key


def test_a_changed_sidecar_is_found() -> None:
    store = packed("packed-damaged")
    key = next(i.key for i in store.list("data"))
    data = bytearray(store.read(key))
    data[-5] ^= 1
    with store.create(key) as out:
        out.write(bytes(data))
    with pytest.raises(IntegrityError, match="differs from the committed file"):
        ucformat.open(store)["table"][...]
    assert not ucformat.verify(store)


def test_an_extent_past_the_end_of_its_file_is_an_error() -> None:
    store = packed("packed-short")
    with store.create("rank1.bin") as out:
        out.write(store.read("rank1.bin", 0, 1000))
    with pytest.raises(MissingData, match=r"rank1\.bin"):
        ucformat.open(store)["table"][...]
    report = ucformat.verify(store)
    assert {p.file for p in report.problems} == {"rank1.bin"}
