"""`from_pretrained` loads what a server computes as it loads an export, of every family and from every engine."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

import ucformat
from tests.web.serving import Answer, run_client, serving
from ucformat.web.library import Presentation

if TYPE_CHECKING:
    from pathlib import Path

    from ucformat.checkpoint import Checkpoint

SIZE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 96,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SIZE),
    "tied": ("Llama", {**SIZE, "tie_word_embeddings": True}),
    "experts": ("Qwen3Moe", {**SIZE, **EXPERTS}),
    "gemma": ("Gemma2", SIZE),
    "gpt2": (
        "GPT2",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96, "n_positions": 32},
    ),
}
LOAD = """
import json, sys, torch
from transformers import AutoModelForCausalLM
tokens = torch.arange(3, 19)[None]
def logits(place):
    model = AutoModelForCausalLM.from_pretrained(place, dtype="float32").eval()
    with torch.no_grad():
        return model(tokens).logits
names = json.loads(sys.argv[1])
print(json.dumps({name: torch.equal(logits(name), logits(local)) for name, local in names.items()}))
"""


def trained(family: str, folder: Path) -> Path:
    """A model with random weights, as its library saves it."""
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    import torch

    name, size = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**size)
    model_type = "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
    getattr(transformers, model_type)(config).save_pretrained(folder / family)
    return folder / family


def engines_of(family: str, source: Path, folder: Path) -> dict[str, Checkpoint]:
    """The checkpoint of a model in other forms, and the files of other engines."""
    ck = ucformat.open(source)
    made = {"huggingface": ck, "universal": ucformat.convert(ck, folder / "universal")}
    ucformat.export(ck, folder / "dcp", "dcp")
    made["dcp"] = ucformat.open(folder / "dcp")
    if family == "llama":
        options: dict[str, Any] = {
            "stage": 3,
            "world": 2,
            "weights_only": True,
            "buffers": "none",
            "step": 1,
        }
        ucformat.export(ck, folder / "zero3", "deepspeed", **options)
        made["zero3"] = ucformat.open(folder / "zero3")
        megatron = ck.view([{"preset": "llama-to-megatron"}])
        ucformat.export(megatron, folder / "megatron", "megatron")
        made["megatron"] = ucformat.open(folder / "megatron").view(
            [{"preset": "megatron-to-llama", "with": {"heads": 4, "groups": 2}}]
        )
    return made


@pytest.mark.front("llama")
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_an_export(family: str, tmp_path: Path) -> None:
    source = trained(family, tmp_path)
    made = engines_of(family, source, tmp_path)
    presentation = Presentation(options={"assets": str(source), "max_shard_bytes": 20_000})
    with serving(places=made, presentation=presentation) as ask:
        listed: Answer = ask("/api/models/universal")
        files = [file["rfilename"] for file in json.loads(listed.body)["siblings"]]
        assert "model.safetensors.index.json" in files
        names = json.dumps(dict.fromkeys(made, str(source)))
        printed = run_client(LOAD, names, server=ask, home=tmp_path / "home", timeout=240)
    assert json.loads(printed.splitlines()[-1]) == dict.fromkeys(made, True)
