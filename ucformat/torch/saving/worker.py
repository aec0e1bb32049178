"""The process that writes what a rank has staged, started by `async_save`.

It has the rank's staged memory mapped, connections of its own with the writers of the other ranks, and no GPU. It ends
when the rank does: a save that is not committed then is not seen.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import TYPE_CHECKING

from ucformat.errors import UcformatError
from ucformat.redacted import Hiding
from ucformat.torch.comm.group import Group
from ucformat.torch.comm.handshake import Address, connect
from ucformat.torch.comm.links import Links
from ucformat.torch.comm.wire import decode, encode, message
from ucformat.torch.saving.manifest import SaveMetadata, StateInfo
from ucformat.torch.saving.plan import SaveOptions
from ucformat.torch.saving.save import Saved, write_checkpoint
from ucformat.torch.saving.staging import Slots, map_shared

if TYPE_CHECKING:
    from ucformat.torch.state.memory import Memory

__all__ = [
    "Command",
    "Heartbeat",
    "JobDone",
    "MapBuffer",
    "Reply",
    "SaveJob",
    "StagingFailed",
    "UnmapBuffer",
    "WorkerStart",
    "main",
]


_BEATS = 8  # signs of life in the time after which one that gives none is taken for dead


@message
class WorkerStart:
    """Which rank it is, and where the writers of all listen: this one on the descriptor `listen`, which it was given.

    By `secret` they prove to each other who they are. Only the pipe from the rank to its own process carries it.
    """

    rank: int
    places: tuple[Address, ...]
    secret: bytes
    listen: int | None
    timeout: float


@message
class MapBuffer:
    """Announces memory, whose descriptor follows."""

    number: int
    nbytes: int


@message
class SaveJob:
    """A save: what is listed lies in the slots of a buffer."""

    number: int
    buffer: int
    state: StateInfo
    slots: Slots
    options: SaveOptions
    metadata: SaveMetadata


@message
class UnmapBuffer:
    """A buffer that is no more."""

    number: int


@message
class StagingFailed:
    """A save that this rank could not stage, and why; the other ranks' writers wait for it."""

    number: int
    why: str


@message
class JobDone:
    """The outcome of a job: a `Saved`, or the error. `whole` says that the group can be used again."""

    number: int
    outcome: Saved | BaseException
    whole: bool


@message
class Heartbeat:
    """A heartbeat: bytes were written, or this rank waits for another one, at most until the timeout."""


#: What a rank tells its process, and what that answers.
Command = MapBuffer | UnmapBuffer | SaveJob | StagingFailed
Reply = JobDone | Heartbeat


class _Progress:
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
    sys.stdout, sys.stderr = Hiding(sys.stdout), Hiding(sys.stderr)  # what libraries say goes to the training's logs
    record_commits()
    connection = Connection(int(sys.argv[1]))
    start: WorkerStart = decode(connection.recv_bytes(), WorkerStart)
    connection.send_bytes(encode(Heartbeat(), Reply))
    pulse, sending = _Progress(), threading.Lock()
    jobs: queue.SimpleQueue[SaveJob | StagingFailed] = queue.SimpleQueue()
    memories: dict[int, Memory] = {}
    threading.Thread(target=_listen, args=(connection, jobs, memories), daemon=True).start()
    threading.Thread(
        target=_send_heartbeats, args=(connection, sending, pulse, start.timeout / _BEATS), daemon=True
    ).start()
    while True:
        job = jobs.get()
        pulse.move(1)
        outcome: Saved | Exception
        try:
            if pulse.group is None:
                pulse.meeting = True
                pulse.group = _connect(start)
                pulse.meeting = False
            outcome = _do(job, memories, pulse)
        except Exception as error:  # noqa: BLE001 - told to the rank
            outcome = error
        whole = pulse.group is not None and pulse.group.whole
        _answer(connection, sending, JobDone(job.number, outcome, whole))
        if not whole:
            os._exit(1)


def _send_heartbeats(connection: Connection, sending: threading.Lock, pulse: _Progress, seconds: float) -> None:
    """Give a sign of life now and then, as long as there is some."""
    seen = 0
    with suppress(OSError):
        while True:
            time.sleep(seconds)
            moved = pulse.moved
            if moved != seen or pulse.waits:
                with sending:
                    connection.send_bytes(encode(Heartbeat(), Reply))
            seen = moved


def _do(job: SaveJob | StagingFailed, memories: dict[int, Memory], pulse: _Progress) -> Saved:
    """Save together with the writers of the other ranks; what this rank failed of before is raised on all."""
    group = pulse.group
    assert group is not None  # noqa: S101 - they have met
    if isinstance(job, StagingFailed):
        with group.sharing_errors():
            raise UcformatError(job.why, hint="nothing is committed; is there memory for a copy of the state?")
    memory = memories[job.buffer]
    return write_checkpoint(
        job.state, [memory[a:b] for a, b in job.slots], job.options, job.metadata, group, pulse.move
    )


def _connect(start: WorkerStart) -> Group:
    """The group of all ranks' writers."""
    if start.listen is None:
        return Group(Links({}, 0, 1, start.timeout))
    try:
        peers = connect(socket.socket(fileno=start.listen), start.rank, start.places, start.secret, start.timeout)
    except UcformatError as error:
        raise UcformatError(
            f"the writing processes of the ranks could not connect: {error.message}", hint=error.hint
        ) from error
    return Group(Links(peers, start.rank, len(start.places), start.timeout))


def _listen(
    connection: Connection, jobs: queue.SimpleQueue[SaveJob | StagingFailed], memories: dict[int, Memory]
) -> None:
    """Take what the rank sends; end the process when the rank is gone."""
    try:
        while True:
            order: MapBuffer | UnmapBuffer | SaveJob | StagingFailed = decode(connection.recv_bytes(), Command)
            if isinstance(order, MapBuffer):
                fd = recv_handle(connection)
                memories[order.number] = map_shared(fd, order.nbytes)
                os.close(fd)
            elif isinstance(order, UnmapBuffer):
                del memories[order.number]
            else:
                jobs.put(order)
    except (EOFError, OSError):
        os._exit(0)


def _answer(connection: Connection, sending: threading.Lock, done: JobDone) -> None:
    with sending:
        connection.send_bytes(encode(done, Reply))
