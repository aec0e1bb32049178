"""The process that writes what a rank has staged, started by `async_save`.

It has the rank's staged memory mapped, its own gloo group with the writers of the other ranks, and no GPU. It ends when
the rank does: a save that is not committed then is not seen.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import sys
import threading
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ucformat.errors import UcformatError
from ucformat.torch.group import Group
from ucformat.torch.staging import map_shared
from ucformat.torch.writing import save_listed

if TYPE_CHECKING:
    from ucformat.torch.agree import Terms
    from ucformat.torch.memory import Memory
    from ucformat.torch.staging import Slots
    from ucformat.torch.writing import Listing, Note, Saved

__all__ = ["Buffer", "Done", "Failed", "Job", "Start", "main"]


@dataclass(frozen=True, slots=True)
class Start:
    """Who the rank is, and where the writers meet; `listen` is the descriptor on which rank 0's serves them."""

    rank: int
    size: int
    host: str
    port: int
    listen: int | None
    timeout: float


@dataclass(frozen=True, slots=True)
class Buffer:
    """Announces memory, whose descriptor follows."""

    number: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Job:
    """A save: what is listed lies in the slots of a buffer."""

    number: int
    buffer: int
    listing: Listing
    slots: Slots
    terms: Terms
    note: Note


@dataclass(frozen=True, slots=True)
class Failed:
    """A save that this rank could not stage, and why; the other ranks' writers wait for it."""

    number: int
    why: str


@dataclass(frozen=True, slots=True)
class Done:
    """The outcome of a job: a `Saved`, or the error. `whole` says that the group can be used again."""

    number: int
    outcome: Any
    whole: bool


def main() -> None:
    """Serve the rank that started this process, until it ends; the first argument is the socket between them."""
    from ucformat.jobs.record import record_commits

    for number in (signal.SIGINT, signal.SIGTERM):  # whoever ends the job: what was staged is written first
        signal.signal(number, signal.SIG_IGN)
    record_commits()
    connection = Connection(int(sys.argv[1]))
    start: Start = connection.recv()
    jobs: queue.SimpleQueue[Job | Failed] = queue.SimpleQueue()
    memories: dict[int, Memory] = {}
    threading.Thread(target=_listen, args=(connection, jobs, memories), daemon=True).start()
    group: Group | None = None
    while True:
        job = jobs.get()
        outcome: Any
        try:
            group = group or _meet(start)
            outcome = _do(job, memories, group)
        except Exception as error:  # noqa: BLE001 - told to the rank
            outcome = error
        whole = group is not None and group.whole
        _answer(connection, Done(job.number, outcome, whole))
        if not whole:
            os._exit(1)


def _do(job: Job | Failed, memories: dict[int, Memory], group: Group) -> Saved:
    """Save together with the writers of the other ranks; what this rank failed of before is raised on all."""
    if isinstance(job, Failed):
        with group.telling():
            raise UcformatError(job.why, hint="nothing is committed; is there memory for a copy of the state?")
    memory = memories[job.buffer]
    return save_listed(job.listing, [memory[a:b] for a, b in job.slots], job.terms, job.note, group)


def _meet(start: Start) -> Group:
    """The group of all ranks' writers."""
    if start.size == 1:
        return Group(None, 0, 1, start.timeout)
    try:
        return _join(start)
    except RuntimeError as error:
        raise UcformatError(
            f"rank {start.rank}: the writing processes of all ranks did not meet within {start.timeout:g} s at "
            f"{start.host}:{start.port} ({str(error).splitlines()[0][:200]})",
            hint="look for one that ended, and whether all nodes reach that address; MASTER_ADDR names another",
        ) from error


def _join(start: Start) -> Group:
    server = {"master_listen_fd": start.listen} if start.listen is not None else {}
    store = dist.TCPStore(
        start.host,
        start.port,
        start.size,
        is_master=start.rank == 0,
        timeout=timedelta(seconds=start.timeout),
        wait_for_workers=False,
        **server,
    )
    group = Group(dist.PrefixStore("ucformat", store), start.rank, start.size, start.timeout)
    group.store = store
    return group


def _listen(connection: Connection, jobs: queue.SimpleQueue[Job | Failed], memories: dict[int, Memory]) -> None:
    """Take what the rank sends; end the process when the rank is gone."""
    try:
        while True:
            message = connection.recv()
            if isinstance(message, Buffer):
                fd = recv_handle(connection)
                memories[message.number] = map_shared(fd, message.nbytes)
                os.close(fd)
            elif isinstance(message, Job | Failed):
                jobs.put(message)
            else:  # the number of a buffer that is no more
                del memories[message]
    except (EOFError, OSError):
        os._exit(0)


def _answer(connection: Connection, done: Done) -> None:
    try:
        pickle.loads(pickle.dumps(done))  # noqa: S301 - not every exception can be made again
    except Exception:  # noqa: BLE001
        done = Done(done.number, UcformatError(f"{type(done.outcome).__name__}: {done.outcome}"), done.whole)
    connection.send(done)
