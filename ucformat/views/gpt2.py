"""Presets between Megatron's GPT and Hugging Face's GPT-2, whose `Conv1D` has transposed weights.

`c_attn` has all queries, then all keys, then all values; Megatron's `linear_qkv` has these for each head in turn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ucformat.views.model_config import ModelConfig


GPT2_FROM_OPTIONS = frozenset(("heads", "vocab"))
GPT2_TO_OPTIONS = frozenset(("heads", "local"))

_GPT2_H = r"(?:transformer\.)?h\.(\d+)\."
_TOP = (
    ("embedding.word_embeddings.weight", "wte.weight"),
    ("embedding.position_embeddings.weight", "wpe.weight"),
    ("decoder.final_layernorm.weight", "ln_f.weight"),
    ("decoder.final_layernorm.bias", "ln_f.bias"),
)
_LAYER = (
    (r"self_attention.linear_proj.", "attn.c_proj."),
    (r"mlp.linear_fc1.", "mlp.c_fc."),
    (r"mlp.linear_fc2.", "mlp.c_proj."),
)
_TURNED = r"/(?:transformer\.)?h\.\d+\.(?:attn\.c_attn|attn\.c_proj|mlp\.c_fc|mlp\.c_proj)\.weight/"


def megatron_to_gpt2(config: ModelConfig) -> Steps:
    """The steps from Megatron's names and shapes to Hugging Face's."""
    config.check_megatron()
    steps: Steps = [{"drop": ["*._extra_state"]}]
    if (vocab := config.given("vocab")) is not None:
        steps.append({"trim": ["embedding.word_embeddings.weight", "output_layer.weight"], "size": vocab})
    part = r"transformer.h.\1.attn.%s.\2"
    return [
        *steps,
        *({"rename": a, "to": f"transformer.{b}"} for a, b in _TOP),
        {"rename": "output_layer.weight", "to": "lm_head.weight"},
        {
            "rename": f"/{_M}(?:input_layernorm\\.|self_attention\\.linear_qkv\\.layer_norm_)(weight|bias)/",
            "to": r"transformer.h.\1.ln_1.\2",
        },
        {
            "rename": f"/{_M}(?:pre_mlp_layernorm\\.|mlp\\.linear_fc1\\.layer_norm_)(weight|bias)/",
            "to": r"transformer.h.\1.ln_2.\2",
        },
        {
            "split": f"/{_M}self_attention\\.linear_qkv\\.(weight|bias)/",
            "into": [part % x for x in ("query", "key", "value")],
            "repeat": config.heads,
        },
        {
            "fuse": r"/(transformer\.h\.\d+\.attn\.)query\.(weight|bias)/",
            "and": [r"\1key.\2", r"\1value.\2"],
            "into": r"\1c_attn.\2",
        },
        *({"rename": f"/{_M}{_plain_gpt2(a)}(weight|bias)/", "to": rf"transformer.h.\1.{b}\2"} for a, b in _LAYER),
        {"transpose": _TURNED},
    ]


def gpt2_to_megatron(config: ModelConfig) -> Steps:
    """The steps from Hugging Face's names and shapes to Megatron's."""
    local = config.flag("local")
    first = "input_layernorm." if local else "self_attention.linear_qkv.layer_norm_"
    second = "pre_mlp_layernorm." if local else "mlp.linear_fc1.layer_norm_"
    part = r"\1%s.\2"
    return [
        {"drop": [f"/{_GPT2_H}attn\\.(?:masked_)?bias/"]},
        {"transpose": _TURNED},
        *({"rename": f"/(?:transformer\\.)?{_plain_gpt2(b)}/", "to": a} for a, b in _TOP),
        {"rename": "lm_head.weight", "to": "output_layer.weight"},
        {"rename": f"/{_GPT2_H}ln_1\\.(weight|bias)/", "to": rf"decoder.layers.\1.{first}\2"},
        {"rename": f"/{_GPT2_H}ln_2\\.(weight|bias)/", "to": rf"decoder.layers.\1.{second}\2"},
        {
            "split": r"/((?:transformer\.)?h\.\d+\.attn\.)c_attn\.(weight|bias)/",
            "into": [part % x for x in ("query", "key", "value")],
        },
        {
            "fuse": f"/({_GPT2_H}attn\\.)query\\.(weight|bias)/",
            "and": [r"\1key.\3", r"\1value.\3"],
            "into": r"decoder.layers.\2.self_attention.linear_qkv.\3",
            "repeat": config.heads,
        },
        *({"rename": f"/{_GPT2_H}{_plain_gpt2(b)}(weight|bias)/", "to": rf"decoder.layers.\1.{a}\2"} for a, b in _LAYER),
    ]


def _plain_gpt2(name: str) -> str:
    return name.replace(".", r"\.")
