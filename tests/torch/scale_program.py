"""What ranks go through in `test_scale.py`: many processes of one host, which meet at a store of the launcher."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

import ucformat
from tests.patience import PATIENCE, wait_until
from tests.torch.many_ranks import LAYOUTS, holds, state_of
from tests.torch.ranks import all_gather
from ucformat.errors import Conflict, UcformatError
from ucformat.torch.comm.group import Group, connect_by_store
from ucformat.torch.loading.load import LoadTargets, load_local
from ucformat.torch.saving.manifest import SaveMetadata
from ucformat.torch.saving.options import Form, SaveOptions
from ucformat.torch.saving.plan import SavePlanner
from ucformat.torch.saving.save import save_in_group
from ucformat.torch.state.elements import SharedMemory
from ucformat.torch.state.local import local_of, local_state

RANK, SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def sockets() -> int:
    """How many sockets this process has."""
    return sum(
        str(f.readlink()).startswith("socket:")
        for f in Path("/proc/self/fd").iterdir()
        if f.is_symlink()
    )


class Counting:
    """A store that counts its requests."""

    def __init__(self, store: dist.Store) -> None:
        self._store, self.requests = store, 0

    def __getattr__(self, name: str) -> Any:
        self.requests += name not in ("underlying_store", "host", "port")  # which ask no server
        return getattr(self._store, name)


def connected(timeout: float = PATIENCE) -> tuple[Group, int, int]:
    """A group of all ranks, how many sockets it has, and how many requests it made to the store."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    before, counting = sockets(), Counting(store)
    group = Group(connect_by_store(counting, RANK, SIZE, timeout))
    return group, before, counting.requests


def error_of(act: Any) -> list[str]:
    try:
        act()
    except Exception as error:  # noqa: BLE001 - looked at by the tests
        return [type(error).__name__, str(getattr(error, "message", error))]
    return []


def collectives() -> Any:
    """Each kind of collective, errors of some rank in the middle, and bulk data between any ranks."""
    group, before, requests = connected()
    everybody = all_gather(group, (RANK, b"x" * RANK), tuple[int, bytes])
    mine = group.gather_scatter(RANK, lambda values: [10 * v for v in values], int, int)
    joined = group.combine([RANK], lambda a, b: a + b, list[int])
    top = group.combine(RANK, max, int, lambda most: f"of {most}", str)
    after = sockets() - before
    failed = [
        error_of(
            lambda: group.gather_scatter(
                Conflict("taken") if RANK in (3, SIZE // 2) else 1, list, int, int
            )
        ),
        error_of(
            lambda: group.combine(
                Conflict("taken") if RANK in (SIZE // 2, SIZE - 1) else 1, max, int
            )
        ),
        error_of(lambda: group.combine(1, _cannot_merge, int)),
        error_of(
            lambda: group.for_call("load" if RANK in (5, SIZE - 2) else "save").combine(
                RANK, max, int
            )
        ),
    ]
    with_error = error_of(lambda: _fails_before(group))
    return {
        "everybody": everybody == [(r, b"x" * r) for r in range(SIZE)],
        "mine": mine == 10 * RANK,
        "joined": joined == list(range(SIZE)),
        "top": top,
        "sockets": after,
        "requests": requests,
        "failed": [*failed, with_error],
        "bulk": _exchange(group),
        "last": group.combine(RANK, max, int),
    }


def _cannot_merge(_: int, __: int) -> int:
    raise Conflict("cannot be merged")


def _fails_before(group: Group) -> None:
    with group.sharing_errors():
        if RANK == SIZE // 2:
            raise Conflict("too early")
    group.combine(RANK, max, int)


def _exchange(group: Group) -> bool:
    """All ranks send to some others at once, in both directions."""
    others = sorted({(RANK + d) % SIZE for d in (1, -1, SIZE // 2, -(SIZE // 2), 7, -7)} - {RANK})
    shared = SharedMemory(len(others))
    mine = [np.array([RANK % 251], np.uint8)]
    sender = threading.Thread(
        target=group.send_bulk, args=([(other, lambda: mine) for other in others],)
    )
    sender.start()
    group.receive_bulk(shared, {other: (i, i + 1) for i, other in enumerate(others)})
    sender.join()
    found = shared.memory.tolist()
    shared.close()
    return found == [other % 251 for other in others]


def killed(doomed: int, after: float, how: int, timeout: float = 10 * PATIENCE) -> Any:
    """Rank `doomed` gets a signal at some instant, and the others combine values until they notice."""
    group, _, _ = connected(timeout)
    group.combine(None)
    if doomed == RANK:
        threading.Timer(after, lambda: os.kill(os.getpid(), how)).start()
    begun = time.monotonic()
    try:
        for n in range(10**9):
            if n % 3:
                group.combine(RANK, max, int)
            else:
                group.gather_scatter(bytes(1000), lambda values: values, bytes, bytes)
    except UcformatError as error:
        return [error.message, time.monotonic() - begun]


def agree() -> Any:
    """Connect, and combine one value."""
    group, before, requests = connected()
    joined = group.combine(RANK, lambda a, b: a + b, int)
    return {"joined": joined, "sockets": sockets() - before, "requests": requests}


def stopped(doomed: int, place: str) -> Any:
    """Rank `doomed` is stopped until all others have learnt it; then it is killed."""
    group, _, _ = connected()
    told = [Path(place) / f"told-{rank}" for rank in range(SIZE) if rank != doomed]
    pids = all_gather(group, os.getpid(), int)
    group.links.timeout = 3.0
    if doomed == RANK:
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGSTOP)).start()
    begun = time.monotonic()
    try:
        while True:
            group.combine(RANK, max, int)
    except UcformatError as error:
        found = [error.message, time.monotonic() - begun]
    (Path(place) / f"told-{RANK}").touch()
    if not RANK:
        wait_until(lambda: all(file.exists() for file in told))
        os.kill(pids[doomed], signal.SIGKILL)
    return found


def layouts(place: str, form: Form) -> Any:
    """Save under each layout, and load under the next: whether all values are right, and whether boxes were listed."""
    group, _, _ = connected()
    out = {}
    for seed, layout in enumerate(LAYOUTS):
        url = f"{place}/{layout}"
        saved = save_in_group(
            local_state(state_of(layout, RANK, SIZE, seed)),
            SaveOptions(url, form),
            SaveMetadata(),
            group,
        )
        after = LAYOUTS[(seed + 1) % len(LAYOUTS)]
        state = state_of(after, RANK, SIZE, None)
        targets = LoadTargets([local_of(n, "weight", t) for n, t in state.items()])
        report = load_local(targets, ucformat.open(url), group)
        out[layout] = [
            saved.id,
            bool(report),
            report.unexpected,
            holds(state, seed),
            bool(group.links.kept[SavePlanner].listed),
        ]
    return out


def killed_in_a_save(doomed: int, after: float, place: str, form: Form) -> Any:
    """Rank `doomed` is killed at some instant of one of many saves; the checkpoints that were committed before."""
    group, _, _ = connected(10 * PATIENCE)
    states = [local_state(state_of(layout, RANK, SIZE, 5)) for layout in LAYOUTS]
    group.combine(None)
    if doomed == RANK:
        threading.Timer(after, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    done: list[str] = []
    try:
        while True:
            options = SaveOptions(f"{place}/{len(done)}", form)
            done.append(
                save_in_group(states[len(done) % len(states)], options, SaveMetadata(), group).id
            )
    except UcformatError as error:
        return [error.message, done]


def main(scenario: str, folder: str, arguments: dict[str, Any]) -> None:
    found = globals()[scenario](**arguments)
    (Path(folder) / f"rank-{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
