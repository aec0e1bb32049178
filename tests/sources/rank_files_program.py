"""What ranks go through in `test_parts.py`: each saves its own state dict by `torch.save`, as veRL does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_sharded: Callable[..., torch.Tensor] = init_from_local_shards


def save_ranks(folder: Path) -> dict[str, list[float]]:
    """Train one step of FSDP2, and save model and optimizer; returns what this rank has of each parameter."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.LayerNorm(6), torch.nn.Linear(6, 4))
    fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    end = f"world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt"
    torch.save(net.state_dict(), folder / f"model_{end}")
    torch.save(optimizer.state_dict(), folder / f"optim_{end}")
    local = {n: p.to_local() for n, p in net.named_parameters() if isinstance(p, DTensor)}
    return {n: t.detach().flatten().tolist() for n, t in local.items()}


def save_sharded(folder: Path) -> dict[str, list[list[float]]]:
    """Save tensors as FSDP1's state dicts hold them; returns what this rank has of each."""
    rank, state, local = dist.get_rank(), {}, {}
    for name, rows in (("a.weight", 6), ("b.weight", 3)):
        whole, size = torch.arange(2.0 * rows).reshape(rows, 2), 2
        mine = whole[rank * size : (rank + 1) * size].clone()
        at = ShardMetadata([rank * size, 0], list(mine.shape), f"rank:{rank}/cpu")
        state[name] = _sharded([Shard(mine, at)] if len(mine) else [], rows, 2)
        local[name] = mine.tolist()
    torch.save(state, folder / f"rank{rank}.pt")
    return local
