"""Every dtype of safetensors, PyTorch and ml_dtypes, through every form, source and exporter; and unknown ones.

The names are those of the packages themselves, so a new version of one that defines another makes a test fail.
"""

from __future__ import annotations

import json
import re
import shutil
import struct
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

import ucformat
import ucformat.torch
from tests.cli.conftest import object_of, run
from tests.fakes import FakeSource, random_array, same
from tests.sources.suite import read_whole
from ucformat.checkpoint import Checkpoint
from ucformat.errors import LayoutError, StateMismatch, UnsupportedError
from ucformat.exporters import EXPORTERS
from ucformat.jobs.convert import convert
from ucformat.jobs.export import export
from ucformat.jobs.materialize import materialize
from ucformat.jobs.verify import verify
from ucformat.reading.dtypes import dtype_name, numpy_dtype
from ucformat.schema import CASTABLE, ITEMSIZE, NUMBERS, TORCH_SAVE_DTYPES
from ucformat.sources.safetensors.opened import DTYPES, PACKED
from ucformat.storage.local import LocalStore
from ucformat.torch.state.elements import host_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.cli.conftest import Run

__all__ = ["run"]  # the fixture

DATA = Path(__file__).parent / "data"

pytestmark = pytest.mark.filterwarnings(
    "ignore:ComplexHalf support", "ignore:.*uantize", "ignore:torch.distributed is disabled"
)

deserialize: Any = safetensors.deserialize

TORCH = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
QUANTIZED = {name for name in TORCH if name.startswith(("qint", "quint"))}
STORED_BY_TORCH = sorted(TORCH.keys() - QUANTIZED)


def torch_tensor(name: str, seed: int = 0, shape: tuple[int, ...] = (3, 4)) -> torch.Tensor:
    """Random bits."""
    raw = random_array(shape, name, seed).tobytes()
    out = torch.empty(shape, dtype=TORCH[name])
    host_memory(out)[...] = np.frombuffer(raw, np.uint8)
    return out


def bits(tensor: torch.Tensor) -> bytes:
    return host_memory(tensor.contiguous()).tobytes()


def safetensors_file(path: Path, tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> None:
    """A file of tensors: their dtypes and shapes as the header has them, and their bytes."""
    header: dict[str, Any] = {}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    data = b"".join(data for _, _, data in tensors.values())
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def every_safetensors_dtype() -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    out: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    for number, (theirs, ours) in enumerate(DTYPES.items()):
        values, elements = PACKED.get(ours, (1, 1))
        data = random_array((3, 8 * elements // values), ours, number).tobytes()
        out[f"m.{theirs}"] = (theirs, (3, 8), data)
    return out


def test_the_names_are_those_of_the_packages() -> None:
    assert set(STORED_BY_TORCH) <= ITEMSIZE.keys()
    theirs = {np.dtype(v).name for n, v in vars(ml_dtypes).items() if isinstance(v, type) and "info" not in n}
    assert theirs <= ITEMSIZE.keys()
    with pytest.raises(safetensors.SafetensorError) as caught:
        deserialize(b'\x39\0\0\0\0\0\0\0{"a":{"dtype":"F9","shape":[1],"data_offsets":[0,2]}}     ..')
    assert set(re.findall("`([A-Z]+[0-9]*(?:_[A-Z0-9]+)?)`", str(caught.value))) - {"F9"} == DTYPES.keys()
    for name, itemsize in ITEMSIZE.items():
        dtype = numpy_dtype(name)
        assert (dtype.itemsize, dtype_name(dtype)) == (itemsize, name)
        assert TORCH.get(name, torch.uint8).itemsize == itemsize or name not in TORCH


@pytest.mark.parametrize("form", ["zarr", "packed"])
def test_a_training_state_of_every_dtype_of_torch(form: Any, tmp_path: Path) -> None:
    state = {name: torch_tensor(name, n) for n, name in enumerate(STORED_BY_TORCH)}
    ucformat.torch.save({"model": state, "small": {"t": torch_tensor("float4_e2m1fn_x2")}}, tmp_path / "a", form=form)
    ck = ucformat.open(tmp_path / "a")
    assert {n: ck[n].info.dtype for n in ck if n in state} == {n: n for n in STORED_BY_TORCH}
    copy = tmp_path / "b"
    materialize(ck, copy) if form == "packed" else convert(ck, copy)
    for place in (tmp_path / "a", copy):
        template = {name: torch_tensor(name, 99) for name in state}
        small = {"t": torch_tensor("float4_e2m1fn_x2", 5)}
        assert ucformat.torch.load({"model": template, "small": small}, place)
        assert {n: bits(t) for n, t in template.items()} == {n: bits(t) for n, t in state.items()}
        assert bits(small["t"]) == bits(torch_tensor("float4_e2m1fn_x2"))
        assert not verify(place).problems
    found = ucformat.torch.state_dict(copy, list(state))
    assert {n: (t.dtype, bits(t)) for n, t in found.items()} == {n: (t.dtype, bits(t)) for n, t in state.items()}


def test_files_of_safetensors_of_every_dtype(tmp_path: Path) -> None:
    tensors = every_safetensors_dtype()
    safetensors_file(tmp_path / "model.safetensors", tensors)
    ck = ucformat.open(tmp_path / "model.safetensors")
    assert not ck.unreadable
    assert {n: ck[n].read().tobytes() for n in ck} == {n: data for n, (_, _, data) in tensors.items()}
    assert {n: ck[n].info.dtype for n in ck} == {n: DTYPES[dtype] for n, (dtype, _, _) in tensors.items()}
    convert(ck, tmp_path / "arrays")
    convert(ck, tmp_path / "files", weights="safetensors")
    for place in (tmp_path / "arrays", tmp_path / "files"):
        assert read_whole(ucformat.open(place)) == read_whole(ck)
        assert not verify(place).problems
        export(place, tmp_path / "back" / place.name, "safetensors")
        made = (tmp_path / "back" / place.name / "model.safetensors").read_bytes()
        theirs = {n: (v["dtype"], tuple(v["shape"]), bytes(v["data"])) for n, v in deserialize(made)}
        assert theirs == tensors


def test_files_of_torch_save_of_every_dtype(tmp_path: Path) -> None:
    saved = {name: torch_tensor(name, n) for n, name in enumerate(sorted(TORCH_SAVE_DTYPES))}
    torch.save(saved, tmp_path / "m.pt")
    ck = ucformat.open(tmp_path / "m.pt")
    assert not ck.unreadable
    assert {n: (ck[n].info.dtype, ck[n].read().tobytes()) for n in ck} == {n: (n, bits(t)) for n, t in saved.items()}
    convert(ck, tmp_path / "u")
    export(tmp_path / "u", tmp_path / "back.pt", "torch")
    found = torch.load(tmp_path / "back.pt", weights_only=True)
    assert {n: (t.dtype, bits(t)) for n, t in found.items()} == {n: (t.dtype, bits(t)) for n, t in saved.items()}


@pytest.mark.filterwarnings("ignore")
def test_checkpoints_of_dcp_of_every_dtype(tmp_path: Path) -> None:
    names = sorted(name for name in TORCH_SAVE_DTYPES if not name.startswith("bits"))  # of which DCP knows no size
    saved = {name: torch_tensor(name, n) for n, name in enumerate(names)}
    dcp.save({"model": saved}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    ck = ucformat.open(tmp_path / "dcp")
    assert not ck.unreadable
    assert {ck[n].info.dtype: ck[n].read().tobytes() for n in ck} == {n: bits(t) for n, t in saved.items()}
    convert(ck, tmp_path / "u")
    export(tmp_path / "u", tmp_path / "back", "dcp")
    found = {name: torch_tensor(name, 99) for name in saved}
    dcp.load({"model": found}, checkpoint_id=tmp_path / "back", no_dist=True)
    assert {n: bits(t) for n, t in found.items()} == {n: bits(t) for n, t in saved.items()}


@given(st.sampled_from(sorted(ITEMSIZE)), st.sampled_from(sorted(EXPORTERS)), st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_an_export_has_the_bits_or_names_the_tensor(
    tmp_path_factory: pytest.TempPathFactory, dtype: str, kind: str, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("export")
    arrays = {("layer.w", "weight"): random_array((4, 12), dtype, seed), ("z", "weight"): np.ones((2, 2), "float32")}
    ck = Checkpoint(FakeSource.write(LocalStore(folder / "s"), arrays))
    options: dict[str, Any] = {"raw": True} if kind in ("npy", "npz") else {}
    try:
        export(ck, folder / ("out.npz" if kind == "npz" else "out"), kind, **options)
    except ucformat.errors.UcformatError as error:
        if dtype not in EXPORTERS[kind].dtypes:
            assert error.message.startswith(f"layer.w (weight) has the dtype {dtype}, which")  # noqa: PT017
        else:
            assert kind.startswith(("deepspeed", "megatron"))
        return
    if kind in ("npy", "npz"):
        return
    again = ucformat.open(folder / "out")
    (name,) = (n for n in again if n.endswith("layer.w"))
    assert again[name].info.dtype == dtype
    assert same(again[name].read(), arrays["layer.w", "weight"])


def test_a_cast_takes_only_numbers(tmp_path: Path) -> None:
    assert CASTABLE < NUMBERS
    wide = FakeSource.write(LocalStore(tmp_path), {("w", "weight"): np.zeros((2, 4), "float32")})
    for dtype in ITEMSIZE:
        arrays = {("w", "weight"): np.zeros((2, 4), numpy_dtype(dtype))}
        ck = Checkpoint(FakeSource.write(LocalStore(tmp_path / dtype), arrays))
        if dtype in NUMBERS:
            assert ck.view([{"cast": "*", "dtype": "float32"}])["w"].read().dtype == np.float32
        else:
            with pytest.raises(LayoutError, match="is not cast"):
                ck.view([{"cast": "*", "dtype": "float32"}])
        if dtype not in CASTABLE | {"float32"}:
            with pytest.raises(LayoutError):
                Checkpoint(wide).view([{"cast": "*", "dtype": dtype}])


def unknown_in_safetensors(folder: Path) -> Path:
    zeros = struct.pack("<4f", 0, 1, 2, 3)
    safetensors_file(folder / "m.safetensors", {"a": ("F32", (4,), zeros), "bad": ("F9_E4M4", (4,), b"12345")})
    return folder / "m.safetensors"


def rename_dtype(data: bytes) -> bytes:
    """Let torch.uint16 in a pickle be a dtype of a future version."""
    assert b"uint16" in data
    return data.replace(b"uint16", b"float9")


def unknown_in_torch_save(folder: Path) -> Path:
    torch.save({"a": torch.arange(4.0), "bad": torch.zeros(3, dtype=torch.uint16)}, folder / "saved.pt")
    with zipfile.ZipFile(folder / "saved.pt") as saved, zipfile.ZipFile(folder / "m.pt", "w") as out:
        for name in saved.namelist():
            data = saved.read(name)
            out.writestr(name, rename_dtype(data) if name.endswith("data.pkl") else data)
    return folder / "m.pt"


def quantized_in_torch_save(folder: Path) -> Path:
    bad = torch.quantize_per_tensor(torch.rand(2, 4), 0.1, 0, torch.qint8)
    torch.save({"a": torch.arange(4.0), "bad": bad}, folder / "m.pt")
    return folder / "m.pt"


def unknown_in_dcp(folder: Path) -> Path:
    state = {"a": torch.arange(4.0), "bad": torch.zeros(3, dtype=torch.uint16)}
    dcp.save(state, checkpoint_id=folder / "dcp", no_dist=True)
    path = folder / "dcp" / ".metadata"
    path.write_bytes(rename_dtype(path.read_bytes()))
    return folder / "dcp"


def unknown_in_zarr(folder: Path) -> Path:
    zarr = pytest.importorskip("zarr")
    group = zarr.open_group(folder / "z", mode="w")
    group.create_array("a", shape=(4,), dtype="f4")[...] = np.arange(4)
    group.create_array("bad", shape=(4,), dtype="f4")[...] = np.arange(4)
    path = folder / "z" / "bad" / "zarr.json"
    path.write_text(path.read_text().replace('"float32"', '"float9"'))
    return folder / "z"


UNKNOWN = [unknown_in_safetensors, unknown_in_torch_save, quantized_in_torch_save, unknown_in_dcp, unknown_in_zarr]


@pytest.mark.parametrize("make", UNKNOWN)
def test_a_dtype_that_nobody_knows_refuses_only_its_tensor(make: Any, tmp_path: Path, run: Run) -> None:
    place = make(tmp_path)
    ck = ucformat.open(place)
    assert [key.name for key in ck.unreadable] == ["bad"]
    assert list(ck) == ["a"]
    assert ck["a"].read().tolist() == [0, 1, 2, 3]
    assert "bad" not in ck
    for use in (
        lambda: ck["bad"],
        lambda: ck["bad", "weight"],
        lambda: convert(ck, tmp_path / "out"),
        lambda: export(ck, tmp_path / "out", "safetensors"),
        lambda: ucformat.torch.state_dict(ck),
        lambda: ucformat.torch.state_dict(ck, "bad"),
    ):
        with pytest.raises(UnsupportedError, match=r"bad \(weight\)") as error:
            use()
        assert "drop" in str(error.value.hint)
    assert not (tmp_path / "out").exists()
    assert list(ucformat.torch.state_dict(ck, "a")) == ["a"]
    with pytest.raises(StateMismatch, match=r"bad \(weight\) in the checkpoint"):
        ucformat.torch.load({"a": torch.zeros(4), "bad": torch.zeros(4)}, place)
    report = ucformat.torch.load({"a": torch.zeros(4), "bad": torch.zeros(4)}, place, strict=False)
    assert not report
    assert [problem.name for problem in verify(place).problems] == ["bad"]
    shown = run("show", place)
    assert "bad (weight)" in shown.stdout
    assert [entry["name"] for entry in object_of(run("show", place, "--json").stdout)["unreadable"]] == ["bad"]
    (tmp_path / "view.yaml").write_text("version: 1\nview:\n  - drop: [bad]\n")
    view = ucformat.open(place, view=tmp_path / "view.yaml")
    assert not view.unreadable
    assert list(convert(view, tmp_path / "out")) == ["a"]
    assert list(ck.view([{"rename": "(bad)", "to": "worse"}]).unreadable) == [("bad", "weight")]
    assert list(ck.view([{"rename": "/(bad)/", "to": r"\1.x"}]).unreadable) == [("bad.x", "weight")]
    assert not ck.view([{"keep": "a"}]).unreadable


def with_unknown_dtype(path: Path, change: Callable[[Any], Any]) -> None:
    """Change the value of a file of torch.save, whose tensors of uint16 are then of a dtype of a future version."""
    torch.save(change(torch.load(path, weights_only=False)), path)
    with zipfile.ZipFile(path) as saved:
        members = {name: saved.read(name) for name in saved.namelist()}
    with zipfile.ZipFile(path, "w") as out:
        for name, data in members.items():
            out.writestr(name, rename_dtype(data) if name.endswith("data.pkl") else data)


def one_unknown(*path: str) -> Callable[[Any], Any]:
    def change(value: Any) -> Any:
        inner = value
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = torch.zeros(inner[path[-1]].shape, dtype=torch.uint16)
        return value

    return change


@pytest.mark.parametrize(
    ("folder", "pattern", "where", "unreadable"),
    [
        (
            "deepspeed/universal-z1/ckpt",
            "model.norm.weight/exp_avg.pt",
            ("param",),
            {("model.norm.weight", "exp_avg")},
        ),
        (
            "deepspeed/tp2-z0/ckpt",
            "mp_rank_0?_model_states.pt",
            ("module", "model.norm.weight"),
            {("model.norm.weight", state) for state in ("weight", "exp_avg", "exp_avg_sq", "step")},
        ),
        (
            "megatron/tp2-tied/classic",
            "model_optim_rng.pt",
            ("model", "decoder.final_layernorm.weight"),
            {("decoder.final_layernorm.weight", state) for state in ("weight", "exp_avg", "exp_avg_sq", "step")},
        ),
    ],
)
def test_an_unknown_dtype_in_files_of_engines(
    tmp_path: Path, folder: str, pattern: str, where: tuple[str, ...], unreadable: set[tuple[str, str]]
) -> None:
    """The tensor is refused; if it is a weight, then so are its states, which are cut as it is."""
    whole = ucformat.open(DATA / folder)
    place = shutil.copytree(DATA / folder, tmp_path / "src")
    for path in place.rglob(pattern):
        with_unknown_dtype(path, one_unknown(*where))
    ck = ucformat.open(place)
    assert set(ck.unreadable) == unreadable
    assert set(ck.tensors) == set(whole.tensors) - unreadable
    assert all(same(ck[key].read(), whole[key].read()) for key in ck.tensors)
    with pytest.raises(UnsupportedError, match="float9"):
        convert(ck, tmp_path / "out")


def test_an_unknown_dtype_in_bytecheckpoint(tmp_path: Path) -> None:
    place = shutil.copytree(DATA / "bytecheckpoint" / "fsdp" / "ckpt", tmp_path / "src")
    whole = ucformat.open(place)
    path = place / "global_step_2" / "model" / ".metadata"
    path.write_bytes(path.read_bytes().replace(b"float32", b"float99"))
    ck = ucformat.open(place)
    assert {state for _, state in ck.unreadable} == {"weight"}
    assert set(ck.tensors) == {key for key in whole.tensors if key.state != "weight"}
    assert all(same(ck[key].read(), whole[key].read()) for key in ck.tensors)


def test_quantized_tensors_are_not_saved(tmp_path: Path) -> None:
    tensor = torch.quantize_per_tensor(torch.rand(2, 4), 0.1, 0, torch.qint8)
    with pytest.raises(ucformat.errors.UcformatError, match="w is a quantized tensor"):
        ucformat.torch.save({"w": tensor}, tmp_path / "a")
    assert not (tmp_path / "a").exists()
