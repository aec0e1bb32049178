"""ZeRO 1 and 2: each optimizer group is one flat buffer, cut into equal partitions over the ranks.

The parameters of a group are joined one after another in the order of `param_shapes`, each followed by its
`param_alignment_paddings`; the end is padded so that all partitions are equal. Rank R's file holds partition R of the
master (`single_partition_of_fp32_groups`, without the padding at the end; BF16_Optimizer keeps it) and of each state.
The place of a parameter is recorded three times, and these must agree: by those lengths, by `param_slice_mappings`
(name -> place in the rank's partition), and by the module's tensors, which are views of one flat buffer in the same
order.

A group of experts' parameters is cut so over the ranks of one expert-parallel rank; see `experts`.

Under `round_robin_gradients` the buffer is in another order than the group, and DeepSpeed 0.19.8 computes the slice
mappings as if it were not: then those of the group's own order are accepted too.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import chain, product
from typing import TYPE_CHECKING, Any

from ucformat.errors import IntegrityError, UnsupportedError
from ucformat.geometry.flat_buffer import FlatBuffer, flat_range, round_robin_order
from ucformat.sources.deepspeed.contents import (
    Partition,
    Ranks,
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
from ucformat.sources.deepspeed.experts import Experts
from ucformat.sources.index import Group
from ucformat.sources.pickle.stand_ins import Inert, StoredTensor
from ucformat.sources.values import to_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ucformat.geometry.box import Box
    from ucformat.geometry.tensor import Extent
    from ucformat.sources.deepspeed.model import ModelStates
    from ucformat.sources.index import TensorIndex
    from ucformat.sources.pickle.file import TorchFile

_MASTER = "single_partition_of_fp32_groups"
_TENSORS = frozenset(
    (_MASTER, "base_optimizer_state", "param_slice_mappings", "group_paddings", "param_alignment_paddings")
)


class Zero12(Ranks[Partition]):
    """The flat groups of a ZeRO 1 or 2 checkpoint; ranks beyond the first are opened when their extents are needed."""

    def __init__(
        self,
        model: ModelStates,
        keys: tuple[str, ...],
        load: Callable[[str], TorchFile],
        contents: TensorIndex,
        experts: Experts | None = None,
    ) -> None:
        super().__init__(keys, load)
        self.model, self.world = model, len(keys)
        self.experts = experts or Experts(len(keys))
        self.degrees: list[int] = []  # expert-parallel ranks of each group
        self.shapes = model.param_shapes or []  # of the parameters, by flat group
        self.flat: list[FlatBuffer] = []
        self.round_robin: list[FlatBuffer] = []
        self.first = self[0]
        self._scalars = read_scalars(self.first)
        self._describe(contents)

    def _parse(self, rank: int, file: TorchFile) -> Partition:
        """Parse a rank's file and check it against the layout, which the first file, rank 0's, defines."""
        state = need(file.value, "optimizer_state_dict", dict, file.key)
        raw = need(state, _MASTER, list, file.key)
        masters = [stored(t, _MASTER, file.key) for t in raw]
        if len(masters) != len(self.shapes):
            raise IntegrityError(
                f"{file.key} has {len(masters)} flat groups, but {self.model.key} describes {len(self.shapes)}"
            )
        if not self.flat:
            self._lay_out(state, masters, file)
        counts = state.get("partition_count")
        parts = [self.world // degree for degree in self.degrees]
        if counts != parts if isinstance(counts, list) else {counts} != set(parts):
            raise IntegrityError(
                f"{file.key} was saved by {counts} ranks, but {self.world} files of optimizer states are present",
                hint="files of different saves are mixed in one folder",
            )
        partition = Partition(file, masters, _states(state, len(self.shapes), file.key))
        self._check_lengths(rank, partition, padded="zero_stage" not in state)
        self._check_slices(rank, state.get("param_slice_mappings"), file.key)
        if rank:
            check_same_states(partition, self.first, self._scalars)
        return partition

    def _lay_out(self, state: dict[str, Any], masters: list[StoredTensor], file: TorchFile) -> None:
        """The layout, from the shapes, the paddings and the length of rank 0's partitions."""
        paddings = need(state, "group_paddings", list, file.key)
        aligned = state.get("param_alignment_paddings") or [[0] * len(g) for g in self.shapes]
        ends = paddings if "zero_stage" in state else [0] * len(self.shapes)
        self.degrees = self._degrees(state, file)
        for index, (shapes, pads, master, end) in enumerate(zip(self.shapes, aligned, masters, ends, strict=True)):
            buffer = _flat_buffer(shapes, pads, master.size + end)
            parts = self.world // self.degrees[index]
            if buffer.size * parts < buffer.end:
                raise IntegrityError(
                    f"group {index}: {parts} partitions of {buffer.size} elements in {file.key} do not hold "
                    f"the {buffer.end} that {self.model.key} describes"
                )
            self._check_views(index, buffer)
            self.flat.append(buffer)
        if zero_options(self.model.value).get("round_robin_gradients"):
            for shapes, buffer, degree in zip(self.shapes, self.flat, self.degrees, strict=True):
                order = {name: shapes[name] for name in undo_round_robin(list(shapes), self.world // degree)}
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
        """Check that the module's tensors, if they are views of one flat buffer, have the layout's offsets."""
        shapes = self.shapes[index]
        views = {n: self.model.module[n] for n in shapes if n in self.model.module}
        homes = {self.model.home(n).key for n in views}
        for name, view in views.items():
            if view.shape != shapes[name]:
                raise IntegrityError(
                    f"{self.model.key}: {name} has shape {view.shape} in `module`, {shapes[name]} in `param_shapes`"
                )
        if len(homes) != 1 or len({v.storage for v in views.values()}) != 1 or len(views) < 2:
            return
        if next(iter(views.values())).numel != buffer.size * (self.world // self.degrees[index]):
            return
        wrong = [n for n, v in views.items() if v.offset != buffer.slots[n].start]
        if wrong:
            raise IntegrityError(
                f"{self.model.key}: {wrong[0]} is at element {views[wrong[0]].offset} of the flat group {index}, "
                f"but the order of `param_shapes` puts it at {buffer.slots[wrong[0]].start}",
                hint="please report this checkpoint; it is not read because its layout is uncertain",
            )

    def _check_lengths(self, rank: int, partition: Partition, *, padded: bool) -> None:
        for index, (buffer, master) in enumerate(zip(self.flat, partition.masters, strict=True)):
            unpadded = buffer.size - buffer.padding(self.experts.place(self.degrees[index], rank))
            if master.size != (buffer.size if padded else unpadded):
                raise IntegrityError(
                    f"{partition.file.key}: the master of group {index} has {master.size} elements; the layout gives "
                    f"rank {rank} {unpadded} of a partition of {buffer.size}",
                    hint="files of different saves are mixed in one folder",
                )
            for name, value in partition.states[index].items():
                if isinstance(value, StoredTensor) and value.shape and value.shape not in ((unpadded,), (buffer.size,)):
                    raise refuse_flat_state(name, value, index, partition.file.key)

    def _check_slices(self, rank: int, mappings: Any, file: str) -> None:
        """Check that `param_slice_mappings`, if the file has them, agree with the layout."""
        if not isinstance(mappings, list):
            return
        for index, recorded in enumerate(mappings):
            ranges = {name: (a.get("start"), a.get("numel")) for name, a in recorded.items() if isinstance(a, Inert)}
            at = self.experts.place(self.degrees[index], rank)
            accepted = [_slices(layout[index], at) for layout in (self.flat, self.round_robin) if layout]
            if ranges not in accepted:
                name = next((n for n in chain(ranges, accepted[0]) if ranges.get(n) != accepted[0].get(n)), "?")
                raise IntegrityError(
                    f"{file}: `param_slice_mappings` puts {name} at {ranges.get(name)} (start, elements) of group "
                    f"{index}, the "
                    f"order of `param_shapes` in {self.model.key} at {accepted[0].get(name)}",
                    hint="please report this checkpoint; it is not read because its layout is uncertain",
                )

    def _describe(self, contents: TensorIndex) -> None:
        """Add the tensors, groups and scalars that rank 0's file describes."""
        file = self.first.file
        state = file.value["optimizer_state_dict"]
        base = state["base_optimizer_state"]
        hypers = base["param_groups"] if isinstance(base, dict) else [{}] * len(self.flat)
        for index, shapes in enumerate(self.shapes):
            states = self.first.states[index]
            plain = {n: v for n, v in states.items() if not isinstance(v, StoredTensor)}
            entry = Group([], hyper_parameters(hypers[index], file))
            entry.state = to_json(plain, read=file.read, path="state")
            contents.groups.append(entry)
            tensors = {"master": self.first.masters[index]}
            tensors |= {n: v for n, v in states.items() if isinstance(v, StoredTensor)}
            for expert_rank, (local, shape) in product(range(self.degrees[index]), shapes.items()):
                name = self.experts.globally(local, self.degrees[index], expert_rank)
                entry.names.append(name)
                for kind, tensor in tensors.items():
                    if tensor.shape or kind == "master":
                        locate = partial(self._extents, index, local, kind, expert_rank)
                        contents.add(name, kind, tensor.dtype, shape, locate)
                    else:
                        contents.add_whole(name, kind, file, tensor)
        contents.keep_scalars(file, scalars(file, state, _TENSORS))
        recorded = stage_of(state.get("zero_stage", 1))  # BF16_Optimizer, which is of ZeRO 1, does not record it
        if recorded not in (1, 2):
            raise IntegrityError(f"{file.key} records ZeRO {recorded}, but its files are those of ZeRO 1 and 2")
        self.stage = recorded

    def _extents(self, index: int, name: str, state: str, expert_rank: int, within: Box | None) -> Iterator[Extent]:
        """The parts of a parameter, by its local name, in the partitions that contain it."""
        buffer, shape = self.flat[index], self.shapes[index][name]
        wanted = buffer.holders(name, *flat_range(shape, within))
        holders = self.experts.holders(self.degrees[index], expert_rank)
        opened = self.get([holders[at] for at in wanted])
        for at in wanted:
            start, stop, offset = buffer.part_on(name, at)
            part = opened[holders[at]]
            memory = part.masters[index] if state == "master" else part.states[index][state]
            yield from part.file.flat(memory, offset, shape, start, stop)


def _states(state: dict[str, Any], groups: int, file: str) -> list[dict[str, Any]]:
    """The optimizer's state for each group: by parameter index, or (elastic checkpoints) a list."""
    base: Any = need(state, "base_optimizer_state", (dict, list), file)
    if isinstance(base, dict):
        indices = [need(g, "params", list, file) for g in need(base, "param_groups", list, file)]
        if [len(i) for i in indices] != [1] * groups:
            raise UnsupportedError(
                f"{file}: its optimizer has not one flat tensor for each of the {groups} groups; not yet read"
            )
        base = [state_of(need(base, "state", dict, file), i[0], file) for i in indices]
    found: list[dict[str, Any]] = [s for s in base if isinstance(s, dict)]
    if not len(base) == len(found) == groups:
        raise IntegrityError(f"{file} has optimizer states for {len(base)} groups, but {groups} masters")
    return found


def _flat_buffer(shapes: Mapping[str, tuple[int, ...]], paddings: Sequence[int], partition: int) -> FlatBuffer:
    """Parameters one after another, each followed by its padding, in partitions of this size."""
    buffer = FlatBuffer(size=partition)
    for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
        buffer.append(name, math.prod(shape), padding=padding)
    return buffer


def _slices(buffer: FlatBuffer, rank: int) -> dict[str, tuple[int, int]]:
    """The parameters in a rank's partition: name -> (place in the partition, number of elements)."""
    return {name: (at, stop - start) for name, (start, stop, at) in buffer.on(rank).items()}


def undo_round_robin(joined: list[str], lists: int) -> list[str]:
    """The original order of a list that was distributed round-robin to several lists, which were then joined."""
    return [name for _, name in sorted(zip(round_robin_order(len(joined), lists), joined, strict=True))]
