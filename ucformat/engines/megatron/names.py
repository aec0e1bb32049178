"""Names of Megatron's parameters: from the keys of distributed checkpoints, in the order of the module, and by group.

Layers and experts of one kind share a key, and are stacked along leading dims:
`decoder.layers.mlp.linear_fc1.weight` holds `decoder.layers.{i}.mlp.linear_fc1.weight` of every
layer, and `….mlp.experts.experts.linear_fc2.weight` that of every expert. If layers differ
(`non_homogeneous_layers`), and with `singleton_local_shards`, keys contain the numbers; the latter
also stores both halves of a gated projection separately, under `…_w` and `…_v`.

Optimizer states are `optimizer.state.<state>.<key>`, prefixed with `chained_N.` if there are
several optimizers.

Distributed checkpoints keep the hyper-parameters of the optimizer groups, but not the groups'
parameters. Megatron's own rule gives them: biases and vectors have no weight decay (`wd_mult` 0),
and experts under expert parallelism form groups of their own. Groups made by another rule are kept
as they are among the objects.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ucformat.sources.index import Group

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

_CHAINED = re.compile(r"(?:chained_(\d+)\.)?(optimizer\..+)", re.DOTALL)
_STATE = re.compile(r"optimizer\.state\.([^.]+)\.(.+)", re.DOTALL)
_BUCKET = re.compile(
    r"optimizer\.distributed\.dp_group_idx_(\d{1,6})\.gbuf_idx_(\d{1,6})\.dtype_(.+)\.bucket_idx_(\d{1,6})\.(\w+)"
)
_STACKED_LAYERS = re.compile(r"(?P<before>(?:.*\.)?layers)\.(?!\d+\.)(?P<after>.+)", re.DOTALL)
_EXPERTS = re.compile(
    r"(?P<before>.*\.experts)\.experts\.(?:(?P<number>\d+)\.)?(?P<after>.+)", re.DOTALL
)
_GROUPED = re.compile(r"(.*\.experts)\.(linear_fc\d)\.(weight|bias)(\d{1,6})", re.DOTALL)
_HALF = re.compile(r"(?P<whole>.*\.linear_fc1\.(?:weight|bias)\d*)_(?P<half>[wv])", re.DOTALL)

#: The optimizers' names of the fp32 copy.
MASTER = ("param", "fp32_param", "master_param")

#: Names in layers of the local specification, by the names of Transformer Engine, which the keys
#: have.
LOCAL = (
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
)


@dataclass(frozen=True, slots=True)
class StateKey:
    """A model's key, the state that a tensor holds, and the number of its optimizer."""

    key: str
    state: str
    chained: int = 0


@dataclass(frozen=True, slots=True)
class Bucket:
    """One state of one flat bucket of a data-parallel group's optimizer."""

    chained: int
    group: int
    buffer: int
    dtype: str
    number: int
    state: str


@dataclass(frozen=True, slots=True)
class NameTemplate:
    """The names of a key's parameters: `{0}`, `{1}` are indices of that many leading dims."""

    template: str
    leading: int
    half: int | None = None  # of a gated projection: 0 the gate, 1 the other

    def at(self, index: tuple[int, ...]) -> str:
        """The name at these leading indices."""
        name = self.template
        for d, i in enumerate(index):
            name = name.replace(f"{{{d}}}", str(i), 1)
        return name


def unwrapped(name: str) -> str:
    """A parameter's name without `module.` of the modules that wrap the model."""
    while name.startswith("module."):
        name = name[len("module.") :]
    return name


def split_state_key(fqn: str) -> StateKey | Bucket | None:
    """Parse the name of a tensor's entry; None for an optimizer's entry of unknown form."""
    match = _CHAINED.fullmatch(fqn)
    if match is None:
        return StateKey(unwrapped(fqn), "weight")
    if state := _STATE.fullmatch(match[2]):
        return StateKey(
            unwrapped(state[2]), "master" if state[1] in MASTER else state[1], int(match[1] or 0)
        )
    return bucket_of(match)


def bucket_of(match: re.Match[str]) -> Bucket | None:
    """The bucket whose entry has this name; None for other names."""
    parts = _BUCKET.fullmatch(match[2])
    if parts is None:
        return None
    state = "master" if parts[5] in MASTER else parts[5]
    return Bucket(int(match[1] or 0), int(parts[1]), int(parts[2]), parts[3], int(parts[4]), state)


def split_half(key: str) -> tuple[str, int]:
    """The name of a gated projection, and the half: 0 the gate, 1 the other; else 0."""
    match = _HALF.fullmatch(key)
    return (key, 0) if match is None else (match["whole"], "wv".index(match["half"]))


def ungrouped(name: str) -> str:
    """The name of an expert's parameter that a module of all experts numbers itself, as in `linear_fc1.weight3`."""
    match = _GROUPED.fullmatch(name)
    return name if match is None else f"{match[1]}.local_experts.{match[4]}.{match[2]}.{match[3]}"


def name_of(key: str, *, local: bool) -> NameTemplate:
    """The names of a key's parameters."""
    whole, half_number = split_half(key)
    half = None if whole == key else half_number
    key, leading = whole, 0
    if match := _STACKED_LAYERS.fullmatch(key):
        key, leading = f"{match['before']}.{{0}}.{match['after']}", 1
    if match := _EXPERTS.fullmatch(key):
        number = match["number"]
        if number is None:
            number, leading = f"{{{leading}}}", leading + 1
        key = f"{match['before']}.local_experts.{number}.{match['after']}"
    return NameTemplate(local_name(key) if local else key, leading, half)


def local_name(name: str) -> str:
    """The name of a parameter in a model of the local specification."""
    return _renamed(name, LOCAL)


def fused_name(name: str) -> str:
    """The name of a parameter in a model of Transformer Engine's specification."""
    return _renamed(name, ((unfused, fused) for fused, unfused in LOCAL))


def _renamed(name: str, starts: Iterable[tuple[str, str]]) -> str:
    """A name with the first of these beginnings of parts replaced by the other."""
    for old, new in starts:
        if f".{old}" in name:
            return name.replace(f".{old}", f".{new}", 1)
    return name


def with_norms_of_both(stored: Mapping[str, str]) -> dict[str, str]:
    """Stored names by the name in a model; also by those that norms have under the other specification."""
    other = {
        spelled: at
        for name, at in stored.items()
        for spelled in (local_name(name), fused_name(name))
        if spelled not in stored
    }
    return {**stored, **other}


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


#: Parts of layers of other models than GPT: of multi-token prediction, and of state-space models.
_OTHER_PARTS = ("enorm", "hnorm", "eh_proj", "transformer_layer", "mixer", "norm")


def is_parameter(name: str) -> bool:
    """Whether a model of Megatron-Core may have a parameter of this name."""
    if match := LAYER.fullmatch(name):
        part = match[3].split(".")[0]
        return match[1].split(".")[0] in _TOP and (part in _PARTS or part in _OTHER_PARTS)
    top, *below = name.split(".")
    return top in _TOP and bool(below) and below[0] in _PARTS and below[0] != "layers"


def _sort_key(name: str, *, grouped: bool) -> tuple[tuple[int, int, str], ...]:
    """The sort key of a name; `grouped`: first projections of all experts come first."""
    parts = name.split(".")
    if grouped and "local_experts" in parts:
        index = parts.index("local_experts")
        number = parts.pop(index + 1)
        parts = [*parts[:index], *parts[index + 1 :], number]
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

    They follow Megatron's own modules, with experts one after another or grouped, or the
    checkpoint's list.
    """
    orders = [
        sorted(names, key=lambda n: _sort_key(n, grouped=False)),
        sorted(names, key=lambda n: _sort_key(n, grouped=True)),
        list(names),
    ]
    return [list(order) for order in dict.fromkeys(map(tuple, orders))]


class Member(NamedTuple):
    """A trained parameter."""

    name: str
    ndim: int


def is_expert(name: str) -> bool:
    """Whether a parameter belongs to an expert."""
    return ".experts." in name


def groups_by_rule(
    raw: Sequence[dict[str, Any]], members: Sequence[Member], json: Callable[[Any], Any]
) -> list[Group] | None:
    """The groups with their parameters in order; None if Megatron's rule does not tell them."""
    if any(g.get("lr_mult", 1.0) != 1.0 or g.get("is_decoupled_lr") for g in raw) or not raw:
        return None
    expert_groups = any(g.get("is_expert_parallel") for g in raw)
    out: dict[int, Group] = {}
    for experts in (False, True):
        mine = [(i, g) for i, g in enumerate(raw) if bool(g.get("is_expert_parallel")) is experts]
        theirs = [m for m in members if (expert_groups and is_expert(m.name)) is experts]
        by_decay = {g.get("wd_mult", 1.0): i for i, g in mine}
        if len(by_decay) < len(mine) or not by_decay.keys() <= {0.0, 1.0}:
            return None
        names: dict[int, list[str]] = {i: [] for i, _ in mine}
        for m in theirs:
            plain = m.ndim == 1 or m.name.endswith(".bias")
            number = by_decay.get(0.0 if plain and 0.0 in by_decay else 1.0)
            if number is None or (plain and 0.0 not in by_decay and len(by_decay) > 1):
                return None
            names[number].append(m.name)
        for i, g in mine:
            out[i] = Group(names[i], json({k: v for k, v in g.items() if k != "params"}))
    return [out[i] for i in sorted(out)]
