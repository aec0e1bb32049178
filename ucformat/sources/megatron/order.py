"""The order in which Megatron-Core's modules register their parameters, by name."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["LAYER", "orders_of"]

#: A parameter of a layer: the stack, the number, and the name below it.
LAYER = re.compile(r"((?:[^.]+\.)*?layers)\.(\d{1,6})\.(.+)", re.DOTALL)

_TOP = ("embedding", "rotary_pos_emb", "encoder", "decoder", "mtp", "output_layer")
_PARTS = {
    part: rank
    for rank, part in enumerate((
        *("word_embeddings", "position_embeddings", "tokentype_embeddings"),
        *("layers", "final_norm", "final_layernorm"),
        *("input_layernorm", "self_attention", "pre_cross_attn_layernorm", "cross_attention"),
        *("pre_mlp_layernorm", "mlp"),
        *("core_attention", "linear_proj", "linear_qkv", "q_layernorm", "k_layernorm"),
        *("linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj"),
        *("q_layernorm", "kv_layernorm", "linear_q", "linear_kv"),
        *("router", "experts", "shared_experts", "local_experts", "linear_fc1", "linear_fc2"),
        *("layer_norm_weight", "layer_norm_bias", "weight", "bias", "expert_bias", "gate_weight"),
    ))
}  # fmt: skip


def _rank(name: str, *, grouped: bool) -> tuple[tuple[int, int, str], ...]:
    """What to sort a name by; `grouped`: all experts' first projections come before their second ones."""
    parts = name.split(".")
    if grouped and "local_experts" in parts:
        at = parts.index("local_experts")
        number = parts.pop(at + 1)
        parts = [*parts[:at], *parts[at + 1 :], number]
    out = []
    for depth, part in enumerate(parts):
        if part.isdecimal() and len(part) < 10:
            out.append((0, int(part), ""))
        elif depth == 0 and part in _TOP:
            out.append((0, _TOP.index(part), ""))
        else:
            out.append((1, _PARTS.get(part, len(_PARTS)), part))
    return tuple(out)


def orders_of(names: Sequence[str]) -> list[list[str]]:
    """The orders in which a module may list these parameters, the likeliest first.

    As Megatron's own modules do, with experts one after the other or grouped; or as the checkpoint lists them.
    """
    found = [
        sorted(names, key=lambda n: _rank(n, grouped=False)),
        sorted(names, key=lambda n: _rank(n, grouped=True)),
        list(names),
    ]
    return [list(order) for order in dict.fromkeys(map(tuple, found))]
