"""A rank's side of the process that writes in the background: its memory, and the handles of the saves under way."""

from __future__ import annotations

import atexit
import logging
import os
import secrets
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
from ucformat.torch.comm.group import is_live
from ucformat.torch.comm.handshake import Address, Host, host_here, listen
from ucformat.torch.comm.wire import decode, encode, message
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
)

if TYPE_CHECKING:
    from ucformat.torch.comm.group import Group
    from ucformat.torch.comm.links import Links
    from ucformat.torch.saving.plan import SaveOptions
    from ucformat.torch.state.local import LocalState

__all__ = ["BackgroundWriter", "SaveHandle", "background_writer", "conclude", "settle"]


class SaveHandle:
    """A save that goes on in another process."""

    def __init__(self, url: str, stall: float) -> None:
        self.url = url
        self.stall = stall  # seconds for which training stood still
        self.seen = False  # its outcome was asked for
        self._done: Future[Saved] = Future()

    def disown(self) -> None:
        """Say in a forked child that only its parent learns how the save ends."""
        self._done = Future()
        self._done.set_exception(UcformatError(f"{self.url} is saved by the process that this one was forked from"))

    @property
    def staged(self) -> bool:
        """Whether the state was copied, so that training may change it: true as soon as there is a handle."""
        return True

    @property
    def committed(self) -> bool:
        """Whether the checkpoint is committed."""
        return self._done.done() and self._done.exception() is None

    @property
    def done(self) -> bool:
        """Whether it was committed, or failed."""
        return self._done.done()

    def wait(self, timeout: float | None = None) -> Saved:
        """Wait for the commit, or for so many seconds.

        Raises:
            TimeoutError: it takes longer.
            UcformatError: a rank failed, or its writer died; nothing is committed.
        """
        try:
            return self._done.result(timeout)
        finally:
            self.seen = self._done.done()

    def error(self) -> BaseException | None:
        """What it failed of, if it has."""
        self.seen = self.seen or self._done.done()
        return self._done.exception() if self._done.done() else None


def conclude(handle: SaveHandle, outcome: Saved | BaseException) -> None:
    """Give a save its outcome; only the first counts."""
    with suppress(InvalidStateError):
        if isinstance(outcome, Saved):
            handle._done.set_result(outcome)  # noqa: SLF001 - two halves of one thing
        else:
            handle._done.set_exception(outcome)  # noqa: SLF001


def settle(handle: SaveHandle) -> None:
    """Wait until a save has succeeded or failed."""
    handle._done.exception()  # noqa: SLF001


_log = logging.getLogger("ucformat")
_STARTING = 300.0  # seconds in which a process imports torch, at the least
_MOMENT = 10.0  # seconds in which a process that is told to end, or killed, does so
_SERVE = "from ucformat.torch.saving.worker import main; main()"


class BackgroundWriter:
    """This rank's writing process, its memory, and the saves under way."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._whole = True  # no save has left its ranks at odds
        self._owed = 0  # answers that it is to give, and messages that it is to take
        self._heard = 0.0  # when it last gave a sign of life while it owed one
        self._started = self._silent = False
        self._counting = threading.Lock()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # for the thread that listens
        self._handles: dict[int, tuple[SaveHandle, int]] = {}  # job -> handle, buffer
        self._buffers: dict[int, HostBuffer] = {}
        self._count = 0
        self._pool = ThreadPoolExecutor(min(4, len(os.sched_getaffinity(0))), "ucformat-stage")
        start, listener = _writer_addresses(group)
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        fds = [theirs.fileno(), *([listener.fileno()] if listener else [])]
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter
            [sys.executable, "-c", _SERVE, str(theirs.fileno())],
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
        """Whether the process lives, and can take another save."""
        return self._whole and self._process.poll() is None

    def make_room(self, in_flight: int) -> None:
        """Wait until fewer saves are under way; raise what one of them failed of, if nobody has seen it."""
        while len(under_way := [h for h, _ in self._handles.values() if not h.done]) >= max(1, in_flight):
            settle(under_way[0])
        for number, (handle, _) in list(self._handles.items()):
            if handle.done:
                seen, error = handle.seen, handle.error()
                del self._handles[number]
                if error is not None and not seen:
                    raise error

    def save(self, state: LocalState, options: SaveOptions, metadata: SaveMetadata, begun: float) -> SaveHandle:
        """Stage a state, and have it written; what fails here too is told to all ranks by their handles."""
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
                info = state_info(state, tensors=tensors, stall=handle.stall)
                where = replace(options, url=_absolute(options.url))  # the process may have begun in another folder
                job = encode(SaveJob(self._count, number, info, slots, where, metadata), Command)
            except Exception as error:  # noqa: BLE001 - told to all ranks
                why = f"cannot stage a copy of the state: {type(error).__name__}: {error}"
                job = encode(StagingFailed(self._count, why), Command)
            self._owe()  # till it is done
            self._send(job)
        except OSError:
            self._died()
        return handle

    def _send(self, order: bytes, fd: int | None = None) -> None:
        """Tell the process; OSError where it is gone, or killed because it took nothing."""
        self._owe()
        try:
            self._connection.send_bytes(order)
            if fd is not None:
                send_handle(self._connection, fd, self._process.pid)
        finally:
            self._settle_debt()

    def _owe(self) -> None:
        with self._counting:
            if not self._owed:
                self._heard = time.monotonic()
            self._owed += 1
        os.eventfd_write(self._wake, 1)

    def _settle_debt(self) -> None:
        with self._counting:
            self._owed -= 1

    def _patience(self) -> float | None:
        """Seconds for which the process may still be silent; None while it owes nothing."""
        with self._counting:
            allowed = self.group.timeout if self._started else max(self.group.timeout, _STARTING)
            return self._heard + allowed - time.monotonic() if self._owed else None

    def _buffer(self, nbytes: int) -> int:
        """The number of a buffer that is free and large enough."""
        busy = {number for handle, number in self._handles.values() if not handle.done}
        for number, buffer in list(self._buffers.items()):
            if number not in busy and buffer.nbytes >= nbytes:
                return number
            if number not in busy:  # too small: a larger one takes its place
                self._send(encode(UnmapBuffer(number), Command))
                self._buffers.pop(number).close()
        number = max(self._buffers, default=-1) + 1
        buffer = self._buffers[number] = HostBuffer(nbytes)
        self._send(encode(MapBuffer(number, buffer.nbytes), Command), buffer.fd)
        return number

    def _listen(self) -> None:
        """Take the outcomes of jobs, as long as the process lives and gives signs of it while it has some to give."""
        try:
            while True:
                patience = self._patience()
                ready = wait([self._connection, self._wake], patience and max(0.0, patience))
                if not ready and (patience := self._patience()) is not None and patience <= 0:
                    break
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                if self._connection not in ready:
                    continue
                answer: JobDone | Heartbeat = decode(self._connection.recv_bytes(), Reply)
                with self._counting:
                    self._heard, self._started = time.monotonic(), True
                if isinstance(answer, JobDone):
                    self._settle_debt()
                    self._whole = self._whole and answer.whole
                    conclude(self._handles[answer.number][0], answer.outcome)
            self._silent = True
            self._process.kill()  # it may be stopped, or wait for a disk that does not answer
            self._died()
        except (EOFError, OSError):
            self._died()

    def _died(self) -> None:
        """The process is gone: what it had under way is lost."""
        self._whole = False
        how = f"was unresponsive for {self.group.timeout:g} s and was killed"
        with suppress(subprocess.TimeoutExpired):  # one that waits for a disk dies when that answers
            code = self._process.wait(_MOMENT)
            if not self._silent:
                how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        for handle, _ in list(self._handles.values()):
            error = UcformatError(
                f"rank {self.group.rank}: the process that wrote {handle.url} {how}",
                hint="nothing of it is committed; see its output above, then save again",
            )
            conclude(handle, error)

    def leave(self) -> None:
        """Let go of what a fork copied; the process and its saves are the parent's."""
        self._process.returncode = 0  # as Popen knows what is no child of this process
        self._socket.close()
        self._connection.close()
        os.close(self._wake)
        for handle, _ in self._handles.values():
            handle.disown()
        for buffer in self._buffers.values():
            buffer.leave()

    def close(self) -> None:
        """Wait for what is under way, and end the process."""
        for handle, _ in list(self._handles.values()):
            settle(handle)
            seen, error = handle.seen, handle.error()
            if error is not None and not seen:
                _log.error("%s was not saved: %s", handle.url, error)
        with suppress(OSError):  # it ended by itself
            self._socket.shutdown(socket.SHUT_RDWR)  # tells the process, and wakes our thread
        try:
            self._process.wait(_MOMENT)
        except subprocess.TimeoutExpired:  # it had nothing to do, and is stopped
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_MOMENT)
        self._listener.join()
        self._connection.close()
        self._socket.close()
        os.close(self._wake)
        self._pool.shutdown()
        for buffer in self._buffers.values():
            buffer.close()


def _absolute(url: str) -> str:
    """The same place, in whatever folder it is opened."""
    scheme, rest = split_url(url)
    return url if scheme not in ("", "file") else str(local_path(rest))


def _writer_addresses(group: Group) -> tuple[WorkerStart, socket.socket | None]:
    """Where the writers of all ranks meet, and the socket on which this rank's listens until they have."""
    if group.size == 1:
        return WorkerStart(0, (), b"", None, group.timeout), None
    hosts = group.all_gather(host_here(group.links.store), Host)
    with group.sharing_errors():
        listener = listen(hosts, group.rank)
    host, port = listener.getsockname()[:2]
    told = group.all_gather(
        _WriterAddress((host, port), b"" if group.rank else secrets.token_bytes(32)), _WriterAddress
    )
    places = tuple(t.address for t in told)
    return WorkerStart(group.rank, places, told[0].secret, listener.fileno(), group.timeout), listener


@message
class _WriterAddress:
    """Where a rank's writer listens, and of rank 0 the secret that lets the others in."""

    address: Address
    secret: bytes


_backgrounds: dict[Links | None, BackgroundWriter] = {}  # None: this process alone


def background_writer(ranks: Group, in_flight: int) -> BackgroundWriter:
    """The writing process of this rank for a group of ranks, with room for a save; a new one where the last broke.

    The ranks agree on that: where one lost its process, all begin anew, and what one has to raise, all do. The
    processes of groups that are no more, and their memory, go.
    """
    for key, old in list(_backgrounds.items()):
        if key is not None and not is_live(key):
            _close(old)
    key = ranks.links if ranks.size > 1 else None
    found = _backgrounds.get(key)
    error: BaseException | None = None
    if found is not None:
        try:
            found.make_room(in_flight)
        except Exception as failed:  # noqa: BLE001 - told to all ranks
            error = failed
    everybody = ranks.all_gather(_WriterState(found is not None and found.usable, error), _WriterState)
    if found is not None and not all(s.usable for s in everybody):
        _close(found)
    errors = [s.error for s in everybody if s.error is not None]
    if errors:
        raise error or errors[0]
    if key not in _backgrounds:
        _backgrounds[key] = BackgroundWriter(ranks)
    return _backgrounds[key]


@message
class _WriterState:
    """Whether a rank's writing process can go on, and what of an earlier save it has to raise."""

    usable: bool
    error: BaseException | None


def _close(background: BackgroundWriter) -> None:
    for key in [k for k, b in _backgrounds.items() if b is background]:
        del _backgrounds[key]
    background.close()


def _forked() -> None:
    """In a forked child: the processes are its parent's, and end with the parent, so nothing here may keep them."""
    for background in _backgrounds.values():
        background.leave()
    _backgrounds.clear()


os.register_at_fork(after_in_child=_forked)


@atexit.register
def _close_all() -> None:
    for background in list(_backgrounds.values()):
        _close(background)
