"""ZeRO 1 and 2: each optimizer group is one flat buffer, cut into equal partitions over the ranks.

The parameters of a group lie one after another in the order of `param_shapes`, each followed by its
`param_alignment_paddings`; the end is padded so that all partitions are equal. Rank R's file holds partition R of the
master (`single_partition_of_fp32_groups`, without the padding at the end; BF16_Optimizer keeps it) and of each state.
Where a parameter lies is told three times, and what is told must agree: by those lengths, by `param_slice_mappings`
(name -> place in the rank's partition), and by the module's tensors, which are views of one flat buffer in the same
order.

A group of experts' parameters is cut so over the ranks of one expert-parallel rank; see `experts`.

Under `round_robin_gradients` the buffer is in another order than the group, and DeepSpeed 0.19.8 computes the slice
mappings as if it were not: then those of the group's own order are accepted too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, product
from typing import TYPE_CHECKING, Any

from ucformat.errors import IntegrityError, Refused
from ucformat.geometry.flat_buffer import flat_range
from ucformat.sources.deepspeed.contents import (
    Group,
    Ranks,
    hyper_parameters,
    need,
    refuse_flat_state,
    scalars,
    stage_of,
    state_of,
    stored,
    zero_options,
)
from ucformat.sources.deepspeed.experts import Experts
from ucformat.sources.pickle.stand_ins import Inert, StoredTensor
from ucformat.sources.values import to_json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucformat.geometry.box import Box
    from ucformat.geometry.tensor import Extent
    from ucformat.sources.deepspeed.model import ModelStates
    from ucformat.sources.index import TensorIndex
    from ucformat.sources.pickle.file import TorchFile

__all__ = ["Zero12"]

_MASTER = "single_partition_of_fp32_groups"
_TENSORS = frozenset(
    (_MASTER, "base_optimizer_state", "param_slice_mappings", "group_paddings", "param_alignment_paddings")
)


@dataclass(frozen=True, slots=True)
class FlatGroup:
    """Where the parameters of a group lie in its flat buffer."""

    shapes: dict[str, tuple[int, ...]]
    starts: dict[str, int]
    total: int
    partition: int

    @classmethod
    def joined(cls, shapes: dict[str, tuple[int, ...]], paddings: list[int], partition: int) -> FlatGroup:
        """One after another, each followed by its padding."""
        lengths = [math.prod(s) + p for s, p in zip(shapes.values(), paddings, strict=True)]
        starts = [0, *accumulate(lengths)]
        return cls(shapes, dict(zip(shapes, starts, strict=False)), starts[-1], partition)

    def slices(self, rank: int) -> dict[str, tuple[int, int]]:
        """The parameters in a rank's partition: name -> (place in the partition, number of elements)."""
        low, high, out = rank * self.partition, (rank + 1) * self.partition, {}
        for name, start in self.starts.items():
            begin, end = max(low, start), min(high, start + math.prod(self.shapes[name]))
            if begin < end:
                out[name] = (begin - low, end - begin)
        return out

    def padding(self, rank: int) -> int:
        """Elements at the end of a rank's partition that belong to no parameter."""
        return min(self.partition, max(0, (rank + 1) * self.partition - self.total))


@dataclass(frozen=True, slots=True)
class Partition:
    """A rank's optimizer file: for each group its part of the master and the states."""

    file: TorchFile
    masters: list[StoredTensor]
    states: list[dict[str, Any]]


class Zero12:
    """The flat groups of a ZeRO 1 or 2 checkpoint; ranks beyond the first are opened when their extents are wanted."""

    def __init__(
        self,
        model: ModelStates,
        keys: tuple[str, ...],
        allow: tuple[str, ...],
        contents: TensorIndex,
        experts: Experts | None = None,
    ) -> None:
        self.model, self.world, self.contents = model, len(keys), contents
        self.experts = experts or Experts(len(keys))
        self.degrees: list[int] = []  # expert-parallel ranks of each group
        self.flat: list[FlatGroup] = []
        self.round_robin: list[FlatGroup] = []
        self.ranks = Ranks(model.file.store, keys, allow, self._parse)
        self.first = self.ranks[0]
        self._scalars = self._read_scalars(self.first)
        self._describe()

    def _parse(self, rank: int, file: TorchFile) -> Partition:
        """A rank's file, checked against the layout; rank 0, which is first, tells the layout."""
        state = need(file.value, "optimizer_state_dict", dict, file.key)
        groups = self.model.param_shapes or []
        raw = need(state, _MASTER, list, file.key)
        masters = [stored(t, _MASTER, file.key) for t in raw]
        if len(masters) != len(groups):
            raise IntegrityError(
                f"{file.key} has {len(masters)} flat groups, but {self.model.key} describes {len(groups)}"
            )
        if not self.flat:
            self._lay_out(state, masters, file)
        counts = state.get("partition_count")
        parts = [self.world // degree for degree in self.degrees]
        if counts != parts if isinstance(counts, list) else {counts} != set(parts):
            raise IntegrityError(
                f"{file.key} was saved by {counts} ranks, but {self.world} files of optimizer states are there",
                hint="files of different saves are mixed in one folder",
            )
        partition = Partition(file, masters, _states(state, len(groups), file.key))
        self._check_lengths(rank, partition, padded="zero_stage" not in state)
        self._check_slices(rank, state.get("param_slice_mappings"), file.key)
        if rank:
            self._compare(partition)
        return partition

    def _lay_out(self, state: dict[str, Any], masters: list[StoredTensor], file: TorchFile) -> None:
        """The layout, from the shapes, the paddings and the length of rank 0's partitions."""
        groups = self.model.param_shapes or []
        paddings = need(state, "group_paddings", list, file.key)
        aligned = state.get("param_alignment_paddings") or [[0] * len(g) for g in groups]
        ends = paddings if "zero_stage" in state else [0] * len(groups)
        self.degrees = self._degrees(state, file)
        for index, (shapes, pads, master, end) in enumerate(zip(groups, aligned, masters, ends, strict=True)):
            group = FlatGroup.joined(shapes, pads, master.size + end)
            parts = self.world // self.degrees[index]
            if group.partition * parts < group.total:
                raise IntegrityError(
                    f"group {index}: {parts} partitions of {group.partition} elements in {file.key} do not hold "
                    "the "
                    f"{group.total} that {self.model.key} describes"
                )
            self._check_views(index, group)
            self.flat.append(group)
        if zero_options(self.model.value).get("round_robin_gradients"):
            orders = (
                _undealt(list(group.shapes), self.world // degree)
                for group, degree in zip(self.flat, self.degrees, strict=True)
            )
            self.round_robin = [
                FlatGroup.joined({n: g.shapes[n] for n in order}, [0] * len(order), g.partition)
                for g, order in zip(self.flat, orders, strict=True)
            ]

    def _degrees(self, state: dict[str, Any], file: TorchFile) -> list[int]:
        """Over how many expert-parallel ranks each group is dealt."""
        base, counts = state.get("base_optimizer_state"), state.get("partition_count")
        hypers = base.get("param_groups") if isinstance(base, dict) else None
        out = []
        for index, shapes in enumerate(self.model.param_shapes or []):
            hyper = hypers[index] if isinstance(hypers, list) and index < len(hypers) else None
            parts = counts[index] if isinstance(counts, list) and index < len(counts) else None
            out.append(self.experts.degree_of(shapes, hyper, parts, file.key))
        return out

    def _check_views(self, index: int, group: FlatGroup) -> None:
        """The module's tensors, where they are views of one flat buffer, lie where the layout says."""
        views = {n: self.model.module[n] for n in group.shapes if n in self.model.module}
        homes = {self.model.home(n).key for n in views}
        for name, view in views.items():
            if view.shape != group.shapes[name]:
                raise IntegrityError(
                    f"{self.model.key}: {name} has shape {view.shape} in `module`, {group.shapes[name]} in "
                    "`param_shapes`"
                )
        if len(homes) != 1 or len({v.storage for v in views.values()}) != 1 or len(views) < 2:
            return
        if next(iter(views.values())).numel != group.partition * (self.world // self.degrees[index]):
            return
        wrong = [n for n, v in views.items() if v.offset != group.starts[n]]
        if wrong:
            raise IntegrityError(
                f"{self.model.key}: {wrong[0]} lies at element {views[wrong[0]].offset} of the flat group {index}, "
                "but the "
                f"order of `param_shapes` puts it at {group.starts[wrong[0]]}",
                hint="please report this checkpoint; it is not read because its layout is uncertain",
            )

    def _check_lengths(self, rank: int, partition: Partition, *, padded: bool) -> None:
        for index, (group, master) in enumerate(zip(self.flat, partition.masters, strict=True)):
            lean = group.partition - group.padding(self.experts.place(self.degrees[index], rank))
            if master.size != (group.partition if padded else lean):
                raise IntegrityError(
                    f"{partition.file.key}: the master of group {index} has {master.size} elements; the layout gives "
                    "rank "
                    f"{rank} {lean} of a partition of {group.partition}",
                    hint="files of different saves are mixed in one folder",
                )
            for name, value in partition.states[index].items():
                if isinstance(value, StoredTensor) and value.shape and value.shape not in ((lean,), (group.partition,)):
                    raise refuse_flat_state(name, value, index, partition.file.key)

    def _check_slices(self, rank: int, mappings: Any, file: str) -> None:
        """`param_slice_mappings`, where the file has them, say the same as the layout."""
        if not isinstance(mappings, list):
            return
        for index, told in enumerate(mappings):
            said = {name: (a.get("start"), a.get("numel")) for name, a in told.items() if isinstance(a, Inert)}
            at = self.experts.place(self.degrees[index], rank)
            accepted = [layout[index].slices(at) for layout in (self.flat, self.round_robin) if layout]
            if said not in accepted:
                name = next((n for n in chain(said, accepted[0]) if said.get(n) != accepted[0].get(n)), "?")
                raise IntegrityError(
                    f"{file}: `param_slice_mappings` puts {name} at {said.get(name)} (start, elements) of group "
                    f"{index}, the "
                    f"order of `param_shapes` in {self.model.key} at {accepted[0].get(name)}",
                    hint="please report this checkpoint; it is not read because its layout is uncertain",
                )

    def _read_scalars(self, partition: Partition) -> list[dict[str, bytes]]:
        return [
            {n: partition.file.read(v) for n, v in states.items() if isinstance(v, StoredTensor) and not v.shape}
            for states in partition.states
        ]

    def _compare(self, partition: Partition) -> None:
        """The states of another rank are those of rank 0, and so are its scalars (`step`)."""
        for index, (mine, theirs) in enumerate(zip(self.first.states, partition.states, strict=True)):
            if {n: _kind(v) for n, v in mine.items()} != {n: _kind(v) for n, v in theirs.items()}:
                raise IntegrityError(
                    f"{partition.file.key}: group {index} has the optimizer states {sorted(theirs)}, rank 0 "
                    f"{sorted(mine)}"
                )
        if self._read_scalars(partition) != self._scalars:
            raise IntegrityError(
                f"{partition.file.key}: an optimizer scalar (`step`) differs from that in {self.first.file.key}",
                hint="files of different saves are mixed in one folder",
            )

    def _describe(self) -> None:
        """The tensors, groups and scalars, as rank 0's file tells them."""
        file, contents = self.first.file, self.contents
        state = file.value["optimizer_state_dict"]
        base = state["base_optimizer_state"]
        hypers = base["param_groups"] if isinstance(base, dict) else [{}] * len(self.flat)
        for index, group in enumerate(self.flat):
            states = self.first.states[index]
            plain = {n: v for n, v in states.items() if not isinstance(v, StoredTensor)}
            entry = Group([], hyper_parameters(hypers[index], file))
            entry.state = to_json(plain, read=file.read, path="state")
            contents.groups.append(entry)
            tensors = {"master": self.first.masters[index]}
            tensors |= {n: v for n, v in states.items() if isinstance(v, StoredTensor)}
            for expert_rank, (local, shape) in product(range(self.degrees[index]), group.shapes.items()):
                name = self.experts.globally(local, self.degrees[index], expert_rank)
                entry.names.append(name)
                for kind, tensor in tensors.items():
                    if tensor.shape or kind == "master":
                        locate = partial(self._extents, index, local, kind, expert_rank)
                        contents.add(name, kind, tensor.dtype, shape, locate)
                    else:
                        contents.add_whole(name, kind, file, tensor)
        contents.keep_scalars(file, scalars(file, state, _TENSORS))
        told = stage_of(state.get("zero_stage", 1))  # BF16_Optimizer, which is of ZeRO 1, says nothing
        if told not in (1, 2):
            raise IntegrityError(f"{file.key} says ZeRO {told}, but its files are those of ZeRO 1 and 2")
        self.stage = told

    def _extents(self, index: int, name: str, state: str, expert_rank: int, within: Box | None) -> Iterator[Extent]:
        """The parts of a parameter, as the ranks call it, in the partitions that it touches."""
        group = self.flat[index]
        start, shape = group.starts[name], group.shapes[name]
        first, last = flat_range(shape, within)
        wanted = range((start + first) // group.partition, -(-(start + last) // group.partition)) if last else range(0)
        holders = self.experts.holders(self.degrees[index], expert_rank)
        opened = self.ranks.get([holders[at] for at in wanted])
        for at in wanted:
            low = at * group.partition
            begin, end = max(start, low), min(start + math.prod(shape), low + group.partition)
            part = opened[holders[at]]
            buffer = part.masters[index] if state == "master" else part.states[index][state]
            yield from part.file.flat(buffer, begin - low, shape, begin - start, end - start)


def _states(state: dict[str, Any], groups: int, file: str) -> list[dict[str, Any]]:
    """The optimizer's state for each group: by parameter index, or (elastic checkpoints) a list."""
    base: Any = need(state, "base_optimizer_state", (dict, list), file)
    if isinstance(base, dict):
        indices = [need(g, "params", list, file) for g in need(base, "param_groups", list, file)]
        if [len(i) for i in indices] != [1] * groups:
            raise Refused(
                f"{file}: its optimizer has not one flat tensor for each of the {groups} groups; not yet read"
            )
        base = [state_of(need(base, "state", dict, file), i[0], file) for i in indices]
    found: list[dict[str, Any]] = [s for s in base if isinstance(s, dict)]
    if not len(base) == len(found) == groups:
        raise IntegrityError(f"{file} has optimizer states for {len(base)} groups, but {groups} masters")
    return found


def _kind(value: Any) -> Any:
    return (value.dtype, len(value.shape)) if isinstance(value, StoredTensor) else type(value)


def _undealt(dealt: list[str], hands: int) -> list[str]:
    """The order before a list was dealt to so many hands in turn, and the hands joined."""
    order: list[str] = [""] * len(dealt)
    names = iter(dealt)
    for hand in range(hands):
        for place in range(hand, len(dealt), hands):
            order[place] = next(names)
    return order
