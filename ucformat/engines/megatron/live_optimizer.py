"""Live optimizers of Megatron-Core: the states that this rank holds, hyper-parameters by name, and how they are set.

The distributed optimizer partitions buckets of its model chunks' parameters; no sharding type of
its own sharded state dicts is used, so none has to be chosen, and nothing is gathered. Other
optimizers hold whole states, which their own sharded state dicts name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ucformat.engines.megatron.live_fsdp import flat_memory
from ucformat.engines.megatron.live_shards import FlatRange, local_states
from ucformat.errors import UnsupportedError, UsageError
from ucformat.torch.state.objects import encode

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ucformat.engines.megatron.live_entries import Region, WeightRegions
    from ucformat.engines.megatron.live_fsdp import ShardedChunk, ShardedParameter
    from ucformat.engines.megatron.live_shards import LocalBoxes, Rows, StageLayout

#: What tells Megatron's optimizer groups apart, on all stages alike.
IDENTIFIERS = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """One state of one parameter in the distributed optimizer: the memory of this rank's range, or None."""

    flat: FlatRange
    state: str
    dtype: torch.dtype
    memory: torch.Tensor | None

    @property
    def is_shared(self) -> bool:
        """Whether the memory is that of the parameter itself, as that of the fp32 copy in an fp32 model."""
        if self.memory is None or self.flat.parameter.is_meta:
            return False
        own, whole = self.memory.untyped_storage(), self.flat.parameter.untyped_storage()
        return bool(own.data_ptr() == whole.data_ptr())

    def local(self, layout: StageLayout, rows: Rows) -> Iterator[LocalBoxes]:
        """What this rank holds of it."""
        return local_states(self.flat, self.state, self.dtype, self.memory, layout, rows)


class LivePart:
    """One optimizer, or one of those that are chained.

    Args:
        weights: the regions of the model's weights.
        chunks: the model chunks under Megatron-FSDP.
    """

    def __init__(
        self, optimizer: Any, weights: WeightRegions, chunks: Sequence[ShardedChunk] = ()
    ) -> None:
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

        _refuse(optimizer)
        self.optimizer, self._weights = optimizer, weights
        self.distributed = isinstance(optimizer, DistributedOptimizer)
        self.empty = bool(getattr(optimizer, "is_stub_optimizer", False))
        self.fsdp = bool(
            getattr(getattr(optimizer, "ddp_config", None), "use_megatron_fsdp", False)
        )
        self._sharded = {id(p.main): p for chunk in chunks for p in chunk.parameters}
        pairs = [] if self.empty else list(self._pairs())
        self._mains = {id(parameter): main for parameter, main in pairs}
        self._parameters = [parameter for parameter, _ in pairs]
        self._made: list[torch.Tensor] = []

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each parameter of the model, and the tensor that the optimizer updates in its place.

        Megatron's own index of them is wrong for groups with parameters of several dtypes.
        """
        optimizer = self.optimizer
        if self.fsdp:
            for group in optimizer.optimizer.param_groups:
                for main in group["params"]:
                    if flat_memory(main).numel():
                        yield self._sharded_of(main).stand_in, main
            return
        if self.distributed:
            lists = (
                (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
                (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
            )
        elif hasattr(optimizer, "float16_groups"):
            lists = (
                (optimizer.float16_groups, optimizer.fp32_from_float16_groups),
                (optimizer.fp32_from_fp32_groups, optimizer.fp32_from_fp32_groups),
            )
        else:
            groups: Any = [group["params"] for group in optimizer.optimizer.param_groups]
            lists = ((groups, groups), ((), ()))
        for models, mains in lists:
            for of_group, mains_of_group in zip(models, mains, strict=True):
                yield from zip(of_group, mains_of_group, strict=True)

    def _sharded_of(self, main: torch.Tensor) -> ShardedParameter:
        """The parameter of which Megatron-FSDP made a tensor of the optimizer."""
        if id(main) not in self._sharded:
            raise UsageError(
                f"the optimizer has a parameter of shape {list(main.shape)} that is in no model "
                "chunk of the state",
                hint=(
                    "pass the model chunk itself, as Megatron-FSDP wraps it, beside the optimizer: "
                    '{"model": model[0], "optimizer": optimizer}'
                ),
            )
        return self._sharded[id(main)]

    def regions_of(self, parameter: torch.Tensor) -> list[Region]:
        """The regions of a parameter of the model; UsageError if the model's state is not passed."""
        regions = self._weights.of(parameter)
        if not regions:
            if self._weights.is_saved_otherwise(parameter):
                raise UnsupportedError(
                    f"a module saves its parameter of shape {list(parameter.shape)} in another order of "
                    "elements, as the legacy GroupedMLP turns each expert: the states of the optimizer "
                    "cannot follow it",
                    hint=(
                        "train with sequential experts, or Transformer Engine's grouped ones (without "
                        "--moe-use-legacy-grouped-gemm), or save the model alone"
                    ),
                )
            raise UsageError(
                f"the optimizer has a parameter of shape {list(parameter.shape)} that is not in "
                "the model's sharded state dict",
                hint=(
                    "pass that of all model chunks beside the optimizer, as sharded_state_dict() "
                    "returns it"
                ),
            )
        return regions

    def states(self) -> Iterator[OptimizerState]:
        """The states of the distributed optimizer: those of every parameter of each bucket."""
        # under Megatron-FSDP the parameters themselves are the fp32 copies
        dtypes: dict[str, torch.dtype] = {} if self.fsdp else {"master": torch.float32}
        for main in self._mains.values():
            dtypes |= {state: t.dtype for state, t in self._flat_states(main).items()}
        for flat, main in self._ranges():
            own = {} if main is None else {"master": flat_memory(main), **self._flat_states(main)}
            for state, dtype in dtypes.items():
                yield OptimizerState(flat, state, dtype, own.get(state))

    def _flat_states(self, main: torch.Tensor) -> dict[str, torch.Tensor]:
        """The states of a range that have its shape; the rest must be the step."""
        out = {}
        for state, value in (self.optimizer.optimizer.state.get(main) or {}).items():
            if torch.is_tensor(value) and self._is_alike(value, main):
                out[state] = flat_memory(value)
            elif state != "step":
                raise UnsupportedError(
                    f"the distributed optimizer has the state {state!r} of another shape than its "
                    "parameter, which cannot be saved or loaded yet",
                    hint="use Adam without 8-bit states",
                )
        return out

    def _is_alike(self, value: torch.Tensor, main: torch.Tensor) -> bool:
        """Whether a state has an element for each of its parameter, of which fused optimizers keep plain tensors."""
        local = getattr(main, "_local_tensor", main)
        own = getattr(value, "_local_tensor", value)
        return value.shape in (main.shape, local.shape) and own.shape == local.shape

    def _ranges(self) -> Iterator[tuple[FlatRange, torch.Tensor | None]]:
        """Each parameter with its range on this rank, and the optimizer's tensor with it, if there is one."""
        optimizer = self.optimizer
        if self.fsdp:
            for group in optimizer.optimizer.param_groups:
                for main in group["params"]:
                    own = self._sharded_of(main)
                    yield FlatRange.of(own, self.regions_of(own.stand_in)), main
            return
        group = optimizer.data_parallel_group
        ranks = tuple(dist.get_process_group_ranks(group))
        for buffer, of_buffer in zip(optimizer.buffers, optimizer.gbuf_ranges, strict=True):
            for of_dtype in of_buffer.values():
                for number, (bucket, own) in enumerate(zip(buffer.buckets, of_dtype, strict=True)):
                    part = bucket.grad_data.numel() // len(ranks)
                    for parameter, where in buffer.param_index_map.items():
                        begin, _, bucket_number = where
                        if bucket_number != number:
                            continue
                        ranges = own["param_map"].get(parameter)
                        start, stop = (
                            (0, 0)
                            if ranges is None
                            else (ranges["param"].start, ranges["param"].end)
                        )
                        main = None if ranges is None else self._mains[id(parameter)]
                        if main is not None and main.shape != (stop - start,):
                            raise UnsupportedError(
                                f"the distributed optimizer keeps {list(main.shape)} elements where "
                                f"its range has {stop - start}",
                                hint="report this model",
                            )
                        flat = FlatRange(
                            *(parameter, self.regions_of(parameter), start, stop, part),
                            *(begin - bucket.offset, ranks),
                        )
                        yield flat, main

    def names(self) -> list[str]:
        """The names of the parameters that this rank holds any element of."""
        return [name for of_group in self.numbered_names() for name in of_group]

    def numbered_names(self) -> list[list[str]]:
        """The names of the parameters that this rank holds any element of, for each group."""
        inner = self.optimizer.optimizer
        index = {
            id(main): number
            for number, group in enumerate(inner.param_groups)
            for main in group["params"]
        }
        names: list[list[str]] = [[] for _ in inner.param_groups]
        for parameter in self._parameters:
            number = index.get(id(self._mains[id(parameter)]))
            if number is not None:
                own = (region.key.name for region in self.regions_of(parameter))
                names[number] += dict.fromkeys(own)
        return names

    @property
    def counts_steps(self) -> bool:
        """Whether the optimizer has a step; one that only has a momentum, such as Muon, has none."""
        states = {state for own in self.optimizer.optimizer.state.values() for state in own}
        return states != {"momentum_buffer"}

    def step(self) -> float | int | None:
        """The step of all parameters of this rank; None without states, and if it has none.

        Raises:
            UnsupportedError: parameters have different steps, which Megatron cannot restore.
        """
        inner = self.optimizer.optimizer
        of_groups = {float(g["step"]) for g in inner.param_groups if g["params"] and "step" in g}
        steps = {float(s["step"]) for s in inner.state.values() if "step" in s} or of_groups
        if len(steps) > 1:
            raise UnsupportedError(
                f"the parameters of an optimizer have the steps {sorted(steps)[:5]}",
                hint="Megatron-Core keeps one step for all of them",
            )
        made = self.counts_steps and any(inner.state.values())
        return next(iter(steps), 0 if made else None)  # fused ones count from their first step on

    def groups(self) -> list[dict[str, Any]]:
        """The groups as the source has them: hyper-parameters, and the names of the parameters."""
        step = self.step() if self.distributed else None
        out = []
        inner = self.optimizer.optimizer
        for group, names in zip(inner.param_groups, self.numbered_names(), strict=True):
            options = {k: v for k, v in group.items() if k not in ("params", "step")}
            if step is not None or "step" in group:
                options["step"] = group.get("step") if step is None else step
            out.append(encode({"params": names, **options}, "an optimizer group"))
        return out

    def make_states(self) -> None:
        """Make the states that the first step would make, where there are none; `undo` deletes them."""
        inner = self.optimizer.optimizer
        before = {id(p) for p, states in inner.state.items() if states}
        if self.optimizer.init_state_fn is not None:
            self.optimizer.init_state_fn(inner, self.optimizer.config)
        for parameter, states in list(inner.state.items()):
            if id(parameter) not in before:
                if not flat_memory(parameter).numel():
                    del inner.state[parameter]  # no step would make it, or count in it
                    continue
                self._made.append(parameter)
                if isinstance(inner, torch.optim.Adam):  # which a step of PyTorch's would make
                    states.setdefault("step", torch.zeros((), dtype=torch.float32))

    def undo(self) -> None:
        """Delete the states that were made."""
        for parameter in self._made:
            self.optimizer.optimizer.state.pop(parameter, None)

    def forget(self) -> None:
        """Be as before the first step."""
        inner = self.optimizer.optimizer
        inner.state.clear()
        for group in inner.param_groups:
            group.pop("step", None)

    def put_step(self, step: float) -> None:
        """Set the step of all parameters, where the optimizer counts it.

        PyTorch's Adam does for each parameter, in memory of its own, and fused ones do in their
        groups, which have no step before the first one.
        """
        inner = self.optimizer.optimizer
        of_parameters = [states for states in inner.state.values() if "step" in states]
        for states in of_parameters:
            states["step"] = torch.full_like(states["step"], step)
        for group in inner.param_groups:
            if "step" in group or (step and not of_parameters):
                before = group.get("step", 0)
                is_tensor = torch.is_tensor(before)
                group["step"] = torch.full_like(before, step) if is_tensor else type(before)(step)


def _refuse(optimizer: Any) -> None:
    """UnsupportedError if an optimizer's states are not where they are looked for."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import (
        Float16OptimizerWithFloat16Params,
        FP32Optimizer,
    )

    kind = type(optimizer).__name__
    supported = (DistributedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer)
    if not isinstance(optimizer, supported):
        raise UnsupportedError(
            f"the optimizer {kind} cannot be saved or loaded yet",
            hint="use Adam with or without the distributed optimizer, or save the model alone",
        )
    inner = type(getattr(optimizer, "optimizer", None)).__name__
    config = optimizer.config
    unsupported = {
        "the precision-aware optimizer": getattr(config, "use_precision_aware_optimizer", False),
        "an optimizer offloaded to the CPU": inner == "HybridDeviceOptimizer",
        # whose states its own sharded state dict does not name
        "an optimizer of 16-bit and fp32 parameters that is not distributed": any(
            getattr(optimizer, "fp32_from_fp32_groups", ())
        ),
    }
    for feature, is_used in unsupported.items():
        if is_used:
            raise UnsupportedError(
                f"{feature} cannot be saved or loaded yet",
                hint="save the model alone, or use Megatron's own checkpoint",
            )


def live_parts(
    optimizer: Any, weights: WeightRegions, chunks: Sequence[ShardedChunk] = ()
) -> list[LivePart]:
    """The parts of an optimizer: those that it chains, or itself."""
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
    from megatron.core.optimizer.optimizer import ChainedOptimizer

    if type(optimizer) in (ChainedOptimizer, LayerWiseDistributedOptimizer):
        return [LivePart(one, weights, chunks) for one in optimizer.chained_optimizers]
    return [LivePart(optimizer, weights, chunks)]
