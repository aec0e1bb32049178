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
import time
from contextlib import suppress
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

__all__ = ["Beat", "Buffer", "Done", "Failed", "Job", "Start", "main"]


_BEATS = 8  # signs of life in the time after which one that gives none is taken for dead


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


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life: bytes were written, or this rank waits for another one, which it does not do for ever."""


class _Pulse:
    """What the process does, as its signs of life tell."""

    def __init__(self) -> None:
        self.moved = 0  # bytes, and saves that were begun
        self.meeting = False  # the other writers, for no longer than the time-out
        self.group: Group | None = None

    def move(self, n: int) -> None:
        """Note progress."""
        self.moved += n

    @property
    def waits(self) -> bool:
        """Whether it waits for another rank."""
        return self.meeting or (self.group is not None and self.group.links.waits > 0)


def main() -> None:
    """Serve the rank that started this process, until it ends; the first argument is the socket between them."""
    from ucformat.jobs.record import record_commits

    for number in (signal.SIGINT, signal.SIGTERM):  # whoever ends the job: what was staged is written first
        signal.signal(number, signal.SIG_IGN)
    record_commits()
    connection = Connection(int(sys.argv[1]))
    start: Start = connection.recv()
    connection.send(Beat())
    pulse, sending = _Pulse(), threading.Lock()
    jobs: queue.SimpleQueue[Job | Failed] = queue.SimpleQueue()
    memories: dict[int, Memory] = {}
    threading.Thread(target=_listen, args=(connection, jobs, memories), daemon=True).start()
    threading.Thread(target=_beat, args=(connection, sending, pulse, start.timeout / _BEATS), daemon=True).start()
    while True:
        job = jobs.get()
        pulse.move(1)
        outcome: Any
        try:
            if pulse.group is None:
                pulse.meeting = True
                pulse.group = _meet(start)
                pulse.meeting = False
            outcome = _do(job, memories, pulse)
        except Exception as error:  # noqa: BLE001 - told to the rank
            outcome = error
        whole = pulse.group is not None and pulse.group.whole
        _answer(connection, sending, Done(job.number, outcome, whole))
        if not whole:
            os._exit(1)


def _beat(connection: Connection, sending: threading.Lock, pulse: _Pulse, seconds: float) -> None:
    """Give a sign of life now and then, as long as there is some."""
    seen = 0
    with suppress(OSError):
        while True:
            time.sleep(seconds)
            moved = pulse.moved
            if moved != seen or pulse.waits:
                with sending:
                    connection.send(Beat())
            seen = moved


def _do(job: Job | Failed, memories: dict[int, Memory], pulse: _Pulse) -> Saved:
    """Save together with the writers of the other ranks; what this rank failed of before is raised on all."""
    group = pulse.group
    assert group is not None  # noqa: S101 - they have met
    if isinstance(job, Failed):
        with group.telling():
            raise UcformatError(job.why, hint="nothing is committed; is there memory for a copy of the state?")
    memory = memories[job.buffer]
    return save_listed(job.listing, [memory[a:b] for a, b in job.slots], job.terms, job.note, group, pulse.move)


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
    group.links.store = store
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


def _answer(connection: Connection, sending: threading.Lock, done: Done) -> None:
    try:
        pickle.loads(pickle.dumps(done))  # noqa: S301 - not every exception can be made again
    except Exception:  # noqa: BLE001
        done = Done(done.number, UcformatError(f"{type(done.outcome).__name__}: {done.outcome}"), done.whole)
    with sending:
        connection.send(done)
