from __future__ import annotations

import json
import pickle
import shutil
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from tests.engines.deepspeed.megatron_deepspeed import FLAT, gpt, write
from tests.engines.deepspeed.test_evidence import LAYER, added
from tests.engines.deepspeed.test_megatron_deepspeed import SMALL
from tests.sources.suite import SourceSuite, kept
from ucformat.checkpoint import Checkpoint, open_checkpoint
from ucformat.engines.huggingface.trainer import HuggingFace
from ucformat.errors import (
    AmbiguousLayout,
    IntegrityError,
    MissingData,
    UnsupportedError,
    UsageError,
)
from ucformat.geometry.layout import Layout
from ucformat.reading.values import from_json
from ucformat.storage.local import LocalStore
from ucformat.testing.sources import Sample

if TYPE_CHECKING:
    from pathlib import Path


def sample_of(kind: str, *, step: int | None = 3, aliases: bool = False) -> Sample:
    made = kept("huggingface", kind)
    tied = made.facts["tied"] if aliases else {}
    return Sample(made.folder, "ckpt", "huggingface", made.truth, tied, made.facts["groups"], step)


def numbered(sample: Sample, groups: list[list[str]]) -> Sample:
    """The optimizer's states under their numbers, as they stand where names are not certain."""
    number = {n: f"optimizer.{i}" for i, n in enumerate(n for group in groups for n in group)}
    truth = {(s, n if s == "weight" else number[n]): v for (s, n), v in sample.truth.items()}
    return replace(sample, truth=truth, groups=[[number[n] for n in group] for group in groups])


class TestTrainer(SourceSuite):
    outranked = frozenset({"safetensors"})

    @pytest.fixture
    def sample(self) -> Sample:
        return sample_of("trainer")

    def test_what_lies_beside_the_tensors(self, sample: Sample) -> None:
        ck = sample.open()
        assert ck.metadata.engine == {"name": "transformers", "version": "5.23.0"}
        assert ck.objects["trainer_state"]["global_step"] == 3
        assert ck.objects["scheduler"]["last_epoch"] == 3
        assert ck.objects["rng_state"]["0"].keys() == {"python", "numpy", "cpu"}
        assert (
            ck.objects["training_args"]["$class"] == "transformers.training_args.TrainingArguments"
        )
        assert ck.objects["training_args"]["$state"]["max_steps"] == 3
        assert json.loads(ck.assets["config.json"])["model_type"] == "llama"
        assert [g["weight_decay"] for g in ck.metadata.groups] == [0.0, 0.0]

    def test_without_its_family_the_optimizer_keeps_its_numbers(self, copy: Sample) -> None:
        groups = copy.groups or []
        config = json.loads((copy.path / "config.json").read_text())
        (copy.path / "config.json").write_text(json.dumps({**config, "model_type": "mine"}))
        ck = copy.open()
        assert ck.objects["unnamed"] == ["optimizer"]
        assert {(k.state, k.name) for k in ck.tensors} == numbered(copy, groups).truth.keys()
        told = Checkpoint(HuggingFace(groups={"optimizer": groups}).open(LocalStore(copy.path)))
        assert {(k.state, k.name) for k in told.tensors} == copy.truth.keys()
        assert [list(g["params"]) for g in told.metadata.groups] == groups

    def test_weights_alone(self, copy: Sample) -> None:
        for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
            (copy.path / name).unlink()
        assert {k.state for k in copy.open().tensors} == {"weight"}

    def test_ids_differ_where_only_the_weights_do(self, copy: Sample) -> None:
        for path in copy.path.glob("*.p*t*"):
            path.unlink()
        before = copy.open().id
        data = bytearray((copy.path / "model.safetensors").read_bytes())
        data[-1] ^= 1
        (copy.path / "model.safetensors").write_bytes(data)
        assert copy.open().id != before

    def test_a_class_of_ones_own_stays_a_pickle_that_trust_opens(self, copy: Sample) -> None:
        torch.save({"arguments": Arguments(7)}, copy.path / "training_args.bin")
        value = copy.open().objects["training_args"]
        assert value.keys() == {"$opaque"}
        assert from_json(value, {"$opaque": pickle.loads})["arguments"].lr == 7

    def test_both_optimizers_side_by_side(self, copy: Sample) -> None:
        shutil.copy(copy.path / "optimizer.pt", copy.path / "optimizer.bin")
        with pytest.raises(UsageError, match="are both present"):
            copy.open()

    def test_an_optimizer_that_is_none(self, copy: Sample) -> None:
        torch.save({"a": 1}, copy.path / "optimizer.pt")
        with pytest.raises(IntegrityError, match="is not an optimizer's state dict"):
            copy.open()

    def test_a_trainer_state_that_is_damaged(self, copy: Sample) -> None:
        (copy.path / "trainer_state.json").write_text("{")
        with pytest.raises(IntegrityError, match=r"trainer_state\.json is not JSON"):
            copy.open()

    def test_the_folder_of_the_run_names_its_checkpoints(
        self, sample: Sample, tmp_path: Path
    ) -> None:
        for step in (3, 12):
            shutil.copytree(sample.path, tmp_path / f"checkpoint-{step}")
        with pytest.raises(UsageError, match="it holds checkpoint-3, checkpoint-12") as error:
            open_checkpoint(tmp_path)
        assert str(error.value).endswith("checkpoint-12")

    def test_no_model(self, tmp_path: Path) -> None:
        (tmp_path / "trainer_state.json").write_text("{}")
        with pytest.raises(UsageError, match="no model and no optimizer"):
            open_checkpoint(tmp_path)


class Arguments:
    """A class that no framework knows."""

    def __init__(self, lr: int) -> None:
        self.lr = lr


class TestTrainerInBf16(SourceSuite):
    outranked = frozenset({"safetensors"})

    @pytest.fixture
    def sample(self) -> Sample:
        return sample_of("trainer_bf16")

    def test_each_ranks_generators_are_kept(self, sample: Sample) -> None:
        assert sample.open().objects["rng_state"].keys() == {"0", "1"}

    def test_a_ranks_generators_are_missing(self, copy: Sample) -> None:
        shutil.copy(copy.path / "rng_state_1.pth", copy.path / "rng_state_3.pth")
        with pytest.raises(
            MissingData, match=r"rng_state_2\.pth is missing: 3 of 4 ranks have a file of rng_state"
        ):
            copy.open()
        for rank in (0, 1, 3):
            (copy.path / f"rng_state_{rank}.pth").unlink()
        assert "rng_state" not in copy.open().objects

    def test_the_last_ranks_generators_are_missing(self, tmp_path: Path) -> None:
        """How many ranks there were is known from the engine's files."""
        shutil.copytree(sample_of("trainer_fsdp").path, tmp_path / "copy")
        (tmp_path / "copy" / "rng_state_1.pth").unlink()
        with pytest.raises(MissingData, match=r"rng_state_1\.pth is missing"):
            open_checkpoint(tmp_path / "copy")


class TestTrainerWithAnAdapter(SourceSuite):
    outranked = frozenset({"safetensors"})

    @pytest.fixture
    def sample(self) -> Sample:
        made = sample_of("trainer_adapter")
        return numbered(made, made.groups or [])

    def test_its_files_are_assets(self, sample: Sample) -> None:
        assert "adapter_config.json" in sample.open().assets


def zero(kind: str) -> Sample:
    """DeepSpeed keeps one `step` for each flat group, which the truth has not; and it has the one group here."""
    made = sample_of(kind)
    order = kept("huggingface", kind).facts["order"]
    return replace(made, groups=[order], extra=frozenset(("step", name) for name in order))


class TestTrainerWithZero2(SourceSuite):
    outranked = frozenset({"deepspeed", "safetensors"})

    most_requests = 60

    @pytest.fixture
    def sample(self) -> Sample:
        return zero("trainer_zero2")

    def test_the_exported_copy_is_not_listed(self, sample: Sample) -> None:
        assert (sample.path / "model.safetensors").exists()
        facts = sample.open().metadata
        assert "model.safetensors" not in facts.files
        assert facts.engine["engine"] == "deepspeed"
        assert facts.layout == {"zero": 2, "dp": 2}


class TestTrainerWithZero3(SourceSuite):
    outranked = frozenset({"deepspeed"})

    most_requests = 60

    @pytest.fixture
    def sample(self) -> Sample:
        return zero("trainer_zero3")


class TestTrainerWithFsdp(SourceSuite):
    @pytest.fixture
    def sample(self) -> Sample:
        return sample_of("trainer_fsdp")


class TestAccelerate(SourceSuite):
    outranked = frozenset({"safetensors"})

    @pytest.fixture
    def sample(self) -> Sample:
        made = sample_of("accelerate", step=None)
        return numbered(made, made.groups or [])

    def test_what_lies_beside_the_tensors(self, sample: Sample) -> None:
        objects = sample.open().objects
        assert objects["custom_checkpoint_0"]["seen"] == 12
        assert objects["random_states"]["0"]["step"] == 0
        assert objects["scheduler"]["step_size"] == 2
        assert objects["unnamed"] == ["optimizer"]


class TestAccelerateWithTwoModels(SourceSuite):
    outranked = frozenset({"safetensors"})

    @pytest.fixture
    def sample(self) -> Sample:
        return sample_of("accelerate_two", step=None)


class TestAccelerateWithWholeFsdp(SourceSuite):
    outranked = frozenset({"torch_save"})

    @pytest.fixture
    def sample(self) -> Sample:
        return sample_of("accelerate_fsdp_full", step=None)


@pytest.mark.parametrize(
    "name",
    [
        "pytorch_model_fsdp_0_rank1.bin",
        "optimizer_rank0.bin",
        "rank0-of-8-optimizer.pt",
        "user_content.pt",
    ],
)
def test_what_is_not_read(tmp_path: Path, name: str) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "trainer_state.json").write_text("{}")
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(UnsupportedError, match="not yet read"):
        open_checkpoint(tmp_path)


def test_several_deepspeed_models(tmp_path: Path) -> None:
    for folder in ("pytorch_model", "pytorch_model_1"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mp_rank_00_model_states.pt").write_bytes(b"")
    (tmp_path / "latest").write_text("pytorch_model_1")
    (tmp_path / "random_states_0.pkl").write_bytes(b"")
    with pytest.raises(UnsupportedError, match="several DeepSpeed models"):
        open_checkpoint(tmp_path)


def test_a_folder_of_fsdp_without_its_metadata(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model_fsdp_0").mkdir()
    (tmp_path / "pytorch_model_fsdp_0" / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(MissingData, match=r"\.metadata|metadata"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("extra", ["trainer_state.json", "random_states"])
def test_deepspeed_inside_is_told_what_its_hint_asks_for(tmp_path: Path, extra: str) -> None:
    name = LAYER + "adapter.up.weight"
    write(
        tmp_path,
        added(gpt(**SMALL), name, "replicate", dict.fromkeys(FLAT, np.zeros((3, 8)))),
        tp=2,
    )
    if extra.endswith("json"):
        (tmp_path / extra).write_text("{}")
    else:
        for rank in range(2):
            torch.save({}, tmp_path / f"random_states_{rank}.pkl")
    with pytest.raises(AmbiguousLayout, match=r"options=\{'cuts'"):
        open_checkpoint(tmp_path)
    assert open_checkpoint(tmp_path, options={"cuts": {name: "replicate"}})[name].shape == (3, 8)
    assert open_checkpoint(tmp_path, options={"cuts": {name: 0}})[name].shape == (6, 8)
    layout = Layout({"tp": 2}, [{"match": name, "place": ["replicate"]}])
    assert open_checkpoint(tmp_path, options={"layout": layout})[name].shape == (3, 8)
    with pytest.raises(
        UsageError, match=r"DeepSpeed is not opened with the option 'owners'(.|\n)*vocab"
    ):
        open_checkpoint(tmp_path, options={"owners": {"a": "b"}})


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_inside_is_told_what_its_hint_asks_for(tmp_path: Path) -> None:
    names = ["a.weight", "b.weight"]
    save = partial(dcp.save, no_dist=True)
    save(
        {"model": {n: torch.ones(2, 2) for n in names}},
        checkpoint_id=tmp_path / "pytorch_model_fsdp_0",
    )
    state = {i: {"exp_avg": torch.full((2, 2), float(i))} for i in range(2)}
    groups = [{"params": [0, 1], "lr": 0.5}]
    save(
        {"optimizer": {"state": state, "param_groups": groups}},
        checkpoint_id=tmp_path / "optimizer_0",
    )
    with pytest.raises(UsageError, match=r"options=\{'groups'"):
        list(open_checkpoint(tmp_path).metadata.groups)
    for given in ([names[::-1]], {"optimizer": [names[::-1]]}):
        ck = open_checkpoint(tmp_path, options={"groups": given})
        assert [list(g["params"]) for g in ck.metadata.groups] == [names[::-1]]
        assert ck["a.weight", "exp_avg"].read().tolist() == [[1, 1], [1, 1]]
    with pytest.raises(UsageError, match="PyTorch DCP is not opened with the option 'layout'"):
        open_checkpoint(tmp_path, options={"layout": "llama"})


def test_files_of_models_and_optimizers_take_no_options_of_an_engine() -> None:
    with pytest.raises(UsageError, match=r"not opened with the option 'cuts'(.|\n)*allow, groups"):
        open_checkpoint(sample_of("trainer").path, options={"cuts": {"*": 0}})


def sizes(name: str) -> dict[str, Any]:
    if name == "gpt2":
        return {"n_embd": 12, "n_layer": 2, "n_head": 3, "vocab_size": 31, "n_positions": 8}
    return {"vocab_size": 31, "hidden_size": 12, "intermediate_size": 19, "num_hidden_layers": 11, "head_dim": 4,
            "num_attention_heads": 3, "num_key_value_heads": 1, "max_position_embeddings": 8}  # fmt: skip


@pytest.mark.parametrize(
    "family", ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gpt2"]
)
def test_the_order_of_a_module_is_that_of_transformers(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    from ucformat.engines.huggingface.trainer_opened import FAMILIES, sort_names

    parts, name = FAMILIES[family]
    cls = getattr(transformers, name)
    biases = {"attention_bias": True} if family in ("llama", "qwen3", "gemma") else {}
    with torch.device("meta"):
        model = cls(cls.config_class(**sizes(family), **biases))
    names = [n for n, _ in model.named_parameters()]
    assert sort_names(sorted(names), parts) == names
    assert sort_names([*names, "model.something.weight"], parts) is None
