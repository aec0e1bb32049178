"""What ranks do in `test_patched_saves.py`: train under FSDP2 and save patches, and go on under another layout."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.torch.faults_program import error_of
from ucformat.storage.local import LocalStore
from ucformat.torch import async_save, load, save

if TYPE_CHECKING:
    from pathlib import Path


def model_and_optimizer(*, cut: bool, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model in bf16: its parameters cut over the ranks, or whole on each."""
    torch.manual_seed(seed)
    model: nn.Module = nn.Sequential(
        nn.Linear(256, 512, bias=False), nn.Linear(512, 256), nn.Linear(256, 8)
    ).bfloat16()
    if cut:
        model = fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-6)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    torch.manual_seed(step)
    optimizer.zero_grad()
    model(torch.randn(4, 256).bfloat16()).square().sum().backward()
    optimizer.step()


def whole(tensor: Any) -> torch.Tensor:
    full: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().clone()


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    moments = [s[k] for s in optimizer.state.values() for k in ("exp_avg", "exp_avg_sq")]
    return [whole(t) for t in (*model.parameters(), *moments)]


def trained(folder: Path, *, asynchronous: bool) -> list[int]:
    """Four saves by FSDP2, and two by replicas that go on from them; what this rank wrote of each."""
    written = []
    model, optimizer = model_and_optimizer(cut=True)
    for step in range(1, 7):
        if step == 5:
            before = values(model, optimizer)
            model, optimizer = model_and_optimizer(cut=False, seed=1)
            load({"model": model, "optimizer": optimizer}, folder / "4", certify=True)
            assert all(map(torch.equal, before, values(model, optimizer)))
        train(model, optimizer, step)
        state = {"model": model, "optimizer": optimizer}
        arguments: Any = {"form": "packed", "base": True, "patch": True, "certify": step % 2 == 0}
        if asynchronous:
            done = async_save(state, folder / str(step), **arguments).wait()
        else:
            done = save(state, folder / str(step), **arguments)
        written.append(done.nbytes)
        dist.barrier()
    expected = values(model, optimizer)
    again, other = model_and_optimizer(cut=True, seed=2)
    load({"model": again, "optimizer": other}, folder / "6", verify="always")
    assert all(map(torch.equal, expected, values(again, other)))
    return written


def killed(folder: Path) -> None:
    """The last rank is killed in the middle of its file of the second save."""
    model, optimizer = model_and_optimizer(cut=True)
    state = {"model": model, "optimizer": optimizer}
    train(model, optimizer, 1)
    save(state, folder / "1", form="packed", base=True)
    train(model, optimizer, 2)

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    doomed = mock.patch.object(LocalStore, "flush", die) if dist.get_rank() else mock.MagicMock()
    with doomed, error_of():
        save(state, folder / "2", base=True, patch=True, timeout=20)
