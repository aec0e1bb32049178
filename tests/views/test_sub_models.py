"""Sub-models: indices of dims, layers and experts that a view takes, against NumPy and torch."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ucformat
from tests.fakes import Arrays, FakeSource, random_array, same
from tests.packed import write_packed
from tests.sources.suite import DATA
from tests.views.random_steps import drawn, read_all
from ucformat.checkpoint import Checkpoint
from ucformat.errors import LayoutError, UnsupportedError
from ucformat.storage.local import LocalStore
from ucformat.storage.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

ALIASES = {"head.w": "l.0.w"}


def model() -> Arrays:
    """Three layers with optimizer states, a stack of experts and a norm; values are exact in float64."""
    rng = np.random.default_rng(4)
    shapes = {f"l.{i}.{n}": shape for i in range(3) for n, shape in (("w", (12, 8)), ("v", (12, 8)), ("b", (12,)))}
    shapes |= {"experts": (4, 6, 5), "norm": (8,), "scalar": ()}
    out: Arrays = {
        (n, s): rng.standard_normal(shape, np.float32) for n, shape in shapes.items() for s in ("weight", "exp_avg")
    }
    return out | {(n, "step"): np.array(i, np.float32) for i, n in enumerate(shapes)}


def in_memory(_: Path) -> Checkpoint:
    return Checkpoint(FakeSource.write(MemoryStore("sub"), model(), aliases=ALIASES))


def as_arrays(folder: Path) -> Checkpoint:
    ucformat.convert(in_memory(folder), folder / "arrays", chunk_bytes=64, shard_bytes=256)
    return ucformat.open(folder / "arrays")


def as_packed(folder: Path) -> Checkpoint:
    (folder / "packed").mkdir()
    return write_packed(LocalStore(folder / "packed"), model(), block_bytes=64)


def as_virtual(folder: Path) -> Checkpoint:
    ucformat.convert(as_arrays(folder), folder / "virtual", virtual=True)
    return ucformat.open(folder / "virtual")


def as_safetensors(folder: Path) -> Checkpoint:
    from safetensors.numpy import save_file

    save_file({n: a for (n, s), a in model().items() if s == "weight"}, folder / "model.safetensors")
    return ucformat.open(folder)


def as_deepspeed(_: Path) -> Checkpoint:
    return ucformat.open(next(p for p in sorted((DATA / "deepspeed").iterdir()) if p.is_dir()))


SOURCES: dict[str, Callable[[Path], Checkpoint]] = {
    "memory": in_memory,
    "arrays": as_arrays,
    "packed": as_packed,
    "virtual": as_virtual,
    "safetensors": as_safetensors,
    "deepspeed": as_deepspeed,
}


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Checkpoint, Any]]:
    """Returns a source, and its tensors."""

    @cache
    def open_it(name: str) -> tuple[Checkpoint, Any]:
        ck = SOURCES[name](tmp_path_factory.mktemp(name))
        return ck, read_all(ck)

    return open_it


@pytest.mark.parametrize("name", SOURCES)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_any_steps_make_what_numpy_makes(
    opened: Callable[[str], tuple[Checkpoint, Any]], name: str, data: st.DataObject
) -> None:
    ck, tensors = opened(name)
    chosen = data.draw(drawn(tensors))
    view = ck.view(chosen.steps)
    assert sorted((*view, *view.aliases)) == sorted(chosen.made)
    for tensor, states in chosen.made.items():
        assert view.states(tensor) == list(states)
        for state, array in states.items():
            assert same(view[tensor, state].read(), array), (tensor, state)
            if array.ndim and array.shape[0]:
                start = data.draw(st.integers(0, array.shape[0] - 1))
                assert same(view[tensor, state][start:], np.array(array[start:], order="C"))
