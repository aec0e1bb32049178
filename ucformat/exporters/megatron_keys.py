"""Megatron's keys: layers and experts of one kind are one tensor, stacked along leading dims.

It is the reverse of `sources/megatron/names.py`. If the layers of a stack differ, as dense and mixture-of-experts
layers do, Megatron numbers them in the keys instead (`non_homogeneous_layers`).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from ucformat.errors import UnsupportedError
from ucformat.exporters.base import Span
from ucformat.exporters.pickle import Storage
from ucformat.exporters.values import constant
from ucformat.geometry.box import Box, row_major
from ucformat.geometry.tensor import Piece
from ucformat.sources.megatron.names import LAYER, LOCAL, is_parameter

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ucformat.checkpoint import Checkpoint
    from ucformat.geometry.tensor import TensorInfo

OPTIMIZER = "optimizer.state"
Parts = tuple["TensorInfo", ...]  # a tensor, and the rows that pad it

_EXPERT = re.compile(r"(.*\.experts)\.local_experts\.(\d{1,6})\.(.+)", re.DOTALL)
_GROUPED = re.compile(r"(.*\.experts)\.(linear_fc[12]\.(?:weight|bias))(\d{1,6})", re.DOTALL)
_LEGACY = re.compile(r".*\.experts\.weight[12]", re.DOTALL)  # of all experts, transposed
_LINEAR = re.compile(r"(.*\.linear_[a-z0-9_]+)\.weight", re.DOTALL)
_ATTENTION = "self_attention.linear_proj"
_MAX_LISTED = 10


class StackedKey(NamedTuple):
    """A key, and the indices of a parameter along the leading dims of its tensor."""

    key: str
    at: tuple[int, ...]


def keys_of(source: Checkpoint, infos: Sequence[TensorInfo], local: bool | None) -> dict[str, StackedKey]:  # noqa: FBT001
    """The key of each tensor, by its name.

    Args:
        local: whether the model is of the local specification; None: by the names of the norms.
    """
    names = list(dict.fromkeys(info.name for info in infos))
    known = source.metadata.engine.get("name") == "megatron-core"
    foreign = [n for n in names if not (known or is_parameter(n)) or _LEGACY.fullmatch(n)]
    if foreign:
        more = f" and {len(foreign) - _MAX_LISTED:,} more" if len(foreign) > _MAX_LISTED else ""
        raise UnsupportedError(
            f"{source.url} has names that Megatron does not have: {', '.join(foreign[:_MAX_LISTED])}{more}",
            hint="give them Megatron's by a view, such as --view llama-to-megatron (docs/view.md)",
        )
    if local is None:
        local = any(".input_layernorm." in n for n in names)
    found = {name: _key(name, local=local) for name in names}
    uneven = _uneven(found)
    return {n: _numbered(k) if k.key.partition(".layers.")[0] in uneven else k for n, k in found.items()}


def _key(name: str, *, local: bool) -> StackedKey:
    at: tuple[int, ...] = ()
    if match := _EXPERT.fullmatch(name):
        name, at = f"{match[1]}.experts.{match[3]}", (int(match[2]),)
    elif match := _GROUPED.fullmatch(name):
        name, at = f"{match[1]}.experts.{match[2]}", (int(match[3]),)
    if match := LAYER.fullmatch(name):
        below = match[3]
        for fused, own in LOCAL if local else ():
            if below.startswith(own):
                below = fused + below.removeprefix(own)
        name, at = f"{match[1]}.{below}", (int(match[2]), *at)
    return StackedKey(name, at)


def _uneven(found: Mapping[str, StackedKey]) -> set[str]:
    """The stacks whose layers differ in their parameters."""
    layers: dict[str, dict[int, set[tuple[str, tuple[int, ...]]]]] = {}
    for key, index in found.values():
        before, dot, after = key.partition(".layers.")
        if dot and index:
            layers.setdefault(before, {}).setdefault(index[0], set()).add((after, index[1:]))
    return {before for before, each in layers.items() if len({frozenset(held) for held in each.values()}) > 1}


def _numbered(key: StackedKey) -> StackedKey:
    before, _, after = key.key.partition(".layers.")
    return StackedKey(f"{before}.layers.{key.at[0]}.{after}", key.at[1:]) if key.at else key


def extra_states(keys: Mapping[str, StackedKey], source: Checkpoint, objects: Mapping[str, Any]) -> dict[str, Any]:
    """The extra states that modules of the model ask for, by their keys: they are empty, except under FP8."""
    args = source.objects.get("args")
    recorded = args.get("transformer_impl") if isinstance(args, dict) else None
    local = recorded == "local" if isinstance(recorded, str) else any(".input_layernorm." in n for n in keys)
    empty = None if local else constant("uint8", (0,), b"")
    modules: dict[str, list[tuple[int, ...]]] = {}
    for key, index in keys.values():
        if match := _LINEAR.fullmatch(key):
            modules.setdefault(match[1], []).append(index)
            if not local and match[1].endswith(_ATTENTION):
                attention = match[1].removesuffix("linear_proj") + "core_attention"
                modules.setdefault(attention, []).append(index)
    out: dict[str, Any] = {}
    for module, indices in modules.items():
        sizes = tuple(max(at) + 1 for at in zip(*indices, strict=True)) or (1,)
        for index in indices:
            at = ".".join(map(str, index or (0,)))
            out[f"{module}._extra_state/shard_{at}_{'.'.join(map(str, sizes))}"] = empty
    return {k: v for k, v in out.items() if k not in objects}


def stacked_elements(stack: Mapping[tuple[int, ...], Parts], leading: int, box: Box) -> Storage:
    """The elements of a box of a stacked tensor, which is in one of its parameters."""
    within = Box(box.start[leading:], box.shape[leading:])
    strides, row, pieces = row_major(within.shape), 0, []
    parts = stack[box.start[:leading]]
    for info in parts:
        shift = (row, *[0] * (len(info.shape) - 1)) if info.shape else ()
        clip = within.intersect(Box(shift, info.shape))
        if clip is not None:
            offset = sum((a - b) * s for a, b, s in zip(clip.start, within.start, strides, strict=True))
            pieces.append((info, Piece(clip.shift(tuple(-n for n in shift)), offset, strides)))
        row += info.shape[0] if info.shape else 0
    return Storage(Span(parts[0].dtype, within.size, tuple(pieces)))
