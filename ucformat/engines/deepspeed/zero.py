"""The tensors in the files of one model-parallel rank."""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, product
from typing import TYPE_CHECKING, Any, ClassVar

from ucformat.engines.deepspeed.experts import Experts, is_expert
from ucformat.engines.deepspeed.folder import copy_hint
from ucformat.engines.deepspeed.model_states import (
    Partition,
    check_same_states,
    hyper_parameters,
    need,
    read_scalars,
    refuse_flat_state,
    scalars,
    stage_of,
    state_of,
    stored,
    zero_options,
)
from ucformat.engines.deepspeed.slices import is_partitioned
from ucformat.engines.deepspeed.swap import SwapFolder, SwappedTensor, rank_file
from ucformat.engines.deepspeed.zero0 import read_zero0
from ucformat.errors import IntegrityError, MissingData, UnsupportedError, first_names
from ucformat.geometry.box import Box
from ucformat.geometry.flat_buffer import (
    FlatBuffer,
    flat_range,
    part_range,
    part_size,
    round_robin_order,
)
from ucformat.reading.stand_ins import Inert, StoredTensor
from ucformat.reading.values import to_json
from ucformat.sources.index import Group
from ucformat.sources.tp_merge import LocalContents
from ucformat.storage.concurrency import map_io

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from ucformat.engines.deepspeed.model_states import ModelStates
    from ucformat.geometry.tensor import Extent
    from ucformat.sources.index import TensorIndex
    from ucformat.sources.pickle.file import TorchFile


class FlatGroups(ABC):
    """The flat groups in the optimizer files of all ranks, which are opened and parsed on demand.

    Opening the checkpoint opens the first rank's file, and a request those that it needs. A request
    that continues where earlier ones ended also opens as many further files as are open already,
    because the caller then walks the whole checkpoint.
    """

    #: The keys of a file's state that hold or describe tensors.
    tensors: ClassVar[frozenset[str]]

    def __init__(
        self,
        model: ModelStates,
        keys: tuple[str, ...],
        load: Callable[[str], TorchFile],
        contents: TensorIndex,
        experts: Experts | None = None,
        swapped: Mapping[str, int] | None = None,
    ) -> None:
        self.model, self.world, self._swapped = model, len(keys), swapped or {}
        self.experts = experts or Experts(len(keys))
        self.shapes = model.param_shapes or []  # of the parameters, by flat group
        self.degrees = [1] * len(self.shapes)  # expert-parallel ranks of each group
        self.flat: list[FlatBuffer] = []
        self._keys, self._load_file = keys, load
        self._open: dict[int, Partition] = {}
        self._lock = threading.Lock()
        self.first = self._get((0,))[0]
        self._scalars = read_scalars(self.first)
        self._describe(contents)

    def swap_files(self) -> tuple[str, ...]:
        """The swap files of all ranks: those that the first rank's tensors are in, and the same of the others."""
        tensors = (t for group in self.first.values() for t in group.values())
        mine = [t.storage for t in tensors if isinstance(t, SwappedTensor)]
        every = [rank_file(key, rank) for rank in range(self.world) for key in mine]
        if missing := [key for key in every if key not in self._swapped]:
            raise MissingData(
                f"{first_names(missing, 10)} is missing: the optimizer was offloaded to NVMe",
                hint=copy_hint(),
            )
        return tuple(every)

    @property
    def expert_groups(self) -> list[tuple[int, bool]]:
        """The expert-parallel ranks of each group, and whether it has experts."""
        groups = zip(self.degrees, self.shapes, strict=True)
        return [(n, any(map(self.experts.is_expert, group))) for n, group in groups]

    @abstractmethod
    def _parse(self, file: TorchFile, rank: int) -> Partition:
        """Parse a rank's file; the first one, rank 0's, may define the layout."""

    @abstractmethod
    def _check(self, rank: int, partition: Partition) -> None:
        """Check a rank's file against the layout."""

    def _get(self, ranks: Iterable[int]) -> Mapping[int, Partition]:
        """The parsed files of these ranks (and of others that are open), by rank."""
        with self._lock:
            missing = [rank for rank in ranks if rank not in self._open]
            if missing:
                if missing[0] - 1 in self._open:
                    after = missing[-1] + 1
                    ahead = range(after, min(after + len(self._open), self.world))
                    missing += [rank for rank in ahead if rank not in self._open]
                self._open |= zip(missing, map_io(self._read, missing), strict=True)
            return self._open

    def _read(self, rank: int) -> Partition:
        partition = self._parse(self._load_file(self._keys[rank]), rank)
        self._check(rank, partition)
        if rank:
            check_same_states(partition, self.first, self._scalars)
        return partition

    def _describe(self, contents: TensorIndex) -> None:
        """Add the tensors, groups and scalars that rank 0's file describes."""
        first, file = self.first, self.first.file
        for hyper in first.hypers:
            contents.groups.append(Group([], hyper_parameters(hyper, file)))
        for index, (shapes, degree) in enumerate(zip(self.shapes, self.degrees, strict=True)):
            entry, states = contents.groups[first.owners[index]], first.states[index]
            plain = {n: v for n, v in states.items() if not isinstance(v, StoredTensor)}
            plain = to_json(plain, read=file.read, path="state")
            if entry.names and plain != entry.state:
                raise UnsupportedError(
                    f"{file.key}: the flat groups of one optimizer group have different plain "
                    "states; not yet read"
                )
            entry.state = plain
            tensors = {"master": first.masters[index]}
            tensors |= {n: v for n, v in states.items() if isinstance(v, StoredTensor)}
            stacked = [name for name in shapes if name in self.experts.stacked]
            for expert_rank, (local, shape) in product(range(degree), shapes.items()):
                if local in stacked:
                    continue
                name = self.experts.global_name(local, degree, expert_rank)
                if is_expert(name) and name not in self.model.module:
                    raise IntegrityError(
                        f"{file.key} has states of {name}, of which {self.model.key} has no weight",
                        hint="experts were assigned to ranks in a way that ucformat does not know",
                    )
                entry.names.append(name)
                for kind, tensor in tensors.items():
                    if tensor.shape or kind == "master":
                        locate = partial(self._extents, index, local, kind, expert_rank)
                        contents.add(name, kind, tensor.dtype, shape, locate)
                    else:
                        contents.add_whole(name, kind, file, tensor)
            entry.names += stacked
            for name in stacked:
                first_dim, *rest = shapes[name]
                for kind, tensor in tensors.items():
                    if tensor.shape or kind == "master":
                        locate = partial(self._stacked_extents, index, name, kind)
                        contents.add(name, kind, tensor.dtype, (first_dim * degree, *rest), locate)
                    else:
                        contents.add_whole(name, kind, file, tensor)
        state = file.value["optimizer_state_dict"]
        contents.keep_scalars(file, scalars(file, state, self.tensors))

    def _extents(
        self, index: int, name: str, state: str, expert_rank: int, within: Box | None
    ) -> Iterator[Extent]:
        """The parts of a parameter, by its local name, in the partitions that contain it."""
        shape = self.shapes[index][name]
        yield from self._parts(index, name, state, expert_rank, shape, 0, flat_range(shape, within))

    def _stacked_extents(
        self, index: int, name: str, state: str, within: Box | None
    ) -> Iterator[Extent]:
        """The parts of a stack of experts, one after another those of each expert-parallel rank."""
        degree, (rows, *rest) = self.degrees[index], self.shapes[index][name]
        shape, size = (rows * degree, *rest), math.prod((rows, *rest))
        first, last = flat_range(shape, within)
        for rank in range(degree):
            base = rank * size
            start, stop = max(first - base, 0), min(last - base, size)
            if start < stop:
                yield from self._parts(index, name, state, rank, shape, base, (start, stop))

    def _parts(
        self,
        index: int,
        name: str,
        state: str,
        expert_rank: int,
        shape: tuple[int, ...],
        base: int,
        wanted: tuple[int, int],
    ) -> Iterator[Extent]:
        """The parts of what an expert-parallel rank holds of a tensor, from its element `base` on.

        Args:
            shape: of the tensor.
            wanted: [start, stop) of the elements that the rank holds.
        """
        buffer = self.flat[index]
        positions = buffer.holders(name, *wanted)
        holders = self.experts.holders(self.degrees[index], expert_rank)
        opened = self._get([holders[position] for position in positions])
        for position in positions:
            start, stop, offset = buffer.part_on(name, position)
            part = opened[holders[position]]
            memory = part.masters[index] if state == "master" else part.states[index][state]
            if isinstance(memory, SwappedTensor):
                yield from memory.extents(offset, shape, base + start, base + stop)
            else:
                yield from part.file.flat(memory, offset, shape, base + start, base + stop)


# ZeRO 1 and 2: each optimizer group is one flat buffer, cut into equal partitions over the ranks.
#
# The parameters of a group are joined one after another in the order of `param_shapes`, each
# followed by its `param_alignment_paddings`; the end is padded so that all partitions are equal.
# Rank R's file holds partition R of the master (`single_partition_of_fp32_groups`, without the
# padding at the end; BF16_Optimizer keeps it) and of each state. The place of a parameter is
# recorded three times, and these must agree: by those lengths, by `param_slice_mappings` (name ->
# place in the rank's partition), and by the module's tensors, which are views of one flat buffer in
# the same order.
#
# A group of experts' parameters is cut so over the ranks of one expert-parallel rank; see
# `experts`.
#
# Under `round_robin_gradients` the buffer is in another order than the group, and DeepSpeed 0.19.8
# computes the slice mappings as if it were not: then those of the group's own order are accepted
# too.


_ZERO12_MASTER = "single_partition_of_fp32_groups"
_PADDINGS = ("group_paddings", "param_alignment_paddings")


class Zero12(FlatGroups):
    """The flat groups of ZeRO 1 or 2."""

    tensors = frozenset(
        (_ZERO12_MASTER, "base_optimizer_state", "param_slice_mappings", *_PADDINGS)
    )

    def __init__(
        self,
        model: ModelStates,
        keys: tuple[str, ...],
        load: Callable[[str], TorchFile],
        contents: TensorIndex,
        experts: Experts | None,
    ) -> None:
        self.round_robin: list[FlatBuffer] = []
        super().__init__(model, keys, load, contents, experts)
        # BF16_Optimizer, which is of ZeRO 1, does not record it
        file = self.first.file
        recorded = stage_of(file.value["optimizer_state_dict"].get("zero_stage", 1))
        if recorded not in (1, 2):
            raise IntegrityError(
                f"{file.key} records ZeRO {recorded}, but its files are those of ZeRO 1 and 2"
            )
        self.stage = recorded

    def _parse(self, file: TorchFile, rank: int) -> Partition:  # noqa: ARG002 - all are alike
        state = need(file.value, "optimizer_state_dict", dict, file.key)
        raw = need(state, _ZERO12_MASTER, list, file.key)
        masters = [stored(t, _ZERO12_MASTER, file.key) for t in raw]
        if len(masters) != len(self.shapes):
            raise IntegrityError(
                f"{file.key} has {len(masters)} flat groups, but {self.model.key} describes "
                f"{len(self.shapes)}"
            )
        if not self.flat:
            self._lay_out(state, masters, file)
        counts = state.get("partition_count")
        parts = [self.world // degree for degree in self.degrees]
        if counts != parts if isinstance(counts, list) else {counts} != set(parts):
            raise IntegrityError(
                f"{file.key} was saved by {counts} ranks, but {self.world} files of optimizer "
                "states are present",
                hint="files of different saves are mixed in one folder",
            )
        groups = len(self.shapes)
        states = _states(state, groups, file.key)
        base = state["base_optimizer_state"]
        hypers = base["param_groups"] if isinstance(base, dict) else [{}] * groups
        return Partition(file, masters, states, hypers, list(range(groups)))

    def _check(self, rank: int, partition: Partition) -> None:
        state = partition.file.value["optimizer_state_dict"]
        self._check_lengths(rank, partition, padded="zero_stage" not in state)
        self._check_slices(rank, state.get("param_slice_mappings"), partition.file.key)

    def _lay_out(self, state: dict[str, Any], masters: list[StoredTensor], file: TorchFile) -> None:
        """The layout, from the shapes, the paddings and the length of rank 0's partitions."""
        paddings = need(state, "group_paddings", list, file.key)
        aligned = state.get("param_alignment_paddings") or [[0] * len(g) for g in self.shapes]
        # BF16_Optimizer, which records no stage, saves the padding as part of the last partition.
        ends = paddings if "zero_stage" in state else [0] * len(self.shapes)
        self.degrees = self._degrees(state, file)
        for index, (shapes, pads, master, end) in enumerate(
            zip(self.shapes, aligned, masters, ends, strict=True)
        ):
            buffer = _flat_buffer(shapes, pads, master.size + end)
            parts = self.world // self.degrees[index]
            if buffer.size * parts < buffer.end:
                raise IntegrityError(
                    f"group {index}: {parts} partitions of {buffer.size} elements in {file.key} "
                    "do not hold "
                    f"the {buffer.end} that {self.model.key} describes"
                )
            self._check_views(index, buffer)
            self.flat.append(buffer)
        if zero_options(self.model.value).get("round_robin_gradients"):
            for shapes, buffer, degree in zip(self.shapes, self.flat, self.degrees, strict=True):
                names = undo_round_robin(list(shapes), self.world // degree)
                order = {name: shapes[name] for name in names}
                self.round_robin.append(_flat_buffer(order, [0] * len(order), buffer.size))

    def _degrees(self, state: dict[str, Any], file: TorchFile) -> list[int]:
        """The number of expert-parallel ranks that share each group."""
        base, counts = state.get("base_optimizer_state"), state.get("partition_count")
        hypers = base.get("param_groups") if isinstance(base, dict) else None
        out = []
        for index, shapes in enumerate(self.shapes):
            hyper = hypers[index] if isinstance(hypers, list) and index < len(hypers) else None
            parts = counts[index] if isinstance(counts, list) and index < len(counts) else None
            out.append(self.experts.degree_of(shapes, hyper, parts, file.key))
        return out

    def _check_views(self, index: int, buffer: FlatBuffer) -> None:
        """Check that tensors that are views of one flat buffer have the layout's offsets."""
        shapes = self.shapes[index]
        views = {n: self.model.module[n] for n in shapes if n in self.model.module}
        homes = {self.model.home(n).key for n in views}
        for name, view in views.items():
            if view.shape != shapes[name]:
                raise IntegrityError(
                    f"{self.model.key}: {name} has shape {view.shape} in `module`, "
                    f"{shapes[name]} in `param_shapes`"
                )
        if len(homes) != 1 or len({v.storage for v in views.values()}) != 1 or len(views) < 2:
            return
        if next(iter(views.values())).numel != buffer.size * (self.world // self.degrees[index]):
            return
        wrong = [n for n, v in views.items() if v.offset != buffer.slots[n].start]
        if wrong:
            raise IntegrityError(
                f"{self.model.key}: {wrong[0]} is at element {views[wrong[0]].offset} of the "
                f"flat group {index}, "
                f"but the order of `param_shapes` puts it at {buffer.slots[wrong[0]].start}",
                hint=(
                    "please report this checkpoint; it is not read because its layout is uncertain"
                ),
            )

    def _check_lengths(self, rank: int, partition: Partition, *, padded: bool) -> None:
        for index, (buffer, master) in enumerate(zip(self.flat, partition.masters, strict=True)):
            unpadded = buffer.size - buffer.padding(self.experts.place(self.degrees[index], rank))
            if master.size != (buffer.size if padded else unpadded):
                raise IntegrityError(
                    f"{partition.file.key}: the master of group {index} has {master.size} "
                    "elements; the layout gives "
                    f"rank {rank} {unpadded} of a partition of {buffer.size}",
                    hint="files of different saves are mixed in one folder",
                )
            for name, value in partition.states[index].items():
                shape = value.shape if isinstance(value, StoredTensor) else ()
                if shape not in ((), (unpadded,), (buffer.size,)):
                    raise refuse_flat_state(name, value, index, partition.file.key)

    def _check_slices(self, rank: int, mappings: Any, file: str) -> None:
        """Check that `param_slice_mappings`, if the file has them, agree with the layout."""
        if not isinstance(mappings, list):
            return
        for index, recorded in enumerate(mappings):
            addresses = {name: a for name, a in recorded.items() if isinstance(a, Inert)}
            ranges = {name: (a.get("start"), a.get("numel")) for name, a in addresses.items()}
            position = self.experts.place(self.degrees[index], rank)
            layouts = filter(None, (self.flat, self.round_robin))
            accepted = [_slices(layout[index], position) for layout in layouts]
            if ranges not in accepted:
                names = chain(ranges, accepted[0])
                name = next((n for n in names if ranges.get(n) != accepted[0].get(n)), "?")
                raise IntegrityError(
                    f"{file}: `param_slice_mappings` puts {name} at {ranges.get(name)} (start, "
                    "elements) of group "
                    f"{index}, the "
                    f"order of `param_shapes` in {self.model.key} at {accepted[0].get(name)}",
                    hint=(
                        "please report this checkpoint; it is not read because its layout is "
                        "uncertain"
                    ),
                )


def _states(state: dict[str, Any], groups: int, file: str) -> list[dict[str, Any]]:
    """The optimizer's state for each group: by parameter index, or (elastic checkpoints) a list."""
    base: Any = need(state, "base_optimizer_state", (dict, list), file)
    if isinstance(base, dict):
        indices = [need(g, "params", list, file) for g in need(base, "param_groups", list, file)]
        if [len(i) for i in indices] != [1] * groups:
            raise UnsupportedError(
                f"{file}: its optimizer has not one flat tensor for each of the {groups} groups; "
                "not yet read"
            )
        base = [state_of(need(base, "state", dict, file), i[0], file) for i in indices]
    states: list[dict[str, Any]] = [s for s in base if isinstance(s, dict)]
    if not len(base) == len(states) == groups:
        raise IntegrityError(
            f"{file} has optimizer states for {len(base)} groups, but {groups} masters"
        )
    return states


def _flat_buffer(
    shapes: Mapping[str, tuple[int, ...]], paddings: Sequence[int], partition: int
) -> FlatBuffer:
    """Parameters one after another, each followed by its padding, in partitions of this size."""
    buffer = FlatBuffer(size=partition)
    for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
        buffer.append(name, math.prod(shape), padding=padding)
    return buffer


def _slices(buffer: FlatBuffer, rank: int) -> dict[str, tuple[int, int]]:
    """The parameters in a rank's partition: name -> (place there, elements)."""
    return {name: (offset, stop - start) for name, (start, stop, offset) in buffer.on(rank).items()}


def undo_round_robin(joined: list[str], lists: int) -> list[str]:
    """The original order of a list that was dealt to several lists, which were then joined."""
    places = round_robin_order(len(joined), lists)
    return [name for _, name in sorted(zip(places, joined, strict=True))]


# ZeRO 3: each parameter is partitioned across the ranks separately, and the parts are joined in
# flat groups.
#
# `param_shapes` lists the parameters of each flat group (a *sub-group*: `sub_group_size` splits an
# optimizer group into several). A parameter of n elements is split into parts of ceil(n / ranks),
# the last ones padded; rank R's `fp32_flat_groups` holds part R of each of the group's parameters,
# one after another, and so do the optimizer's states. Frozen parameters are partitioned in the same
# way, each in its own tensor (`frozen_param_fragments` in the model states files). Weights of
# trained parameters are not stored: the module holds empty placeholders, so the master is the only
# copy.

_ZERO3_MASTER = "fp32_flat_groups"


class Zero3(FlatGroups):
    """The flat groups of ZeRO 3."""

    tensors = frozenset((_ZERO3_MASTER, "optimizer_state_dict"))

    def _parse(self, file: TorchFile, rank: int) -> Partition:
        state = need(file.value, "optimizer_state_dict", dict, file.key)
        recorded = _ranks_of_groups(state, len(self.shapes), file.key)
        if not self.flat:
            self.degrees = [
                self.experts.degree_of(shapes, {}, ranks and len(ranks), file.key)
                for shapes, ranks in zip(self.shapes, recorded, strict=True)
            ]
            self.flat = [
                _partitioned_buffer(shapes, self.world // degree)
                for shapes, degree in zip(self.shapes, self.degrees, strict=True)
            ]
        if state.get("partition_count") not in (None, self.world):
            raise IntegrityError(
                f"{file.key} was saved by {state['partition_count']} ranks, but {self.world} "
                "files of optimizer "
                "states are present",
                hint="files of different saves are mixed in one folder",
            )
        masters = [
            stored(t, _ZERO3_MASTER, file.key) for t in need(state, _ZERO3_MASTER, list, file.key)
        ]
        inner = need(state, "optimizer_state_dict", dict, file.key)
        states = need(inner, "state", dict, file.key)
        groups = need(inner, "param_groups", list, file.key)
        members = [need(g, "params", list, file.key) for g in groups]
        indices = [i for group in members for i in group]
        if len(masters) != len(self.flat) or indices != list(range(len(self.flat))):
            raise IntegrityError(
                f"{file.key} has {len(masters)} flat groups of {len(indices)} optimizer entries, "
                f"but {self.model.key} "
                f"describes {len(self.flat)}"
            )
        owners = [g for g, group in enumerate(members) for _ in group]
        by_entry = [state_of(states, i, file.key) for i in indices]
        swap = SwapFolder.of(file.key, rank, self._swapped)
        for index, (buffer, group) in enumerate(zip(self.flat, by_entry, strict=True)):
            label = f"the flat group {index} in {file.key}"
            masters[index] = swap.restored(masters[index], buffer.size, "master", label)
            by_entry[index] = {
                name: swap.restored(value, buffer.size, name, f"{name!r} of {label}")
                for name, value in group.items()
            }
        return Partition(file, masters, by_entry, groups, owners)

    def _check(self, rank: int, partition: Partition) -> None:
        state = partition.file.value["optimizer_state_dict"]
        recorded = _ranks_of_groups(state, len(self.shapes), partition.file.key)
        for index, (buffer, master) in enumerate(zip(self.flat, partition.masters, strict=True)):
            degree, ranks = self.degrees[index], recorded[index]
            every = (list(self.experts.holders(degree, k)) for k in range(degree))
            if ranks is not None and ranks != next(each for each in every if rank in each):
                raise UnsupportedError(
                    f"{partition.file.key}: not yet read: flat group {index} is sharded across the "
                    f"ranks {ranks}"
                )
            if master.shape != (buffer.size,):
                raise IntegrityError(
                    f"{partition.file.key}: flat group {index} has shape {master.shape}; its "
                    "parameters, sharded "
                    f"across {self.world // degree} ranks, take {buffer.size} elements",
                    hint=(
                        "files of different saves are mixed in one folder, or the optimizer was "
                        "offloaded to NVMe"
                    ),
                )
            for name, value in partition.states[index].items():
                if isinstance(value, StoredTensor) and value.shape not in ((), (buffer.size,)):
                    raise refuse_flat_state(name, value, index, partition.file.key)


def _ranks_of_groups(state: Any, groups: int, file: str) -> list[list[int] | None]:
    """The ranks across which each flat group is sharded, if that is recorded (of AutoEP); else None."""
    recorded = state.get("ds_zero_partition_groups")
    if not recorded:
        return [None] * groups
    listed = recorded if isinstance(recorded, list) else []
    ranks = [entry.get("partition_ranks") for entry in listed if isinstance(entry, dict)]
    if len(ranks) != groups or not all(
        isinstance(of_group, list) and of_group for of_group in ranks
    ):
        raise IntegrityError(f"{file} has no usable 'ds_zero_partition_groups'")
    return ranks


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
        recorded = ((m.value.get("frozen_param_fragments") or {}).get(name) for m in models)
        label = f"frozen_param_fragments[{name!r}]"
        fragments = [stored(f, label, m.key) for f, m in zip(recorded, models, strict=True)]
        for model, fragment in zip(models, fragments, strict=True):
            if fragment.shape != (part,):
                raise IntegrityError(
                    f"{model.key}: the frozen {name} has a part of shape {fragment.shape}; "
                    f"sharded across {world} "
                    f"ranks, its shape {shape} gives {part} elements"
                )

        locate = partial(_frozen_extents, models, fragments, shape)
        contents.add(name, "weight", fragments[0].dtype, shape, locate)


def _frozen_extents(
    models: list[ModelStates],
    fragments: list[StoredTensor],
    shape: tuple[int, ...],
    within: Box | None,
) -> Iterator[Extent]:
    first, last = flat_range(shape, within)
    for rank, (model, fragment) in enumerate(zip(models, fragments, strict=True)):
        start, stop = part_range(math.prod(shape), fragment.size, rank)
        if max(start, first) < min(stop, last):
            yield from model.file.flat(fragment, 0, shape, start, stop)


@dataclass(slots=True)
class Slice:
    """The tensors of one pipeline stage as one tensor-parallel rank holds them."""

    models: list[ModelStates]  # one, or under ZeRO 3 one for each data-parallel rank
    label: str  # "" for the first
    contents: LocalContents
    aliases: dict[str, str] = field(default_factory=dict)
    not_stored: list[str] = field(default_factory=list)  # parameters whose values are in no file
    stage: int = 0
    degrees: tuple[int, ...] = ()  # expert-parallel ranks of each optimizer group
    swap_files: tuple[str, ...] = ()  # of an optimizer on NVMe

    @property
    def model(self) -> ModelStates:
        """The first data-parallel rank's model states."""
        return self.models[0]

    def split(self, apart: Callable[[str], bool]) -> Slice:
        """Move the tensors whose names are `apart` into a slice of their own."""
        contents, mine = LocalContents(self.contents.label), self.contents
        contents.optimizer = mine.optimizer
        for key in [key for key in mine.infos if apart(key.name)]:
            contents.put(mine.infos[key], mine.locate[key])
            if key in mine.whole:
                contents.whole[key] = mine.whole[key]
        mine.forget(contents.infos)
        contents.unreadable = {k: why for k, why in mine.unreadable.items() if apart(k.name)}
        mine.unreadable = {k: why for k, why in mine.unreadable.items() if not apart(k.name)}
        groups = mine.groups
        mine.groups = []
        for group in groups:
            theirs = [name for name in group.names if apart(name)]
            rest = [name for name in group.names if not apart(name)]
            if theirs:
                contents.groups.append(Group(theirs, group.hyper, group.state))
            if rest or not theirs:
                mine.groups.append(Group(rest, group.hyper, group.state))
        return replace(self, contents=contents, aliases={}, not_stored=[])

    def weight_dtype(self, stage: int | None) -> dict[str, str]:
        """The dtype of the weights, which ZeRO 3 stores in fp32 only; else nothing."""
        model = self.model
        first = next((name for name in model.described if name in model.module), None)
        return {"weight_dtype": model.module[first].dtype} if stage == 3 and first else {}


@dataclass(frozen=True, slots=True)
class SliceReader:
    """Reads the files of model-parallel ranks.

    Attributes:
        optimizer: whether to read the optimizer's states.
        swapped: the bytes of the swap files of an optimizer on NVMe, by key.
    """

    load: Callable[[str], TorchFile]
    zero3: bool = False
    experts: Experts | None = None
    optimizer: bool = True
    swapped: Mapping[str, int] | None = None

    def read(
        self,
        models: list[ModelStates],
        optims: tuple[str, ...],
        label: str,
        *,
        shared: dict[str, str] | None = None,
        names: Sequence[Sequence[str]] | None = None,
    ) -> Slice:
        """Read one model-parallel rank's files.

        Args:
            shared: the tied names in the first rank's file; None if it has none.
            names: the names of each optimizer group's parameters, for ZeRO 0; None: they are
                derived.
        """
        out, placeholders = read_weights(models, label, zero3=self.zero3, shared=shared)
        model, contents = out.model, out.contents
        if zero_options(model.value).get("mics_shard_size", -1) not in (-1, 0, None):
            raise UnsupportedError(f"{model.key}: DeepSpeed checkpoints with MiCS are not yet read")
        if not self.zero3 and model.param_shapes is None and optims:
            raise IntegrityError(
                f"{optims[0]} exists, but {model.key} is of ZeRO 0, whose optimizer has no files of its own",
                hint=(
                    "files of different saves are mixed in one folder; move those that you do not "
                    "want elsewhere"
                ),
            )
        if not self.optimizer:
            stage = zero_options(model.value).get("stage")
            out.stage = stage if type(stage) is int and 0 <= stage < 3 else 0
        elif self.zero3:
            zero3 = Zero3(model, optims, self.load, contents, self.experts, self.swapped)
            out.degrees = tuple(degree for degree, _ in zero3.expert_groups)
            out.swap_files = zero3.swap_files()
        elif model.param_shapes is not None:
            zero = Zero12(model, optims, self.load, contents, self.experts)
            out.stage = 0 if is_partitioned(model) else zero.stage
            lanes = self.experts.lanes if self.experts else 1
            out.degrees = tuple(n * lanes if is_moe else 1 for n, is_moe in zero.expert_groups)
        else:
            read_zero0(model, names, contents)
        stored_names = {key.name for key in contents.infos}
        out.not_stored = [name for name in placeholders if name not in stored_names]
        return out


def read_weights(
    models: list[ModelStates], label: str, *, zero3: bool, shared: dict[str, str] | None
) -> tuple[Slice, list[str]]:
    """Read the model states files of one model-parallel rank.

    Args:
        shared: the tied names in the first rank's file; None if it has none.
    """
    model = models[0]
    contents = LocalContents(f"{label}." if label else "")
    aliases = model.aliases(zero3=zero3, shared=shared)
    out = Slice(models, label, contents, aliases, stage=3 if zero3 else 0)
    if not zero3:
        _add_weights(out)
        return out, []
    placeholders = _add_buffers(out)
    add_frozen(models, contents)
    return out, placeholders


def _add_weights(rank_slice: Slice) -> None:
    """The module's tensors, each once."""
    model = rank_slice.model
    for name, tensor in model.module.items():
        if name not in rank_slice.aliases:
            rank_slice.contents.add_whole(name, "weight", model.home(name), tensor)
    for name, experts in model.stacks.items():
        first, shape = experts[0][0], (len(experts), *experts[0][0].shape)
        locate = partial(_stack_extents, experts)
        rank_slice.contents.add(name, "weight", first.dtype, shape, locate)
    for alias, name in rank_slice.aliases.items():
        if name not in model.module and name not in model.described:
            raise IntegrityError(
                f"{model.key}: {alias} is tied to {name}, which is not in the checkpoint"
            )


def _stack_extents(
    experts: list[tuple[StoredTensor, TorchFile]], within: Box | None
) -> Iterator[Extent]:
    """The weights of the experts of a stack, each in a file of its own."""
    first = 0 if within is None else within.start[0]
    last = len(experts) if within is None else first + within.shape[0]
    for number, (tensor, file) in enumerate(experts[first:last], first):
        for extent in file.whole(tensor):
            box = Box((number, *extent.box.start), (1, *extent.box.shape))
            yield replace(extent, box=box, strides=(0, *extent.strides))


def _add_buffers(rank_slice: Slice) -> list[str]:
    """Add rank 0's buffers of a ZeRO 3 module; returns its empty placeholders."""
    model = rank_slice.model
    parameters = {*model.described, *model.frozen_shapes, *rank_slice.aliases}
    placeholders = []
    for name, tensor in model.module.items():
        if name in model.buffers or (tensor.size and name not in parameters):
            rank_slice.contents.add_whole(name, "weight", model.file, tensor)
        elif name not in rank_slice.aliases:
            placeholders.append(name)
    return placeholders
