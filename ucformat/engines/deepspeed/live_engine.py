"""Inspects DeepSpeed engines: what is supported, and names of parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ucformat.engines.deepspeed.live_experts import local_experts
from ucformat.engines.deepspeed.live_tensor_parallel import (
    tensor_parallel,
    tensor_parallel_ranks,
)
from ucformat.errors import UnsupportedError, UsageError
from ucformat.geometry.distribution import Distribution, RankMesh
from ucformat.geometry.flat_buffer import FlatBuffer, part_range

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ucformat.engines.deepspeed.live_experts import LocalExperts
    from ucformat.engines.deepspeed.live_tensor_parallel import TensorParallel
    from ucformat.torch.state.local import LocalShard


#: Optimizers that keep the residual of gradient compression on each rank.
_ONE_BIT = ("OnebitAdam", "OnebitLamb", "ZeroOneAdam")


@dataclass(frozen=True)
class EngineParts:
    """The parts of a DeepSpeed engine that is supported, as far as this rank has them.

    `optimizer` is DeepSpeed's, `inner` the torch optimizer inside it, which may be the same; both
    are None if the engine only evaluates. `parameters` and `buffers` are those of this rank's stage
    and experts, under their names in the whole model. Tied parameters are listed once; `aliases`
    maps their further names to that name. `stages` is the number of pipeline stages.
    """

    engine: Any
    stage: int
    optimizer: Any
    inner: torch.optim.Optimizer | None
    parameters: Mapping[str, torch.nn.Parameter]
    buffers: Mapping[str, torch.Tensor]
    aliases: Mapping[str, str]
    stages: int
    experts: LocalExperts
    tensor_parallel: TensorParallel | None

    @property
    def rank(self) -> int:
        """The rank of this process among all."""
        return int(self.engine.global_rank)

    @property
    def layout(self) -> dict[str, Any]:
        """The ZeRO stage and the numbers of ranks, in the form of manifests."""
        degrees: dict[str, Any] = {"pp": self.stages} if self.stages > 1 else {}
        degrees |= {"tp": self.tensor_parallel.degree} if self.tensor_parallel else {}
        degrees |= {"ep": self.experts.degrees} if self.experts else {}
        return {"zero": self.stage, "dp": int(self.engine.seq_dp_world_size), **degrees}

    @property
    def is_whole(self) -> bool:
        """Whether each rank has all modules of the model."""
        return self.stages == 1 and not self.experts

    def provides(self, name: str) -> bool:
        """Check whether this rank is the first of those whose modules have a tensor or a value."""
        layer = self.experts.layer_of(name)
        if layer is not None:
            return layer.is_first
        return bool(dist.get_rank(self.engine.seq_data_parallel_group) == 0)

    def whole(self, local: LocalShard) -> LocalShard:
        """Return the part of a tensor of the whole model, of that of this rank's module."""
        local = self.experts.whole(local)
        return local if self.tensor_parallel is None else self.tensor_parallel.whole(local)

    @cached_property
    def _names(self) -> dict[int, str]:
        return {id(parameter): name for name, parameter in self.parameters.items()}

    def name_of(self, parameter: torch.Tensor) -> str:
        """Return the name of a parameter."""
        name = self._names.get(id(parameter))
        if name is None:
            raise UnsupportedError(
                f"the optimizer has a tensor of shape {list(parameter.shape)} that is not a "
                "parameter of the module",
                hint=(
                    "register it in the module that is passed to deepspeed.initialize, so that "
                    "it has a name"
                ),
            )
        return name


def inspect_engine(engine: Any) -> EngineParts:
    """Return the parts of a DeepSpeed engine."""
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.utils import DummyOptim

    if not isinstance(engine, DeepSpeedEngine):
        raise UsageError(
            f"a {type(engine).__name__} is not a DeepSpeed engine",
            hint=(
                "pass the first result of deepspeed.initialize; for other models use "
                "ucformat.torch.save and load"
            ),
        )
    _refuse_engine(engine)
    module = engine.module
    experts = local_experts(engine)
    parameters = {experts.whole_name(n): p for n, p in module.named_parameters()}
    optimizer = engine.optimizer
    if isinstance(optimizer, DummyOptim) or not hasattr(optimizer, "param_groups"):
        optimizer = None
    if optimizer is not None:
        _refuse_optimizer(optimizer)
    for name, parameter in parameters.items():
        _refuse_parameter(name, parameter)
    first = {id(p): name for name, p in parameters.items()}
    named = module.named_parameters(remove_duplicate=False)
    every = {experts.whole_name(n): first[id(p)] for n, p in named}
    aliases = {alias: name for alias, name in every.items() if alias != name}
    inner = None if optimizer is None else getattr(optimizer, "optimizer", optimizer)
    stage = int(engine.zero_optimization_stage())
    stages = int(module.num_pipeline_stages()) if engine.pipeline_parallelism else 1
    buffers = {experts.whole_name(n): buffer for n, buffer in _buffers(module).items()}
    return EngineParts(
        *(engine, stage, optimizer, inner, parameters, buffers, aliases, stages, experts),
        tensor_parallel(engine, parameters, experts),
    )


def _buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The persistent buffers, in the order of the module; a shared buffer under its first name."""
    buffers: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for path, part in module.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set and id(buffer) not in seen:  # noqa: SLF001 - torch has no other way
                seen.add(id(buffer))
                buffers[f"{path}.{name}" if path else name] = buffer
    return buffers


def _refuse_engine(engine: Any) -> None:
    is_pipeline = engine.pipeline_parallelism  # whose model-parallel ranks are those of all stages
    own = engine.mp_world_size > 1 and engine.autotp_size() <= 1 and not is_pipeline
    cut_stages = is_pipeline and len(tensor_parallel_ranks(engine)) > 1
    unsupported = {
        "tensor parallelism of a program's own (mpu)": own,
        "tensor parallelism and experts in a pipeline": cut_stages and engine.has_moe_layers,
        "AutoTP and AutoEP": engine.autotp_size() > 1 and _has_autoep(engine),
        "AutoTP and pipelines": engine.autotp_size() > 1 and is_pipeline,
        "AutoTP and sequence parallelism": (
            engine.autotp_size() > 1 and engine.sequence_parallel_size > 1
        ),
        "AutoEP in a pipeline": is_pipeline and _has_autoep(engine),
        "ZenFlow": engine.zenflow,
    }
    for feature, is_used in unsupported.items():
        if is_used:
            raise UnsupportedError(
                f"a DeepSpeed engine with {feature} cannot be saved or loaded yet",
                hint=(
                    "use engine.save_checkpoint; supported are ZeRO 0 to 3, pipelines, experts "
                    "and AutoTP"
                ),
            )


def _has_autoep(engine: Any) -> bool:
    """Whether AutoEP is switched on, which versions of DeepSpeed before 0.19 do not have."""
    config = getattr(engine._config, "expert_parallel_config", None)  # noqa: SLF001 - the only way
    return bool(getattr(config, "enabled", False))


def _refuse_optimizer(optimizer: Any) -> None:
    if any(
        getattr(optimizer, name, False) for name in ("swap_optimizer", "params_in_nvme_and_cpu")
    ):
        raise UnsupportedError(
            "an engine whose optimizer or parameters are offloaded to NVMe cannot be saved or "
            "loaded",
            hint='offload to "cpu" instead, or use engine.save_checkpoint',
        )
    if getattr(optimizer, "offloaded_states", None):
        names = ", ".join(sorted(str(getattr(s, "value", s)) for s in optimizer.offloaded_states))
        raise UnsupportedError(
            f"the engine has offloaded its states ({names})",
            hint="call engine.reload_states() first",
        )
    if hasattr(optimizer, "backup_optimizer"):
        raise UnsupportedError(
            "an engine that offloads its optimizer partially (`ratio` below 1) cannot be saved "
            "or loaded yet",
            hint="offload all of it, or nothing",
        )
    if type(optimizer).__name__ == "MiCS_Optimizer":
        raise UnsupportedError(
            "MiCS cannot be saved or loaded yet",
            hint="use ZeRO 3, perhaps with zero_hpz_partition_size",
        )
    inner = type(getattr(optimizer, "optimizer", optimizer)).__name__
    if inner in _ONE_BIT:
        raise UnsupportedError(
            f"{inner} keeps the residual of gradient compression on each rank, which no other "
            "layout could use",
            hint="use engine.save_checkpoint and the same world size, or another optimizer",
        )


def _refuse_parameter(name: str, parameter: Any) -> None:
    partition = getattr(parameter, "ds_tensor", None)
    if partition is None:
        return
    if hasattr(partition, "ds_quant_scale"):
        raise UnsupportedError(
            f"{name} is kept quantized by ZeRO 3 (zero_quantized_nontrainable_weights), which "
            "cannot be saved or "
            "loaded yet",
            hint="switch that option off",
        )
    if getattr(partition.status, "name", "AVAILABLE") != "AVAILABLE":
        raise UnsupportedError(
            f"the partition of {name} is swapped out", hint='offload parameters to "cpu" instead'
        )


@torch.no_grad()
def update_module(trainer: EngineParts) -> None:
    """Round the master weights into the module's parameters, and gather parameters that every rank keeps whole.

    All ranks must call this, since ZeRO 1 to 3 gather.
    """
    optimizer: Any = trainer.optimizer
    zero3 = trainer.engine.optimizer
    gathers = hasattr(zero3, "checkpoint_event_prologue")
    if gathers:
        zero3.checkpoint_event_prologue()  # releases gathered parameters, since the partitions have changed
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        for number in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(number)  # noqa: SLF001 - as in its step
    elif hasattr(optimizer, "update_lp_params"):
        optimizer.update_lp_params()
        # DeepSpeed 0.19.8 links states to parameters only after the first step of the first group
        optimizer._hp_optimizer_states_linked = False  # noqa: SLF001 - links all of them in the next step
    elif hasattr(optimizer, "fp32_groups_flat"):
        for parameters, flat in zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True):
            masters = flat.split([p.numel() for p in parameters])
            for parameter, master in zip(parameters, masters, strict=True):
                parameter.copy_(master.view(parameter.shape))
    elif hasattr(optimizer, "fp32_groups"):
        for parameters, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            for parameter, master in zip(parameters, masters, strict=True):
                parameter.copy_(master)
    if gathers:
        zero3.checkpoint_event_epilogue()


# The parts of parameters that the optimizer of this rank holds in a DeepSpeed engine.
#
# The flat buffers of all ZeRO stages have one form here. Classes of DeepSpeed 0.19.8:
#
# - ZeRO 0 in fp32: the torch optimizer, with the module's own parameters.
# - ZeRO 0 in bf16 or fp16: `fp32_groups`, one fp32 tensor for each parameter
#   (FP16_UnfusedOptimizer); with a fused Adam `fp32_groups_flat`, one flat tensor for each group,
#   its parameters one after another (FP16_Optimizer).
# - ZeRO 1 and 2: this rank's partition of each group's flat buffer, in which
#   `round_robin_bit16_offsets` are the offsets of parameters. (`_hp_mapping` of a parameter is the
#   same, except under `round_robin_gradients`, where DeepSpeed 0.19.8 computes it for another
#   order.)
# - BF16_Optimizer (ZeRO 1, bf16, gradients in fp32): the same without alignment.
# - ZeRO 3: a flat buffer for each sub-group, this rank's part of each of its parameters one after
#   another.


@dataclass(frozen=True, slots=True)
class OptimizerTensor:
    """A tensor that the torch optimizer updates on this rank: one `whole` parameter in its own shape, or a flat buffer.

    `shapes` has all parameters in the tensor, over all ranks, in order; they share its plain
    states. `parts` has those of which this rank holds any elements: `[start, stop)` of the
    flattened parameter, and their offset in the tensor. `distributions` are those of the parameters
    in a partitioned flat buffer.
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
        """The optimizer's states of the tensor by name; empty before the first step."""
        states: dict[str, Any] = self.optimizer.state.get(self.tensor) or {}
        return states


def shape_of(parameter: Any) -> tuple[int, ...]:
    """Return the global shape of a parameter, which ZeRO 3 may have partitioned."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def partition_of(optimizer: Any, parameter: Any) -> tuple[int, int]:
    """Return the range of elements of a flattened parameter in this rank's partition under ZeRO 3."""
    part = parameter.partition_numel()
    return part_range(math.prod(parameter.ds_shape), part, _rank_of(optimizer, parameter))


def partitions_of(parameter: Any) -> Distribution | None:
    """Return how ranks hold a parameter that ZeRO 3 has partitioned; None if it has no elements."""
    ranks = dist.get_process_group_ranks(parameter.ds_process_group)
    return _distribution(ranks, math.prod(parameter.ds_shape), parameter.partition_numel(), 0)


def _distribution(
    ranks: Sequence[int], numel: int, part: int, position: int
) -> Distribution | None:
    return Distribution(RankMesh.of((len(ranks),), ranks), (), 0, part, position) if numel else None


def _rank_of(optimizer: Any, parameter: Any) -> int:
    """This rank among those over which ZeRO 3 has partitioned a parameter."""
    if optimizer is not None:
        return int(optimizer._get_param_partition_rank(parameter))  # noqa: SLF001 - the only way
    return int(dist.get_rank(parameter.ds_process_group))


def optimizer_tensors(trainer: EngineParts) -> tuple[OptimizerTensor, ...]:
    """Return the tensors that the torch optimizer of this rank updates, by group."""
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
        pairs = ((g, p, q) for g, lows in enumerate(groups) for p, q in zip(*lows, strict=True))
        return tuple(_one(trainer, *pair) for pair in pairs)
    if optimizer is inner:
        numbered = ((g, p) for g, group in enumerate(inner.param_groups) for p in group["params"])
        return tuple(_one(trainer, g, p, p) for g, p in numbered)
    raise UnsupportedError(
        f"the optimizer {type(optimizer).__name__} cannot be saved or loaded yet",
        hint=(
            "known are those of ZeRO 0 to 3 in fp32, bf16 and fp16; engine.save_checkpoint may "
            "know it"
        ),
    )


def _inner(trainer: EngineParts) -> torch.optim.Optimizer:
    assert trainer.inner is not None  # noqa: S101 - nothing is held without one
    return trainer.inner


def _one(
    trainer: EngineParts, group: int, parameter: torch.Tensor, master: torch.Tensor
) -> OptimizerTensor:
    name, shape = trainer.name_of(parameter), tuple(parameter.shape)
    parts, shapes = {name: (0, math.prod(shape), 0)}, {name: shape}
    return OptimizerTensor(_inner(trainer), group, master, whole=True, shapes=shapes, parts=parts)


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
    """A rank's part of the flat buffer of these parameters, which these ranks have partitioned."""
    shapes = {trainer.name_of(p): shape_of(p) for p in parameters}
    distributions: dict[str, Distribution] = {}
    for name, shape in shapes.items() if ranks else ():
        slot, numel = buffer.slots[name], math.prod(shape)
        apart = name in buffer.partitioned
        part, position = (len(slot), 0) if apart else (buffer.size, slot.start)
        if (distribution := _distribution(ranks, numel, part, position)) is not None:
            distributions[name] = distribution
    inner, parts = _inner(trainer), buffer.on(rank)
    return OptimizerTensor(
        inner, group, flat, whole=False, shapes=shapes, parts=parts, distributions=distributions
    )


def _fused(trainer: EngineParts, optimizer: Any) -> Iterator[OptimizerTensor]:
    groups = zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True)
    for g, (low, flat) in enumerate(groups):
        yield _flat(trainer, g, flat, low, _buffer(trainer, low, flat.numel()))


def _zero12(trainer: EngineParts, optimizer: Any) -> Iterator[OptimizerTensor]:
    groups = zip(
        optimizer.round_robin_bit16_groups, optimizer.round_robin_bit16_offsets, strict=True
    )
    for g, (parameters, offsets) in enumerate(groups):
        flat = optimizer.single_partition_of_fp32_groups[g]
        buffer = FlatBuffer(size=flat.numel())
        for p, offset in zip(parameters, offsets, strict=True):
            buffer.slots[trainer.name_of(p)] = range(offset, offset + math.prod(shape_of(p)))
        group = optimizer.real_dp_process_group[g]
        rank, ranks = dist.get_rank(group), dist.get_process_group_ranks(group)
        yield _flat(trainer, g, flat, parameters, buffer, rank, ranks)


def _bf16(trainer: EngineParts, optimizer: Any) -> Iterator[OptimizerTensor]:
    for g, parameters in enumerate(optimizer.bf16_groups):
        flat = optimizer.fp32_groups_flat_partition[g]
        buffer = _buffer(trainer, parameters, flat.numel())
        group = optimizer.real_dp_process_group[g]
        rank, ranks = dist.get_rank(group), dist.get_process_group_ranks(group)
        yield _flat(trainer, g, flat, parameters, buffer, rank, ranks)


def _zero3(trainer: EngineParts, optimizer: Any) -> Iterator[OptimizerTensor]:
    groups = zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True)
    for s, (parameters, flat) in enumerate(groups):
        buffer = FlatBuffer(size=flat.numel())
        for p in parameters:
            buffer.append_part(trainer.name_of(p), math.prod(shape_of(p)), p.partition_numel())
        # DeepSpeed has all of a sub-group in one process group
        rank = _rank_of(optimizer, parameters[0])
        ranks = dist.get_process_group_ranks(parameters[0].ds_process_group)
        number = optimizer.sub_group_to_group_id[s]
        yield _flat(trainer, number, flat, parameters, buffer, rank, ranks)
