"""Megatron's mixture of experts, and Hugging Face's Mixtral.

Files of Mixtral have `w1` (gate), `w3` (the other half) and `w2` of each expert; since version 5 transformers' module
itself stacks them as `experts.gate_up_proj` and `experts.down_proj`. Megatron's experts are modules of their own
(`local_experts.N.linear_fc1.weight`), or grouped (`linear_fc1.weightN`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucformat.views.presets import llama

if TYPE_CHECKING:
    from ucformat.views.presets.numbers import Numbers

__all__ = ["FROM", "TO", "from_megatron", "to_megatron"]

Steps = list[dict[str, Any]]

FROM = llama.FROM | {"fused"}
TO = llama.TO | {"grouped"}

_M = r"decoder\.layers\.(\d+)\.mlp\."
_MOE = r"(?:model\.)?layers\.(\d+)\.(?:block_sparse_moe|mlp)\."
_GROUPED = {
    "rename": f"/({_M}experts\\.)(linear_fc[12])\\.weight(\\d+)/",
    "to": r"decoder.layers.\2.mlp.experts.local_experts.\4.\3.weight",
}


def from_megatron(n: Numbers) -> Steps:
    """From Megatron's names and shapes to those of Mixtral's files; with `fused` to those of its module."""
    steps = [*llama.attention_from_megatron(n, "post_attention_layernorm"), _GROUPED]
    if n.flag("fused"):
        stack = f"/{_M}experts\\.local_experts\\.(?P<i>\\d+)\\.linear_fc%d\\.weight/"
        return [
            *steps,
            {"rename": f"/{_M}router\\.weight/", "to": r"model.layers.\1.mlp.gate.weight"},
            {"stack": stack % 1, "into": r"model.layers.\1.mlp.experts.gate_up_proj"},
            {"stack": stack % 2, "into": r"model.layers.\1.mlp.experts.down_proj"},
        ]
    expert = r"model.layers.\1.block_sparse_moe.experts.\2.%s.weight"
    return [
        *steps,
        {"rename": f"/{_M}router\\.weight/", "to": r"model.layers.\1.block_sparse_moe.gate.weight"},
        {
            "split": f"/{_M}experts\\.local_experts\\.(\\d+)\\.linear_fc1\\.weight/",
            "into": [expert % "w1", expert % "w3"],
        },
        {"rename": f"/{_M}experts\\.local_experts\\.(\\d+)\\.linear_fc2\\.weight/", "to": expert % "w2"},
    ]


def to_megatron(n: Numbers) -> Steps:
    """From Mixtral's names and shapes, of its files or of its module, to Megatron's."""
    local = r"decoder.layers.\%d.mlp.experts.local_experts.%s.linear_fc%d.weight"
    steps: Steps = [
        *llama.attention_to_megatron(n, "post_attention_layernorm", own_norm=True),
        {"rename": f"/{_MOE}gate\\.weight/", "to": r"decoder.layers.\1.mlp.router.weight"},
        {"unstack": f"/{_MOE}experts\\.gate_up_proj/", "into": local % (1, "{i}", 1)},
        {"unstack": f"/{_MOE}experts\\.down_proj/", "into": local % (1, "{i}", 2)},
        {
            "fuse": f"/({_MOE}experts\\.(\\d+)\\.)w1\\.weight/",
            "and": [r"\1w3.weight"],
            "into": local % (2, r"\3", 1),
        },
        {"rename": f"/{_MOE}experts\\.(\\d+)\\.w2\\.weight/", "to": local % (1, r"\2", 2)},
    ]
    if n.flag("grouped"):
        grouped = f"/({_M}experts\\.)local_experts\\.(\\d+)\\.(linear_fc[12])\\.weight/"
        steps.append({"rename": grouped, "to": r"decoder.layers.\2.mlp.experts.\4.weight\3"})
    return steps
