"""`async_save`: training waits for a copy to host memory alone; another process writes it and commits."""

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
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import TYPE_CHECKING, Any, Literal

from ucformat.errors import UcformatError
from ucformat.torch.group import TIMEOUT, group_of
from ucformat.torch.saving import terms_of
from ucformat.torch.staging import HostBuffer, room_for, stage
from ucformat.torch.state import listing_of, local_state
from ucformat.torch.worker import Buffer, Failed, Job, Start
from ucformat.torch.writing import Note, Saved

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from os import PathLike

    import torch.distributed as dist

    from ucformat.schema.manifest import LineageDoc
    from ucformat.torch.agree import Terms
    from ucformat.torch.group import Group
    from ucformat.torch.local import LocalState
    from ucformat.torch.worker import Done

__all__ = ["SaveHandle", "async_save", "async_save_local"]

_log = logging.getLogger("ucformat")
_SERVE = "from ucformat.torch.worker import main; main()"


class SaveHandle:
    """A save that goes on in another process."""

    def __init__(self, url: str, stall: float) -> None:
        self.url = url
        self.stall = stall  # seconds for which training stood still
        self.seen = False  # its outcome was asked for
        self._done: Future[Saved] = Future()

    @property
    def staged(self) -> bool:
        """Whether the state was copied, so that training may change it: true as soon as there is a handle."""
        return True

    @property
    def committed(self) -> bool:
        """Whether the checkpoint stands."""
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


def async_save(
    state: Mapping[str, Any],
    url: str | PathLike[str],
    *,
    step: int | None = None,
    run: str | None = None,
    metrics: Mapping[str, float] | None = None,
    config: Mapping[str, Any] | None = None,
    form: Literal["zarr", "packed"] = "zarr",
    overwrite: bool = False,
    lineage: Sequence[LineageDoc] = (),
    replicas: Literal["equal", "first"] = "equal",
    chunk_bytes: int | None = None,
    shard_bytes: int | None = None,
    group: dist.ProcessGroup | None = None,
    timeout: float = TIMEOUT,
    in_flight: int = 1,
) -> SaveHandle:
    """Save as `save` does, but return as soon as the state is copied to host memory; all ranks call it together.

    The copy goes to memory that is kept from save to save (the first one allocates it, and starts a process for each
    rank). At most `in_flight` saves are under way, each with memory of its own: one more waits for the oldest.

    Raises:
        UcformatError: an earlier save of this kind failed, and some rank had not asked for its outcome; or the state
            of some rank cannot be saved. Every rank gets the same error.
    """
    begun = time.monotonic()
    with group_of(group, timeout).telling():
        terms = terms_of(url, form, overwrite, chunk_bytes, shard_bytes, replicas)
        note = Note.of(step, run, metrics, config, lineage)
        held = local_state(state)
    background = _background(group, timeout, in_flight)
    return background.save(held, terms, note, begun)


def async_save_local(
    state: LocalState,
    terms: Terms,
    note: Note,
    *,
    group: dist.ProcessGroup | None = None,
    timeout: float = TIMEOUT,
    in_flight: int = 1,
) -> SaveHandle:
    """`async_save` of what this rank holds, whatever engine it was collected from."""
    begun = time.monotonic()
    background = _background(group, timeout, in_flight)
    return background.save(state, terms, note, begun)


class _Background:
    """This rank's writing process, its memory, and the saves under way."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._whole = True  # no save has left its ranks at odds
        self._handles: dict[int, tuple[SaveHandle, int]] = {}  # job -> handle, buffer
        self._buffers: dict[int, HostBuffer] = {}
        self._count = 0
        self._pool = ThreadPoolExecutor(min(4, len(os.sched_getaffinity(0))), "ucformat-stage")
        start, listener = _meeting_place(group)
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
        self._connection.send(start)
        self._listener = threading.Thread(target=self._listen, daemon=True, name="ucformat-async")
        self._listener.start()

    @property
    def usable(self) -> bool:
        """Whether the process lives, and can take another save."""
        return self._whole and self._process.poll() is None

    def make_room(self, in_flight: int) -> None:
        """Wait until fewer saves are under way; raise what one of them failed of, if nobody has seen it."""
        while len(under_way := [h for h, _ in self._handles.values() if not h.done]) >= max(1, in_flight):
            _settle(under_way[0])
        for number, (handle, _) in list(self._handles.items()):
            if handle.done:
                seen, error = handle.seen, handle.error()
                del self._handles[number]
                if error is not None and not seen:
                    raise error

    def save(self, state: LocalState, terms: Terms, note: Note, begun: float) -> SaveHandle:
        """Stage a state, and have it written; what fails here too is told to all ranks by their handles."""
        handle = SaveHandle(terms.url, 0.0)
        self._count += 1
        self._handles[self._count] = (handle, -1)
        job: Job | Failed
        try:
            try:
                number = self._buffer(room_for(state))
                self._handles[self._count] = (handle, number)
                tensors, slots = stage(state, self._buffers[number], self._pool)
                handle.stall = time.monotonic() - begun
                listing = listing_of(state, tensors=tensors, stall=handle.stall)
                job = Job(self._count, number, listing, slots, terms, note)
            except Exception as error:  # noqa: BLE001 - told to all ranks
                job = Failed(self._count, f"cannot stage a copy of the state: {type(error).__name__}: {error}")
            self._connection.send(job)
        except OSError:
            self._died()
        return handle

    def _buffer(self, nbytes: int) -> int:
        """The number of a buffer that is free and large enough."""
        busy = {number for handle, number in self._handles.values() if not handle.done}
        for number, buffer in list(self._buffers.items()):
            if number not in busy and buffer.nbytes >= nbytes:
                return number
            if number not in busy:  # too small: a larger one takes its place
                self._connection.send(number)
                self._buffers.pop(number).close()
        number = max(self._buffers, default=-1) + 1
        buffer = self._buffers[number] = HostBuffer(nbytes)
        self._connection.send(Buffer(number, buffer.nbytes))
        send_handle(self._connection, buffer.fd, self._process.pid)
        return number

    def _listen(self) -> None:
        """Take the outcomes of jobs, as long as the process lives."""
        try:
            while True:
                done: Done = self._connection.recv()
                self._whole = self._whole and done.whole
                _conclude(self._handles[done.number][0], done.outcome)
        except (EOFError, OSError):
            self._died()

    def _died(self) -> None:
        """The process is gone: what it had under way is lost."""
        code = self._process.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        for handle, _ in list(self._handles.values()):
            error = UcformatError(
                f"rank {self.group.rank}: the process that wrote {handle.url} {how}",
                hint="nothing of it is committed; look at its output above, then save again",
            )
            _conclude(handle, error)

    def close(self) -> None:
        """Wait for what is under way, and end the process."""
        for handle, _ in list(self._handles.values()):
            _settle(handle)
            seen, error = handle.seen, handle.error()
            if error is not None and not seen:
                _log.error("%s was not saved: %s", handle.url, error)
        with suppress(OSError):  # it ended by itself
            self._socket.shutdown(socket.SHUT_RDWR)  # tells the process, and wakes our thread
        self._process.wait()
        self._listener.join()
        self._connection.close()
        self._socket.close()
        self._pool.shutdown()
        for buffer in self._buffers.values():
            buffer.close()


def _conclude(handle: SaveHandle, outcome: Saved | BaseException) -> None:
    """Give a save its outcome; only the first counts."""
    with suppress(InvalidStateError):
        if isinstance(outcome, Saved):
            handle._done.set_result(outcome)  # noqa: SLF001 - two halves of one thing
        else:
            handle._done.set_exception(outcome)  # noqa: SLF001


def _settle(handle: SaveHandle) -> None:
    """Wait until a save has succeeded or failed."""
    handle._done.exception()  # noqa: SLF001


def _meeting_place(group: Group) -> tuple[Start, socket.socket | None]:
    """Where the writers of all ranks meet: a port on which rank 0's will serve."""
    listener, place = None, None
    if group.size > 1:
        if not group.rank:
            listener = socket.create_server(("", 0), backlog=group.size + 16)
            place = (os.environ.get("MASTER_ADDR", socket.gethostname()), listener.getsockname()[1])
        place = group.agree(place)[0]
    host, port = place or ("", 0)
    fd = listener.fileno() if listener else None
    return Start(group.rank, group.size, host, port, fd, group.timeout), listener


_backgrounds: dict[Group | None, _Background] = {}  # None: this process alone


def _background(process_group: dist.ProcessGroup | None, timeout: float, in_flight: int) -> _Background:
    """The writing process of this rank for a group of ranks, with room for a save; a new one where the last broke.

    The ranks agree on that: where one lost its process, all begin anew, and what one has to raise, all do.
    """
    group = group_of(process_group, timeout)
    key = group if group.size > 1 else None
    found = _backgrounds.get(key)
    error: BaseException | None = None
    if found is not None:
        try:
            found.make_room(in_flight)
        except Exception as failed:  # noqa: BLE001 - told to all ranks
            error = failed
    everybody = group.agree(_Standing(found is not None and found.usable, error))
    if found is not None and not all(s.usable for s in everybody):
        _close(found)
    errors = [s.error for s in everybody if s.error is not None]
    if errors:
        raise error or errors[0]
    if key not in _backgrounds:
        _backgrounds[key] = _Background(group)
    return _backgrounds[key]


@dataclass(frozen=True, slots=True)
class _Standing:
    """Whether a rank's writing process can go on, and what of an earlier save it has to raise."""

    usable: bool
    error: BaseException | None


def _close(background: _Background) -> None:
    for key in [k for k, b in _backgrounds.items() if b is background]:
        del _backgrounds[key]
    background.close()


@atexit.register
def _close_all() -> None:
    for background in list(_backgrounds.values()):
        _close(background)
