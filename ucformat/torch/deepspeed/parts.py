"""The parts of parameters that the optimizer of this rank holds in a DeepSpeed engine.

The flat buffers of all ZeRO stages have one form here. Classes of DeepSpeed 0.19.8:

- ZeRO 0 in fp32: the torch optimizer, with the module's own parameters.
- ZeRO 0 in bf16 or fp16: `fp32_groups`, one fp32 tensor for each parameter (FP16_UnfusedOptimizer); with a fused Adam
  `fp32_groups_flat`, one flat tensor for each group, its parameters one after another (FP16_Optimizer).
- ZeRO 1 and 2: this rank's partition of each group's flat buffer, in which `round_robin_bit16_offsets` are the offsets
  of parameters. (`_hp_mapping` of a parameter is the same, except under `round_robin_gradients`, where DeepSpeed 0.19.8
  computes it for another order.)
- BF16_Optimizer (ZeRO 1, bf16, gradients in fp32): the same without alignment.
- ZeRO 3: a flat buffer for each sub-group, this rank's part of each of its parameters one after another.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ucformat.errors import UnsupportedError
from ucformat.format.distribution import Distribution, RankMesh
from ucformat.geometry.flat_buffer import FlatBuffer, part_range

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

    from ucformat.torch.deepspeed.engine import EngineParts


@dataclass(frozen=True, slots=True)
class OptimizerTensor:
    """A tensor that the torch optimizer updates on this rank: one `whole` parameter in its own shape, or a flat buffer.

    `shapes` has all parameters in the tensor, over all ranks, in order; they share its plain states. `parts` has those
    of which this rank holds any elements: `[start, stop)` of the flattened parameter, and their offset in the tensor.
    `distributions` are those of the parameters in a partitioned flat buffer.
    """

    optimizer: torch.optim.Optimizer
    group: int
    tensor: torch.Tensor
    whole: bool
    shapes: Mapping[str, tuple[int, ...]]
    parts: Mapping[str, tuple[int, int, int]]
    distributions: Mapping[str, Distribution] = field(default_factory=dict)

    @property
    def states(self) -> dict[str, Any]:
        """The optimizer's states of the tensor by name, tensors and plain numbers; empty before the first step."""
        found: dict[str, Any] = self.optimizer.state.get(self.tensor) or {}
        return found


def shape_of(parameter: Any) -> tuple[int, ...]:
    """Return the global shape of a parameter, which ZeRO 3 may have partitioned."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def partition_of(optimizer: Any, parameter: Any) -> tuple[int, int]:
    """Return the range of elements of a flattened parameter in this rank's partition under ZeRO 3."""
    part = parameter.partition_numel()
    return part_range(math.prod(parameter.ds_shape), part, _rank_of(optimizer, parameter))


def partitions_of(parameter: Any) -> Distribution | None:
    """Return how ranks hold a parameter that ZeRO 3 has partitioned; None if it has no elements."""
    import torch.distributed as dist

    ranks = dist.get_process_group_ranks(parameter.ds_process_group)
    return _distribution(ranks, math.prod(parameter.ds_shape), parameter.partition_numel(), 0)


def _distribution(ranks: Sequence[int], numel: int, part: int, position: int) -> Distribution | None:
    return Distribution(RankMesh.of((len(ranks),), ranks), (), 0, part, position) if numel else None


def _rank_of(optimizer: Any, parameter: Any) -> int:
    """This rank among those over which ZeRO 3 has partitioned a parameter."""
    import torch.distributed as dist

    if optimizer is not None:
        return int(optimizer._get_param_partition_rank(parameter))  # noqa: SLF001 - the only way
    return int(dist.get_rank(parameter.ds_process_group))


def optimizer_tensors(trainer: EngineParts) -> tuple[OptimizerTensor, ...]:
    """Return the tensors that the torch optimizer of this rank updates, by group; empty without an optimizer."""
    optimizer, inner = trainer.optimizer, trainer.inner
    if optimizer is None or inner is None:
        return ()
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return tuple(_zero3(trainer, optimizer))
    if hasattr(optimizer, "single_partition_of_fp32_groups"):
        return tuple(_zero12(trainer, optimizer))
    if hasattr(optimizer, "fp32_groups_flat_partition"):
        return tuple(_bf16(trainer, optimizer))
    if hasattr(optimizer, "fp32_groups_flat"):
        return tuple(_fused(trainer, optimizer))
    if hasattr(optimizer, "fp32_groups"):
        groups = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
        return tuple(
            _one(trainer, g, p, q) for g, (low, high) in enumerate(groups) for p, q in zip(low, high, strict=True)
        )
    if optimizer is inner:
        return tuple(_one(trainer, g, p, p) for g, group in enumerate(inner.param_groups) for p in group["params"])
    raise UnsupportedError(
        f"the optimizer {type(optimizer).__name__} cannot be saved or loaded yet",
        hint="known are those of ZeRO 0 to 3 in fp32, bf16 and fp16; engine.save_checkpoint may know it",
    )


def _inner(trainer: EngineParts) -> torch.optim.Optimizer:
    assert trainer.inner is not None  # noqa: S101 - nothing is held without one
    return trainer.inner


def _one(trainer: EngineParts, group: int, parameter: torch.Tensor, master: torch.Tensor) -> OptimizerTensor:
    name, shape = trainer.name_of(parameter), tuple(parameter.shape)
    parts = {name: (0, math.prod(shape), 0)}
    return OptimizerTensor(_inner(trainer), group, master, whole=True, shapes={name: shape}, parts=parts)


def _buffer(trainer: EngineParts, parameters: Sequence[Any], size: int) -> FlatBuffer:
    """Parameters that are joined one after another."""
    buffer = FlatBuffer(size=size)
    for p in parameters:
        buffer.append(trainer.name_of(p), math.prod(shape_of(p)))
    return buffer


def _flat(
    trainer: EngineParts,
    group: int,
    flat: torch.Tensor,
    parameters: Sequence[Any],
    buffer: FlatBuffer,
    rank: int = 0,
    ranks: Sequence[int] = (),
) -> OptimizerTensor:
    """A rank's part of the flat buffer that these parameters are joined in, and that these ranks have partitioned."""
    shapes = {trainer.name_of(p): shape_of(p) for p in parameters}
    found: dict[str, Distribution | None] = {}
    if ranks:
        for name, shape in shapes.items():
            slot, numel = buffer.slots[name], math.prod(shape)
            part, position = (len(slot), 0) if name in buffer.partitioned else (buffer.size, slot.start)
            found[name] = _distribution(ranks, numel, part, position)
    distributions = {name: d for name, d in found.items() if d is not None}
    inner, parts = _inner(trainer), buffer.on(rank)
    return OptimizerTensor(inner, group, flat, whole=False, shapes=shapes, parts=parts, distributions=distributions)


def _fused(trainer: EngineParts, optimizer: Any) -> Iterator[OptimizerTensor]:
    for g, (low, flat) in enumerate(zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True)):
        yield _flat(trainer, g, flat, low, _buffer(trainer, low, flat.numel()))


def _zero12(trainer: EngineParts, optimizer: Any) -> Iterator[OptimizerTensor]:
    import torch.distributed as dist

    groups = zip(optimizer.round_robin_bit16_groups, optimizer.round_robin_bit16_offsets, strict=True)
    for g, (parameters, offsets) in enumerate(groups):
        flat = optimizer.single_partition_of_fp32_groups[g]
        buffer = FlatBuffer(size=flat.numel())
        for p, offset in zip(parameters, offsets, strict=True):
            buffer.slots[trainer.name_of(p)] = range(offset, offset + math.prod(shape_of(p)))
        ranks = optimizer.real_dp_process_group[g]
        yield _flat(trainer, g, flat, parameters, buffer, dist.get_rank(ranks), dist.get_process_group_ranks(ranks))


def _bf16(trainer: EngineParts, optimizer: Any) -> Iterator[OptimizerTensor]:
    import torch.distributed as dist

    for g, parameters in enumerate(optimizer.bf16_groups):
        flat = optimizer.fp32_groups_flat_partition[g]
        buffer = _buffer(trainer, parameters, flat.numel())
        ranks = optimizer.real_dp_process_group[g]
        yield _flat(trainer, g, flat, parameters, buffer, dist.get_rank(ranks), dist.get_process_group_ranks(ranks))


def _zero3(trainer: EngineParts, optimizer: Any) -> Iterator[OptimizerTensor]:
    import torch.distributed as dist

    for s, (parameters, flat) in enumerate(
        zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True)
    ):
        buffer = FlatBuffer(size=flat.numel())
        for p in parameters:
            buffer.append_part(trainer.name_of(p), math.prod(shape_of(p)), p.partition_numel())
        rank = _rank_of(optimizer, parameters[0])  # DeepSpeed has all of a sub-group in one process group
        ranks = dist.get_process_group_ranks(parameters[0].ds_process_group)
        yield _flat(trainer, optimizer.sub_group_to_group_id[s], flat, parameters, buffer, rank, ranks)
