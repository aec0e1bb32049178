"""Messages over the connections of a group; if one breaks, all ranks stop at once and name the rank that caused it.

Each message is a frame on the line between two ranks, with a tag; messages with the same tag arrive in order. Any
thread that waits for a rank reads its line, and queues messages for other threads. Bulk data is sent when the receiver
signals that its buffer is ready, and is read straight into that, so large data is never queued. A rank on the same host
writes it to the buffer, which is shared memory: a connection takes five times the processor time.

A rank that gives up rings the bells of all others, with the number of the rank that caused it. Every rank so stops at
once, and follows the causes to the rank that failed first. A rank that died rings no bell.
"""

from __future__ import annotations

import atexit
import os
import select
import socket
import struct
import threading
import time
import weakref
from collections import deque
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from ucformat.errors import UcformatError
from ucformat.torch.state.elements import SharedRange, in_turn, write_shared

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch.distributed as dist

    from ucformat.torch.comm.handshake import Peer
    from ucformat.torch.state.elements import SharedMemory

__all__ = ["Links"]

_BELL_WAIT_S = 1.0  # how long to wait for the bell of a rank that may be dead
_FRAME = struct.Struct("<qq")  # tag, and number of bytes that follow, or one of:
_READY = -1  # the buffer for bulk data with this tag is ready; a _RANGE follows
_FILLED = -2  # the buffer for bulk data with this tag has been filled
_RANGE = struct.Struct("<iiqq32s")  # process (0: none), descriptor, start, bytes and name of the buffer
_RING = struct.Struct("<i")  # the rank that is the cause
_READ, _WRITE = select.POLLIN, select.POLLOUT

_all: weakref.WeakSet[Links] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """Close all connections at exit, even if a group is still referenced."""
    for links in list(_all):
        links.end()


def _forked() -> None:
    """In a forked child, close the copies of the parent's connections."""
    for links in list(_all):
        links.close_after_fork()
    _all.clear()


os.register_at_fork(after_in_child=_forked)


class _Lost(Exception):
    """A connection is closed, a rank gave up, or time is up; `cause` is the rank that caused it."""

    def __init__(self, why: str, cause: int) -> None:
        super().__init__(why)
        self.cause = cause


class _Line:
    """The connections to one rank, and the messages that were read and not yet taken."""

    def __init__(self, peer: Peer) -> None:
        self.line, self.bell = peer
        self.sending = threading.Lock()
        self.change = threading.Condition()
        self.reading = False  # whether a thread reads the line now
        self.received: dict[int, deque[bytearray]] = {}
        self.ready: dict[int, deque[SharedRange]] = {}  # by tag: buffers that the other rank has ready for bulk data
        self.here = self.line.getsockname()[0] == self.line.getpeername()[0]  # whether the other rank is on this host
        self.wanted: dict[int, memoryview] = {}  # by tag: buffers for bulk data that this rank waits for


class Links:
    """The connections of a group, which all its channels share.

    Args:
        peers: the connections to each other rank.
        rank: of this process.
        size: the number of ranks.
        timeout: seconds to wait for another rank.
        store: assigns numbers to channels; None if the group has a single channel.
    """

    def __init__(
        self, peers: Mapping[int, Peer], rank: int, size: int, timeout: float, store: dist.Store | None = None
    ) -> None:
        self.rank, self.size, self.timeout, self.store = rank, size, timeout, store
        self.intact = True
        self.broken: UcformatError | None = None  # the first failure
        self.breaking = threading.Lock()
        self.channel_store = store
        self.cache: dict[str, Any] = {}
        self.opening = threading.Lock()
        self.waits = 0  # threads that wait for another rank now, none of them longer than the timeout
        self._counting = threading.Lock()
        self._lines = {other: _Line(peer) for other, peer in peers.items()}
        self._bells = select.epoll() if peers else None
        self._rank_of_bell = {peer.bell.fileno(): other for other, peer in peers.items()}
        self._rung: dict[int, int | None] = {}  # the cause by rank that rang; None if its connection was closed
        for bell in self._rank_of_bell:
            self._bells.register(bell, select.EPOLLIN)  # type: ignore[union-attr]
        sockets = [s for peer in peers.values() for s in peer]
        self._close = weakref.finalize(self, _close, sockets, self._bells)
        self._close.atexit = False  # `_end_all` closes them, after other threads have ended
        _all.add(self)

    def end(self) -> None:
        """Close the connections; the group cannot be used any more."""
        self.intact = False
        self.broken = self.broken or UcformatError("the group of ranks was closed", hint="create a new one")
        self._shut_down()
        self.store = self.channel_store = None

    def close_after_fork(self) -> None:
        """Close the copies of the connections in a forked child; the parent keeps its own."""
        self.intact = False
        self.broken = UcformatError("the group of ranks belongs to the process that this one was forked from")
        self._close()

    def _shut_down(self) -> None:
        """Shut all connections down, so that every waiting thread wakes up; bells that were rung stay readable."""
        for line in self._lines.values():
            for end in (line.line, line.bell):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def channel_number(self, name: str) -> int:
        """Return the number of a channel, which the first rank that asks assigns for all.

        Args:
            name: of the channel.
        """
        assert self.channel_store is not None  # noqa: S101 - of several ranks
        mine = self.channel_store.add("channels", 1)
        return int(self.channel_store.compare_set(f"channel/{name}", "", str(mine)))

    def send(self, other: int, tag: int, data: memoryview) -> None:
        """Send a message; returns when the data may be changed.

        Args:
            other: the receiving rank.
            tag: under which it is received.
            data: the bytes.
        """
        with self.communicating("to send to", other):
            self._write(other, tag, len(data), [data], time.monotonic() + self.timeout)

    def send_bulk(self, other: int, tag: int, parts: Sequence[memoryview]) -> None:
        """Send bulk data when the receiver has its buffer ready; returns when the data may be changed.

        Args:
            other: the receiving rank.
            tag: under which it is received.
            parts: the bytes.
        """
        line = self._lines[other]
        with self.communicating("to send to", other):
            end = time.monotonic() + self.timeout
            self._read(other, lambda: bool(line.ready.get(tag)), end)
            with line.change:
                target = line.ready[tag].popleft()
            size = sum(map(len, parts))
            filled = target.pid and target.nbytes == size and write_shared(target, parts)
            self._write(other, tag, _FILLED if filled else size, [] if filled else parts, end)

    def receive(self, other: int, tag: int) -> bytearray:
        """Return the next message of a rank with a tag.

        Args:
            other: the sending rank.
            tag: as given to `send`.
        """
        line = self._lines[other]
        with self.communicating("to receive from", other):
            self._read(other, lambda: bool(line.received.get(tag)), time.monotonic() + self.timeout)
            with line.change:
                return line.received[tag].popleft()

    def receive_bulk(self, tag: int, shared: SharedMemory, slots: Mapping[int, tuple[int, int]]) -> None:
        """Receive bulk data from several ranks.

        Args:
            tag: as given to `send_bulk`.
            shared: the memory to fill.
            slots: by sending rank, the bytes `[start, stop)` of the memory, exactly as many as are sent.
        """
        end = time.monotonic() + self.timeout
        for other, (start, stop) in slots.items():
            line = self._lines[other]
            with self.communicating("to receive from", other):
                with line.change:
                    line.wanted[tag] = shared.memory[start:stop].data
                pid = os.getpid() if line.here and shared.fd >= 0 else 0
                target = _RANGE.pack(pid, shared.fd, start, stop - start, shared.name)
                self._write(other, tag, _READY, [memoryview(target)], end)
        for other in slots:
            line = self._lines[other]
            with self.communicating("to receive from", other):
                self._read(other, lambda line=line: tag not in line.wanted, end)  # type: ignore[misc]

    def _write(self, other: int, tag: int, size: int, parts: Sequence[memoryview], end: float) -> None:
        """Send a frame."""
        line = self._lines[other]
        if not line.sending.acquire(timeout=max(0.0, end - time.monotonic())):
            raise _Lost("it accepts no data", other)

        def send(some: list[memoryview], _: int) -> int:
            try:
                return line.line.sendmsg(some)
            except BlockingIOError:
                self._poll(other, line.line, _WRITE, end)
                return 0

        try:
            in_turn([memoryview(_FRAME.pack(tag, size)), *parts], send)
        except OSError as error:
            raise _Lost(str(error), other) from error
        finally:
            line.sending.release()

    def _read(self, other: int, done: Callable[[], bool], end: float) -> None:
        """Read the line of a rank, or wait while another thread does, until `done`."""
        line = self._lines[other]
        while True:
            with line.change:
                left = max(0.0, end - time.monotonic())
                idle = line.change.wait_for(lambda: done() or not line.reading or self.broken is not None, left)
                if done():
                    return
                if not idle or self.broken is not None:
                    raise _Lost("timed out", other)
                line.reading = True
            try:
                self._read_frame(other, end)
            finally:
                with line.change:
                    line.reading = False
                    line.change.notify_all()

    def _read_frame(self, other: int, end: float) -> None:
        """Read one frame."""
        line = self._lines[other]
        head = memoryview(bytearray(_FRAME.size))
        self._fill(other, head, end)
        tag, size = _FRAME.unpack(head)
        if size == _READY:
            packed = memoryview(bytearray(_RANGE.size))
            self._fill(other, packed, end)
            with line.change:
                line.ready.setdefault(tag, deque()).append(SharedRange(*_RANGE.unpack(packed)))
            return
        with line.change:
            wanted = line.wanted.pop(tag, None) if size == _FILLED else line.wanted.get(tag)
        if size == _FILLED:
            return
        if wanted is not None:
            if len(wanted) != size:
                raise _Lost(f"it sent {size} bytes, expected {len(wanted)}", other)
            self._fill(other, wanted, end)
            with line.change:
                del line.wanted[tag]
            return
        if size < 0:
            raise _Lost(f"it sent a frame of {size} bytes", other)
        data = bytearray(size)
        self._fill(other, memoryview(data), end)
        with line.change:
            line.received.setdefault(tag, deque()).append(data)

    def _fill(self, other: int, out: memoryview, end: float) -> None:
        line = self._lines[other].line
        while out:
            try:
                n = line.recv_into(out)
            except BlockingIOError:
                self._poll(other, line, _READ, end)
                continue
            except OSError as error:
                raise _Lost(str(error), other) from error
            if not n:
                raise _Lost("the connection was closed", other)
            out = out[n:]

    def _poll(self, other: int, line: socket.socket, event: int, end: float) -> None:
        """Wait until a line is ready; raises if a bell rings or time is up."""
        poll = select.poll()
        poll.register(line, event)
        poll.register(self._bells, _READ)  # type: ignore[arg-type]
        if not poll.poll(max(0.0, end - time.monotonic()) * 1000):
            raise _Lost("timed out", other)
        self._read_bells()
        for ringing, cause in list(self._rung.items()):
            if cause is not None:  # if it names this rank, then the rank for which this one waits is the cause
                raise _Lost(f"rank {ringing} gave up", other if cause == self.rank else ringing)

    def _read_bells(self) -> None:
        """Read the bells that have rung."""
        assert self._bells is not None  # noqa: S101 - there are peers
        with self._counting:
            for bell, _ in self._bells.poll(0):
                other = self._rank_of_bell[bell]
                try:
                    data = self._lines[other].bell.recv(_RING.size)
                except BlockingIOError:
                    continue
                except OSError:
                    data = b""
                if len(data) == _RING.size:
                    self._rung[other] = _RING.unpack(data)[0]
                else:
                    self._rung.setdefault(other, None)
                self._bells.unregister(bell)

    @contextmanager
    def communicating(self, action: str, other: int) -> Iterator[None]:
        """Turn a failed communication inside into an error that names the rank that caused it, and break the group.

        Args:
            action: what fails, before "rank N", as "to send to".
            other: the rank with which this one communicates.

        Raises:
            UcformatError: the communication failed, or the group was broken before.
        """
        if self.broken is not None:
            raise self.broken
        self._count_waits(1)
        try:
            yield
        except (_Lost, RuntimeError) as error:  # of a line, or of the store
            with self.breaking:
                self.broken = self.broken or self._break(action, other, error)
            raise self.broken from error
        finally:
            self._count_waits(-1)

    def _count_waits(self, change: int) -> None:
        with self._counting:
            self.waits += change

    def _break(self, action: str, other: int, error: Exception) -> UcformatError:
        """Ring all bells, find the rank that failed first, and shut all connections down."""
        self.intact = False
        cause = error.cause if isinstance(error, _Lost) else other
        for line in self._lines.values():
            with suppress(OSError):
                line.bell.send(_RING.pack(cause))
        failed = self._first_failure(cause)
        self._shut_down()
        return UcformatError(
            f"rank {failed} died or has been unresponsive for {self.timeout:g} s: rank {self.rank} failed {action} "
            f"rank {other} ({str(error).splitlines()[0][:200]})",
            hint="see the first error in the log of that rank; checkpoints committed earlier are intact",
        )

    def _first_failure(self, other: int) -> int:
        """The rank that failed first, found by following the causes from `other`."""
        seen = {self.rank}
        while other not in seen:
            seen.add(other)
            cause = self._cause_of(other)
            if cause is None:
                break
            other = cause
        return other

    def _cause_of(self, other: int) -> int | None:
        """The rank because of which a rank gave up; None if it ended, or has not rung in time, as a stopped process."""
        end = time.monotonic() + _BELL_WAIT_S
        self._read_bells()
        while other not in self._rung and (left := end - time.monotonic()) > 0:
            poll = select.poll()
            poll.register(self._bells, _READ)  # type: ignore[arg-type]
            poll.poll(left * 1000)
            self._read_bells()
        return self._rung.get(other)


def _close(sockets: list[socket.socket], bells: select.epoll | None) -> None:
    for one in sockets:
        one.close()
    if bells is not None:
        bells.close()
