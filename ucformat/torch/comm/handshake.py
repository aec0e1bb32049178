"""Connections between the ranks of a group; both sides prove by a shared secret that they belong to it.

A rank connects to its parent in the tree, and to others when it needs to. So each listens as long
as the group lives, in a thread, on one interface: the loopback if all ranks are on this host.

    client:  its rank, the rank that it connects to, what it wants, a nonce               (49 bytes)
    server:  its nonce, HMAC-SHA256(secret, "called" + all of the above)                  (64 bytes)
    client:  HMAC-SHA256(secret, "caller" + all of the above)                             (32 bytes)
    server:  welcome, or the answer                                                       (1 or 36 bytes)

A client wants a line for messages, or to ask for bulk data, or to read files, or to learn for which
ranks the other one waits. One that gives up says because of which rank, and waits for no answer, so that the news
arrives even if it ends at once; a group fails only once, so a repetition is no news:

    client:  as above, with the rank in place of the nonce, HMAC-SHA256(secret, "alarm" + all of it)   (81 bytes)

Data from an unauthenticated client is never interpreted, only compared with the valid proofs. A
proof that was recorded on another connection is invalid, since the nonces differ; each group has a
secret of its own.
"""

from __future__ import annotations

import errno
import hmac
import secrets
import selectors
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Literal

from ucformat.errors import UcformatError

if TYPE_CHECKING:
    from collections.abc import Callable

#: How long to wait before another call to a rank that was busy, in seconds.
RETRY_S = 0.02

#: Host and port.
Address = tuple[str, int]

_HELLO = struct.Struct("<8sIIB32s")  # magic, rank of the client, rank of the server, use, nonce
_MAGIC = b"ucformat"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
#: What a connection is for.
Use = Literal["line", "bulk", "files"]
_LINE, _ASK, _ALARM, _BULK, _FILES = range(5)
_USES: dict[Use, int] = {"line": _LINE, "bulk": _BULK, "files": _FILES}
# the rank because of which a client gives up, in place of the nonce
_CAUSE = struct.Struct("<i28x")
_TOLD = 8  # ranks in the answer to a question, at most; -1 is none
_STATE = struct.Struct(f"<i{_TOLD}i")
_WELCOME, _LATER = b"w", b"l"
_HANDSHAKE_S = 10.0  # seconds in which a client has to authenticate itself; after that it may retry
_CHECK_S = 0.2  # how often a waiting client checks whether to go on
_ALARM_S = 1.0  # how long to wait for a host that is told
_FULL_S = 0.1  # how long to wait if no connection can be accepted
_MAX_HANDSHAKES = 256  # at once; a further client takes the place of the one that has taken longest
#: Detects a host that vanished after two minutes of silence.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 6))


def connect(
    address: Address,
    rank: int,
    other: int,
    secret: bytes,
    end: float,
    check: Callable[[], None],
    use: Use = "line",
) -> socket.socket | None:
    """Connect to another rank; None if it has too many connections, or serves no files.

    Args:
        check: called now and then while this waits; raises to give up.
    """
    try:
        while (remaining := end - time.monotonic()) > 0:
            check()
            with ExitStack() as on_failure, suppress(TimeoutError):
                connection = socket.create_connection(address, min(remaining, _HANDSHAKE_S))
                on_failure.enter_context(connection)
                hello = _hello(rank, other, _USES[use])
                answer = _authenticate(connection, hello, secret, end, check, len(_WELCOME))
                if answer == _WELCOME:
                    on_failure.pop_all()
                    return _prepared(connection)
                if answer == _LATER:
                    return None
            time.sleep(RETRY_S)
        raise TimeoutError("it answered but did not accept this rank")
    except OSError as error:
        raise UcformatError(
            f"rank {other} died or is unreachable: rank {rank} could not connect to it at "
            f"{address[0]}:{address[1]} "
            f"({error})",
            hint="see the first error in the log of that rank, and check that all hosts reach that address: "
            "MASTER_ADDR and the route to it determine the interface",
        ) from error


def ask(
    address: Address, rank: int, other: int, secret: bytes, end: float, check: Callable[[], None]
) -> tuple[int, tuple[int, ...]]:
    """Return the answer of another rank's `ConnectionTaker.state`, with at most eight ranks."""
    with socket.create_connection(address, max(0.1, end - time.monotonic())) as connection:
        answer = _authenticate(
            connection, _hello(rank, other, _ASK), secret, end, check, _STATE.size
        )
    if not answer:
        raise ConnectionResetError("it hung up")
    state, *reasons = _STATE.unpack(answer)
    return state, tuple(rank for rank in reasons if rank >= 0)


def send_alarm(address: Address, rank: int, other: int, secret: bytes, cause: int) -> None:
    """Tell another rank that this one gives up; one that cannot be reached is not told."""
    hello = _HELLO.pack(_MAGIC, rank, other, _ALARM, _CAUSE.pack(cause))
    with suppress(OSError), socket.create_connection(address, _ALARM_S) as connection:
        connection.sendall(hello + _proof(secret, b"alarm", hello))


def _hello(rank: int, other: int, use: int) -> bytes:
    return _HELLO.pack(_MAGIC, rank, other, use, secrets.token_bytes(_NONCE_BYTES))


def _authenticate(
    connection: socket.socket,
    hello: bytes,
    secret: bytes,
    end: float,
    check: Callable[[], None],
    size: int,
) -> bytes:
    """The answer of another rank to this one, b"" if it hung up; OSError if it cannot prove that it has the secret."""

    def receive(size: int) -> bytes:
        data = b""
        while len(data) < size:
            connection.settimeout(max(0.01, min(_CHECK_S, end - time.monotonic())))
            try:
                chunk = connection.recv(size - len(data))
            except TimeoutError:
                check()
                if time.monotonic() > end:
                    raise
                continue
            if not chunk:
                return b""
            data += chunk
        return data

    try:
        connection.sendall(hello)
        answer = receive(_NONCE_BYTES + _PROOF_BYTES)
        if answer:
            nonce, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
            if not hmac.compare_digest(proof, _proof(secret, b"called", hello + nonce)):
                raise PermissionError("the process at that address does not know this job's secret")
            connection.sendall(_proof(secret, b"caller", hello + nonce))
            return receive(size)
    except ConnectionError:  # the other rank gave up on this handshake
        pass
    return b""


def _prepared(connection: socket.socket) -> socket.socket:
    """A connection with the options of a line."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    return connection


class ConnectionTaker(ABC):
    """What answers the other ranks; called in the thread of the listener."""

    @abstractmethod
    def accept(self, other: int, welcome: Callable[[bool], socket.socket | None]) -> None:
        """Take a line, or refuse it.

        Args:
            welcome: called with whether the line is taken; returns it, or None if the client is
                gone.
        """

    @abstractmethod
    def accept_bulk(
        self, other: int, welcome: Callable[[bool], socket.socket | None]
    ) -> socket.socket | None:
        """Take a connection for bulk data, or refuse it."""

    @abstractmethod
    def accept_files(self, welcome: Callable[[bool], socket.socket | None]) -> None:
        """Take a connection over which files are read, or refuse it."""

    @abstractmethod
    def arrived(self, connection: socket.socket) -> bool:
        """Read what a rank asks for; returns whether there may be more."""

    @abstractmethod
    def state(self) -> tuple[int, tuple[int, ...]]:
        """Return what a rank that asks is told: a number, and ranks."""

    @abstractmethod
    def alarmed(self, sender: int, cause: int) -> None:
        """Learn that a rank gives up."""


class Listener:
    """Accepts the connections of other ranks in a thread of its own, until it is closed.

    Args:
        owner: returns who answers, or None if it does not exist any more.
    """

    def __init__(
        self,
        listening: socket.socket,
        rank: int,
        secret: bytes,
        owner: Callable[[], ConnectionTaker | None],
    ) -> None:
        self.address: Address = listening.getsockname()[:2]
        self._socket, self._rank, self._secret, self._owner = listening, rank, secret, owner
        self._pending: dict[socket.socket, _Handshake] = {}
        listening.setblocking(False)
        threading.Thread(target=self._serve, daemon=True, name="ucformat-listener").start()

    def close(self) -> None:
        """Stop to listen, and end the thread."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close_after_fork(self) -> None:
        """Close the copies of the sockets in a forked child, which has no copy of the thread."""
        for sock in (self._socket, *self._pending):
            sock.close()

    def _serve(self) -> None:
        try:
            with selectors.PollSelector() as ready:
                self._serve_until_closed(ready)
        finally:
            for sock in (self._socket, *self._pending):
                sock.close()

    def _serve_until_closed(self, ready: selectors.BaseSelector) -> None:
        pending = self._pending
        ready.register(self._socket, selectors.EVENT_READ)
        while True:
            soonest = min((h.end for h in pending.values()), default=None)
            for key, _ in ready.select(
                None if soonest is None else max(0.0, soonest - time.monotonic())
            ):
                connection: socket.socket = key.fileobj  # type: ignore[assignment]
                if connection in pending:
                    hello = pending[connection].receive(self._secret)
                    if hello is not None:
                        ready.unregister(connection)
                        del pending[connection]
                        if (bulk_connection := self._answer(connection, hello)) is not None:
                            ready.register(bulk_connection, selectors.EVENT_READ)
                    continue
                if connection is not self._socket:
                    owner = self._owner()
                    if owner is None or not owner.arrived(connection):
                        ready.unregister(connection)
                    del owner  # which must not live because this thread waits
                    continue
                try:
                    client = self._socket.accept()[0]
                except OSError as error:
                    if error.errno == errno.EINVAL:  # closed
                        return
                    if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                        time.sleep(_FULL_S)
                    continue  # the client has already closed it
                pending[client] = _Handshake(client)
                ready.register(client, selectors.EVENT_READ)
            oldest = list(pending)[: max(0, len(pending) - _MAX_HANDSHAKES)]
            for connection in {
                *oldest,
                *(c for c, h in pending.items() if h.end <= time.monotonic()),
            }:
                ready.unregister(connection)
                connection.close()
                del pending[connection]

    def _answer(self, connection: socket.socket, hello: bytes) -> socket.socket | None:
        """Do what an authenticated client wants; returns the connection if it is for bulk data."""
        owner = self._owner()
        magic, client, server, use, nonce = _HELLO.unpack(hello or bytes(_HELLO.size))
        with ExitStack() as unless_taken:
            unless_taken.enter_context(connection)
            if owner is None or magic != _MAGIC or server != self._rank:
                return None

            def welcome(accepted: bool) -> socket.socket | None:  # noqa: FBT001 - private
                with suppress(OSError):
                    if connection.send(_WELCOME if accepted else _LATER) and accepted:
                        unless_taken.pop_all()
                        return _prepared(connection)
                return None

            if use == _LINE:
                owner.accept(client, welcome)
            elif use == _BULK:
                return owner.accept_bulk(client, welcome)
            elif use == _FILES:
                owner.accept_files(welcome)
            elif use == _ASK:
                state, reasons = owner.state()
                with suppress(OSError):
                    connection.send(_STATE.pack(state, *(*reasons, *[-1] * _TOLD)[:_TOLD]))
            elif use == _ALARM:
                owner.alarmed(client, _CAUSE.unpack(nonce)[0])
        return None


class _Handshake:
    """The server's side of a handshake; data from the client is not interpreted before it is authenticated."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.received, self.challenge = connection, b"", b""
        self.end = time.monotonic() + _HANDSHAKE_S
        connection.setblocking(False)

    def receive(self, secret: bytes) -> bytes | None:
        """Receive data: returns the hello of an authenticated client, b"" if it failed, None while undecided."""
        due = _HELLO.size + _PROOF_BYTES
        try:
            chunk = self.connection.recv(due - len(self.received))
        except BlockingIOError:
            return None
        except OSError:
            return b""
        self.received += chunk
        if not chunk:
            return b""
        hello, proof = self.received[: _HELLO.size], self.received[_HELLO.size :]
        if len(hello) == _HELLO.size and not self.challenge:
            self.challenge = hello + secrets.token_bytes(_NONCE_BYTES)
            if not proof:  # an alarm comes as a whole
                with suppress(OSError):  # the client is gone, which the next call detects
                    self.connection.send(
                        self.challenge[_HELLO.size :] + _proof(secret, b"called", self.challenge)
                    )
        if len(self.received) < due:
            return None
        proofs = (_proof(secret, b"caller", self.challenge), _proof(secret, b"alarm", hello))
        return hello if any(hmac.compare_digest(proof, p) for p in proofs) else b""


def _proof(secret: bytes, role: bytes, exchanged: bytes) -> bytes:
    return hmac.digest(secret, role + exchanged, "sha256")
