"""Ranks that give a training's state to other ranks and layouts, from memory to memory."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.torch.ranks import told
from ucformat.torch import Manager, PerRank, Tier, reshard

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed.device_mesh import DeviceMesh

STEPS = 3


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(13, 22), nn.GELU(), nn.Linear(22, 7), nn.LayerNorm(7))


def mesh_of(ranks: list[int]) -> DeviceMesh | None:
    """A mesh of some ranks; None on others. All ranks call this."""
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh("cpu", ranks) if len(ranks) == dist.get_world_size() else None
    if mesh is None:
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            mesh = DeviceMesh.from_group(group, "cpu", ranks)
    return mesh


def state_on(ranks: list[int], layout: str, seed: int) -> dict[str, Any]:
    """A model and its optimizer, laid over some ranks; empty on others."""
    mesh = mesh_of(ranks) if layout != "whole" else None
    if dist.get_rank() not in ranks:
        return {}
    model = build(seed)
    if layout == "fsdp2":
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif layout == "tp":
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, mesh, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return {"model": model, "optimizer": optimizer, "step": 0}


def train(state: dict[str, Any], begin: int, steps: int) -> list[float]:
    losses = []
    for step in range(begin, begin + steps):
        data = torch.randn(8, 13, generator=torch.Generator().manual_seed(step))
        loss = state["model"](data).square().mean()
        loss.backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        state["step"] = step
        losses.append(loss.item())
    return losses


def whole(value: Any) -> torch.Tensor:
    tensor = value.full_tensor() if isinstance(value, DTensor) else value
    return tensor.detach().clone()


def contents(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """All tensors of a state, unsharded, by name."""
    if not state:
        return {}
    model, optimizer = state["model"], state["optimizer"]
    out = {name: whole(p) for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        out |= {f"{name}.{k}": whole(v) for k, v in optimizer.state[p].items()}
    return out


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def between(folder: Path, **cases: Any) -> list[str]:
    """From one layout to another: every tensor is the same, and the next losses are those of one process."""
    wrong = []
    truth = state_on([dist.get_rank()], "whole", 1)
    train(truth, 1, STEPS)
    expected_losses = train(truth, STEPS + 1, 2)
    for name, (old_ranks, old, new_ranks, new) in cases.items():
        state = state_on(old_ranks, old, 1)
        if state:
            train(state, 1, STEPS)
        into = state_on(new_ranks, new, 2)
        before = contents(state)
        report = reshard(state, into, certify=True)
        if not report:
            wrong.append(f"{name}: {report.problems}")
        box = [before]
        dist.broadcast_object_list(box, src=old_ranks[0])
        after = contents(into)
        if into and (not same(after, box[0]) or into["step"] != STEPS):
            wrong.append(f"{name}: another state")
        if not same(contents(state), before):
            wrong.append(f"{name}: the old state was changed")
        if into:
            losses = train(into, STEPS + 1, 2)
            apart = [abs(a - b) for a, b in zip(losses, expected_losses, strict=True)]
            if max(apart) > 1e-3:  # layouts round differently
                wrong.append(f"{name}: losses {losses} instead of {expected_losses}")
        left = list(folder.glob("**/live-*"))
        if left:
            wrong.append(f"{name}: {left}")
    return wrong


def beside_tiers(folder: Path) -> list[str]:
    """While a manager with tiers is open, and after that."""
    ranks = list(range(dist.get_world_size()))
    state, into = state_on(ranks, "fsdp2", 1), state_on([0], "whole", 2)
    train(state, 1, STEPS)
    wrong = []
    tier = Tier(folder / "memory", every=1)
    with Manager(folder / "run", tiers=[tier], signals=()) as manager:
        manager.save(STEPS, state)
        manager.wait()
        if not reshard(state, into):
            wrong.append("not as it was")
        other = state_on(ranks, "fsdp2", 3)
        restored = manager.restore_latest(other)
        if restored is None or not same(contents(other), contents(state)):
            wrong.append("the manager has restored another state")
    return wrong


def refused(folder: Path) -> list[str]:
    """What cannot be resharded is an error on all ranks, and leaves nothing behind."""
    rank = dist.get_rank()
    one = {"w": torch.ones(4), "own": PerRank(rank)}
    return [
        told(lambda: reshard(one, {"w": torch.zeros(4)})),
        told(lambda: reshard({"w": torch.ones(4)}, {"w": torch.zeros(5)} if rank else {})),
        told(lambda: reshard({"w": torch.ones(4)} if rank else {}, {"v": torch.zeros(4)})),
    ]


def killed(folder: Path) -> str:
    """A rank dies: the other one fails."""
    reshard({"w": torch.ones(4)}, {"w": torch.zeros(4)})  # they are connected
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    message = told(lambda: reshard({"w": torch.ones(4)}, {"w": torch.zeros(4)}))
    return message if time.monotonic() - begun < 60 else "late"
