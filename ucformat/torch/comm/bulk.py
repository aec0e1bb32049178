"""Bulk data between any two ranks: the receiver asks for it, and it goes straight into the receiver's memory.

    receiver:  tag; process (0: none), descriptor, start, bytes and name of its buffer    (64 bytes)
    sender:    number of bytes, and these; or -2 if it has written them to the buffer      (8 bytes)

The receiver connects to the sender, and keeps the connection for the next time. A rank on the same host writes to the
buffer, which is shared memory: a connection takes five times the processor time.

The connections of a rank are bounded, however many ranks it exchanges data with. Either side closes one over which
nothing is asked; the receiver then asks again over another one. A sender answers in the order in which it is asked, and
a receiver reads all answers as they arrive, so no rank waits for one that waits for it.
"""

from __future__ import annotations

import select
import struct
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from ucformat.errors import UcformatError
from ucformat.torch.comm.connections import HUNG_UP, READ, Connections, Lost
from ucformat.torch.comm.handshake import RETRY_S, connect
from ucformat.torch.state.elements import SharedRange, write_shared

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch.distributed as dist

    from ucformat.torch.comm.connections import Node
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
        self._head = self._left = memoryview(bytearray(_SIZE.size))

    def read(self) -> bool:
        """Read what has arrived of the answer; returns whether that was all of it."""
        while self._left:
            try:
                n = self.connection.recv_into(self._left)
            except BlockingIOError:
                return False
            except OSError as error:
                raise self._ended(str(error)) from error
            if not n:
                raise self._ended("the connection was closed")
            self._left = self._left[n:]
            if not self._left and self._head:
                (size,) = _SIZE.unpack(self._head)
                if size not in (_FILLED, len(self._out)):
                    raise Lost(f"it sent {size} bytes, expected {len(self._out)}", self.other)
                self._head = memoryview(b"")
                self._left = self._out if size != _FILLED else self._head
        return True

    def _ended(self, why: str) -> Exception:
        unanswered = len(self._left) == len(self._head) > 0
        return _Closed() if unanswered else Lost(why, self.other)


def _is_here(connection: socket.socket) -> bool:
    """Whether the other rank is on this host."""
    return connection.getsockname()[0] == connection.getpeername()[0]  # type: ignore[no-any-return]


class Bulk(Connections):
    """Adds bulk data to the connections of a group."""

    def __init__(
        self,
        place: Node,
        timeout: float,
        listening: socket.socket | None = None,
        secret: bytes = b"",
        store: dist.Store | None = None,
    ) -> None:
        self._callers: dict[socket.socket, _Caller] = {}
        self._asked: dict[int, deque[tuple[_Caller, SharedRange]]] = {}  # by tag
        self._unused: dict[socket.socket, int] = {}  # connections to other ranks, that used last at the end
        self._calls = 0  # connections over which this rank asks now
        super().__init__(place, timeout, listening, secret, store)

    def send_bulk(self, tag: int, messages: Iterable[tuple[int, Callable[[], Sequence[memoryview]]]]) -> None:
        """Send bulk data to ranks that ask for it; returns when all have done so, and all may be changed.

        Args:
            messages: the rank, and a function that returns the bytes when the rank asks. Each rank gets its messages in
                this order.
        """
        left: dict[int, deque[Callable[[], Sequence[memoryview]]]] = {}
        for other, parts in messages:
            left.setdefault(other, deque()).append(parts)
        while left:
            with self.communicating("to send to", *list(left)[:_TOLD]):
                caller, target = self._next(tag, left)
            with self.communicating("to send to", caller.other):
                self._answer(caller, target, left[caller.other].popleft()())
            if not left[caller.other]:
                del left[caller.other]

    def _next(self, tag: int, others: Mapping[int, object]) -> tuple[_Caller, SharedRange]:
        """Wait until some rank asks for what has a tag."""
        end = time.monotonic() + self.timeout
        some = next(iter(others))
        with self._change:
            while True:
                self._check(some)
                asked = self._asked.get(tag, deque())
                found = next((r for r in asked if r[0].other in others), None)
                if found is not None:
                    asked.remove(found)
                    return found
                if time.monotonic() > end:
                    raise Lost("timed out", some, late=True)
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

    def accept_bulk(self, other: int, welcome: Callable[[bool], socket.socket | None]) -> socket.socket | None:
        """Take the connection of a rank that wants to ask, if there is room; called by the listener."""
        with self._change:
            if not self.intact:
                return None
            excess = 1 + sum(not c.refused for c in self._callers.values()) - MOST_CALLERS
            if excess > 0:
                unused = (c for c in self._callers.values() if c.answered and not c.unanswered and not c.refused)
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
                more = b"" if caller.refused else connection.recv(_REQUEST.size - len(caller.received))
            except BlockingIOError:
                return True
            except OSError:
                more = b""
            if not more:
                caller.ended = True
                for asked in self._asked.values():
                    for request in [r for r in asked if r[0] is caller]:  # of a save that was interrupted there
                        asked.remove(request)
                        caller.unanswered -= 1
                self._close_if_ended(caller)
                return False
            caller.received += more
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

    def receive_bulk(self, tag: int, shared: SharedMemory, slots: Mapping[int, tuple[int, int]]) -> None:
        """Receive bulk data from several ranks.

        Args:
            slots: by sending rank, the bytes `[start, stop)` of the memory, exactly as many as are sent.
        """
        to_ask = deque(sorted(slots, key=lambda other: (other - self.rank) % self.size))  # not all the same one first
        calls: dict[int, _Call] = {}  # by descriptor
        poll, lines = select.poll(), self._neighbours_but(self.rank)
        for fd in lines:
            poll.register(fd, HUNG_UP)
        end = time.monotonic() + self.timeout
        try:
            while to_ask or calls:
                busy = False
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
                    ready = [fd for fd, _ in poll.poll((min(wait, RETRY_S) if busy else wait) * 1000)]
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

    def _ask(self, other: int, tag: int, shared: SharedMemory, slot: tuple[int, int], end: float) -> _Call | None:
        """Ask a rank for its next bulk data with a tag; None if it has too many connections."""
        while True:
            connection = self._unused_to(other)
            known = connection is not None
            if connection is None:
                connection = self._call(other, end)
                if connection is None:
                    return None
            buffer = shared.range(*slot)
            request = _REQUEST.pack(tag, *(buffer if _is_here(connection) else buffer._replace(pid=0)))
            try:
                if connection.send(request) == len(request):  # nothing else is in the way
                    return _Call(other, connection, shared.memory[slice(*slot)].data)
                raise Lost("it accepts no data", other)
            except OSError as error:
                self._end_call(connection, other, reuse=False)
                if not known:
                    raise Lost(str(error), other) from error

    def _unused_to(self, other: int) -> socket.socket | None:
        """A connection to a rank that is not used; if there is none, and no room for one, another one is closed."""
        with self._change:
            found = next((c for c, to in self._unused.items() if to == other), None)
            if found is None and self._unused and self._calls + len(self._unused) >= MOST_CALLS:
                self._close_one(next(iter(self._unused)))
            if found is not None:
                del self._unused[found]
                self._calls += 1
            return found

    def _call(self, other: int, end: float) -> socket.socket | None:
        """Connect to a rank; returns None if it has too many connections."""

        def check() -> None:
            self._check(other)
            self._check_neighbours()  # one that gave up because of this rank does not tell it so

        try:
            made = connect(self._directory[other], self.rank, other, self._secret, end, check, bulk=True)
        except UcformatError as error:
            raise Lost(error.message, other) from error
        with self._change:
            if made is not None:
                self._sockets.add(made)
                self._calls += 1
                if self.intact:
                    return made
                self._calls -= 1
                self._close_one(made)
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
