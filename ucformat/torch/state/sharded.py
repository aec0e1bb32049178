"""Objects of PyTorch's distributed packages, recognised without importing these, which takes 0.3 s and more.

Nothing is of their classes before they are imported.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
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


def _class(module: str, name: str) -> type | None:
    return getattr(sys.modules.get(module), name, None)
