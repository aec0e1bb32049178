"""Inspects DeepSpeed engines: what is supported, and names of parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ucformat.errors import UnsupportedError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Optimizers that keep the residual of gradient compression on each rank.
_ONE_BIT = ("OnebitAdam", "OnebitLamb", "ZeroOneAdam")


@dataclass(frozen=True)
class EngineParts:
    """The parts of a DeepSpeed engine that is supported.

    `optimizer` is DeepSpeed's, `inner` the torch optimizer inside it, which may be the same; both are None if the
    engine only evaluates. Tied parameters are listed once; `aliases` maps their further names to that name.
    """

    engine: Any
    stage: int
    optimizer: Any
    inner: torch.optim.Optimizer | None
    parameters: Mapping[str, torch.nn.Parameter]
    buffers: Mapping[str, torch.Tensor]
    aliases: Mapping[str, str]

    @property
    def rank(self) -> int:
        """The rank of this process among all."""
        return int(self.engine.global_rank)

    @property
    def layout(self) -> dict[str, int]:
        """The ZeRO stage and the number of data-parallel ranks, in the form of manifests."""
        return {"zero": self.stage, "dp": int(self.engine.seq_dp_world_size)}

    def name_of(self, parameter: torch.Tensor) -> str:
        """Return the name of a parameter."""
        found = self.engine.param_names.get(parameter)
        if found not in self.parameters:
            raise UnsupportedError(
                f"the optimizer has a tensor of shape {list(parameter.shape)} that is not a parameter of the module",
                hint="register it in the module that is passed to deepspeed.initialize, so that it has a name",
            )
        return str(found)


def inspect_engine(engine: Any) -> EngineParts:
    """Return the parts of a DeepSpeed engine."""
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.utils import DummyOptim

    if not isinstance(engine, DeepSpeedEngine):
        raise UsageError(
            f"a {type(engine).__name__} is not a DeepSpeed engine",
            hint="pass the first result of deepspeed.initialize; for other models use ucformat.torch.save and load",
        )
    _refuse_engine(engine)
    module = engine.module
    parameters = dict(module.named_parameters())
    optimizer = engine.optimizer
    if optimizer is None or isinstance(optimizer, DummyOptim) or not hasattr(optimizer, "param_groups"):
        optimizer = None
    if optimizer is not None:
        _refuse_optimizer(optimizer)
    for name, parameter in parameters.items():
        _refuse_parameter(name, parameter)
    first = {id(p): name for name, p in parameters.items()}
    aliases = {
        name: first[id(p)] for name, p in module.named_parameters(remove_duplicate=False) if first[id(p)] != name
    }
    inner = None if optimizer is None else getattr(optimizer, "optimizer", optimizer)
    stage = int(engine.zero_optimization_stage())
    return EngineParts(engine, stage, optimizer, inner, parameters, _buffers(module), aliases)


def _buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The persistent buffers, in the order of the module; a shared buffer under its first name."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for path, part in module.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set and id(buffer) not in seen:  # noqa: SLF001 - torch has no other way
                seen.add(id(buffer))
                found[f"{path}.{name}" if path else name] = buffer
    return found


def _refuse_engine(engine: Any) -> None:
    unsupported = {
        "pipeline parallelism": engine.pipeline_parallelism,
        "expert parallelism (deepspeed.moe)": engine.has_moe_layers,
        "tensor parallelism": engine.mp_world_size > 1 or engine.autotp_size() > 1,
        "ZenFlow": engine.zenflow,
    }
    for feature, found in unsupported.items():
        if found:
            raise UnsupportedError(
                f"a DeepSpeed engine with {feature} cannot be saved or loaded yet",
                hint="use engine.save_checkpoint, or an engine with data parallelism and ZeRO 0 to 3",
            )


def _refuse_optimizer(optimizer: Any) -> None:
    if getattr(optimizer, "swap_optimizer", False) or getattr(optimizer, "params_in_nvme_and_cpu", False):
        raise UnsupportedError(
            "an engine whose optimizer or parameters are offloaded to NVMe cannot be saved or loaded",
            hint='offload to "cpu" instead, or use engine.save_checkpoint',
        )
    if getattr(optimizer, "offloaded_states", None):
        names = ", ".join(sorted(str(getattr(s, "value", s)) for s in optimizer.offloaded_states))
        raise UnsupportedError(
            f"the engine has offloaded its states ({names})", hint="call engine.reload_states() first"
        )
    if hasattr(optimizer, "backup_optimizer"):
        raise UnsupportedError(
            "an engine that offloads its optimizer partially (`ratio` below 1) cannot be saved or loaded yet",
            hint="offload all of it, or nothing",
        )
    if type(optimizer).__name__ == "MiCS_Optimizer":
        raise UnsupportedError(
            "MiCS cannot be saved or loaded yet", hint="use ZeRO 3, perhaps with zero_hpz_partition_size"
        )
    inner = type(getattr(optimizer, "optimizer", optimizer)).__name__
    if inner in _ONE_BIT:
        raise UnsupportedError(
            f"{inner} keeps the residual of gradient compression on each rank, which no other layout could use",
            hint="use engine.save_checkpoint and the same world size, or another optimizer",
        )


def _refuse_parameter(name: str, parameter: Any) -> None:
    partition = getattr(parameter, "ds_tensor", None)
    if partition is None:
        return
    if hasattr(partition, "ds_quant_scale"):
        raise UnsupportedError(
            f"{name} is kept quantized by ZeRO 3 (zero_quantized_nontrainable_weights), which cannot be saved or "
            "loaded yet",
            hint="switch that option off",
        )
    if getattr(partition.status, "name", "AVAILABLE") != "AVAILABLE":
        raise UnsupportedError(f"the partition of {name} is swapped out", hint='offload parameters to "cpu" instead')


@torch.no_grad()
def update_module(trainer: EngineParts) -> None:
    """Round the master weights into the module's parameters, and gather parameters that every rank keeps whole.

    All ranks must call this, since ZeRO 1 to 3 gather.
    """
    optimizer: Any = trainer.optimizer
    zero3 = trainer.engine.optimizer if hasattr(trainer.engine.optimizer, "checkpoint_event_prologue") else None
    if zero3 is not None:
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
            for parameter, master in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
                parameter.copy_(master.view(parameter.shape))
    elif hasattr(optimizer, "fp32_groups"):
        for parameters, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            for parameter, master in zip(parameters, masters, strict=True):
                parameter.copy_(master)
    if zero3 is not None:
        zero3.checkpoint_event_epilogue()
