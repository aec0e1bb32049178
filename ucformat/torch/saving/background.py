"""The rank's side of the process that writes in the background: staging buffers, and handles of saves in flight."""

from __future__ import annotations

import atexit
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import send_handle
from typing import TYPE_CHECKING

from ucformat.errors import UcformatError
from ucformat.settings import local_path
from ucformat.storage.url import split_url
from ucformat.torch.comm.wire import decode, encode
from ucformat.torch.saving.manifest import SaveMetadata, state_info
from ucformat.torch.saving.save import Saved
from ucformat.torch.saving.staging import HostBuffer, room_for, stage
from ucformat.torch.saving.worker import (
    Command,
    Heartbeat,
    JobDone,
    MapBuffer,
    Reply,
    SaveJob,
    StagingFailed,
    UnmapBuffer,
    WorkerStart,
    prepare_start,
)

if TYPE_CHECKING:
    from ucformat.torch.comm.group import Group
    from ucformat.torch.comm.links import Links
    from ucformat.torch.saving.options import SaveOptions
    from ucformat.torch.state.local import LocalState

__all__ = ["BackgroundWriter", "SaveHandle", "close_writer", "set_outcome", "wait_until_done", "writers"]


class SaveHandle:
    """A save that continues in another process.

    `url` is where the checkpoint is written, and `stall` the seconds for which the training was blocked.
    """

    def __init__(self, url: str, stall: float) -> None:
        self.url, self.stall = url, stall
        self.retrieved = False  # whether the caller has learnt the outcome
        self._done: Future[Saved] = Future()

    def disown(self) -> None:
        """Make the outcome unavailable in a forked child."""
        self._done = Future()
        self._done.set_exception(UcformatError(f"{self.url} is saved by the process that this one was forked from"))

    @property
    def staged(self) -> bool:
        """Whether the state is copied, so that training may change it; always true."""
        return True

    @property
    def committed(self) -> bool:
        """Whether the checkpoint is committed."""
        return self._done.done() and self._done.exception() is None

    @property
    def done(self) -> bool:
        """Whether the save has ended: committed or failed."""
        return self._done.done()

    def wait(self, timeout: float | None = None) -> Saved:
        """Wait until the checkpoint is committed.

        Args:
            timeout: seconds to wait (None: no limit).

        Raises:
            TimeoutError: the save has not ended in time; it continues.
            UcformatError: a rank failed, or its writing process died; nothing is committed.
        """
        try:
            return self._done.result(timeout)
        finally:
            self.retrieved = self._done.done()

    def error(self) -> BaseException | None:
        """Return the error of a failed save; None if it is committed or has not ended."""
        self.retrieved = self.retrieved or self._done.done()
        return self._done.exception() if self._done.done() else None


def set_outcome(handle: SaveHandle, outcome: Saved | BaseException) -> None:
    """Set the outcome of a save, unless it has one."""
    with suppress(InvalidStateError):
        if isinstance(outcome, Saved):
            handle._done.set_result(outcome)  # noqa: SLF001 - not for users
        else:
            handle._done.set_exception(outcome)  # noqa: SLF001


def wait_until_done(handle: SaveHandle) -> None:
    """Wait until a save has ended, without raising its error."""
    handle._done.exception()  # noqa: SLF001


_log = logging.getLogger("ucformat")
_START_S = 300.0  # the least time for a process to import torch, seconds
_END_S = 10.0  # the time for a process to end or to die, seconds
_MAIN = "from ucformat.torch.saving.worker import main; main()"


class BackgroundWriter:
    """The writing process of this rank, its staging buffers, and the saves in flight."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._intact = True  # whether the group of writing processes can be used again
        self._outstanding = 0  # replies that the process has to send, and commands that it has to receive
        self._last_sign = 0.0  # when it last replied while anything was outstanding
        self._started = self._unresponsive = False
        self._counting = threading.Lock()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # for the listening thread
        self._handles: dict[int, tuple[SaveHandle, int]] = {}  # job -> handle, buffer
        self._buffers: dict[int, HostBuffer] = {}
        self._count = 0
        self._pool = ThreadPoolExecutor(min(4, len(os.sched_getaffinity(0))), "ucformat-stage")
        start, listener = prepare_start(group)
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        fds = [theirs.fileno(), *([listener.fileno()] if listener else [])]
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter
            [sys.executable, "-c", _MAIN, str(theirs.fileno())],
            pass_fds=fds,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        if listener:
            listener.close()
        self._socket = mine
        self._connection = Connection(os.dup(mine.fileno()))
        self._connection.send_bytes(encode(start, WorkerStart))
        self._listener = threading.Thread(target=self._listen, daemon=True, name="ucformat-async")
        self._listener.start()

    @property
    def usable(self) -> bool:
        """Whether the process is alive, and can save again."""
        return self._intact and self._process.poll() is None

    def make_room(self, in_flight: int) -> None:
        """Wait until fewer saves are in flight; raises the error of an earlier save that was not retrieved."""
        self.wait_for_room(in_flight)
        for number, (handle, _) in list(self._handles.items()):
            if handle.done:
                retrieved, error = handle.retrieved, handle.error()
                self._handles.pop(number, None)
                if error is not None and not retrieved:
                    raise error

    def wait_for_room(self, in_flight: int) -> None:
        """Wait until fewer saves are in flight."""
        while len(running := [h for h, _ in list(self._handles.values()) if not h.done]) >= max(1, in_flight):
            wait_until_done(running[0])

    def save(self, state: LocalState, options: SaveOptions, metadata: SaveMetadata, begun: float) -> SaveHandle:
        """Stage a state, and start to write it; an error here too is raised on all ranks, by their handles."""
        handle = SaveHandle(options.url, 0.0)
        self._count += 1
        self._handles[self._count] = (handle, -1)
        job: bytes
        try:
            try:
                number = self._buffer(room_for(state))
                self._handles[self._count] = (handle, number)
                tensors, slots = stage(state, self._buffers[number], self._pool)
                handle.stall = time.monotonic() - begun
                info = state_info(state, self.group.links.members, tensors, handle.stall)
                resolved = replace(options, url=_absolute(options.url))  # the process may have another working folder
                job = encode(SaveJob(self._count, number, info, slots, resolved, metadata), Command)
            except Exception as error:  # noqa: BLE001 - raised on all ranks
                why = f"cannot stage a copy of the state: {type(error).__name__}: {error}"
                job = encode(StagingFailed(self._count, why), Command)
            self._expect()  # until the job is done
            self._send(job)
        except OSError:
            self._died()
        return handle

    def _send(self, command: bytes, fd: int | None = None) -> None:
        """Send a command; OSError if the process is gone, or was killed because it did not receive."""
        self._expect()
        try:
            self._connection.send_bytes(command)
            if fd is not None:
                send_handle(self._connection, fd, self._process.pid)
        finally:
            self._received()

    def _expect(self) -> None:
        with self._counting:
            if not self._outstanding:
                self._last_sign = time.monotonic()
            self._outstanding += 1
        os.eventfd_write(self._wake, 1)

    def _received(self) -> None:
        with self._counting:
            self._outstanding -= 1

    def _remaining_s(self) -> float | None:
        """Seconds for which the process may still be silent; None if nothing is outstanding."""
        with self._counting:
            allowed = self.group.timeout if self._started else max(self.group.timeout, _START_S)
            return self._last_sign + allowed - time.monotonic() if self._outstanding else None

    def _buffer(self, nbytes: int) -> int:
        """The number of a free buffer that is large enough."""
        busy = {number for handle, number in self._handles.values() if not handle.done}
        for number, buffer in list(self._buffers.items()):
            if number not in busy and buffer.nbytes >= nbytes:
                return number
            if number not in busy:  # too small: replaced by a larger one
                self._send(encode(UnmapBuffer(number), Command))
                self._buffers.pop(number).close()
        number = max(self._buffers, default=-1) + 1
        buffer = self._buffers[number] = HostBuffer(nbytes)
        self._send(encode(MapBuffer(number, buffer.nbytes), Command), buffer.fd)
        return number

    def _listen(self) -> None:
        """Receive the outcomes of jobs; kill the process if it is silent for too long."""
        try:
            while True:
                remaining = self._remaining_s()
                ready = wait([self._connection, self._wake], remaining and max(0.0, remaining))
                if not ready and (remaining := self._remaining_s()) is not None and remaining <= 0:
                    break
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                if self._connection not in ready:
                    continue
                answer: JobDone | Heartbeat = decode(self._connection.recv_bytes(), Reply)
                with self._counting:
                    self._last_sign, self._started = time.monotonic(), True
                if isinstance(answer, JobDone):
                    self._received()
                    self._intact = self._intact and answer.intact
                    set_outcome(self._handles[answer.number][0], answer.outcome)
            self._unresponsive = True
            self._process.kill()  # it may be stopped, or blocked by a disk
            self._died()
        except (EOFError, OSError):
            self._died()

    def _died(self) -> None:
        """Set the outcome of all saves in flight, after the process has died."""
        self._intact = False
        how = f"was unresponsive for {self.group.timeout:g} s and was killed"
        with suppress(subprocess.TimeoutExpired):  # one that is blocked by a disk dies later
            code = self._process.wait(_END_S)
            if not self._unresponsive:
                how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        for handle, _ in list(self._handles.values()):
            error = UcformatError(
                f"rank {self.group.rank}: the process that wrote {handle.url} {how}",
                hint="the checkpoint is not committed; see the output of the process above, then save again",
            )
            set_outcome(handle, error)

    def close_after_fork(self) -> None:
        """Close the copies of descriptors in a forked child; the process and its saves belong to the parent."""
        self._process.returncode = 0  # or Popen would wait for a process that is not a child of this one
        self._socket.close()
        self._connection.close()
        os.close(self._wake)
        for handle, _ in self._handles.values():
            handle.disown()
        for buffer in self._buffers.values():
            buffer.close_after_fork()

    def close(self) -> None:
        """Wait for the saves in flight, and end the process."""
        for handle, _ in list(self._handles.values()):
            wait_until_done(handle)
            retrieved, error = handle.retrieved, handle.error()
            if error is not None and not retrieved:
                _log.error("%s was not saved: %s", handle.url, error)
        with suppress(OSError):  # the process has ended already
            self._socket.shutdown(socket.SHUT_RDWR)  # ends the process, and wakes the listening thread
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:  # it is stopped
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
        self._listener.join()
        self._connection.close()
        self._socket.close()
        os.close(self._wake)
        self._pool.shutdown()
        for buffer in self._buffers.values():
            buffer.close()


def _absolute(url: str) -> str:
    """The url, independent of the working folder."""
    scheme, rest = split_url(url)
    return url if scheme not in ("", "file") else str(local_path(rest))


#: By connections of a group; None: this process alone.
writers: dict[Links | None, BackgroundWriter] = {}


def close_writer(writer: BackgroundWriter) -> None:
    """Wait for the saves of a writer, and end its process."""
    for key in [k for k, w in writers.items() if w is writer]:
        del writers[key]
    writer.close()


def _forked() -> None:
    """In a forked child, close what would keep the parent's processes alive when the parent ends."""
    for writer in writers.values():
        writer.close_after_fork()
    writers.clear()


os.register_at_fork(after_in_child=_forked)


@atexit.register
def _close_all() -> None:
    for writer in list(writers.values()):
        close_writer(writer)
