"""The rank's side of the process that writes in the background: staging buffers, and the saves in flight."""

from __future__ import annotations

import atexit
import logging
import mmap
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import send_handle
from typing import TYPE_CHECKING

import numpy as np
import torch

from ucformat.errors import UcformatError
from ucformat.geometry.box import row_major
from ucformat.geometry.tensor import Piece
from ucformat.settings import local_path
from ucformat.storage.strided import fill
from ucformat.storage.url import split_url
from ucformat.torch.comm.wire import decode, encode
from ucformat.torch.saving.handles import SaveHandle, set_outcome, wait_until_done
from ucformat.torch.saving.manifest import SaveMetadata, state_info
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
from ucformat.torch.state.elements import (
    Slots,
    dense_elements,
    elements_of,
    host_memory,
    map_shared,
)
from ucformat.torch.state.memory import devices_of, own_streams, record_events, synchronize

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ucformat.geometry.tensor import TensorInfo
    from ucformat.torch.comm.bulk import Links
    from ucformat.torch.comm.group import Group
    from ucformat.torch.saving.options import SaveOptions
    from ucformat.torch.state.elements import Memory
    from ucformat.torch.state.local import LocalShard, LocalState


# Copies a local state to host memory that another process can map; the memory is reused.


_ALIGNMENT = 64  # bytes
_COPY_BYTES = 8 << 20  # that one thread copies at a time
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices


class HostBuffer:
    """Anonymous shared memory, pinned when a tensor on a GPU is first copied to it, for full speed."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        self.fd = os.memfd_create("ucformat-stage", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, self.nbytes)
        self.memory = map_shared(self.fd, self.nbytes)
        self._pinned_for: torch.device | None = None
        self._refused = False

    def pin(self, device: torch.device) -> None:
        """Pin the memory for all CUDA devices; if the driver refuses, copies are slower."""
        if self._pinned_for is not None or self._refused:
            return
        with torch.cuda.device(device):
            done = torch.cuda.cudart().cudaHostRegister(
                self.memory.ctypes.data, self.nbytes, _PORTABLE
            )
        if int(done):
            self._refused = True
            _clear_error(device)
        else:
            self._pinned_for = device

    def close_after_fork(self) -> None:
        """Release the memory in a forked child."""
        os.close(self.fd)
        self.memory = np.empty(0, np.uint8)

    def close(self) -> None:
        """Release the memory, which must not be in use any more."""
        if self._pinned_for is not None:
            with torch.cuda.device(self._pinned_for):
                done = torch.cuda.cudart().cudaHostUnregister(self.memory.ctypes.data)
            if int(done):
                _clear_error(self._pinned_for)
        self.memory = np.empty(0, np.uint8)
        os.close(self.fd)


def _clear_error(device: torch.device) -> None:
    """Reset the last error of the CUDA runtime, which the next kernel of the training would raise as its own.

    PyTorch has no function for this, but its check after a kernel both raises and resets the error.
    """
    with suppress(RuntimeError):
        torch.ones(1, device=device)


def room_for(state: LocalState) -> int:
    """Return the size of the buffer that `stage` needs for a state, in bytes."""
    return sum(-(-_nbytes(t) // _ALIGNMENT) * _ALIGNMENT for t in state.tensors)


def _nbytes(t: LocalShard) -> int:
    return t.nbytes if t.tensor.device.type == "cpu" else t.tensor.numel() * t.info.itemsize


def stage(
    state: LocalState, buffer: HostBuffer, pool: ThreadPoolExecutor
) -> tuple[tuple[tuple[TensorInfo, tuple[Piece, ...]], ...], Slots]:
    """Copy the tensors of a state to a buffer.

    Of a tensor on the host the pieces are copied, each in row-major order; of a tensor on a device
    the whole local tensor. Kernels of the training are waited for before, and copies from devices,
    which have streams of their own, after. Returned are the tensors with the pieces that describe
    them in the buffer, and their slots.
    """
    tensors = [t.tensor for t in state.tensors]
    devices = devices_of(tensors)
    if devices and devices[0].type == "cuda":
        buffer.pin(devices[0])  # while kernels of the training run
    synchronize(tensors)
    with own_streams(devices):
        try:
            return _copy_all(state, buffer, pool, devices)
        finally:  # also if a copy failed: the buffer may be reused
            for event in record_events(devices):
                event.synchronize()


def _copy_all(
    state: LocalState, buffer: HostBuffer, pool: ThreadPoolExecutor, devices: Sequence[torch.device]
) -> tuple[tuple[tuple[TensorInfo, tuple[Piece, ...]], ...], Slots]:
    out: list[tuple[TensorInfo, tuple[Piece, ...]]] = []
    slots: list[tuple[int, int]] = []
    copies: list[Callable[[], None]] = []
    at = 0
    for t in state.tensors:
        end = at + _nbytes(t)
        memory = buffer.memory[at:end]
        if t.tensor.device.type == "cpu":
            out.append((t.info, _copy_pieces(t, memory, copies)))
        else:
            target = torch.from_numpy(memory).view(t.tensor.dtype).view(t.tensor.shape)
            target.copy_(t.tensor, non_blocking=t.tensor.device in devices)
            out.append((t.info, t.pieces))
        slots.append((at, end))
        at = -(-end // _ALIGNMENT) * _ALIGNMENT
    for done in [pool.submit(copy) for copy in copies]:
        done.result()
    return tuple(out), tuple(slots)


def _copy_pieces(
    t: LocalShard, memory: Memory, copies: list[Callable[[], None]]
) -> tuple[Piece, ...]:
    """Append functions that copy a tensor's pieces to memory, and return the pieces that describe it there."""
    source, itemsize = host_memory(t.tensor), t.info.itemsize
    pieces: list[Piece] = []
    at = 0
    for p in t.pieces:
        dense = row_major(p.box.shape)
        pieces.append(Piece(p.box, at // itemsize, dense))
        nbytes = p.box.size * itemsize
        target = memory[at : at + nbytes]
        if all(n == 1 or s == d for n, s, d in zip(p.box.shape, p.strides, dense, strict=True)):
            begin = p.offset * itemsize
            copies += _copies(target, source[begin : begin + nbytes])
        else:
            target_elements = dense_elements(p.box.shape, target, itemsize)
            copies.append(partial(np.copyto, target_elements, elements_of(p, source, itemsize)))
        at += nbytes
    return tuple(pieces)


def _copies(target: Memory, source: Memory) -> Sequence[Callable[[], None]]:
    blocks = (slice(i, i + _COPY_BYTES) for i in range(0, len(target), _COPY_BYTES))
    return [partial(fill, [target[block].data], source[block].data) for block in blocks]


__all__ = ["BackgroundWriter", "close_writer", "kill_writer", "writers"]


_log = logging.getLogger("ucformat")
_START_S = 300.0  # the least time for a process to start, seconds
_END_S = 10.0  # the time for a process to end or to die, seconds
_MAIN = "from ucformat.torch.saving.worker import main; main()"


class BackgroundWriter:
    """The writing process of this rank, its staging buffers, and the saves in flight."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._intact = True  # whether the group of writing processes can be used again
        # replies that the process has to send, and commands that it has to receive
        self._outstanding = 0
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
        while len(running := [h for h, _ in list(self._handles.values()) if not h.done]) >= max(
            1, in_flight
        ):
            wait_until_done(running[0])

    def save(
        self, state: LocalState, options: SaveOptions, metadata: SaveMetadata, begun: float
    ) -> SaveHandle:
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
                info = state_info(
                    state,
                    self.group.links.members,
                    tensors,
                    handle.stall,
                    certify=options.certify,
                )
                # the process may have another working folder
                resolved = replace(options, url=_absolute(options.url))
                job = encode(SaveJob(self._count, number, info, slots, resolved, metadata), Command)
            except Exception as error:  # noqa: BLE001 - raised on all ranks
                why = f"cannot stage a copy of the state: {type(error).__name__}: {error}"
                job = encode(StagingFailed(self._count, why), Command)
            # counted before it is sent: the process may answer at once
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
                # computed again: another command may have been sent since
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
        ending = f"was unresponsive for {self.group.timeout:g} s and was killed"
        with suppress(subprocess.TimeoutExpired):  # one that is blocked by a disk dies later
            code = self._process.wait(_END_S)
            if not self._unresponsive:
                ending = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        for handle, _ in list(self._handles.values()):
            error = UcformatError(
                f"rank {self.group.rank}: the process that wrote {handle.url} {ending}",
                hint=(
                    "the checkpoint is not committed; see the output of the process above, then "
                    "save again"
                ),
            )
            set_outcome(handle, error)

    def kill(self) -> None:
        """End the process; the saves in flight fail."""
        self._process.kill()

    def close_after_fork(self) -> None:
        """Close the copies of descriptors in a forked child; the process and its saves belong to the parent."""
        # or Popen would wait for a process that is not a child of this one
        self._process.returncode = 0
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
            # ends the process, and wakes the listening thread
            self._socket.shutdown(socket.SHUT_RDWR)
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
    scheme, path = split_url(url)
    return url if scheme not in ("", "file") else str(local_path(path))


#: By connections of a group; None: this process alone.
writers: dict[Links | None, BackgroundWriter] = {}


def close_writer(writer: BackgroundWriter) -> None:
    """Wait for the saves of a writer, and end its process."""
    for key in [k for k, w in writers.items() if w is writer]:
        del writers[key]
    writer.close()


def kill_writer(links: Links | None) -> None:
    """End the writing process of a group at once, if it has one; its saves in flight fail."""
    writer = writers.get(links if links is not None and links.size > 1 else None)
    if writer is not None:
        writer.kill()


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
