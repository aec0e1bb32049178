"""What ranks go through in `test_threads.py`: calls of several threads at once, writers that hang, groups made anew."""

from __future__ import annotations

import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.patience import PATIENCE, wait_until
from tests.torch.faults_program import SMALL, TIMEOUT, error_of, guard_writers, state_of
from tests.torch.ranks import all_gather
from ucformat.torch import Writer, async_save, load, save
from ucformat.torch.comm.group import Group, group_of
from ucformat.torch.saving import background

if TYPE_CHECKING:
    from collections.abc import Callable


def at_once(calls: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """What calls in threads give; each rank begins them in another order, each when the one before it is at work."""
    names = sorted(calls, reverse=bool(dist.get_rank()))
    meet, entered = Group._own, {name: threading.Event() for name in names}
    called: dict[int, str] = {}

    def meeting(self: Group, value: Any) -> Any:  # with which each collective begins
        if threading.get_ident() in called:
            entered[called[threading.get_ident()]].set()
        return meet(self, value)

    def call(name: str) -> Any:
        called[threading.get_ident()] = name
        if "dcp" in name:  # it has a thread of its own, and meets the other rank before it writes
            entered[name].set()
        try:
            return calls[name]()
        except Exception as error:  # noqa: BLE001 - looked at by the tests
            return type(error).__name__, str(error)
        finally:
            entered[name].set()

    Group._own = meeting  # type: ignore[method-assign]
    try:
        with ThreadPoolExecutor(len(names)) as pool:
            futures = {}
            for name in names:
                futures[name] = pool.submit(call, name)
                assert entered[name].wait(PATIENCE)
            return {name: f.result(PATIENCE) for name, f in futures.items()}
    finally:
        Group._own = meet  # type: ignore[method-assign]


def opposite_orders(folder: Path) -> Any:
    """Saves of every kind and loads, at once, in opposite orders on the ranks."""
    save(state_of(1), folder / "old", **SMALL)
    target = {"model": {n: torch.zeros_like(t) for n, t in state_of(1)["model"].items()}, "step": 0}
    states = {n: state_of(n) for n in range(2, 7)}
    groups = [dist.new_group() for _ in range(2)]

    def by_dcp(name: str, seed: int, group: dist.ProcessGroup) -> str:
        writer = Writer(folder / name, group=group, timeout=TIMEOUT, **SMALL)
        dcp.async_save(states[seed], storage_writer=writer, process_group=group).result(PATIENCE)
        assert writer.saved is not None
        return writer.saved.id

    return at_once(
        {
            "a saved": lambda: save(states[2], folder / "a", timeout=TIMEOUT, **SMALL).id,
            "b saved": lambda: save(states[3], folder / "b", timeout=TIMEOUT, **SMALL).id,
            "c async": lambda: (
                async_save(states[4], folder / "c", timeout=TIMEOUT, **SMALL).wait(PATIENCE).id
            ),
            "d async": lambda: (
                async_save(states[5], folder / "d", timeout=TIMEOUT, **SMALL).wait(PATIENCE).id
            ),
            "e dcp": lambda: by_dcp("e", 6, groups[0]),
            "f dcp": lambda: by_dcp("f", 6, groups[1]),
            "g loaded": lambda: load(target, folder / "old", timeout=TIMEOUT).id,
        }
    ), target["step"]


def beside_the_main_thread(folder: Path) -> Any:
    """`dcp.async_save` in its thread, and `save` in the main one, which the ranks reach in no common order."""
    group = dist.new_group()
    writer = Writer(folder / "dcp", group=group, timeout=TIMEOUT, **SMALL)
    states = state_of(1), state_of(2)
    if dist.get_rank():
        with ThreadPoolExecutor(1) as pool:
            began: Any = pool.submit(
                dcp.async_save, states[0], storage_writer=writer, process_group=group
            )
            saved = save(states[1], folder / "main", timeout=TIMEOUT, **SMALL)
        began.result().result(PATIENCE)  # DCP's own collectives, too, which come after the commit
    else:
        future: Any = dcp.async_save(states[0], storage_writer=writer, process_group=group)
        saved = save(states[1], folder / "main", timeout=TIMEOUT, **SMALL)
        future.result(PATIENCE)
    return saved.id


def not_told_apart(folder: Path) -> Any:
    """Two threads save to one place at once: refused on all ranks, unless each has a process group of its own."""
    place = folder / "one"
    groups = [dist.new_group() for _ in range(2)]
    states = state_of(1), state_of(2)
    options: dict[str, Any] = {"overwrite": True, "replicas": "first", "timeout": TIMEOUT, **SMALL}

    def act(number: int, group: dist.ProcessGroup | None) -> str:
        return save(states[number], place, group=group, **options).id

    refused = at_once({"a": lambda: act(0, None), "b": lambda: act(1, None)})
    return refused, at_once({"a": lambda: act(0, groups[0]), "b": lambda: act(1, groups[1])})


def other_calls(folder: Path) -> Any:
    """Ranks that call different things are told so at once, and can go on."""
    save(state_of(1), folder / "old", **SMALL)
    with error_of() as seen:
        if dist.get_rank():
            load(state_of(1), folder / "old", timeout=TIMEOUT)
        else:
            save(state_of(1), folder / "old", timeout=TIMEOUT)
    return seen, save(state_of(2), folder / "new", timeout=TIMEOUT, **SMALL).id


def stopped_writer(folder: Path, stuck: int) -> Any:
    """The writing process of one rank is stopped while it writes; then while it idles.

    Only its rank runs out of patience, and only once it is stopped: whatever else happens may take
    its time.
    """

    def stop() -> None:
        (mine,) = background.writers.values()
        if dist.get_rank() == stuck:
            os.kill(mine._process.pid, signal.SIGSTOP)
            mine.group.timeout = 0.5
            os.eventfd_write(mine._wake, 1)

    guard_writers(folder)
    (folder / f"hold-{stuck}").touch()
    options: dict[str, Any] = {"timeout": TIMEOUT, **SMALL}
    handle = async_save(state_of(1), folder / "stopped", **options)
    wait_until((folder / f"writing-{stuck}").exists)
    stop()
    with error_of() as waited:
        handle.wait(PATIENCE)
    dist.barrier()
    (folder / f"hold-{stuck}").unlink(missing_ok=True)
    after = async_save(state_of(2), folder / "after", **options).wait(PATIENCE).id
    stop()
    with error_of() as idle:  # more than a socket holds, so that it cannot even be told
        async_save({**state_of(3), "much": "x" * 10**6}, folder / "idle", **options).wait(PATIENCE)
    with error_of() as last:
        async_save(state_of(4), folder / "last", **options).wait(PATIENCE)
    return waited, after, idle, last


def made_anew(folder: Path) -> Any:
    """Process groups are destroyed and made anew: each time with one writer, and one buffer."""
    seen = []
    for number in range(3):
        handle = async_save(state_of(number), folder / f"{number}", timeout=TIMEOUT, **SMALL)
        handle.wait(PATIENCE)
        buffers = [
            p for p in Path("/proc/self/fd").iterdir() if "ucformat-stage" in os.path.realpath(p)
        ]
        seen.append((len(background.writers), len(children()), len(buffers)))
        rank, size = dist.get_rank(), dist.get_world_size()
        dist.destroy_process_group()
        store = dist.FileStore(str(folder / f"store-again-{number}"), size)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT)
        )
    return seen


def children() -> list[str]:
    """The processes of this one."""
    tasks = Path("/proc/self/task").glob("*/children")
    return [pid for task in tasks for pid in task.read_text().split()]


def forked(folder: Path) -> Any:
    """A child that was forked, and ends as programs do, leaves the parent's writer and its save alone."""
    guard_writers(folder)
    hold = folder / f"hold-{dist.get_rank()}"
    hold.touch()
    handle = async_save(state_of(1), folder / "forked", timeout=TIMEOUT, **SMALL)
    pid = os.fork()
    if not pid:
        code = 1
        try:
            with error_of() as seen:
                handle.wait(PATIENCE)
            code = 0 if "forked from" in seen.get("message", "") else 2
        finally:
            import atexit

            atexit._run_exitfuncs()
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    hold.unlink()
    return (
        os.waitstatus_to_exitcode(status),
        handle.wait(PATIENCE).id,
        all_gather(group_of(), dist.get_rank()),
    )


def on_two_hosts() -> None:
    """One rank of three, each on a host of its own: the last two save together, without the host of the store."""
    rank, address, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    store = dist.TCPStore(
        address, 29911, 3, is_master=rank == 0, timeout=timedelta(seconds=TIMEOUT)
    )
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=3, timeout=timedelta(seconds=TIMEOUT)
    )
    pair = dist.new_group([1, 2])
    if rank:
        whole = torch.arange(2000.0)
        state = {"w": whole}
        async_save(state, folder / "pair", group=pair, timeout=TIMEOUT).wait(PATIENCE)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    on_two_hosts()
