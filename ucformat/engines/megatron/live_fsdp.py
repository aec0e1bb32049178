"""Model chunks under Megatron-FSDP: the names and places of their parameters, and the shards that this rank holds.

Such a chunk has no sharded state dict of its own: its state dict has DTensors that do not say where
in the tensor they are, under names that count the layers of a stage from 0. The model inside has
one, if its parameters are whole; so it is asked for while tensors without memory stand in their
place. The shard is the range of a flat buffer that the engine's index of the buffer gives.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ucformat.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterator

_UNSHARDED = "no_shard"


@dataclass(frozen=True, slots=True)
class ShardedParameter:
    """A parameter of which the rank holds elements `[start, stop)`, in the memory of a DTensor.

    Attributes:
        stand_in: a tensor without memory that has the shape of the parameter on this rank of
            tensor-parallel ranks.
        main: the DTensor, which the optimizer updates: the fp32 copy of a 16-bit parameter.
        part: the elements of each rank's part of the buffer (0: each has all of it).
        position: the element of the buffer at which the parameter begins.
        ranks: those that partition the buffer, in order (none: in another order than that of a
            process group).
    """

    stand_in: torch.Tensor
    main: torch.nn.Parameter
    start: int
    stop: int
    part: int
    position: int
    ranks: tuple[int, ...]

    @property
    def memory(self) -> torch.Tensor:
        """The elements that this rank holds."""
        return flat_memory(self.main)


class ShardedChunk:
    """A model chunk under Megatron-FSDP.

    Attributes:
        parameters: those of the chunk, each once.
        state: the sharded state dict of the model inside, in which tensors without memory stand for
            parameters.
    """

    def __init__(self, chunk: Any) -> None:
        # whose hooks put the optimizer's tensors in the place of those that are gathered
        chunk.state_dict()
        self._chunk = chunk
        buffer = chunk.param_and_grad_buffer
        self.parameters = list(_parameters(buffer, chunk.ddp_config))
        with _standing_in(chunk.module.module, self.parameters):
            self.state: dict[str, Any] = chunk.module.module.sharded_state_dict(metadata={})

    def install(self) -> None:
        """Give what was loaded to the tensors that the model computes with, as after a step; a collective call."""
        self._chunk.module.synchronize_param_gather()  # drops what was gathered before
        self._chunk.param_and_grad_buffer.copy_main_weights_to_model_weights()
        self._chunk.start_param_sync()


def is_sharded_chunk(value: object) -> bool:
    """Whether this is a model chunk that Megatron-FSDP wraps."""
    if not isinstance(value, torch.nn.Module):
        return False
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

    return isinstance(value, FullyShardedDataParallel)


def flat_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a DTensor, or of a plain tensor, that this rank holds, in memory of one dim."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local.detach().view(-1)


def _parameters(buffer: Any, config: Any) -> Iterator[ShardedParameter]:
    """The parameters of a chunk's buffers."""
    mains = dict(buffer.optimizer_named_parameters)
    sharded = config.data_parallel_sharding_strategy != _UNSHARDED
    for group in buffer.parameter_groups:
        own = group.main_weight_buffer or group.model_weight_buffer
        for number, parameter in enumerate(group.params):
            name = buffer.param_to_name[parameter]
            main, size = mains[name], parameter.numel()
            start, stop, part, position = 0, size, 0, 0
            ranks: tuple[int, ...] = ()
            if sharded:
                shard, position = (
                    own.shard_bucket_index,
                    own.item_index_map[number].global_data_index,
                )
                start, stop = (
                    min(max(at - position, 0), size)
                    for at in (shard.global_data_index, shard.global_data_index + shard.size)
                )
                part, ranks = shard.size, _ranks(own)
            if flat_memory(main).numel() != stop - start:
                raise UnsupportedError(
                    f"Megatron-FSDP holds {flat_memory(main).numel()} elements of {name} where its "
                    f"index of the buffer has {stop - start}",
                    hint="report this model; its parameters must be on the mesh of Megatron's groups",
                )
            stand_in = torch.nn.Parameter(
                torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"),
                requires_grad=False,
            )
            yield ShardedParameter(stand_in, main, start, stop, part, position, ranks)


def _ranks(buffer: Any) -> tuple[int, ...]:
    """The ranks that partition a buffer, if each has the part of its number in the group."""
    group = buffer.data_parallel_group
    in_order = buffer.dp_rank == dist.get_rank(group)
    return tuple(dist.get_process_group_ranks(group)) if in_order else ()


@contextmanager
def _standing_in(model: torch.nn.Module, parameters: list[ShardedParameter]) -> Iterator[None]:
    """Put tensors without memory in the place of a model's parameters meanwhile."""
    stand_ins = {id(p.main): p.stand_in for p in parameters}
    places = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()  # noqa: SLF001 - setattr is the engine's own
        if id(parameter) in stand_ins
    ]
    try:
        for module, name, parameter in places:
            module._parameters[name] = stand_ins[id(parameter)]  # noqa: SLF001
        yield
    finally:
        for module, name, parameter in places:
            module._parameters[name] = parameter  # noqa: SLF001
