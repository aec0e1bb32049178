"""Ranks that are told to stop at random instants, with ranks that are stopped, or dead."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from ucformat.errors import UcformatError
from ucformat.storage.url import open_store
from ucformat.storage.wrappers import WrappedStore
from ucformat.torch import Manager, PerRank, Tier
from ucformat.torch.saving.background import writers
from ucformat.torch.tiers import tiers

SECONDS = 20.0


def state_at(step: int) -> dict[str, Any]:
    return {"w": torch.full((50_000,), float(step)), "own": PerRank([step, dist.get_rank()])}


def at_random_instants(folder: Path, rounds: int, seed: int) -> list[str]:
    """Each round, one rank or all get a signal; the newest checkpoint is of the last step, or of the one before."""
    wrong: list[str] = []
    for number in range(rounds):
        chosen = random.Random(f"{seed} {number}")
        place, asynchronous = folder / f"run-{number}", chosen.random() < 0.7
        told = chosen.choice([0, 1, None])
        delay = chosen.uniform(0.0, 0.25)
        dist.barrier()
        with Manager(place, form="packed", asynchronous=asynchronous) as manager:
            manager.on_preemption(SECONDS)
            if told in (None, dist.get_rank()):
                timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGTERM))
                timer.start()
            step, begun = 0, time.monotonic()
            while not manager.stopping:
                step += 1
                manager.save(step, state_at(step))
                if time.monotonic() - begun > SECONDS:
                    wrong.append(f"round {number}: no signal was noticed")
                    break
            begun = time.monotonic()
        if time.monotonic() - begun > SECONDS:
            wrong.append(f"round {number}: it took longer than the time")
        state = state_at(0)
        with Manager(place, signals=()) as next_start:
            report = next_start.restore_latest(state)
        if report is None or report.step != step:
            wrong.append(f"round {number}: step {step}, restored {report and report.step}")
        elif not torch.equal(state["w"], state_at(step)["w"]) or state["own"].value[0] != step:
            wrong.append(f"round {number}: the values of step {step} are others")
    return wrong


def last_save(manager: Manager, step: int) -> dict[str, Any]:
    """Get a signal, save and close: the error, the seconds that it took, and what is committed then."""
    begun = time.monotonic()
    os.kill(os.getpid(), signal.SIGTERM)
    failure = ""
    try:
        manager.save(step, state_at(step))
        manager.close()
    except UcformatError as error:
        failure = error.message
    took = time.monotonic() - begun
    with suppress(UcformatError):
        manager.close()
    return {"failure": failure, "took": took, "committed": committed_in(Path(manager.url))}


def committed_in(run: Path) -> list[str]:
    return sorted(manifest.parent.name for manifest in run.glob("*/manifest.json"))


def with_a_rank_that_does_not_come(folder: Path, how: str, *, asynchronous: bool) -> dict[str, Any]:
    """Rank 1 does something else after the signal, or dies: rank 0 fails within its time."""
    seconds = 3.0
    manager = Manager(folder / "run", form="packed", asynchronous=asynchronous, timeout=600)
    manager.on_preemption(seconds)
    manager.save(1, state_at(1))
    manager.wait()
    dist.barrier()
    if dist.get_rank() == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(2 * seconds + 2)
        manager.close()
        return {}
    return last_save(manager, 2)


def with_a_slow_tier(folder: Path) -> dict[str, Any]:
    """The url of the run is slow: the last step is in the fast tier, and nothing waits longer."""
    seconds = 4.0

    class SlowWriter:
        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def write(self, data: Any) -> None:
            time.sleep(5.0)
            self._inner.write(data)

        def __enter__(self) -> Any:
            self._inner.__enter__()
            return self

        def __exit__(self, *ending: object) -> Any:
            return self._inner.__exit__(*ending)

    class SlowStore(WrappedStore):
        def create(self, key: str, unit: int = 1) -> Any:
            return SlowWriter(super().create(key, unit))

    state = {"w": torch.zeros(20_000_000)}
    slow = mock.patch.object(tiers, "open_store", lambda url: SlowStore(open_store(url)))
    slow.start()
    manager = Manager(folder / "run", tiers=[Tier(folder / "memory", every=1)], timeout=600)
    manager.on_preemption(seconds)
    manager.save(1, state)
    dist.barrier()
    begun = time.monotonic()
    os.kill(os.getpid(), signal.SIGTERM)
    manager.save(2, state)
    manager.close()
    took = time.monotonic() - begun
    return {"took": took, **{name: committed_in(folder / name) for name in ("memory", "run")}}


def with_a_writer_that_hangs(folder: Path) -> dict[str, Any]:
    """The process that writes in the background is stopped: the last save does not wait for it."""
    seconds = 20.0
    manager = Manager(folder / "run", form="packed", asynchronous=True, timeout=600)
    manager.on_preemption(seconds)
    manager.save(1, state_at(1))
    manager.wait()
    (writer,) = writers.values()
    os.kill(writer._process.pid, signal.SIGSTOP)
    manager.save(2, state_at(2))
    dist.barrier()
    told = last_save(manager, 3)
    in_time = told.pop("took") < seconds
    return {**told, "in time": in_time}
