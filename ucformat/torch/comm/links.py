"""What goes over the connections of a group of ranks; when one is found broken, all learn at once whom to blame.

Each message is a frame on the line between two ranks, with a tag: those of one tag arrive in order, whatever other
threads send. Whichever thread waits for a rank reads its line, and puts aside what is for others. Bulk is sent when its
receiver says that the memory is ready, and read straight into that, so nothing large is ever put aside.

Who gives up rings the bells of all others, and says because of whom: so everybody stops at once, and from rank to rank
it is found who was the first. One that died rings nobody.
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
from collections import Counter, deque
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from ucformat.errors import UcformatError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import torch.distributed as dist

    from ucformat.torch.comm.handshake import Peer

__all__ = ["Links"]

_MOMENT = 1.0  # seconds for which to wait for the bell of a rank that may be dead
_FRAME = struct.Struct("<qq")  # tag and bytes that follow, or that they are waited for
_READY = -1
_RING = struct.Struct("<i")  # because of whom
_READ, _WRITE = select.POLLIN, select.POLLOUT

_all: weakref.WeakSet[Links] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """End all connections, whoever holds a group."""
    for links in list(_all):
        links.end()


def _forked() -> None:
    """In a forked child: the connections are its parent's."""
    for links in list(_all):
        links.leave()
    _all.clear()


os.register_at_fork(after_in_child=_forked)


class _Lost(Exception):
    """Nothing more comes from a rank, or it gave up, or time is up."""

    def __init__(self, why: str, because: int) -> None:
        super().__init__(why)
        self.because = because


class _Line:
    """The line to one rank, and what was read from it and is not yet taken."""

    def __init__(self, peer: Peer) -> None:
        self.line, self.bell = peer
        self.sending = threading.Lock()
        self.change = threading.Condition()
        self.reading = False  # some thread does
        self.came: dict[int, deque[bytearray]] = {}
        self.ready: Counter[int] = Counter()  # bulk that the other rank waits for
        self.wanted: dict[int, memoryview] = {}  # bulk that this one waits for


class Links:
    """The connections among the ranks of a group, and what broke them; all its channels share them.

    `store` is where channels get their numbers, for a group that has any.
    """

    def __init__(
        self, peers: Mapping[int, Peer], rank: int, size: int, timeout: float, store: dist.Store | None = None
    ) -> None:
        self.rank, self.size, self.timeout, self.store = rank, size, timeout, store
        self.whole = True
        self.broken: UcformatError | None = None  # of what it broke first
        self.breaking = threading.Lock()
        self.notes = store
        self.memory: dict[str, Any] = {}
        self.opening = threading.Lock()
        self.waits = 0  # threads that wait for another rank now, none longer than the time-out
        self._counting = threading.Lock()
        self._lines = {other: _Line(peer) for other, peer in peers.items()}
        self._bells = select.epoll() if peers else None
        self._of_bell = {peer.bell.fileno(): other for other, peer in peers.items()}
        self._heard: dict[int, int | None] = {}  # who rang, because of whom; None of those who ended
        for bell in self._of_bell:
            self._bells.register(bell, select.EPOLLIN)  # type: ignore[union-attr]
        sockets = [s for peer in peers.values() for s in peer]
        self._close = weakref.finalize(self, _close, sockets, self._bells)
        self._close.atexit = False  # `_end_all` ends them, when other threads have ended
        _all.add(self)

    def end(self) -> None:
        """End the connections; the group can do nothing more."""
        self.whole = False
        self.broken = self.broken or UcformatError("the group of ranks was ended", hint="make another one")
        self._hang_up()
        self.store = self.notes = None

    def leave(self) -> None:
        """Let go of the connections in a forked child, which leaves them to its parent."""
        self.whole = False
        self.broken = UcformatError("the group of ranks is that of the process that this one was forked from")
        self._close()

    def _hang_up(self) -> None:
        """End all lines, so that every thread that waits wakes up; the bells say what they said before."""
        for line in self._lines.values():
            for end in (line.line, line.bell):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def number_of(self, name: str) -> int:
        """The number of a channel, the same on all ranks; the first that asks gives it."""
        assert self.notes is not None  # noqa: S101 - of several ranks
        mine = self.notes.add("channels", 1)
        return int(self.notes.compare_set(f"channel/{name}", "", str(mine)))

    def send(self, other: int, tag: int, data: memoryview, *, bulk: bool = False) -> None:
        """Send a message; returns when it is on its way. Bulk goes when it is waited for."""
        line = self._lines[other]
        with self.communicating("to send to", other):
            end = time.monotonic() + self.timeout
            if bulk:
                self._read(other, lambda: line.ready[tag] > 0, end)
                with line.change:
                    line.ready[tag] -= 1
            self._write(other, tag, len(data), data, end)

    def receive(self, other: int, tag: int) -> bytearray:
        """The next message of a rank with this tag."""
        line = self._lines[other]
        with self.communicating("to receive from", other):
            self._read(other, lambda: bool(line.came.get(tag)), time.monotonic() + self.timeout)
            with line.change:
                return line.came[tag].popleft()

    def receive_bulk(self, tag: int, buffers: Mapping[int, memoryview]) -> None:
        """Fill buffers, each with the bulk that a rank sends with this tag."""
        end = time.monotonic() + self.timeout
        for other, buffer in buffers.items():
            line = self._lines[other]
            with self.communicating("to receive from", other):
                with line.change:
                    line.wanted[tag] = buffer
                self._write(other, tag, _READY, memoryview(b""), end)
        for other in buffers:
            line = self._lines[other]
            with self.communicating("to receive from", other):
                self._read(other, lambda line=line: tag not in line.wanted, end)  # type: ignore[misc]

    def _write(self, other: int, tag: int, size: int, data: memoryview, end: float) -> None:
        """Put a frame on a line."""
        line = self._lines[other]
        if not line.sending.acquire(timeout=max(0.0, end - time.monotonic())):
            raise _Lost("it accepts no data", other)
        try:
            parts = [memoryview(_FRAME.pack(tag, size)), data]
            while parts:
                try:
                    sent = line.line.sendmsg(parts)
                except BlockingIOError:
                    self._poll(other, line.line, _WRITE, end)
                    continue
                while parts and sent >= len(parts[0]):
                    sent -= len(parts.pop(0))
                if sent:
                    parts[0] = parts[0][sent:]
        except OSError as error:
            raise _Lost(str(error), other) from error
        finally:
            line.sending.release()

    def _read(self, other: int, done: Callable[[], bool], end: float) -> None:
        """Read the line of a rank, or wait while another thread does, until what is waited for has come."""
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
                self._take(other, end)
            finally:
                with line.change:
                    line.reading = False
                    line.change.notify_all()

    def _take(self, other: int, end: float) -> None:
        """Take one frame from a line."""
        line = self._lines[other]
        head = memoryview(bytearray(_FRAME.size))
        self._fill(other, head, end)
        tag, size = _FRAME.unpack(head)
        if size == _READY:
            with line.change:
                line.ready[tag] += 1
            return
        with line.change:
            wanted = line.wanted.get(tag)
        if wanted is not None:
            if len(wanted) != size:
                raise _Lost(f"it sent {size} bytes where {len(wanted)} were due", other)
            self._fill(other, wanted, end)
            with line.change:
                del line.wanted[tag]
            return
        if size < 0:
            raise _Lost(f"it sent a frame of {size} bytes", other)
        data = bytearray(size)
        self._fill(other, memoryview(data), end)
        with line.change:
            line.came.setdefault(tag, deque()).append(data)

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
        """Wait until a line can be used, a bell rings or time is up."""
        poll = select.poll()
        poll.register(line, event)
        poll.register(self._bells, _READ)  # type: ignore[arg-type]
        if not poll.poll(max(0.0, end - time.monotonic()) * 1000):
            raise _Lost("timed out", other)
        self._listen()
        for who, because in list(self._heard.items()):
            if because is not None:  # if because of this rank, then that one which this one waits for is to blame
                raise _Lost(f"rank {who} gave up", other if because == self.rank else who)

    def _listen(self) -> None:
        """Hear the bells that rang since."""
        assert self._bells is not None  # noqa: S101 - there are peers
        with self._counting:
            for bell, _ in self._bells.poll(0):
                other = self._of_bell[bell]
                try:
                    said = self._lines[other].bell.recv(_RING.size)
                except BlockingIOError:
                    continue
                except OSError:
                    said = b""
                if len(said) == _RING.size:
                    self._heard[other] = _RING.unpack(said)[0]
                else:
                    self._heard.setdefault(other, None)
                self._bells.unregister(bell)

    @contextmanager
    def communicating(self, what: str, other: int) -> Iterator[None]:
        """Says what a failed communication with another rank means."""
        if self.broken is not None:
            raise self.broken
        self._count_waits(1)
        try:
            yield
        except (_Lost, RuntimeError) as error:  # of a line, or of the store
            with self.breaking:
                self.broken = self.broken or self._break(what, other, error)
            raise self.broken from error
        finally:
            self._count_waits(-1)

    def _count_waits(self, change: int) -> None:
        with self._counting:
            self.waits += change

    def _break(self, what: str, other: int, error: Exception) -> UcformatError:
        """Ring everybody's bell, end all connections, and find out who is to blame."""
        self.whole = False
        because = error.because if isinstance(error, _Lost) else other
        for line in self._lines.values():
            with suppress(OSError):
                line.bell.send(_RING.pack(because))
        blamed = self._blamed(because)
        self._hang_up()
        return UcformatError(
            f"rank {blamed} died or has been unresponsive for {self.timeout:g} s: rank {self.rank} failed {what} rank "
            f"{other} ({str(error).splitlines()[0][:200]})",
            hint="see the first error in the log of that rank; checkpoints committed earlier are intact",
        )

    def _blamed(self, other: int) -> int:
        """The rank that gave up because of nobody, found along those that did because of each other."""
        seen = {self.rank}
        while other not in seen:
            seen.add(other)
            because = self._rung_by(other)
            if because is None:
                break
            other = because
        return other

    def _rung_by(self, other: int) -> int | None:
        """Because of whom a rank gave up; None if it ended, or rings nobody for a moment, as one that is stopped."""
        end = time.monotonic() + _MOMENT
        self._listen()
        while other not in self._heard and (left := end - time.monotonic()) > 0:
            poll = select.poll()
            poll.register(self._bells, _READ)  # type: ignore[arg-type]
            poll.poll(left * 1000)
            self._listen()
        return self._heard.get(other)


def _close(sockets: list[socket.socket], bells: select.epoll | None) -> None:
    for one in sockets:
        one.close()
    if bells is not None:
        bells.close()
