"""How the parameters of well-known families lie over tensor-parallel ranks: rules of a layout, over the axis `tp`.

A preset is used where the caller names it, and by itself only where a checkpoint says nothing of its layout and its
module names are those of the family. Tables that engines cut in several ways (a vocabulary that may be cut, padded or
replicated) are left out where the family does not settle it; the shapes of the parts then do, or the caller must.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["FAMILIES", "PRESETS", "Family", "family_of"]

Rules = tuple[dict[str, Any], ...]

_COLUMN = [{"shard": 0, "over": "tp"}]
_ROW = [{"shard": 1, "over": "tp"}]
_SWIGLU = [{"shard": 0, "over": "tp", "parts": [1, 1]}]
_SAME = ["replicate"]


def _rules(*pairs: tuple[str, list[Any]]) -> Rules:
    return tuple({"match": f"/{pattern}/", "place": place} for pattern, place in pairs)


_LLAMA_LAYER = r"(.*\.)?layers\.\d+\."
_LLAMA = _rules(
    (_LLAMA_LAYER + r"self_attn\.[qkv]_proj\.(weight|bias)", _COLUMN),
    (_LLAMA_LAYER + r"self_attn\.o_proj\.weight", _ROW),
    (_LLAMA_LAYER + r"(mlp|mlp\.experts\.\d+|mlp\.shared_expert)\.(gate|up)_proj\.(weight|bias)", _COLUMN),
    (_LLAMA_LAYER + r"(mlp|mlp\.experts\.\d+|mlp\.shared_expert)\.down_proj\.weight", _ROW),
    (_LLAMA_LAYER + r"block_sparse_moe\.experts\.\d+\.w[13]\.weight", _COLUMN),
    (_LLAMA_LAYER + r"block_sparse_moe\.experts\.\d+\.w2\.weight", _ROW),
    (_LLAMA_LAYER + r"(block_sparse_moe|mlp)\.gate\.weight", _SAME),
    (_LLAMA_LAYER + r"(self_attn\.o_proj|mlp\.down_proj)\.bias", _SAME),
    (r"(.*\.)?([a-z_]*norm|rotary_emb)\.(weight|bias|inv_freq)", _SAME),
)

_MEGATRON_LAYER = r"(language_model\.(encoder|transformer)\.layers\.)?\d+\."


def _megatron(up: list[Any]) -> Rules:
    return _rules(
        (_MEGATRON_LAYER + r"self_attention\.query_key_value\.(weight|bias)", _COLUMN),
        (_MEGATRON_LAYER + r"self_attention\.dense\.weight", _ROW),
        (_MEGATRON_LAYER + r"mlp\.dense_h_to_4h\.(weight|bias)", up),
        (_MEGATRON_LAYER + r"mlp\.dense_4h_to_h\.weight", _ROW),
        (_MEGATRON_LAYER + r"(self_attention\.dense|mlp\.dense_4h_to_h)\.bias", _SAME),
        (_MEGATRON_LAYER + r"(input|post_attention)_layernorm\.(weight|bias)", _SAME),
        (r"\d+\.(weight|bias)", _SAME),  # the final norm of a pipeline
        (r"language_model\.(encoder|transformer)\.final_layernorm\.(weight|bias)", _SAME),
        (r"(.*\.)?position_embeddings\.weight", _SAME),
        (r"(.*\.)?(word_embeddings|lm_head|output_layer)\.weight", _COLUMN),
    )


#: By the names that callers give.
PRESETS: dict[str, Rules] = {
    "llama": _LLAMA,
    "megatron-deepspeed": _megatron(_COLUMN),
    "megatron-deepspeed-swiglu": _megatron(_SWIGLU),
}


@dataclass(frozen=True, slots=True)
class Family:
    """A family that is known by its module names: all of `signs` must be found."""

    preset: str
    signs: tuple[str, ...]

    def has(self, names: Iterable[str]) -> bool:
        """Whether these are names of the family."""
        names = list(names)
        return all(any(re.fullmatch(sign, name[:1000]) for name in names) for sign in self.signs)


FAMILIES = (
    Family(
        "llama",
        (
            r"model\.layers\.\d+\.self_attn\.q_proj\.weight",
            r"model\.layers\.\d+\.self_attn\.o_proj\.weight",
            r"model\.layers\.\d+\.input_layernorm\.weight",
        ),
    ),
    Family(
        "megatron-deepspeed",
        (
            _MEGATRON_LAYER + r"self_attention\.query_key_value\.weight",
            _MEGATRON_LAYER + r"self_attention\.dense\.weight",
            _MEGATRON_LAYER + r"mlp\.dense_4h_to_h\.weight",
        ),
    ),
)


def family_of(shapes: dict[str, tuple[tuple[int, ...], ...]]) -> str | None:
    """The preset of the family that these parameters are of; `shapes`: those of the ranks' parts.

    Megatron's SwiGLU is told by the shapes: what goes into the second matrix is half of what comes out of the first.
    """
    found = next((family.preset for family in FAMILIES if family.has(shapes)), None)
    if found != "megatron-deepspeed":
        return found
    for name, (first, *_) in shapes.items():
        down = shapes.get(name.replace("dense_h_to_4h", "dense_4h_to_h"))
        if name.endswith("mlp.dense_h_to_4h.weight") and down:
            return "megatron-deepspeed-swiglu" if first[0] == 2 * down[0][-1] else found
    return found
