"""Objects of PyTorch's distributed packages, recognised without importing these, which takes 0.3 s and more.

Nothing is of their classes before they are imported.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

from ucformat.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch.distributed._shard.sharded_tensor import ShardedTensor
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import DTensor


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Check whether an object is a DTensor."""
    kind = dtensor_class()
    return kind is not None and isinstance(value, kind)


def dtensor_class() -> type | None:
    """Return the class of DTensors; None if it is not imported."""
    return _class("torch.distributed.tensor", "DTensor")


def is_sharded_tensor(value: object) -> TypeGuard[ShardedTensor]:
    """Check whether an object is a ShardedTensor, as FSDP1 makes them."""
    kind = _class("torch.distributed._shard.sharded_tensor", "ShardedTensor")
    return kind is not None and isinstance(value, kind)


def is_fsdp1(value: object) -> TypeGuard[FullyShardedDataParallel]:
    """Check whether an object is a module that FSDP1 wraps."""
    kind = _class("torch.distributed.fsdp", "FullyShardedDataParallel")
    return kind is not None and isinstance(value, kind)


def is_flattened(parameter: torch.Tensor | None) -> bool:
    """Check whether FSDP1 has taken a parameter into a flat one, or it is a flat one."""
    return bool(getattr(parameter, "_fsdp_flattened", False))


def is_cut_by_context(tensor: torch.Tensor) -> bool:
    """Check whether `context_parallel`, inside its context, may have cut a buffer in place, which then looks whole."""
    module = sys.modules.get("torch.distributed.tensor.experimental._context_parallel._attention")
    if not getattr(module, "_replaced_functions", None):  # there is no public way to tell
        return False
    end = tensor.storage_offset() + tensor.numel()
    return bool(tensor.untyped_storage().nbytes() > end * tensor.itemsize)


def check_local_states(label: str, param: torch.Tensor, states: Mapping[str, Any]) -> None:
    """UnsupportedError if a state is this rank's shard in a plain tensor, which would be taken for a whole one."""
    if not is_dtensor(param) or (shard := param._local_tensor.shape) == param.shape:  # noqa: SLF001 - also of a wrapper
        return
    for state, value in states.items():
        own = getattr(value, "shape", ())
        if len(own) and own == shard and not is_dtensor(value):
            raise UnsupportedError(
                f"{label}.{state} is a plain tensor of the shape {list(own)} of this rank's shard of "
                f"its parameter {list(param.shape)}",
                hint="let the optimizer make its states like the parameter: torch.zeros_like(param)",
            )


def local_optimizer(label: str, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return what has the states of an optimizer on this rank: the optimizer itself, unless it deals them to ranks.

    Raises:
        UnsupportedError: a ZeroRedundancyOptimizer makes its steps in the backward pass.
    """
    kind = _class("torch.distributed.optim.zero_redundancy_optimizer", "ZeroRedundancyOptimizer")
    if kind is None or not isinstance(optimizer, kind):
        return optimizer
    dealt: Any = optimizer
    if dealt._overlap_with_ddp:  # noqa: SLF001 - there is no public way to tell
        raise UnsupportedError(
            f"{label} is a ZeroRedundancyOptimizer with overlap_with_ddp, whose states are not those "
            "of an optimizer",
            hint="leave overlap_with_ddp out",
        )
    local: torch.optim.Optimizer = dealt.optim
    return local


def adopt_groups(optimizer: Any) -> None:
    """Let a ZeroRedundancyOptimizer use hyper-parameters that were set, and forget states that it has gathered."""
    optimizer._sync_param_groups(optimizer.param_groups, optimizer.optim.param_groups)  # noqa: SLF001
    optimizer._all_state_dicts.clear()  # noqa: SLF001


def _class(module: str, name: str) -> type | None:
    return getattr(sys.modules.get(module), name, None)
