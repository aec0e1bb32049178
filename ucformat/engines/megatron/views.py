"""Presets between Megatron's models and Hugging Face's Llama, Qwen2, Qwen3 and Mixtral, and of stacked layers.

Llama: Megatron's GPT with gated MLP; Qwen2 adds biases of q, k and v, Qwen3 norms of q and k.
`linear_qkv` has for each group its query heads, then its key, then its value; `linear_fc1` the
gate, then the other half.

Mixtral: files have `w1` (gate), `w3` (the other half) and `w2` of each expert; since version 5
transformers' module itself stacks them as `experts.gate_up_proj` and `experts.down_proj`.
Megatron's experts are modules of their own (`local_experts.N.linear_fc1.weight`), or grouped
(`linear_fc1.weightN`).

Megatron's distributed checkpoints stack the parameters of all layers and experts under one name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ucformat.errors import LayoutError
from ucformat.views.document import PresetInput, ViewPreset

if TYPE_CHECKING:
    from collections.abc import Callable

Steps = list[dict[str, Any]]

LLAMA_FROM_OPTIONS = frozenset(("heads", "groups", "vocab"))
LLAMA_TO_OPTIONS = frozenset(("heads", "groups", "local"))

_M = r"decoder\.layers\.(\d+)\."
_A = rf"{_M}self_attention\."
_H = r"(?:model\.)?layers\.(\d+)\."
_DROP_M = ["*._extra_state", "*rotary_pos_emb.inv_freq"]
_DROP_H = ["*rotary_emb.inv_freq"]
_FIRST_NORM = r"(?:input_layernorm\.|self_attention\.linear_qkv\.layer_norm_)"
_SECOND_NORM = r"(?:pre_mlp_layernorm\.|mlp\.linear_fc1\.layer_norm_)"
_RENAMES = (
    ("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
    ("decoder.final_layernorm.weight", "model.norm.weight"),
    ("output_layer.weight", "lm_head.weight"),
)


def _rename(match: str, to: str) -> dict[str, str]:
    return {"rename": match, "to": to}


def _escaped(name: str) -> str:
    return name.replace(".", r"\.")


def _trim(vocab: int | None) -> Steps:
    """The step that cuts the padding of the vocabulary off, if its size is given."""
    tables = ["embedding.word_embeddings.weight", "output_layer.weight"]
    return [] if vocab is None else [{"trim": tables, "size": vocab}]


def attention_from_megatron(config: ModelConfig, second_norm: str) -> Steps:
    """The steps from Megatron for everything except the MLP."""
    config.check_megatron()
    vocab, group = config.given("vocab"), config.heads // config.groups
    return [
        {"drop": _DROP_M},
        *_trim(vocab),
        *(_rename(a, b) for a, b in _RENAMES),
        _rename(f"/{_M}{_FIRST_NORM}(weight)/", r"model.layers.\1.input_layernorm.\2"),
        _rename(f"/{_M}{_SECOND_NORM}(weight)/", rf"model.layers.\1.{second_norm}.\2"),
        {
            "split": f"/{_A}linear_qkv\\.(weight|bias)/",
            "into": [rf"model.layers.\1.self_attn.{x}_proj.\2" for x in "qkv"],
            "sizes": [group, 1, 1],
            "repeat": config.groups,
        },
        _rename(f"/{_A}([qk])_layernorm\\.(weight)/", r"model.layers.\1.self_attn.\2_norm.\3"),
        _rename(f"/{_A}linear_proj\\.(weight|bias)/", r"model.layers.\1.self_attn.o_proj.\2"),
    ]


def megatron_to_llama(config: ModelConfig) -> Steps:
    """The steps from Megatron's names and shapes to Hugging Face's."""
    return [
        *attention_from_megatron(config, "post_attention_layernorm"),
        {
            "split": f"/{_M}mlp\\.linear_fc1\\.(weight|bias)/",
            "into": [rf"model.layers.\1.mlp.{x}_proj.\2" for x in ("gate", "up")],
        },
        _rename(f"/{_M}mlp\\.linear_fc2\\.(weight|bias)/", r"model.layers.\1.mlp.down_proj.\2"),
    ]


def attention_to_megatron(config: ModelConfig, second_norm: str, *, own_norm: bool) -> Steps:
    """The steps to Megatron for everything except the MLP."""
    local = config.flag("local")
    first = "input_layernorm." if local else "self_attention.linear_qkv.layer_norm_"
    second = "pre_mlp_layernorm." if local or own_norm else "mlp.linear_fc1.layer_norm_"
    attention = r"decoder.layers.\1.self_attention"
    return [
        {"drop": _DROP_H},
        *(
            _rename(
                b
                if b.startswith("lm_head")
                else f"/(?:model\\.)?{_escaped(b.removeprefix('model.'))}/",
                a,
            )
            for a, b in _RENAMES
        ),
        _rename(f"/{_H}input_layernorm\\.(weight)/", rf"decoder.layers.\1.{first}\2"),
        _rename(f"/{_H}{second_norm}\\.(weight)/", rf"decoder.layers.\1.{second}\2"),
        {
            "fuse": f"/({_H}self_attn\\.)q_proj\\.(weight|bias)/",
            "and": [r"\1k_proj.\3", r"\1v_proj.\3"],
            "into": r"decoder.layers.\2.self_attention.linear_qkv.\3",
            "repeat": config.groups,
        },
        _rename(f"/{_H}self_attn\\.([qk])_norm\\.(weight)/", rf"{attention}.\2_layernorm.\3"),
        _rename(f"/{_H}self_attn\\.o_proj\\.(weight|bias)/", rf"{attention}.linear_proj.\2"),
    ]


def llama_to_megatron(config: ModelConfig) -> Steps:
    """The steps from Hugging Face's names and shapes to Megatron's."""
    return [
        *attention_to_megatron(config, "post_attention_layernorm", own_norm=False),
        {
            "fuse": f"/({_H}mlp\\.)gate_proj\\.(weight|bias)/",
            "and": [r"\1up_proj.\3"],
            "into": r"decoder.layers.\2.mlp.linear_fc1.\3",
        },
        _rename(f"/{_H}mlp\\.down_proj\\.(weight|bias)/", r"decoder.layers.\1.mlp.linear_fc2.\2"),
    ]


MIXTRAL_FROM_OPTIONS = LLAMA_FROM_OPTIONS | {"fused"}
MIXTRAL_TO_OPTIONS = LLAMA_TO_OPTIONS | {"grouped"}

_MOE_M = r"decoder\.layers\.(\d+)\.mlp\."
_MOE = r"(?:model\.)?layers\.(\d+)\.(?:block_sparse_moe|mlp)\."
_GROUPED = _rename(
    f"/({_MOE_M}experts\\.)(linear_fc[12])\\.weight(\\d+)/",
    r"decoder.layers.\2.mlp.experts.local_experts.\4.\3.weight",
)


def megatron_to_mixtral(config: ModelConfig) -> Steps:
    """The steps from Megatron's names and shapes to Mixtral's files, or (`fused`) its module."""
    steps = [*attention_from_megatron(config, "post_attention_layernorm"), _GROUPED]
    if config.flag("fused"):
        stack = f"/{_MOE_M}experts\\.local_experts\\.(?P<i>\\d+)\\.linear_fc%d\\.weight/"
        return [
            *steps,
            _rename(f"/{_MOE_M}router\\.weight/", r"model.layers.\1.mlp.gate.weight"),
            {"stack": stack % 1, "into": r"model.layers.\1.mlp.experts.gate_up_proj"},
            {"stack": stack % 2, "into": r"model.layers.\1.mlp.experts.down_proj"},
        ]
    local = f"/{_MOE_M}experts\\.local_experts\\.(\\d+)\\.linear_fc%d\\.weight/"
    expert = r"model.layers.\1.block_sparse_moe.experts.\2.%s.weight"
    return [
        *steps,
        _rename(f"/{_MOE_M}router\\.weight/", r"model.layers.\1.block_sparse_moe.gate.weight"),
        {"split": local % 1, "into": [expert % "w1", expert % "w3"]},
        _rename(local % 2, expert % "w2"),
    ]


def mixtral_to_megatron(config: ModelConfig) -> Steps:
    """The steps from Mixtral's names and shapes, of its files or of its module, to Megatron's."""
    local = r"decoder.layers.\%d.mlp.experts.local_experts.%s.linear_fc%d.weight"
    steps: Steps = [
        *attention_to_megatron(config, "post_attention_layernorm", own_norm=True),
        _rename(f"/{_MOE}gate\\.weight/", r"decoder.layers.\1.mlp.router.weight"),
        {"unstack": f"/{_MOE}experts\\.gate_up_proj/", "into": local % (1, "{i}", 1)},
        {"unstack": f"/{_MOE}experts\\.down_proj/", "into": local % (1, "{i}", 2)},
        {
            "fuse": f"/({_MOE}experts\\.(\\d+)\\.)w1\\.weight/",
            "and": [r"\1w3.weight"],
            "into": local % (2, r"\3", 1),
        },
        _rename(f"/{_MOE}experts\\.(\\d+)\\.w2\\.weight/", local % (1, r"\2", 2)),
    ]
    if config.flag("grouped"):
        grouped = f"/({_MOE_M}experts\\.)local_experts\\.(\\d+)\\.(linear_fc[12])\\.weight/"
        steps.append(_rename(grouped, r"decoder.layers.\2.mlp.experts.\4.weight\3"))
    return steps


def stack_layers(_: ModelConfig) -> Steps:
    """The steps that stack all experts, and then all layers, into one tensor."""
    return [
        {"stack": r"/(.*\.experts)\.local_experts\.(?P<i>\d+)\.(.*)/", "into": r"\1.experts.\3"},
        {"stack": r"/((?:.*\.)?layers)\.(?P<i>\d+)\.(.*)/", "into": r"\1.\3"},
    ]


def unstack_layers(_: ModelConfig) -> Steps:
    """The steps that reverse `stack_layers`."""
    return [
        {"unstack": r"/((?:.*\.)?layers)\.(?!\d+\.)(.*)/", "into": r"\1.{i}.\2"},
        {"unstack": r"/(.*\.experts)\.experts\.(?!\d+\.)(.*)/", "into": r"\1.local_experts.{i}.\2"},
    ]


# Presets between Megatron's GPT and Hugging Face's GPT-2, whose `Conv1D` has transposed weights.
#
# `c_attn` has all queries, then all keys, then all values; Megatron's `linear_qkv` has these for
# each head in turn.

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
    part = r"transformer.h.\1.attn.%s.\2"
    return [
        {"drop": ["*._extra_state"]},
        *_trim(config.given("vocab")),
        *(_rename(a, f"transformer.{b}") for a, b in _TOP),
        _rename("output_layer.weight", "lm_head.weight"),
        _rename(f"/{_M}{_FIRST_NORM}(weight|bias)/", r"transformer.h.\1.ln_1.\2"),
        _rename(f"/{_M}{_SECOND_NORM}(weight|bias)/", r"transformer.h.\1.ln_2.\2"),
        {
            "split": f"/{_A}linear_qkv\\.(weight|bias)/",
            "into": [part % x for x in ("query", "key", "value")],
            "repeat": config.heads,
        },
        {
            "fuse": r"/(transformer\.h\.\d+\.attn\.)query\.(weight|bias)/",
            "and": [r"\1key.\2", r"\1value.\2"],
            "into": r"\1c_attn.\2",
        },
        *(
            _rename(f"/{_M}{_escaped(a)}(weight|bias)/", rf"transformer.h.\1.{b}\2")
            for a, b in _LAYER
        ),
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
        *(_rename(f"/(?:transformer\\.)?{_escaped(b)}/", a) for a, b in _TOP),
        _rename("lm_head.weight", "output_layer.weight"),
        _rename(f"/{_GPT2_H}ln_1\\.(weight|bias)/", rf"decoder.layers.\1.{first}\2"),
        _rename(f"/{_GPT2_H}ln_2\\.(weight|bias)/", rf"decoder.layers.\1.{second}\2"),
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
        *(
            _rename(f"/{_GPT2_H}{_escaped(b)}(weight|bias)/", rf"decoder.layers.\1.{a}\2")
            for a, b in _LAYER
        ),
    ]


def _preset(
    steps: Callable[[ModelConfig], Steps], options: frozenset[str] = frozenset()
) -> ViewPreset:
    return ViewPreset(lambda given: steps(ModelConfig(**vars(given))), options)


LLAMA_FROM_MEGATRON = _preset(megatron_to_llama, LLAMA_FROM_OPTIONS)
MEGATRON_FROM_LLAMA = _preset(llama_to_megatron, LLAMA_TO_OPTIONS)
MIXTRAL_FROM_MEGATRON = _preset(megatron_to_mixtral, MIXTRAL_FROM_OPTIONS)
MEGATRON_FROM_MIXTRAL = _preset(mixtral_to_megatron, MIXTRAL_TO_OPTIONS)
GPT2_FROM_MEGATRON = _preset(megatron_to_gpt2, GPT2_FROM_OPTIONS)
MEGATRON_FROM_GPT2 = _preset(gpt2_to_megatron, GPT2_TO_OPTIONS)
STACK = _preset(stack_layers)
UNSTACK = _preset(unstack_layers)


# The numbers that a preset needs about a model, from its options or else from the checkpoint.


_NORMS = "stores its norms less one (apply_layernorm_1p), which no view adds again"
_ROTARY = "turns neighbouring elements of a head (rotary_interleaved), Hugging Face's models its two halves"
_GATED = "gates the output of attention (attention_output_gate), for which the preset has no place"


class ModelConfig(PresetInput):
    """The input of a preset, with the numbers of the model that it tells."""

    def flag(self, name: str) -> bool:
        """The value of a Boolean option; False if it is not given."""
        return bool(self.options.get(name))

    def given(self, name: str) -> int | None:
        """The value of a numeric option; None if it is not given."""
        value = self.options.get(name)
        if value is not None and (isinstance(value, bool) or value < 1):
            raise LayoutError(
                f"the preset {self.preset}: its option {name} must be at least 1, not {value}"
            )
        return value

    @property
    def heads(self) -> int:
        """Number of attention heads."""
        number = self.given("heads") or self._recorded(
            "num_attention_heads", ("num_attention_heads", "n_head")
        )
        if number is None:
            raise self._unknown("heads", "num_attention_heads")
        return number

    @property
    def groups(self) -> int:
        """Number of groups of heads that share a key and a value (default: the number of heads)."""
        heads, number = self.heads, self.given("groups")
        if number is None:
            if self.args.get("group_query_attention") is False:
                number = heads
            else:
                number = self._recorded("num_query_groups", ("num_key_value_heads",))
        if number is None and "heads" in self.options:
            raise self._unknown("groups", "num_query_groups")
        number = heads if number is None else number
        if heads % number:
            raise LayoutError(
                f"the preset {self.preset}: {heads} heads cannot be split into {number} groups"
            )
        return number

    @property
    def args(self) -> Mapping[str, Any]:
        """Megatron's arguments; empty if the checkpoint has none."""
        args = self.objects.get("args")
        return args if isinstance(args, Mapping) else {}

    @property
    def config(self) -> Mapping[str, Any]:
        """Hugging Face's configuration; empty if the checkpoint has none."""
        for key, data in self.assets.items():
            if key.rpartition("/")[2] == "config.json":
                try:
                    document = json.loads(data)
                except (ValueError, RecursionError) as e:
                    raise LayoutError(f"{key} is not JSON ({e})") from e
                if isinstance(document, dict):
                    inner = document.get("text_config")
                    return inner if isinstance(inner, dict) else document
        return {}

    def check_megatron(self) -> None:
        """Raise LayoutError if Megatron's arguments describe a model that differs from the family."""
        flags = {
            "apply_layernorm_1p": _NORMS,
            "rotary_interleaved": _ROTARY,
            "attention_output_gate": _GATED,
        }
        for name, why in flags.items():
            if self.args.get(name) is True:
                raise LayoutError(f"the preset {self.preset} does not fit: the model {why}")

    def _recorded(self, argument: str, keys: tuple[str, ...]) -> int | None:
        for number in (self.args.get(argument), *(self.config.get(k) for k in keys)):
            if type(number) is int and number > 0:
                return number
        return None

    def _unknown(self, option: str, argument: str) -> LayoutError:
        return LayoutError(
            f"the preset {self.preset} needs the number of {option}, which the checkpoint does "
            "not contain: it has "
            f"neither Megatron's arguments ({argument}) nor a config.json with it",
            hint=f"pass it: {{preset: {self.preset}, with: {{heads: 32, groups: 8}}}}",
        )
