"""The connections of a rank, and how all ranks stop at once if one fails, and name it.

A rank has lines to its parent and its children in a tree, for messages; those for bulk data are
made when needed.

A rank that waits notices if one of its neighbours in the tree dies. Whoever loses a rank, or waits
for one too long, asks it for which ranks it waits itself, and then asks these: one that has ended
or does not answer is the cause, or else one that waits for nobody. Then the rank gives up: it tells
its neighbours the cause, by connections of their own, because the lines may be full; they tell
theirs, and all connections are closed.
"""

from __future__ import annotations

import atexit
import os
import select
import socket
import threading
import time
import weakref
from collections import deque
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ucformat.errors import UcformatError
from ucformat.torch.comm.handshake import (
    RETRY_S,
    ConnectionTaker,
    Listener,
    ask,
    connect,
    send_alarm,
)
from ucformat.torch.state.elements import in_turn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch.distributed as dist

    from ucformat.torch.comm.handshake import Address

#: Events of a connection.
READ, WRITE, HUNG_UP = select.POLLIN, select.POLLOUT, select.POLLRDHUP

_ASK_S = 5.0  # seconds in which a rank answers what it waits for, unless it is stopped
_MOST_ASKED = 64  # ranks
_ALARM_S = 5.0  # how long to wait for the alarm of a rank that has ended; hosts may be busy
_BUSY, _WAITING, _GAVE_UP = 0, 1, 2  # states of a rank; the last two because of another one

_all: weakref.WeakSet[Connections] = weakref.WeakSet()


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


class Lost(Exception):
    """A connection is closed, a rank gave up, or time is up; `cause` is the rank that caused it."""

    def __init__(self, why: str, cause: int, *, late: bool = False) -> None:
        super().__init__(why)
        self.cause, self.late = cause, late


class TreeNode(NamedTuple):
    """The place of a rank in the tree over the ranks of a group.

    The root, the lowest of `size` consecutive ranks, has the parent -1. `host` are the first rank
    of its host and the one after the last; both are 0 if the tree ignores hosts.
    """

    rank: int
    size: int
    parent: int
    children: tuple[int, ...]
    host: tuple[int, int] = (0, 0)

    def on_host(self) -> TreeNode:
        """Return the place in the part of the tree that consists of the ranks of this host; if not known, of one."""
        host_ranks = range(*self.host) or range(self.rank, self.rank + 1)
        parent = self.parent if self.parent in host_ranks else -1
        return TreeNode(
            self.rank,
            len(host_ranks),
            parent,
            tuple(c for c in self.children if c in host_ranks),
            self.host,
        )


class NeighbourLine:
    """The connection to a neighbour in the tree, and the messages that were read and not yet taken."""

    def __init__(self, peer: socket.socket) -> None:
        self.line = peer
        self.sending = threading.Lock()
        self.change = threading.Condition()
        self.reading = False  # whether a thread reads the line now
        self.received: dict[int, deque[bytearray]] = {}


class FileTaker(Protocol):
    """What answers over connections over which other ranks read files."""

    def has_room(self) -> bool:
        """Return whether another connection can be answered."""

    def take(self, connection: socket.socket) -> None:
        """Answer over a connection, in another thread, until it is closed."""


class Connections(ConnectionTaker):
    """The connections of a group.

    Args:
        listening: the socket to which other ranks connect; None if this rank cannot listen, or
            there is no other.
    """

    def __init__(
        self,
        place: TreeNode,
        timeout: float,
        listening: socket.socket | None = None,
        secret: bytes = b"",
        store: dist.Store | None = None,
    ) -> None:
        self.place = place
        self.rank, self.size, self.parent, self.children = place[:4]
        self.timeout, self.store = timeout, store
        # their ranks in the job; None if these are the same numbers
        self.members: tuple[int, ...] | None = None
        self.intact = True
        self.broken: UcformatError | None = None  # the first failure
        self.breaking = threading.Lock()
        self.kept: dict[type, Any] = {}
        self.opening = threading.Lock()
        self.below: dict[int, frozenset[int]] = {}  # by child, the ranks of its subtree
        self.files: FileTaker | None = None  # None: no files are served
        self._neighbours = ([self.parent] if self.rank else []) + list(self.children)
        self._secret = secret
        self._directory: dict[int, Address] = {}
        self._waiting: dict[int, tuple[int, ...]] = {}  # by thread, the ranks for which it waits
        self._lines: dict[int, NeighbourLine] = {}  # to the neighbours
        # of connections, of what is asked for over them, and of the alarm
        self._change = threading.Condition()
        self._cause: int | None = None  # the rank because of which this one gave up
        self._told_by = self.rank  # the rank that said so
        self._sockets: set[socket.socket] = set()
        self._listener = (
            None if listening is None else Listener(listening, self.rank, secret, weakref.ref(self))
        )
        self._close = weakref.finalize(self, _close, self._sockets, self._listener)
        self._close.atexit = False  # `_end_all` closes them, after other threads have ended
        _all.add(self)

    @property
    def address(self) -> Address:
        """Where this rank listens."""
        assert self._listener is not None  # noqa: S101 - of several ranks
        return self._listener.address

    @property
    def waits(self) -> int:
        """The number of threads that wait for another rank now, none of them longer than the timeout."""
        return len(self._waiting)

    def end(self, why: UcformatError | None = None) -> None:
        """Close the connections; the group cannot be used any more.

        Args:
            why: what those raise that wait, and that use it later (default: that it was closed).
        """
        self.intact = False
        closed = UcformatError("the group of ranks was closed", hint="create a new one")
        self.broken = self.broken or why or closed
        if self._listener:
            self._listener.close()
        self._shut_down()
        self.store = None

    def close_after_fork(self) -> None:
        """Close the copies of the connections in a forked child; the parent keeps its own."""
        self.intact = False
        self.broken = UcformatError(
            "the group of ranks belongs to the process that this one was forked from"
        )
        self._close.detach()
        if self._listener:
            self._listener.close_after_fork()
        for connection in self._sockets:
            connection.close()

    def _shut_down(self) -> None:
        """Shut all connections down, so that every waiting thread wakes up."""
        with self._change:
            for connection in self._sockets:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            self._change.notify_all()

    def accept(self, other: int, welcome: Callable[[bool], socket.socket | None]) -> None:
        """Take the line of a child that connects."""
        with self._change:
            accepted = other in self.children and other not in self._lines
            if self.intact and (line := welcome(accepted)) is not None:
                self._add(other, line)

    def _add(self, other: int, line: socket.socket) -> None:
        self._sockets.add(line)
        self._lines[other] = NeighbourLine(line)
        self._change.notify_all()

    def _connect(self, other: int, address: Address, end: float) -> None:
        """Connect to the parent."""
        while (
            line := connect(
                address, self.rank, other, self._secret, end, lambda: self._check(other)
            )
        ) is None:
            time.sleep(RETRY_S)
        with self._change:
            self._add(other, line)

    def accept_files(self, welcome: Callable[[bool], socket.socket | None]) -> None:
        """Take a connection over which a rank reads files, if they are served and there is room."""
        with self._change:
            files = self.files
            has_room = self.intact and files is not None and files.has_room()
            connection = welcome(has_room)
            if connection is not None and files is not None:
                self._sockets.add(connection)
                files.take(connection)

    def connect_to_files(self, other: int) -> socket.socket:
        """Connect to a rank to read files that it serves; waits until it does, and has room."""
        end = time.monotonic() + self.timeout
        address = self._directory[other]
        while (
            connection := connect(
                address, self.rank, other, self._secret, end, lambda: self._check(other), "files"
            )
        ) is None:
            if time.monotonic() > end:
                raise UcformatError(f"rank {other} has served no files for {self.timeout:g} s")
            time.sleep(RETRY_S)
        with self._change:
            self._sockets.add(connection)
        return connection

    def close_files(self, connection: socket.socket) -> None:
        """Close a connection over which files were read."""
        with self._change:
            self._sockets.discard(connection)
        connection.close()

    def _neighbours_but(self, other: int) -> dict[int, int]:
        """Ranks by the descriptors of their lines: all neighbours but one."""
        return {line.line.fileno(): rank for rank, line in self._lines.items() if rank != other}

    def _poll(self, other: int, connection: socket.socket, event: int, end: float) -> None:
        """Wait until a connection is ready; raises if a neighbour hangs up, this rank gave up, or time is up."""
        poll = select.poll()
        poll.register(connection, event)
        # they have yet to send what this rank waits for
        watched = self._neighbours_but(other) if event == READ else {}
        for fd in watched:
            poll.register(fd, HUNG_UP)
        self._check(other)
        ready = [fd for fd, _ in poll.poll(max(0.0, end - time.monotonic()) * 1000)]
        self._check(other)
        if not ready:
            raise Lost("timed out", other, late=True)
        if connection.fileno() not in ready:
            raise Lost("the connection was closed", watched[ready[0]])

    def _send(
        self, other: int, connection: socket.socket, parts: Sequence[memoryview], end: float
    ) -> None:
        """Send bytes to a rank."""

        def send(buffers: list[memoryview], _: int) -> int:
            try:
                return connection.sendmsg(buffers)
            except BlockingIOError:
                self._poll(other, connection, WRITE, end)
                return 0

        try:
            in_turn(parts, send)
        except OSError as error:
            raise Lost(str(error), other) from error

    def _check(self, other: int) -> None:
        """Raise if this rank has given up."""
        if self._cause is not None or self.broken is not None:
            raise Lost(f"rank {self._told_by} gave up", other)

    @contextmanager
    def communicating(self, action: str, *others: int) -> Iterator[None]:
        """Turn a failed communication inside into an error that names the rank that caused it, and break the group.

        Args:
            others: the ranks with which this one communicates; an error of unknown cause names the
                first.
        """
        if self.broken is not None:
            raise self.broken
        thread = threading.get_ident()
        self._waiting[thread] = others
        try:
            yield
        except Lost as error:
            with self.breaking:
                self.broken = self.broken or self._break(action, others[0], error)
            raise self.broken from error
        finally:
            self._waiting.pop(thread, None)

    def _break(self, action: str, other: int, error: Lost) -> UcformatError:
        """Find the rank that failed first, and give up."""
        if self._cause is None:
            self._give_up(self._find_cause(error), self.rank)
        assert self._cause is not None  # noqa: S101 - it was set
        return self._error_of(self._cause, action, other, error)

    def _error_of(self, failed: int, action: str, other: int, error: Lost) -> UcformatError:
        return UcformatError(
            f"rank {failed} died or has been unresponsive for {self.timeout:g} s: rank "
            f"{self.rank} failed {action} "
            f"rank {other} ({str(error).splitlines()[0][:200]})",
            hint=(
                "see the first error in the log of that rank; checkpoints committed earlier are "
                "intact"
            ),
        )

    def _find_cause(self, error: Lost) -> int:
        """The rank that failed first: one that has ended or does not answer, or else waits for nobody.

        It is the one that was lost, or the one because of which that one gave up, or for which that
        one waits.
        """
        asked, to_ask = {self.rank}, deque([error.cause])
        busy: int | None = None  # the first that waits for nobody
        while to_ask and len(asked) <= _MOST_ASKED:
            rank = to_ask.popleft()
            if rank in asked or rank not in self._directory:
                continue
            asked.add(rank)
            try:
                end = time.monotonic() + _ASK_S
                state, reasons = ask(
                    self._directory[rank],
                    self.rank,
                    rank,
                    self._secret,
                    end,
                    partial(self._check, rank),
                )
            except Lost:  # an alarm says more
                break
            except TimeoutError:
                return rank if self._cause is None else self._cause
            except OSError:  # it has ended; if it gave up before, its alarm is on the way
                with self._change:
                    self._change.wait_for(lambda: self._cause is not None, _ALARM_S)
                return rank if self._cause is None else self._cause
            if state == _GAVE_UP:
                return reasons[0]
            # a closed connection tells the cause; only after a timeout a chain of ranks may wait
            if not error.late:
                break
            if state == _BUSY and busy is None:
                busy = rank
            to_ask.extend(reasons)
        if self._cause is not None:
            return self._cause
        return error.cause if busy is None else busy

    def state(self) -> tuple[int, tuple[int, ...]]:
        """Return the state of this rank, and the ranks that are the reason."""
        if self._cause is not None:
            return _GAVE_UP, (self._cause,)
        waiting = tuple({rank: None for ranks in list(self._waiting.values()) for rank in ranks})
        return (_WAITING, waiting) if waiting else (_BUSY, ())

    def alarmed(self, sender: int, cause: int) -> None:
        """Give up because another rank did."""
        self._give_up(cause, sender)

    def _give_up(self, cause: int, sender: int) -> None:
        """Tell the neighbours the cause, unless this has happened, and shut all lines down."""
        with self._change:
            if self._cause is None:
                self._told_by, self._cause, self.intact = sender, cause, False
                self._change.notify_all()
                neighbours = [
                    n for n in self._neighbours if n in self._directory and n not in (cause, sender)
                ]
            else:
                neighbours = []
        for neighbour in neighbours:
            send_alarm(self._directory[neighbour], self.rank, neighbour, self._secret, cause)
        self._shut_down()


def _close(sockets: set[socket.socket], listener: Listener | None) -> None:
    if listener:
        listener.close()
    for connection in list(sockets):
        connection.close()
