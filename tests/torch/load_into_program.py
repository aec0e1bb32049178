"""What ranks do in `test_load_into.py`: two of them share a model by tensor parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ucformat.geometry.layout import Layout
from ucformat.torch import load_into

WIDTH, INNER = 12, 20
LAYOUT = Layout(
    mesh={"tp": 2},
    rules=[
        {"match": ["up.weight", "up.bias"], "place": [{"shard": 0, "over": "tp"}]},
        {"match": "down.weight", "place": [{"shard": 1, "over": "tp"}]},
        {"match": "*", "place": ["replicate"]},
    ],
)


class Mlp(torch.nn.Module):
    """Two matrices, of which each rank may have a part."""

    def __init__(self, inner: int = INNER) -> None:
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, inner)
        self.down = torch.nn.Linear(inner, WIDTH, bias=False)
        self.norm = torch.nn.LayerNorm(WIDTH)

    def forward(self, x: Any) -> Any:
        return self.down(self.up(self.norm(x)).relu())


def inputs() -> torch.Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(3))


def by_layout(folder: str) -> list[bytes]:
    """Plain parameters that are a rank's part, on the host and on the meta device; the sum over ranks is the result."""
    out = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = Mlp(INNER // 2)
        assert load_into(model, Path(folder), layout=LAYOUT) == ([], [])
        with torch.no_grad():
            found = model(inputs())
        dist.all_reduce(found)
        out.append(found.numpy().tobytes())
    return out


def by_dtensor(folder: str) -> list[bytes]:
    """DTensors, on the host and on the meta device."""
    mesh = init_device_mesh("cpu", (2,))
    out = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = Mlp()
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        assert load_into(model, Path(folder)) == ([], [])
        assert model.up.weight.to_local().shape == (INNER // 2, WIDTH)
        with torch.no_grad():
            out.append(model(inputs()).numpy().tobytes())
    return out
