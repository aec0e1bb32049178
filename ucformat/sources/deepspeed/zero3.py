"""ZeRO 3: each parameter is partitioned across the ranks separately, and the parts are joined in flat groups.

`param_shapes` lists the parameters of each flat group (a *sub-group*: `sub_group_size` splits an optimizer group into
several). A parameter of n elements is split into parts of ceil(n / ranks), the last ones padded; rank R's
`fp32_flat_groups` holds part R of each of the group's parameters, one after another, and so do the optimizer's states.
Frozen parameters are partitioned in the same way, each in its own tensor (`frozen_param_fragments` in the model states
files). Weights of trained parameters are not stored: the module holds empty placeholders, so the master is the only
copy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ucformat.errors import IntegrityError, UnsupportedError
from ucformat.geometry.flat_buffer import FlatBuffer, flat_range, part_range, part_size
from ucformat.sources.deepspeed.contents import (
    Partition,
    Ranks,
    check_same_states,
    hyper_parameters,
    need,
    read_scalars,
    refuse_flat_state,
    scalars,
    state_of,
    stored,
)
from ucformat.sources.index import Group
from ucformat.sources.pickle.stand_ins import StoredTensor
from ucformat.sources.values import to_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from ucformat.geometry.box import Box
    from ucformat.geometry.tensor import Extent
    from ucformat.sources.deepspeed.model import ModelStates
    from ucformat.sources.index import TensorIndex
    from ucformat.sources.pickle.file import TorchFile

_MASTERS_3 = "fp32_flat_groups"


@dataclass(frozen=True, slots=True)
class Zero3Partition(Partition):
    """A rank's optimizer file, which may have several flat groups for one optimizer group."""

    owners: list[int]  # the optimizer group of each flat group


class Zero3(Ranks[Zero3Partition]):
    """The flat groups of a ZeRO 3 checkpoint; ranks beyond the first are opened when their extents are needed."""

    def __init__(
        self, model: ModelStates, keys: tuple[str, ...], load: Callable[[str], TorchFile], contents: TensorIndex
    ) -> None:
        super().__init__(keys, load)
        self.model, self.world = model, len(keys)
        self.shapes = model.param_shapes or []  # of the parameters, by flat group
        self.flat = [_partitioned_buffer(shapes, self.world) for shapes in self.shapes]
        self.first: Zero3Partition | None = None
        self.first = self[0]
        self._scalars = read_scalars(self.first)
        self._describe(self.first, contents)

    def _parse(self, rank: int, file: TorchFile) -> Zero3Partition:
        state = need(file.value, "optimizer_state_dict", dict, file.key)
        if state.get("ds_zero_partition_groups"):
            raise UnsupportedError(f"{file.key}: DeepSpeed checkpoints with expert parallelism are not yet read")
        if state.get("partition_count") not in (None, self.world):
            raise IntegrityError(
                f"{file.key} was saved by {state['partition_count']} ranks, but {self.world} files of optimizer "
                "states are present",
                hint="files of different saves are mixed in one folder",
            )
        masters = [stored(t, _MASTERS_3, file.key) for t in need(state, _MASTERS_3, list, file.key)]
        inner = need(state, "optimizer_state_dict", dict, file.key)
        found = need(inner, "state", dict, file.key)
        members = [need(g, "params", list, file.key) for g in need(inner, "param_groups", list, file.key)]
        indices = [i for group in members for i in group]
        if len(masters) != len(self.flat) or indices != list(range(len(self.flat))):
            raise IntegrityError(
                f"{file.key} has {len(masters)} flat groups of {len(indices)} optimizer entries, but {self.model.key} "
                f"describes {len(self.flat)}"
            )
        owners = [g for g, group in enumerate(members) for _ in group]
        partition = Zero3Partition(file, masters, [state_of(found, i, file.key) for i in indices], owners)
        self._check(rank, partition)
        return partition

    def _check(self, rank: int, partition: Zero3Partition) -> None:
        for index, (buffer, master) in enumerate(zip(self.flat, partition.masters, strict=True)):
            if master.shape != (buffer.size,):
                raise IntegrityError(
                    f"{partition.file.key}: flat group {index} has shape {master.shape}; its parameters, sharded "
                    f"across {self.world} ranks, take {buffer.size} elements",
                    hint="files of different saves are mixed in one folder, or the optimizer was offloaded to NVMe",
                )
            for name, value in partition.states[index].items():
                if isinstance(value, StoredTensor) and value.shape not in ((), (buffer.size,)):
                    raise refuse_flat_state(name, value, index, partition.file.key)
        if rank and self.first:
            check_same_states(partition, self.first, self._scalars)

    def _describe(self, first: Zero3Partition, contents: TensorIndex) -> None:
        """Add the tensors, groups and scalars that rank 0's file describes."""
        file = first.file
        state = file.value["optimizer_state_dict"]
        for hyper in state["optimizer_state_dict"]["param_groups"]:
            contents.groups.append(Group([], hyper_parameters(hyper, file)))
        for index, shapes in enumerate(self.shapes):
            entry, states = contents.groups[first.owners[index]], first.states[index]
            plain = to_json(
                {n: v for n, v in states.items() if not isinstance(v, StoredTensor)}, read=file.read, path="state"
            )
            if entry.names and plain != entry.state:
                raise UnsupportedError(
                    f"{file.key}: the flat groups of one optimizer group have different plain states; not yet read"
                )
            entry.names.extend(shapes)
            entry.state = plain
            for name, shape in shapes.items():
                contents.add(
                    name, "master", first.masters[index].dtype, shape, partial(self._extents, index, name, "master")
                )
                for kind, value in states.items():
                    if isinstance(value, StoredTensor) and value.shape:
                        contents.add(name, kind, value.dtype, shape, partial(self._extents, index, name, kind))
                    elif isinstance(value, StoredTensor):
                        contents.add_whole(name, kind, file, value)
        contents.keep_scalars(file, scalars(file, state, frozenset((_MASTERS_3, "optimizer_state_dict"))))

    def _extents(self, index: int, name: str, state: str, within: Box | None) -> Iterator[Extent]:
        """The parts of a parameter in the flat groups of the ranks that hold elements of the box."""
        buffer, shape = self.flat[index], self.shapes[index][name]
        wanted = buffer.holders(name, *flat_range(shape, within))
        opened = self.get(wanted)
        for rank in wanted:
            part = opened[rank]
            memory = part.masters[index] if state == "master" else part.states[index][state]
            start, stop, offset = buffer.part_on(name, rank)
            yield from part.file.flat(memory, offset, shape, start, stop)


def _partitioned_buffer(shapes: Mapping[str, tuple[int, ...]], world: int) -> FlatBuffer:
    """Each rank's parts of these parameters, one after another."""
    buffer = FlatBuffer()
    for name, shape in shapes.items():
        numel = math.prod(shape)
        buffer.append_part(name, numel, part_size(numel, world))
    buffer.size = buffer.end
    return buffer


def add_frozen(models: list[ModelStates], contents: TensorIndex) -> None:
    """Add the frozen parameters, stored in the model states of all ranks."""
    world = len(models)
    for name, shape in models[0].frozen_shapes.items():
        part = part_size(math.prod(shape), world)
        fragments = [
            stored((m.value.get("frozen_param_fragments") or {}).get(name), f"frozen_param_fragments[{name!r}]", m.key)
            for m in models
        ]
        for model, fragment in zip(models, fragments, strict=True):
            if fragment.shape != (part,):
                raise IntegrityError(
                    f"{model.key}: the frozen {name} has a part of shape {fragment.shape}; sharded across {world} "
                    f"ranks, its shape {shape} gives {part} elements"
                )

        contents.add(name, "weight", fragments[0].dtype, shape, partial(_frozen_extents, models, fragments, shape))


def _frozen_extents(
    models: list[ModelStates], fragments: list[StoredTensor], shape: tuple[int, ...], within: Box | None
) -> Iterator[Extent]:
    first, last = flat_range(shape, within)
    for rank, (model, fragment) in enumerate(zip(models, fragments, strict=True)):
        start, stop = part_range(math.prod(shape), fragment.size, rank)
        if max(start, first) < min(stop, last):
            yield from model.file.flat(fragment, 0, shape, start, stop)
