"""From the keys of Megatron's distributed checkpoints to the names of parameters and states.

Layers and experts of one kind share a key, and are stacked along leading dims: `decoder.layers.mlp.linear_fc1.weight`
is `decoder.layers.{i}.mlp.linear_fc1.weight` for every layer, and `….mlp.experts.experts.linear_fc2.weight` those of
every expert. Where layers differ (`non_homogeneous_layers`), and with `singleton_local_shards`, keys have the numbers
in them; the latter also stores both halves of a gated projection apart, under `…_w` and `…_v`.

Optimizer states are `optimizer.state.<state>.<key>`; `chained_N.` stands in front where there are several optimizers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["LOCAL", "Bucket", "Name", "StateKey", "bucket_of", "local_name", "name_of", "split_state_key"]

_CHAINED = re.compile(r"(?:chained_(\d+)\.)?(optimizer\..+)", re.DOTALL)
_STATE = re.compile(r"optimizer\.state\.([^.]+)\.(.+)", re.DOTALL)
_BUCKET = re.compile(
    r"optimizer\.distributed\.dp_group_idx_(\d{1,6})\.gbuf_idx_(\d{1,6})\.dtype_(.+)\.bucket_idx_(\d{1,6})\.(\w+)"
)
_LAYERS = re.compile(r"(?P<before>(?:.*\.)?layers)\.(?!\d+\.)(?P<after>.+)", re.DOTALL)
_EXPERTS = re.compile(r"(?P<before>.*\.experts)\.experts\.(?:(?P<number>\d+)\.)?(?P<after>.+)", re.DOTALL)
_HALF = re.compile(r"(?P<whole>.*\.linear_fc1\.(?:weight|bias))_(?P<half>[wv])", re.DOTALL)

#: What the optimizers call the fp32 copy.
_MASTER = ("param", "fp32_param")

#: How the layers of the local specification name what the keys call as Transformer Engine does.
LOCAL = (
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
)


@dataclass(frozen=True, slots=True)
class StateKey:
    """A model's key, the state of it that a tensor is, and the number of the optimizer that has it."""

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
class Name:
    """How a key names parameters: `{0}`, `{1}` in the template are indices of that many leading dims."""

    template: str
    leading: int
    half: int | None = None  # of a gated projection: 0 the gate, 1 the other

    def at(self, index: tuple[int, ...]) -> str:
        """The name at these leading indices."""
        name = self.template
        for d, i in enumerate(index):
            name = name.replace(f"{{{d}}}", str(i), 1)
        return name


def split_state_key(fqn: str) -> StateKey | Bucket | None:
    """What a tensor's entry is; None where it is an optimizer's in some other way."""
    match = _CHAINED.fullmatch(fqn)
    if match is None:
        return StateKey(fqn, "weight")
    if found := _STATE.fullmatch(match[2]):
        return StateKey(found[2], "master" if found[1] in _MASTER else found[1], int(match[1] or 0))
    return bucket_of(match)


def bucket_of(match: re.Match[str]) -> Bucket | None:
    """The bucket whose entry has this name."""
    found = _BUCKET.fullmatch(match[2])
    if found is None:
        return None
    state = "master" if found[5] in _MASTER else found[5]
    return Bucket(int(match[1] or 0), int(found[1]), int(found[2]), found[3], int(found[4]), state)


def name_of(key: str, *, local: bool) -> Name:
    """How a key names parameters; `local`: those of the local specification."""
    half = None
    if match := _HALF.fullmatch(key):
        key, half = match["whole"], "wv".index(match["half"])
    leading = 0
    if match := _LAYERS.fullmatch(key):
        key, leading = f"{match['before']}.{{0}}.{match['after']}", 1
    if match := _EXPERTS.fullmatch(key):
        number = match["number"]
        if number is None:
            number, leading = f"{{{leading}}}", leading + 1
        key = f"{match['before']}.local_experts.{number}.{match['after']}"
    return Name(local_name(key) if local else key, leading, half)


def local_name(name: str) -> str:
    """The name of a parameter in a model of the local specification."""
    for fused, own in LOCAL:
        at = name.find("." + fused)
        if at >= 0:
            return f"{name[: at + 1]}{own}{name[at + 1 + len(fused) :]}"
    return name
