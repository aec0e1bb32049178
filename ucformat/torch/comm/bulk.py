"""Bulk data between any two ranks: the receiver asks for it, and it goes straight into the receiver's memory.

    receiver:  tag; process (0: none), descriptor, start, bytes and name of its buffer    (64 bytes)
    sender:    number of bytes, and these; or -2 if it has written them to the buffer      (8 bytes)

The receiver connects to the sender, and keeps the connection for the next time. A rank on the same
host writes to the buffer, which is shared memory: a connection takes five times the processor time.

The connections of a rank are bounded, however many ranks it exchanges data with. Either side closes
one over which nothing is asked; the receiver then asks again over another one. A sender answers in
the order in which it is asked, and a receiver reads all answers as they arrive, so no rank waits
for one that waits for it.
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
from ucformat.torch.comm.connections import HUNG_UP, READ, Connections, Lost
from ucformat.torch.comm.handshake import RETRY_S, connect
from ucformat.torch.comm.wire import decode, encode, message
from ucformat.torch.state.elements import SharedRange, write_shared

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch.distributed as dist

    from ucformat.torch.comm.connections import TreeNode
    from ucformat.torch.comm.handshake import Address
    from ucformat.torch.state.elements import SharedMemory


#: The most connections of a rank over which it asks others.
MOST_CALLS = 64
#: The most over which others ask it.
MOST_CALLERS = 128

_REQUEST = struct.Struct("<qiiqq32s")
_SIZE = struct.Struct("<q")
_FILLED = -2
_CHECK_S = 0.2  # how often a sender that is not asked checks its neighbours
_TOLD = 8  # how many of the ranks for which this one waits it tells others


class _Closed(Exception):
    """The other side has closed a connection before it answered."""


class _Caller:
    """A connection over which another rank asks."""

    def __init__(self, other: int, connection: socket.socket) -> None:
        self.other, self.connection = other, connection
        self.received = b""  # of the next request
        self.unanswered = 0
        self.answered = 0.0  # when it was last answered, on the monotonic clock; 0: never
        self.refused = False  # whether it is being closed because others are needed
        self.ended = False  # whether the other side has closed it, or it was refused


class _Call:
    """What this rank has asked another one for."""

    def __init__(self, other: int, connection: socket.socket, out: memoryview) -> None:
        self.other, self.connection, self._out = other, connection, out
        self._head = self._unread = memoryview(bytearray(_SIZE.size))

    def read(self) -> bool:
        """Read what has arrived of the answer; returns whether that was all of it."""
        while self._unread:
            try:
                n = self.connection.recv_into(self._unread)
            except BlockingIOError:
                return False
            except OSError as error:
                raise self._ended(str(error)) from error
            if not n:
                raise self._ended("the connection was closed")
            self._unread = self._unread[n:]
            if not self._unread and self._head:
                (size,) = _SIZE.unpack(self._head)
                if size not in (_FILLED, len(self._out)):
                    raise Lost(f"it sent {size} bytes, expected {len(self._out)}", self.other)
                self._head = memoryview(b"")
                self._unread = self._out if size != _FILLED else self._head
        return True

    def _ended(self, why: str) -> Exception:
        unanswered = len(self._unread) == len(self._head) > 0
        return _Closed() if unanswered else Lost(why, self.other)


def _is_here(connection: socket.socket) -> bool:
    """Whether the other rank is on this host."""
    return connection.getsockname()[0] == connection.getpeername()[0]  # type: ignore[no-any-return]


class Bulk(Connections):
    """Adds bulk data to the connections of a group."""

    def __init__(
        self,
        place: TreeNode,
        timeout: float,
        listening: socket.socket | None = None,
        secret: bytes = b"",
        store: dist.Store | None = None,
    ) -> None:
        self._callers: dict[socket.socket, _Caller] = {}
        self._asked: dict[int, deque[tuple[_Caller, SharedRange]]] = {}  # by tag
        # connections to other ranks, that used last at the end
        self._unused: dict[socket.socket, int] = {}
        self._calls = 0  # connections over which this rank asks now
        super().__init__(place, timeout, listening, secret, store)

    def send_bulk(
        self, tag: int, messages: Iterable[tuple[int, Callable[[], Sequence[memoryview]]]]
    ) -> None:
        """Send bulk data to ranks that ask for it; returns when all have done so, and all may be changed.

        Args:
            messages: the rank, and a function that returns the bytes when the rank asks. Each rank
                gets its messages in this order.
        """
        unsent: dict[int, deque[Callable[[], Sequence[memoryview]]]] = {}
        for other, parts in messages:
            unsent.setdefault(other, deque()).append(parts)
        while unsent:
            with self.communicating("to send to", *list(unsent)[:_TOLD]):
                caller, target = self._next(tag, unsent)
            with self.communicating("to send to", caller.other):
                self._answer(caller, target, unsent[caller.other].popleft()())
            if not unsent[caller.other]:
                del unsent[caller.other]

    def _next(self, tag: int, others: Mapping[int, object]) -> tuple[_Caller, SharedRange]:
        """Wait until some rank asks for what has a tag."""
        end = time.monotonic() + self.timeout
        suspect = next(iter(others))
        with self._change:
            while True:
                self._check(suspect)
                requests = self._asked.get(tag, deque())
                request = next((r for r in requests if r[0].other in others), None)
                if request is not None:
                    requests.remove(request)
                    return request
                if time.monotonic() > end:
                    raise Lost("timed out", suspect, late=True)
                self._change.wait(_CHECK_S)
                self._check_neighbours()

    def _check_neighbours(self) -> None:
        """Raise if a neighbour has hung up."""
        poll, ranks = select.poll(), self._neighbours_but(self.rank)
        for fd in ranks:
            poll.register(fd, HUNG_UP)
        for fd, _ in poll.poll(0):
            raise Lost("the connection was closed", ranks[fd])

    def _answer(self, caller: _Caller, target: SharedRange, parts: Sequence[memoryview]) -> None:
        size, end = sum(map(len, parts)), time.monotonic() + self.timeout
        filled = target.pid and target.nbytes == size and write_shared(target, parts)

        head = memoryview(_SIZE.pack(_FILLED if filled else size))
        self._send(caller.other, caller.connection, [head, *([] if filled else parts)], end)
        with self._change:
            caller.unanswered -= 1
            caller.answered = time.monotonic()
            self._close_if_ended(caller)

    def accept_bulk(
        self, other: int, welcome: Callable[[bool], socket.socket | None]
    ) -> socket.socket | None:
        """Take the connection of a rank that wants to ask, if there is room; called by the listener."""
        with self._change:
            if not self.intact:
                return None
            excess = 1 + sum(not c.refused for c in self._callers.values()) - MOST_CALLERS
            if excess > 0:
                unused = (
                    c
                    for c in self._callers.values()
                    # one that was never answered has just connected, and is about to ask
                    if c.answered and not c.unanswered and not c.refused
                )
                unused_longest = min(unused, key=lambda c: c.answered, default=None)
                if unused_longest is None:
                    welcome(False)
                    return None
                unused_longest.refused = True
                with suppress(OSError):  # the listener then closes it
                    unused_longest.connection.shutdown(2)
            connection = welcome(True)
            if connection is not None:
                self._sockets.add(connection)
                self._callers[connection] = _Caller(other, connection)
            return connection

    def arrived(self, connection: socket.socket) -> bool:
        """Read what a rank asks for; called by the listener. Returns whether there may be more."""
        with self._change:
            caller = self._callers[connection]
            try:
                data = (
                    b"" if caller.refused else connection.recv(_REQUEST.size - len(caller.received))
                )
            except BlockingIOError:
                return True
            except OSError:
                data = b""
            if not data:
                caller.ended = True
                for requests in self._asked.values():
                    # of a save that was interrupted there
                    for request in [r for r in requests if r[0] is caller]:
                        requests.remove(request)
                        caller.unanswered -= 1
                self._close_if_ended(caller)
                return False
            caller.received += data
            if len(caller.received) == _REQUEST.size:
                tag, *buffer = _REQUEST.unpack(caller.received)
                caller.received = b""
                caller.unanswered += 1
                self._asked.setdefault(tag, deque()).append((caller, SharedRange(*buffer)))
                self._change.notify_all()
            return True

    def _close_if_ended(self, caller: _Caller) -> None:
        if caller.ended and not caller.unanswered:  # no other thread uses it
            del self._callers[caller.connection]
            self._close_one(caller.connection)

    def receive_bulk(
        self, tag: int, shared: SharedMemory, slots: Mapping[int, tuple[int, int]]
    ) -> None:
        """Receive bulk data from several ranks.

        Args:
            slots: by sending rank, the bytes `[start, stop)` of the memory, exactly as many as are
                sent.
        """
        # not all the same one first
        to_ask = deque(sorted(slots, key=lambda other: (other - self.rank) % self.size))
        calls: dict[int, _Call] = {}  # by descriptor
        poll, lines = select.poll(), self._neighbours_but(self.rank)
        for fd in lines:
            poll.register(fd, HUNG_UP)
        end = time.monotonic() + self.timeout
        try:
            while to_ask or calls:
                busy = False
                # beyond the limit a thread still gets one connection, or it would wait for others
                while to_ask and not busy and (self._calls < MOST_CALLS or not calls):
                    other = to_ask[0]
                    with self.communicating("to receive from", other):
                        call = self._ask(other, tag, shared, slots[other], end)
                    busy = call is None
                    if call is None:
                        to_ask.rotate(-1)
                    else:
                        to_ask.popleft()
                        calls[call.connection.fileno()] = call
                        poll.register(call.connection, READ)
                others = [call.other for call in calls.values()] or list(to_ask)
                with self.communicating("to receive from", *others[:_TOLD]):
                    wait = max(0.0, end - time.monotonic())
                    ready = [
                        fd for fd, _ in poll.poll((min(wait, RETRY_S) if busy else wait) * 1000)
                    ]
                    self._check(others[0])
                    if not ready and time.monotonic() >= end:
                        raise Lost("timed out", others[0], late=True)
                    if ready and not calls.keys() & ready:
                        raise Lost("the connection was closed", lines[ready[0]])
                for fd in calls.keys() & ready:
                    call = calls[fd]
                    with self.communicating("to receive from", call.other):
                        try:
                            done = call.read()
                        except _Closed:
                            to_ask.append(call.other)
                            done = None
                    if done is not False:
                        poll.unregister(fd)
                        self._end_call(calls.pop(fd).connection, call.other, reuse=bool(done))
                    end = time.monotonic() + self.timeout
        finally:
            for call in calls.values():
                self._end_call(call.connection, call.other, reuse=False)

    def _ask(
        self, other: int, tag: int, shared: SharedMemory, slot: tuple[int, int], end: float
    ) -> _Call | None:
        """Ask a rank for its next bulk data with a tag; None if it has too many connections."""
        while True:
            connection = self._unused_to(other)
            used_before = connection is not None
            if connection is None:
                connection = self._call(other, end)
                if connection is None:
                    return None
            buffer = shared.range(*slot)
            request = _REQUEST.pack(
                tag, *(buffer if _is_here(connection) else buffer._replace(pid=0))
            )
            try:
                if connection.send(request) == len(request):  # nothing else is in the way
                    return _Call(other, connection, shared.memory[slice(*slot)].data)
                raise Lost("it accepts no data", other)
            except OSError as error:
                self._end_call(connection, other, reuse=False)
                if not used_before:
                    raise Lost(str(error), other) from error

    def _unused_to(self, other: int) -> socket.socket | None:
        """A connection to a rank that is not used; if there is none, and no room for one, another one is closed."""
        with self._change:
            unused = next((c for c, rank in self._unused.items() if rank == other), None)
            if unused is None and self._unused and self._calls + len(self._unused) >= MOST_CALLS:
                self._close_one(next(iter(self._unused)))
            if unused is not None:
                del self._unused[unused]
                self._calls += 1
            return unused

    def _call(self, other: int, end: float) -> socket.socket | None:
        """Connect to a rank; returns None if it has too many connections."""

        def check() -> None:
            self._check(other)
            self._check_neighbours()  # one that gave up because of this rank does not tell it so

        try:
            connection = connect(
                self._directory[other], self.rank, other, self._secret, end, check, "bulk"
            )
        except UcformatError as error:
            raise Lost(error.message, other) from error
        with self._change:
            if connection is not None:
                self._sockets.add(connection)
                self._calls += 1
                # `end` may have shut all connections down since, and does not know this one
                if self.intact:
                    return connection
                self._calls -= 1
                self._close_one(connection)
        self._check(other)
        return None

    def _end_call(self, connection: socket.socket, other: int, *, reuse: bool) -> None:
        with self._change:
            self._calls -= 1
            if reuse and self._calls + len(self._unused) < MOST_CALLS:
                self._unused[connection] = other
            else:
                self._close_one(connection)
            self._change.notify_all()

    def _close_one(self, connection: socket.socket) -> None:
        self._unused.pop(connection, None)
        self._sockets.discard(connection)
        connection.close()


# Messages between neighbours in the tree of a group.
#
# Each message is a frame on the line between two ranks, with a tag; messages with the same tag
# arrive in order. Any thread that waits for a rank reads its line, and queues messages for other
# threads.

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
            directory = self._join(meeting, failure)
        except BaseException:
            self.end()
            raise
        if directory.error is not None:
            self.end()
            raise directory.error
        self._directory = dict(
            zip(
                directory.ranks.tolist(),
                zip(directory.hosts, directory.ports.tolist(), strict=True),
                strict=True,
            )
        )

    def _join(self, meeting: Address | None, failure: BaseException | None) -> _Directory:
        """Bring what the ranks below tell to the parent, and what the parent tells to them."""
        end = time.monotonic() + self.timeout
        if self.rank and meeting is not None:
            self._connect(self.parent, meeting, end)
        parts = [] if self._listener is None else [self._own_part()]
        with self._change:
            self._change.wait_for(
                lambda: all(c in self._lines for c in self.children), self.timeout
            )
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
                failure = failure or self._error_of(
                    self.parent, "to receive from", self.parent, lost
                )
                whole = encode(_joined([], failure), _Directory)
        for child in connected:
            with suppress(Lost):  # it is noticed later
                self._write(child, 0, len(whole), [memoryview(whole)], end)
        return decode(whole, _Directory)  # type: ignore[no-any-return]

    def _own_part(self) -> _Directory:
        host, port = self.address
        return _Directory(
            np.array([self.rank], np.int32), (host,), np.array([port], np.int32), None
        )

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

    def _write(
        self, other: int, tag: int, size: int, parts: Sequence[memoryview], end: float
    ) -> None:
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
                remaining = max(0.0, end - time.monotonic())
                idle = line.change.wait_for(
                    lambda: done() or not line.reading or self.broken is not None, remaining
                )
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
