"""Distributed checkpoints of Megatron that we write: compared with its own, and loaded by Megatron-Core."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader

import ucformat
from tests.engines.running import run_engine
from tests.exporters.reading import differences, globals_of, state_of
from tests.exporters.suite import TrainedSuite
from tests.fakes import FakeSource, random_array
from tests.sources.suite import DATA
from ucformat.checkpoint import Checkpoint
from ucformat.engines.megatron.export_plan import listed_keys
from ucformat.errors import UnsupportedError
from ucformat.exporters.pickle import ALLOWED, Global
from ucformat.exporters.registry import EXPORTERS
from ucformat.jobs.export import export
from ucformat.storage.local import LocalStore

if TYPE_CHECKING:
    from pathlib import Path

KEPT = sorted(p.name for p in (DATA / "megatron").iterdir() if (p / "sharded").exists())
FULL = DATA / "megatron" / "tp2-dp2-full" / "sharded" / "iter_0000002"
NORM, QKV = (
    "decoder.layers.{}.input_layernorm.weight",
    "decoder.layers.{}.self_attention.linear_qkv.weight",
)
FC1, EXPERT = (
    "decoder.layers.{}.mlp.linear_fc1.weight",
    "decoder.layers.{}.mlp.experts.local_experts.{}.linear_fc1.weight",
)


def fake(
    folder: Path, shapes: dict[str, tuple[int, ...]], *states: str, **facts: Any
) -> Checkpoint:
    arrays = {
        (name, state): random_array(shape, "float32", seed)
        for seed, (name, shape) in enumerate(shapes.items())
        for state in ("weight", *states)
    }
    return Checkpoint(FakeSource.write(LocalStore(folder), arrays, **facts))


def metadata_of(folder: Path) -> Any:
    return FileSystemReader(folder).read_metadata()


class TestMegatron(TrainedSuite):
    kind = "megatron"
    parameters = (
        "embedding.word_embeddings.weight",
        "decoder.final_layernorm.bias",
        "output_layer.weight",
    )

    def load(self, place: Path) -> dict[tuple[str, str], Any]:
        """All that DCP has; the fp32 copy of a parameter is the parameter."""
        assert json.loads((place / "metadata.json").read_text())
        metadata_of(place)  # what follows raises no Exception if there is none
        found = {}
        for key, value in state_of(place, place.with_name(f"{place.name}.loaded")).items():
            if isinstance(value, torch.Tensor):
                state, _, name = key.removeprefix("optimizer.state.").partition(".")
                is_state = key.startswith("optimizer.")
                found[(name, state) if is_state else (key, "weight")] = value.numpy()
        for name in self.parameters:
            assert (found.pop((name, "param")) == found[name, "weight"]).all()
        return found


@pytest.mark.parametrize("how", ["direct", "universal"])
@pytest.mark.parametrize("name", ["tp2-dp2-full", "tp2-tied", "pp2-bf16-tied", "ep2-moe"])
def test_what_megatron_wrote_goes_back_as_it_was(name: str, how: str, tmp_path: Path) -> None:
    """With the distributed optimizer, and without it: of an fp32 model, of 16 bits, and of two optimizers."""
    place = DATA / "megatron" / name / "sharded" / "iter_0000002"
    source = place if how == "direct" else ucformat.convert(place, tmp_path / "universal").url
    done = export(source, tmp_path / "out", "megatron", max_item_bytes=100, max_file_bytes=9000)
    assert done.left_out == ()
    before, after = metadata_of(place), metadata_of(tmp_path / "out")
    assert after.state_dict_metadata.keys() == before.state_dict_metadata.keys()
    assert after.planner_data is None
    assert (
        differences(state_of(place, tmp_path / "a"), state_of(tmp_path / "out", tmp_path / "b"))
        == []
    )
    common = [torch.load(f / "common.pt", weights_only=False) for f in (place, tmp_path / "out")]
    common = [{**c, "args": vars(c["args"])} for c in common]
    assert differences(*common) == []
    assert json.loads((tmp_path / "out" / "metadata.json").read_text()) == json.loads(
        (place / "metadata.json").read_text()
    )
    assert {Global(*g) for g in globals_of(tmp_path / "out")} <= ALLOWED


@pytest.mark.parametrize("name", ["tp2-dp2-full", "vpp2"])
def test_a_distributed_optimizer_becomes_one_that_is_not(name: str, tmp_path: Path) -> None:
    """Without it the step is in `common_step`, and only 16-bit parameters have fp32 copies."""
    source = ucformat.open(DATA / "megatron" / name / "sharded")
    export(source, tmp_path / "out", "megatron", distributed_optimizer=False)
    keys = metadata_of(tmp_path / "out").state_dict_metadata.keys()
    assert not any(".state.param." in key for key in keys)
    assert any(".state.fp32_param." in key for key in keys) is (name == "tp2-dp2-full")
    common = torch.load(tmp_path / "out" / "common.pt", weights_only=False)
    optimizer = common["optimizer"].get("optimizer", common["optimizer"])
    assert optimizer["state"] == {"common_step": torch.tensor(2.0)}
    assert not any("step" in group for group in optimizer["param_groups"])
    assert "distrib_optim_sharding_type" not in common["content_metadata"]
    found = ucformat.open(tmp_path / "out")
    assert all(
        found[k][...].tobytes() == source[k][...].tobytes()
        for k in source.tensors
        if k in found.tensors
    )


@pytest.mark.parametrize("kind", ["sharded", "classic"])
@pytest.mark.parametrize("name", KEPT)
def test_every_layout_becomes_one(name: str, kind: str, tmp_path: Path) -> None:
    source = ucformat.open(DATA / "megatron" / name / kind)
    export(source, tmp_path / "out", "megatron", distributed_optimizer=True)
    found = ucformat.open(tmp_path / "out")
    assert found.kind == "megatron"
    steps = {k for k in source.tensors if k.state == "step"}  # which are one number in the groups
    assert not source.tensors.keys() - steps - found.tensors.keys()
    assert all(
        found[k][...].tobytes() == source[k][...].tobytes()
        for k in source.tensors
        if k not in steps
    )
    masters = {k for k in found.tensors if k not in source.tensors}
    assert all(k.state.startswith("master") for k in masters)
    assert all(
        found[k][...].tobytes()
        == source[k.name, k.state.replace("master", "weight")][...].tobytes()
        for k in masters
    )
    assert found.aliases == source.aliases
    assert found.metadata.step == source.metadata.step
    groups = [[sorted(g["params"]) for g in ck.metadata.groups] for ck in (found, source)]
    assert groups[0] == groups[1]
    assert [g["step"] for g in found.metadata.groups] == [2.0] * len(groups[0])


def test_hugging_face_names_become_megatrons_by_a_view(tmp_path: Path) -> None:
    names = {
        "model.embed_tokens.weight": (20, 8),
        "model.norm.weight": (8,),
        "lm_head.weight": (20, 8),
        **{f"model.layers.{i}.input_layernorm.weight": (8,) for i in range(2)},
        **{f"model.layers.{i}.post_attention_layernorm.weight": (8,) for i in range(2)},
        **{f"model.layers.{i}.self_attn.{p}_proj.weight": (8, 8) for i in range(2) for p in "qkvo"},
        **{
            f"model.layers.{i}.mlp.{p}_proj.weight": (12, 8)
            for i in range(2)
            for p in ("gate", "up")
        },
        **{f"model.layers.{i}.mlp.down_proj.weight": (8, 12) for i in range(2)},
    }
    groups = ({"params": list(names), "lr": 0.1, "betas": [0.9, 0.95], "state": {"step": 4}},)
    source = fake(tmp_path / "src", names, "exp_avg", "exp_avg_sq", groups=groups)
    with pytest.raises(
        UnsupportedError, match=r"names that Megatron does not have: model\.embed_tokens"
    ) as caught:
        export(source, tmp_path / "out", "megatron")
    assert "llama-to-megatron" in (caught.value.hint or "")
    view = source.view([{"preset": "llama-to-megatron", "with": {"heads": 4, "groups": 4}}])
    export(view, tmp_path / "out", "megatron")
    meta = metadata_of(tmp_path / "out").state_dict_metadata
    assert tuple(meta["decoder.layers.mlp.linear_fc1.weight"].size) == (2, 24, 8)
    assert tuple(meta["optimizer.state.param.decoder.layers.mlp.linear_fc1.weight"].size) == (
        2,
        24,
        8,
    )
    assert "decoder.layers.mlp.linear_fc2._extra_state/shard_1_2" in meta
    found = ucformat.open(tmp_path / "out")
    assert all(found[k][...].tobytes() == view[k][...].tobytes() for k in view.tensors)
    common = torch.load(tmp_path / "out" / "common.pt")  # with the restricted unpickler
    first, second = common["optimizer"]["optimizer"]["param_groups"]
    assert (first["wd_mult"], second["wd_mult"], first["step"], second["step"]) == (
        1.0,
        0.0,
        4.0,
        4.0,
    )
    assert first["betas"] == (0.9, 0.95)
    assert "params" not in first


def test_layers_that_differ_have_numbers_in_their_keys(tmp_path: Path) -> None:
    shapes = {NORM.format(0): (4,), NORM.format(1): (4,), FC1.format(0): (6, 4)}
    shapes |= {EXPERT.format(1, e): (6, 4) for e in range(3)}
    export(fake(tmp_path / "src", shapes), tmp_path / "out", "megatron")
    meta = metadata_of(tmp_path / "out").state_dict_metadata
    shapes_found = {k: tuple(v.size) for k, v in meta.items() if not k.count("_extra_state")}
    assert shapes_found == {
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": (4,),
        "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight": (4,),
        "decoder.layers.0.mlp.linear_fc1.weight": (6, 4),
        "decoder.layers.1.mlp.experts.experts.linear_fc1.weight": (3, 6, 4),
    }


@pytest.mark.parametrize("single", [False, True])
def test_keys_that_are_listed(tmp_path: Path, *, single: bool) -> None:
    """Of a bare block, of layers in a module that is called layers, and of multi-token prediction; fc2 is frozen."""
    shapes = {
        "layers.0.mlp.linear_fc1.weight": (8, 3),
        "layers.1.mlp.linear_fc1.weight": (8, 3),
        "layers.0.mlp.linear_fc2.weight": (3, 4),
        "layers.1.mlp.linear_fc2.weight": (3, 4),
        "vision.layers.tower.layers.0.w": (2,),
        "mtp.layers.0.eh_proj.weight": (2, 2),
    }
    arrays = {(n, "weight"): random_array(shape, "float32", 1) for n, shape in shapes.items()}
    for number in range(2):
        name = f"layers.{number}.mlp.linear_fc1.weight"
        arrays |= {(name, s): arrays[name, "weight"] for s in ("exp_avg", "master")}
    engine = {"name": "megatron-core"}
    objects = {"content_metadata": {"singleton_local_shards": single}}
    store = LocalStore(tmp_path)
    ck = Checkpoint(FakeSource.write(store, arrays, engine=engine, objects=objects))
    keys = {name: entry.shape for name, entry in listed_keys(ck)[0].items()}
    of_weights = {key: shape for key, shape in keys.items() if not key.startswith("optimizer.")}
    moments = {k for k in keys if k.startswith("optimizer.state.exp_avg.")}
    if single:
        assert of_weights == {
            "layers.0.mlp.linear_fc1.weight_w": (4, 3),
            "layers.0.mlp.linear_fc1.weight_v": (4, 3),
            "layers.1.mlp.linear_fc1.weight_w": (4, 3),
            "layers.1.mlp.linear_fc1.weight_v": (4, 3),
            "layers.0.mlp.linear_fc2.weight": (3, 4),
            "layers.1.mlp.linear_fc2.weight": (3, 4),
            "vision.layers.tower.layers.0.w": (2,),
            "mtp.layers.0.eh_proj.weight": (2, 2),
        }
        ends = [f"{i}.mlp.linear_fc1.weight_{half}" for i in range(2) for half in "vw"]
        assert sorted(moments) == [f"optimizer.state.exp_avg.layers.{end}" for end in ends]
    else:
        assert of_weights == {
            "layers.mlp.linear_fc1.weight": (2, 8, 3),
            "layers.mlp.linear_fc2.weight": (2, 3, 4),
            "vision.layers.tower.layers.w": (1, 2),
            "mtp.layers.0.eh_proj.weight": (2, 2),
        }
        assert moments == {"optimizer.state.exp_avg.layers.mlp.linear_fc1.weight"}


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({QKV.format(0): (4, 2), QKV.format(2): (4, 2)}, "2 layers or experts"),
        ({QKV.format(0): (4, 2), QKV.format(1): (5, 2)}, "Megatron stacks them in one tensor"),
        ({"decoder.layers.0.self_attn.q.weight": (4, 2)}, "names that Megatron does not have"),
        (
            {"layers.0.weight": (4, 2), "decoder.final_layernorm.weight": (2,)},
            "does not have: layers",
        ),
    ],
)
def test_what_megatron_cannot_hold(
    shapes: dict[str, tuple[int, ...]], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        export(fake(tmp_path / "src", shapes), tmp_path / "out", "megatron")


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([{"params": [QKV.format(0)], "lr": 1.0}], "not the hyper-parameters"),
        (
            [{"params": [QKV.format(0)], "lr": 1.0}, {"params": [QKV.format(1)], "lr": 2.0}],
            "different hyper-parameters",
        ),
        (
            [
                {
                    "params": [QKV.format(0), QKV.format(1)],
                    "state": {"step": {QKV.format(0): 1, QKV.format(1): 2}},
                }
            ],
            "one number",
        ),
    ],
)
def test_an_optimizer_that_megatron_cannot_have(
    groups: list[Any], message: str, tmp_path: Path
) -> None:
    source = fake(
        tmp_path / "src",
        {QKV.format(0): (4, 2), QKV.format(1): (4, 2)},
        "exp_avg",
        groups=tuple(groups),
    )
    with pytest.raises(UnsupportedError, match=message):
        export(source, tmp_path / "out", "megatron")
    done = export(source, tmp_path / "out", "megatron", states="weight")
    assert done.left_out == ("exp_avg of 2 tensors", "the optimizer groups")


def test_a_model_in_bf16_needs_its_fp32_copy(tmp_path: Path) -> None:
    arrays = {
        (QKV.format(0), "weight"): random_array((4, 2), "bfloat16"),
        (QKV.format(0), "exp_avg"): random_array((4, 2), "float32"),
    }
    source = Checkpoint(FakeSource.write(LocalStore(tmp_path / "src"), arrays))
    with pytest.raises(UnsupportedError, match="needs fp32 copies"):
        export(source, tmp_path / "out", "megatron")


def test_neither_loader_takes_an_unfinished_folder_for_a_checkpoint() -> None:
    source = ucformat.open(FULL)
    target = EXPORTERS["megatron"]().target(source, list(source.tensors.values()))
    assert [f.key for f in target.files if f.last] == [".metadata", "metadata.json"]
    assert "common.pt" in [f.key for f in target.files if not f.last]


DISTRIBUTED = {"distributed_optimizer": True}
MOE = {"swiglu": True, "experts": 2, "bf16": True}
LAYOUTS = [
    pytest.param("tp2-dp2-full", {"layers": 1, "bf16": True}, 2, {}, id="dense-dp2"),
    pytest.param("tp2-dp2-full", {"layers": 1, "bf16": True, "tp": 2}, 4, {}, id="dense-tp2-dp2"),
    pytest.param(
        "pp2-bf16-tied",
        {"bf16": True, "swiglu": True, "tied": True, "tp": 2},
        2,
        DISTRIBUTED,
        id="tied-tp2",
    ),
    pytest.param(
        "pp2-bf16-tied",
        {"bf16": True, "swiglu": True, "tied": True, "pp": 2},
        4,
        DISTRIBUTED,
        id="tied-pp2-dp2",
    ),
    pytest.param("ep2-dp2-flat", {**MOE, "ep": 2}, 2, {}, id="moe-ep2"),
    pytest.param("ep2-dp2-flat", {**MOE, "pp": 2}, 2, {"expert_parallel": False}, id="moe-pp2"),
]


@pytest.mark.matrix
@pytest.mark.parametrize(("name", "layout", "ranks", "options"), LAYOUTS)
def test_megatron_loads_it(
    name: str, layout: dict[str, Any], ranks: int, options: Any, tmp_path: Path
) -> None:
    spec = {**layout, "optimizer": "fully_reshardable"}
    export(
        DATA / "megatron" / name / "classic",
        tmp_path / "out",
        "megatron",
        max_item_bytes=200,
        **options,
    )
    job = {"spec": spec, "from": str(tmp_path / "out"), "to": str(tmp_path / "found")}
    run_engine("megatron", ranks, "megatron/load_megatron.py", [json.dumps(job)])
    truth, found = (
        load_file(f / "truth.safetensors")
        for f in (DATA / "megatron" / name, tmp_path / "found" / "loaded")
    )
    assert [k for k in truth if ".padding/" not in k and not torch.equal(truth[k], found[k])] == []


@pytest.mark.matrix
@pytest.mark.parametrize(("layout", "ranks"), [({"tp": 2}, 4), ({}, 2)])
def test_megatron_resumes_as_from_its_own(
    layout: dict[str, Any], ranks: int, tmp_path: Path
) -> None:
    export(FULL, tmp_path / "out", "megatron")
    resumed: list[Any] = []
    for place in (FULL, tmp_path / "out"):
        spec = {"layers": 1, "bf16": True, "optimizer": "fully_reshardable", **layout}
        job = {"spec": spec, "from": str(place), "to": str(tmp_path / f"found-{len(resumed)}")}
        run_engine("megatron", ranks, "megatron/load_megatron.py", [json.dumps(job)])
        resumed.append(
            load_file(tmp_path / f"found-{len(resumed)}" / "resumed" / "truth.safetensors")
        )
    assert differences(*resumed) == []
    assert (
        differences(resumed[0], load_file(DATA / "megatron" / "tp2-dp2-full" / "truth.safetensors"))
        != []
    )
