"""Checkpoints that DeepSpeed wrote under AutoTP and of pipelines, kept in `tests/data/deepspeed`."""

from __future__ import annotations

import json
import math
import shutil
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.sources.suite import SourceSuite, kept
from ucformat.engines.deepspeed import degrees as ranks
from ucformat.engines.deepspeed import pipeline
from ucformat.engines.deepspeed.opened import Merged
from ucformat.engines.deepspeed.pipeline import _splits
from ucformat.engines.deepspeed.source import DeepSpeed
from ucformat.engines.deepspeed.zero import Slice
from ucformat.errors import IntegrityError, MissingData, UnsupportedError, UsageError
from ucformat.geometry.tensor import Key, TensorInfo
from ucformat.geometry.tp_sharding import sub_params
from ucformat.reading.stand_ins import StoredTensor
from ucformat.sources.pickle.optimizer import Entry
from ucformat.sources.tp_merge import LocalContents
from ucformat.storage.local import LocalStore
from ucformat.storage.memory import MemoryStore
from ucformat.testing.reading import Counting, read_tensor
from ucformat.testing.sources import Sample

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

TENSOR = ("tp2-dp2-z1", "tp2-z2-tied", "tp2-dp2-z3", "tp2-z0")
PIPELINES = ("pp2-dp2-z1", "pp2-z0", "pp2-dp2-z0-bf16", "pp2-z1-bf16opt")


def expected(name: str) -> Sample:
    """The kept checkpoint of this name; ZeRO 3 keeps no weights of what is trained, ZeRO 0 no names of tied modules."""
    made = kept("deepspeed", name)
    truth = made.truth
    if made.facts["spec"]["zero"] == 3:
        trained = {n for s, n in truth if s == "master"}
        truth = {(s, n): v for (s, n), v in truth.items() if s != "weight" or n not in trained}
    if name == "pp2-z0":
        truth = {(s, n.replace("tied_modules.embed", "0")): v for (s, n), v in truth.items()}
    trained = {n for s, n in truth if s == "exp_avg"}
    shapes = {n: v[1] for (s, n), v in truth.items()}
    order = list(
        dict.fromkeys(
            i.name
            for i in DeepSpeed().open(LocalStore(made.checkpoint)).metadata.tensor_list.tensors
        )
    )
    names = sorted(trained, key=order.index)
    groups = [names]
    if made.facts["spec"].get("groups") == 2:
        groups = [[n for n in names if (len(shapes[n]) > 1) == big] for big in (True, False)]
    steps = frozenset(("step", n) for n in trained)
    return Sample(made.folder, "ckpt", "deepspeed", truth, made.facts["tied"], groups, 3, steps)


class TestKept(SourceSuite):
    @pytest.fixture(params=TENSOR + PIPELINES)
    def sample(self, request: pytest.FixtureRequest) -> Sample:
        return expected(request.param)


def opened(name: str, **options: Any) -> Any:
    return DeepSpeed(**options).open(LocalStore(kept("deepspeed", name).checkpoint))


@pytest.mark.parametrize("name", TENSOR + PIPELINES)
def test_degrees(name: str) -> None:
    spec = kept("deepspeed", name).facts["spec"]
    layout = opened(name).metadata.layout
    tp, pp = spec.get("tp", 1), spec.get("pp", 1)
    assert (layout["zero"], layout["dp"]) == (spec["zero"], spec["world"] // tp // pp)
    assert (layout.get("tp", 1), layout.get("pp", 1)) == (tp, pp)


def test_each_ranks_objects_are_kept() -> None:
    ranks = opened("tp2-dp2-z3").metadata.objects["rank"]
    assert {label: r["client_state"] for label, r in ranks.items()} == {
        "tp1": {"rank": 1}, "tp0.dp1": {"rank": 2}, "tp1.dp1": {"rank": 3}}  # fmt: skip
    assert opened("pp2-dp2-z1").metadata.objects["rank"]["pp1"]["client_state"] == {"rank": 2}


@pytest.mark.parametrize("name", ["tp2-dp2-z1", "tp2-dp2-z3"])
def test_an_odd_vocabulary_is_cut_unevenly(name: str) -> None:
    source = opened(name)
    info = next(
        i for i in source.metadata.tensor_list.tensors if i.key == Key("lm_head.weight", "master")
    )
    assert info.shape[0] == 31
    rows = {e.box.start[0] for e in source.extents(info.key)}
    assert 16 in rows  # 16 + 15


def test_opening_touches_one_optimizer_file_of_each_model_parallel_rank() -> None:
    store = Counting(LocalStore(kept("deepspeed", "tp2-dp2-z3").checkpoint))
    DeepSpeed().open(store)
    assert {key.rpartition("/")[2] for key in store.bytes if "optim" in key} == {
        f"bf16_zero_pp_rank_0_mp_rank_0{t}_optim_states.pt" for t in range(2)
    }


class TestWithoutInfo:
    """What AutoTP wrote before it described itself."""

    @pytest.fixture
    def copy(self, tmp_path: Path) -> Path:
        return shutil.copytree(kept("deepspeed", "tp2-dp2-z1").checkpoint, tmp_path / "copy")

    def test_a_llama_is_known_by_its_names(self, copy: Path) -> None:
        for path in (copy / "global_step3").glob("mp_rank*"):
            data = path.read_bytes()
            assert data.count(b"universal_checkpoint_info") == 1
            path.write_bytes(
                data.replace(b"universal_checkpoint_info", b"universal_checkpoint_xxxx")
            )
            _mend(path)
        sample = expected("tp2-dp2-z1")
        source = DeepSpeed().open(LocalStore(copy))
        for (state, name), (_, shape, data) in sample.truth.items():
            info = next(i for i in source.metadata.tensor_list.tensors if i.key == Key(name, state))
            assert info.shape == shape, name
            assert read_tensor(source, info) == data


def _mend(path: Path) -> None:
    """Write the CRC-32 of a changed pickle into the zip file's directory and header."""
    import struct
    import zipfile
    import zlib

    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        members = {i.filename: i for i in archive.infolist()}
    name, info = next((n, i) for n, i in members.items() if n.endswith("/data.pkl"))
    start = info.header_offset + 30 + sum(struct.unpack_from("<HH", data, info.header_offset + 26))
    crc = zlib.crc32(data[start : start + info.file_size])
    old, new = struct.pack("<I", info.CRC), struct.pack("<I", crc)
    at = data.rindex(name.encode()) - 46
    assert data[at + 16 : at + 20] == old
    data[at + 16 : at + 20] = new
    path.write_bytes(data)


class TestPipelinesUnderZero0:
    def test_names_can_be_given(self) -> None:
        told = opened("pp2-z0").metadata.groups[0]["params"]
        second = [
            "0.weight",
            *(n for n in told if n[0] == "3"),
        ]  # the tied module's stand first in each stage
        groups = [[*(n for n in told if n[0] in "012"), *second]]
        source = opened("pp2-z0", groups=groups)
        sample = expected("pp2-z0")
        for (state, name), (_, _, data) in sample.truth.items():
            info = next(i for i in source.metadata.tensor_list.tensors if i.key == Key(name, state))
            assert read_tensor(source, info) == data

    def test_too_few_names_are_refused(self) -> None:
        with pytest.raises(UsageError, match="names are given"):
            opened("pp2-z0", groups=[["0.weight"]])

    def test_fewer_groups_than_the_optimizer_has_are_refused(self) -> None:
        with pytest.raises(UsageError, match="has other groups than the 0 that are given"):
            opened("pp2-z0", groups=[])


class TestWithoutParamShapes:
    """BF16_Optimizer without ZeRO: only the partitions of all ranks together tell its parameters."""

    @pytest.fixture
    def copy(self, tmp_path: Path) -> Path:
        return shutil.copytree(kept("deepspeed", "pp2-dp2-z0-bf16").checkpoint, tmp_path / "copy")

    def test_a_missing_file_of_the_optimizer_is_named(self, copy: Path) -> None:
        missing = "bf16_zero_pp_rank_1_mp_rank_01_optim_states.pt"
        next(copy.rglob(missing)).unlink()
        with pytest.raises(MissingData, match=missing):
            DeepSpeed().open(LocalStore(copy))

    def test_without_any_of_them_they_are_missing(self, copy: Path) -> None:
        for file in copy.rglob("*optim_states.pt"):
            file.unlink()
        with pytest.raises(MissingData, match="zero_pp_rank_0"):
            DeepSpeed().open(LocalStore(copy))

    def test_the_option_without_the_optimizer_is_refused(self, copy: Path) -> None:
        with pytest.raises(UsageError, match="only the files of the optimizer"):
            DeepSpeed(optimizer=False).open(LocalStore(copy))

    def test_files_of_another_save_are_noticed(self, copy: Path) -> None:
        first, second = (
            next(copy.rglob(f"bf16_zero_pp_rank_{r}_mp_rank_00_optim_states.pt")) for r in (0, 1)
        )
        shutil.copy(first, second)
        with pytest.raises(MissingData, match=r"tied module embed of .* in the sizes .*528"):
            DeepSpeed().open(LocalStore(copy))

    def test_a_missing_layer_is_named(self, copy: Path) -> None:
        next(copy.rglob("layer_01-model_states.pt")).unlink()
        with pytest.raises(MissingData, match=r"1\.up\.weight: the optimizer of .* has it"):
            DeepSpeed().open(LocalStore(copy))


class TestMerged:
    """Tensors of ranks, whose parameter `w` is two matrices one below the other."""

    def merged(
        self, *ranks: Mapping[str, tuple[str, tuple[int, ...]]]
    ) -> dict[str, tuple[int, ...]]:
        """The shape of each state of `w`, of which each rank has these dtypes and shapes."""
        slices = []
        for states in ranks:
            contents = LocalContents()
            for state, (dtype, shape) in states.items():
                contents.put(TensorInfo("w", state, dtype, shape), lambda _: iter(()))
            slices.append(Slice([SimpleNamespace(buffers=frozenset(), described=[])], "", contents))  # type: ignore[list-item]
        sharding = sub_params(((4, 5),) * len(ranks), (-1, 5), 0, [[2] * len(ranks)] * 2)
        resolver: Any = SimpleNamespace(
            recognise=lambda *_: None, decide=lambda *_: {"w": sharding}
        )
        return {
            k.state: i.shape
            for k, i in Merged(MemoryStore("x"), [slices], resolver).contents.infos.items()
        }

    def test_means_over_a_part_are_read_only_where_it_is_the_whole(self) -> None:
        states = {"weight": ("float32", (4, 5)), "row": ("float32", (4,)), "none": ("float32", ())}
        assert self.merged(states) == {"weight": (4, 5), "row": (4,), "none": ()}
        del states["row"]
        assert self.merged(states, states) == {"weight": (8, 5), "none": ()}
        with pytest.raises(UnsupportedError, match="means over a rank's part"):
            self.merged(*[states | {"row": ("float32", (4,))}] * 2)

    def test_parts_of_two_dtypes_are_refused(self) -> None:
        single, half = ({"weight": (dtype, (4, 5))} for dtype in ("float32", "bfloat16"))
        with pytest.raises(IntegrityError, match="has the dtypes bfloat16, float32"):
            self.merged(single, half)


@pytest.mark.parametrize(
    "degrees", [(1 << 20, 1, 1), (1, 1 << 20, 1), (1, 1, 1 << 20), (1 << 7, 1 << 6, 1 << 7)]
)
def test_so_many_ranks_may_be_recorded_and_no_more(
    degrees: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "check_world", lambda *_, **__: None)
    files: Any = SimpleNamespace(layers={}, optims={}, zero3=False)

    def read(pp: int, tp: int, dp: int) -> ranks.ParallelDegrees:
        model: Any = SimpleNamespace(
            dims=(pp, tp, None),
            world=dp,
            param_shapes=None,
            in_layers=False,
            key="model.pt",
            value={},
        )
        return ranks.ParallelDegrees.of(files, model, others=[])

    assert read(*degrees) == ranks.ParallelDegrees(*degrees)
    for at in range(3):
        with pytest.raises(IntegrityError, match=r"model\.pt records \d+ x \d+ x \d+ ranks"):
            read(*(n + (i == at) for i, n in enumerate(degrees)))


def test_a_missing_layer_is_named(tmp_path: Path) -> None:
    copy = shutil.copytree(kept("deepspeed", "pp2-dp2-z1").checkpoint, tmp_path / "copy")
    for name, said in (
        ("layer_02-model_states.pt", "layer_02"),
        ("layer_00-model_states.pt", "tied module embed"),
    ):
        (copy / "global_step3" / name).rename(tmp_path / "aside")
        with pytest.raises(MissingData, match=said):
            DeepSpeed().open(LocalStore(copy))
        (tmp_path / "aside").rename(copy / "global_step3" / name)


def test_tied_layers_that_differ_are_both_named(tmp_path: Path) -> None:
    import torch

    copy = shutil.copytree(kept("deepspeed", "pp2-dp2-z1").checkpoint, tmp_path / "copy")
    layer = torch.load(copy / "global_step3" / "layer_00-model_states.pt", weights_only=True)
    torch.save(layer, copy / "global_step3" / "layer_04-model_states.pt")
    DeepSpeed().open(LocalStore(copy))
    layer["weight"][0, 0] += 1
    torch.save(layer, copy / "global_step3" / "layer_04-model_states.pt")
    with pytest.raises(IntegrityError, match=r"layer_00(.*)layer_04"):
        DeepSpeed().open(LocalStore(copy))


def test_the_facts_are_plain_json() -> None:
    for name in TENSOR + PIPELINES:
        facts = opened(name).metadata
        json.dumps([facts.objects, facts.layout, facts.groups], allow_nan=False)


def test_a_stage_whose_tied_layer_could_be_one_of_two_is_in_doubt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Layers 0 and 1 are alike; the last stage holds layer 4 and a copy of one of them. Layer 3 has only a buffer."""

    def stored(*shape: int) -> StoredTensor:
        return StoredTensor("0", "float32", shape, shape, 0, math.prod(shape))

    def splits(second: tuple[int, ...]) -> list[Any]:
        shapes: list[dict[str, tuple[int, ...]]] = [
            {"w": (4, 4)},
            {"w": second},
            {"w": (6, 6)},
            {"b": (7,)},
            {"w": (2, 2)},
        ]
        layers: Any = [
            SimpleNamespace(number=n, tensors={k: stored(*s) for k, s in tensors.items()})
            for n, tensors in enumerate(shapes)
        ]
        stages: Any = [SimpleNamespace(buffers={"3.b"}) for _ in range(2)]
        entries = {
            id(stages[0]): [[Entry((4, 4)), Entry(second), Entry((6, 6))]],
            id(stages[1]): [[Entry((4, 4)), Entry((2, 2))]],
        }
        monkeypatch.setattr(pipeline, "entries_of", lambda stage: entries[id(stage)])
        return [[extra for *_, extra in split] for split in _splits(stages, layers, {}, 0, 0)]

    assert {tuple(extras) for extras in splits((4, 4))} == {(None, 0), (None, 1)}
    assert {tuple(extras) for extras in splits((3, 5))} == {(None, 0)}


def test_stages_of_many_equal_layers_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer fewer and a copy of any other one fits nearly everywhere: what is left is searched once."""
    layers: Any = [
        SimpleNamespace(number=n, tensors={"w": StoredTensor("0", "float32", (4,), (1,), 0, 4)})
        for n in range(32)
    ]
    stages: Any = [SimpleNamespace(buffers=set()) for _ in range(8)]
    monkeypatch.setattr(pipeline, "entries_of", lambda _: 16)  # elements of a flat optimizer
    assert next(_splits(stages, layers, {}, 0, 0))[-1][:2] == (28, 32)
