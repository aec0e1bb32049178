"""A run of several ranks of which one is told to stop, then damage and failures: `manager_program.py FOLDER`."""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.torch.leaving import leave
from ucformat.torch import Manager, PerRank, Saved

ROWS = 41


def state_at(step: int) -> dict[str, Any]:
    """A sharded tensor, a replicated one, and a value for each rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(ROWS * 8.0).view(ROWS, 8) + step
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    return {
        "model": {"w": sharded, "b": torch.full((5,), float(step))},
        "own": PerRank([step, dist.get_rank()]),
    }


def same(state: dict[str, Any], step: int) -> bool:
    expected = state_at(step)["model"]
    local = torch.equal(state["model"]["w"].to_local(), expected["w"].to_local())
    return bool(local and torch.equal(state["model"]["b"], expected["b"]))


def everywhere(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def stopped_by_one(place: Path, rank: int) -> None:
    """Rank 1 alone gets the signal in step 23: all save it, and leave the loop."""
    step = 0
    with Manager(place, every=10, keep=2, form="packed") as manager:
        for step in range(1, 40):
            if rank == 1 and step == 23:
                os.kill(os.getpid(), signal.SIGTERM)
            saved = manager.save(step, state_at(step))
            assert (saved is None) == (step not in (10, 20, 23))
            if manager.stopping:
                break
        assert isinstance(manager.last, Saved)
    assert everywhere((step, manager.last.id)) == [(23, manager.last.id)] * dist.get_world_size()
    assert sorted(p.name for p in place.iterdir()) == ["step-00000020", "step-00000023"] or rank
    dist.barrier()


def skipped_by_all(place: Path, rank: int) -> None:
    """What rank 0 alone verifies is damaged, or what rank 1 does: both go back to the same checkpoint."""
    newest = place / "step-00000023"
    if not rank:
        file = newest / next(newest.glob("data/*/rank-00001.bin")).relative_to(newest)
        data = bytearray(file.read_bytes())
        data[-3] ^= 1
        file.write_bytes(bytes(data))
    dist.barrier()
    for verify in ("full", "quick"):
        if verify == "quick" and not rank:
            next((place / "step-00000023").glob("objects/*/objects.json")).unlink()
        dist.barrier()
        state = state_at(0)
        manager = Manager(place, every=10)
        report = manager.restore_latest(state, verify=verify)
        assert report is not None
        assert set(everywhere((report.url, report.step))) == {(str(place / "step-00000020"), 20)}
        assert same(state, 20)
        assert getattr(state["own"], "value", state["own"]) == [20, rank]
        if verify == "quick":
            manager.save(23, state_at(23), force=True)
        manager.close()
    assert not manager.should_save(23)


def failed_on_one(place: Path, rank: int) -> None:
    """A save in the background that one rank alone saw failing fails for all at the next call, and only there."""
    manager = Manager(place, every=10, asynchronous=True)
    manager.restore_latest(state_at(0))
    handle = manager.save(30, state_at(30))
    assert handle is not None
    manager.wait()
    dist.barrier()
    if rank == 1:
        from concurrent.futures import Future

        from ucformat.errors import UcformatError

        future: Future[Saved] = Future()
        future.set_exception(UcformatError("rank 1: lost"))
        handle._done = future  # type: ignore[union-attr]
    try:
        manager.should_save(31)
        told = False
    except Exception as error:  # noqa: BLE001
        told = "rank 1: lost" in str(error)
    assert told
    assert not manager.should_save(31)
    manager.close()


def cost(place: Path, rank: int) -> None:
    """What the ranks' agreement costs at each step."""
    manager = Manager(place, every=timedelta(hours=1))
    dist.barrier()
    begun = time.monotonic()
    for step in range(300):
        assert not manager.should_save(step)
    if not rank:
        print(f"{(time.monotonic() - begun) / 300 * 1e6:.0f} us for each should_save", flush=True)  # noqa: T201
    manager.close()


def main() -> None:
    assert "sqlalchemy" not in sys.modules  # what needs no catalog waits for none
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    place, rank = Path(sys.argv[1]), dist.get_rank()
    for act in (stopped_by_one, skipped_by_all, failed_on_one, cost):
        act(place, rank)
        dist.barrier()
    print(f"rank {rank} did all", flush=True)  # noqa: T201
    leave()


if __name__ == "__main__":
    main()
