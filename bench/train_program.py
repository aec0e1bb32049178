"""What the ranks of `python -m bench.train` do; run by torchrun. Prints one line of JSON for each round and measure."""

from __future__ import annotations

import json
import mmap
import os
import pkgutil
import resource
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import ucformat.torch as uct
from bench.readers import RAW

HIDDEN, INTER, LAYERS, VOCAB = 1536, 4096, 8, 16_000


def shapes() -> dict[str, tuple[int, ...]]:
    """A Llama-like model of 1.1 GB in float32."""
    out: dict[str, tuple[int, ...]] = {"embed.weight": (VOCAB, HIDDEN)}
    for i in range(LAYERS):
        for name in ("q", "k", "v", "o"):
            out[f"layers.{i}.{name}.weight"] = (HIDDEN, HIDDEN)
        out[f"layers.{i}.gate.weight"] = out[f"layers.{i}.up.weight"] = (INTER, HIDDEN)
        out[f"layers.{i}.down.weight"] = (HIDDEN, INTER)
        out[f"layers.{i}.norm1.weight"] = out[f"layers.{i}.norm2.weight"] = (HIDDEN,)
    return {**out, "norm.weight": (HIDDEN,), "head.weight": (VOCAB, HIDDEN)}


def placed(name: str, shape: tuple[int, ...], kind: str) -> list[Any]:
    """FSDP2 cuts the first dim; TP the second of what is row-parallel, else the first; `columns` the second."""
    if kind == "fsdp2":
        return [Shard(0)]
    if len(shape) < 2:
        return [Replicate()]
    return [Shard(1) if kind == "columns" or name.split(".")[-2] in ("o", "down") else Shard(0)]


def state(mesh: DeviceMesh, kind: str, *, fill: bool) -> dict[str, DTensor]:
    out = {}
    for number, (name, shape) in enumerate(shapes().items()):
        placements = placed(name, shape, kind)
        local = list(shape)
        for p in placements:
            if isinstance(p, Shard):
                rows = -(-shape[p.dim] // mesh.size())
                local[p.dim] = max(0, min(rows, shape[p.dim] - rows * mesh.get_local_rank()))
        tensor = torch.empty(local)
        if fill:
            torch.manual_seed(
                number * 1000 + (mesh.get_local_rank() if kind == "fsdp2" or len(shape) > 1 else 0)
            )
            tensor.normal_()  # replicas alike
        else:
            tensor.fill_(-1)
        whole = {"shape": torch.Size(shape), "stride": (shape[1], 1) if len(shape) == 2 else (1,)}
        out[name] = DTensor.from_local(tensor, mesh, placements, run_check=False, **whole)
    return out


def timed(act: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds until the last rank is done."""
    dist.barrier()
    begun = time.perf_counter()
    found = act()
    dist.barrier()
    return time.perf_counter() - begun, found


def raw(folder: Path, tensors: dict[str, DTensor]) -> None:
    """The same ranks write the same bytes, each to one file, and make it durable."""
    with Path(folder / f"raw-{dist.get_rank()}").open("wb", buffering=0) as f:
        for t in tensors.values():
            f.write(t.to_local().numpy().reshape(-1).view("u1").data)
            f.seek(-(-f.tell() // mmap.PAGESIZE) * mmap.PAGESIZE)  # so that each can be mapped
        os.ftruncate(f.fileno(), f.tell())
        os.fsync(f.fileno())


def read_raw(folder: Path, tensors: dict[str, DTensor], way: str) -> None:
    """Read as many bytes in the order of the file, in one of the raw ways of `bench.read`."""
    at = 0
    fd = os.open(folder / f"raw-{dist.get_rank()}", os.O_RDONLY)
    for t in tensors.values():
        view = t.to_local().numpy().reshape(-1).view("u1").data
        RAW[way](fd, view, at)
        at += -(-view.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    os.close(fd)


Tell = Callable[[str, float], None]


def main() -> None:
    folder, rounds = Path(sys.argv[1]), int(sys.argv[2])
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    world = dist.get_world_size()

    def tell(measure: str, value: float) -> None:
        values: list[float] = [0.0] * world
        dist.all_gather_object(values, value)
        if not dist.get_rank():
            print(json.dumps({"world": world, "measure": measure, "values": values}), flush=True)

    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    save(folder, state(mesh, "fsdp2", fill=True), rounds, tell)
    load(folder, mesh, rounds, tell)
    share(folder, tell)
    dist.destroy_process_group()


def save(folder: Path, saved: dict[str, DTensor], rounds: int, tell: Tell) -> None:
    """Save by each means in turn; then, in the background, beside a plain copy."""
    held = sum(t.to_local().nbytes for t in saved.values())
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    means: dict[str, Callable[[Path], object]] = {
        "raw": lambda place: raw(place, saved),
        "dcp": lambda place: dcp.save({"model": saved}, checkpoint_id=place),
        "packed": lambda place: uct.save({"model": saved}, place, form="packed"),
        "zarr": lambda place: uct.save({"model": saved}, place),
    }
    for _ in range(rounds + 1):
        for name, act in means.items():
            place = fresh(folder, name)
            tell(f"save {name}", timed(partial(act, place))[0])
    tell("memory", (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident) * 1024 / held)
    tensors = [t.to_local() for t in saved.values()]
    copies = [torch.zeros_like(t) for t in tensors]
    arrays = [(c.numpy(), t.numpy()) for c, t in zip(copies, tensors, strict=True)]
    for _ in range(rounds + 1):
        tell(
            "memcpy torch",
            timed(lambda: [c.copy_(t) for c, t in zip(copies, tensors, strict=True)])[0],
        )
        tell("memcpy numpy", timed(lambda: list(map(np.copyto, *zip(*arrays, strict=True))))[0])
        place = fresh(folder, "async")
        seconds, handle = timed(partial(uct.async_save, {"model": saved}, place, form="packed"))
        tell("blocked", seconds)
        handle.wait()


def fresh(folder: Path, name: str) -> Path:
    """A place where nothing is, and nothing of before is left to write back."""
    place = folder / name
    dist.barrier()
    if not dist.get_rank():
        shutil.rmtree(place, ignore_errors=True)
        if name == "raw":
            place.mkdir()
        os.sync()
    dist.barrier()
    return place


def load(folder: Path, mesh: DeviceMesh, rounds: int, tell: Tell) -> None:
    """Load what was saved under other layouts, each time over memory that was touched; ours must equal DCP's."""
    for kind in ("fsdp2", "tp", "columns"):
        target = state(mesh, kind, fill=False)
        wanted = sum(t.to_local().nbytes for t in target.values())
        for number in range(rounds + 1):
            if kind == "fsdp2":
                for way in RAW:
                    tell(
                        f"load raw {way}", timed(partial(read_raw, folder / "raw", target, way))[0]
                    )
            tell(
                f"load dcp {kind}",
                timed(partial(dcp.load, {"model": target}, checkpoint_id=folder / "dcp"))[0],
            )
            expected = {n: t.to_local().clone() for n, t in target.items()} if number == 0 else {}
            for form in ("packed", "zarr"):
                for t in target.values() if expected else ():
                    t.to_local().fill_(-1)
                seconds, _ = timed(
                    partial(uct.load, {"model": target}, folder / form, verify="never")
                )
                tell(f"load {form} unverified {kind}", seconds)
                seconds, report = timed(partial(uct.load, {"model": target}, folder / form))
                tell(f"load {form} {kind}", seconds)
                tell(f"read {form} {kind}", report.nbytes / wanted)
                for n, e in expected.items():
                    assert torch.equal(target[n].to_local(), e), n
        for form in ("packed", "zarr"):
            for _ in range(rounds):
                taken = profiled(partial(uct.load, {"model": target}, folder / form, threads=1))
                for part, seconds in taken.items():
                    tell(f"profile {form} {kind} {part}", seconds)
        del target


#: part of a load -> what is timed
PARTS = {
    "exchange": "ucformat.torch.comm.group.Group.combine",
    "plan": "ucformat.reading.execute.make_plan",
    "execute": "ucformat.reading.execute.execute",
    "read": "ucformat.storage.local.LocalStore.read_into",
}


def profiled(act: Callable[[], Any]) -> dict[str, float]:
    """The seconds of each part of a load, and of all of it."""
    found = dict.fromkeys(PARTS, 0.0)

    def timing(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed_part(*args: Any, **options: Any) -> Any:
            begun = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                found[part] += time.perf_counter() - begun

        return timed_part

    with ExitStack() as stack:
        for part, name in PARTS.items():
            module, _, attribute = name.rpartition(".")
            holder = pkgutil.resolve_name(module)
            stack.enter_context(
                mock.patch.object(holder, attribute, timing(part, getattr(holder, attribute)))
            )
        seconds, _ = timed(act)
    return {"all": seconds, **found}


def share(folder: Path, tell: Tell) -> None:
    """Load all of it on every rank, each byte read by one of them."""
    whole = {n: torch.empty(s) for n, s in shapes().items()}
    total = sum(t.nbytes for t in whole.values())
    for form in ("packed", "zarr"):
        shared = partial(
            uct.load, {"model": whole}, folder / form, broadcast_group=dist.group.WORLD
        )
        seconds, report = timed(shared)
        tell(f"load shared {form}", seconds)
        tell(f"read shared {form}", report.nbytes / total)


if __name__ == "__main__":
    main()
