"""The Zarr store of a run: what zarr-python, TensorStore and xarray read through it is what its checkpoints hold."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tensorstore
import xarray as xr
import zarr
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync

import ucformat
from tests.fakes import random_array, same
from tests.runs.test_run import FORMS, STEPS, arrays_at, save
from tests.torch.runs import fill
from ucformat.errors import UsageError
from ucformat.storage.url import open_store

if TYPE_CHECKING:
    from pathlib import Path

    from tests.s3 import Bucket
    from ucformat.runs.run import Run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Of several forms, with a tensor of more than one chunk."""
    folder = tmp_path_factory.mktemp("stores") / "run"
    for step, form in zip(STEPS, FORMS, strict=True):
        save(folder / f"step-{step}", step, all_at(step), form, 1 << 17)
    return ucformat.run(folder)


def all_at(step: int) -> Any:
    return arrays_at(step) | {("large", "weight"): random_array((700, 640), "float32", step)}


def stack(name: str, state: str = "weight") -> Any:
    return np.stack([all_at(step)[name, state] for step in STEPS])


def test_zarr_python_reads_every_array(run: Run) -> None:
    group = zarr.open_group(run.zarr_store())
    seen = set()
    for state, arrays in group.groups():
        coordinate: Any = arrays["step"]
        assert same(np.asarray(coordinate[...]), np.array(STEPS, "int64"))
        for name, array in arrays.arrays():
            if name == "step":
                continue
            told: Any = array.attrs["ucformat"]
            seen.add((told["name"], told["state"]))
            assert told["state"] == state
            assert same(np.asarray(array[...]), stack(told["name"], told["state"])), name
            assert array.chunks[0] == 1
    assert seen == set(all_at(0))
    large: Any = group["weight/large"]
    assert large.chunks[1:] != (700, 640)
    assert same(np.asarray(large[1:4, 300:500, 7]), stack("large")[1:4, 300:500, 7].copy())


def test_a_tensor_that_is_named_step_has_another_name(run: Run) -> None:
    group = zarr.open_group(run.zarr_store(["step"]))
    weight: Any = group["weight"]
    (name,) = set(weight.array_keys()) - {"step"}
    assert name.startswith("step~")
    assert same(np.asarray(weight[name][...]), stack("step"))


def test_xarray_selects_by_step(run: Run) -> None:
    store = run.zarr_store(["a", "large", "scalar"])
    weights = xr.open_zarr(store, group="weight", consolidated=False)
    assert weights["step"].values.tolist() == list(STEPS)
    assert set(weights.coords) == {"step"}
    large = weights["large"]
    assert large.dims == ("step", "size_700", "size_640")
    assert same(large.sel(step=21).values, all_at(21)["large", "weight"])
    assert same(large.sel(step=slice(10, 21)).values, stack("large")[1:4])
    assert same(weights["scalar"].values, stack("scalar"))
    moments = xr.open_zarr(store, group="exp_avg", consolidated=False, chunks=None)
    assert same(moments["a"].values, stack("a", "exp_avg"))


def test_tensorstore_reads_a_copy(run: Run, tmp_path: Path) -> None:
    store = run.zarr_store()

    async def copy() -> None:
        async for key in store.list():
            value = await store.get(key, default_buffer_prototype())
            assert value is not None
            (tmp_path / key).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / key).write_bytes(value.to_bytes())

    sync(copy())
    for name, expected in (("large", stack("large")), ("a", stack("a"))):
        at = f"file://{tmp_path}/weight/{name}/|zarr3:"
        array = tensorstore.open(at).result()
        assert array.domain.labels[0] == "step"
        assert same(np.asarray(array.read().result()), expected)
    steps = tensorstore.open(f"file://{tmp_path}/weight/step/|zarr3:").result()
    assert steps.read().result().tolist() == list(STEPS)


def test_it_cannot_be_written_and_goes_to_other_processes(run: Run) -> None:
    store = run.select([10, 20]).zarr_store(["a"])
    again = pickle.loads(pickle.dumps(store))  # noqa: S301
    assert again == store != run.zarr_store(["a"])
    assert repr(again) == f"RunStore({run.url!r})"
    array: Any = zarr.open_group(again.with_read_only(True), mode="r")["exp_avg/a"]
    assert same(np.asarray(array[...]), stack("a", "exp_avg")[1:3])
    with pytest.raises(ValueError, match="read-only"):
        zarr.open_group(store)["weight"].create_array("b", shape=(1,), dtype="i4")  # type: ignore[union-attr]


def test_tensors_that_are_not_the_same_at_all_steps_are_named(tmp_path: Path) -> None:
    for step in (1, 2):
        shapes = {"grows": (step,), "w": (2,)}
        arrays = {(n, "weight"): random_array(s, "float32", step) for n, s in shapes.items()}
        if step == 2:
            arrays["new", "weight"] = random_array((2,), "float32", 3)
        save(tmp_path / "run" / str(step), step, arrays)
    run = ucformat.run(tmp_path / "run")
    with pytest.raises(UsageError, match=r"grows \(weight\) at step 2, new \(weight\) at step 2"):
        run.zarr_store()
    assert set(zarr.open_group(run.zarr_store("w"))["weight"].array_keys()) == {"step", "w"}  # type: ignore[union-attr]
    with pytest.raises(UsageError, match="no tensor 'none'"):
        run.zarr_store(["none", "w"])


def test_it_reads_an_object_store(bucket: Bucket, tmp_path: Path) -> None:
    fill(tmp_path / "run7", 5, 6)
    local, remote = open_store(tmp_path / "run7"), open_store(bucket.place())
    for info in local.list():
        remote.put_if_absent(info.key, local.read(info.key))
    run = ucformat.run(remote.url)
    array: Any = zarr.open_group(run.zarr_store())["weight/a"]
    assert same(np.asarray(array[...]), run["a"][...])
