"""Two ranks that stand for two nodes, and what happens to their tiers; all in one launch."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.patience import PATIENCE
from tests.torch.tiers.life import FAST, enter
from ucformat.errors import Conflict, UcformatError
from ucformat.jobs import copy as jobs_copy
from ucformat.schema import MANIFEST
from ucformat.storage.local import LocalStore
from ucformat.storage.url import open_store
from ucformat.torch import Manager, PerRank, Saved, Tier
from ucformat.torch.tiers import copying, tiers

if TYPE_CHECKING:
    from collections.abc import Callable

_told: list[str] = []


class _Handler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        _told.append(record.getMessage())


def state_at(step: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(40_000.0).view(200, 200) + step
    return {
        "model": {
            "w": distribute_tensor(whole, mesh, [Shard(0)]),
            "b": torch.full((5,), float(step)),
        },
        "step": step,
        "own": PerRank([step, dist.get_rank()]),
    }


def holds(state: dict[str, Any], step: int) -> bool:
    expected = state_at(step)["model"]
    return bool(
        torch.equal(state["model"]["w"].to_local(), expected["w"].to_local())
        and torch.equal(state["model"]["b"], expected["b"])
        and state["step"] == step
    )


def manager_of(place: Path, **options: Any) -> Manager:
    fast = Tier(FAST, every=1, keep=options.pop("keep", 2), replicas=options.pop("replicas", 1))
    more = options.pop("more", [])
    return Manager(place / "home", **{"every": 4, "signals": (), "tiers": [fast, *more], **options})


def here(*steps: int) -> None:
    """Check which steps this node's folder has."""
    assert sorted(p.name for p in Path(FAST).iterdir()) == [f"step-{s:08d}" for s in steps]


def at(place: Path, *steps: int) -> None:
    """Check which steps a place of all nodes has."""
    names = sorted(p.parent.name for p in place.glob("step-*/manifest.json"))
    assert names == [f"step-{s:08d}" for s in steps], names


def rank_file(step: int, number: int) -> Path:
    (file,) = Path(FAST, f"step-{step:08d}").glob(f"data/*/rank-{number:05d}.bin")
    return file


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(bytes(data))


def restored(place: Path, verify: str = "full", **options: Any) -> int | None:
    """The step that a new manager restores, which the whole state must tell alike."""
    state = state_at(0)
    _told.clear()
    with manager_of(place, **options) as manager:
        report = manager.restore_latest(state, verify=verify)  # type: ignore[arg-type]
    if report is None:
        return None
    assert holds(state, report.step or 0)
    dist.barrier()
    return report.step


def train(place: Path, *steps: int, **options: Any) -> None:
    with manager_of(place, **options) as manager:
        manager.restore_latest(state_at(0))
        for step in steps:
            assert manager.save(step, state_at(step)) is not None
    dist.barrier()


def all_is_everywhere(place: Path, rank: int) -> None:
    train(place, 1, 2, 3, 4, 5, asynchronous=True)
    here(4, 5)
    both = sorted(f.name for f in Path(FAST, "step-00000005").rglob("*") if f.is_file())
    assert [name for name in both if name.startswith("rank-")] == [
        "rank-00000.bin",
        "rank-00001.bin",
    ]
    assert {"manifest.json", "extents.safetensors", "objects.json"} <= set(both)
    at(place / "home", 4)
    assert restored(place) == 5
    assert not _told


def the_node_of_rank_0_is_lost(place: Path, rank: int) -> None:
    """Its documents are on all nodes (a checkpoint that needs its first node: leobago/fti#393)."""
    train(place, 1, 2, every=100)
    if not rank:
        shutil.rmtree(FAST)
    dist.barrier()
    assert restored(place, every=100) == 2


def damaged_copies_are_not_read(place: Path, rank: int) -> None:
    train(place, 1, 2, 3, every=100)
    if not rank:
        flip(rank_file(3, 0))
        flip(next(Path(FAST, "step-00000003").glob("objects/*/objects.json")))
    else:
        os.truncate(rank_file(3, 1), 1000)
    dist.barrier()
    for verify in ("full", "quick"):
        assert restored(place, verify, every=100) == 3
        damaged = [text for text in _told if "is damaged" in text]
        assert bool(damaged) == (not rank), _told
        assert rank or any("rank-00000.bin on node a/0" in text for text in damaged), damaged


def what_is_damaged_everywhere_comes_from_the_slow_tier(place: Path, rank: int) -> None:
    """No copy is trusted for being near (as in NVIDIA/Megatron-LM#5281)."""
    train(place, 1, 2, every=2)
    flip(rank_file(2, 0))
    dist.barrier()
    for verify in ("full", "quick"):
        assert restored(place, verify, every=2) == 2
    if not rank:
        flip(next((place / "home" / "step-00000002").glob("data/*/rank-00000.bin")))
    dist.barrier()
    assert restored(place, every=2) == 1


def what_is_lost_is_told(place: Path, rank: int) -> None:
    """The next older step is taken, and the lost one saved again (a stale step that refuses saves: maxtext#5260)."""
    train(place, 1, 2, 3, every=100)
    rank_file(3, 1).unlink()
    dist.barrier()
    state = state_at(0)
    _told.clear()
    with manager_of(place, every=100) as manager:
        report = manager.restore_latest(state)
        assert report is not None
        assert report.step == 2
        assert holds(state, 2)
        if not rank:
            (told,) = [text for text in _told if "is skipped" in text]
            assert "all copies of" in told
            assert "rank-00001.bin are lost" in told
            assert "w (weight)" in told
        assert isinstance(manager.save(3, state_at(3)), Saved)
        manager.wait()
        here(2, 3)
    dist.barrier()
    assert restored(place, every=100) == 3


def what_an_interrupted_save_left_is_removed(place: Path, rank: int) -> None:
    train(place, 1, 2, every=100)
    folder = Path(FAST, "step-00000003", "data", "0" * 20)
    folder.mkdir(parents=True)
    (folder / f"rank-{rank:05d}.bin").write_bytes(bytes(1000))
    dist.barrier()
    train(place, 3, every=100)
    here(2, 3)
    assert not list(Path(FAST).rglob("data/00000000000000000000"))


def too_small_a_tier_is_refused(place: Path, rank: int) -> None:
    """Before anything is written, with numbers (a container's /dev/shm has 64 MiB: vllm-project/vllm#48879)."""
    with pytest.MonkeyPatch.context() as patch, manager_of(place) as manager:
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=400_000))
        with pytest.raises(UcformatError, match=r"will hold 640,\d+ bytes .* 8 times the 80,"):
            manager.save(1, state_at(1))
        patch.undo()
        dist.barrier()
        assert [p for p in Path(FAST).rglob("*") if p.is_file()] == []
        # as a save leaves it that fails after some ranks have written
        left = Path(FAST, "step-00000001", "data", "0" * 20, f"rank-{rank:05d}.bin")
        left.parent.mkdir(parents=True)
        left.write_bytes(bytes(1000))
        manager.save(1, state_at(1))
        assert not left.exists()
    dist.barrier()
    assert restored(place) == 1


def a_busy_tier_is_skipped(place: Path, rank: int) -> None:
    """By all ranks, with a warning; the steps in the fast tier from which it is filled stay meanwhile."""
    go, begun = threading.Event(), threading.Event()
    transfer = jobs_copy.transfer

    def wait(*arguments: Any) -> Any:
        begun.set()
        assert go.wait(PATIENCE)
        return transfer(*arguments)

    _told.clear()
    with pytest.MonkeyPatch.context() as patch, manager_of(place, every=2) as manager:
        patch.setattr(copying, "transfer", wait)
        for step in range(1, 7):
            manager.save(step, state_at(step))
            if step == 2:
                assert begun.wait(PATIENCE)
        assert manager._tiers is not None
        manager._tiers.settle()
        here(2, 5, 6)
        go.set()
    dist.barrier()
    at(place / "home", 2)
    skipped = [text for text in _told if "is still being saved" in text]
    assert len(skipped) == (0 if rank else 2), _told
    assert restored(place, every=2) == 6


def a_tier_that_fails_stops_no_training(place: Path, rank: int) -> None:
    transfer = jobs_copy.transfer

    def fail(*arguments: Any) -> Any:
        if rank:
            raise UcformatError("the storage is away")
        return transfer(*arguments)

    _told.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying, "transfer", fail)
        train(place, 1, 2, every=1)
    at(place / "home")
    assert [text for text in _told if "rank 1: the storage is away" in text]
    assert restored(place, every=1) == 2
    train(place, 3, every=1)
    at(place / "home", 3)


def every_tier_has_its_steps(place: Path, rank: int) -> None:
    more = [Tier(place / "middle", every=2, keep=1)]
    with manager_of(place, more=more, every=4, keep=1) as manager:
        for step in range(1, 8):
            manager.save(step, state_at(step))
        manager.wait()
        dist.barrier()  # rank 0 alone removes what a slow tier does not keep
        at(place / "middle", 6)
        at(place / "home", 4)
        here(7)
        dist.barrier()
        manager.save(9, state_at(9), force=True)
    dist.barrier()
    at(place / "middle", 9)
    at(place / "home", 4, 9)
    dist.barrier()
    assert restored(place, more=more) == 9


def a_signal_saves_everywhere(place: Path, rank: int) -> None:
    with manager_of(place, every=100, signals=(signal.SIGTERM,)) as manager:
        manager.save(1, state_at(1))
        if rank:
            os.kill(os.getpid(), signal.SIGTERM)
        assert isinstance(manager.save(2, state_at(2)), Saved)
        assert manager.stopping
        at(place / "home", 2)
    dist.barrier()


def a_step_is_not_saved_twice(place: Path, rank: int) -> None:
    train(place, 1, 2, every=1)
    with (
        manager_of(place, every=1) as manager,
        pytest.raises(Conflict, match="step 2 exists in one of the tiers"),
    ):
        manager.save(2, state_at(2))
    with manager_of(place, every=1) as manager:
        manager.load(state_at(0), place / "home" / "step-00000001")
        manager.save(3, state_at(3))
    dist.barrier()
    assert restored(place, every=1) == 3


def two_managers_do_not_mix(place: Path, rank: int) -> None:
    with manager_of(place) as first:
        first.restore_latest(state_at(0))
        with pytest.raises(UcformatError, match="another Manager with tiers is open"):
            manager_of(place / "other").restore_latest(state_at(0))
    assert restored(place) is None


def a_place_that_one_rank_cannot_open_keeps_nobody_waiting(place: Path, rank: int) -> None:
    def fail(url: str) -> Any:
        if rank:
            raise UcformatError("it is not mounted here")
        return open_store(url)

    begun = time.monotonic()
    with pytest.MonkeyPatch.context() as patch, manager_of(place, every=1, timeout=60) as manager:
        patch.setattr(tiers, "open_store", fail)
        _told.clear()
        manager.save(1, state_at(1))
    assert time.monotonic() - begun < 30
    assert any("rank 1: it is not mounted here" in text for text in _told), _told
    at(place / "home")
    dist.barrier()


def ranks_that_are_gone_are_not_waited_for(place: Path, rank: int) -> None:
    """A copy that begins when the connections have ended fails, and connects nobody anew."""
    with manager_of(place, every=100) as manager:
        manager.save(1, state_at(1))
        manager.wait()
        assert manager._tiers is not None
        links = manager._ranks().links
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tiers, "is_live", lambda _: False)
            with (
                pytest.raises(UcformatError, match="no longer connected"),
                manager._tiers._ranks("copy", "there", links),
            ):
                pass
    dist.barrier()


def a_full_node_keeps_nobody_waiting(place: Path, rank: int) -> None:
    """One that cannot write the documents, whatever the error is: the others go on at once."""

    create = LocalStore.create

    def fail(store: LocalStore, key: str, unit: int = 1) -> Any:
        if rank and key == MANIFEST:
            raise MemoryError
        return create(store, key, unit)

    begun = time.monotonic()
    with pytest.MonkeyPatch.context() as patch, manager_of(place, every=100, timeout=60) as manager:
        patch.setattr(LocalStore, "create", fail)
        _told.clear()
        manager.save(1, state_at(1))
        manager.save(2, state_at(2))
    assert time.monotonic() - begun < 30
    assert rank or any("rank 1: MemoryError()" in text for text in _told), _told
    dist.barrier()
    assert restored(place, every=100) == 2


def a_lost_copy_is_told(place: Path, rank: int) -> None:
    """Of a peer that has no room; the checkpoint is there, and the last one with copies stays."""
    copy = copying.copy_from_peers

    def fail(*arguments: Any) -> None:
        if rank:
            raise UcformatError("no space left")
        copy(*arguments)

    with manager_of(place, every=100, keep=1) as manager:
        manager.save(1, state_at(1))
        manager.wait()
        _told.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tiers, "copy_from_peers", fail)
            manager.save(2, state_at(2))
            manager.wait()
            assert rank or any("not all copies of step-00000002" in text for text in _told), _told
            here(1, 2)
            manager.save(3, state_at(3))
            manager.wait()
            here(1, 3)
        manager.save(4, state_at(4))
        manager.wait()
        here(4)
    dist.barrier()


ACTS: list[Callable[[Path, int], None]] = [
    all_is_everywhere,
    the_node_of_rank_0_is_lost,
    damaged_copies_are_not_read,
    what_is_damaged_everywhere_comes_from_the_slow_tier,
    what_is_lost_is_told,
    what_an_interrupted_save_left_is_removed,
    too_small_a_tier_is_refused,
    a_busy_tier_is_skipped,
    a_tier_that_fails_stops_no_training,
    every_tier_has_its_steps,
    a_signal_saves_everywhere,
    a_step_is_not_saved_twice,
    two_managers_do_not_mix,
    a_place_that_one_rank_cannot_open_keeps_nobody_waiting,
    ranks_that_are_gone_are_not_waited_for,
    a_full_node_keeps_nobody_waiting,
    a_lost_copy_is_told,
]


def act(folder: Path, only: str = "") -> list[str]:
    """Do all of it, each in a folder of its own; what was done."""
    logging.getLogger("ucformat").addHandler(_Handler())
    rank, done = dist.get_rank(), []
    for one in ACTS:
        name = one.__name__
        if only and name != only:
            continue
        place = folder / name
        place.mkdir(exist_ok=True)
        enter(place, f"{'ab'[rank]}/{rank}")
        dist.barrier()
        begun = time.monotonic()
        one(place, rank)
        print(f"{name}: {time.monotonic() - begun:.1f} s", flush=True)  # noqa: T201
        done.append(name)
    return done
