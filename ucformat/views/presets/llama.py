"""Megatron's GPT with gated MLP, and Hugging Face's Llama, Qwen2 (biases of q, k, v) and Qwen3 (norms of q, k).

`linear_qkv` has for each group its query heads, then its key, then its value; `linear_fc1` the gate, then the other
half.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ucformat.views.presets.numbers import Numbers

__all__ = ["FROM", "TO", "attention_from_megatron", "attention_to_megatron", "from_megatron", "to_megatron"]

Steps = list[dict[str, Any]]

FROM = frozenset(("heads", "groups", "vocab"))
TO = frozenset(("heads", "groups", "local"))

_M = r"decoder\.layers\.(\d+)\."
_H = r"(?:model\.)?layers\.(\d+)\."
_DROP_M = ["*._extra_state", "*rotary_pos_emb.inv_freq"]
_DROP_H = ["*rotary_emb.inv_freq"]
_RENAMES = (
    ("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
    ("decoder.final_layernorm.weight", "model.norm.weight"),
    ("output_layer.weight", "lm_head.weight"),
)


def attention_from_megatron(n: Numbers, second_norm: str) -> Steps:
    """All but the MLP; `second_norm` is what the preset calls the norm before that."""
    n.check_megatron()
    vocab, group = n.given("vocab"), n.heads // n.groups
    steps: Steps = [{"drop": _DROP_M}]
    if vocab is not None:
        steps.append({"trim": ["embedding.word_embeddings.weight", "output_layer.weight"], "size": vocab})
    return [
        *steps,
        *({"rename": a, "to": b} for a, b in _RENAMES),
        {
            "rename": f"/{_M}(?:input_layernorm\\.|self_attention\\.linear_qkv\\.layer_norm_)(weight)/",
            "to": r"model.layers.\1.input_layernorm.\2",
        },
        {
            "rename": f"/{_M}(?:pre_mlp_layernorm\\.|mlp\\.linear_fc1\\.layer_norm_)(weight)/",
            "to": rf"model.layers.\1.{second_norm}.\2",
        },
        {
            "split": f"/{_M}self_attention\\.linear_qkv\\.(weight|bias)/",
            "into": [rf"model.layers.\1.self_attn.{x}_proj.\2" for x in "qkv"],
            "sizes": [group, 1, 1],
            "repeat": n.groups,
        },
        {
            "rename": f"/{_M}self_attention\\.([qk])_layernorm\\.(weight)/",
            "to": r"model.layers.\1.self_attn.\2_norm.\3",
        },
        {
            "rename": f"/{_M}self_attention\\.linear_proj\\.(weight|bias)/",
            "to": r"model.layers.\1.self_attn.o_proj.\2",
        },
    ]


def from_megatron(n: Numbers) -> Steps:
    """From Megatron's names and shapes to Hugging Face's."""
    return [
        *attention_from_megatron(n, "post_attention_layernorm"),
        {
            "split": f"/{_M}mlp\\.linear_fc1\\.(weight|bias)/",
            "into": [rf"model.layers.\1.mlp.{x}_proj.\2" for x in ("gate", "up")],
        },
        {"rename": f"/{_M}mlp\\.linear_fc2\\.(weight|bias)/", "to": r"model.layers.\1.mlp.down_proj.\2"},
    ]


def attention_to_megatron(n: Numbers, second_norm: str, *, own_norm: bool) -> Steps:
    """All but the MLP; `own_norm`: the norm before that is a module of its own even in Transformer Engine."""
    local = n.flag("local")
    first = "input_layernorm." if local else "self_attention.linear_qkv.layer_norm_"
    second = "pre_mlp_layernorm." if local or own_norm else "mlp.linear_fc1.layer_norm_"
    return [
        {"drop": _DROP_H},
        *({"rename": b if b.startswith("lm_head") else f"/(?:model\\.)?{_plain(b)}/", "to": a} for a, b in _RENAMES),
        {"rename": f"/{_H}input_layernorm\\.(weight)/", "to": rf"decoder.layers.\1.{first}\2"},
        {"rename": f"/{_H}{second_norm}\\.(weight)/", "to": rf"decoder.layers.\1.{second}\2"},
        {
            "fuse": f"/({_H}self_attn\\.)q_proj\\.(weight|bias)/",
            "and": [r"\1k_proj.\3", r"\1v_proj.\3"],
            "into": r"decoder.layers.\2.self_attention.linear_qkv.\3",
            "repeat": n.groups,
        },
        {
            "rename": f"/{_H}self_attn\\.([qk])_norm\\.(weight)/",
            "to": r"decoder.layers.\1.self_attention.\2_layernorm.\3",
        },
        {
            "rename": f"/{_H}self_attn\\.o_proj\\.(weight|bias)/",
            "to": r"decoder.layers.\1.self_attention.linear_proj.\2",
        },
    ]


def to_megatron(n: Numbers) -> Steps:
    """From Hugging Face's names and shapes to Megatron's."""
    return [
        *attention_to_megatron(n, "post_attention_layernorm", own_norm=False),
        {
            "fuse": f"/({_H}mlp\\.)gate_proj\\.(weight|bias)/",
            "and": [r"\1up_proj.\3"],
            "into": r"decoder.layers.\2.mlp.linear_fc1.\3",
        },
        {"rename": f"/{_H}mlp\\.down_proj\\.(weight|bias)/", "to": r"decoder.layers.\1.mlp.linear_fc2.\2"},
    ]


def _plain(name: str) -> str:
    return name.removeprefix("model.").replace(".", r"\.")
