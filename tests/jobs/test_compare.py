"""Comparing values: exact for every dtype and cut, in bounded memory, and without reading what digests know."""

from __future__ import annotations

import math
import tracemalloc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ucformat
from tests.fakes import ODD, Arrays, FakeSource, random_array
from ucformat.checkpoint import Checkpoint
from ucformat.errors import ChecksumError, NotFound, TensorNotFound, UsageError
from ucformat.geometry.tensor import Key, TensorInfo, TensorList
from ucformat.jobs import compare as module
from ucformat.jobs.compare import TensorDifference, compare, compare_values
from ucformat.reading.dtypes import numpy_dtype
from ucformat.reading.readable import CheckpointMetadata
from ucformat.schema import ITEMSIZE
from ucformat.storage.local import LocalStore
from ucformat.storage.memory import MemoryStore
from ucformat.storage.wrappers import RecordingStore

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

INF, NAN = float("inf"), float("nan")
names = iter(range(1 << 30))


def fake(arrays: Arrays, ranks: int = 3, **facts: Any) -> Checkpoint:
    return Checkpoint(
        FakeSource.write(MemoryStore(f"compare-{next(names)}"), arrays, ranks, **facts)
    )


def one(a: Any, b: Any, **options: Any) -> TensorDifference:
    (found,) = compare(fake({("w", "weight"): a}), fake({("w", "weight"): b}), **options)
    return found


def array(dtype: str, *values: Any) -> Any:
    return np.array(values, numpy_dtype(dtype))


def bits(dtype: str, *values: int) -> Any:
    return np.array(values, f"u{ITEMSIZE[dtype]}").view(numpy_dtype(dtype))


# The oracle: one element after another, in Python's own numbers


def parts(x: Any) -> tuple[float, ...]:
    return (float(x.real), float(x.imag)) if x.dtype.kind == "c" else (float(x),)


def oracle(a: Any, b: Any) -> tuple[int, int, float, float]:
    """Differing elements, NaN mismatches, the largest distance and the largest relative one."""
    differing, mismatches, largest_abs, largest_rel = 0, 0, 0.0, 0.0
    for x, y in zip(a.reshape(-1), b.reshape(-1), strict=True):
        p, q = parts(x), parts(y)
        if len(p) != len(q):
            p, q = ((*v, 0.0)[:2] for v in (p, q))
        nan_x, nan_y = (any(map(math.isnan, v)) for v in (p, q))
        if a.dtype == b.dtype:
            equal = x.tobytes() == y.tobytes()
        else:
            equal = all(
                u == v or (math.isnan(u) and math.isnan(v)) for u, v in zip(p, q, strict=True)
            )
        differing += not equal
        mismatches += nan_x != nan_y
        if equal or nan_x or nan_y:
            continue
        if a.dtype == b.dtype and a.dtype.kind in "iu":
            distance = float(abs(int(x) - int(y)))
        else:
            distance = math.hypot(*(0.0 if u == v else u - v for u, v in zip(p, q, strict=True)))
        scale = max(math.hypot(*p), math.hypot(*q))
        relative = INF if math.isinf(distance) else distance / scale if scale else 0.0
        largest_abs, largest_rel = max(largest_abs, distance), max(largest_rel, relative)
    return differing, mismatches, largest_abs, largest_rel


def agree(found: Any, expected: tuple[int, int, float, float]) -> None:
    assert (found.differing, found.nan_mismatches) == expected[:2]
    assert found.max_abs == pytest.approx(expected[2], rel=1e-12, abs=0)
    assert found.max_rel == pytest.approx(expected[3], rel=1e-12, abs=0)


@st.composite
def two_arrays(draw: st.DrawFn) -> tuple[Any, Any]:
    """Two arrays of one shape, random in every bit, mostly of one dtype, many elements alike."""
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
    dtype = draw(st.sampled_from(list(ITEMSIZE)))
    other = draw(st.just(dtype) | st.sampled_from(list(ITEMSIZE)))
    a, b = (random_array(shape, d, draw(st.integers(0, 1 << 30))) for d in (dtype, other))
    alike = np.random.default_rng(draw(st.integers(0, 9))).random(shape) < draw(
        st.sampled_from([0, 0.5, 0.9, 1])
    )
    with np.errstate(all="ignore"):
        same = a if dtype == other else a.astype(np.complex128).astype(b.dtype)
    return a, np.where(alike, same, b).astype(b.dtype) if dtype != other else choose(alike, a, b)


def choose(alike: Any, a: Any, b: Any) -> Any:
    """As np.where, which does not keep the bits of all NaNs of all dtypes."""
    out = b.copy()
    flat = out.reshape(-1).view(f"V{b.itemsize}")
    flat[alike.reshape(-1)] = a.reshape(-1).view(f"V{b.itemsize}")[alike.reshape(-1)]
    return out


@settings(max_examples=300)
@given(pair=two_arrays())
@pytest.mark.filterwarnings("ignore")
def test_values_as_element_by_element(pair: tuple[Any, Any]) -> None:
    a, b = pair
    agree(compare_values(a.reshape(-1), b.reshape(-1)), oracle(a, b))


@settings(max_examples=100)
@given(pair=two_arrays(), block=st.sampled_from([1, 16, 64, 100, 1 << 20]), ranks=st.integers(1, 4))
@pytest.mark.filterwarnings("ignore")
def test_checkpoints_as_element_by_element(pair: tuple[Any, Any], block: int, ranks: int) -> None:
    a, b = pair
    left, right = fake({("w", "weight"): a}, ranks), fake({("w", "weight"): b})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BLOCK", block)
        (found,) = compare(left, right, workers=2)
    agree(found, oracle(a, b))
    assert found.equal == (a.dtype == b.dtype and a.tobytes() == b.tobytes())
    assert (found.elements, found.shape, found.by_digest) == (a.size, a.shape, False)
    assert found.dtypes == (left["w"].info.dtype, right["w"].info.dtype)


@settings(max_examples=200)
@given(
    shape=st.lists(st.integers(0, 9), max_size=4).map(tuple),
    itemsize=st.sampled_from([1, 2, 4, 16]),
    block=st.integers(1, 600),
    chunk=st.none() | st.integers(1, 4),
)
def test_boxes_hold_every_element_once_and_are_small(
    shape: tuple[int, ...], itemsize: int, block: int, chunk: int | None
) -> None:
    seen = np.zeros(shape, int)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BLOCK", block)
        for box in module._boxes(shape, itemsize, None if chunk is None else (chunk,) * len(shape)):
            assert 0 < box.size * itemsize <= max(block, itemsize)
            seen[tuple(slice(i, j) for i, j in zip(box.start, box.stop, strict=True))] += 1
    assert (seen == 1).all()


def test_boxes_end_at_chunk_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BLOCK", 1000)
    starts = [box.start for box in module._boxes((100, 10), 4, (8, 5))]
    assert starts == [(i, 0) for i in range(0, 100, 24)]
    assert [box.start for box in module._boxes((2, 1000), 4, (8, 100))] == [
        (i, j) for i in (0, 1) for j in range(0, 1000, 200)
    ]


# Values of all kinds


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (array("float32", 1.0, 2.0), array("float32", 1.0, 3.0), (1, 0, 1.0, 1 / 3)),
        (array("float32", 0.0), array("float32", -0.0), (1, 0, 0.0, 0.0)),
        (
            array("float32", 0.0, 4.0),
            array("float32", 1e-30, 4.0),
            (1, 0, float(np.float32(1e-30)), 1.0),
        ),
        (array("float64", 1.0), array("float64", -1.0), (1, 0, 2.0, 2.0)),
        (array("float64", INF, INF, -INF), array("float64", INF, -INF, -INF), (1, 0, INF, INF)),
        (array("float64", INF), array("float64", 1.0), (1, 0, INF, INF)),
        (array("float64", 1.5e308), array("float64", -1.5e308), (1, 0, INF, INF)),
        (array("float64", 5e-324), array("float64", 0.0), (1, 0, 5e-324, 1.0)),
        (array("float32", NAN, 1.0, NAN), array("float32", NAN, NAN, 7.0), (2, 2, 0.0, 0.0)),
        (bits("float32", 0x7FC00000), bits("float32", 0x7FC00001), (1, 0, 0.0, 0.0)),
        (
            bits("bfloat16", 0x7FC0, 0x3F80),
            bits("bfloat16", 0x7FC0, 0x3F81),
            (1, 0, 2**-7, 2**-7 / (1 + 2**-7)),
        ),
        (array("float8_e4m3fn", 448.0), array("float8_e4m3fn", -448.0), (1, 0, 896.0, 2.0)),
        (array("float8_e5m2", INF), array("float8_e5m2", NAN), (1, 1, 0.0, 0.0)),
        (array("float16", 65504.0), array("float16", 65472.0), (1, 0, 32.0, 32 / 65504)),
        (array("bool", True, False), array("bool", False, False), (1, 0, 1.0, 1.0)),
        (array("int8", -128), array("int8", 127), (1, 0, 255.0, 255 / 128)),
        (array("int64", -(2**63)), array("int64", 2**63 - 1), (1, 0, float(2**64 - 1), 2.0)),
        (array("int64", 2**60, 5), array("int64", 2**60 + 1, 5), (1, 0, 1.0, 2.0**-60)),
        (array("uint64", 2**64 - 1), array("uint64", 2**64 - 2), (1, 0, 1.0, 2.0**-64)),
        (array("complex64", 3 + 4j), array("complex64", 0), (1, 0, 5.0, 1.0)),
        (
            array("complex128", complex(INF, 0)),
            array("complex128", complex(INF, 1)),
            (1, 0, 1.0, 0.0),
        ),
        (array("complex128", complex(NAN, 0), 1j), array("complex128", 0, 1j), (1, 1, 0.0, 0.0)),
        (array("float32", 1.0, NAN, 0.0), array("bfloat16", 1.0, NAN, -0.0), (0, 0, 0.0, 0.0)),
        (array("float32", 1.0 + 2**-9), array("bfloat16", 1.0), (1, 0, 2**-9, 2**-9 / (1 + 2**-9))),
        (array("int32", 3), array("float64", 3.5), (1, 0, 0.5, 0.5 / 3.5)),
        (array("complex64", 3), array("float32", 3), (0, 0, 0.0, 0.0)),
        (array("complex64", 3 + 4j), array("bool", False), (1, 0, 5.0, 1.0)),
    ],
)
def test_differences(a: Any, b: Any, expected: tuple[int, int, float, float]) -> None:
    found = one(a, b)
    agree(found, expected)
    agree(one(b, a), expected)
    assert not found.equal


def test_a_scalar_and_a_tensor_without_elements() -> None:
    assert one(np.float32(1.0).reshape(()), np.float32(1.0).reshape(())).equal
    assert one(np.float32(1.0).reshape(()), np.float32(2.0).reshape(())).max_abs == 1.0
    empty = one(np.zeros((0, 4), np.int64), np.zeros((0, 4), np.int64))
    assert (empty.equal, empty.elements, empty.differing) == (True, 0, 0)
    assert not one(np.zeros((0, 4), np.int64), np.zeros((0, 4), np.int32)).equal


def test_more_elements_than_are_compared_at_once() -> None:
    a = np.arange(1 << 19, dtype=np.int32)
    b = a.copy()
    b[[0, 1 << 17, (1 << 19) - 1]] += [1, 2, 3]
    found = one(a, b)
    assert (found.differing, found.max_abs) == (3, 3.0)


# Checkpoints


def test_foreign_and_universal_in_any_cut_are_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BLOCK", 256)
    source = fake(ODD)
    ucformat.convert(source, tmp_path / "one", chunk_bytes=64, shard_bytes=256)
    ucformat.convert(source, tmp_path / "two", chunk_bytes=1000)
    for a, b in (
        (source, tmp_path / "one"),
        (tmp_path / "one", tmp_path / "two"),
        (str(tmp_path / "two"), source),
    ):
        found = list(compare(a, b))
        assert [(d.name, d.state) for d in found] == list(ODD)
        assert all(d.equal and not d.differing and d.max_abs == d.max_rel == 0.0 for d in found)
        assert all(d.shape == ODD[d.name, d.state].shape for d in found)


def test_what_digests_show_is_not_read(tmp_path: Path) -> None:
    source = fake(ODD)
    changed = {**ODD, ("norm.bias", "weight"): random_array((7,), "float16", 77)}
    for name, src in (("one", source), ("two", fake(changed))):
        ucformat.convert(src, tmp_path / name)
    stores = [RecordingStore(LocalStore(tmp_path / name)) for name in ("one", "two")]
    checkpoints = [ucformat.open(store) for store in stores]
    for store in stores:
        store.clear()
    found = {(d.name, d.state): d for d in compare(*checkpoints)}
    assert not found["norm.bias", "weight"].by_digest
    assert found["norm.bias", "weight"].differing
    rest = [d for key, d in found.items() if key != ("norm.bias", "weight")]
    assert len(rest) == len(ODD) - 1
    assert all(d.by_digest and d.equal for d in rest)
    for store in stores:
        assert {
            read.file.rsplit("/data/", 1)[-1].split("/c/")[0].split("/")[-1] for read in store.reads
        } == {"norm.bias"}


def test_only_what_both_hold_in_one_shape() -> None:
    w = np.ones((2, 3), np.float32)
    a = {("w", "weight"): w, ("gone", "weight"): w, ("w", "exp_avg"): w, ("cut", "weight"): w}
    b = {
        ("cut", "weight"): w.reshape(3, 2),
        ("new", "weight"): w,
        ("w", "weight"): w + 1,
        ("w", "step"): w,
    }
    (found,) = compare(fake(a), fake(b))
    assert (found.name, found.state, found.differing, found.max_abs, found.max_rel) == (
        "w",
        "weight",
        6,
        1.0,
        0.5,
    )
    assert list(compare(fake({}), fake({}))) == []


def test_names_choose() -> None:
    a, b = fake(ODD), fake(ODD)
    found = compare(a, b, names=["mask", "embed.weight", "mask"])
    assert [(d.name, d.state) for d in found] == [
        ("mask", "weight"),
        *((n, s) for n, s in ODD if n == "embed.weight"),
    ]
    assert list(compare(a, b, names=[])) == []
    with pytest.raises(TensorNotFound, match="nothing"):
        compare(a, b, names=["nothing"])
    with pytest.raises(TensorNotFound, match="mask"):
        compare(a, fake({("w", "weight"): np.ones(2)}), names=["mask"])


def test_tied_tensors_are_found_under_all_their_names() -> None:
    w, v = np.ones(4, np.float32), np.full(4, 2, np.float32)
    tied = fake({("embed", "weight"): w}, aliases={"head": "embed"})
    apart = fake({("embed", "weight"): w, ("head", "weight"): v})
    for a, b in ((tied, apart), (apart, tied)):
        assert [(d.name, d.differing) for d in compare(a, b)] == [("embed", 0), ("head", 4)]
    assert [d.name for d in compare(tied, tied)] == ["embed"]
    assert [d.name for d in compare(tied, tied, names=["head"])] == ["head"]


def test_results_come_in_the_order_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BLOCK", 64)
    sizes = [0, 500, 1, 0, 300, 2, 0, 0]
    arrays = {(f"t{i}", "weight"): np.arange(n, dtype=np.float64) for i, n in enumerate(sizes)}
    other = dict(reversed(arrays.items()))
    progress: list[tuple[int, int]] = []
    found = list(
        compare(fake(arrays), fake(other), workers=4, progress=lambda *p: progress.append(p))
    )
    assert [(d.name, d.elements) for d in found] == [(f"t{i}", n) for i, n in enumerate(sizes)]
    assert progress[-1] == (sum(sizes) * 16, sum(sizes) * 16)
    assert [d for d, _ in progress] == sorted(d for d, _ in progress)
    assert {total for _, total in progress} == {sum(sizes) * 16}


def test_whoever_stops_listening_ends_it() -> None:
    arrays = {(f"t{i}", "weight"): np.arange(9.0) for i in range(50)}
    store = RecordingStore(MemoryStore("compare-stopped"))
    source = FakeSource.write(store, arrays)
    stream = compare(Checkpoint(source), fake(arrays), workers=1)
    assert next(stream).name == "t0"
    close(stream)
    assert len(store.reads) < 50


def close(stream: Iterator[Any]) -> None:
    stream.close()  # type: ignore[attr-defined]


def test_wrong_arguments_are_told_at_once() -> None:
    with pytest.raises(UsageError, match="workers"):
        compare(fake({}), fake({}), workers=0)
    with pytest.raises(NotFound):
        compare(MemoryStore("compare-nowhere"), fake({}))


def test_damage_is_no_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BLOCK", 5000)  # no multiple of a row of chunks
    a = np.arange(256 * 16, dtype=np.float32).reshape(256, 16)
    ck = ucformat.convert(fake({("w", "weight"): a}), tmp_path / "ck", chunk_bytes=1024)
    assert ck.manifest.tensors[0].chunk is not None
    assert ck.manifest.tensors[0].chunk[0] > 1
    other = fake({("w", "weight"): a + 1})
    assert len(list(compare(ck, other))) == 1
    (file,) = (p for p in (tmp_path / "ck").rglob("c/**/*") if p.is_file())
    whole = file.read_bytes()
    for chunk in range(16):
        data = bytearray(whole)
        data[chunk * 1028 + 7] ^= 1
        file.write_bytes(data)
        for pair in ((ck, other), (other, ck)):
            with pytest.raises(ChecksumError, match="w "):
                list(compare(*pair))


# Memory


def sparse(folder: Path, shape: tuple[int, ...], dtype: str, fill: int) -> Checkpoint:
    """A checkpoint of one large tensor, every byte `fill`; zeros take no room on the disk."""
    store = LocalStore(folder)
    info = TensorInfo("large", "weight", dtype, shape)
    folder.mkdir()
    with (folder / "rank0.bin").open("wb") as out:
        if fill:
            for _ in range(0, info.nbytes, 1 << 20):
                out.write(bytes([fill]) * (1 << 20))
        out.truncate(info.nbytes)
    facts = CheckpointMetadata(tensor_list=TensorList((info,), {}), files=("rank0.bin",))
    return Checkpoint(FakeSource(store, facts, {Key("large", "weight"): 0}, 1))


@pytest.mark.front("shape0-*", "shape1-*")
@pytest.mark.parametrize(
    ("shape", "dtype", "fill"),
    [
        ((400 << 18,), "float32", 0),  # 400 MiB in one dim
        ((2, 200 << 18), "float32", 0),  # rows larger than a block
        ((3, 1 << 26), "float8_e4m3fn", 0x38),  # small elements, all of which differ
        ((12, 1 << 20), "complex128", 0x38),
    ],
)
def test_memory_does_not_grow_with_the_tensors(
    tmp_path: Path, shape: tuple[int, ...], dtype: str, fill: int
) -> None:
    a, b = sparse(tmp_path / "a", shape, dtype, 0), sparse(tmp_path / "b", shape, dtype, fill)
    assert a["large"].nbytes > 2 * (64 << 20)
    tracemalloc.start()
    try:
        (found,) = compare(a, b, workers=2)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.differing == (a["large"].size if fill else 0)
    assert found.equal is not bool(fill)
    assert peak < 2 * (64 << 20)


def test_one_byte_in_a_large_tensor_is_found(tmp_path: Path) -> None:
    shape = (3, 20 << 20)
    a, b = sparse(tmp_path / "a", shape, "float32", 0), sparse(tmp_path / "b", shape, "float32", 0)
    with (tmp_path / "b" / "rank0.bin").open("r+b") as out:
        out.seek(b["large"].nbytes - 2)
        out.write(b"\x80\x3f")  # the last element is 1.0
    (found,) = compare(a, b)
    assert (found.differing, found.max_abs, found.max_rel) == (1, 1.0, 1.0)
