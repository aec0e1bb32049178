"""What ranks do in `test_sharing.py`: they load what some of them have in common, and tell what each read."""

from __future__ import annotations

import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.torch.costs_program import damage, expected_local
from tests.torch.faults_program import TIMEOUT, die, error_of, sharded
from ucformat.storage.base import Costs
from ucformat.storage.local import LocalStore
from ucformat.torch import load, save
from ucformat.torch.comm import group as tree
from ucformat.torch.comm.group import Host
from ucformat.torch.loading import read as reading
from ucformat.torch.loading import share

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SHAPES = (
    {f"layers.{n}.w": (128, 96) for n in range(6)}
    | {f"layers.{n}.norm": (96,) for n in range(6)}
    | {"step": ()}
)
#: So that tensors are cut into parts at the ends of chunks, and there are many rounds.
CHUNKS: dict[str, Any] = {"chunk_bytes": 4096, "shard_bytes": 1 << 20}
PART, ROUND, TURN = 16384, 8192, 4096


def whole(name: str) -> torch.Tensor:
    """The tensor of a name, the same on every rank."""
    generator = torch.Generator().manual_seed(sum(name.encode()))
    dtype = torch.bfloat16 if name.endswith("norm") else torch.float32
    return torch.randn(SHAPES[name], generator=generator).to(dtype)


def full_state() -> dict[str, torch.Tensor]:
    return {name: whole(name) for name in SHAPES}


def zeros() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(whole(name)) for name in SHAPES}


@contextmanager
def on_a_network(*, small: bool = True) -> Iterator[None]:
    """Local files are read as if they were on a network, in small parts and many rounds."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(LocalStore, "costs", replace(Costs(), parallel=2)))
        if small:
            stack.enter_context(mock.patch.object(reading, "STAGED_BYTES", PART))
            stack.enter_context(mock.patch.multiple(share, _ROUND_BYTES=ROUND, _TURN_BYTES=TURN))
        yield


def on_hosts(names: str) -> None:
    """Let each rank be on the host that has its letter."""
    here = Host(f"host {names[dist.get_rank()]}", "127.0.0.1")
    mock.patch.object(tree, "host_here", return_value=here).start()


def loaded(
    state: dict[str, torch.Tensor], place: str | Path, **options: Any
) -> tuple[int, int, bool]:
    """Bytes that this rank read, bytes that it holds, and whether they are what was saved."""
    report = load(state, place, timeout=TIMEOUT, **options)
    nbytes, equal = 0, True
    for name, tensor in state.items():
        mine = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        expected = expected_local(tensor, whole(name))
        nbytes += expected.nbytes
        equal = equal and bool(torch.equal(mine, expected.to(mine.dtype)))
    return report.nbytes, nbytes, equal


def save_there(_: Path, place: str) -> None:
    save(full_state(), place, **CHUNKS)


def load_from(_: Path, place: str) -> Any:
    with on_a_network():
        return loaded(zeros(), place)


def layouts(folder: Path, hosts: str) -> Any:
    """Plain replicas, tensor parallelism with replicated norms, and HSDP, on hosts as given."""
    on_hosts(hosts)
    save(full_state(), folder / "ck", **CHUNKS)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))

    def hybrid(name: str) -> torch.Tensor:
        local = torch.zeros_like(whole(name).chunk(2)[0])
        return DTensor.from_local(local, mesh, [Replicate(), Shard(0)], run_check=False)

    matrices = [name for name in SHAPES if name.endswith("w")]
    out = {}
    with on_a_network():
        out["plain"] = loaded(zeros(), folder / "ck")
        out["tp"] = loaded(
            zeros() | {n: sharded(torch.zeros(128, 96), 0) for n in matrices}, folder / "ck"
        )
        out["hsdp"] = loaded({n: hybrid(n) for n in matrices}, folder / "ck")
    with on_a_network(small=False):
        out["one round"] = loaded(zeros(), folder / "ck")
    out["local"] = loaded(zeros(), folder / "ck")
    return out


def targets(folder: Path) -> Any:
    """Targets of other dtypes and strides on each rank, and a stored tensor that two tensors are read from."""
    rank = dist.get_rank()
    save(full_state(), folder / "ck", **CHUNKS)
    dtype = (torch.float32, torch.float64, torch.bfloat16, torch.float32)[rank]
    a, *rest = [name for name in SHAPES if name.endswith("w")]
    state = zeros()
    state[a] = torch.zeros(96, 128, dtype=dtype).t()
    state[rest[0]] = torch.zeros(130, 96 * 2, dtype=dtype)[1:-1, 1::2]
    bases = [state[rest[0]]._base]

    def late(
        part: Any,
    ) -> torch.Tensor:  # what is read too early into memory that this rank has yet to copy is seen
        time.sleep(0.005)
        return reading.target_of(part)

    if rank == 3:
        mock.patch.object(share, "target_of", late).start()
    with on_a_network():
        out = loaded(state, folder / "ck", cast=True)
        untouched = all(
            int((b != 0).sum()) == int((whole(rest[0]) != 0).sum()) for b in bases if b is not None
        )
        w = whole(a)
        save({"x": w, "y": w}, folder / "tied", **CHUNKS)  # one memory: `y` is another name of `x`
        again = {"x": torch.zeros_like(w), "y": torch.zeros_like(w)}
        report = load(again, folder / "tied")
    return *out, untouched, report.nbytes, all(torch.equal(t, w) for t in again.values())


def refused(folder: Path) -> Any:
    """Rank 1 may not use the memory of rank 0."""
    save(full_state(), folder / "ck", **CHUNKS)
    if dist.get_rank() == 1:
        mock.patch.object(share, "map_range", return_value=None).start()
    return load_from(folder, str(folder / "ck"))


def failing(folder: Path, how: str) -> Any:
    """A part is damaged, a rank cannot plan, read or copy in some round, or is killed; then another load."""
    rank = dist.get_rank()
    save(full_state(), folder / "ck", **CHUNKS)
    save(full_state(), folder / "damaged", **CHUNKS)
    dist.barrier()
    if not rank:
        damage(folder / "damaged")
    dist.barrier()
    name = {
        "plan": "parts_of",
        "read": "read_checked",
        "killed": "read_checked",
        "copy": "target_of",
        "damaged": "",
    }[how]
    calls = 0

    def broken(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if name != "parts_of" and calls <= 3:
            return getattr(reading, name)(*args)
        if how == "killed":
            die()
        raise OSError("broken")

    with ExitStack() as stack:
        stack.enter_context(on_a_network())
        if rank == 2 and name:
            stack.enter_context(mock.patch.object(share, name, broken))
        with error_of() as seen:
            load(zeros(), folder / ("damaged" if how == "damaged" else "ck"), timeout=TIMEOUT)
    after = None if how == "killed" else load_from(folder, str(folder / "ck"))
    return seen, after
