"""The connections of a rank, and how all ranks stop at once if one fails, and name it.

At first a rank has connections to its parent and children in a tree; one to another rank is made when it is needed.

A rank that waits notices if one of its neighbours in the tree dies. Whoever loses a rank, or waits for one too long,
asks it what it waits for itself, and so on: who has ended, does not answer, or waits for nobody is the cause. Then the
rank gives up: it tells its neighbours the cause, by connections of their own, because the lines may be full; they tell
theirs, and all lines are closed.
"""

from __future__ import annotations

import atexit
import os
import socket
import threading
import time
import weakref
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ucformat.errors import UcformatError
from ucformat.torch.comm.handshake import Listener, ask, connect, send_alarm

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Iterator

    import torch.distributed as dist

    from ucformat.torch.comm.handshake import Address
    from ucformat.torch.state.elements import SharedRange

__all__ = ["Connections", "Line", "Lost", "Node"]

_ASK_S = 5.0  # seconds in which a rank answers what it waits for, unless it is stopped
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


class Node(NamedTuple):
    """The place of a rank in the tree over the ranks of a group.

    The root, the lowest of `size` consecutive ranks, has the parent -1. `host` are the first rank of its host and the
    one after the last; both are 0 if the tree ignores hosts.
    """

    rank: int
    size: int
    parent: int
    children: tuple[int, ...]
    host: tuple[int, int] = (0, 0)

    def on_host(self) -> Node:
        """Return the place in the part of the tree that consists of the ranks of this host; if not known, of one."""
        here = range(*self.host) or range(self.rank, self.rank + 1)
        parent = self.parent if self.parent in here else -1
        return Node(self.rank, len(here), parent, tuple(c for c in self.children if c in here), self.host)


class Line:
    """The connection to one rank, and the messages that were read and not yet taken."""

    def __init__(self, peer: socket.socket) -> None:
        self.line = peer
        self.sending = threading.Lock()
        self.change = threading.Condition()
        self.reading = False  # whether a thread reads the line now
        self.received: dict[int, deque[bytearray]] = {}
        self.ready: dict[int, deque[SharedRange]] = {}  # by tag: buffers that the other rank has ready for bulk data
        self.here = self.line.getsockname()[0] == self.line.getpeername()[0]  # whether the other rank is on this host
        self.wanted: dict[int, memoryview] = {}  # by tag: buffers for bulk data that this rank waits for


class Connections:
    """The connections of a group.

    Args:
        place: of this rank.
        timeout: seconds to wait for another rank.
        listening: the socket to which other ranks connect; None if this rank cannot listen, or there is no other.
        secret: which all ranks share.
        store: at which the ranks met, if any.
    """

    def __init__(
        self,
        place: Node,
        timeout: float,
        listening: socket.socket | None = None,
        secret: bytes = b"",
        store: dist.Store | None = None,
    ) -> None:
        self.place = place
        self.rank, self.size, self.parent, self.children = place[:4]
        self.timeout, self.store = timeout, store
        self.members: tuple[int, ...] | None = None  # their ranks in the job; None if these are the same numbers
        self.intact = True
        self.broken: UcformatError | None = None  # the first failure
        self.breaking = threading.Lock()
        self.cache: dict[str, Any] = {}
        self.opening = threading.Lock()
        self.below: dict[int, frozenset[int]] = {}  # by child, the ranks of its subtree
        self._neighbours = ([self.parent] if self.rank else []) + list(self.children)
        self._secret = secret
        self._directory: dict[int, Address] = {}
        self._waiting: dict[int, int] = {}  # by thread, the rank for which it waits
        self._lines: dict[int, Line] = {}
        self._calling: set[int] = set()  # ranks to which a thread connects now
        self._change = threading.Condition()  # of lines, and of the alarm
        self._cause: int | None = None  # the rank because of which this one gave up
        self._told_by = self.rank  # the rank that said so
        self._called: set[int] = set()  # ranks to which this one has connected, or that connect to this one
        self._sockets: list[socket.socket] = []
        self._listener = None if listening is None else Listener(listening, self.rank, secret, weakref.ref(self))
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

    def end(self) -> None:
        """Close the connections; the group cannot be used any more."""
        self.intact = False
        self.broken = self.broken or UcformatError("the group of ranks was closed", hint="create a new one")
        if self._listener:
            self._listener.close()
        self._shut_down()
        self.store = None

    def close_after_fork(self) -> None:
        """Close the copies of the connections in a forked child; the parent keeps its own."""
        self.intact = False
        self.broken = UcformatError("the group of ranks belongs to the process that this one was forked from")
        self._close.detach()
        if self._listener:
            self._listener.close_after_fork()
        for one in self._sockets:
            one.close()

    def _shut_down(self) -> None:
        """Shut all lines down, so that every waiting thread wakes up."""
        for one in list(self._sockets):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def accept(self, other: int, welcome: Callable[[bool], socket.socket | None]) -> None:
        """Take the line of a rank that connects, unless there is one, or this rank makes one and is the higher one.

        Args:
            other: the rank.
            welcome: as for `handshake.Owner`.
        """
        with self._change:
            taken = other not in self._lines and (other not in self._calling or other > self.rank)
            if self.intact and (line := welcome(taken)) is not None:
                self._add(other, line)

    def _add(self, other: int, line: socket.socket) -> None:
        self._sockets.append(line)
        self._lines[other] = Line(line)
        self._change.notify_all()

    def _connect(self, other: int, address: Address, end: float) -> None:
        """Connect to a rank, unless it connects to this one at the same moment."""
        line = None
        try:
            line = connect(address, self.rank, other, self._secret, end, lambda: self._check(other))
        finally:
            with self._change:
                self._calling.discard(other)
                if line is not None:
                    self._add(other, line)
                self._change.notify_all()

    def _line(self, other: int, end: float) -> Line:
        """The line to a rank; it is made on first use."""
        found = self._lines.get(other)
        while found is None:
            with self._change:
                self._check(other)
                found = self._lines.get(other)
                if found is not None or time.monotonic() > end:
                    break
                waits = other in self._calling or other in self._called
                if waits:
                    self._change.wait(end - time.monotonic())
                    continue
                self._calling.add(other)
            try:
                self._connect(other, self._directory[other], end)
            except UcformatError as error:
                raise Lost(error.message, other) from error
            self._called.add(other)
        if found is None:
            raise Lost("timed out", other, late=True)
        return found

    def _check(self, other: int) -> None:
        """Raise if this rank has given up."""
        if self._cause is not None or self.broken is not None:
            raise Lost(f"rank {self._told_by} gave up", other)

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
        thread = threading.get_ident()
        self._waiting[thread] = other
        try:
            yield
        except Lost as error:
            with self.breaking:
                self.broken = self.broken or self._break(action, other, error)
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
            f"rank {failed} died or has been unresponsive for {self.timeout:g} s: rank {self.rank} failed {action} "
            f"rank {other} ({str(error).splitlines()[0][:200]})",
            hint="see the first error in the log of that rank; checkpoints committed earlier are intact",
        )

    def _find_cause(self, error: Lost) -> int:
        """The rank that failed first: the one that was lost, or because of which that one gave up, or waits."""
        rank, following = error.cause, {self.rank}
        while rank in self._directory:
            following.add(rank)
            try:
                end = time.monotonic() + _ASK_S
                state, about = ask(
                    self._directory[rank], self.rank, rank, self._secret, end, partial(self._check, rank)
                )
            except Lost:  # an alarm says more
                break
            except TimeoutError:
                break
            except OSError:  # it has ended; if it gave up before, its alarm is on the way
                with self._change:
                    self._change.wait_for(lambda: self._cause is not None, _ALARM_S)
                break
            if state == _GAVE_UP:
                return about
            if state == _BUSY or not error.late or about in following:
                break
            rank = about
        return rank if self._cause is None else self._cause

    def state(self) -> tuple[int, int]:
        """Return the state of this rank, and the rank that is the reason."""
        if self._cause is not None:
            return _GAVE_UP, self._cause
        waiting = next(iter(list(self._waiting.values())), None)
        return (_BUSY, 0) if waiting is None else (_WAITING, waiting)

    def alarmed(self, sender: int, cause: int) -> None:
        """Give up because another rank did.

        Args:
            sender: that rank.
            cause: the rank that failed.
        """
        self._give_up(cause, sender)

    def _give_up(self, cause: int, sender: int) -> None:
        """Tell the neighbours the cause, unless this has happened, and shut all lines down."""
        with self._change:
            if self._cause is None:
                self._told_by, self._cause, self.intact = sender, cause, False
                self._change.notify_all()
                told = [n for n in self._neighbours if n in self._directory and n not in (cause, sender)]
            else:
                told = []
        for neighbour in told:
            send_alarm(self._directory[neighbour], self.rank, neighbour, self._secret, cause)
        self._shut_down()


def _close(sockets: list[socket.socket], listener: Listener | None) -> None:
    if listener:
        listener.close()
    for one in sockets:
        one.close()
