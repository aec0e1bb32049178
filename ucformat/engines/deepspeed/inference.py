"""How a parameter is sharded across tensor-parallel ranks if neither the caller nor the checkpoint describes it.

The evidence: parts of unequal shape are cut along the dim in which they differ; equal bytes that
are not one repeated value are replicas; a family known by its module names follows its preset.
Nothing else is guessed: an error lists the remaining parameters, with the two possible readings of
each.

If a checkpoint has patterns and none matches a parameter, DeepSpeed joins it along dim 0, replicas
too, so a missing pattern proves nothing. The evidence is then, in this order: the sizes in the
checkpoint's own arguments; parts that differ, which cannot be replicas; and the other parameters:
equal parts are replicas if the checkpoint declares others replicated and also holds parts that
differ (ranks seeded alike would have equal parts of everything). Parts of one repeated value prove
nothing by themselves: a bias follows its weight, a norm the other norms.

A preset is a set of layout rules over the axis `tp`. It applies if the caller names it, and by
itself only if a checkpoint has no patterns and its module names are those of the family. It omits
tables that engines cut in several ways (a vocabulary may be cut, padded or replicated) unless the
family settles it; the shapes of the parts or the caller must then decide.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ucformat.errors import AmbiguousLayout, LayoutError, UsageError, option_text
from ucformat.geometry.box import Box
from ucformat.geometry.layout import Layout
from ucformat.geometry.tp_sharding import TP, Shapes, TPSharding, concatenate, replicate
from ucformat.geometry.view import BoxPair
from ucformat.reading.stand_ins import Inert
from ucformat.sources.tp_merge import CUTS, cuts_option

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from ucformat.sources.tp_merge import Verdict

MEAN = "{partial: mean, over: tp}"
EQUAL = "equal bytes"  # why parts are read as replicas

#: Names of modules in which several matrices may be fused, so that their parts do not simply follow
#: one another.
_FUSED = re.compile(
    r"qkv|query_key_value|key_value|c_attn|in_proj|gate_up|up_gate|h_to_4h|fc1|w12|w13|fused|experts",
    re.IGNORECASE,
)
_MAX_LISTED = 20


class Doubt(NamedTuple):
    """A parameter with two possible readings, spelled as in a layout."""

    name: str
    shapes: Shapes
    one: str
    other: str


def infer(
    name: str,
    shapes: Shapes,
    verdict: Callable[[], Verdict],
    siblings: Mapping[str, Shapes],
    hidden: int | None,
) -> TPSharding | Doubt:
    """The only sharding that the evidence allows, or a doubt."""
    first, ndim = shapes[0], len(shapes[0])
    sizes = enumerate(zip(*shapes, strict=False))
    differing = {d for d, of_dim in sizes if len(set(of_dim)) > 1}
    if len({len(s) for s in shapes}) > 1 or len(differing) > 1:
        raise LayoutError(
            f"its parts have the shapes {[list(s) for s in shapes]}, which fit no sharding"
        )
    fused = _FUSED.search(name) is not None
    if differing:
        d = differing.pop()
        if fused:
            return Doubt(name, shapes, cut(d), cut(d, "parts"))
        return concatenate(shapes, d).because("parts of unequal width")
    if 0 in first:
        return Doubt(name, shapes, "replicate", cut(0)) if ndim else replicate(shapes)
    compared = verdict()
    if compared == "equal" or not ndim:
        return replicate(shapes).because(EQUAL)
    if compared == "constant":
        return Doubt(name, shapes, "replicate", cut(0))
    if ndim == 1:
        is_bias = name.endswith("bias")
        weight = siblings.get(name.removesuffix("bias") + "weight") if is_bias else None
        if weight and not fused and [s[:1] for s in weight] == [s[:1] for s in shapes]:
            return concatenate(shapes, 0).because("its weight's parts are as long")
        return Doubt(name, shapes, cut(0, "parts") if fused else MEAN, cut(0))
    if ndim == 2 and hidden and not fused and re.search(r"embed|lm_head", name):
        if first[1] * len(shapes) == hidden:
            return concatenate(shapes, 1).because("the model's width")
        if first[1] == hidden:
            return concatenate(shapes, 0).because("the model's width")
    return Doubt(name, shapes, cut(0), cut(1))


def cut(dim: int, how: str = "") -> str:
    """A shard over the tensor-parallel ranks, spelled as in a layout.

    Args:
        how: if not empty, two concatenated tensors are each cut.
    """
    return f"{{shard: {dim}, over: tp{', parts: [1, 1]' if how else ''}}}"


def ambiguous(doubts: Sequence[Doubt], ranks: int) -> AmbiguousLayout:
    """The error that lists the parameters with two possible readings, and how to specify one."""
    lines = [
        f"  {d.name} (parts of {list(d.shapes[0])}): {d.one.strip('{}')} or {d.other.strip('{}')}"
        for d in doubts[:_MAX_LISTED]
    ]
    if len(doubts) > _MAX_LISTED:
        lines.append(f"  … and {len(doubts) - _MAX_LISTED} more")
    recorded = {d.name: _word(d.one) for d in doubts[:3]}
    example = "\n".join(
        f"    - {{match: {_quoted(d.name)}, place: [{d.one}]}}  # or [{d.other}]"
        for d in doubts[:_MAX_LISTED]
    )
    return AmbiguousLayout(
        f"the checkpoint was saved by {ranks} tensor-parallel ranks and does not record how "
        "these parameters are cut:\n" + "\n".join(lines),
        hint=f"specify it for each, as in {cuts_option(recorded)} ({', '.join(CUTS)}, or the dim to join along; a "
        "pattern may have *); or in a layout file "
        f"that is given as {option_text('layout')}; a preset may do, too, "
        f"such as {option_text('layout', repr('llama'), 'llama')}:\n    version: 1\n    mesh: "
        f"{{tp: {ranks}}}\n"
        f"    rules:\n{example}",
    )


def _word(place: str) -> str:
    """The word for a placement in `cuts`."""
    if "parts" in place:
        return "halves"
    dim = place.removeprefix("{shard: ").partition(",")[0]
    return {"replicate": "replicate", MEAN: "mean"}.get(place, dim)


def _quoted(name: str) -> str:
    return "'" + name.replace("'", "''") + "'"


_ARGUMENTS = ("args", "config", "model_config", "hf_config", "hparams")  # in the client state
_WIDTH = ("hidden_size", "n_embd", "d_model", "dim_model")
_POSITIONS = (
    "max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx",
)  # fmt: skip
_VOCABULARY = ("original_vocab_size", "vocab_size")
_HEAD = re.compile(r"(^|[._])(q|k|query|key)_?(layer)?_?norm", re.IGNORECASE)
_NORM = re.compile(r"norm|(^|\.)ln_?\w*\.(weight|bias)$", re.IGNORECASE)
_POSITION = re.compile(r"pos(ition)?_?emb|embed_pos|(^|\.)wpe\.", re.IGNORECASE)
_KINDS = re.compile(r"token_?type", re.IGNORECASE)
_WORDS = re.compile(
    r"(^|\.)((word|tok|token)_emb\w*|embed_tokens|wte|lm_head|output_layer|embed_out)\.(weight|bias)$"
)


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The sizes of the model that a checkpoint records: `padded_vocab_size`, `hidden_size`, … by name."""

    recorded: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> ModelSizes:
        """The sizes in a model states file: in its arguments, and in `universal_checkpoint_info`."""
        recorded: dict[str, int] = {}
        for key in (*_ARGUMENTS, "universal_checkpoint_info"):
            sizes = value.get(key)
            sizes = sizes.state if isinstance(sizes, Inert) else sizes
            for name, n in (sizes if isinstance(sizes, dict) else {}).items():
                if isinstance(name, str) and type(n) is int and n > 0:
                    recorded.setdefault(name, n)
        return cls(recorded)

    def whole(self, name: str, shapes: Shapes) -> bool | None:
        """Whether each rank has the whole parameter, not some rows; None if unknown."""
        rows, total = shapes[0][0], sum(s[0] for s in shapes)
        size = self._expected(name, len(shapes[0]))
        if size is None and _WORDS.search(name):
            size = self._first(_VOCABULARY)
            if size and rows < size <= total:
                return False  # padded to a size that is not recorded
        return size == rows if size in (rows, total) else None

    def width(self, name: str, shapes: Shapes) -> bool | None:
        """Whether the parts of a matrix, joined along dim 0, have the model's width; None if unknown.

        False: they have it if joined along dim 1, and one dim of such a matrix always has that
            width.
        """
        size = self._first(_WIDTH)
        if size is None or len(shapes[0]) != 2:
            return None
        rows, columns = (sum(s[d] for s in shapes) for d in (0, 1))
        if size in (rows, shapes[0][1]):
            return True
        return False if size in (columns, shapes[0][0]) and not _POSITION.search(name) else None

    def _expected(self, name: str, ndim: int) -> int | None:
        """The rows of a parameter of this name."""
        if _WORDS.search(name) and not _NORM.search(name):
            return self._first(("padded_vocab_size",))
        if _POSITION.search(name):
            return self._first(_POSITIONS) if ndim == 2 else None
        if _KINDS.search(name):
            return self._first(("num_tokentypes", "type_vocab_size"))
        if ndim != 1 or not _NORM.search(name):
            return None
        if not _HEAD.search(name):
            return self._first(_WIDTH)
        width, heads = self._first(_WIDTH), self._first(("num_attention_heads", "n_head"))
        each = width // heads if width and heads else None
        return self._first(("kv_channels", "head_dim")) or each

    def _first(self, names: Iterable[str]) -> int | None:
        return next((self.recorded[name] for name in names if name in self.recorded), None)


def as_its_weight(
    name: str, shapes: Shapes, shardings: Mapping[str, TPSharding]
) -> TPSharding | None:
    """A bias sharded as the rows of its weight; None if it is none, or that does not fit."""
    weight = shardings.get(f"{name.removesuffix('bias')}weight") if name.endswith("bias") else None
    if weight is None or weight.mean or weight.scaled:
        return None
    if len(weight.shape) < 2 or len(shapes[0]) != 1:
        return None
    regions, padding = _rows(weight.regions), _rows(weight.padding)
    for t, shape in enumerate(shapes):
        rows = (*regions[t], *(padding[t] if padding else ()))
        if sum(region.box.size for region in rows) != shape[0]:
            return None
    out = TPSharding(weight.shape[:1], regions, padding, weight.padding_rows)
    return out.because("the rows of its weight")


def as_other_norms(
    name: str, shapes: Shapes, shardings: Mapping[str, TPSharding]
) -> TPSharding | None:
    """A norm replicated as all others of its length are; None if it is none, or they are not."""
    if not _NORM.search(name) or _HEAD.search(name) or len(shapes[0]) != 1:
        return None
    norms = (r for n, r in shardings.items() if _NORM.search(n) and not _HEAD.search(n))
    others = [r for r in norms if len(r.shape) == 1]
    alike = {r.shape for r in others} == {shapes[0]}
    if not alike or any(r != replicate(shapes).because(r.why) for r in others):
        return None
    return replicate(shapes).because("the other norms")


def _rows(regions: tuple[tuple[BoxPair, ...], ...]) -> tuple[tuple[BoxPair, ...], ...]:
    """The regions of the rows of a matrix."""
    rows = (
        (BoxPair.aligned(_first(r.target), _first(r.box)) for r in of_rank) for of_rank in regions
    )
    return tuple(tuple(dict.fromkeys(of_rank)) for of_rank in rows)


def _first(box: Box) -> Box:
    return Box(box.start[:1], box.shape[:1])


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
    (
        _LLAMA_LAYER + r"(mlp|mlp\.experts\.\d+|mlp\.shared_expert)\.(gate|up)_proj\.(weight|bias)",
        _COLUMN,
    ),
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


def preset_layout(name: str, ranks: int) -> Layout:
    """The layout of the preset with this name."""
    if name not in PRESETS:
        raise UsageError(f"there is no preset {name!r}", hint=f"there are: {', '.join(PRESETS)}")
    return Layout({TP: ranks}, PRESETS[name])


@dataclass(frozen=True, slots=True)
class Family:
    """A family that is known by its module names: all of `signs` must be found."""

    preset: str
    signs: tuple[str, ...]

    def has(self, names: Iterable[str]) -> bool:
        """Whether these names are the family's."""
        names = list(names)
        return all(any(re.fullmatch(sign, name[:1000]) for name in names) for sign in self.signs)


FAMILIES = (
    Family("llama", tuple(rf"model\.layers\.\d+\.{name}\.weight" for name in (
        r"self_attn\.q_proj", r"self_attn\.o_proj", "input_layernorm",
    ))),
    Family("megatron-deepspeed", tuple(rf"{_MEGATRON_LAYER}{name}\.weight" for name in (
        r"self_attention\.query_key_value", r"self_attention\.dense", r"mlp\.dense_4h_to_h",
    ))),
)  # fmt: skip


def family_of(shapes: dict[str, tuple[tuple[int, ...], ...]]) -> str | None:
    """The preset of the family of these parameters; None if unknown.

    Shapes identify Megatron's SwiGLU: the second matrix has half as many inputs as the first has
    outputs.
    """
    preset = next((family.preset for family in FAMILIES if family.has(shapes)), None)
    if preset != "megatron-deepspeed":
        return preset
    for name, (first, *_) in shapes.items():
        down = shapes.get(name.replace("dense_h_to_4h", "dense_4h_to_h"))
        if name.endswith("mlp.dense_h_to_4h.weight") and down:
            return f"{preset}-swiglu" if first[0] == 2 * down[0][-1] else preset
    return preset
