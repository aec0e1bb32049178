"""The state dicts of DeepSpeed's optimizers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucformat.errors import UnsupportedError
from ucformat.exporters.deepspeed.objects import VERSION
from ucformat.exporters.deepspeed.options import ZERO3
from ucformat.exporters.deepspeed.values import ValueDecoder, address, loss_scaler, stage_of
from ucformat.exporters.values import whole
from ucformat.storage.concurrency import map_io

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ucformat.checkpoint import Checkpoint
    from ucformat.exporters.deepspeed.flat import FlatGroup, Shards
    from ucformat.exporters.deepspeed.model import OptimizerGroup
    from ucformat.exporters.deepspeed.objects import Values
    from ucformat.exporters.deepspeed.options import Engine
    from ucformat.geometry.tensor import TensorInfo


def _base(
    groups: Sequence[OptimizerGroup], members: Sequence[Sequence[int]], states: dict[int, dict[str, Any]]
) -> dict[str, Any]:
    """The state dict of the optimizer inside, by the numbers of its tensors in each group."""
    decode = ValueDecoder({})
    hypers = [decode.hyper(group.document) for group in groups]
    return {
        "state": {i: found for i, found in states.items() if found},
        "param_groups": [{**hyper, "params": list(of)} for hyper, of in zip(hypers, members, strict=True)],
    }


def _flat_states(flat: FlatGroup, rank: int, fill: bool) -> dict[str, Any]:  # noqa: FBT001
    """The states of a rank's partition of a flat group."""
    if not flat.dims:
        return {}
    first, group, decode = next(iter(flat.dims)), flat.group, ValueDecoder({})
    found: dict[str, Any] = {state: decode(values[first]) for state, values in group.plain().items()}
    found |= {state: whole(infos[first]) for state, infos in group.scalars().items()}
    return found | {state: flat.saved(infos, rank, fill) for state, infos in group.shaped().items()}


def _members(groups: Sequence[OptimizerGroup], flat: Sequence[FlatGroup]) -> list[list[int]]:
    """The numbers of the flat groups of each optimizer group."""
    return [[i for i, of in enumerate(flat) if of.number == number] for number in range(len(groups))]


def zero_optimizer(
    engine: Engine,
    groups: Sequence[OptimizerGroup],
    values: Values,
    flat: Sequence[FlatGroup],
    rank: int,
    fill: bool,  # noqa: FBT001
) -> dict[str, Any]:
    """The state dict of `DeepSpeedZeroOptimizer` (ZeRO 1 and 2), or of `DeepSpeedZeroOptimizer_Stage3`."""
    base = _base(groups, _members(groups, flat), {i: _flat_states(of, rank, fill) for i, of in enumerate(flat)})
    out: dict[str, Any] = {
        "loss_scaler": loss_scaler(values.scale),
        "dynamic_loss_scale": values.scale["dynamic"],
        "overflow": values.overflow,
        "zero_stage": stage_of(engine.stage),
    }
    if engine.stage == ZERO3:
        masters = [of.saved(of.group.masters, rank, fill) for of in flat]
        return out | {"partition_count": engine.dp, "optimizer_state_dict": base, "fp32_flat_groups": masters}
    paddings = [of.padding(rank) for of in flat]
    parts = [of.part_of(rank) for of in flat]
    return {
        **out,
        **({} if values.clip_grad is None else {"clip_grad": values.clip_grad}),
        "base_optimizer_state": base,
        "single_partition_of_fp32_groups": [
            of.saved(of.group.masters, rank, fill, spare) for of, spare in zip(flat, paddings, strict=True)
        ],
        "group_paddings": paddings,
        "param_alignment_paddings": [of.paddings for of in flat],
        "partition_count": [len(of.ranks) for of in flat],
        "ds_version": VERSION,
        "param_slice_mappings": [{n: address(at, b - a) for n, (a, b, at) in part.items()} for part in parts],
    }


def plain_optimizer(
    engine: Engine,
    groups: Sequence[OptimizerGroup],
    values: Values,
    shards: Shards,
    flat: Sequence[FlatGroup] | None,
    rank: int,
    fill: bool,  # noqa: FBT001
) -> dict[str, Any]:
    """The state dict of the optimizer at stage 0: in 16 bits that of a wrapper with fp32 copies.

    Args:
        flat: the flat groups of FusedAdam; None for other optimizers.
    """
    single = engine.dtype == "float32"
    names = [[n for n in group.names if single or group.masters[n].size] for group in groups]
    if flat is not None:
        base = _base(groups, _members(groups, flat), {i: _flat_states(of, 0, fill) for i, of in enumerate(flat)})
    else:
        states: dict[int, dict[str, Any]] = {}
        members: list[list[int]] = []
        for group, held in zip(groups, names, strict=True):
            members.append([len(states) + i for i in range(len(held))])
            states |= {len(states) + i: _single(group, n, shards, rank, fill) for i, n in enumerate(held)}
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
        out["fp32_groups_flat"] = [of.saved(of.group.masters, 0, fill) for of in flat]
        out["clip_grad"] = values.clip_grad or 0.0
    else:
        out["fp32_groups"] = [
            [shards.saved(n, group.masters[n], rank, fill) for n in held]
            for group, held in zip(groups, names, strict=True)
        ]
    return out


def _single(group: OptimizerGroup, name: str, shards: Shards, rank: int, fill: bool) -> dict[str, Any]:  # noqa: FBT001
    """The states of one parameter."""
    decode, shape = ValueDecoder({}), group.masters[name].shape
    found: dict[str, Any] = {state: decode(values[name]) for state, values in group.plain().items() if name in values}
    for state, infos in group.states.items():
        info = infos.get(name)
        if info is None:
            continue
        if info.shape not in ((), shape) and shards.cuts(name):
            raise UnsupportedError(
                f"{info.key} has another shape than the parameter, and is not sharded over tensor-parallel ranks",
                hint="leave the state out (--state)",
            )
        found[state] = shards.saved(name, info, rank, fill) if info.shape == shape else whole(info)
    return found


def check_scalars(source: Checkpoint, groups: Iterable[OptimizerGroup]) -> None:
    """Check that states of no dims (`step`) are the same for all parameters of a group, since ZeRO stores one."""

    def place(info: TensorInfo) -> tuple[tuple[str, int], ...]:
        return tuple((e.file, e.offset) for e in source.source.extents(info.key))

    for group in groups:
        for state, infos in group.scalars().items():
            distinct = {place(info): info for name, info in infos.items() if group.masters[name].size}
            if len(distinct) < 2:
                continue
            values = map_io(lambda info: source[info.key].read().tobytes(), list(distinct.values()))
            other = next((i for i, v in zip(distinct.values(), values, strict=True) if v != values[0]), None)
            if other is not None:
                first = next(iter(distinct.values()))
                raise UnsupportedError(
                    f"{state} of {other.name} differs from that of {first.name}, in one optimizer group; ZeRO has one "
                    "value for both",
                    hint="put them in separate groups before the checkpoint is saved, or export to stage 0",
                )
