"""Lazy tensors against NumPy's own indexing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import ucformat
import ucformat.torch
from tests.fakes import FakeSource, random_array, same
from ucformat.checkpoint import Checkpoint
from ucformat.errors import TensorNotFound, UsageError
from ucformat.reading.lazy import Tensor
from ucformat.storage.memory import MemoryStore
from ucformat.storage.wrappers import RecordingStore

if TYPE_CHECKING:
    from pathlib import Path

ALL = ucformat.Layout(mesh={"dp": 1}, rules=[{"match": "*", "place": ["replicate"]}])
ARRAYS = {
    ("a", "weight"): random_array((7, 9, 5), "float32", 1),
    ("scalar", "weight"): random_array((), "int64", 2),
    ("empty", "weight"): random_array((3, 0), "bfloat16", 3),
    ("only.master", "master"): random_array((4,), "float32", 4),
    ("both", "weight"): random_array((4,), "bfloat16", 5),
    ("both", "master"): random_array((4,), "float32", 6),
    ("a", "exp_avg"): random_array((7, 9, 5), "float32", 7),
    ("halves", "weight"): random_array((5, 6), "bfloat16", 8),
    ("small", "weight"): random_array((3, 4, 2), "float8_e5m2", 9),
    ("wide", "weight"): random_array((4, 3), "complex128", 10),
    ("flags", "weight"): random_array((4, 3), "bool", 11),
}


@pytest.fixture(scope="module", params=["foreign", "universal"])
def ck(request: pytest.FixtureRequest) -> Checkpoint:
    source = Checkpoint(FakeSource.write(MemoryStore("tensor"), ARRAYS, aliases={"tied": "a"}))
    if request.param == "foreign":
        return source
    return ucformat.convert(
        source, MemoryStore("tensor-universal"), chunk_bytes=64, shard_bytes=200, overwrite=True
    )


@given(index=hnp.basic_indices((7, 9, 5), allow_newaxis=False))
def test_basic_indexing_is_numpys(ck: Checkpoint, index: Any) -> None:
    expected = np.asarray(ARRAYS["a", "weight"][index])
    found = np.asarray(ck["a"][index])
    assert same(found, np.ascontiguousarray(expected).reshape(expected.shape))


def test_whole_tensors(ck: Checkpoint) -> None:
    for (name, state), a in ARRAYS.items():
        t = ck[name, state]
        assert (t.shape, t.dtype, t.nbytes, t.size, t.ndim) == (
            a.shape,
            a.dtype,
            a.nbytes,
            a.size,
            a.ndim,
        )
        assert same(t[...], a)
        assert same(np.asarray(t), a)
        assert same(t.read(), a)


def test_a_slice_of_rows_reads_only_those_rows(ck: Checkpoint) -> None:
    recorder = RecordingStore(ck.store)
    inner, ck.source.store = ck.source.store, recorder
    try:
        ck["a"][2:4]
    finally:
        ck.source.store = inner
    assert recorder.nbytes <= 2 * 9 * 5 * 4 + 8 * 4 + 64


def test_reading_into_memory_of_the_callers(ck: Checkpoint) -> None:
    space = np.zeros((14, 9, 6), np.float32)
    out = space[::2, :, 1:]
    assert ck["a"].read(out=out) is out
    assert same(np.ascontiguousarray(out), ARRAYS["a", "weight"])
    assert not space[1::2].any()
    assert not space[:, :, 0].any()


@pytest.mark.parametrize(
    ("out", "why"),
    [
        (np.full((7, 9, 5), 3, np.float64), "dtype float64"),
        (np.full((7, 9), 3, np.float32), r"shape \(7, 9\)"),
        (np.full((7, 9, 5), 3, ">f4"), "dtype >f4"),
        (np.full((7, 9, 5), 3, np.int32), "dtype int32"),
        (
            np.lib.stride_tricks.as_strided(np.full(9, 3, np.float32), (7, 9, 5), (0, 4, 0)),
            "share memory",
        ),
        (
            np.lib.stride_tricks.as_strided(np.full(99, 3, np.float32), (7, 9, 5), (20, 4, 36)),
            "share memory",
        ),
        (
            np.lib.stride_tricks.as_strided(np.full(999, 3, np.float32), (7, 9, 5), (90, 10, 2)),
            "share memory",
        ),
        (np.broadcast_to(np.float32(3), (7, 9, 5)), "read-only"),
        (np.ma.masked_array(np.full((7, 9, 5), 3, np.float32)), "mask"),
        (np.full((7, 9, 5), 3, np.float32).tolist(), "is a list"),
        (memoryview(bytes(10)), "is a memoryview"),
        (torch.full((7, 9, 5), 3.0), "is a Tensor"),
    ],
)
def test_memory_that_does_not_fit_is_refused(ck: Checkpoint, out: Any, why: str) -> None:
    before = np.asarray(out).tobytes()
    for read in (
        lambda: ck["a"].read(out=out),
        lambda: ck.plan(ALL, 0).execute({("a", "weight"): out}),
    ):
        with pytest.raises(UsageError, match=why):
            read()
    assert np.asarray(out).tobytes() == before


def test_arrays_that_share_memory_are_refused(ck: Checkpoint) -> None:
    space = np.full(2 * 7 * 9 * 5, 3, np.float32)
    into = {
        ("a", "weight"): space[:315].reshape(7, 9, 5),
        ("a", "exp_avg"): space[314:629].reshape(7, 9, 5),
    }
    with pytest.raises(UsageError, match="share memory"):
        ck.plan(ALL, 0).execute(into)
    with pytest.raises(UsageError, match="not contiguous"):
        ck.plan(ALL, 0).execute(
            {("a", "weight"): np.full((9, 7, 5), 3, np.float32).transpose(1, 0, 2)}
        )
    with pytest.raises(UsageError, match="no buffer"):
        ck.plan(ALL, 0).execute({("b", "weight"): space, **into})
    assert (space == 3).all()
    into["a", "exp_avg"] = space[315:].reshape(7, 9, 5)
    ck.plan(ALL, 0).execute(into)
    assert all(same(a, ARRAYS[key]) for key, a in into.items())


@st.composite
def destinations(
    draw: st.DrawFn, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> tuple[Any, Any, Any]:
    """Bytes of a canary, an array of a shape and dtype that lies somewhere in them, and each byte's owner."""
    item, dims = dtype.itemsize, list(range(len(shape)))
    order = draw(st.permutations(dims))
    strides, span = [0] * len(shape), item
    for (
        d
    ) in order:  # from the innermost outwards, each with a gap that need be no multiple of anything
        strides[d] = (span + draw(st.sampled_from([0, 0, 0, 1, 2, item, 13]))) * draw(
            st.sampled_from([1, 1, -1])
        )
        span = abs(strides[d]) * (shape[d] - 1) + span
    before = draw(st.integers(0, 20))
    raw = np.full(before + span + 20, 0xA5, np.uint8)
    first = before + sum(-s * (n - 1) for s, n in zip(strides, shape, strict=True) if s < 0)
    out = np.ndarray(shape, dtype, raw.data, first, tuple(strides))
    where = np.ndarray((*shape, item), np.intp)
    where[...] = first + np.arange(item)
    for d, s in enumerate(strides):
        where += (np.arange(shape[d]) * s).reshape(
            [-1 if k == d else 1 for k in range(len(shape) + 1)]
        )
    return raw, out, where


@pytest.mark.parametrize("key", [k for k, a in ARRAYS.items() if a.size], ids=str)
@given(data=st.data())
@settings(max_examples=40)
def test_memory_of_any_strides_is_filled_exactly_and_nothing_beside_it(
    ck: Checkpoint, key: tuple[str, str], data: st.DataObject
) -> None:
    a = ARRAYS[key]
    raw, out, where = data.draw(destinations(a.shape, a.dtype))
    expected = raw.copy()
    expected[where] = a.reshape(a.shape or (1,)).view(np.uint8).reshape(*a.shape, a.itemsize)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "ucformat.reading.lazy._BUFFER_BYTES", data.draw(st.sampled_from([1, 200, 64 << 20]))
        )
        assert ck[key].read(out=out) is out
    assert raw.tobytes() == expected.tobytes()


def test_fields_of_structured_arrays(ck: Checkpoint) -> None:
    """Their strides are no multiple of the item's size: what is between them belongs to other fields."""
    a = ARRAYS["a", "weight"]
    space = np.zeros(a.shape, [("before", "u1"), ("x", "<f4"), ("after", "<u2")])
    space["before"], space["after"] = 0xA5, 0xA5A5
    ck["a"].read(out=space["x"])
    assert same(np.ascontiguousarray(space["x"]), a)
    assert (space["before"] == 0xA5).all()
    assert (space["after"] == 0xA5A5).all()


def test_subclasses_that_are_plain_memory(ck: Checkpoint, tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "x", np.float32, "w+", shape=(7, 9, 5))
    assert ck["a"].read(out=mapped) is mapped
    mapped.flush()
    assert (tmp_path / "x").read_bytes() == ARRAYS["a", "weight"].tobytes()
    record = np.zeros((7, 9, 5), [("i", "u1"), ("x", "<f4")]).view(np.recarray)
    ck["a"].read(out=record.x)
    assert same(np.ascontiguousarray(record.x), ARRAYS["a", "weight"])


def test_read_only_memory_is_refused(ck: Checkpoint) -> None:
    out = np.zeros((7, 9, 5), np.float32)
    out.flags.writeable = False
    with pytest.raises(UsageError, match="read-only"):
        ck["a"].read(out=out)


@pytest.mark.parametrize(
    "index", [[1, 2], np.array([True] * 7), 1.5, "x", None, (0, 0, 0, 0), (..., ...), True]
)
def test_indices_that_cannot_be_read_exactly_are_refused(ck: Checkpoint, index: Any) -> None:
    with pytest.raises(UsageError, match="a \\(weight\\)"):
        ck["a"][index]


def test_an_index_out_of_bounds_is_an_index_error(ck: Checkpoint) -> None:
    with pytest.raises(IndexError, match="index 7 is out of bounds for dim 0 of size 7"):
        ck["a"][7]


def test_the_default_state_is_weight_then_master(ck: Checkpoint) -> None:
    assert ck["both"].state == "weight"
    assert ck["only.master"].state == "master"
    assert ck.states("both") == ["weight", "master"]


def test_aliases_work_wherever_names_do(ck: Checkpoint) -> None:
    assert same(ck["tied"][...], ARRAYS["a", "weight"])
    assert ck["tied"].name == "a"
    assert "tied" in ck
    assert "tied" not in ck.names()
    assert ck.states("tied") == ["weight", "exp_avg"]


def test_a_missing_tensor_is_a_key_error_that_offers_the_nearest(ck: Checkpoint) -> None:
    with pytest.raises(KeyError, match="has no tensor 'scalr'") as caught:
        ck["scalr"]
    assert "did you mean scalar" in str(caught.value)
    with pytest.raises(TensorNotFound, match="in state 'exp_avg'") as caught:
        ck["both", "exp_avg"]
    assert "weight, master" in str(caught.value)
    assert "nothing" not in ck
    assert not ck.__contains__(7)


def test_a_copy_is_needed_and_said(ck: Checkpoint) -> None:
    with pytest.raises(ValueError, match="without a copy"):
        np.asarray(ck["a"], copy=False)
    assert np.asarray(ck["scalar"], dtype=np.float64).dtype == np.float64


@given(
    rows=st.tuples(st.integers(0, 7), st.integers(0, 7)),
    verify=st.sampled_from(["whole", "always", "never"]),
)
def test_every_way_of_verifying_reads_the_same(
    ck: Checkpoint, rows: tuple[int, int], verify: Any
) -> None:
    assert same(ck["a"].read(verify=verify), ARRAYS["a", "weight"])
    assert same(ck["a"][rows[0] : rows[1]], ARRAYS["a", "weight"][rows[0] : rows[1]])


def test_dlpack_of_numpys_dtypes_needs_no_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays: dict[Any, Any] = {
        (name, "weight"): np.ones(2, name) for name in ("bool", "uint8", "float16", "complex64")
    }
    ucformat.convert(Checkpoint(FakeSource.write(MemoryStore("dlpack"), arrays)), tmp_path / "a")
    monkeypatch.delattr(Tensor, "torch")
    for name, tensor in ucformat.open(tmp_path / "a").items():
        assert np.from_dlpack(tensor).tobytes() == np.ones(2, name).tobytes()


def test_tensors_of_pytorch(tmp_path: Path) -> None:
    """Of every dtype, 0-d and empty ones too; `torch.as_tensor` reads once, and not element by element."""
    torch = pytest.importorskip("torch")
    dtypes = (
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float16,
        torch.float32,
        torch.int64,
        torch.bool,
    )
    state = {
        f"{d}{s}".replace("torch.", ""): torch.ones(s).mul(3).to(d)
        for d in dtypes
        for s in ((2, 3), (), (0, 3))
    }
    ucformat.torch.save({"model": state}, tmp_path / "a")
    with ucformat.open(tmp_path / "a") as opened:
        assert opened._ipython_key_completions_() == [*state, *((name, "weight") for name in state)]
        for name, wanted in state.items():
            tensor = opened[name]
            for found in (tensor.torch(), torch.as_tensor(tensor), torch.from_dlpack(tensor)):
                assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
                assert torch.equal(found.to(torch.float64), wanted.to(torch.float64))
            assert tensor.numpy().tobytes() == tensor[...].tobytes()
            if hasattr(np, tensor.dtype.name):
                assert np.from_dlpack(tensor).tobytes() == tensor[...].tobytes()
            else:  # as docs/api.md tells
                with pytest.raises(RuntimeError, match="Unsupported dtype in DLTensor"):
                    np.from_dlpack(tensor)
