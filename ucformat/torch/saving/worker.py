"""The process that writes the staged state of a rank, started by `async_save`.

It maps the rank's staging buffers, has connections to the writing processes of the other ranks, and
does not use the GPU. It ends when the rank ends; a checkpoint that is not committed by then stays
invisible.
"""

from __future__ import annotations

import os
import queue
import secrets
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
from ucformat.torch.comm.bulk import Links
from ucformat.torch.comm.connections import TreeNode
from ucformat.torch.comm.group import Group, listen_at
from ucformat.torch.comm.handshake import Address
from ucformat.torch.comm.wire import decode, encode, message
from ucformat.torch.saving.manifest import SaveMetadata, StateInfo
from ucformat.torch.saving.options import SaveOptions
from ucformat.torch.saving.save import Saved, write_checkpoint
from ucformat.torch.state.elements import Slots, map_shared

if TYPE_CHECKING:
    from ucformat.torch.state.elements import Memory

# how much lower its priority is than that of the training: otherwise it takes the cores of ranks that
# still copy; it keeps a third of a core that the training uses all the time
NICE = 5
# heartbeats in the time after which a process without any is considered dead
_BEATS_PER_TIMEOUT = 8


@message
class WorkerStart:
    """What a writing process needs: its place, where its parent listens, its own descriptor.

    They authenticate each other with `secret`, which is sent only over the socket from a rank to
    its own process.
    """

    place: TreeNode
    parent: Address | None
    secret: bytes
    listen: int | None
    timeout: float


@message
class _Meeting:
    """Where the writing process of the parent of a rank listens, and the secret of all of them."""

    parent: Address | None
    secret: bytes


def prepare_start(group: Group) -> tuple[WorkerStart, socket.socket | None]:
    """Prepare the connections of the writing processes of all ranks; all ranks call this.

    Returns:
        what the process of this rank needs, and the socket on which it listens for those of other
        ranks.
    """
    if group.size == 1:
        return WorkerStart(group.links.place, None, b"", None, group.timeout), None
    with group.sharing_errors():
        listener = listen_at(group.links.address[0])

    def answer(addresses: list[tuple[int, Address]]) -> list[_Meeting]:
        secret = secrets.token_bytes(32)
        return [
            _Meeting(addresses[parent][1] if parent >= 0 else None, secret)
            for parent, _ in addresses
        ]

    parent_and_address = (group.links.place.parent, listener.getsockname()[:2])
    meeting: _Meeting = group.gather_scatter(
        parent_and_address, answer, tuple[int, Address], _Meeting
    )
    start = WorkerStart(
        group.links.place, meeting.parent, meeting.secret, listener.fileno(), group.timeout
    )
    return start, listener


@message
class MapBuffer:
    """Map a buffer, whose file descriptor follows."""

    number: int
    nbytes: int


@message
class SaveJob:
    """Save a state, whose tensors are in the slots of a buffer."""

    number: int
    buffer: int
    state: StateInfo
    slots: Slots
    options: SaveOptions
    metadata: SaveMetadata


@message
class UnmapBuffer:
    """Unmap a buffer."""

    number: int


@message
class StagingFailed:
    """A job that this rank could not stage; other ranks wait for it, and learn the reason."""

    number: int
    why: str


@message
class JobDone:
    """The outcome of a job, or its error; `intact`: the processes can be used again."""

    number: int
    outcome: Saved | BaseException
    intact: bool


@message
class Heartbeat:
    """A sign of life: bytes were written, or the process waits for another one."""


#: What a rank sends to its process, and what the process sends back.
Command = MapBuffer | UnmapBuffer | SaveJob | StagingFailed
Reply = JobDone | Heartbeat


class _Progress:
    """The progress of the process, from which heartbeats follow."""

    def __init__(self) -> None:
        self.moved = 0  # bytes that were written, and jobs that were begun
        self.connecting = False  # to the other processes, for no longer than the timeout
        self.group: Group | None = None

    def move(self, n: int) -> None:
        """Record progress."""
        self.moved += n

    @property
    def waits(self) -> bool:
        """Whether the process waits for another rank."""
        return self.connecting or (self.group is not None and self.group.links.waits > 0)


def main() -> None:
    """Run the process until the rank ends; the first argument is the descriptor of their socket."""
    from ucformat.jobs.record import record_commits

    # when the job ends, the staged state is written first
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # output of libraries goes to the training's logs
    sys.stdout, sys.stderr = (Hiding(sys.stdout), Hiding(sys.stderr))
    record_commits()
    os.nice(NICE)
    connection = Connection(int(sys.argv[1]))
    start: WorkerStart = decode(connection.recv_bytes(), WorkerStart)
    # what this process needs is imported, for which the rank allows more time
    connection.send_bytes(encode(Heartbeat(), Reply))
    progress, sending = _Progress(), threading.Lock()
    jobs: queue.SimpleQueue[SaveJob | StagingFailed] = queue.SimpleQueue()
    memories: dict[int, Memory] = {}
    threading.Thread(target=_listen, args=(connection, jobs, memories), daemon=True).start()
    threading.Thread(
        target=_send_heartbeats,
        args=(connection, sending, progress, start.timeout / _BEATS_PER_TIMEOUT),
        daemon=True,
    ).start()
    while True:
        job = jobs.get()
        progress.move(1)
        outcome: Saved | Exception
        try:
            if progress.group is None:
                progress.connecting = True
                progress.group = _connect(start)
                progress.connecting = False
            outcome = _do(job, memories, progress)
        except Exception as error:  # noqa: BLE001 - sent to the rank
            outcome = error
        intact = progress.group is not None and progress.group.intact
        with sending:
            connection.send_bytes(encode(JobDone(job.number, outcome, intact), Reply))
        # the rank then starts other processes with the next save
        if not intact:
            os._exit(1)


def _send_heartbeats(
    connection: Connection, sending: threading.Lock, progress: _Progress, seconds: float
) -> None:
    """Send a heartbeat at intervals, as long as there is progress."""
    last = 0
    with suppress(OSError):
        while True:
            time.sleep(seconds)
            moved = progress.moved
            if moved != last or progress.waits:
                with sending:
                    connection.send_bytes(encode(Heartbeat(), Reply))
            last = moved


def _do(job: SaveJob | StagingFailed, memories: dict[int, Memory], progress: _Progress) -> Saved:
    """Save with the processes of other ranks; a failure to stage is raised on all."""
    group = progress.group
    assert group is not None  # noqa: S101 - it is connected
    if isinstance(job, StagingFailed):
        with group.sharing_errors():
            raise UcformatError(
                job.why, hint="nothing is committed; check that host memory suffices for a copy"
            )
    memory = memories[job.buffer]
    return write_checkpoint(
        job.state,
        [memory[a:b] for a, b in job.slots],
        job.options,
        job.metadata,
        group,
        progress.move,
    )


def _connect(start: WorkerStart) -> Group:
    """The group of the writing processes of all ranks."""
    if start.listen is None:
        return Group(Links(start.place, start.timeout))
    links = Links(start.place, start.timeout, socket.socket(fileno=start.listen), start.secret)
    try:
        links.join(start.parent)
    except UcformatError as error:
        raise UcformatError(
            f"the writing processes of the ranks could not connect: {error.message}",
            hint=error.hint,
        ) from error
    return Group(links)


def _listen(
    connection: Connection,
    jobs: queue.SimpleQueue[SaveJob | StagingFailed],
    memories: dict[int, Memory],
) -> None:
    """Receive commands of the rank; end the process when the rank is gone."""
    try:
        while True:
            command: MapBuffer | UnmapBuffer | SaveJob | StagingFailed = decode(
                connection.recv_bytes(), Command
            )
            if isinstance(command, MapBuffer):
                fd = recv_handle(connection)
                memories[command.number] = map_shared(fd, command.nbytes)
                os.close(fd)
            elif isinstance(command, UnmapBuffer):
                del memories[command.number]
            else:
                jobs.put(command)
    except (EOFError, OSError):
        os._exit(0)
