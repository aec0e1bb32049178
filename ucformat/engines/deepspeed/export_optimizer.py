"""The state dicts of DeepSpeed's optimizers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ucformat.engines.deepspeed.export_model import ZERO3, some
from ucformat.engines.deepspeed.export_objects import (
    VERSION,
    ValueDecoder,
    address,
    loss_scaler,
    stage_of,
)
from ucformat.engines.deepspeed.inference import preset_layout
from ucformat.errors import UnsupportedError, UsageError
from ucformat.exporters.base import Span
from ucformat.exporters.pickle import SavedTensor, Storage
from ucformat.exporters.values import whole
from ucformat.geometry.flat_buffer import FlatBuffer, align_up, part_size, round_robin_order
from ucformat.geometry.layout import Layout
from ucformat.geometry.local import Dim, ShardAt, local_dims, pieces_of
from ucformat.geometry.placement import axes_of
from ucformat.geometry.tensor import TensorInfo, TensorList
from ucformat.schema import ITEMSIZE
from ucformat.storage.concurrency import map_io

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ucformat.checkpoint import Checkpoint
    from ucformat.engines.deepspeed.export_model import OptimizerGroup, TargetEngine
    from ucformat.engines.deepspeed.export_objects import Values
    from ucformat.engines.deepspeed.export_options import DeepSpeedExportOptions
    from ucformat.geometry.tensor import Piece


# The flat buffers of ZeRO: what of each parameter each rank's partition holds.
#
# ZeRO 1 and 2 join the parameters of an optimizer group, and partition the joined buffer; ZeRO 3
# partitions each parameter, and joins the parts. Under tensor parallelism both begin with the
# parameters' shards.


_START_ALIGNMENT = 2  # elements: `nccl_start_alignment_factor`
_ALIGNMENT = 16  # bytes: of parameters under `parameter_alignment`


class Shards:
    """What each tensor-parallel rank holds of each tensor."""

    def __init__(
        self, options: DeepSpeedExportOptions, tp: int, infos: Mapping[str, TensorInfo]
    ) -> None:
        self._bound = None
        if tp == 1:
            return
        if options.layout is None:
            raise UsageError(
                f"how parameters are sharded over {tp} tensor-parallel ranks is not known",
                hint=(
                    "pass layout (--layout), rules over the axis `tp` or the preset `llama`; or "
                    "tp=1 (--tp 1)"
                ),
            )
        layout = _layout(options.layout, tp)
        if layout.mesh.size != tp:
            raise UsageError(
                f"the layout is of {layout.mesh.size} ranks instead of {tp} tensor-parallel ones"
            )
        self._keys = {name: info.key for name, info in infos.items()}
        self._bound = layout.bind(TensorList(tuple(infos.values())))

    def dims(self, name: str, shape: tuple[int, ...], rank: int) -> tuple[Dim, ...]:
        """The dims of a rank's shard."""
        if self._bound is None:
            return tuple(map(Dim.whole, shape))
        placed = self._bound.placed(self._keys[name])
        coordinate = placed.mesh.coordinate(rank)
        cuts = tuple(
            ShardAt(s, placed.mesh.degree(axes_of(s)), placed.mesh.index(axes_of(s), coordinate))
            for s in placed.shards
        )
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


def _layout(layout: Layout | Mapping[str, object] | str, tp: int) -> Layout:
    if isinstance(layout, str):
        return preset_layout(layout, tp)
    return layout if isinstance(layout, Layout) else Layout.parse(layout)


@dataclass(slots=True)
class FlatGroup:
    """A flat group of one tensor-parallel rank.

    Attributes:
        dims: what the tensor-parallel rank holds of each parameter, in order.
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
        """A rank's part of each parameter: its first element, the end, and the place."""
        return self.buffer.on(self.ranks.index(rank))

    def padding(self, rank: int) -> int:
        """Elements of a rank's partition that belong to no parameter."""
        return self.buffer.padding(self.ranks.index(rank))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the parameters."""
        return {name: tuple(d.size for d in dims) for name, dims in self.dims.items()}

    def saved(
        self,
        infos: Mapping[str, TensorInfo],
        rank: int,
        fill: bool,  # noqa: FBT001
        spare: int = 0,
    ) -> SavedTensor:
        """A data-parallel rank's partition."""
        size = self.buffer.size - spare
        pieces = self._pieces(infos, rank) if fill else ()
        dtype = next(infos[name].dtype for name in self.dims)
        return SavedTensor(Storage(Span(dtype, size, tuple(pieces))), (size,))

    def _pieces(
        self, infos: Mapping[str, TensorInfo], rank: int
    ) -> Iterator[tuple[TensorInfo, Piece]]:
        for name, (start, stop, offset) in self.part_of(rank).items():
            for piece in pieces_of(self.dims[name], (start, stop), offset)[0]:
                yield infos[name], piece


def flat_groups(
    engine: TargetEngine, groups: Sequence[OptimizerGroup], shards: Shards, rank: int
) -> list[FlatGroup]:
    """The flat groups of a tensor-parallel rank."""
    flat: list[FlatGroup] = []
    for number, group in enumerate(groups):
        names = [n for n in group.names if group.masters[n].size]
        _check_joined(group, names)
        dims = {n: shards.dims(n, group.masters[n].shape, rank) for n in names}
        if engine.stage == 3:
            flat += _partitioned(engine, number, group, dims)
        else:
            flat.append(_joined(engine, number, group, dims))
    return flat


def _joined(
    engine: TargetEngine, number: int, group: OptimizerGroup, dims: dict[str, tuple[Dim, ...]]
) -> FlatGroup:
    """All parameters of an optimizer group, partitioned over the ranks (not at stage 0)."""
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
    parts, buffer.size = len(ranks), buffer.end
    if engine.stage:
        buffer.size = align_up(buffer.end, _START_ALIGNMENT * parts) // parts
    return FlatGroup(number, group, {n: dims[n] for n in names}, buffer, paddings, ranks)


def _partitioned(
    engine: TargetEngine, number: int, group: OptimizerGroup, dims: dict[str, tuple[Dim, ...]]
) -> Iterator[FlatGroup]:
    """The parts of parameters; another flat group begins where one has reached `sub_group_size`."""
    numels = {n: math.prod(d.size for d in rank_dims) for n, rank_dims in dims.items()}
    total = sum(part_size(numel, engine.dp) for numel in numels.values())
    limit = min(total, engine.sub_group_size)
    buffer = FlatBuffer()
    for name, numel in numels.items():
        buffer.append_part(name, numel, part_size(numel, engine.dp))
        if buffer.end >= limit or name == next(reversed(numels)):
            buffer.size = buffer.end
            mine = {n: dims[n] for n in buffer.slots}
            yield FlatGroup(number, group, mine, buffer, [], range(engine.dp))
            buffer = FlatBuffer()


def _check_joined(group: OptimizerGroup, names: Sequence[str]) -> None:
    """UnsupportedError if states of these parameters cannot be joined to flat buffers."""
    for state, infos in {"master": group.masters, **group.shaped()}.items():
        wrong = [n for n in names if n in infos and infos[n].shape != group.masters[n].shape]
        if wrong:
            raise UnsupportedError(
                f"the state {state} of {some(wrong)} has another shape than the parameter, and "
                "no place in a flat "
                "partition of ZeRO",
                hint="leave the state out (--state), or export to stage 0",
            )
        check_dtype(state, infos, names)
    for state, by_name in {**group.states, **group.plain()}.items():
        if lacking := [n for n in names if n not in by_name]:
            raise UnsupportedError(
                f"{some(lacking)} have no {state}, which other parameters of their optimizer "
                "group have; ZeRO has "
                "the same states for all of a group",
                hint=(
                    "such parameters never had a gradient: leave the state out (--state), or "
                    "export to stage 0"
                ),
            )
    for state, values in group.plain().items():
        distinct = {repr(values[n]) for n in names}
        if len(distinct) > 1:
            raise UnsupportedError(
                f"{state} differs between parameters of one optimizer group "
                f"({', '.join(sorted(distinct)[:4])}); ZeRO "
                "has one value for all",
                hint="put them in separate groups, or export to stage 0",
            )


def check_dtype(state: str, infos: Mapping[str, TensorInfo], names: Sequence[str]) -> None:
    """Check that tensors that share a flat buffer have one dtype."""
    dtypes = {infos[n].dtype: n for n in names if n in infos}
    if len(dtypes) > 1:
        kinds = " and ".join(f"{dtype} ({name})" for dtype, name in dtypes.items())
        raise UnsupportedError(
            f"the {state} of an optimizer group is {kinds}; a flat partition of ZeRO has one dtype",
            hint="cast them by a view",
        )


def _base(
    groups: Sequence[OptimizerGroup],
    members: Sequence[Sequence[int]],
    states: dict[int, dict[str, Any]],
) -> dict[str, Any]:
    """The state dict of the optimizer inside, by the numbers of its tensors in each group."""
    decode = ValueDecoder({})
    pairs = zip(groups, members, strict=True)
    hypers = [{**decode.hyper(group.document), "params": list(mine)} for group, mine in pairs]
    return {"state": {i: s for i, s in states.items() if s}, "param_groups": hypers}


def _flat_states(flat: FlatGroup, rank: int, fill: bool) -> dict[str, Any]:  # noqa: FBT001
    """The states of a rank's partition of a flat group."""
    if not flat.dims:
        return {}
    first, group, decode = next(iter(flat.dims)), flat.group, ValueDecoder({})
    states: dict[str, Any] = {s: decode(values[first]) for s, values in group.plain().items()}
    states |= {state: whole(infos[first]) for state, infos in group.scalars().items()}
    return states | {s: flat.saved(infos, rank, fill) for s, infos in group.shaped().items()}


def _members(groups: Sequence[OptimizerGroup], flat: Sequence[FlatGroup]) -> list[list[int]]:
    """The numbers of the flat groups of each optimizer group."""
    numbers = [flat_group.number for flat_group in flat]
    return [[i for i, n in enumerate(numbers) if n == number] for number in range(len(groups))]


def zero_optimizer(
    engine: TargetEngine,
    groups: Sequence[OptimizerGroup],
    values: Values,
    flat: Sequence[FlatGroup],
    rank: int,
    fill: bool,  # noqa: FBT001
) -> dict[str, Any]:
    """The state dict of `DeepSpeedZeroOptimizer`, or of `DeepSpeedZeroOptimizer_Stage3`."""
    states = {i: _flat_states(flat_group, rank, fill) for i, flat_group in enumerate(flat)}
    base = _base(groups, _members(groups, flat), states)
    out: dict[str, Any] = {
        "loss_scaler": loss_scaler(values.scale),
        "dynamic_loss_scale": values.scale["dynamic"],
        "overflow": values.overflow,
        "zero_stage": stage_of(engine.stage),
    }
    if engine.stage == ZERO3:
        masters = [flat_group.saved(flat_group.group.masters, rank, fill) for flat_group in flat]
        out |= {"partition_count": engine.dp, "optimizer_state_dict": base}
        return out | {"fp32_flat_groups": masters}
    paddings = [flat_group.padding(rank) for flat_group in flat]
    padded = zip(flat, paddings, strict=True)
    parts = (flat_group.part_of(rank).items() for flat_group in flat)
    return {
        **out,
        **({} if values.clip_grad is None else {"clip_grad": values.clip_grad}),
        "base_optimizer_state": base,
        "single_partition_of_fp32_groups": [
            flat_group.saved(flat_group.group.masters, rank, fill, spare)
            for flat_group, spare in padded
        ],
        "group_paddings": paddings,
        "param_alignment_paddings": [flat_group.paddings for flat_group in flat],
        "partition_count": [len(flat_group.ranks) for flat_group in flat],
        "ds_version": VERSION,
        "param_slice_mappings": [
            {n: address(offset, b - a) for n, (a, b, offset) in p} for p in parts
        ],
    }


class TensorParallelPart(NamedTuple):
    """What a file of one tensor-parallel rank holds; elements only if they are to be filled in."""

    shards: Shards
    rank: int
    fill: bool

    def saved(self, name: str, info: TensorInfo) -> SavedTensor:
        """The rank's shard of a tensor."""
        return self.shards.saved(name, info, self.rank, self.fill)


def plain_optimizer(
    engine: TargetEngine,
    groups: Sequence[OptimizerGroup],
    values: Values,
    part: TensorParallelPart,
    flat: Sequence[FlatGroup] | None,
) -> dict[str, Any]:
    """The state dict of the optimizer at stage 0: in 16 bits that of a wrapper with fp32 copies.

    Args:
        flat: the flat groups of FusedAdam; None for other optimizers.
    """
    single = engine.dtype == "float32"
    names = [[n for n in group.names if single or group.masters[n].size] for group in groups]
    states: dict[int, dict[str, Any]] = {}
    if flat is not None:
        states = {i: _flat_states(flat_group, 0, part.fill) for i, flat_group in enumerate(flat)}
        members = _members(groups, flat)
    else:
        members = []
        for group, mine in zip(groups, names, strict=True):
            numbers = range(len(states), len(states) + len(mine))
            members.append(list(numbers))
            singles = (_single(group, name, part) for name in mine)
            states.update(zip(numbers, singles, strict=True))
    base = _base(groups, members, states)
    if single:
        return base
    out: dict[str, Any] = {}
    scale = values.scale
    if flat is None or engine.dtype == "float16":
        out |= {"dynamic_loss_scale": scale["dynamic"], "cur_scale": scale["cur_scale"]}
        out["cur_iter"] = scale.get("cur_iter", engine.step)
    if scale["dynamic"]:
        out |= {k: scale[k] for k in ("last_overflow_iter", "scale_factor", "scale_window")}
    out["optimizer_state_dict"] = base
    if flat is not None:
        out["fp32_groups_flat"] = [
            flat_group.saved(flat_group.group.masters, 0, part.fill) for flat_group in flat
        ]
        out["clip_grad"] = values.clip_grad or 0.0
    else:
        pairs = zip(groups, names, strict=True)
        out["fp32_groups"] = [[part.saved(n, g.masters[n]) for n in mine] for g, mine in pairs]
    return out


def _single(group: OptimizerGroup, name: str, part: TensorParallelPart) -> dict[str, Any]:
    """The states of one parameter."""
    decode, shape = ValueDecoder({}), group.masters[name].shape
    plain = {s: values[name] for s, values in group.plain().items() if name in values}
    states: dict[str, Any] = {state: decode(value) for state, value in plain.items()}
    for state, infos in group.states.items():
        info = infos.get(name)
        if info is None:
            continue
        if info.shape not in ((), shape) and part.shards.cuts(name):
            raise UnsupportedError(
                f"{info.key} has another shape than the parameter, and is not sharded over "
                "tensor-parallel ranks",
                hint="leave the state out (--state)",
            )
        states[state] = part.saved(name, info) if info.shape == shape else whole(info)
    return states


def check_scalars(source: Checkpoint, groups: Iterable[OptimizerGroup]) -> None:
    """Check that all parameters of a group have the same `step`, of which ZeRO stores one."""

    def place(info: TensorInfo) -> tuple[tuple[str, int], ...]:
        return tuple((e.file, e.offset) for e in source.source.extents(info.key))

    for group in groups:
        for state, infos in group.scalars().items():
            filled = (info for name, info in infos.items() if group.masters[name].size)
            distinct = list({place(info): info for info in filled}.values())
            if len(distinct) < 2:
                continue
            values = map_io(lambda info: source[info.key].read().tobytes(), distinct)
            differing = (i for i, v in zip(distinct, values, strict=True) if v != values[0])
            if (other := next(differing, None)) is not None:
                first = distinct[0]
                raise UnsupportedError(
                    f"{state} of {other.name} differs from that of {first.name}, in one "
                    "optimizer group; ZeRO has one "
                    "value for both",
                    hint=(
                        "put them in separate groups before the checkpoint is saved, or export "
                        "to stage 0"
                    ),
                )
