"""Megatron-Core's distributed checkpoints (`torch_dist`).

The states of the distributed optimizer are written in the format `fully_reshardable`, and those of
an optimizer that is not distributed under its own keys: each of the two loads no other's.

The destination is the folder of one iteration: a DCP checkpoint, `common.pt` with the values that
all ranks share, and `metadata.json`, without which `dist_checkpointing` takes the folder for no
checkpoint.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ucformat.engines.megatron.export_common import (
    common_of,
    has_distributed_optimizer,
    is_megatron,
    objects_of,
)
from ucformat.engines.megatron.folder import COMMON, CONFIG
from ucformat.engines.megatron.names import LAYER, LOCAL, is_expert, is_parameter
from ucformat.errors import UnsupportedError, first_names
from ucformat.exporters.base import Exporter, Span, Target, TargetFile, left_out, option
from ucformat.exporters.distcp import DistcpOptions, ItemFiles, TensorEntry, ValueEntry, save_id_of
from ucformat.exporters.pickle import Storage
from ucformat.exporters.values import constant
from ucformat.exporters.zip_file import torch_file
from ucformat.geometry.box import Box, row_major
from ucformat.geometry.tensor import Key, Piece

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ucformat.checkpoint import Checkpoint
    from ucformat.engines.megatron.export_common import Wrapped
    from ucformat.exporters.distcp import Entry
    from ucformat.geometry.tensor import TensorInfo


_CONFIG = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
# the names of the fp32 copy, distributed or not
_MASTER, _MASTER_OF_16_BITS = ("param", "fp32_param")


@dataclass(frozen=True, kw_only=True)
class MegatronOptions(DistcpOptions):
    """The options of `MegatronExporter`."""

    distributed_optimizer: bool | None = option(
        None,
        "flag",
        "whether the job that loads has the distributed optimizer (--use-distributed-optimizer); as in Megatron's "
        "sources, and of others yes",
    )
    expert_parallel: bool | None = option(
        None,
        "flag",
        "whether the job that loads has expert parallelism, and so a second optimizer; as in Megatron's sources",
    )
    chained_prefix: bool | None = option(
        None,
        "flag",
        "whether names of states have the prefix `chained_N.` of several optimizers; as in Megatron's sources",
    )
    local: bool | None = option(
        None,
        "flag",
        "whether the model is of the local specification; by the names of the norms if not given",
    )


class MegatronExporter(Exporter):
    """Plans the files of a distributed checkpoint of Megatron-Core."""

    kind = "megatron"
    title = "Megatron-Core (torch_dist)"
    summary = "Megatron-Core's distributed checkpoints."
    options_type = MegatronOptions

    def target(self, source: Checkpoint, infos: Sequence[TensorInfo]) -> Target:
        """See Exporter."""
        keys = keys_of(source, infos, self.options.local)
        distributed = self.options.distributed_optimizer
        if distributed is None:
            distributed = has_distributed_optimizer(source)
        plan = _Tensors(source, infos, keys, distributed=distributed)
        prefixes = self._prefixes(source, plan)
        common = common_of(
            source, infos, trained=plan.trained, prefixes=prefixes, wrapped=plan.wrapped
        )
        objects, left = objects_of(source)
        extra = extra_states(keys, source, objects)
        entries: list[Entry] = [
            *plan.weights(),
            *(ValueEntry(k, [v]) for k, v in (extra | objects).items()),
            *plan.states(prefixes),
        ]
        items = ItemFiles(entries, self.options)
        config = TargetFile.of(CONFIG, json.dumps(_CONFIG).encode(), last=True)
        metadata = items.metadata(None, save_id_of(source, infos, self.options))
        rest = left_out(source, plan.kept, values=source.objects, groups=True)  # `left` names them
        files = (*items.files(), torch_file(COMMON, common.values), metadata, config)
        return Target(files, (*rest, *left, *common.left))

    def _prefixes(self, source: Checkpoint, plan: _Tensors) -> dict[bool, str]:
        """The prefix of an optimizer's states, by whether it trains experts; a single optimizer trains all."""
        chained = self.options.expert_parallel
        if chained is None:
            chained = any(g.get("is_expert_parallel") for g in source.metadata.groups)
        if not chained or not any(map(is_expert, plan.trained)):
            return {False: ""}
        prefixed = self.options.chained_prefix
        if prefixed is None:
            about = source.objects.get("content_metadata")
            known = about.get("chained_optim_avoid_prefix") if isinstance(about, dict) else None
            prefixed = is_megatron(source) and not known
        return {False: "chained_0.", True: "chained_1."} if prefixed else {False: "", True: ""}


class _Tensors:
    """The tensors by the format's keys.

    Attributes:
        trained: the names of the parameters that have optimizer states.
        wrapped: how the optimizer's state dict lies in that of Megatron's: see `common_of`.
        kept: the tensors that have a place.
    """

    def __init__(
        self,
        source: Checkpoint,
        infos: Sequence[TensorInfo],
        keys: dict[str, StackedKey],
        *,
        distributed: bool,
    ) -> None:
        self._infos = {info.key: info for info in infos}
        self._keys = keys
        self.kept: list[TensorInfo] = []
        self.trained: dict[str, None] = {}
        #: The rows that pad a vocabulary, which are not among the tensors to export, by the tensor.
        self._padding = {
            key: (rows,)
            for key, info in self._infos.items()
            if (rows := source.tensors.get(key.padding)) is not None and rows.dtype == info.dtype
        }
        moments = [k for k in self._infos if k.state not in ("weight", "master", "step")]
        shapes = {
            k.name: i.shape for k, i in self._infos.items() if k.state in ("weight", "master")
        }
        self._states: dict[str, list[Key]] = {}
        for key in moments:
            if shapes.get(key.name) == self._infos[key].shape:
                self.trained[key.name] = None
                self._states.setdefault(key.state, []).append(key)
        self._weights = {n: self._parameter(n, "weight", "master") for n in shapes}
        narrow = {n for n in self.trained if self._infos[self._weights[n]].dtype != "float32"}
        self._masters = {
            n: self._parameter(n, "master", "weight")
            for n in self.trained
            if distributed or n in narrow
        }
        self.wrapped: Wrapped = (
            "distributed" if distributed else "mixed_precision" if narrow else "plain"
        )
        lacking = [n for n, k in self._masters.items() if self._infos[k].dtype != "float32"]
        if lacking:
            raise UnsupportedError(
                f"the optimizer of Megatron needs fp32 copies of the parameters, and {source.url} has none of "
                f"{len(lacking):,}: {', '.join(lacking[:3])}{', …' if len(lacking) > 3 else ''}",
                hint="export the weights alone (--state weight), or cast everything to float32 (--cast float32)",
            )
        used = {
            *self._weights.values(),
            *self._masters.values(),
            *(k for keys in self._states.values() for k in keys),
        }
        used |= {Key(name, "step") for name in self.trained}
        for key in used & self._infos.keys():
            self.kept += (self._infos[key], *self._padding.get(key, ()))

    def _parameter(self, name: str, *states: str) -> Key:
        return next(k for s in states if (k := Key(name, s)) in self._infos)

    def weights(self) -> Iterator[TensorEntry]:
        """The model's entries."""
        return self._stacked("", self._weights)

    def states(self, prefixes: dict[bool, str]) -> Iterator[TensorEntry]:
        """The optimizer's entries."""
        master = _MASTER if self.wrapped == "distributed" else _MASTER_OF_16_BITS
        by_state = {master: self._masters} | {
            s: {k.name: k for k in keys} for s, keys in self._states.items()
        }
        for state, mine in by_state.items():
            for experts in (False, True):
                names = {
                    n: k for n, k in mine.items() if (is_expert(n) and len(prefixes) > 1) is experts
                }
                yield from self._stacked(f"{prefixes.get(experts, '')}{OPTIMIZER}.{state}.", names)

    def _stacked(self, prefix: str, tensors: dict[str, Key]) -> Iterator[TensorEntry]:
        """The entries of tensors by the names of their parameters; layers and experts of one kind are one entry."""
        stacks: dict[str, dict[tuple[int, ...], Parts]] = {}
        for name, key in tensors.items():
            place = self._keys[name]
            parts = (self._infos[key], *self._padding.get(key, ()))
            stacks.setdefault(place.key, {})[place.at] = parts
        for stacked, stack in stacks.items():
            sizes = tuple(max(at) + 1 for at in zip(*stack, strict=True))
            kinds = Counter((parts[0].dtype, _joined(parts)) for parts in stack.values())
            (dtype, shape), _ = kinds.most_common(1)[0]
            first = next(iter(stack.values()))[0]
            odd = next(
                (p[0] for p in stack.values() if (p[0].dtype, _joined(p)) != (dtype, shape)), None
            )
            if odd is not None:
                raise UnsupportedError(
                    f"{odd.key} is {odd.dtype} of shape {list(odd.shape)}, and others of {stacked} are {dtype} of "
                    f"{list(shape)}: Megatron stacks them in one tensor"
                )
            if len(stack) < math.prod(sizes):
                raise UnsupportedError(
                    f"{prefix}{stacked} of {len(stack):,} layers or experts is there, and {math.prod(sizes):,} are "
                    "needed: Megatron stacks them in one tensor",
                    hint="export the weights alone (--state weight) if only some of the parameters were trained",
                )
            elements = partial(stacked_elements, stack, len(sizes))
            yield TensorEntry(
                prefix + stacked,
                dtype,
                (*sizes, *shape),
                elements,
                str(first.key),
                leading=len(sizes),
            )


def _joined(parts: Parts) -> tuple[int, ...]:
    """The shape of a tensor with the rows that pad it."""
    shape = parts[0].shape
    return (sum(p.shape[0] for p in parts), *shape[1:]) if len(parts) > 1 else shape


# Megatron's keys: layers and experts of one kind are one tensor, stacked along leading dims.
#
# It is the reverse of `engines/megatron/names.py`. If the layers of a stack differ, as dense and
# mixture-of-experts layers do, Megatron numbers them in the keys instead
# (`non_homogeneous_layers`).

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


def keys_of(
    source: Checkpoint,
    infos: Sequence[TensorInfo],
    local: bool | None,  # noqa: FBT001
) -> dict[str, StackedKey]:
    """The key of each tensor, by its name.

    Args:
        local: whether the model is of the local specification; None: by the names of the norms.
    """
    names = list(dict.fromkeys(info.name for info in infos))
    known = source.metadata.engine.get("name") == "megatron-core"
    foreign = [n for n in names if not (known or is_parameter(n)) or _LEGACY.fullmatch(n)]
    if foreign:
        raise UnsupportedError(
            f"{source.url} has names that Megatron does not have: {first_names(foreign, _MAX_LISTED)}",
            hint="give them Megatron's by a view, such as --view llama-to-megatron (docs/view.md)",
        )
    if local is None:
        local = any(".input_layernorm." in n for n in names)
    found = {name: _key(name, local=local) for name in names}
    uneven = _uneven(found)
    return {
        n: _numbered(k) if k.key.partition(".layers.")[0] in uneven else k for n, k in found.items()
    }


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
    return {
        before
        for before, each in layers.items()
        if len({frozenset(held) for held in each.values()}) > 1
    }


def _numbered(key: StackedKey) -> StackedKey:
    before, _, after = key.key.partition(".layers.")
    return StackedKey(f"{before}.layers.{key.at[0]}.{after}", key.at[1:]) if key.at else key


def extra_states(
    keys: Mapping[str, StackedKey], source: Checkpoint, objects: Mapping[str, Any]
) -> dict[str, Any]:
    """The extra states that modules of the model ask for, by their keys: they are empty, except under FP8."""
    args = source.objects.get("args")
    recorded = args.get("transformer_impl") if isinstance(args, dict) else None
    local = (
        recorded == "local"
        if isinstance(recorded, str)
        else any(".input_layernorm." in n for n in keys)
    )
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
            offset = sum(
                (a - b) * s for a, b, s in zip(clip.start, within.start, strides, strict=True)
            )
            pieces.append((info, Piece(clip.shift(tuple(-n for n in shift)), offset, strides)))
        row += info.shape[0] if info.shape else 0
    return Storage(Span(parts[0].dtype, within.size, tuple(pieces)))
