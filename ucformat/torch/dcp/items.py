"""Converts the write items of a PyTorch DCP plan to what this rank saves, named as by `ucformat.torch.save`."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from ucformat.errors import LayoutError, UsageError
from ucformat.geometry.box import Box
from ucformat.geometry.tensor import Key, Piece, TensorInfo
from ucformat.reading.readable import StatePath as Path
from ucformat.reading.readable import json_key
from ucformat.sources.dcp.names import GROUPS, dotted
from ucformat.sources.pickle.stand_ins import opaque_file
from ucformat.sources.values import packed
from ucformat.torch.comm.wire import message
from ucformat.torch.state.collect import collect, inner_key, replace_wrappers
from ucformat.torch.state.elements import host_memory
from ucformat.torch.state.local import groups_of, local_of, mesh_of, paths_of, places_of, records_of, tied_names
from ucformat.torch.state.memory import copied_to_host
from ucformat.torch.state.objects import PerRank, encode
from ucformat.torch.state.subclasses import memory_of, take_apart, why_refused

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

    from ucformat.reading.readable import Place
    from ucformat.torch.state.elements import Memory
    from ucformat.torch.state.local import LocalShard
    from ucformat.torch.state.subclasses import Taken

_BYTES = WriteItemType.BYTE_IO


@dataclass(frozen=True, slots=True)
class LocalItems:
    """All items of a rank, before DCP removes duplicates between ranks.

    `tensors` has an index for each shard, `shapes` the global shapes. `ranks` plan together (0: unknown).
    """

    tensors: tuple[MetadataIndex, ...]
    values: tuple[MetadataIndex, ...]
    shapes: Mapping[str, tuple[int, ...]]
    ranks: int = 0


@message
class PlainValues:
    """The plain values that DCP assigned to one rank, in JSON form by path, and the paths of lists with tensors."""

    by_path: Mapping[Path, Any]
    lists: frozenset[Path]


@dataclass(frozen=True, slots=True)
class RankItems:
    """What one rank saves of a plan; `memories` are the host memories of the tensors."""

    tensors: tuple[tuple[TensorInfo, tuple[Piece, ...]], ...]
    memories: tuple[Memory, ...]
    values: PlainValues
    groups: tuple[Mapping[str, Any], ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    layout: Mapping[str, Any] = field(default_factory=dict)
    paths: Mapping[Key, tuple[Path, ...]] = field(default_factory=dict)
    places: tuple[Place, ...] = ()


def local_items(plan: SavePlan) -> LocalItems:
    """Return the items of a local plan, before DCP has compared it with those of other ranks."""
    values = [i.index for i in plan.items if i.type == _BYTES]
    tensors = [i for i in plan.items if i.type != _BYTES]
    shapes = {i.index.fqn: tuple(i.tensor_data.size) for i in tensors}
    return LocalItems(tuple(i.index for i in tensors), tuple(values), shapes)


def collect_items(plan: SavePlan, planner: SavePlanner, local: LocalItems) -> RankItems:
    """Collect what this rank saves."""
    mappings = plan.planner_data if isinstance(plan.planner_data, dict) else getattr(planner, "mappings", {})
    state = _State(planner, mappings, local)
    aliases = state.aliases()
    tensors, memories = _tensors(plan, planner, state, aliases)
    values: dict[Path, Any] = {p: encode(record, dotted(p)) for p, record in records_of(state.found).items()}
    for item in plan.items:
        path = state.path(item.index)
        if item.type == _BYTES and not state.is_option(path):
            value = state.look_up(item.index, _BYTES)
            if isinstance(value, PerRank):
                raise UsageError(
                    f"{dotted(path)} is a PerRank value, but torch.distributed.checkpoint saves that of one rank only",
                    hint="save with ucformat.torch.save, or use a key that contains the rank",
                )
            values[path] = packed(encode(value, dotted(path)))
    held = getattr(planner, "state_dict", {})
    return RankItems(
        tensors=tensors,
        memories=memories,
        values=PlainValues(values, state.lists_of_tensors()),
        groups=groups_of(state.found, aliases),
        aliases=aliases,
        layout=mesh_of([t for t in held.values() if isinstance(t, torch.Tensor)]),
        paths=paths_of(state.found, aliases),
        places=places_of(state.found),
    )


def _encodes(planner: SavePlanner) -> bool:
    """Whether a planner of the program encodes values itself."""
    kind, stock = type(planner), DefaultSavePlanner
    return any(getattr(kind, f, None) is not getattr(stock, f) for f in ("resolve_data", "transform_object"))


def _encoded(data: bytes) -> Any:
    """The value that a planner encoded: plain values that torch.save wrote are loaded; other bytes stay bytes."""
    if not data.startswith(b"PK"):
        return io.BytesIO(data)
    try:
        with torch.serialization.safe_globals([io.BytesIO, bytes]):
            return torch.load(io.BytesIO(data), weights_only=True)
    except pickle.UnpicklingError:  # it contains other classes, whose origin is unknown
        return opaque_file(data)


class _Value:
    """A placeholder for a plain value, whose type does not matter to names."""


class _State:
    """A rank's training state as DCP flattened it, nested again."""

    def __init__(self, planner: SavePlanner, mappings: Mapping[str, Path], local: LocalItems) -> None:
        self.planner, self.mappings, self.local = planner, mappings, local
        nested: dict[str, Any] = {}
        for index in local.tensors:
            path = self.path(index)
            stand_in = torch.empty(()).expand(local.shapes[index.fqn])
            set_element(nested, path, self.look_up(index) if _below_groups(path) else stand_in)
        for index in local.values:
            path = self.path(index)
            set_element(nested, path, self.look_up(index, _BYTES) if _below_groups(path) else _Value())
        self.found = collect(nested)
        by_path = self.found.keys
        #: Name and state of each tensor, except hyper-parameters.
        self.keys = {i.fqn: by_path[p] for i in local.tensors if (p := self.path(i)) in by_path}
        #: The wrappers among them.
        self.taken = {i.fqn: t for i in local.tensors if i.fqn in self.keys and (t := self._taken(i)) is not None}
        replace_wrappers(self.found, {self.path(i): self.taken[i.fqn] for i in local.tensors if i.fqn in self.taken})

    def path(self, index: MetadataIndex) -> Path:
        """The path of an entry in the program's state."""
        return self.mappings.get(index.fqn, (index.fqn,))

    def look_up(self, index: MetadataIndex, kind: WriteItemType = WriteItemType.SHARD) -> Any:
        """The value of an entry of this rank, or as the planner encoded it."""
        if (kind != _BYTES or not _encodes(self.planner)) and hasattr(self.planner, "lookup_object"):
            return self.planner.lookup_object(index)
        data = self.planner.resolve_data(WriteItem(index, kind))
        return _encoded(data.getvalue()) if isinstance(data, io.BytesIO) else data

    def _taken(self, index: MetadataIndex) -> Taken | None:
        """A tensor of this rank taken apart, if it is a wrapper, or a DTensor of one."""
        if why_refused(self.look_up(index)) is None:
            return None
        return take_apart(index.fqn, getattr(self.planner, "state_dict", {}).get(index.fqn, self.look_up(index)))

    def is_option(self, path: Path) -> bool:
        """Whether an entry is part of an optimizer group."""
        return any(path[:i] in self.found.group_entries for i in range(1, len(path) + 1))

    def aliases(self) -> dict[str, str]:
        """The first name of tied weights of this rank, by each further name."""
        keys = ((i, self.keys.get(i.fqn)) for i in self.local.tensors)
        weights = [
            (index.offset, inner_key(key, names).name, memory_of(tensor))
            for index, key in keys
            if key is not None and key.state == "weight"
            for names, tensor in (
                self.taken[index.fqn].tensors if index.fqn in self.taken else {(): self.look_up(index)}
            ).items()
        ]
        return tied_names(
            (name, tensor, (tensor.shape, offset))
            for offset, name, tensor in weights
            if isinstance(tensor, torch.Tensor) and tensor.numel()
        )

    def lists_of_tensors(self) -> frozenset[Path]:
        """The paths of lists that contain tensors at any depth."""
        paths = self.found.tensors
        return frozenset(p[:i] for p in paths for i, part in enumerate(p) if isinstance(part, int))


def _below_groups(path: Path) -> bool:
    return any((str(part) + ".").startswith(GROUPS + ".") for part in path)


def _tensors(
    plan: SavePlan, planner: SavePlanner, state: _State, aliases: Mapping[str, str]
) -> tuple[tuple[tuple[TensorInfo, tuple[Piece, ...]], ...], tuple[Memory, ...]]:
    """The tensors that this rank writes, each once, and their host memory."""
    shards: dict[str, list[LocalShard]] = {}
    for item in plan.items:
        fqn = item.index.fqn
        key = state.keys.get(fqn)
        if key is None:
            continue
        inner = state.taken[fqn].tensors if fqn in state.taken else {(): None}
        for names, tensor in inner.items():
            name, kind = inner_key(key, names)
            if kind == "weight" and name in aliases:
                continue
            named = Key(aliases.get(name, name), kind)
            shard = _shard(item, planner, named) if tensor is None else local_of(*named, tensor)
            shards.setdefault(".".join((fqn, *names)), []).append(shard)
    tensors: list[tuple[TensorInfo, tuple[Piece, ...]]] = []
    memories: list[Memory] = []
    by_key: dict[Key, str] = {}
    for fqn, mine in shards.items():
        info = mine[0].info
        other = by_key.setdefault(info.key, fqn)
        if other != fqn:
            raise UsageError(f"{other} and {fqn} are both {info.key}", hint="give them different names")
        pieces, memory = _joined(mine)
        tensors.append((info, pieces))
        memories.append(memory)
    return tuple(tensors), tuple(memories)


def _shard(item: WriteItem, planner: SavePlanner, key: Key) -> LocalShard:
    """The shard of a write item, as pieces of the global tensor."""
    local = local_of(key.name, key.state, planner.resolve_data(item))
    data, chunk = item.tensor_data, item.tensor_data.chunk
    if local.info.shape != tuple(chunk.sizes):
        raise LayoutError(
            f"{item.index.fqn}: torch.distributed.checkpoint computes {list(chunk.sizes)} at {list(chunk.offsets)} for "
            f"the local shard, but its shape is {list(local.info.shape)}",
            hint="it is wrong for some uneven shards of one dim over two mesh axes; ucformat.torch.save is not",
        )
    info = TensorInfo(key.name, key.state, local.info.dtype, tuple(data.size))
    pieces = tuple(
        Piece(Box(tuple(map(int.__add__, p.box.start, chunk.offsets)), p.box.shape), p.offset, p.strides)
        for p in local.pieces
        if p.box.size
    )
    return type(local)(info, pieces, local.tensor)


def _joined(shards: Sequence[LocalShard]) -> tuple[tuple[Piece, ...], Memory]:
    """The pieces of all shards of a tensor in one memory; several shards are copied."""
    if len(shards) == 1:
        tensor = shards[0].tensor
        return shards[0].pieces, host_memory(copied_to_host(tensor))
    pieces: list[Piece] = []
    parts: list[Memory] = []
    offset = 0
    for shard in shards:
        dense = copied_to_host(shard.tensor).contiguous()
        pieces += [Piece(p.box, offset, tuple(dense.stride())) for p in shard.pieces]
        parts.append(host_memory(dense))
        offset += dense.numel()
    return tuple(pieces), np.concatenate(parts)


def join_values(parts: Sequence[PlainValues]) -> dict[str, Any]:
    """Join the objects of all ranks, nested as in the program's state."""
    tree: dict[str | int, Any] = {}
    lists = frozenset(p for part in parts for p in part.lists)
    for rank, part in enumerate(parts):
        for path, data in part.by_path.items():
            node = tree
            for step in path[:-1]:
                node = node.setdefault(step, {})
            found = node.setdefault(path[-1], _JsonLeaf(data))
            if not isinstance(found, _JsonLeaf) or found.data != data:
                raise UsageError(
                    f"the object {dotted(path)} has a different value on rank {rank} than on a rank before it",
                    hint="keep values that differ between ranks under keys that contain the rank",
                )
    objects: dict[str, Any] = _plain(tree, (), lists)
    return objects


@dataclass(frozen=True, slots=True)
class _JsonLeaf:
    data: Any


def _plain(node: Any, path: Path, lists: frozenset[Path]) -> Any:
    """The JSON form of a tree of leaves; a flattened list without tensors becomes a list again."""
    if isinstance(node, _JsonLeaf):
        return node.data
    inner = {k: _plain(v, (*path, k), lists) for k, v in node.items()}
    if inner and path not in lists and all(isinstance(k, int) for k in inner):
        return [inner.get(i, {}) for i in range(max(k for k in inner if isinstance(k, int)) + 1)]  # DCP leaves out {}
    return {json_key(k): v for k, v in inner.items()}
