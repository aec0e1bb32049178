"""The process that writes what a rank has staged, started by `async_save`.

It has the rank's staged memory mapped, its own gloo group with the writers of the other ranks, and no GPU. It ends when
the rank does: a save that is not committed then is not seen.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ucformat.torch.group import Group
from ucformat.torch.staging import map_shared
from ucformat.torch.writing import save_listed

if TYPE_CHECKING:
    from ucformat.torch.agree import Terms
    from ucformat.torch.memory import Memory
    from ucformat.torch.staging import Slots
    from ucformat.torch.writing import Listing, Note

__all__ = ["Buffer", "Done", "Job", "Start", "main"]


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
    jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
    memories: dict[int, Memory] = {}
    threading.Thread(target=_listen, args=(connection, jobs, memories), daemon=True).start()
    group: Group | None = None
    while True:
        job = jobs.get()
        outcome: Any
        try:
            group = group or _meet(start)
            memory = memories[job.buffer]
            outcome = save_listed(job.listing, [memory[a:b] for a, b in job.slots], job.terms, job.note, group)
        except Exception as error:  # noqa: BLE001 - told to the rank
            outcome = error
        whole = group is not None and group.whole
        _answer(connection, Done(job.number, outcome, whole))
        if not whole:
            os._exit(1)


def _meet(start: Start) -> Group:
    """The group of all ranks' writers."""
    if start.size == 1:
        return Group(None, 0, 1, start.timeout)
    from datetime import timedelta

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


def _listen(connection: Connection, jobs: queue.SimpleQueue[Job], memories: dict[int, Memory]) -> None:
    """Take what the rank sends; end the process when the rank is gone."""
    try:
        while True:
            message = connection.recv()
            if isinstance(message, Buffer):
                fd = recv_handle(connection)
                memories[message.number] = map_shared(fd, message.nbytes)
                os.close(fd)
            elif isinstance(message, Job):
                jobs.put(message)
            else:  # the number of a buffer that is no more
                del memories[message]
    except (EOFError, OSError):
        os._exit(0)


def _answer(connection: Connection, done: Done) -> None:
    try:
        connection.send(done)
    except (TypeError, AttributeError, ValueError):  # an error that does not pickle
        from ucformat.errors import UcformatError

        error = UcformatError(f"{type(done.outcome).__name__}: {done.outcome}")
        connection.send(Done(done.number, error, done.whole))
