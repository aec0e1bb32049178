"""The flat buffers of ZeRO: what of each parameter each rank's partition holds.

ZeRO 1 and 2 join the parameters of an optimizer group, and partition the joined buffer; ZeRO 3 partitions each
parameter, and joins the parts. Under tensor parallelism both begin with the parameters' shards.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ucformat.errors import UnsupportedError, UsageError
from ucformat.exporters.base import Span
from ucformat.exporters.deepspeed.model import listed
from ucformat.exporters.pickle import SavedTensor, Storage
from ucformat.geometry.flat_buffer import FlatBuffer, align_up, part_size, round_robin_order
from ucformat.geometry.layout import Layout
from ucformat.geometry.local import Cut, Dim, local_dims, pieces_of
from ucformat.geometry.placement import axes_of
from ucformat.geometry.tensor import TensorInfo, TensorList
from ucformat.schema import ITEMSIZE
from ucformat.sources.deepspeed.inference import PRESETS
from ucformat.sources.tp_merge.sharding import TP

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ucformat.exporters.deepspeed.model import OptimizerGroup
    from ucformat.exporters.deepspeed.options import DeepSpeedOptions, Engine
    from ucformat.geometry.tensor import Piece

_START_ALIGNMENT = 2  # elements: `nccl_start_alignment_factor`
_ALIGNMENT = 16  # bytes: of parameters under `parameter_alignment`


class Shards:
    """What each tensor-parallel rank holds of each tensor."""

    def __init__(self, options: DeepSpeedOptions, tp: int, infos: Mapping[str, TensorInfo]) -> None:
        self._bound = None
        if tp == 1:
            return
        if options.layout is None:
            raise UsageError(
                f"how parameters are sharded over {tp} tensor-parallel ranks is not known",
                hint="pass layout (--layout), rules over the axis `tp` or the preset `llama`; or tp=1 (--tp 1)",
            )
        layout = _layout(options.layout, tp)
        if layout.mesh.size != tp:
            raise UsageError(f"the layout is of {layout.mesh.size} ranks instead of {tp} tensor-parallel ones")
        self._keys = {name: info.key for name, info in infos.items()}
        self._bound = layout.bind(TensorList(tuple(infos.values())))

    def dims(self, name: str, shape: tuple[int, ...], rank: int) -> tuple[Dim, ...]:
        """The dims of a rank's shard."""
        if self._bound is None:
            return tuple(map(Dim.whole, shape))
        placed = self._bound.placed(self._keys[name])
        at = placed.mesh.coordinate(rank)
        cuts = tuple(Cut(s, placed.mesh.degree(axes_of(s)), placed.mesh.index(axes_of(s), at)) for s in placed.shards)
        return local_dims(shape, cuts)

    def cuts(self, name: str) -> bool:
        """Whether ranks hold different parts of a tensor."""
        return self._bound is not None and bool(self._bound.placed(self._keys[name]).shards)

    def saved(self, name: str, info: TensorInfo, rank: int, fill: bool) -> SavedTensor:  # noqa: FBT001
        """A rank's shard as a tensor of its own."""
        dims = self.dims(name, info.shape, rank) if info.shape else ()
        shape = tuple(d.size for d in dims)
        pieces = ((info, piece) for piece in pieces_of(dims)[0]) if fill and 0 not in shape else ()
        return SavedTensor(Storage(Span(info.dtype, math.prod(shape), tuple(pieces))), shape)


def _layout(given: Layout | Mapping[str, object] | str, tp: int) -> Layout:
    if isinstance(given, str):
        if given not in PRESETS:
            raise UsageError(f"there is no preset {given!r}", hint=f"there are: {', '.join(PRESETS)}")
        return Layout({TP: tp}, PRESETS[given])
    return given if isinstance(given, Layout) else Layout.parse(given)


@dataclass(slots=True)
class FlatGroup:
    """A flat group of one tensor-parallel rank.

    Attributes:
        dims: what the tensor-parallel rank holds of each parameter, in order.
        buffer: the flat buffer over the ranks that share the group.
        paddings: elements of padding after each parameter.
        ranks: the data-parallel ranks that share the group, in the order of their partitions.
    """

    number: int
    group: OptimizerGroup
    dims: dict[str, tuple[Dim, ...]]
    buffer: FlatBuffer
    paddings: list[int]
    ranks: range

    def part_of(self, rank: int) -> dict[str, tuple[int, int, int]]:
        """What of each parameter a rank's partition holds: its first element, the end, and the place."""
        return self.buffer.on(self.ranks.index(rank))

    def padding(self, rank: int) -> int:
        """Elements of a rank's partition that belong to no parameter."""
        return self.buffer.padding(self.ranks.index(rank))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the parameters."""
        return {name: tuple(d.size for d in dims) for name, dims in self.dims.items()}

    def saved(self, infos: Mapping[str, TensorInfo], rank: int, fill: bool, spare: int = 0) -> SavedTensor:  # noqa: FBT001
        """A data-parallel rank's partition."""
        size = self.buffer.size - spare
        found = self._pieces(infos, rank) if fill else ()
        dtype = next(infos[name].dtype for name in self.dims)
        return SavedTensor(Storage(Span(dtype, size, tuple(found))), (size,))

    def _pieces(self, infos: Mapping[str, TensorInfo], rank: int) -> Iterator[tuple[TensorInfo, Piece]]:
        for name, (start, stop, at) in self.part_of(rank).items():
            for piece in pieces_of(self.dims[name], (start, stop), at)[0]:
                yield infos[name], piece


def flat_groups(engine: Engine, groups: Sequence[OptimizerGroup], shards: Shards, rank: int) -> list[FlatGroup]:
    """The flat groups of a tensor-parallel rank."""
    found: list[FlatGroup] = []
    for number, group in enumerate(groups):
        names = [n for n in group.names if group.masters[n].size]
        _check_joined(group, names)
        dims = {n: shards.dims(n, group.masters[n].shape, rank) for n in names}
        if engine.stage == 3:
            found += _partitioned(engine, number, group, dims)
        else:
            found.append(_joined(engine, number, group, dims))
    return found


def _joined(engine: Engine, number: int, group: OptimizerGroup, dims: dict[str, tuple[Dim, ...]]) -> FlatGroup:
    """All parameters of an optimizer group, of which each rank gets a partition (stage 0: of one rank, not padded)."""
    names, ranks = list(dims), group.ranks or range(engine.dp)
    if engine.stage and engine.flag("round_robin_gradients"):
        names = [names[i] for i in round_robin_order(len(names), len(ranks))]
    aligned = bool(engine.stage) and engine.flag("parameter_alignment")
    unit = _ALIGNMENT // math.gcd(_ALIGNMENT, ITEMSIZE[engine.dtype]) if aligned else 1
    buffer, paddings = FlatBuffer(), []
    for name in names:
        numel = math.prod(d.size for d in dims[name])
        padding = -(buffer.end + numel) % unit if name != names[-1] else 0
        buffer.append(name, numel, padding=padding)
        paddings.append(padding)
    parts = len(ranks)
    buffer.size = align_up(buffer.end, _START_ALIGNMENT * parts) // parts if engine.stage else buffer.end
    return FlatGroup(number, group, {n: dims[n] for n in names}, buffer, paddings, ranks)


def _partitioned(
    engine: Engine, number: int, group: OptimizerGroup, dims: dict[str, tuple[Dim, ...]]
) -> Iterator[FlatGroup]:
    """The parts of parameters; another flat group begins where one has reached `sub_group_size`."""
    numels = {n: math.prod(d.size for d in found) for n, found in dims.items()}
    left = sum(part_size(numel, engine.dp) for numel in numels.values())
    limit = min(left, engine.sub_group_size)
    buffer = FlatBuffer()
    for name, numel in numels.items():
        buffer.append_part(name, numel, part_size(numel, engine.dp))
        if buffer.end >= limit or name == next(reversed(numels)):
            buffer.size = buffer.end
            yield FlatGroup(number, group, {n: dims[n] for n in buffer.slots}, buffer, [], range(engine.dp))
            buffer = FlatBuffer()


def _check_joined(group: OptimizerGroup, names: Sequence[str]) -> None:
    """UnsupportedError if the states of these parameters of a group cannot be joined to flat buffers."""
    for state, infos in {"master": group.masters, **group.shaped()}.items():
        wrong = [n for n in names if n in infos and infos[n].shape != group.masters[n].shape]
        if wrong:
            raise UnsupportedError(
                f"the state {state} of {listed(wrong)} has another shape than the parameter, and no place in a flat "
                "partition of ZeRO",
                hint="leave the state out (--state), or export to stage 0",
            )
        check_dtype(state, infos, names)
    for state, held in {**group.states, **group.plain()}.items():
        if lacking := [n for n in names if n not in held]:
            raise UnsupportedError(
                f"{listed(lacking)} have no {state}, which other parameters of their optimizer group have; ZeRO has "
                "the same states for all of a group",
                hint="such parameters never had a gradient: leave the state out (--state), or export to stage 0",
            )
    for state, values in group.plain().items():
        distinct = {repr(values[n]) for n in names}
        if len(distinct) > 1:
            raise UnsupportedError(
                f"{state} differs between parameters of one optimizer group ({', '.join(sorted(distinct)[:4])}); ZeRO "
                "has one value for all",
                hint="put them in separate groups, or export to stage 0",
            )


def check_dtype(state: str, infos: Mapping[str, TensorInfo], names: Sequence[str]) -> None:
    """Check that tensors that share a flat buffer have one dtype."""
    dtypes = {infos[n].dtype: n for n in names if n in infos}
    if len(dtypes) > 1:
        found = " and ".join(f"{dtype} ({name})" for dtype, name in dtypes.items())
        raise UnsupportedError(
            f"the {state} of an optimizer group is {found}; a flat partition of ZeRO has one dtype",
            hint="cast them by a view",
        )
