"""What ranks go through in `test_parts.py`: each saves its own state dict by `torch.save`, as veRL does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from pathlib import Path


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
