"""Messages over the connections of a group, and bulk data straight into the receiver's memory.

Each message is a frame on the line between two ranks, with a tag; messages with the same tag arrive in order. Any
thread that waits for a rank reads its line, and queues messages for other threads. Bulk data is sent when the receiver
signals that its buffer is ready, and is read straight into that, so large data is never queued. A rank on the same host
writes it to the buffer, which is shared memory: a connection takes five times the processor time.
"""

from __future__ import annotations

import select
import struct
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ucformat.errors import UcformatError
from ucformat.torch.comm.connections import Connections, Lost
from ucformat.torch.comm.wire import decode, encode, message
from ucformat.torch.state.elements import SharedRange, in_turn, write_shared

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping, Sequence

    from ucformat.torch.comm.handshake import Address
    from ucformat.torch.state.elements import SharedMemory

__all__ = ["Links"]

_LATE_S = 30.0  # how much longer a rank waits for those that wait for others
_FRAME = struct.Struct("<qq")  # tag, and number of bytes that follow, or one of:
_READY = -1  # the buffer for bulk data with this tag is ready; a _RANGE follows
_FILLED = -2  # the buffer for bulk data with this tag has been filled
_RANGE = struct.Struct("<iiqq32s")  # process (0: none), descriptor, start, bytes and name of the buffer
_READ, _WRITE, _HUNG_UP = select.POLLIN, select.POLLOUT, select.POLLRDHUP


@message
class _Directory:
    """Where ranks listen, and the error because of which they do not meet."""

    ranks: NDArray[np.int32]
    hosts: tuple[str, ...]
    ports: NDArray[np.int32]
    error: BaseException | None


class Links(Connections):
    """The connections of a group, which all its channels share; see `Connections` for the arguments."""

    def join(self, meeting: Address | None, failure: UcformatError | None = None) -> None:
        """Connect to the parent and the children, and learn where all ranks listen; all ranks call this.

        Args:
            meeting: where the parent listens.
            failure: why this rank cannot take part; raised on all ranks.

        Raises:
            UcformatError: a rank did not connect in time, or failed.
        """
        try:
            found = self._join(meeting, failure)
        except BaseException:
            self.end()
            raise
        if found.error is not None:
            self.end()
            raise found.error
        self._directory = dict(
            zip(found.ranks.tolist(), zip(found.hosts, found.ports.tolist(), strict=True), strict=True)
        )

    def _join(self, meeting: Address | None, failure: BaseException | None) -> _Directory:
        """Bring what the ranks below tell to the parent, and what the parent tells to them."""
        end = time.monotonic() + self.timeout
        if self.rank and meeting is not None:
            self._connect(self.parent, meeting, end)
        parts = [] if self._listener is None else [self._own_part()]
        with self._change:
            self._change.wait_for(lambda: all(c in self._lines for c in self.children), self.timeout)
        if late := [c for c in self.children if c not in self._lines]:
            failure = failure or UcformatError(
                f"rank {late[0]} did not connect to rank {self.rank} within {self.timeout:g} s"
                + (f", nor did {len(late) - 1} other ranks" if len(late) > 1 else ""),
                hint="check that it is running and that it reaches this rank's address "
                f"{self.address[0]}: MASTER_ADDR and the route to it determine the interface",
            )
        end = time.monotonic() + self.timeout + _LATE_S
        connected = [c for c in self.children if c in self._lines]
        for child in connected:
            try:
                part: _Directory = decode(self._take(child, 0, end), _Directory)
            except Lost as lost:
                failure = failure or self._error_of(lost.cause, "to receive from", child, lost)
                continue
            self.below[child] = frozenset(part.ranks.tolist())
            failure = failure or part.error
            parts.append(part)
        whole = encode(_joined(parts, failure), _Directory)
        if self.rank:
            try:
                self._write(self.parent, 0, len(whole), [memoryview(whole)], end)
                whole = bytes(self._take(self.parent, 0, end))
            except Lost as lost:
                failure = failure or self._error_of(self.parent, "to receive from", self.parent, lost)
                whole = encode(_joined([], failure), _Directory)
        for child in connected:
            with suppress(Lost):  # it is noticed later
                self._write(child, 0, len(whole), [memoryview(whole)], end)
        return decode(whole, _Directory)  # type: ignore[no-any-return]

    def _own_part(self) -> _Directory:
        host, port = self.address
        return _Directory(np.array([self.rank], np.int32), (host,), np.array([port], np.int32), None)

    def send(self, other: int, tag: int, parts: Sequence[memoryview]) -> None:
        """Send a message; returns when the data may be changed.

        Args:
            other: the receiving rank.
            tag: under which it is received.
            parts: the bytes.
        """
        with self.communicating("to send to", other):
            end = time.monotonic() + self.timeout
            self._line(other, end)
            self._write(other, tag, sum(map(len, parts)), parts, end)

    def send_bulk(self, other: int, tag: int, parts: Sequence[memoryview]) -> None:
        """Send bulk data when the receiver has its buffer ready; returns when the data may be changed.

        Args:
            other: the receiving rank.
            tag: under which it is received.
            parts: the bytes.
        """
        with self.communicating("to send to", other):
            end = time.monotonic() + self.timeout
            line = self._line(other, end)
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
        with self.communicating("to receive from", other):
            return self._take(other, tag, time.monotonic() + self.timeout)

    def _take(self, other: int, tag: int, end: float) -> bytearray:
        line = self._line(other, end)
        self._read(other, lambda: bool(line.received.get(tag)), end)
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
            with self.communicating("to receive from", other):
                line = self._line(other, end)
                with line.change:
                    line.wanted[tag] = shared.memory[start:stop].data
                here = shared.range(start, stop)
                target = _RANGE.pack(*(here if line.here else here._replace(pid=0)))
                self._write(other, tag, _READY, [memoryview(target)], end)
        for other in slots:
            line = self._lines[other]
            with self.communicating("to receive from", other):
                self._read(other, lambda line=line: tag not in line.wanted, end)  # type: ignore[misc]

    def _write(self, other: int, tag: int, size: int, parts: Sequence[memoryview], end: float) -> None:
        """Send a frame."""
        line = self._lines[other]
        if not line.sending.acquire(timeout=max(0.0, end - time.monotonic())):
            raise Lost("it accepts no data", other)

        def send(some: list[memoryview], _: int) -> int:
            try:
                return line.line.sendmsg(some)
            except BlockingIOError:
                self._poll(other, line.line, _WRITE, end)
                return 0

        try:
            in_turn([memoryview(_FRAME.pack(tag, size)), *parts], send)
        except OSError as error:
            raise Lost(str(error), other) from error
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
                    raise Lost("timed out", other)
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
                raise Lost(f"it sent {size} bytes, expected {len(wanted)}", other)
            self._fill(other, wanted, end)
            with line.change:
                del line.wanted[tag]
            return
        if size < 0:
            raise Lost(f"it sent a frame of {size} bytes", other)
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
                raise Lost(str(error), other) from error
            if not n:
                raise Lost("the connection was closed", other)
            out = out[n:]

    def _poll(self, other: int, line: socket.socket, event: int, end: float) -> None:
        """Wait until a line is ready; raises if a neighbour hangs up meanwhile, this rank gave up, or time is up."""
        poll = select.poll()
        poll.register(line, event)
        watched = {}
        if event == _READ:  # the neighbours wait for this rank, or have yet to send what it waits for
            for rank in self._neighbours:
                if rank != other and rank in self._lines:
                    watched[self._lines[rank].line.fileno()] = rank
                    poll.register(self._lines[rank].line, _HUNG_UP)
        self._check(other)
        ready = [fd for fd, _ in poll.poll(max(0.0, end - time.monotonic()) * 1000)]
        self._check(other)
        if not ready:
            raise Lost("timed out", other, late=True)
        if line.fileno() not in ready:
            raise Lost("the connection was closed", watched[ready[0]])


def _joined(parts: Sequence[_Directory], error: BaseException | None) -> _Directory:
    ranks = np.concatenate([np.zeros(0, np.int32), *(p.ranks for p in parts)])
    ports = np.concatenate([np.zeros(0, np.int32), *(p.ports for p in parts)])
    return _Directory(ranks, tuple(h for p in parts for h in p.hosts), ports, error)
