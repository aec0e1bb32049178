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
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from struct import pack
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ucformat.engines.megatron.export_options import MegatronExportOptions
from ucformat.engines.megatron.folder import COMMON, CONFIG
from ucformat.engines.megatron.names import (
    LAYER,
    LOCAL,
    StateKey,
    is_expert,
    is_parameter,
    split_state_key,
)
from ucformat.errors import UnsupportedError, first_names
from ucformat.exporters.base import Span, Target, TargetFile, left_out
from ucformat.exporters.distcp import ItemFiles, TensorEntry, ValueEntry, save_id_of
from ucformat.exporters.pickle import ALLOWED, Global, Instance, Storage
from ucformat.exporters.values import constant, value_of
from ucformat.exporters.zip_file import torch_file
from ucformat.geometry.box import Box, row_major
from ucformat.geometry.tensor import Key, Piece
from ucformat.storage.concurrency import map_io

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from ucformat.checkpoint import Checkpoint
    from ucformat.exporters.distcp import Entry
    from ucformat.geometry.tensor import TensorInfo


_CONFIG = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
#: The object in which Megatron says what form its state has.
CONTENTS = "content_metadata"
#: Its value that says that layers, experts and halves of gated projections have keys of their own.
SINGLE = "singleton_local_shards"
# the names of the fp32 copy, distributed or not
_MASTER, _MASTER_OF_16_BITS = ("param", "fp32_param")


def plan_target(
    source: Checkpoint, infos: Sequence[TensorInfo], options: MegatronExportOptions
) -> Target:
    """Plan the files of a distributed checkpoint."""
    keys = keys_of(source, infos, options.local)
    distributed = options.distributed_optimizer
    if distributed is None:
        distributed = has_distributed_optimizer(source)
    plan = _ExportedTensors(source, infos, keys, distributed=distributed)
    prefixes = _prefixes(source, plan, options)
    common = common_of(source, infos, trained=plan.trained, prefixes=prefixes, wrapped=plan.wrapped)
    objects, left = objects_of(source)
    extra = extra_states(keys, source, objects)
    entries: list[Entry] = [
        *plan.weights(),
        *(ValueEntry(k, [v]) for k, v in (extra | objects).items()),
        *plan.states(prefixes),
    ]
    items = ItemFiles(entries, options)
    config = TargetFile.of(CONFIG, json.dumps(_CONFIG).encode(), last=True)
    metadata = items.metadata(None, save_id_of(source, infos, options))
    # All values count as exported here, since `left` and `common.left` name those that are not.
    not_exported = left_out(source, plan.kept, values=source.objects, groups=True)
    files = (*items.files(), torch_file(COMMON, common.values), metadata, config)
    return Target(files, (*not_exported, *left, *common.left))


def listed_keys(source: Checkpoint) -> tuple[dict[str, TensorEntry], list[str]]:
    """The tensors that Megatron's own checkpoint of the same state has, by key, and the keys of its objects."""
    infos, options = list(source.tensors.values()), MegatronExportOptions()
    keys, single = keys_of(source, infos, None), bool(_contents(source).get(SINGLE))
    if single:
        keys = {name: _single(key) for name, key in keys.items()}
    distributed = has_distributed_optimizer(source)
    plan = _ExportedTensors(source, infos, keys, distributed=distributed)
    weights = list(plan.weights())
    tensors = [*weights, *plan.states(_prefixes(source, plan, options))]
    if single:
        shapes = {entry.name: entry.shape for entry in weights}
        tensors = [part for entry in tensors for part in _halves(entry, shapes)]
    objects = objects_of(source)[0]
    objects |= {name: None for name in source.objects if _SHARD.fullmatch(name)}
    objects |= extra_states(keys, source, objects)
    return {entry.name: entry for entry in tensors}, list(objects)


def _prefixes(
    source: Checkpoint, plan: _ExportedTensors, options: MegatronExportOptions
) -> dict[bool, str]:
    """The prefix of an optimizer's states, by whether it trains experts."""
    chained = options.expert_parallel
    if chained is None:
        chained = any(g.get("is_expert_parallel") for g in source.metadata.groups)
    if not chained or not any(map(is_expert, plan.trained)):
        return {False: ""}
    prefixed = options.chained_prefix
    if prefixed is None:
        avoided = _contents(source).get("chained_optim_avoid_prefix")
        prefixed = is_megatron(source) and not avoided
    return {False: "chained_0.", True: "chained_1."} if prefixed else {False: "", True: ""}


class _ExportedTensors:
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
        parameters = {k: i for k, i in self._infos.items() if k.state in ("weight", "master")}
        shapes = {k.name: i.shape for k, i in parameters.items()}
        self._states: dict[str, list[Key]] = {}
        for key in moments:
            if shapes.get(key.name) == self._infos[key].shape:
                self.trained[key.name] = None
                self._states.setdefault(key.state, []).append(key)
        self._weights = {n: self._parameter(n, "weight", "master") for n in shapes}
        narrow = {n for n in self.trained if self._infos[self._weights[n]].dtype != "float32"}
        copied = self.trained if distributed else [n for n in self.trained if n in narrow]
        self._masters = {n: self._parameter(n, "master", "weight") for n in copied}
        self.wrapped: Wrapped = "mixed_precision" if narrow else "plain"
        if distributed:
            self.wrapped = "distributed"
        lacking = [n for n, k in self._masters.items() if self._infos[k].dtype != "float32"]
        if lacking:
            raise UnsupportedError(
                "the optimizer of Megatron needs fp32 copies of the parameters, and "
                f"{source.url} has none of "
                f"{len(lacking):,}: {', '.join(lacking[:3])}{', …' if len(lacking) > 3 else ''}",
                hint=(
                    "export the weights alone (--state weight), or cast everything to float32 "
                    "(--cast float32)"
                ),
            )
        used = {*self._weights.values(), *self._masters.values(), *chain(*self._states.values())}
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
        by_state = {master: self._masters}
        by_state |= {s: {k.name: k for k in keys} for s, keys in self._states.items()}
        apart = len(prefixes) > 1  # the optimizer of experts
        for state, mine in by_state.items():
            for experts in (False, True):
                names = {n: k for n, k in mine.items() if (apart and is_expert(n)) is experts}
                yield from self._stacked(f"{prefixes.get(experts, '')}{OPTIMIZER}.{state}.", names)

    def _stacked(self, prefix: str, tensors: dict[str, Key]) -> Iterator[TensorEntry]:
        """The entries of tensors, of which layers and experts of one kind are one."""
        stacks: dict[str, dict[tuple[int, ...], Parts]] = {}
        for name, key in tensors.items():
            stacked_key = self._keys[name]
            parts = (self._infos[key], *self._padding.get(key, ()))
            stacks.setdefault(stacked_key.key, {})[stacked_key.indices] = parts
        for stacked, stack in stacks.items():
            sizes = tuple(max(along_dim) + 1 for along_dim in zip(*stack, strict=True))
            kinds = Counter((parts[0].dtype, _joined_shape(parts)) for parts in stack.values())
            (dtype, shape), _ = kinds.most_common(1)[0]
            first = next(iter(stack.values()))[0]
            odd = next(
                (p[0] for p in stack.values() if (p[0].dtype, _joined_shape(p)) != (dtype, shape)),
                None,
            )
            if odd is not None:
                raise UnsupportedError(
                    f"{odd.key} is {odd.dtype} of shape {list(odd.shape)}, and others of "
                    f"{stacked} are {dtype} of "
                    f"{list(shape)}: Megatron stacks them in one tensor"
                )
            if len(stack) < math.prod(sizes):
                raise UnsupportedError(
                    f"{prefix}{stacked} of {len(stack):,} layers or experts is there, and "
                    f"{math.prod(sizes):,} are "
                    "needed: Megatron stacks them in one tensor",
                    hint=(
                        "export the weights alone (--state weight) if only some of the "
                        "parameters were trained"
                    ),
                )
            n = len(sizes)
            elements, name = partial(stacked_elements, stack, n), prefix + stacked
            yield TensorEntry(name, dtype, (*sizes, *shape), elements, str(first.key), leading=n)


def _joined_shape(parts: Parts) -> tuple[int, ...]:
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
_PREDICTED = "mtp.layers"  # those of multi-token prediction, which Megatron never stacks
_FIRST_LINEAR = re.compile(r"\.linear_fc1\.(weight|bias)\Z")
_LEGACY = re.compile(r".*\.experts\.weight[12]", re.DOTALL)  # of all experts, transposed
_SHARD = re.compile(
    r".+/shard_\d+(\.\d+)*_\d+(\.\d+)*", re.DOTALL
)  # as `save` keeps sharded objects
_LINEAR = re.compile(r"(.*\.linear_[a-z0-9_]+)\.weight", re.DOTALL)
_ATTENTION = "self_attention.linear_proj"
_MAX_LISTED = 10


class StackedKey(NamedTuple):
    """A key, and the indices of a parameter along the leading dims of its tensor.

    `layers` is what begins the keys of its stack of layers, of which the first index is the number.
    """

    key: str
    indices: tuple[int, ...]
    layers: str | None = None


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
    from_megatron = is_megatron(source)
    foreign = [n for n in names if not (from_megatron or is_parameter(n)) or _LEGACY.fullmatch(n)]
    if foreign:
        raise UnsupportedError(
            f"{source.url} has names that Megatron does not have: "
            f"{first_names(foreign, _MAX_LISTED)}",
            hint="give them Megatron's by a view, such as --view llama-to-megatron (docs/view.md)",
        )
    if local is None:
        local = any(".input_layernorm." in n for n in names)
    keys = {name: _stacked_key(name, local=local) for name in names}
    uneven = _uneven(keys)
    return {n: _numbered(k) if k.layers in uneven else k for n, k in keys.items()}


def _stacked_key(name: str, *, local: bool) -> StackedKey:
    index: tuple[int, ...] = ()
    if match := _EXPERT.fullmatch(name):
        name, index = f"{match[1]}.experts.{match[3]}", (int(match[2]),)
    elif match := _GROUPED.fullmatch(name):
        name, index = f"{match[1]}.experts.{match[2]}", (int(match[3]),)
    if match := LAYER.fullmatch(name):
        below = match[3]
        for fused, unfused in LOCAL if local else ():
            if below.startswith(unfused):
                below = fused + below.removeprefix(unfused)
        return StackedKey(f"{match[1]}.{below}", (int(match[2]), *index), match[1])
    return StackedKey(name, index)


def _uneven(keys: Mapping[str, StackedKey]) -> set[str]:
    """The stacks whose keys have the numbers: those whose layers differ, and of multi-token prediction."""
    stacks: dict[str, dict[int, set[tuple[str, tuple[int, ...]]]]] = {}
    for stacked in keys.values():
        if stacked.layers is not None:
            number, *index = stacked.indices
            layer = stacks.setdefault(stacked.layers, {}).setdefault(number, set())
            layer.add((stacked.key, tuple(index)))
    return {
        name
        for name, layers in stacks.items()
        if name == _PREDICTED or len(set(map(frozenset, layers.values()))) > 1
    }


def _numbered(stacked: StackedKey) -> StackedKey:
    """The key with the number of the layer in it, if it is of one."""
    key, indices, layers = stacked
    if layers is None:
        return stacked
    return StackedKey(f"{layers}.{indices[0]}{key.removeprefix(layers)}", indices[1:])


def _single(stacked: StackedKey) -> StackedKey:
    """The key with the numbers of the layer and the expert in it."""
    numbered = _numbered(stacked)
    key = numbered.key
    for expert in numbered.indices:
        key = key.replace(".experts.experts.", f".experts.experts.{expert}.", 1)
    return StackedKey(key, ())


def _halves(entry: TensorEntry, weights: Mapping[str, tuple[int, ...]]) -> Iterator[TensorEntry]:
    """Both halves of a gated projection, which has twice the rows that the next one has columns; else the entry.

    Args:
        weights: the shapes of the parameters, by their keys.
    """
    state_key = split_state_key(entry.name)
    key = state_key.key if isinstance(state_key, StateKey) else entry.name
    following = weights.get(_FIRST_LINEAR.sub(".linear_fc2.weight", key))
    if not _FIRST_LINEAR.search(key) or following is None or entry.shape[0] != 2 * following[-1]:
        yield entry
        return
    half = (entry.shape[0] // 2, *entry.shape[1:])
    yield from (replace(entry, name=f"{entry.name}_{letter}", shape=half) for letter in "wv")


def extra_states(
    keys: Mapping[str, StackedKey], source: Checkpoint, objects: Mapping[str, Any]
) -> dict[str, Any]:
    """The extra states that modules ask for, by key: they are empty, except under FP8."""
    args = source.objects.get("args")
    recorded = args.get("transformer_impl") if isinstance(args, dict) else None
    local = recorded == "local"
    if not isinstance(recorded, str):
        local = any(".input_layernorm." in n for n in keys)
    empty = None if local else constant("uint8", (0,), b"")
    modules: dict[str, list[tuple[int, ...]]] = {}
    for key, index, _ in keys.values():
        if match := _LINEAR.fullmatch(key):
            modules.setdefault(match[1], []).append(index)
            if not local and match[1].endswith(_ATTENTION):
                attention = match[1].removesuffix("linear_proj") + "core_attention"
                modules.setdefault(attention, []).append(index)
    out: dict[str, Any] = {}
    for module, indices in modules.items():
        sizes = tuple(max(along_dim) + 1 for along_dim in zip(*indices, strict=True)) or (1,)
        for index in indices:
            shard = ".".join(map(str, index or (0,)))
            out[f"{module}._extra_state/shard_{shard}_{'.'.join(map(str, sizes))}"] = empty
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
            starts = zip(clip.start, within.start, strides, strict=True)
            offset = sum((a - b) * stride for a, b, stride in starts)
            pieces.append((info, Piece(clip.shift(tuple(-n for n in shift)), offset, strides)))
        row += info.shape[0] if info.shape else 0
    return Storage(Span(parts[0].dtype, within.size, tuple(pieces)))


# The values of a Megatron checkpoint: those in `common.pt`, with the optimizer groups, and those of single ranks.


_SHARDING = "fully_reshardable"

#: How the state dict of the torch optimizer lies in that of Megatron's: inside that of the
#: distributed optimizer, or of the one for 16-bit parameters, or alone.
Wrapped = Literal["distributed", "mixed_precision", "plain"]
_NAMESPACE = Global("argparse", "Namespace")
#: Classes of values that Megatron's own list of safe classes has, by the names that a source gives.
_CLASSES = {
    f"{module}.{name}": Global(module, name)
    for module, name in (
        ("megatron.core.transformer.enums", "AttnBackend"),
        ("megatron.core.transformer.enums", "CudaGraphScope"),
        ("megatron.core.enums", "ModelType"),
        ("megatron.core.rerun_state_machine", "RerunMode"),
        ("megatron.core.rerun_state_machine", "RerunState"),
        ("megatron.core.rerun_state_machine", "RerunDiagnostic"),
        ("signal", "Signals"),
    )
}
ALLOWED |= {_NAMESPACE, *_CLASSES.values()}

_INDICES = re.compile(r"\d+(\.\d+)*")
# keys of a group that groups are not compared by
_NOT_SHARED = ("params", "state", "step", "is_expert_parallel")
_OURS = ("optimizer", "args", "iteration", CONTENTS)


@dataclass
class Common:
    """The values of `common.pt`, and what has no place in it."""

    values: dict[str, Any]
    left: list[str] = field(default_factory=list)


def common_of(
    source: Checkpoint,
    infos: Sequence[TensorInfo],
    *,
    trained: Collection[str],
    prefixes: Mapping[bool, str],
    wrapped: Wrapped,
) -> Common:
    """The values that all ranks share."""
    common = Common({"checkpoint_version": 3.0})
    if source.metadata.step is not None:
        common.values["iteration"] = source.metadata.step
    for name, data in source.objects.items():
        if (name not in _OURS or not is_megatron(source)) and not _is_sharded(source, data):
            _add(common, name, data)
    args = source.objects.get("args")
    if isinstance(args, dict) and is_megatron(source):
        namespace = Common({}, common.left)
        for name, data in args.items():
            _add(namespace, name, data, "args.")
        common.values["args"] = Instance(_NAMESPACE, namespace.values)
    contents = {k: v for k, v in _contents(source).items() if isinstance(v, bool | str)}
    for name in ("distrib_optim_sharding_type", SINGLE):
        contents.pop(name, None)
    if trained:
        common.values["optimizer"] = _optimizers(source, infos, trained, prefixes, wrapped)
        if wrapped == "distributed":
            contents["distrib_optim_sharding_type"] = _SHARDING
        contents["chained_optim_avoid_prefix"] = not any(prefixes.values())
    elif source.metadata.groups:
        common.left.append("the optimizer groups")
    common.values[CONTENTS] = contents
    return common


def objects_of(source: Checkpoint) -> tuple[dict[str, Any], list[str]]:
    """The values of single ranks, layers and experts, by their keys; and what cannot be written."""
    sharded = Common({})
    for name, data in source.objects.items():
        if not _is_sharded(source, data):
            continue
        indices = [tuple(map(int, shard.split("."))) for shard in data]
        sizes = ".".join(str(max(along_dim) + 1) for along_dim in zip(*indices, strict=True))
        for shard, value in data.items():
            _add(sharded, f"{name.removesuffix(' (sharded)')}/shard_{shard}_{sizes}", value)
    return sharded.values, sharded.left


def _is_sharded(source: Checkpoint, data: Any) -> bool:
    """Whether a value of Megatron's is one for each shard, by the shard."""
    is_map = isinstance(data, Mapping) and bool(data)
    return is_map and is_megatron(source) and all(map(_INDICES.fullmatch, data))


def is_megatron(source: Checkpoint) -> bool:
    """Whether a checkpoint came from Megatron, perhaps by a conversion."""
    return source.metadata.engine.get("name") == "megatron-core"


def _contents(source: Checkpoint) -> dict[str, Any]:
    contents = source.objects.get(CONTENTS)
    return contents if isinstance(contents, dict) else {}


def has_distributed_optimizer(source: Checkpoint) -> bool:
    """Whether a Megatron checkpoint's optimizer is the distributed one, by `args` or its values; else true."""
    if not is_megatron(source):
        return True
    args = source.objects.get("args")
    if isinstance(args, dict) and "use_distributed_optimizer" in args:
        return args["use_distributed_optimizer"] is not False
    saved = source.objects.get("optimizer")
    inner = saved.get("optimizer", saved) if isinstance(saved, dict) else None
    # the step of all parameters, which the distributed one has in its groups
    return not (isinstance(inner, dict) and "state" in inner)


def _add(common: Common, name: str, data: Any, below: str = "") -> None:
    try:
        common.values[name] = _value(data)
    except UnsupportedError as error:
        common.left.append(f"the value {below}{name}: {error.message}")


def _value(data: Any) -> Any:
    def refuse(name: str) -> TensorInfo:
        raise UnsupportedError(f"it holds the tensor {name}")

    return value_of(data, refuse, _CLASSES)


def _optimizers(
    source: Checkpoint,
    infos: Sequence[TensorInfo],
    trained: Collection[str],
    prefixes: Mapping[bool, str],
    wrapped: Wrapped,
) -> dict[Any, Any]:
    """The entry of the optimizer, or of each of several."""
    chained = len(prefixes) > 1
    step = _step(source, infos, trained)
    fused = not has_distributed_optimizer(source) and any(
        "step" in g for g in source.metadata.groups
    )
    in_groups = wrapped == "distributed" or fused
    groups = _groups(source, infos, trained, chained=chained, step=step if in_groups else None)
    shared = {}
    if not in_groups and step is not None:
        shared["common_step"] = constant("float32", (), pack("<f", step))
    saved = source.objects.get("optimizer")
    out: dict[int, dict[str, Any]] = {}
    for experts in prefixes:
        inner: dict[str, Any] = {
            "param_groups": [g for g in groups if not chained or g["is_expert_parallel"] is experts]
        }
        if wrapped != "distributed":
            inner["state"] = shared
        entry: dict[str, Any] = inner if wrapped == "plain" else {"optimizer": inner}
        if wrapped == "distributed":
            entry["param_state_sharding_type"] = _SHARDING
        if wrapped != "plain" and isinstance(saved, dict) and "grad_scaler" in saved:
            entry["grad_scaler"] = _value(saved["grad_scaler"])
        out[int(experts)] = entry
    return out if chained else out[0]


def _groups(
    source: Checkpoint,
    infos: Sequence[TensorInfo],
    trained: Collection[str],
    *,
    chained: bool,
    step: float | None,
) -> list[dict[str, Any]]:
    """The hyper-parameters of Megatron's groups: without weight decay are vectors and biases, experts may be apart.

    They contain the step only if it is given.
    """
    shapes = {i.name: i.shape for i in infos if i.state in ("weight", "master")}
    stored = [{k: v for k, v in g.items() if k not in _NOT_SHARED} for g in source.metadata.groups]
    number = {n: i for i, g in enumerate(source.metadata.groups) for n in g["params"]}
    members: dict[tuple[bool, float], list[str]] = {}
    for name in trained:
        if name not in number:
            raise UnsupportedError(
                f"{source.url} has states of {name}, but not the hyper-parameters of its optimizer",
                hint="export the weights alone: --state weight",
            )
        matrix = len(shapes[name]) > 1 and not name.endswith(".bias")
        members.setdefault((chained and is_expert(name), float(matrix)), []).append(name)
    out = []
    for (experts, decays), names in sorted(
        members.items(), key=lambda item: (item[0][0], -item[0][1])
    ):
        options = [stored[i] for i in sorted({number[n] for n in names})]
        if any(o != options[0] for o in options):
            raise UnsupportedError(
                f"{names[0]} and others that Megatron optimizes in one group have different "
                "hyper-parameters",
                hint="export the weights alone: --state weight",
            )
        group = {k: _value(v) for k, v in options[0].items()}
        if isinstance(group.get("betas"), list):
            group["betas"] = tuple(group["betas"])
        defaults = {
            "wd_mult": decays,
            "lr_mult": 1.0,
            "is_decoupled_lr": False,
            "default_config": True,
        }
        group = {**defaults, **group, "is_expert_parallel": experts}
        out.append(group if step is None else {**group, "step": step})
    return out


def _step(
    source: Checkpoint, infos: Sequence[TensorInfo], trained: Collection[str]
) -> float | None:
    """The step of the optimizer; in other programs it is a scalar of each parameter."""
    steps: dict[float, str] = {}
    for group in source.metadata.groups:
        step = (group.get("state") or {}).get("step", group.get("step"))
        for name in group["params"]:
            mine = step.get(name) if isinstance(step, dict) else step
            if name in trained and isinstance(mine, int | float):
                steps.setdefault(float(mine), name)
    keys = {info.key for info in infos}
    scalars = [key for name in trained if (key := Key(name, "step")) in keys]
    values = map_io(lambda key: float(source[key.name, key.state][...]), scalars)
    for key, value in zip(scalars, values, strict=True):
        steps.setdefault(value, key.name)
    if len(steps) > 1:
        (a, first), (b, second), *_ = steps.items()
        raise UnsupportedError(
            f"{first} was optimized for {a:g} steps and {second} for {b:g}; Megatron's optimizer "
            "has one number",
            hint="export the weights alone: --state weight",
        )
    return next(iter(steps), None)
