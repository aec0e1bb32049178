"""Transformers' own loader, captured: weights are bit for bit those of `from_pretrained`, and only they are read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import ucformat
import ucformat.torch
from tests.torch.test_capture import bits

if TYPE_CHECKING:
    from collections.abc import Iterator

transformers = pytest.importorskip("transformers", reason="pip install transformers")

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_experts": 4, "head_dim": 8}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 100, "n_positions": 64}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", SIZES),
    "tied llama": ("LlamaForCausalLM", "LlamaConfig", SIZES | {"tie_word_embeddings": True}),
    "qwen3 moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", SIZES | EXPERTS),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", SIZES | {"head_dim": 8}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2 | {"bos_token_id": 1, "eos_token_id": 2}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", SIZES | {"num_local_experts": 4}),
}


def saved(
    folder: Path, kind: str, dtype: torch.dtype = torch.float32
) -> tuple[type[Any], Any, Path]:
    """The class, a configuration, and a folder with random weights."""
    class_name, config_name, sizes = MODELS[kind]
    model_class, config = (
        getattr(transformers, class_name),
        getattr(transformers, config_name)(**sizes),
    )
    torch.manual_seed(5)
    model = model_class(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too
            parameter.normal_()
    model.save_pretrained(folder)
    return model_class, config, folder


def captured(
    model_class: type[Any], config: Any, place: Path, **arguments: Any
) -> ucformat.torch.CapturedLayout:
    return ucformat.torch.capture(
        lambda weights: model_class.from_pretrained(
            None, config=config, state_dict=dict(weights), **arguments
        ),
        place,
    )


@pytest.mark.parametrize("kind", MODELS)
def test_weights_are_those_of_from_pretrained(tmp_path: Path, kind: str) -> None:
    model_class, config, place = saved(tmp_path / "model", kind)
    wanted = model_class.from_pretrained(place)
    captured(model_class, config, place).save(tmp_path / "layout.json")
    layout = ucformat.torch.CapturedLayout.open(tmp_path / "layout.json")
    with torch.device("meta"):
        model = model_class(config)
    layout.load(model, place)
    before, now = wanted.state_dict(), model.state_dict()
    assert before.keys() == now.keys()
    for name, value in before.items():
        assert bits(now[name]) == bits(value), name
    ids = torch.arange(12).reshape(2, 6)
    assert torch.equal(model.eval()(ids).logits, wanted.eval()(ids).logits)
    shard = sum(p.numel() * p.element_size() for p in model.parameters())
    assert layout.plan(place).bytes_read <= 1.05 * shard
    assert layout.unused == layout.kept == ()


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_dtypes_are_those_of_the_loader(tmp_path: Path, stored: torch.dtype) -> None:
    """A checkpoint of float32 in bfloat16, and the reverse."""
    model_class, config, place = saved(tmp_path / "model", "llama", stored)
    other = torch.bfloat16 if stored == torch.float32 else torch.float32
    wanted = model_class.from_pretrained(place, dtype=other)
    layout = captured(model_class, config, place, dtype=other)
    with torch.device("meta"):
        model = model_class(config).to(other)
    layout.load(model, place)
    for name, value in wanted.state_dict().items():
        assert bits(model.state_dict()[name]) == bits(value), name


def test_another_configuration_is_refused(tmp_path: Path) -> None:
    """As many heads of another width have parameters of the same shapes."""
    model_class, config, place = saved(tmp_path / "model", "llama")
    layout = captured(model_class, config, place)
    config.rope_parameters = {**config.rope_parameters, "rope_theta": 5e5}
    model = model_class(config)
    with pytest.raises(ucformat.errors.StateMismatch, match=r"rope_theta: 500000\.0, and was"):
        layout.load(model, place)
    document = layout.document
    document["captured"]["engine"]["transformers"] = "5.0.0"
    with pytest.raises(
        ucformat.errors.StateMismatch, match=r"transformers is 5\..*, and was 5.0.0"
    ):
        ucformat.torch.CapturedLayout(document).load(model_class(config), place)


def test_what_from_pretrained_would_initialize_is_refused(tmp_path: Path) -> None:
    """A checkpoint that lacks a weight: `from_pretrained` makes a random one, with a warning."""
    model_class, config, place = saved(tmp_path / "model", "llama")
    fewer = ucformat.open(place, view=[{"drop": "model.layers.1.mlp.up_proj.weight"}])
    with pytest.raises(
        ucformat.errors.StateMismatch, match=r"does not fill model.layers.1.mlp.up_proj"
    ):
        captured(model_class, config, fewer)  # type: ignore[arg-type]


def test_the_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_class, config, place = saved(tmp_path / "model", "llama")
    config.save_pretrained(place)
    page = (Path(__file__).parents[3] / "docs" / "guides" / "capture.md").read_text()
    fills, transformers_block, _ = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    model = model_class(config)

    def load_weights(weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            model.get_parameter(name).data.copy_(weight)

    model.load_weights = load_weights
    wanted = model_class.from_pretrained(place).state_dict()
    names: dict[str, Any] = {"model": model, "torch": torch}
    for block in (fills.replace("run7@1000", "model"), transformers_block):
        exec(compile(block, "capture.md", "exec"), names)  # noqa: S102
        for name, value in wanted.items():
            assert bits(names["model"].state_dict()[name]) == bits(value), name
