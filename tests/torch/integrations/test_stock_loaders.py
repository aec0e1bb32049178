"""What Trainer saves in any form, converted or exported, is loaded by the stock loaders of models and adapters."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from transformers import (
    AutoModelForCausalLM,
    GPT2TokenizerFast,
    LlamaConfig,
    LlamaForCausalLM,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

import ucformat
import ucformat.torch as ucf
from ucformat.engines.huggingface.live import SaveCallback, UniversalTrainer
from ucformat.errors import UnsupportedError

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is",
    "ignore::DeprecationWarning",
    "ignore:`is_gradient_checkpointing`",
    "ignore:Setting `save_embedding_layers`",
)

CONFIG = LlamaConfig(
    vocab_size=97,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=3,
    num_key_value_heads=3,
    tie_word_embeddings=True,
    pad_token_id=3,
)


class Texts(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(97, (11,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": tokens, "labels": tokens}


def tokenizer(folder: Path) -> Any:
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps({c: i for i, c in enumerate("abc<|endoftext|>")}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return GPT2TokenizerFast(str(folder / "vocab.json"), str(folder / "merges.txt"))


def trained(
    folder: Path, model: Any, form: str = "packed", steps: int = 4, resume: Any = None, **more: Any
) -> Any:
    class Saving(UniversalTrainer):
        save_options = {"form": form}  # noqa: RUF012

    arguments: dict[str, Any] = {
        "max_steps": steps,
        "save_steps": 2,
        "logging_steps": 1,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        **{k: more.pop(k) for k in list(more) if k not in ("processing_class", "callbacks")},
    }
    set_seed(7)
    of = Saving(
        model,
        TrainingArguments(output_dir=str(folder), **arguments),
        train_dataset=Texts(),
        eval_dataset=Texts(),
        data_collator=default_data_collator,
        **more,
    )
    of.train(resume_from_checkpoint=resume)
    return of


def outputs(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(torch.arange(11)[None]).logits
    return found


@pytest.mark.parametrize("form", ["packed", "zarr", "safetensors"])
def test_a_model_of_a_trainer_is_loaded_from_pretrained(tmp_path: Path, form: str) -> None:
    saving = SaveCallback(str(tmp_path / "callback"), form=form)
    words = tokenizer(tmp_path / "words")
    set_seed(1)
    trainer = trained(
        tmp_path / "run",
        LlamaForCausalLM(CONFIG),
        form,
        processing_class=words,
        callbacks=[saving],
        save_only_model=True,
    )
    expected = outputs(trainer.model)
    for n, place in enumerate(
        (tmp_path / "run" / "checkpoint-4", tmp_path / "callback" / "step-4")
    ):
        converted = ucformat.convert(place, tmp_path / f"model{n}", weights="safetensors")
        exported = ucformat.export(place, tmp_path / f"exported{n}", "safetensors")
        for folder in (converted.hf_url, exported.url):
            model, told = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
            assert not told["missing_keys"]
            assert torch.equal(outputs(model), expected)
            assert model.generation_config.pad_token_id == 3
            assert GPT2TokenizerFast.from_pretrained(folder).encode("ab") == words.encode("ab")


def test_a_trainer_resumed_in_another_folder_loads_the_best_of_either(tmp_path: Path) -> None:
    best: dict[str, Any] = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": True,  # so that the first stays the best
    }
    set_seed(1)
    trained(tmp_path / "first", LlamaForCausalLM(CONFIG), **best)
    set_seed(1)
    again = trained(
        tmp_path / "second",
        LlamaForCausalLM(CONFIG),
        steps=6,
        resume=tmp_path / "first/checkpoint-4",
        **best,
    )
    assert again.state.best_model_checkpoint == str(tmp_path / "first" / "checkpoint-2")
    first = ucformat.open(tmp_path / "first" / "checkpoint-2")["model.norm.weight"]
    assert torch.equal(again.model.model.norm.weight, torch.from_numpy(first[...]))
    best["greater_is_better"] = False
    set_seed(1)
    last = trained(
        tmp_path / "third",
        LlamaForCausalLM(CONFIG),
        steps=6,
        resume=tmp_path / "first/checkpoint-4",
        **best,
    )
    assert last.state.best_model_checkpoint == str(tmp_path / "third" / "checkpoint-6")


PLAIN = LlamaConfig(**{**CONFIG.to_dict(), "tie_word_embeddings": False})
LORA = {
    "r": 3,
    "lora_alpha": 5,
    "target_modules": ["q_proj", "embed_tokens"],
    "init_lora_weights": False,
}


@pytest.mark.parametrize(
    "more", [{}, {"use_dora": True, "target_modules": ["q_proj"]}, {"modules_to_save": ["norm"]}]
)
def test_an_adapter_is_exported_as_peft_writes_it(tmp_path: Path, more: dict[str, Any]) -> None:
    set_seed(1)
    LlamaForCausalLM(PLAIN).save_pretrained(tmp_path / "base")
    base = LlamaForCausalLM.from_pretrained(tmp_path / "base")
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **{**LORA, **more}))
    trainer = trained(tmp_path / "run", model, label_names=["labels"])
    model.save_pretrained(tmp_path / "peft")
    place = tmp_path / "run" / "checkpoint-4"
    exported = ucformat.export(place, tmp_path / "exported", "safetensors")
    assert sorted(p.name for p in (tmp_path / "exported").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert exported.left_out
    with (
        safe_open(tmp_path / "peft" / "adapter_model.safetensors", "pt") as theirs,
        safe_open(tmp_path / "exported" / "adapter_model.safetensors", "pt") as ours,
    ):
        of_base = {k for k in theirs.keys() if k.endswith("base_layer.weight")}  # noqa: SIM118 - PEFT adds embeddings
        assert set(ours.keys()) == set(theirs.keys()) - of_base
        assert all(torch.equal(ours.get_tensor(k), theirs.get_tensor(k)) for k in ours.keys())  # noqa: SIM118
    ours, theirs = (
        json.loads((tmp_path / folder / "adapter_config.json").read_text())
        for folder in ("exported", "peft")
    )
    for config in (ours, theirs):  # PEFT keeps a set, whose order changes when it is copied
        config["target_modules"].sort()
    assert ours == theirs
    loaded = PeftModel.from_pretrained(
        LlamaForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "exported"
    )
    assert torch.equal(outputs(loaded), outputs(trainer.model))
    if not more:  # transformers itself loads no DoRA, and no other modules, of what PEFT writes
        auto = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
        assert torch.equal(outputs(auto), outputs(trainer.model))


def test_no_folder_for_from_pretrained_has_the_names_of_wrappers(tmp_path: Path) -> None:
    model = get_peft_model(LlamaForCausalLM(PLAIN), LoraConfig(task_type="CAUSAL_LM", **LORA))
    with pytest.raises(UnsupportedError, match="PEFT has wrapped the model"):
        ucf.save({"model": model}, tmp_path / "ck", form="safetensors")
    assert not (tmp_path / "ck").exists()
    ucf.save({"model": model}, tmp_path / "ck", form="packed")
    assert set(ucformat.open(tmp_path / "ck").assets) == {"adapter_config.json"}
    with pytest.raises(UnsupportedError, match="PEFT has wrapped"):
        ucformat.convert(tmp_path / "ck", tmp_path / "model", weights="safetensors")
    model.add_adapter("second", LoraConfig(**LORA))
    ucf.save({"model": model}, tmp_path / "two", form="packed")
    with pytest.raises(UnsupportedError, match="adapter_config"):
        ucformat.export(tmp_path / "two", tmp_path / "model", "safetensors")
    model.peft_config["default"].save_pretrained(tmp_path / "config")
    with pytest.raises(UnsupportedError, match="not one adapter, but default, second"):
        ucformat.export(
            tmp_path / "two", tmp_path / "model", "safetensors", assets=str(tmp_path / "config")
        )
    assert not (tmp_path / "model").exists()
