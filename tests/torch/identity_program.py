"""What ranks do in `test_identity.py`: they publish different tensors under one name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ucformat
from tests.torch.ranks import told
from ucformat.torch import certify, load, save

if TYPE_CHECKING:
    from pathlib import Path

WIDTH = 160  # of layers that are too large to be compared as small tensors


class Stage(torch.nn.Module):
    """A stage of a pipeline that numbers its layers from 0."""

    def __init__(self, first: int, count: int, *, fill: float | None = None) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)
        )
        for number, layer in enumerate(self.layers):
            torch.manual_seed(first + number)
            with torch.no_grad():
                if fill is None:
                    layer.weight.normal_()
                else:
                    layer.weight.fill_(fill)


def stage_of(kind: str, *, seed: int = 0) -> tuple[Stage, int]:
    """The stage of this rank of two or four, and the number of its first layer."""
    rank, size = dist.get_rank(), dist.get_world_size()
    first = 2 * (rank // (size // 2))
    stage = Stage(first + seed, 2)
    if kind == "fsdp2":  # each stage is sharded over its own ranks
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("pp", "dp"))
        fully_shard(stage, mesh=mesh["dp"])
    return stage, first


def stages(folder: Path, kind: str, form: Any) -> list[Any]:
    """Save with local names, which is refused; then with global ones, and load likewise."""
    stage, first = stage_of(kind)
    state = {"model": stage, "optimizer": trained(stage)}
    refused = told(lambda: save(state, folder / "local", form=form))
    names = {"layers.*": first}
    save(state, folder / "ck", form=form, names=names)
    other, _ = stage_of(kind, seed=7)
    fresh = {"model": other, "optimizer": torch.optim.AdamW(other.parameters())}
    certificate = load(fresh, folder / "ck", names=names, certify=True).certificate
    without = certify(fresh, folder / "ck")
    return [
        refused,
        sorted(ucformat.open(folder / "ck").names()),
        bool(certificate),
        [entry.name for entry in without.different if entry.state == "weight"],
        [entry.name for entry in without.unexpected if entry.state == "weight"],
    ]


def trained(stage: Stage) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(stage.parameters())
    for p in stage.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return optimizer


def one_element(folder: Path, form: Any) -> str:
    """A replica of a large tensor that differs in one element, far from any sample."""
    torch.manual_seed(0)
    weight = torch.randn(300, 300)
    if dist.get_rank() == 1:
        weight[123, 45] += 1
    return told(lambda: save({"model": {"w": weight}}, folder / "ck", form=form))


def another_mesh(folder: Path) -> str:
    """A tensor that two meshes hold, cut otherwise, and one rank holds whole; one element differs."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch.manual_seed(0)
    weight = torch.randn(300, 300)
    mesh = init_device_mesh("cpu", (2, 2))
    rows = [Shard(0)] if dist.get_rank() < 2 else [Replicate()]
    if dist.get_rank() == 3:
        weight[299, 0] += 1
    submesh = mesh[mesh.mesh_dim_names[1]] if mesh.mesh_dim_names else _second(mesh)
    tensor = distribute_tensor(weight, submesh, rows, src_data_rank=None)
    return told(lambda: save({"model": {"w": tensor}}, folder / "ck"))


def _second(_: Any) -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"]
