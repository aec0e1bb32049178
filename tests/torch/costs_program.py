"""What ranks measure in `test_costs.py`: what a save sends and holds, and what a load reads."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import ucformat
from tests.torch.faults_program import error_of, sharded
from ucformat.torch import PerRank, Rng, load, save
from ucformat.torch.comm import bulk
from ucformat.torch.comm.bulk import Links
from ucformat.torch.comm.group import Group, group_of
from ucformat.torch.saving.plan import SavePlanner
from ucformat.torch.state.elements import SharedRange, write_shared

MIB = 1 << 20


class Sent:
    """Counts the bytes that this rank sends in our groups: of plans, of tensors, and those that it writes to others."""

    def __init__(self) -> None:
        self.plain: Any = Links.send, Group.send_bulk, write_shared
        self.bytes: Counter[str] = Counter()

    def __enter__(self) -> Counter[str]:
        counts, (plain, plain_bulk, plain_write) = self.bytes, self.plain

        def send(self: Links, other: int, tag: int, parts: Any) -> None:
            counts["plans"] += sum(map(len, parts))
            plain(self, other, tag, parts)

        def counted(parts: Any) -> Any:
            found = parts()
            counts["tensors"] += sum(part.size for part in found)
            return found

        def send_bulk(group: Group, messages: Any) -> None:
            plain_bulk(group, ((to, partial(counted, parts)) for to, parts in messages))

        def write(target: SharedRange, parts: Any) -> bool:
            done: bool = plain_write(target, parts)
            counts["shared"] += target.nbytes * done
            return done

        Links.send, Group.send_bulk = send, send_bulk  # type: ignore[method-assign, assignment]
        bulk.write_shared = write  # type: ignore[attr-defined]
        return counts

    def __exit__(self, *_: object) -> None:
        Links.send, Group.send_bulk, bulk.write_shared = self.plain  # type: ignore[method-assign, attr-defined]


def many(seed: float, count: int = 100) -> dict[str, torch.Tensor]:
    """Many small tensors, half of them cut over the ranks."""
    whole = torch.full((6, 4), seed)
    return {
        f"layers.{n}.weight": sharded(whole, 0) if n % 2 else whole.clone() for n in range(count)
    }


def plans(folder: Path, form: str) -> Any:
    """What is told for the first save, for further ones, and where one rank's state or all ranks' changed."""
    states: dict[str, dict[str, torch.Tensor]] = {
        "first": many(1),
        "second": many(2),
        "third": many(3),
    }
    states["other"] = {**many(4), "more": torch.ones(3)}
    states["same again"] = {**many(5), "more": torch.ones(3)}
    mine = {"extra": torch.ones(2)} if not dist.get_rank() else {}
    states["one rank"] = {**many(6), "more": torch.ones(3), **mine}
    states["back"] = many(7)
    out = {}
    for name, state in states.items():
        with Sent() as sent:
            save(state, folder / name, form=form)  # type: ignore[arg-type]
        out[name] = sent["plans"]
    with Sent() as sent:  # other terms need another plan
        save(states["back"], folder / "terms", form="packed" if form == "zarr" else "zarr")
    out["terms"] = sent["plans"]
    return out


def parts(folder: Path) -> Any:
    """What is told in a load where each rank wants half of the tensors, as pipeline stages do, and what none wants."""
    whole = {
        f"layers.{n:04}.some.long.name.of.a.weight": torch.full((2,), float(n)) for n in range(1000)
    }
    save(whole, folder / "ck")
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = {k: torch.zeros(2) for n, k in enumerate(whole) if n % size == rank and n < 990}
    ck = ucformat.open(folder / "ck")  # whose manifest rank 0 would tell, too
    with Sent() as sent:
        report = load(mine, ck)
    assert all(torch.equal(mine[k], whole[k]) for k in mine)
    save({"another": torch.zeros(1)}, folder / "other")
    with error_of() as seen:
        load(mine, folder / ("other" if rank else "ck"))
    return sent["plans"], report.unexpected, seen


def twice_as_large(folder: Path) -> Any:
    """What is told for a state, and for one of the same tensors a hundred times as large."""
    out = []
    for n, size in enumerate((1000, 100_000)):
        group_of().links.kept.clear()
        with Sent() as sent:
            save(
                {"a": torch.ones(size), "b": sharded(torch.ones(size), 0)},
                folder / str(n),
                form="packed",
            )
        out.append(sent["plans"])
    return out


def _replicated(shape: tuple[int, ...], mesh: Any, placements: list[Any]) -> torch.Tensor:
    rows = shape[0] // (mesh.size(1) if mesh.ndim > 1 else 1)
    return DTensor.from_local(
        torch.zeros(rows, *shape[1:]),
        mesh,
        placements,
        run_check=False,
        shape=shape,
        stride=(shape[1], 1),
    )


def reads(folder: Path, form: str) -> Any:
    """Bytes that this rank reads of a state of 16 MiB: replicas that share or not, shards, and columns of shards."""
    rank, size = dist.get_rank(), dist.get_world_size()
    shape = (2048, 1024)
    whole = torch.arange(2048 * 1024, dtype=torch.float32).reshape(shape)
    save({"a": whole, "b": whole + 1}, folder / "ck", form=form)  # type: ignore[arg-type]
    out: dict[str, Any] = {}

    def loaded(name: str, state: dict[str, torch.Tensor], **options: Any) -> None:
        report = load(state, folder / "ck", **options)
        held = 0
        for key, tensor in state.items():
            full = whole + (key == "b")
            mine = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            held += mine.numel() * 4
            expected = expected_local(tensor, full)
            assert torch.equal(mine, expected)
        out[name] = (report.nbytes, held)

    everybody = dist.group.WORLD
    loaded("copies", {k: torch.zeros(shape) for k in "ab"})
    loaded("copies, shared", {k: torch.zeros(shape) for k in "ab"}, broadcast_group=everybody)
    loaded(
        "transposed copies, shared",
        {k: torch.zeros(shape[::-1]).t() for k in "ab"},
        broadcast_group=everybody,
    )
    loaded("rows", {k: sharded(torch.zeros(shape), 0) for k in "ab"})
    loaded("columns", {k: sharded(torch.zeros(shape), 1) for k in "ab"})
    loaded(
        "shards, shared in vain",
        {k: sharded(torch.zeros(shape), 0) for k in "ab"},
        broadcast_group=everybody,
    )
    if size == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        hybrid = {k: _replicated(shape, mesh, [Replicate(), Shard(0)]) for k in "ab"}
        loaded("hybrid, shared", hybrid, broadcast_group=mesh.get_group("replicas"))
    dist.barrier()
    if not rank:
        damage(folder / "ck")
    dist.barrier()
    with error_of() as seen:
        load({k: torch.zeros(shape) for k in "ab"}, folder / "ck", broadcast_group=everybody)
    out["damaged"] = seen
    return out


def damage(place: Path) -> None:
    """Change one byte of the largest file."""
    largest = max((p for p in place.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    with largest.open("r+b") as file:
        file.seek(4321)
        byte = file.read(1)
        file.seek(4321)
        file.write(bytes([byte[0] ^ 1]))


def expected_local(tensor: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return full
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            parts = full.chunk(tensor.device_mesh.size(axis), placement.dim)
            full = parts[tensor.device_mesh.get_local_rank(axis)]
    return full


def _peak(*, reset: bool = False) -> int:
    """The most bytes of memory that this process had, since it was last reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def memory(folder: Path) -> Any:
    """By how much memory grows in a save of 256 MiB of which each rank holds columns, so that half of it is sent."""
    columns = 16384 // dist.get_world_size()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    local = torch.full((4096, columns), float(dist.get_rank()))
    tensor = DTensor.from_local(
        local, mesh, [Shard(1)], run_check=False, shape=(4096, 16384), stride=(16384, 1)
    )
    save({"warm": torch.ones(4)}, folder / "warm")
    out: dict[str, Any] = {}
    for form, options in (("zarr", {"shard_bytes": 16 * MIB}), ("packed", {})):
        before = _peak(reset=True)
        with Sent() as sent:
            save({"w": tensor}, folder / form, form=form, **options)  # type: ignore[arg-type]
        assert sent["shared"] == sent["tensors"]
        out[form] = (_peak() - before, sent["tensors"])
    out["left open"] = [
        link for fd in Path("/proc/self/fd").iterdir() if "memfd:" in (link := _link(fd))
    ]
    target = torch.zeros(4096, columns)
    again = DTensor.from_local(
        target, mesh, [Shard(1)], run_check=False, shape=(4096, 16384), stride=(16384, 1)
    )
    for form in ("zarr", "packed"):
        target.zero_()
        before = _peak(reset=True)
        load({"w": again}, folder / form)
        out[f"load {form}"] = (_peak() - before, bool(torch.equal(target, local)))
    return out


def _link(path: Path) -> str:
    try:
        return str(path.readlink())
    except FileNotFoundError:  # of the listing itself
        return ""


def save_per_rank(folder: Path) -> Any:
    """What each rank has for itself: plain values, random generators."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    save(
        {"at": PerRank({"rank": rank, "t": torch.full((2,), float(rank))}), "rng": Rng(), "n": 5},
        folder / "ck",
    )
    return torch.rand(2).tolist()


def merged(values: list[Any], rank: int, ranks: int) -> Any:
    return {"rank": [v["rank"] for v in values], "t": values[-1]["t"], "new": (rank, ranks)}


def load_per_rank(folder: Path) -> Any:
    """The same on any number of ranks, with and without a merge."""
    torch.manual_seed(77)
    state: dict[str, Any] = {"at": PerRank({"rank": -1, "t": torch.zeros(2)}), "rng": Rng(), "n": 0}
    with error_of() as seen:
        load(state, folder / "ck")
    untouched = (state["at"].value["rank"], state["n"])
    state["at"] = PerRank({"rank": -1, "t": torch.zeros(2)}, merge=merged)
    load(state, folder / "ck")
    value = state["at"].value
    drawn = torch.rand(2).tolist()
    return seen, untouched, {**value, "t": value["t"].tolist()}, drawn, state["n"]


def some_ranks(folder: Path, form: str) -> Any:
    """How many tensors are described where every second rank saves, some of them over a mesh of all ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group(list(range(first, size, 2))) for first in (0, 1)]
    meshes = [DeviceMesh("cpu", list(range(first, size, 2))) for first in (0, 1)]
    whole = torch.arange(24.0).reshape(12, 2)
    parity = rank % 2
    parts = whole.chunk(size // 2)
    mine = DTensor.from_local(parts[rank // 2].clone(), meshes[parity], [Shard(0)], run_check=False)
    save({"mine": mine, "same": whole}, folder / f"{parity}", form=form, group=groups[parity])  # type: ignore[arg-type]
    listed = group_of(groups[parity]).links.kept[SavePlanner].listed
    ck = ucformat.open(folder / f"{parity}")
    return sorted(str(t.info.key) for t in listed), ck["mine"].read().tolist() == whole.tolist()
