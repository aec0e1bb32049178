"""Messages between neighbours in the tree of a group.

Each message is a frame on the line between two ranks, with a tag; messages with the same tag arrive in order. Any
thread that waits for a rank reads its line, and queues messages for other threads.
"""

from __future__ import annotations

import struct
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ucformat.errors import UcformatError
from ucformat.torch.comm.bulk import Bulk
from ucformat.torch.comm.connections import READ, Lost
from ucformat.torch.comm.wire import decode, encode, message

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ucformat.torch.comm.handshake import Address

_LATE_S = 30.0  # how much longer a rank waits for those that wait for others
_FRAME = struct.Struct("<qq")  # tag, and number of bytes that follow


@message
class _Directory:
    """Where ranks listen, and the error because of which they do not meet."""

    ranks: NDArray[np.int32]
    hosts: tuple[str, ...]
    ports: NDArray[np.int32]
    error: BaseException | None


class Links(Bulk):
    """The connections of a group, which all its channels share; see `Connections` for the arguments."""

    def join(self, meeting: Address | None, failure: UcformatError | None = None) -> None:
        """Connect to the parent and the children, and learn where all ranks listen; all ranks call this."""
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
        """Send a message; returns when the data may be changed."""
        with self.communicating("to send to", other):
            self._write(other, tag, sum(map(len, parts)), parts, time.monotonic() + self.timeout)

    def receive(self, other: int, tag: int) -> bytearray:
        """Return the next message of a rank with a tag."""
        with self.communicating("to receive from", other):
            return self._take(other, tag, time.monotonic() + self.timeout)

    def _take(self, other: int, tag: int, end: float) -> bytearray:
        line = self._lines[other]
        self._read(other, lambda: bool(line.received.get(tag)), end)
        with line.change:
            return line.received[tag].popleft()

    def _write(self, other: int, tag: int, size: int, parts: Sequence[memoryview], end: float) -> None:
        """Send a frame."""
        line = self._lines[other]
        if not line.sending.acquire(timeout=max(0.0, end - time.monotonic())):
            raise Lost("it accepts no data", other)

        try:
            self._send(other, line.line, [memoryview(_FRAME.pack(tag, size)), *parts], end)
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
                self._poll(other, line, READ, end)
                continue
            except OSError as error:
                raise Lost(str(error), other) from error
            if not n:
                raise Lost("the connection was closed", other)
            out = out[n:]


def _joined(parts: Sequence[_Directory], error: BaseException | None) -> _Directory:
    ranks = np.concatenate([np.zeros(0, np.int32), *(p.ranks for p in parts)])
    ports = np.concatenate([np.zeros(0, np.int32), *(p.ports for p in parts)])
    return _Directory(ranks, tuple(h for p in parts for h in p.hosts), ports, error)
