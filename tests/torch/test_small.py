"""Small tensors are stored together if there are many, so that a checkpoint does not consist of tiny files."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ucformat
import ucformat.torch as ucf
from tests.conformance import reader
from tests.torch.ranks import Ranks
from ucformat.format.arrays import MOST_SMALL_ARRAYS, SMALL_BYTES
from ucformat.torch.comm import group
from ucformat.torch.saving import agree

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

MANY = 2000


def files(place: Path) -> list[str]:
    return [f.name for f in place.rglob("*") if f.is_file()]


def state_of(count: int) -> dict[str, torch.Tensor]:
    small = {f"layers.{n}.scale": torch.full((1 + n % 3,), float(n)) for n in range(count)}
    return {**small, "large": torch.arange(SMALL_BYTES // 4, dtype=torch.float32)}


def convert_packed(state: dict[str, Any], place: Path) -> None:
    ucf.save(state, place.with_name("packed"), form="packed")
    ucformat.convert(place.with_name("packed"), place)


WRITERS: dict[str, Callable[[dict[str, Any], Path], Any]] = {
    "save": lambda state, place: ucf.save(state, place, form="zarr"),
    "Writer": lambda state, place: dcp.save(state, storage_writer=ucf.Writer(place), no_dist=True),
    "async_save": lambda state, place: ucf.async_save(state, place).wait(),
    "convert": convert_packed,
}


@pytest.mark.parametrize("writer", WRITERS)
def test_many_small_tensors_make_few_files(writer: str, tmp_path: Path) -> None:
    state, place = state_of(MANY if writer == "save" else MOST_SMALL_ARRAYS + 1), tmp_path / "ck"
    WRITERS[writer](state, place)
    assert len(files(place)) < 20
    ck = ucformat.open(place)
    assert len(ck) == len(state)
    ucformat.verify(ck).raise_if_damaged()
    arrays = [t for t in ck.manifest.tensors if t.path is not None]
    assert [t.name for t in arrays] == ["large"]  # of the threshold itself
    assert arrays[0].digest is not None
    found = {name: torch.zeros_like(t) for name, t in state.items()}
    assert ucf.load(found, place)
    assert all(torch.equal(found[name], t) for name, t in state.items())
    again = {name: torch.zeros_like(t) for name, t in state.items()}
    dcp.load(again, storage_reader=ucf.Reader(place), no_dist=True)
    assert all(torch.equal(again[name], t) for name, t in state.items())
    second = {doc["name"]: data for doc, data in reader.Checkpoint(place)}
    assert second == {n: t.numpy().tobytes() for n, t in state.items()}


@pytest.mark.skipif(
    importlib.util.find_spec("zarr") is None, reason="zarr is not installed: pip install zarr"
)
def test_zarr_readers_open_what_are_arrays_and_the_store_shows_all(tmp_path: Path) -> None:
    import zarr

    state = state_of(MOST_SMALL_ARRAYS + 1)
    ucf.save(state, tmp_path / "ck")
    ck = ucformat.open(tmp_path / "ck")
    group = zarr.open_group(str(ck.zarr_url), mode="r")
    assert list(group["weight"].array_keys()) == ["large"]  # type: ignore[union-attr]
    assert (group["weight/large"][...] == state["large"].numpy()).all()  # type: ignore[index]
    everything = zarr.open_group(ck.zarr_store(), mode="r")
    assert (everything["weight/layers.7.scale"][...] == 7).all()  # type: ignore[index, union-attr]


@pytest.mark.parametrize("form", ["packed", "zarr", "safetensors"])
def test_a_process_alone_plans_equal_states_once(
    form: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = mock.Mock(side_effect=agree.join)
    monkeypatch.setattr(group, "_kept_alone", {})
    monkeypatch.setattr(agree, "join", plans)
    first = {n: torch.full((8,), float(n)) for n in range(5)}
    tied = torch.ones(8)
    states = [first, {n: t + 1 for n, t in first.items()}]
    states += [first | {2: torch.ones(4, 2)}, first | {2: torch.ones(8).double()}]
    states += [first | {2: tied, 3: tied}, first | {5: torch.ones(())}, first]
    expected = [1, 1, 2, 3, 4, 5, 6]
    for number, (state, planned) in enumerate(zip(states, expected, strict=True)):
        weights = {f"w{n}": t for n, t in state.items()}
        ucf.save({"model": weights, "step": number}, tmp_path / f"{number}", form=form)
        assert plans.call_count == planned
        ucformat.verify(tmp_path / f"{number}").raise_if_damaged()
        loaded = {name: torch.zeros_like(t) for name, t in weights.items()}
        values = {"model": loaded, "step": -1}
        ucf.load(values, tmp_path / f"{number}")
        assert values["step"] == number
        assert all(torch.equal(loaded[name], t) for name, t in weights.items())


def test_as_many_as_may_be_arrays_are_arrays(tmp_path: Path) -> None:
    ucf.save(state_of(MOST_SMALL_ARRAYS), tmp_path / "ck")
    assert all(t.path is not None for t in ucformat.open(tmp_path / "ck").manifest.tensors)


def test_a_copy_has_the_same_files_and_materialize_makes_arrays(tmp_path: Path) -> None:
    state = state_of(MOST_SMALL_ARRAYS + 1)
    saved = ucf.save(state, tmp_path / "ck")
    ucformat.copy(tmp_path / "ck", tmp_path / "copy")
    assert sorted(set(files(tmp_path / "copy")) - {".ucf-lock"}) == sorted(
        set(files(tmp_path / "ck")) - {".ucf-lock"}
    )
    ucformat.materialize(tmp_path / "ck")
    ck = ucformat.open(tmp_path / "ck")
    assert ck.id == saved.id
    assert all(t.path is not None and t.digest is not None for t in ck.manifest.tensors)
    assert not [f for f in files(tmp_path / "ck") if f.startswith("rank-")]
    for place in ("copy", "ck"):
        found = ucformat.open(tmp_path / place)
        assert all((found[name][...] == t.numpy()).all() for name, t in state.items())
        ucformat.verify(found).raise_if_damaged()


def test_safetensors_beside_small_states_and_arrays(tmp_path: Path) -> None:
    model = {f"w{n}": torch.full((2,), float(n)) for n in range(MOST_SMALL_ARRAYS + 1)}
    states = {name: {"exp_avg": t + 1, "step": torch.tensor(3.0)} for name, t in model.items()}
    states["w0"]["exp_avg"] = torch.arange(SMALL_BYTES // 4 + 1.0)
    optimizer = {"state": states, "param_groups": [{"params": list(model)}]}
    state = {"model": {**model, "w0": torch.zeros(SMALL_BYTES // 4 + 1)}, "optimizer": optimizer}
    ucf.save(state, tmp_path / "ck", form="safetensors")
    ucformat.convert(tmp_path / "ck", tmp_path / "again", weights="safetensors")
    for name in ("ck", "again"):
        assert len(files(tmp_path / name)) < 20
        ck = ucformat.open(tmp_path / name)
        assert Path(str(ck.hf_url), "model.safetensors").exists()
        ucformat.verify(ck).raise_if_damaged()
        assert [t.name for t in ck.manifest.tensors if t.path is not None] == ["w0"]
        for key in ck.tensors:
            group = state["model"] if key.state == "weight" else states[key.name]
            assert (
                ck[key][...] == group[key.name if key.state == "weight" else key.state].numpy()
            ).all(), key


def test_states_that_are_named_like_packed_files(tmp_path: Path) -> None:
    names = ["rank-00000.bin", "RANK-00001.BIN", "small-00000.bin", "extents.safetensors"]
    param = {name: torch.arange(SMALL_BYTES // 4 + 1.0) + n for n, name in enumerate(names)}
    optimizer = {"state": {"w": param}, "param_groups": [{"params": ["w"]}]}
    ucf.save(
        {"model": {"w": torch.zeros(SMALL_BYTES), **state_of(MANY)}, "optimizer": optimizer},
        tmp_path / "ck",
    )
    ucformat.convert(tmp_path / "ck", tmp_path / "again")
    for place in ("ck", "again"):
        ck = ucformat.open(tmp_path / place)
        assert {key.state for key in ck.tensors} == {"weight", *names}
        ucformat.verify(ck).raise_if_damaged()
        assert all((ck["w", name][...] == t.numpy()).all() for name, t in param.items())


@pytest.mark.front("safetensors")
@pytest.mark.parametrize("form", ["zarr", "safetensors"])
def test_on_several_ranks_and_onto_others(form: str, tmp_path: Path) -> None:
    ranks = Ranks("tests.torch.small_program")
    held = ranks.run("saved", 2, tmp_path, form=form)
    assert all(
        n <= MOST_SMALL_ARRAYS for n in held
    )  # so a rank alone does not know that there are many
    assert len(files(tmp_path / form)) < 20
    ucformat.verify(tmp_path / form).raise_if_damaged()
    for size in (1, 3):
        assert ranks.run("loaded", size, tmp_path, form=form) == [True] * size


def test_ranks_that_disagree_on_a_size_commit_nothing(tmp_path: Path) -> None:
    found = Ranks("tests.torch.small_program").run("disagreeing", 2, tmp_path)
    for kind, message in found:
        assert kind == "UsageError"
        assert "odd (weight)" in message
    assert not (tmp_path / "ck" / "manifest.json").exists()


def test_a_conversion_in_two_parts(tmp_path: Path) -> None:
    state = state_of(MOST_SMALL_ARRAYS + 1)
    ucf.save(state, tmp_path / "packed", form="packed")
    ucp = [
        sys.executable,
        "-m",
        "ucformat",
        "convert",
        str(tmp_path / "packed"),
        str(tmp_path / "ck"),
        "--on",
    ]
    for on in ("part:0/2", "part:1/2", "commit"):
        done = subprocess.run([*ucp, on], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    ck = ucformat.open(tmp_path / "ck")
    assert len(files(tmp_path / "ck")) < 20
    ucformat.verify(ck).raise_if_damaged()
    assert all((ck[name][...] == t.numpy()).all() for name, t in state.items())
