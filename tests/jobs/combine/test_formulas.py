"""Every method equals its reference on whole tensors, bit for bit, whatever the shapes, dtypes and grids."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import uuid
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ucformat
from tests.fakes import same
from tests.jobs.combine import reference
from tests.jobs.combine.reference import rounded, source
from ucformat.geometry.box import Box
from ucformat.jobs.combine import formulas, job
from ucformat.jobs.combine import methods as thresholds
from ucformat.reading.dtypes import numpy_dtype
from ucformat.storage.memory import MemoryStore

if TYPE_CHECKING:
    from ucformat.checkpoint import Checkpoint

DTYPES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
SHAPES = st.lists(st.integers(0, 13), max_size=3).map(tuple)


class Models:
    """Some models of the same tensors, each perhaps in another dtype, and a grid for the result."""

    def __init__(self, data: st.DataObject, least: int = 2) -> None:
        count = data.draw(st.integers(least, 5))
        self.shapes = {
            f"t{n}": s for n, s in enumerate(data.draw(st.lists(SHAPES, min_size=1, max_size=3)))
        }
        self.dtypes = [data.draw(st.sampled_from(DTYPES)) for _ in range(count)]
        rng = np.random.default_rng(data.draw(st.integers(0, 99)))
        base = {name: rng.standard_normal(shape) for name, shape in self.shapes.items()}
        self.tensors = [
            {n: rounded(b + rng.integers(-3, 4, b.shape) / 4, dtype) for n, b in base.items()}
            for dtype in self.dtypes
        ]
        self.sources = [source(tensors) for tensors in self.tensors]
        self.cast = data.draw(st.sampled_from((None, "bfloat16", "float64")))
        sizes = {"chunk_bytes": (64, 1 << 10), "shard_bytes": (64, 1 << 14), "workers": (1, 3)}
        self.options: dict[str, Any] = {k: data.draw(st.integers(*v)) for k, v in sizes.items()}
        self.options["cast"] = self.cast
        self.weights = data.draw(
            st.lists(st.sampled_from((0.25, 0.3, 1.0, 2.0, 3.0)), min_size=count, max_size=count)
        )
        self.target = MemoryStore(f"target-{uuid.uuid4().hex}")

    def wide(self, name: str) -> list[Any]:
        return [tensors[name].astype(np.float64) for tensors in self.tensors]

    def check(self, ck: Checkpoint, expected: Any) -> None:
        for name in self.shapes:
            assert same(
                ck[name][...], rounded(np.asarray(expected(name)), self.cast or self.dtypes[0])
            ), name


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut small tensors as large ones are."""
    monkeypatch.setattr(job, "_READ_BYTES", 3000)
    monkeypatch.setattr(job, "_BLOCK", 77)
    monkeypatch.setattr(thresholds, "_COUNTED", 8)
    monkeypatch.setattr(thresholds, "_LEAST", 16)
    monkeypatch.setattr(thresholds, "_SAMPLED", 100)


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_average(data: st.DataObject) -> None:
    m = Models(data)
    weights = data.draw(st.sampled_from((None, m.weights)))
    ck = ucformat.average(m.sources, m.target, weights=weights, **m.options)
    m.check(ck, lambda name: reference.average(m.wide(name), weights))


@given(st.data())
@settings(max_examples=15, deadline=None)
def test_task_arithmetic(data: st.DataObject) -> None:
    m = Models(data)
    base, *tuned = m.sources
    weights, scale = m.weights[1:], data.draw(st.sampled_from((0.3, 1.0)))
    ck = ucformat.merge(
        "task-arithmetic", tuned, m.target, base=base, weights=weights, scale=scale, **m.options
    )
    m.check(
        ck,
        lambda name: reference.task_arithmetic(m.wide(name)[0], m.wide(name)[1:], weights, scale),
    )


@given(st.data())
@settings(max_examples=15, deadline=None)
def test_slerp(data: st.DataObject) -> None:
    m = Models(data)
    t = data.draw(st.sampled_from((0.0, 0.25, 0.5, 1.0)))
    m.cast = m.options["cast"] = (
        "float32"  # in float64, sums in another order differ in the last bit
    )
    ck = ucformat.merge("slerp", m.sources[:2], m.target, t=t, **m.options)
    for name in m.shapes:
        expected = reference.slerp(m.wide(name)[0], m.wide(name)[1], t)
        np.testing.assert_array_max_ulp(ck[name][...], np.asarray(expected, np.float32), 1)


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_ties(data: st.DataObject) -> None:
    m = Models(data)
    base, *tuned = m.sources
    weights, scale = m.weights[1:], data.draw(st.sampled_from((0.5, 1.0)))
    density = data.draw(st.sampled_from((0.01, 0.2, 0.5, 0.9, 1.0)))
    more = {"density": density, "scale": scale, **m.options}
    ck = ucformat.merge("ties", tuned, m.target, base=base, weights=weights, **more)
    m.check(
        ck, lambda name: reference.ties(m.wide(name)[0], m.wide(name)[1:], weights, density, scale)
    )


@given(st.data())
@settings(max_examples=15, deadline=None)
def test_dare(data: st.DataObject) -> None:
    m = Models(data)
    base, *tuned = m.sources
    weights, seed = m.weights[1:], data.draw(st.integers(0, 2**70))
    density = data.draw(st.sampled_from((0.1, 0.5, 1.0)))
    more = {"density": density, "seed": seed, **m.options}
    ck = ucformat.merge("dare", tuned, m.target, base=base, weights=weights, **more)
    m.check(
        ck,
        lambda name: reference.dare(
            m.wide(name)[0], m.wide(name)[1:], weights, density, 1, seed, name
        ),
    )


@given(st.data())
@settings(max_examples=15, deadline=None)
def test_a_moving_average_is_its_recursion(data: st.DataObject) -> None:
    m = Models(data)
    decay = data.draw(st.sampled_from((0.0, 0.5, 0.99)))
    m.cast = m.options["cast"] = "float32"
    steps = data.draw(st.permutations(range(len(m.sources))))
    ordered = sorted(range(len(m.sources)), key=steps.__getitem__)
    sources = [source(tensors, step=step) for tensors, step in zip(m.tensors, steps, strict=True)]
    ck = ucformat.average(sources, m.target, ema=decay, **m.options)
    for name in m.shapes:
        xs = [m.wide(name)[n] for n in ordered]
        expected = np.asarray(reference.moving_average(xs, decay), np.float32)
        np.testing.assert_allclose(ck[name][...], expected, rtol=3e-7, atol=1e-12)
    assert math.isclose(sum(e.how["weight"] for e in ck.manifest.lineage), 1)
    assert [e.how["step"] for e in ck.manifest.lineage] == sorted(steps)


@given(st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=8), st.floats(1e-3, 1e3))
def test_the_weights_of_a_softmax(scores: list[float], temperature: float) -> None:
    weights = formulas.softmax_weights(scores, temperature)
    assert math.isclose(math.fsum(weights), 1)
    found = list(zip(scores, weights, strict=True))
    assert all(w >= v for s, w in found for r, v in found if s > r)
    with np.errstate(all="ignore"):
        shifted = np.exp((np.array(scores) - max(scores)) / temperature)
    np.testing.assert_allclose(weights, shifted / shifted.sum(), rtol=1e-12)


@given(st.integers(1, 30), st.floats(0, 0.9999))
def test_the_weights_of_a_moving_average(count: int, decay: float) -> None:
    units = np.eye(count)
    weights = formulas.ema_weights(decay, count)
    np.testing.assert_allclose(weights, reference.moving_average(list(units), decay), rtol=1e-12)


@given(st.data())
@settings(deadline=None)
def test_a_mask_depends_on_no_block(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple))
    start = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    size = tuple(data.draw(st.integers(1, n - a)) for n, a in zip(shape, start, strict=True))
    whole = reference.kept(7, "w", 1, shape, 0.4)
    _, part = formulas.dare_masks(7, "w", 2, shape, Box(start, size), 0.4)
    cut = tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))
    assert np.array_equal(part.reshape(size), whole[cut])


def test_masks_are_independent_and_have_their_density() -> None:
    box = Box.whole((1000, 1000))
    masks = [
        mask
        for seed, name, inputs in ((1, "a", 2), (1, "b", 1), (2, "a", 1))
        for mask in formulas.dare_masks(seed, name, inputs, (1000, 1000), box, 0.3)
    ]
    assert len(masks) == 4
    for n, mask in enumerate(masks):
        assert abs(mask.mean() - 0.3) < 0.003
        assert all(abs((mask & other).mean() - 0.09) < 0.003 for other in masks[n + 1 :])
    rows = masks[0].reshape(1000, 1000)
    assert np.abs(rows.mean(0) - 0.3).max() < 0.08
    assert np.abs(rows.mean(1) - 0.3).max() < 0.08


VALUES = (
    st.sampled_from((0.0, 1.0, -1.0, 1 + 2**-52, -0.5, 5e-324, 1e300, float("inf"))),
    st.floats(-1e308, 1e308),
    st.floats(1, 1 + 2**-40),
)


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_thresholds_are_those_of_sorting(
    monkeypatch: pytest.MonkeyPatch, data: st.DataObject
) -> None:
    """With many equal magnitudes, some that differ in the last bit only, and samples that mislead."""
    inputs, length = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 150))
    monkeypatch.setattr(thresholds, "_DEVIATIONS", data.draw(st.sampled_from((-1, 0, 4))))
    of_input = st.one_of(*(st.lists(v, min_size=length, max_size=length) for v in VALUES))
    values = [data.draw(of_input) for _ in range(inputs)]
    if data.draw(st.booleans()):
        values = [sorted(found, key=abs) for found in values]
    rank = data.draw(st.integers(1, length))
    size = data.draw(st.integers(1, 60))
    starts = range(0, length, size)

    def scan(find: Any, fold: Any) -> Any:
        found = [
            find(
                iter(
                    [np.zeros(len(v[a : a + size])) for v in values[:1]]
                    + [np.array(v[a : a + size]) for v in values]
                )
            )
            for a in starts
        ]
        while len(found) > 1:
            a, b = (
                found.pop(),
                found.pop(data.draw(st.integers(0, len(found) - 1)) if len(found) > 1 else 0),
            )
            found.append(fold(a, b))
        return found[0]

    expected = [sorted(map(abs, found))[-rank] for found in values]
    assert thresholds.find_thresholds(scan, inputs, rank, length) == expected


@pytest.mark.parametrize("kind", ["normal", "bfloat16", "equal", "zero", "outliers", "columns"])
def test_thresholds_of_large_tensors(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample suffices for nearly all; what it hides is found all the same, and little is kept in memory."""
    monkeypatch.undo()
    monkeypatch.setattr(thresholds, "_COUNTED", 1 << 12)
    monkeypatch.setattr(thresholds, "_SAMPLED", 1 << 12)
    rng, size, most, rounds = np.random.default_rng(0), 1 << 20, 1 << 14, 0
    x = rng.standard_normal(size)
    if kind == "bfloat16":
        x = x.astype(numpy_dtype("bfloat16")).astype(float)
    elif kind in ("equal", "zero"):
        x[:] = kind == "equal"
    elif kind == "outliers":
        x[rng.integers(0, size, 9)] = 1e300
        x[: size // 2] = 0
    elif kind == "columns":  # which a sample that takes each 256th element would not see
        x.reshape(-1, 4096)[:, ::16] *= 1000
    for rank in (1, 7, size // 1000, size // 5, size // 2, size - 3, size):

        def scan(find: Any, fold: Any) -> Any:
            nonlocal rounds
            rounds, found = rounds + 1, None
            for a in range(0, size, most):
                one = find(iter([np.zeros(most), x[a : a + most].copy()]))
                found = one if found is None else fold(found, one)
                assert sum(map(len, (found[0].keys, *found[0].new))) <= most + (1 << 13)
            return found

        rounds = 0
        assert thresholds.find_thresholds(scan, 1, rank, size) == [np.sort(np.abs(x))[-rank]]
        assert rounds <= (4 if kind == "columns" else 3)


def test_the_means_of_a_second_moment_are_arithmetic() -> None:
    rng = np.random.default_rng(0)
    states = ("weight", "exp_avg", "exp_avg_sq")
    xs = [{("w", s): rng.random((5, 3)).astype(np.float32) for s in states} for _ in range(3)]
    plain = ucformat.average([source(x) for x in xs], MemoryStore(f"t-{uuid.uuid4().hex}"))
    assert {k.state for k in plain.tensors} == {"weight"}
    ck = ucformat.average(
        [source(x) for x in xs],
        MemoryStore(f"t-{uuid.uuid4().hex}"),
        states=states,
        weights=[1, 2, 1],
    )
    for s in states:
        expected = np.average(
            [x["w", s].astype(float) for x in xs], axis=0, weights=[1, 2, 1]
        ).astype(np.float32)
        assert same(ck["w", s][...], expected)


def test_the_average_of_equal_checkpoints_is_the_same() -> None:
    rng = np.random.default_rng(0)
    tensors = {d: rng.standard_normal(999).astype(numpy_dtype(d)) for d in DTYPES}
    ck = ucformat.average(
        [source(tensors) for _ in range(10)], MemoryStore(f"t-{uuid.uuid4().hex}")
    )
    assert all(same(ck[name][...], a) for name, a in tensors.items() if name != "float64")
    np.testing.assert_array_max_ulp(ck["float64"][...], tensors["float64"], 4)


def test_importing_the_face_loads_no_numpy() -> None:
    code = "import sys, json, ucformat; print(json.dumps('numpy' in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) is False


@pytest.mark.parametrize(
    ("rank", "expected"),
    [(1, (8, 16)), (3, (8, 16)), (4, (7, 8)), (5, (7, 8)), (6, (5, 6)), (7, (0, 4))],
)
def test_a_rank_is_among_what_was_counted_or_beside_it(
    rank: int, expected: tuple[int, int]
) -> None:
    counts = thresholds._Counts(
        above=3, new=[], keys=np.array([5, 7], "u8"), numbers=np.array([1, 2])
    )
    assert counts.range_of(rank, beside=(4, 8), within=(0, 16)) == expected
