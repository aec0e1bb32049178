"""What ranks do in `test_certify.py`: tensors in many layouts, of which one rank spoils an element."""

from __future__ import annotations

import random
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from ucformat.torch import certify, save

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed.tensor import DTensor

WHOLE = (37, 26)


def layouts() -> dict[str, DTensor]:
    """A tensor under all placements over a line and a square of ranks; replicas, and parts that are empty."""
    torch.manual_seed(0)
    whole = torch.randn(WHOLE)
    size = dist.get_world_size()
    meshes = [init_device_mesh("cpu", (size,)), init_device_mesh("cpu", (2, size // 2))]
    return {
        f"{mesh.ndim}.{number}": distribute_tensor(whole.clone(), mesh, placements)
        for mesh in meshes
        for number, placements in enumerate(
            product([Replicate(), Shard(0), Shard(1)], repeat=mesh.ndim)
        )
    }


def spoilt(folder: Path, rounds: int) -> list[Any]:
    """For each round: which elements of which tensors which rank has changed, and what the certificate says."""
    tensors = layouts()
    save({"model": tensors}, folder / "ck")
    rows: list[Any] = [(bool(certify({"model": tensors}, folder / "ck")), [], [])]
    chance = random.Random(7)
    for _ in range(rounds):
        rank = chance.randrange(dist.get_world_size())
        names = sorted(chance.sample(sorted(tensors), chance.randint(1, 3)))
        changed, kept = [], {}
        for name in names:
            local = tensors[name].to_local()
            where = chance.random()
            if dist.get_rank() == rank and local.numel():
                kept[name] = local.clone()
                local.view(-1)[int(where * local.numel())] += 1
                changed.append((name, rank))
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, changed)
        certificate = certify({"model": tensors}, folder / "ck")
        found = [(entry.name, r) for entry in certificate.different for r in entry.ranks]
        rows.append((bool(certificate), told[rank], found))
        for name, local in kept.items():
            tensors[name].to_local().copy_(local)
    return rows


def partly(folder: Path) -> list[Any]:
    """Some ranks do not take part: what they alone hold is held by no rank."""
    tensors = {name: tensor for name, tensor in layouts().items() if name.startswith("1")}
    save({"model": tensors}, folder / "ck")
    group = dist.new_group([0, 1, 2])
    if dist.get_rank() == 3:
        return []
    certificate = certify({"model": tensors}, folder / "ck", group=group)
    return [(entry.name, entry.ranks, entry.detail) for entry in certificate.different]
