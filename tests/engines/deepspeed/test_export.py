"""Exports to DeepSpeed: files that equal DeepSpeed's own, any geometry, and what is refused."""

from __future__ import annotations

import pickletools
import zipfile
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ucformat
from tests.engines.deepspeed.conftest import CHOSEN
from tests.exporters.suite import TrainedSuite
from tests.fakes import FakeSource
from ucformat.checkpoint import Checkpoint
from ucformat.errors import UcformatError, UnsupportedError, UsageError
from ucformat.exporters.pickle import ALLOWED, Global
from ucformat.exporters.registry import EXPORTERS
from ucformat.jobs.export import export, plan_export
from ucformat.reading.stand_ins import Inert, StoredTensor
from ucformat.sources.pickle.file import TorchFile
from ucformat.storage.local import LocalStore
from ucformat.storage.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from tests.engines import Made
    from ucformat.geometry.tensor import Key

#: Of `CHOSEN`: their files are not written, or their states have no names.
OTHERS = ("z1-bf16opt", "z1-bf16opt-frozen", "z1-elastic-sgd", "z2-elastic", "z0-unclear")
SAME = [
    (world, str(spec["name"]))
    for world, specs in CHOSEN.items()
    for spec in specs
    if spec["name"] not in OTHERS
]
ZERO = [(world, name) for world, name in SAME if not name.startswith("z0")]


def contents(ck: Checkpoint) -> dict[Key, tuple[str, tuple[int, ...], bytes]]:
    return {key: (i.dtype, i.shape, ck[key].read().tobytes()) for key, i in ck.tensors.items()}


class TestStage0(TrainedSuite):
    """Of which torch alone reads all files."""

    kind = "deepspeed"
    options: ClassVar = {"stage": 0, "world": 2}

    def load(self, place: Path) -> dict[tuple[str, str], Any]:
        tag = place / (place / "latest").read_text()
        state = torch.load(tag / "mp_rank_00_model_states.pt", weights_only=False)
        found = {(name, "weight"): t.numpy() for name, t in state["module"].items()}
        for number, name in enumerate(self.parameters):
            states = state["optimizer"]["state"][number]
            found |= {(name, kind): t.numpy() for kind, t in states.items()}
        return found


class TestUniversal(TrainedSuite):
    kind = "deepspeed-universal"
    options: ClassVar = {"stage": 1}

    def load(self, place: Path) -> dict[tuple[str, str], Any]:
        tag = place / (place / "latest_universal").read_text()
        assert (tag / "mp_rank_00_model_states.pt").exists()
        found = {}
        for path in (tag / "zero").glob("*/*.pt"):
            state = "weight" if path.stem == "fp32" else path.stem
            found[path.parent.name, state] = torch.load(path)["param"].numpy()
        return found


@pytest.mark.parametrize(("world", "name"), SAME)
def test_files_are_as_deepspeeds_own(
    chosen: Callable[[int, str], Made], tmp_path: Path, world: int, name: str
) -> None:
    spec = next(s for s in CHOSEN[world] if s["name"] == name)
    before = ucformat.open(chosen(world, name).checkpoint)
    done = export(before, tmp_path, "deepspeed", fused=spec.get("fused", False))
    after = ucformat.open(tmp_path)
    assert done.left_out == ()
    assert contents(after) == contents(before)
    assert dict(after.objects) == dict(before.objects)
    for fact in ("aliases", "groups", "layout", "step", "engine"):
        assert getattr(after.metadata, fact) == getattr(before.metadata, fact), fact
    assert set(after.metadata.files) == set(before.metadata.files)
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["latest"]
    for key in after.metadata.files:
        if key.endswith(".pt"):
            folders = (tmp_path, chosen(world, name).checkpoint)
            ours, theirs = (form(TorchFile(LocalStore(folder), key).value) for folder in folders)
            if (
                "round" in name
            ):  # DeepSpeed computes the slices as if it did not deal parameters in turn
                for value in (ours, theirs):
                    value.get("optimizer_state_dict", {}).pop("param_slice_mappings", None)
            assert ours == theirs, key


def form(value: Any) -> Any:
    """A value with dtypes and shapes in place of tensors, and lists in place of tuples."""
    if isinstance(value, StoredTensor):
        return value.dtype, value.shape
    if isinstance(value, Inert):
        return value.name, form(value.args), form(value.state)
    if isinstance(value, dict):
        return {
            key: form(inner)
            for key, inner in value.items()
            if key != "frozen_param_fragments" or inner
        }
    if isinstance(value, list | tuple):
        return [form(inner) for inner in value]
    return repr(value) if isinstance(value, float) else value


@pytest.mark.parametrize(("world", "name"), ZERO)
def test_the_universal_format_keeps_names_and_states(
    chosen: Callable[[int, str], Made], tmp_path: Path, world: int, name: str
) -> None:
    before = ucformat.open(chosen(world, name).checkpoint)
    export(before, tmp_path, "deepspeed-universal")
    after = ucformat.open(tmp_path)
    rank = {key for key in before.tensors if key.name.startswith("rank")}
    assert contents(after) == {
        key: value for key, value in contents(before).items() if key not in rank
    }
    groups = [
        [{**g, "params": sorted(g["params"])} for g in ck.metadata.groups] for ck in (after, before)
    ]
    assert groups[0] == groups[1]  # in another order if the engine deals gradients round-robin
    assert after.aliases == before.aliases


def globals_in(folder: Path) -> set[Global]:
    """The globals of all pickles below a folder."""
    found: set[Global] = set()
    for path in folder.rglob("*.pt"):
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
            data = archive.read(next(n for n in archive.namelist() if n.endswith("data.pkl")))
        for opcode, arg, _ in pickletools.genops(data):
            assert opcode.name not in ("STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4"), opcode
            if opcode.name == "GLOBAL":
                found.add(Global(*str(arg).split(" ")))
    return found


def test_pickles_name_nothing_of_the_sources(tmp_path: Path) -> None:
    evil = {"$class": "os.system", "$args": ["true"]}
    objects = {
        "client_state": {"evil": evil, "kept": [1, {"$float": "inf"}]},
        "lr_scheduler": evil,
        "other": {"a": evil},
    }
    source = fake({"w": (3, 4)}, objects=objects | {"optimizer": {"loss_scaler": evil}})
    done = export(source, tmp_path, "deepspeed", stage=2, world=2)
    assert globals_in(tmp_path) <= ALLOWED
    assert {text.partition(":")[0] for text in done.left_out} == {
        "the value client_state.evil",
        "the value lr_scheduler",
        "the value other",
    }
    assert ucformat.open(tmp_path).objects["client_state"] == {"kept": [1, {"$float": "inf"}]}


_numbers = count()
ADAM = {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}


def dtype_of(name: str) -> Any:
    return np.dtype(getattr(ml_dtypes, name) if hasattr(ml_dtypes, name) else name)


def fake(
    shapes: Mapping[str, tuple[int, ...]],
    *,
    groups: list[list[str]] | None = None,
    dtype: str = "float32",
    **facts: Any,
) -> Checkpoint:
    """A trained model in memory with groups of different weight decay; parameters that are in no group are frozen."""
    groups = [list(shapes)] if groups is None else groups
    arrays: dict[Any, Any] = {}
    for i, (name, shape) in enumerate(shapes.items()):
        random = np.random.default_rng(i)
        arrays[name, "weight"] = arrays[name, "master"] = random.standard_normal(
            shape, "float32"
        ).reshape(shape)
        if dtype != "float32":
            arrays[name, "weight"] = arrays[name, "master"].astype(dtype_of(dtype))
        if any(name in group for group in groups):
            for state in ("exp_avg", "exp_avg_sq"):
                arrays[name, state] = random.standard_normal(shape, "float32").reshape(shape)
            arrays[name, "step"] = np.array(3, "float32")
        else:
            del arrays[name, "master"]
    documents = tuple(
        {**ADAM, "weight_decay": 0.1 / (i + 1), "params": names} for i, names in enumerate(groups)
    )
    known: dict[str, Any] = {"step": 3, "groups": documents}
    return Checkpoint(
        FakeSource.write(MemoryStore(f"fake-{next(_numbers)}"), arrays, **known | facts)
    )


shapes = st.lists(st.integers(1, 6), max_size=3).map(tuple)


@given(data=st.data())
def test_any_geometry_comes_back(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = {
        f"layer.{i}.w": shape
        for i, shape in enumerate(data.draw(st.lists(shapes, min_size=1, max_size=7)))
    }
    of = {name: data.draw(st.integers(0, 2)) for name in model}  # 2: frozen
    groups = [[n for n in model if of[n] == g] for g in (0, 1)]
    groups = [g for g in groups if g]
    if not groups:
        return
    stage = data.draw(st.integers(0, 3))
    zero = {"stage": stage, "sub_group_size": data.draw(st.sampled_from([1, 7, 30, 10**9]))}
    zero |= {
        name: data.draw(st.booleans()) for name in ("round_robin_gradients", "parameter_alignment")
    }
    dtype = data.draw(st.sampled_from(["float32", "bfloat16"]))
    config = {"zero_optimization": zero, "bf16": {"enabled": dtype == "bfloat16"}}
    source = fake(model, groups=groups, dtype=dtype)
    folder = tmp_path_factory.mktemp("geometry")
    world = data.draw(st.integers(1, 5))
    options: dict[str, Any] = {"config": config, "world": world, "buffers": "none"}
    options["fused"] = (
        stage == 0 and dtype == "bfloat16" and sum(len(g) for g in groups) < len(model)
    )
    done = export(source, folder, "deepspeed", **options)
    names = [list(g) for g in groups]
    after = ucformat.open(folder, options=None if stage or options["fused"] else {"groups": names})
    wanted, found = contents(source), contents(after)
    for key, value in found.items():
        assert value == wanted[key], key
    lost = wanted.keys() - found.keys()
    assert {key.state for key in lost} <= (
        {"weight"} if stage == 3 else {"master"} if dtype == "float32" else set()
    )
    assert done.left_out == tuple(
        f"{s} of {len(lost)} tensor{'s' * (len(lost) != 1)}" for s in {k.state for k in lost}
    )


def test_ranks_are_planned_when_they_are_written() -> None:
    source = fake({f"layer.{i}.w": (64, 64) for i in range(20)})
    target = plan_export(source, "deepspeed", stage=3, world=512)
    files = [f for f in target.files if "optim_states" in f.key]
    assert len(files) == 512
    assert len({f.nbytes for f in files}) == 1
    parts = list(files[-1].parts())
    assert sum(len(p) if isinstance(p, bytes) else p.nbytes for p in parts) == files[-1].nbytes


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no stage": ({}, {"world": 2}, "pass stage"),
    "no precision": (
        {"dtype": "float64"},
        {"stage": 1, "world": 2},
        "the weights are float64, which does not tell the precision",
    ),
    "no ranks": ({}, {"stage": 1}, "pass world"),
    "no step": ({"step": None}, {"stage": 1, "world": 2}, "pass step"),
    "no groups": ({"groups": []}, {"stage": 1, "world": 2}, "pass weights_only"),
    "no layout": ({}, {"stage": 1, "world": 2, "tp": 2}, "pass layout"),
    "ranks that tp does not divide": (
        {},
        {"stage": 1, "world": 3, "tp": 2},
        "3 ranks are not divided by 2",
    ),
    "no loss scale": ({"dtype": "float16"}, {"stage": 1, "world": 2}, "pass config"),
    "a group of what is not stored": (
        {"groups": [["a.w", "b.w", "c.w"]]},
        {"stage": 1, "world": 2},
        "of which no weight is exported: c.w",
    ),
    "floats in no group": (
        {"groups": [["a.w"]]},
        {"stage": 3, "world": 2},
        "the optimizer does not have b.w",
    ),
    "an unknown buffer": (
        {},
        {"stage": 3, "world": 2, "buffers": ["c"]},
        "these buffers are not stored: c",
    ),
    "overflow": (
        {"groups": [["a.w", "b.w"]], "states": ("weight", "exp_avg", "exp_avg_sq", "step")},
        {"world": 2, "config": {"fp16": {"enabled": True}, "zero_optimization": {"stage": 1}}},
        "in float16 it might overflow",
    ),
    "elastic": (
        {},
        {"world": 2, "config": {"zero_optimization": {"stage": 1, "elastic_checkpoint": True}}},
        "elastic",
    ),
    "fp32 gradients": (
        {"dtype": "bfloat16"},
        {
            "world": 2,
            "config": {
                "bf16": {"enabled": True},
                "zero_optimization": {"stage": 1},
                "data_types": {"grad_accum_dtype": "fp32"},
            },
        },
        "BF16_Optimizer",
    ),
    "a stage": ({}, {"stage": 4, "world": 2}, "not 4"),
    "a tag of several folders up": ({}, {"stage": 1, "world": 2, "tag": "../x"}, "x"),
    "an option": ({}, {"layers": 2}, "not exported with the option 'layers'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str, tmp_path: Path) -> None:
    facts, options, message = REFUSED[case]
    source = fake(
        **{"shapes": {"a.w": (3, 4), "b.w": (5,)}}
        | {k: v for k, v in facts.items() if k != "states"}
    )
    with pytest.raises(UcformatError) as caught:
        export(source, tmp_path / "x", "deepspeed", states=facts.get("states"), **options)
    assert message in f"{caught.value.message} {caught.value.hint}"
    assert not list(tmp_path.rglob("*_states.pt"))


class TestStatesThatAreNotJoined:
    def source(self, **arrays: Any) -> Checkpoint:
        base: dict[Any, Any] = {(n, "weight"): np.ones(4, "float32") for n in ("a", "b")}
        base |= {(n, "exp_avg"): np.ones(4, "float32") for n in ("a", "b")}
        base |= {(n, "step"): np.array(3, "float32") for n in ("a", "b")}
        base |= {tuple(key.split("__")): value for key, value in arrays.items()}
        base = {key: value for key, value in base.items() if value is not None}
        groups = ({**ADAM, "params": ["a", "b"]},)
        return Checkpoint(FakeSource.write(MemoryStore("states"), base, step=3, groups=groups))

    @pytest.mark.parametrize(
        ("arrays", "message"),
        [
            ({"b__step": np.array(2, "float32")}, "step of b differs from that of a"),
            ({"b__exp_avg": None}, "b have no exp_avg"),
            ({"b__exp_avg": np.ones(3, "float32")}, "exp_avg of b has another shape"),
            (
                {"b__exp_avg": np.ones(4, "float16")},
                "exp_avg of an optimizer group is float32 (a) and float16 (b)",
            ),
        ],
    )
    def test_they_are_refused(self, arrays: dict[str, Any], message: str, tmp_path: Path) -> None:
        for kind in ("deepspeed", "deepspeed-universal"):
            options: dict[str, Any] = {"world": 2} if kind == "deepspeed" else {}
            with pytest.raises(UnsupportedError) as caught:
                export(self.source(**arrays), tmp_path / kind, kind, stage=2, **options)
            assert message in caught.value.message
            assert not list(tmp_path.rglob("latest*"))

    def test_stage_0_keeps_each_parameters_own(self, tmp_path: Path) -> None:
        source = self.source(b__step=np.array(2, "float32"))
        export(source, tmp_path, "deepspeed", stage=0, world=2)
        assert contents(ucformat.open(tmp_path, options={"groups": [["a", "b"]]})) == contents(
            source
        )


TP = {
    "version": 1,
    "mesh": {"tp": 2},
    "rules": [
        {"match": "*.row", "place": [{"shard": 1, "over": "tp"}]},
        {"match": "*.column", "place": [{"shard": 0, "over": "tp"}]},
        {"match": "*", "place": ["replicate"]},
    ],
}


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_tensor_parallel_ranks(tmp_path: Path, stage: int) -> None:
    source = fake({"a.row": (6, 7), "b.column": (5, 4), "norm": (3,)}, dtype="bfloat16")
    export(source, tmp_path, "deepspeed", stage=stage, world=4, layout=TP, tp=2)
    cuts = {"a.row": 1, "b.column": 0, "norm": "replicate"}
    options = {"cuts": cuts} if stage else {"cuts": cuts, "groups": [list(cuts)]}
    after = ucformat.open(tmp_path, options=options)
    assert after.metadata.layout.items() >= {"tp": 2, "dp": 2, "zero": stage}.items()
    found, wanted = contents(after), contents(source)
    assert found == {
        key: value for key, value in wanted.items() if stage != 3 or key.state != "weight"
    }


def test_values_of_other_programs_become_client_state(tmp_path: Path) -> None:
    source = fake(
        {"w": (3,)},
        objects={
            "train": {
                "epoch": 2,
                "rng": {"$tensor": {"dtype": "uint8", "shape": [2], "data": "AQI="}},
            }
        },
    )
    export(source, tmp_path, "deepspeed", stage=1, world=1)
    assert ucformat.open(tmp_path).objects["client_state"] == source.objects


def test_the_exporters_are_registered() -> None:
    assert {"deepspeed", "deepspeed-universal"} <= set(EXPORTERS.names())
    with pytest.raises(UsageError, match="stage 0 does not load"):
        plan_export(fake({"w": (3,)}), "deepspeed-universal", stage=0)


def test_what_deepspeed_does_not_restore_is_told() -> None:
    source = fake({"w": (3,), "b": (2,), "frozen": (2,), "empty": (0,)}, groups=[["w"], ["b"]])
    frozen = "buffers and frozen parameters (1 tensor): written, but not loaded by DeepSpeed"
    options: dict[str, Any] = {"buffers": [], "stage": 2}
    assert plan_export(source, "deepspeed-universal", **options).left_out == (frozen,)
    told = plan_export(source, "deepspeed-universal", **options | {"stage": 3}).left_out
    assert frozen in told
    assert any(
        text.startswith("hyper-parameters of optimizer groups after the first") for text in told
    )


def test_what_is_last_is_what_deepspeed_needs(tmp_path: Path) -> None:
    source = fake({"w": (3,)}, dtype="bfloat16")
    last = {
        stage: [
            f.key for f in plan_export(source, "deepspeed", stage=stage, world=2).files if f.last
        ]
        for stage in (0, 1, 3)
    }
    assert last[0] == last[1] == ["global_step3/mp_rank_00_model_states.pt", "latest"]
    assert last[3] == ["global_step3/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "latest"]
    universal = [
        f.key for f in plan_export(source, "deepspeed-universal", stage=3, tag="t").files if f.last
    ]
    assert universal == ["t/zero_pp_rank_0_mp_rank_00_model_states.pt", "latest_universal"]


def test_any_bits_come_back_from_stage_0(tmp_path: Path) -> None:
    """Its reader rounds the masters to name them, among which may be signalling NaNs."""
    masters = np.array([0x7F800001, 0x3F800000], "u4").view("f4")
    with np.errstate(invalid="ignore"):
        arrays = {("w", "master"): masters, ("w", "weight"): masters.astype(ml_dtypes.bfloat16)}
    groups = ({**ADAM, "params": ["w"]},)
    source = Checkpoint(FakeSource.write(MemoryStore("any-bits"), arrays, step=3, groups=groups))
    export(source, tmp_path, "deepspeed", stage=0, world=1)
    assert contents(ucformat.open(tmp_path, options={"groups": [["w"]]})) == contents(source)
