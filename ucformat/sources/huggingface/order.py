"""The order in which a Hugging Face model lists its parameters, which safetensors files do not keep.

They are sorted by name there, and an optimizer's states are numbered in the order of the module. For the families below
that order is known; `tests/sources/test_huggingface_order.py` compares it with the models of transformers themselves.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ucformat.errors import UcformatError
from ucformat.sources.model_files import read_json

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from ucformat.storage.base import Store

__all__ = ["FAMILIES", "module_order", "sort_names"]

_LLAMA = (
    *("model", "embed_tokens", "layers", "self_attn", "q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"),
    *("mlp", "gate_proj", "up_proj", "down_proj", "input_layernorm", "post_attention_layernorm"),
    *("pre_feedforward_layernorm", "post_feedforward_layernorm", "norm", "lm_head", "weight", "bias"),
)
_GPT2 = (
    *("transformer", "wte", "wpe", "h", "ln_1", "attn", "c_attn", "ln_2", "mlp", "c_fc", "c_proj", "ln_f", "lm_head"),
    *("weight", "bias"),
)

#: `model_type` of a configuration -> parts of names, in the order in which modules register them; the class.
FAMILIES: dict[str, tuple[tuple[str, ...], str]] = {
    "llama": (_LLAMA, "LlamaForCausalLM"),
    "mistral": (_LLAMA, "MistralForCausalLM"),
    "qwen2": (_LLAMA, "Qwen2ForCausalLM"),
    "qwen3": (_LLAMA, "Qwen3ForCausalLM"),
    "gemma": (_LLAMA, "GemmaForCausalLM"),
    "gemma2": (_LLAMA, "Gemma2ForCausalLM"),
    "gpt2": (_GPT2, "GPT2LMHeadModel"),
}


def module_order(store: Store, present: Container[str], names: Sequence[str]) -> list[str] | None:
    """The names in the order of the module, where its configuration names a family that is known; else None."""
    if "config.json" not in present:
        return None
    try:
        config: Any = read_json(store, "config.json")
    except UcformatError:
        return None
    if not isinstance(config, dict) or config.get("auto_map"):  # code of its own
        return None
    kind, classes = config.get("model_type"), config.get("architectures")
    known = FAMILIES.get(kind) if isinstance(kind, str) else None
    if known is None or classes != [known[1]]:
        return None
    return sort_names(names, known[0])


def sort_names(names: Sequence[str], parts: Sequence[str]) -> list[str] | None:
    """Names sorted part by part: numbers by value, others as in `parts`; None where one has another part."""
    rank = {part: i for i, part in enumerate(parts)}
    keys: dict[str, tuple[int, ...]] = {}
    for name in names:
        found = [int(p) if re.fullmatch(r"\d{1,6}", p) else rank.get(p) for p in name.split(".")]
        keys[name] = tuple(n for n in found if n is not None)
        if len(keys[name]) != len(found):
            return None
    return sorted(names, key=keys.__getitem__)
