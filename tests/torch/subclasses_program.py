"""Wrappers inside DTensors, saved and loaded by ranks; each scenario gives what a rank has found."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.torch.wrappers import Blocks, Scaled
from ucformat.errors import LayoutError, UcformatError, UsageError
from ucformat.torch import Reader, Writer, async_save, load, save

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["blocks", "collected", "optimizer", "scaled"]

COLUMNS, PER_ROW = 8, 2


def whole(rows: int) -> Blocks:
    """The wrapper on one rank: a table as long as there are rows on two ranks."""
    codes = torch.arange(rows * COLUMNS).remainder(251).to(torch.uint8).reshape(rows, COLUMNS)
    return Blocks.of(codes, torch.arange(rows * PER_ROW).float(), torch.arange(6.0) + 100)


def mine(
    of: Blocks, placements: tuple[Any, ...], sizes: tuple[int, ...], *, empty: bool = False
) -> DTensor:
    """This rank's part as a DTensor."""
    names = tuple(f"axis{n}" for n in range(len(sizes)))
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)

    def part(t: torch.Tensor) -> torch.Tensor:
        return distribute_tensor(t, mesh, placements, src_data_rank=None).to_local().clone()

    codes = part(of.codes)
    scale = part(of.scale.reshape(of.codes.shape[0], -1)).flatten()
    local = Blocks.of(codes, scale, of.table.clone())
    if empty:
        for tensor in local.inner.values():
            tensor.zero_()
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=of.codes.shape, stride=of.codes.stride()
    )


def parts(tensor: DTensor) -> list[list[float]]:
    with torch.no_grad():
        return [t.flatten().tolist() for t in tensor.to_local().inner.values()]


LAYOUTS: dict[int, list[tuple[tuple[Any, ...], tuple[int, ...]]]] = {
    1: [((Shard(0),), (1,))],
    2: [((Shard(0),), (2,)), ((Replicate(),), (2,))],
    3: [((Shard(0),), (3,))],
    4: [((Replicate(), Shard(0)), (2, 2)), ((Shard(0), Shard(0)), (2, 2))],
}


def blocks(folder: Path, *, writes: bool) -> list[bool]:
    """Save in each way under the layouts of this number of ranks; or load all that was saved, into each of them."""
    found = []
    for (number, (placements, sizes)), rows in product(
        enumerate(LAYOUTS[dist.get_world_size()]), (12, 10)
    ):
        for form in ("zarr", "packed", "dcp", "async") if writes else ():
            state = {"w": mine(whole(rows), placements, sizes), "n": 1}
            place = folder / f"{form}-{number}-of-{rows}"
            if form == "dcp":
                dcp.save(state, storage_writer=Writer(place))
            elif form == "async":
                async_save(state, place).wait()
            else:
                save(state, place, form=cast("Literal['zarr', 'packed']", form))
        for source in () if writes else sorted(folder.glob(f"*-of-{rows}")):
            expected = parts(mine(whole(rows), placements, sizes))
            first, second = (mine(whole(rows), placements, sizes, empty=True) for _ in range(2))
            found += [bool(load({"w": first, "n": 0}, source)), parts(first) == expected]
            dcp.load({"w": second, "n": 0}, storage_reader=Reader(source))
            found.append(parts(second) == expected)
    return found


def scaled(folder: Path) -> list[str]:
    """What is refused of wrappers that cannot be sliced, and what is not; the messages."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))

    def made(factor: float, **inner: torch.Tensor) -> DTensor:
        return DTensor.from_local(
            Scaled({"elements": torch.ones(4, 6) * factor, **inner}),
            mesh,
            [Shard(0)],
            run_check=False,
        )

    messages = []
    cases = {
        "rows": made(
            rank,
            scale=torch.full((4, 1), float(rank)),
            all=torch.tensor(2.0),
            column=torch.ones(1, 6),
        ),
        "each its own": made(1, scale=torch.tensor(float(rank))),
        "a table": made(1, table=torch.ones(4)),
        "a slice of a block": made(1, scale=torch.ones(3, 6)),
    }
    for name, tensor in cases.items():
        for replicas in ("equal", "first"):
            try:
                save({"w": tensor}, folder / name, overwrite=True, replicas=replicas)
                messages.append("saved")
            except (UcformatError, LayoutError, UsageError) as error:
                messages.append(str(error))
    return messages


def optimizer(folder: Path, kind: str, *, writes: bool) -> list[Any]:
    """A model under FSDP2 and an optimizer of torchao: its states after two steps; or as loaded, and two more steps."""
    import torchao.optim

    torch.compile = lambda function=None, **_: function  # it needs a compiler, and changes nothing
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(512, 768, bias=False), torch.nn.ReLU(), torch.nn.Linear(768, 512)
    )
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    made = getattr(torchao.optim, kind)(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": made}
    if not writes:
        assert load(state, folder / kind, strict=True)
    before = collected(made)
    for step in range(2):
        torch.manual_seed(10 + step)
        model(torch.randn(4, 512)).square().mean().backward()
        made.step()
        made.zero_grad()
    if writes:
        save(state, folder / kind)
        before = collected(made)
    return before


def collected(optimizer: torch.optim.Optimizer) -> list[Any]:
    """The states of all ranks, dequantized, on rank 0."""
    out = []
    for states in optimizer.state.values():
        for name, tensor in states.items():
            with torch.no_grad():
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                plain = (
                    local.dequantize()
                    if hasattr(local, "dequantize") and type(local) is not torch.Tensor
                    else local
                )
            every: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(every, plain)
            out.append((name, torch.cat(every) if isinstance(tensor, DTensor) else every[0]))
    return out if dist.get_rank() == 0 else []
