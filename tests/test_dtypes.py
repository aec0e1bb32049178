"""Every dtype of safetensors, PyTorch and ml_dtypes, through every form, source and exporter; and unknown ones.

The names are those of the packages themselves, so a new version of one that defines another makes a
test fail.
"""

from __future__ import annotations

import json
import pickle
import re
import shutil
import struct
import sys
import types
import zipfile
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

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
from ucformat.checkpoint import Checkpoint
from ucformat.errors import IntegrityError, LayoutError, StateMismatch, UnsupportedError
from ucformat.exporters.registry import EXPORTERS
from ucformat.jobs.convert import convert
from ucformat.jobs.export import export
from ucformat.jobs.materialize import materialize
from ucformat.jobs.verify import verify
from ucformat.reading.dtypes import dtype_name, numpy_dtype
from ucformat.schema import (
    CASTABLE,
    ITEMSIZE,
    NUMBERS,
    SAFETENSORS_DTYPES,
    SAFETENSORS_PACKED,
    TORCH_SAVE_DTYPES,
)
from ucformat.storage.local import LocalStore
from ucformat.testing.sources import read_whole
from ucformat.torch.state.elements import host_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.cli.conftest import Run

__all__ = ["run"]  # the fixture

DATA = Path(__file__).parent / "data"

pytestmark = pytest.mark.filterwarnings(
    "ignore:ComplexHalf support",
    "ignore:.*uantize",
    "ignore:torch.distributed is disabled",
    "ignore:.*(Sparse|nested|MaskedTensor|Masked)",
)

deserialize: Any = safetensors.deserialize

TORCH = {
    str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)
}
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
    for number, (theirs, ours) in enumerate(SAFETENSORS_DTYPES.items()):
        values, elements = SAFETENSORS_PACKED.get(ours, (1, 1))
        data = random_array((3, 8 * elements // values), ours, number).tobytes()
        out[f"m.{theirs}"] = (theirs, (3, 8), data)
    return out


def test_the_names_are_those_of_the_packages() -> None:
    assert set(STORED_BY_TORCH) <= ITEMSIZE.keys()
    theirs = {
        np.dtype(v).name
        for n, v in vars(ml_dtypes).items()
        if isinstance(v, type) and "info" not in n
    }
    assert theirs <= ITEMSIZE.keys()
    with pytest.raises(safetensors.SafetensorError) as caught:
        deserialize(
            b'\x39\0\0\0\0\0\0\0{"a":{"dtype":"F9","shape":[1],"data_offsets":[0,2]}}     ..'
        )
    assert (
        set(re.findall("`([A-Z]+[0-9]*(?:_[A-Z0-9]+)?)`", str(caught.value))) - {"F9"}
        == SAFETENSORS_DTYPES.keys()
    )
    for name, itemsize in ITEMSIZE.items():
        dtype = numpy_dtype(name)
        assert (dtype.itemsize, dtype_name(dtype)) == (itemsize, name)
        assert TORCH.get(name, torch.uint8).itemsize == itemsize or name not in TORCH


@pytest.mark.parametrize("form", ["zarr", "packed"])
def test_a_training_state_of_every_dtype_of_torch(form: Any, tmp_path: Path) -> None:
    state = {name: torch_tensor(name, n) for n, name in enumerate(STORED_BY_TORCH)}
    ucformat.torch.save(
        {"model": state, "small": {"t": torch_tensor("float4_e2m1fn_x2")}},
        tmp_path / "a",
        form=form,
    )
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
    assert {n: (t.dtype, bits(t)) for n, t in found.items()} == {
        n: (t.dtype, bits(t)) for n, t in state.items()
    }


def test_files_of_safetensors_of_every_dtype(tmp_path: Path) -> None:
    tensors = every_safetensors_dtype()
    safetensors_file(tmp_path / "model.safetensors", tensors)
    ck = ucformat.open(tmp_path / "model.safetensors")
    assert not ck.unreadable
    assert {n: ck[n].read().tobytes() for n in ck} == {
        n: data for n, (_, _, data) in tensors.items()
    }
    assert {n: ck[n].info.dtype for n in ck} == {
        n: SAFETENSORS_DTYPES[dtype] for n, (dtype, _, _) in tensors.items()
    }
    convert(ck, tmp_path / "arrays")
    convert(ck, tmp_path / "files", weights="safetensors")
    for place in (tmp_path / "arrays", tmp_path / "files"):
        assert read_whole(ucformat.open(place)) == read_whole(ck)
        assert not verify(place).problems
        export(place, tmp_path / "back" / place.name, "safetensors")
        made = (tmp_path / "back" / place.name / "model.safetensors").read_bytes()
        theirs = {
            n: (v["dtype"], tuple(v["shape"]), bytes(v["data"])) for n, v in deserialize(made)
        }
        assert theirs == tensors


def test_files_of_torch_save_of_every_dtype(tmp_path: Path) -> None:
    saved = {name: torch_tensor(name, n) for n, name in enumerate(sorted(TORCH_SAVE_DTYPES))}
    torch.save(saved, tmp_path / "m.pt")
    ck = ucformat.open(tmp_path / "m.pt")
    assert not ck.unreadable
    assert {n: (ck[n].info.dtype, ck[n].read().tobytes()) for n in ck} == {
        n: (n, bits(t)) for n, t in saved.items()
    }
    convert(ck, tmp_path / "u")
    export(tmp_path / "u", tmp_path / "back.pt", "torch")
    found = torch.load(tmp_path / "back.pt", weights_only=True)
    assert {n: (t.dtype, bits(t)) for n, t in found.items()} == {
        n: (t.dtype, bits(t)) for n, t in saved.items()
    }


@pytest.mark.filterwarnings("ignore")
def test_checkpoints_of_dcp_of_every_dtype(tmp_path: Path) -> None:
    names = sorted(
        name for name in TORCH_SAVE_DTYPES if not name.startswith("bits")
    )  # of which DCP knows no size
    saved = {name: torch_tensor(name, n) for n, name in enumerate(names)}
    dcp.save({"model": saved}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    ck = ucformat.open(tmp_path / "dcp")
    assert not ck.unreadable
    assert {ck[n].info.dtype: ck[n].read().tobytes() for n in ck} == {
        n: bits(t) for n, t in saved.items()
    }
    convert(ck, tmp_path / "u")
    export(tmp_path / "u", tmp_path / "back", "dcp")
    found = {name: torch_tensor(name, 99) for name in saved}
    dcp.load({"model": found}, checkpoint_id=tmp_path / "back", no_dist=True)
    assert {n: bits(t) for n, t in found.items()} == {n: bits(t) for n, t in saved.items()}


@given(st.sampled_from(sorted(ITEMSIZE)), st.sampled_from(EXPORTERS.names()), st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_an_export_has_the_bits_or_names_the_tensor(
    tmp_path_factory: pytest.TempPathFactory, dtype: str, kind: str, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("export")
    arrays = {
        ("layer.w", "weight"): random_array((4, 12), dtype, seed),
        ("z", "weight"): np.ones((2, 2), "float32"),
    }
    ck = Checkpoint(FakeSource.write(LocalStore(folder / "s"), arrays))
    options: dict[str, Any] = {"raw": True} if kind in ("npy", "npz") else {}
    try:
        export(ck, folder / ("out.npz" if kind == "npz" else "out"), kind, **options)
    except ucformat.errors.UcformatError as error:
        if dtype not in EXPORTERS[kind].dtypes:
            assert error.message.startswith(f"layer.w (weight) has the dtype {dtype}, which")  # noqa: PT017
        else:
            assert kind.startswith(("deepspeed", "gguf", "megatron"))  # which need their own
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
    safetensors_file(
        folder / "m.safetensors", {"a": ("F32", (4,), zeros), "bad": ("F9_E4M4", (4,), b"12345")}
    )
    return folder / "m.safetensors"


def rename_dtype(data: bytes) -> bytes:
    """Let torch.uint16 in a pickle be a dtype of a future version."""
    assert b"uint16" in data
    return data.replace(b"uint16", b"float9")


def unknown_in_torch_save(folder: Path) -> Path:
    torch.save(
        {"a": torch.arange(4.0), "bad": torch.zeros(3, dtype=torch.uint16)}, folder / "saved.pt"
    )
    with (
        zipfile.ZipFile(folder / "saved.pt") as saved,
        zipfile.ZipFile(folder / "m.pt", "w") as out,
    ):
        for name in saved.namelist():
            data = saved.read(name)
            out.writestr(name, rename_dtype(data) if name.endswith("data.pkl") else data)
    return folder / "m.pt"


def quantized_in_torch_save(folder: Path) -> Path:
    bad = torch.quantize_per_tensor(torch.rand(2, 4), 0.1, 0, torch.qint8)
    torch.save({"a": torch.arange(4.0), "bad": bad}, folder / "m.pt")
    return folder / "m.pt"


def saved_beside(bad: Callable[[], Any]) -> Callable[[Path], Path]:
    """Saves a tensor beside an ordinary one."""

    def make(folder: Path) -> Path:
        torch.save({"a": torch.arange(4.0), "bad": bad()}, folder / "m.pt")
        return folder / "m.pt"

    return make


def nested(**layout: Any) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], **layout)


#: Tensors whose elements are not at one place of a storage as they are, by what is said of them.
ODD_TENSORS: dict[str, Callable[[], Any]] = {
    "sparse_coo": lambda: torch.eye(3).to_sparse(),
    "sparse_csr": lambda: torch.eye(3).to_sparse_csr(),
    "sparse_bsc": lambda: torch.eye(4).to_sparse_bsc((2, 2)),
    "resolve_conj": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "resolve_neg": lambda: torch.ones(3, dtype=torch.complex64).conj().imag,
    "`meta`": lambda: torch.nn.Parameter(torch.empty(3, 4, device="meta")),
    "a nested tensor": nested,
    "NestedTensor": lambda: nested(layout=torch.jagged),
    "MaskedTensor": lambda: torch.masked.masked_tensor(torch.ones(3), torch.ones(3) > 0),
}


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


UNKNOWN: list[Any] = [
    unknown_in_safetensors,
    unknown_in_torch_save,
    quantized_in_torch_save,
    unknown_in_dcp,
    unknown_in_zarr,
]
UNKNOWN += [pytest.param(saved_beside(make), id=what) for what, make in ODD_TENSORS.items()]


@pytest.mark.parametrize("make", UNKNOWN)
def test_a_dtype_that_nobody_knows_refuses_only_its_tensor(
    make: Any, tmp_path: Path, run: Run
) -> None:
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
    assert [
        entry["name"] for entry in object_of(run("show", place, "--json").stdout)["unreadable"]
    ] == ["bad"]
    (tmp_path / "view.yaml").write_text("version: 1\nview:\n  - drop: [bad]\n")
    view = ucformat.open(place, view=tmp_path / "view.yaml")
    assert not view.unreadable
    assert list(convert(view, tmp_path / "out")) == ["a"]
    assert list(ck.view([{"rename": "(bad)", "to": "worse"}]).unreadable) == [("bad", "weight")]
    assert list(ck.view([{"rename": "/(bad)/", "to": r"\1.x"}]).unreadable) == [("bad.x", "weight")]
    assert not ck.view([{"keep": "a"}]).unreadable


@pytest.mark.parametrize("what", ODD_TENSORS)
def test_what_is_said_of_an_odd_tensor(what: str, tmp_path: Path) -> None:
    """Two of them are two tensors, although nothing in the file tells them apart; and so are its values elsewhere."""
    bad = ODD_TENSORS[what]
    torch.save(
        {"model": {"a": torch.ones(2), "x": bad(), "y": bad()}, "seen": [bad()]}, tmp_path / "m.pt"
    )
    ck = ucformat.open(tmp_path / "m.pt")
    assert {key.name for key in ck.unreadable} == {"x", "y", "seen.0"}
    assert all(what in reason for reason in ck.unreadable.values())
    assert ck.objects == {"seen": [{"$ref": "seen.0"}]}


def test_an_odd_item_of_dcp(tmp_path: Path) -> None:
    """Its metadata does not say so: the item does, when it is read."""
    bad = ODD_TENSORS["resolve_conj"]()
    dcp.save({"a": torch.arange(4.0), "bad": bad}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    ck = ucformat.open(tmp_path / "dcp")
    assert ck["a"].read().tolist() == [0, 1, 2, 3]
    with pytest.raises(UnsupportedError, match=r"bad \(weight\)\[0:3\] is conjugated"):
        ck["bad"].read()
    assert [(p.name, "resolve_conj" in p.reason) for p in verify(tmp_path / "dcp").problems] == [
        ("bad", True)
    ]


def with_unknown_dtype(path: Path, change: Callable[[Any], Any]) -> None:
    """Change the value of a file of torch.save, whose tensors of uint16 are then of a dtype of a future version."""
    torch.save(change(torch.load(path, weights_only=False)), path)
    with zipfile.ZipFile(path) as saved:
        members = {name: saved.read(name) for name in saved.namelist()}
    with zipfile.ZipFile(path, "w") as out:
        for name, data in members.items():
            out.writestr(name, rename_dtype(data) if name.endswith("data.pkl") else data)


def one_unknown(*path: Any) -> Callable[[Any], Any]:
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
            {
                ("decoder.final_layernorm.weight", state)
                for state in ("weight", "exp_avg", "exp_avg_sq", "step")
            },
        ),
    ],
)
def test_an_unknown_dtype_in_files_of_engines(
    tmp_path: Path,
    folder: str,
    pattern: str,
    where: tuple[str, ...],
    unreadable: set[tuple[str, str]],
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


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets `torch.load` and `torch.save` handle objects of engines that are not installed."""

    class Kind(type):
        def __getattr__(cls, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return cls(name)  # a member of an enumeration

    class Thing(metaclass=Kind):
        def __new__(cls, *args: Any) -> Self:
            made = super().__new__(cls)
            made.args = args
            return made

        def __init__(self, *_: Any) -> None:
            self.args: tuple[Any, ...]

        def __reduce__(self) -> Any:
            return type(self), self.args, {k: v for k, v in vars(self).items() if k != "args"}

    class Engine(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            found = Kind(name, (Thing,), {"__module__": self.__name__})
            setattr(self, name, found)
            return found

    class Finder(MetaPathFinder, Loader):
        def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
            return (
                ModuleSpec(name, self, is_package=True)
                if name.partition(".")[0] in ("deepspeed", "megatron")
                else None
            )

        def create_module(self, spec: ModuleSpec) -> types.ModuleType:
            monkeypatch.setitem(sys.modules, spec.name, found := Engine(spec.name))
            return found

        def exec_module(self, _: types.ModuleType) -> None:
            pass

    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])


def in_metadata(part: str) -> Callable[[Path], None]:
    """Gives the entries whose names contain this an unknown dtype in the `.metadata` of DCP."""

    def change(path: Path) -> None:
        meta = pickle.loads(path.read_bytes())  # noqa: S301
        for name, entry in meta.state_dict_metadata.items():
            if part in name and hasattr(entry, "properties"):
                entry.properties.dtype = torch.uint16
        path.write_bytes(rename_dtype(pickle.dumps(meta, 2)))

    return change


def in_file(*path: Any) -> Callable[[Path], None]:
    return lambda file: with_unknown_dtype(file, one_unknown(*path))


BUFFER = (0, (torch.bfloat16, torch.float32))
STATES = ("master", "exp_avg", "exp_avg_sq")


@pytest.mark.usefixtures("engines")
@pytest.mark.parametrize(
    ("folder", "pattern", "change", "names", "states"),
    [
        pytest.param(
            "deepspeed/tp2-dp2-z1/ckpt",
            "zero_pp_rank_0_mp_rank_01_optim_states.pt",
            in_file("optimizer_state_dict", "base_optimizer_state", "state", 0, "exp_avg"),
            0,
            ("exp_avg",),
            id="a flat state of ZeRO 1 on one tensor-parallel rank",
        ),
        pytest.param(
            "deepspeed/tp2-dp2-z3/ckpt",
            "*_mp_rank_0?_optim_states.pt",
            in_file("optimizer_state_dict", "fp32_flat_groups", 0),
            0,
            ("master",),
            id="a flat master of ZeRO 3",
        ),
        pytest.param(
            "deepspeed/pp2-z0/ckpt",
            "layer_00-*",
            in_file("weight"),
            "0.weight",
            ("weight", "exp_avg", "exp_avg_sq", "step"),
            id="the first layer of a pipeline",
        ),
        pytest.param(
            "megatron/pp2-bf16-tied/classic",
            "mp_rank_00_001/model_optim_rng.pt",
            in_file("model", "decoder.final_layernorm.weight"),
            "decoder.final_layernorm.weight",
            ("weight", *STATES, "step"),
            id="a weight that has a copy",
        ),
        pytest.param(
            "megatron/tp2-dp2-flat/classic",
            "mp_rank_00/distrib_optim.pt",
            in_file(*BUFFER, "exp_avg"),
            "",
            ("exp_avg",),
            id="a flat buffer of Megatron",
        ),
        pytest.param(
            "megatron/tp2-pp2-flat/classic",
            "distrib_optim.pt",
            in_file(*BUFFER, "param"),
            "",
            STATES,
            id="the fp32 copies in a flat buffer, which alone prove what is where",
        ),
        pytest.param(
            "megatron/tp2-dp2-full/sharded",
            ".metadata",
            in_metadata("exp_avg.decoder.layers.mlp.linear_fc1.weight"),
            "linear_fc1.weight",
            ("exp_avg",),
            id="an entry of torch_dist",
        ),
        pytest.param(
            "megatron/tp2-pp2-flat/sharded",
            ".metadata",
            in_metadata("bucket_idx_0.exp_avg"),
            "",
            ("exp_avg", "exp_avg_sq"),
            id="flat buckets of torch_dist",
        ),
        pytest.param(
            "megatron/tp2-pp2-flat/sharded",
            ".metadata",
            in_metadata("bucket_idx_0.param"),
            "",
            STATES,
            id="the fp32 copies in flat buckets",
        ),
    ],
)
def test_an_unknown_dtype_of_a_few_tensors(
    tmp_path: Path,
    folder: str,
    pattern: str,
    change: Callable[[Path], None],
    names: Any,
    states: tuple[str, ...],
) -> None:
    """What is in the same buffer is refused with it; everything else is read, although other ranks know the dtype."""
    whole = ucformat.open(DATA / folder)
    place = shutil.copytree(DATA / folder, tmp_path / "src")
    for path in place.rglob(pattern):
        change(path)
    ck = ucformat.open(place)
    of = set(whole.metadata.groups[names]["params"]) if isinstance(names, int) else None
    bad = {
        k
        for k in whole.tensors
        if k.state in states and (k.name in of if of is not None else names in k.name)
    }
    assert {k for k in ck.unreadable if not k.state.endswith(".padding")} == bad
    assert {
        k for k in set(whole.tensors) - set(ck.tensors) if not k.state.endswith(".padding")
    } == bad
    assert all(same(ck[key].read(), whole[key].read()) for key in ck.tensors)


def test_an_unknown_dtype_in_a_client_state(tmp_path: Path) -> None:
    whole, place = ucformat.open(DATA / "deepspeed/tp2-z0/ckpt"), tmp_path / "src"
    shutil.copytree(DATA / "deepspeed/tp2-z0/ckpt", place)
    for path in place.rglob("mp_rank_0?_model_states.pt"):
        with_unknown_dtype(
            path, lambda value: {**value, "mine": torch.zeros(3, dtype=torch.uint16)}
        )
    ck = ucformat.open(place)
    assert {key.name for key in ck.unreadable} == {"client_state.mine"}
    assert read_whole(ck) == read_whole(whole)


@pytest.mark.usefixtures("engines")
def test_an_unknown_dtype_on_a_later_data_parallel_rank(tmp_path: Path) -> None:
    """It is found when the file is first opened, which needs a tensor that is partly in it."""
    folder = DATA / "deepspeed" / "ep1-dp2-z1" / "ckpt"
    whole, place = ucformat.open(folder), shutil.copytree(folder, tmp_path / "src")
    (path,) = place.rglob("*zero_pp_rank_1_*optim_states.pt")
    in_file("optimizer_state_dict", "base_optimizer_state", "state", 0, "exp_avg")(path)
    ck = ucformat.open(place)
    refused = set()
    for key in ck.tensors:
        try:
            found = ck[key].read()
        except UnsupportedError:
            refused.add(key)
        else:
            assert same(found, whole[key].read())
    assert refused
    assert {key.state for key in refused} == {"exp_avg"}
    assert any("float9" in problem.reason for problem in verify(place).problems)


@pytest.mark.usefixtures("engines")
@pytest.mark.parametrize(
    ("folder", "masters"),
    [("tp2-dp2-z1", "single_partition_of_fp32_groups"), ("tp2-dp2-z3", "fp32_flat_groups")],
)
def test_ranks_that_disagree_about_a_dtype(tmp_path: Path, folder: str, masters: str) -> None:
    """Without the check, the elements of one rank would be read with the size of another's."""
    place = shutil.copytree(DATA / "deepspeed" / folder / "ckpt", tmp_path / "src")
    for path in place.rglob("*zero_pp_rank_1_*optim_states.pt"):
        value = torch.load(path, weights_only=False)
        value["optimizer_state_dict"][masters] = [
            t.half() for t in value["optimizer_state_dict"][masters]
        ]
        torch.save(value, path)
    ck = ucformat.open(place)
    with pytest.raises(
        IntegrityError, match=r"other optimizer states of group 0 .*master \(float16\)"
    ):
        read_whole(ck)


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
