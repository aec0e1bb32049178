"""What trainers and receivers do in `test_publishing.py`."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import ucformat.torch
from ucformat.errors import UcformatError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def weights(version: int) -> dict[str, torch.Tensor]:
    """What a version is: weights after steps of 1e-6, rows that are touched, and a tensor that is not."""
    random_bits = torch.Generator().manual_seed(7)
    start = torch.randn(301, 1703, generator=random_bits) * 0.02
    drift = torch.randn(start.shape, generator=random_bits).sign()
    table = torch.randn(513, 64, generator=random_bits)
    for n in range(version % 50 + 1):
        table[(n * 37) % 513] += 1
    table[5] = version
    return {
        "weight": (start + 1e-6 * version * drift).bfloat16(),
        "table": table,
        "norm": torch.full((65,), 1.0 + version),
        "seldom": torch.arange(1200.0).view(60, 20) + version // 5,
        "frozen": torch.arange(70_000).view(2, -1),
    }


def sharded(tensors: Mapping[str, torch.Tensor], dim: int) -> dict[str, DTensor]:
    """Tensors that are sharded along a dim, if they have it, else along the first."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        name: distribute_tensor(tensor, mesh, [Shard(min(dim, tensor.ndim - 1))])
        for name, tensor in tensors.items()
    }


def train(folder: Path, channel: str, versions: int) -> list[int | None]:
    """Publish versions; the base of each."""
    increments = ucformat.torch.Increments(patch=True, max_chain=5)
    publisher = ucformat.torch.Publisher(channel, increments=increments, keep=2)
    bases = []
    for version in range(1, versions + 1):
        state = {"model": sharded(weights(version), 0), "step": version}
        bases.append(publisher.publish(state).base)
    return bases


def receive(
    folder: Path, channel: str, last: int | None, seconds: float = 0
) -> list[tuple[int, str]]:
    """Follow a channel in another layout up to a version, or until this is killed; each version, and how it came."""
    if last is None:
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
    subscription = ucformat.torch.subscribe(channel)
    model = sharded({n: torch.zeros_like(t) for n, t in weights(0).items()}, 1)
    state = {"model": model, "step": 0}
    seen = []
    while subscription.version != last:
        try:
            assert subscription.wait(120) is not None
            update = subscription.update(state)
        except UcformatError:
            if last is not None:
                raise
            time.sleep(120)  # the other rank has been killed, and so is this one
            raise
        assert update is not None
        assert update.version == subscription.version == state["step"]
        expected = sharded(weights(update.version), 1)
        for name, tensor in model.items():
            assert torch.equal(tensor.to_local(), expected[name].to_local()), (update, name)
        seen.append((update.version, update.whole))
        time.sleep(random.random() * 0.05)
    return seen
