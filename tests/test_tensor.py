"""Lazy tensors against NumPy's own indexing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import ucformat
from tests.fakes import FakeSource, random_array, same
from ucformat.checkpoint import Checkpoint
from ucformat.errors import TensorNotFound, UsageError
from ucformat.storage.memory import MemoryStore
from ucformat.storage.recording import RecordingStore

ARRAYS = {
    ("a", "weight"): random_array((7, 9, 5), "float32", 1),
    ("scalar", "weight"): random_array((), "int64", 2),
    ("empty", "weight"): random_array((3, 0), "bfloat16", 3),
    ("only.master", "master"): random_array((4,), "float32", 4),
    ("both", "weight"): random_array((4,), "bfloat16", 5),
    ("both", "master"): random_array((4,), "float32", 6),
}


@pytest.fixture(scope="module", params=["foreign", "universal"])
def ck(request: pytest.FixtureRequest) -> Checkpoint:
    source = Checkpoint(FakeSource.write(MemoryStore("tensor"), ARRAYS, aliases={"tied": "a"}))
    if request.param == "foreign":
        return source
    return ucformat.convert(source, MemoryStore("tensor-universal"), chunk_bytes=64, shard_bytes=200, overwrite=True)


@given(index=hnp.basic_indices((7, 9, 5), allow_newaxis=False))
def test_basic_indexing_is_numpys(ck: Checkpoint, index: Any) -> None:
    expected = np.asarray(ARRAYS["a", "weight"][index])
    found = np.asarray(ck["a"][index])
    assert same(found, np.ascontiguousarray(expected).reshape(expected.shape))


def test_whole_tensors(ck: Checkpoint) -> None:
    for (name, state), a in ARRAYS.items():
        t = ck[name, state]
        assert (t.shape, t.dtype, t.nbytes, t.size, t.ndim) == (a.shape, a.dtype, a.nbytes, a.size, a.ndim)
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
    "out",
    [np.zeros((7, 9, 5), np.float64), np.zeros((7, 9), np.float32), np.zeros((7, 9, 5), np.float32)[::-1]],
)
def test_memory_that_does_not_fit_is_refused(ck: Checkpoint, out: Any) -> None:
    with pytest.raises(UsageError):
        ck["a"].read(out=out)


def test_read_only_memory_is_refused(ck: Checkpoint) -> None:
    out = np.zeros((7, 9, 5), np.float32)
    out.flags.writeable = False
    with pytest.raises(UsageError, match="read-only"):
        ck["a"].read(out=out)


@pytest.mark.parametrize("index", [[1, 2], np.array([True] * 7), 1.5, "x", None, (0, 0, 0, 0), (..., ...), True])
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
    assert ck.states("tied") == ["weight"]


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


@given(rows=st.tuples(st.integers(0, 7), st.integers(0, 7)), verify=st.sampled_from(["whole", "always", "never"]))
def test_every_way_of_verifying_reads_the_same(ck: Checkpoint, rows: tuple[int, int], verify: Any) -> None:
    assert same(ck["a"].read(verify=verify), ARRAYS["a", "weight"])
    assert same(ck["a"][rows[0] : rows[1]], ARRAYS["a", "weight"][rows[0] : rows[1]])
