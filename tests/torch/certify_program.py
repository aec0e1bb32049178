"""What ranks do in `test_certify.py`."""

from __future__ import annotations

import random
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ucformat.errors import StateMismatch
from ucformat.torch import Rng, certify, load, save

if TYPE_CHECKING:
    from pathlib import Path

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


def wrong_place(folder: Path, wrong: int) -> list[str]:
    """A rank takes its part of a tensor for that of the other, and holds that."""
    from ucformat.torch.state import local

    mesh, whole = init_device_mesh("cpu", (2,)), torch.arange(8.0)
    tensor = DTensor.from_local(whole[4 * dist.get_rank() :][:4], mesh, [Shard(0)])
    save({"model": {"w": tensor}}, folder / "ck")
    if dist.get_rank() == wrong:
        local.coordinate_of = lambda mesh: (1 - wrong,)
        tensor.to_local().copy_(whole[4 * (1 - wrong) :][:4])
    certificate = certify({"model": {"w": tensor}}, folder / "ck")
    return [str(entry) for entry in certificate.different]


def an_additional_rank(folder: Path) -> tuple[bool, list[str]]:
    """Generators that one rank has saved are loaded by two; then the second one draws a number."""
    alone = dist.new_group([0])
    if dist.get_rank() == 0:
        save({"rng": Rng()}, folder / "ck", group=alone)
    dist.barrier()
    state = {"rng": Rng()}
    certified = bool(load(state, folder / "ck", certify=True).certificate)
    if dist.get_rank() == 1:
        torch.rand(1)
    return certified, [str(entry) for entry in certify(state, folder / "ck").different]


def unlike(folder: Path) -> list[Any]:
    """Rank 0 lacks a tensor and a value of entries that the state of rank 1 does not have at all."""
    entries = {"model": {"a": torch.ones(2), "b": torch.ones(2)}, "notes": {"x": 1, "y": 2}}
    save({"shared": {"x": 1, "y": 2}, **entries}, folder / "ck")
    state: dict[str, Any] = {"shared": {"x": 1} if dist.get_rank() == 0 else {"y": 2}}
    if dist.get_rank() == 0:
        state |= {"model": {"a": torch.ones(2)}, "notes": {"x": 1}}
    try:
        load(state, folder / "ck", strict=True)
    except StateMismatch as error:
        refused = str(error)
    certificate = certify(state, folder / "ck")
    return [
        refused,
        load(state, folder / "ck").unexpected,
        bool(certificate),
        [entry.name for entry in certificate.unexpected],
    ]
