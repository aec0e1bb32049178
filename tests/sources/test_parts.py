"""A part of a checkpoint is not opened as the whole; opened knowingly, it says so, and so does what is made of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import ucformat
from ucformat.checkpoint import open_checkpoint
from ucformat.errors import MissingData, NotACheckpoint, UnsupportedError
from ucformat.schema.manifest import LineageDoc

torch = pytest.importorskip("torch")

if TYPE_CHECKING:
    from collections.abc import Mapping

MEGATRON = Path(__file__).parents[1] / "data" / "megatron" / "tp2-pp2-flat" / "classic"
ITERATION = MEGATRON / "iter_0000002"
DEEPSPEED = Path(__file__).parents[1] / "data" / "deepspeed"
DCP = Path(__file__).parents[1] / "data" / "dcp"
BYTECHECKPOINT = Path(__file__).parents[1] / "data" / "bytecheckpoint"
ARGUMENTS = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}


def saved(path: Path, names: tuple[str, ...] = ("w",), **values: Any) -> Path:
    """A file with tensors of these names, and of torch.save also values."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".safetensors":
        save_file({name: np.ones((2, 3), np.float32) for name in names}, path)
    else:
        tensors = {name: torch.ones(2, 3) for name in names}
        torch.save({"model": tensors, **values} if values else tensors, path)
    return path


def refused(place: Path, match: str = "only a part of a checkpoint", **options: Any) -> None:
    with pytest.raises(NotACheckpoint, match=match) as error:
        open_checkpoint(place, options=options)
    assert "part" in str(error.value.hint)


PARTS = """
model-00001-of-00004.safetensors  pytorch_model-00004-of-00004.bin  m_1_of_2.pt  part-2of3.bin  00003-of-00005.pth
rank_1.pt  model_rank0.pt  ckpt.rank-3.pt  mp_rank_01.pt  tp1.safetensors  llama-tp0-pp1.pt  model.pp_2.bin  shard3.pt
model-rank-0-part-0.safetensors  rank1.safetensors  model.shard-00002.safetensors  weights.part_4.pt  tp_rank_00.ckpt
model_world_size_4_rank_2.pt  optim_world_size_4_rank_0.pt  extra_state_rank_0.pt  pytorch_model_fsdp_rank1.bin
pytorch_model_fsdp_0_rank0.bin  checkpoint_1-model_part-0.pt  checkpoint-shard0.pt  stage_0.pt  model.mp1.ckpt
zero_pp_rank_0_mp_rank_00_optim_states.pt  mp_rank_00_model_states.pt  layer_03-model_00-model_states.pt
layer_0_expert_3_mp_rank_00_model_states.pt  expp_rank_0_mp_rank_00_optim_states.pt  layer_01-model_states.pt
bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt  distrib_optim.pt  model_optim_rng.pt  partition=2.pt
"""

WHOLES = """
model.safetensors  pytorch_model.bin  model-00001-of-00001.safetensors  epoch_1_of_10.ckpt  step-100-of-1000.pt
checkpoint-500.pt  epoch=3-step=120.ckpt  model_ep10.pt  iter_0000100.pth  lora_rank32.safetensors  checkpoint_3.pt
adapter-rank-8.safetensors  pytorch_lora_weights_rank64.safetensors  llava_stage2.pt  best_frank1.pt  department1.pt
model_world_size_1_rank_0.pt  rank_0_of_1.pt  llama3_8b.pt  v0.1.pt  fp16.pt  sdxl-1.0.safetensors  stp1.pt  gpu.pt
consolidated.00.pth  consolidated.safetensors  whisper-large-v3.pt  t5_11b.bin  partial.pt  ranked2.pt  mp3tts.pt
"""


def test_a_file_that_is_named_as_a_part(tmp_path: Path) -> None:
    for n, name in enumerate(PARTS.split()):
        path = saved(tmp_path / str(n) / name)
        refused(path)
        assert open_checkpoint(path, options={"part": True}).metadata.part_of, name
        assert not open_checkpoint(path, options={"part": False}).metadata.part_of, name


def test_a_file_that_is_not(tmp_path: Path) -> None:
    for n, name in enumerate(WHOLES.split()):
        assert not open_checkpoint(saved(tmp_path / str(n) / name)).metadata.part_of, name
        assert not open_checkpoint(tmp_path / str(n)).metadata.part_of, name


def test_a_file_in_the_folder_of_a_rank(tmp_path: Path) -> None:
    for name in (
        "mp_rank_00",
        "mp_rank_01_000",
        "rank_1",
        "tp1",
        "tp0_pp1",
        "shard-2",
        "ckpt_rank3",
        "1-of-2",
    ):
        for file in ("model.safetensors", "pytorch_model.bin"):
            path = saved(tmp_path / name / file)
            refused(path, name if "of" not in name else "one of 2")
            refused(path.parent)
            assert open_checkpoint(path.parent, options={"part": True}).metadata.part_of
            path.unlink()
    for name in (
        "llama-tp8-merged",
        "stage2",
        "rank_8/adapter",
        "node3",
        "frank_1",
        "1-of-1",
        "lora_rank_8",
        "part1",
    ):
        saved(tmp_path / name / "model.safetensors")
        assert not open_checkpoint(tmp_path / name).metadata.part_of, name


def test_files_that_complete_each_other(tmp_path: Path) -> None:
    """Numbers alone mean nothing, but other layers of the same model do."""
    layers = {
        0: ("emb.weight", "layers.0.w", "layers.1.w"),
        1: ("layers.2.w", "layers.3.w", "head.weight"),
    }
    for suffix in ("safetensors", "pt"):
        for n, names in layers.items():
            saved(tmp_path / f"half_{n}.{suffix}", names)
            saved(tmp_path / "stage" / f"stage_{n}.{suffix}", names)
            saved(tmp_path / "epochs" / f"model_{n}.{suffix}", layers[0])
            saved(tmp_path / "gan" / f"net_{n}.{suffix}", (f"{'GD'[n]}.weight",))
        for n in layers:
            refused(tmp_path / f"half_{n}.{suffix}", "other layers or tensors of the same model")
            refused(tmp_path / "stage" / f"stage_{n}.{suffix}")
            for whole in ("epochs/model", "gan/net"):
                assert open_checkpoint(tmp_path / f"{whole}_{n}.{suffix}").names()
    saved(tmp_path / "ends" / "m_0.pt", ("model.embed.weight",))
    saved(tmp_path / "ends" / "m_1.pt", ("model.norm.weight", "head.weight"))
    refused(tmp_path / "ends" / "m_1.pt", "other layers or tensors of the same model")
    for n in layers:
        saved(tmp_path / "dotted" / f"m.0{n}.pth")
        saved(tmp_path / "later" / f"m.0{n + 4}.pth")
        saved(tmp_path / "devices" / f"gpu{n}.pt")
    refused(tmp_path / "dotted" / "m.01.pth", "one of 2 numbered files")
    refused(tmp_path / "devices" / "gpu1.pt", r"gpu 1, beside gpu0\.pt")
    assert open_checkpoint(tmp_path / "later" / "m.04.pth").names() == ["w"]


def test_a_file_of_an_index(tmp_path: Path) -> None:
    files = {"text.safetensors": ("a", "b"), "vision.safetensors": ("c",)}
    for file, names in files.items():
        saved(tmp_path / file, names)
    index = {"weight_map": {name: file for file, names in files.items() for name in names}}
    (tmp_path / "m.safetensors.index.json").write_text(json.dumps(index))
    refused(tmp_path / "vision.safetensors", r"one of the 2 files of m\.safetensors\.index\.json")
    assert open_checkpoint(tmp_path / "m.safetensors.index.json").names() == ["a", "b", "c"]


def test_what_arguments_in_the_file_say(tmp_path: Path) -> None:
    from argparse import Namespace

    whole, cut = Namespace(**ARGUMENTS), Namespace(**{**ARGUMENTS, "tensor_model_parallel_size": 2})
    assert open_checkpoint(
        saved(tmp_path / "mp_rank_00" / "model_optim_rng.pt", args=whole)
    ).names() == ["w"]
    parts: tuple[dict[str, Any], ...] = (
        {"args": cut},
        {"args": Namespace(**{**ARGUMENTS, "pipeline_model_parallel_size": 4})},
        {"args": Namespace(**{**ARGUMENTS, "expert_model_parallel_size": 2})},
        {"args": Namespace(model_parallel_size=8)},
        {"hyper_parameters": {**ARGUMENTS, "tensor_model_parallel_size": 2}},
        {"mp_world_size": 2},
        {"ds_version": "0.19.8"},
    )
    for n, values in enumerate(parts):
        refused(saved(tmp_path / f"{n}.pt", **values))


def test_real_ranks_under_other_names(tmp_path: Path) -> None:
    """What engines wrote, with nothing but the content to tell."""
    for n, (source, name) in enumerate(
        (
            (ITERATION / "mp_rank_00_000" / "model_optim_rng.pt", "model.pt"),
            (ITERATION / "mp_rank_01_001" / "model_optim_rng.pt", "pytorch_model.bin"),
            (next((DEEPSPEED / "tp2-z0").rglob("mp_rank_01_model_states.pt")), "model.pt"),
        )
    ):
        place = tmp_path / str(n)
        place.mkdir()
        shutil.copy(source, place / name)
        refused(place / name)
        refused(place)


def test_what_engines_wrote() -> None:
    parts = [
        ITERATION / "mp_rank_00_000",
        ITERATION / "mp_rank_01_000" / "distrib_optim.pt",
        next((DEEPSPEED / "pp2-z0").rglob("layer_*_states.pt")),
        next((DEEPSPEED / "ep2-z0").rglob("layer_*_expert_1_*")),
        next((DEEPSPEED / "tp2-dp2-z3").rglob("zero_pp_rank_1_mp_rank_00_model_states.pt")),
        next((DCP / "titan").rglob("__1_0.distcp")),
        next((BYTECHECKPOINT / "ddp").rglob("extra_state_rank_1.pt")),
        next((BYTECHECKPOINT / "ddp").rglob("__0_0.distcp")),
        next((DEEPSPEED / "universal-z1").rglob("fp32.pt")),
    ]
    for part in parts:
        refused(part)
    for whole in (ITERATION, MEGATRON, DCP / "titan" / "ckpt"):
        assert not open_checkpoint(whole).metadata.part_of


def test_dtensors_of_one_rank(tmp_path: Path) -> None:
    from tests.torch.ranks import Ranks

    ranks = Ranks("tests.sources.rank_files_program")
    local = ranks.run("save_ranks", 2, tmp_path / "two")
    for kind in ("model", "optim"):
        path = tmp_path / "two" / f"{kind}_world_size_2_rank_1.pt"
        refused(path, "rank 1 of 2|sharded over several")
        refused(
            Path(shutil.copy(path, tmp_path / f"{kind}.pt")),
            r"sharded over several \(DTensor, ShardedTensor\)",
        )
        ck = open_checkpoint(path, options={"part": True})
        assert ck.metadata.part_of
        if kind == "model":
            assert {n: ck[n].read().ravel().tolist() for n in ck} == local[1]
    whole = ranks.run("save_ranks", 1, tmp_path / "one")[0]
    ck = open_checkpoint(
        Path(shutil.copy(tmp_path / "one" / "model_world_size_1_rank_0.pt", tmp_path / "rank_0.pt"))
    )
    assert {n: ck[n].read().ravel().tolist() for n in ck} == whole


def llama(dim: int, ranks: int = 1, version: int = 2) -> dict[str, Any]:
    """The tensors of one of Meta's ranks."""
    part = dim // ranks
    shapes: dict[str, tuple[int, ...]] = {
        "tok_embeddings.weight": (64, part) if version == 2 else (64 // ranks, dim),
        "norm.weight": (dim,),
        "layers.0.attention.wq.weight": (part, dim),
        "layers.0.attention.wo.weight": (dim, part),
    }
    return {name: torch.ones(shape) for name, shape in shapes.items()}


def test_shapes_of_one_rank_of_meta(tmp_path: Path) -> None:
    for version in (2, 3):
        torch.save(llama(32, 4, version), tmp_path / "consolidated.02.pth")
        refused(
            tmp_path / "consolidated.02.pth",
            "one of 4 tensor-parallel ranks, according to its shapes",
        )
        refused(tmp_path, "one of 4 tensor-parallel ranks")
        torch.save(llama(32, 1, version), tmp_path / "consolidated.02.pth")
        assert open_checkpoint(tmp_path).names()
    narrow = {
        **llama(32),
        "layers.0.attention.wo.weight": torch.ones(32, 16),
    }  # heads narrower than the model
    torch.save(
        {**narrow, "layers.0.attention.wo.weight": torch.ones(32, 24)},
        tmp_path / "consolidated.02.pth",
    )
    assert open_checkpoint(tmp_path).names()
    torch.save(narrow, tmp_path / "consolidated.02.pth")
    refused(tmp_path)
    (tmp_path / "params.json").write_text(json.dumps({"dim": 32, "n_heads": 2, "head_dim": 8}))
    assert open_checkpoint(tmp_path).names()
    (tmp_path / "params.json").write_text(json.dumps({"dim": 32, "n_heads": 4, "head_dim": 8}))
    refused(tmp_path, "one of 2 tensor-parallel ranks")


def test_a_folder_of_parts_that_nothing_describes(tmp_path: Path) -> None:
    for suffix in ("pt", "safetensors"):
        for rank in range(2):
            saved(tmp_path / suffix / f"model_rank_{rank}.{suffix}")
        with pytest.raises(
            UnsupportedError, match=rf"parts of a checkpoint.*model_rank_0\.{suffix}, model_rank_1"
        ) as error:
            open_checkpoint(tmp_path / suffix)
        assert "open one of them" not in str(error.value)


class TestOpenedKnowingly:
    @pytest.fixture
    def part(self, tmp_path: Path) -> ucformat.Checkpoint:
        shutil.copytree(ITERATION / "mp_rank_01_000", tmp_path / "mp_rank_01_000")
        return ucformat.open(
            tmp_path / "mp_rank_01_000" / "model_optim_rng.pt", options={"part": True}
        )

    def says(self, layout: Mapping[str, Any]) -> None:
        assert "tensor_model_parallel_size 2" in layout["part_of"]

    def test_everything_that_is_made_of_it_says_so(
        self, tmp_path: Path, part: ucformat.Checkpoint
    ) -> None:
        self.says(part.manifest.layout)
        made = ucformat.convert(part, tmp_path / "u")
        self.says(made.manifest.layout)
        self.says(ucformat.open(tmp_path / "u").metadata.layout)
        assert "tensor_model_parallel_size 2" in ucformat.verify(made).part_of
        self.says(
            ucformat.convert(part, tmp_path / "v", virtual=True, unprotected=True).manifest.layout
        )
        self.says(ucformat.convert(made, tmp_path / "w", weights="safetensors").manifest.layout)
        refused(Path(str(ucformat.open(tmp_path / "w").hf_url)), "tensor_model_parallel_size 2")
        self.says(ucformat.average([made, tmp_path / "v"], tmp_path / "a").manifest.layout)
        self.says(ucformat.convert(tmp_path / "a", tmp_path / "again").manifest.layout)

    def test_exports_say_so(self, tmp_path: Path, part: ucformat.Checkpoint) -> None:
        assert (
            not ucformat.export(part, tmp_path / "st", "safetensors")
            .left_out[0]
            .startswith("that it is")
        )
        refused(tmp_path / "st", "tensor_model_parallel_size 2")
        done = ucformat.export(part, tmp_path / "model.pt", "torch")
        assert done.left_out[0].startswith(
            "that it is only a part of a checkpoint: one rank's part"
        )

    def test_what_a_training_saves_after_loading_it(
        self, tmp_path: Path, part: ucformat.Checkpoint
    ) -> None:
        from ucformat.jobs.record import lineage_to
        from ucformat.torch import save

        edge = lineage_to(part, "finetune")
        assert isinstance(edge, LineageDoc)
        save({"w": torch.ones(3)}, tmp_path / "s", lineage=[edge])
        self.says(ucformat.open(tmp_path / "s").manifest.layout)

    def test_a_whole_one_is_called_a_part_if_its_user_says_so(self, tmp_path: Path) -> None:
        made = ucformat.convert(ucformat.open(ITERATION, options={"part": True}), tmp_path / "u")
        assert made.manifest.layout["part_of"] == "one part, as its user says"


def shards(folder: Path, *sizes: int) -> Path:
    """The shards of DCP's safetensors writer, of ranks that have this many rows of a tensor."""
    folder.mkdir()
    for rank, size in enumerate(sizes):
        info = json.dumps({"w": {"saved_offsets": [sum(sizes[:rank]), 0]}})
        path = folder / f"shard-{rank + 1:05}-model-00001-of-00001.safetensors"
        save_file({"w": np.full((size, 3), rank, np.float32)}, path, {"DCP_SHARDING_INFO": info})
    return folder


def test_shards_of_pytorch_s_writer(tmp_path: Path) -> None:
    """The safetensors shards of DCP do not record how many ranks saved; only a shorter piece at the end proves it."""
    for number, sizes in enumerate(((4, 1), (4, 4, 2), (3, 3, 3, 1))):
        whole = shards(tmp_path / f"whole{number}", *sizes)
        assert ucformat.open(whole)["w"].shape == (sum(sizes), 3)
        max(whole.iterdir()).unlink()
        refused(whole, f"the shards of {len(sizes) - 1} ranks|the shards of one rank")
    for number, sizes in enumerate(
        ((2,), (2, 2), (2, 2, 1), (3, 2, 3, 2))
    ):  # 5 rows may be of four ranks, too
        part = shards(tmp_path / f"part{number}", *sizes)
        refused(part, "nothing tells how many saved")
        assert ucformat.open(part, options={"part": False})["w"].shape == (sum(sizes), 3)
        assert "nothing tells" in str(ucformat.open(part, options={"part": True}).metadata.part_of)
    first = tmp_path / "part0" / "shard-00001-model-00001-of-00001.safetensors"
    first.rename(first.with_name("shard-00001-model-00001-of-00002.safetensors"))
    with pytest.raises(MissingData, match=r"has no shard-.*-model-00002-of-00002.* of any rank"):
        ucformat.open(first.parent)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize("indexed", [True, False])
def test_a_set_of_which_a_file_is_missing(tmp_path: Path, suffix: str, *, indexed: bool) -> None:
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    files = {f"{stem}-0000{n}-of-00003.{suffix}": f"w{n}" for n in (1, 2, 3)}
    for file, name in files.items():
        saved(tmp_path / file, (name,)) if suffix == "safetensors" else torch.save(
            {name: torch.ones(2)}, tmp_path / file
        )
    index = tmp_path / f"{stem}.{suffix}.index.json"
    if indexed:
        index.write_text(json.dumps({"weight_map": {name: file for file, name in files.items()}}))
    assert open_checkpoint(tmp_path).names() == ["w1", "w2", "w3"]
    (tmp_path / f"{stem}-00002-of-00003.{suffix}").unlink()
    for place in (tmp_path, *([index] if indexed else [])):
        with pytest.raises(MissingData, match="-00002-of-00003") as error:
            open_checkpoint(place)
        assert "as a part" in str(error.value.hint)
        ck = open_checkpoint(place, options={"part": True})
        assert ck.names() == ["w1", "w3"]
        assert str(ck.metadata.part_of).startswith("2 of the 3 files of ")
        with pytest.raises(MissingData, match="-00002-of-00003"):
            open_checkpoint(place, options={"part": False})
    made = ucformat.convert(ucformat.open(tmp_path, options={"part": True}), tmp_path / "made")
    assert made.manifest.layout["part_of"].startswith("2 of the 3 files of ")
    for path in tmp_path.glob(f"*.{suffix}"):
        path.unlink()
    if indexed:
        with pytest.raises(MissingData, match="-00001-of-00003"):
            open_checkpoint(index, options={"part": True})


def test_sharded_tensors_of_one_rank(tmp_path: Path) -> None:
    """FSDP1 saves what a rank has as a ShardedTensor; the last of three ranks has nothing of a small one."""
    from tests.torch.ranks import Ranks

    local = Ranks("tests.sources.rank_files_program").run("save_sharded", 3, tmp_path)
    for rank in range(3):
        (tmp_path / str(rank)).mkdir()
        path = Path(shutil.copy(tmp_path / f"rank{rank}.pt", tmp_path / str(rank) / "model.pt"))
        refused(path, r"sharded over several \(DTensor, ShardedTensor\)")
        ck = open_checkpoint(path, options={"part": True})
        assert "ShardedTensor" in str(ck.metadata.part_of)
        assert {n: ck[n].read().tolist() for n in ck} == local[rank]
    with pytest.raises(UnsupportedError, match=r"holds parts of a checkpoint.*rank0\.pt") as error:
        open_checkpoint(tmp_path)
    assert "give its path" in str(error.value.hint)


def test_a_file_of_dcp_alone(tmp_path: Path) -> None:
    """It has no names of tensors, so it cannot be opened at all, and the error does not promise that."""
    path = Path(shutil.copy(next((DCP / "titan").rglob("__1_0.distcp")), tmp_path))
    for options in ({}, {"part": True}):
        with pytest.raises(
            NotACheckpoint, match=r"only a part of a checkpoint: one file.*`\.metadata`"
        ) as error:
            open_checkpoint(path, options=options)
        assert "by itself it cannot be read" in str(error.value.hint)


def test_numbers_alone(tmp_path: Path) -> None:
    """Epochs have the same shapes; ranks may have other ones, or say who they are."""
    for n in range(2):
        torch.save(
            {"model": {"w": torch.full((4, 2), n), "b": torch.ones(2, 2)}},
            saved(tmp_path / f"epoch/m_{n}.pt"),
        )
        torch.save(
            {"w": torch.ones(4, 3 - n), "b": torch.ones(2, 2)}, saved(tmp_path / f"cut/m_{n}.pt")
        )
        torch.save({"w": torch.ones(3 - n, 3 - n)}, saved(tmp_path / f"sizes/m_{n}.pt"))
        torch.save({"a.lora_A": torch.ones(4, 3 - n)}, saved(tmp_path / f"lora/m_{n}.pt"))
        torch.save({"w": torch.ones(4, 3 - n)}, saved(tmp_path / f"sweep/m_{8 * n + 8}.pt"))
        value = {"model": {"w": torch.ones(4, 2)}, "rank": n, "world_size": 2}
        torch.save(value, saved(tmp_path / f"named/m_{n}.pt"))
        torch.save({**value, "rank": 0}, saved(tmp_path / f"first/m_{n}.pt"))
    for n in range(2):
        refused(
            tmp_path / f"cut/m_{n}.pt",
            "has the same tensors, each with another size of at most one dim",
        )
        refused(tmp_path / f"named/m_{n}.pt", "rank 1 of 2, according to its content")
        for folder in ("epoch", "sizes", "lora", "first"):
            assert open_checkpoint(tmp_path / folder / f"m_{n}.pt").names(), folder
        assert open_checkpoint(tmp_path / f"sweep/m_{8 * n + 8}.pt").names()


def test_one_rank_of_megatron_without_arguments(tmp_path: Path) -> None:
    path = saved(tmp_path / "iter_0000001" / "mp_rank_00" / "model_optim_rng.pt", iteration=1)
    for place in (tmp_path, path.parents[1], path.parent, path):
        refused(place, "one rank|one of several ranks|according to its name")
    assert open_checkpoint(path.parents[1], options={"part": False}).metadata.step == 1


def test_ranks_of_adapters_and_files_of_layers(tmp_path: Path) -> None:
    saved(tmp_path / "rank_8" / "model.safetensors", ("q.lora_A.weight", "q.lora_B.weight"))
    saved(tmp_path / "rank_16" / "adapter_model.safetensors")
    for rank in (8, 16):
        assert open_checkpoint(tmp_path / f"rank_{rank}").names()
    for n in range(2):
        for kind in ("expert", "layer"):
            saved(tmp_path / f"{kind}_{n}.safetensors")
    refused(tmp_path / "expert_1.safetensors", r"expert 1, beside expert_0\.safetensors")
    refused(tmp_path / "layer_0.safetensors", "layer 0, beside")
