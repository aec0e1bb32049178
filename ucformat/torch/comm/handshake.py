"""The connections among the ranks of a group: each proves by a secret that it is one of them, before it is listened to.

Every two ranks have two: a line for messages, and a bell, which rings when one of them gives up. The higher rank calls.
While they connect, each listens on one interface, the loopback if all are on this host; when all have come, nobody
listens any more.

    caller:  who I am, whom I call, a number of my own that nobody used before           (49 bytes)
    called:  a number of its own, HMAC-SHA256(secret, "called" + all of the above)        (64 bytes)
    caller:  HMAC-SHA256(secret, "caller" + all of the above)                             (32 bytes)
    called:  welcome                                                                      (1 byte)

What a stranger sends is compared with the one proof that would do, and never looked at. A proof that was heard on
another connection is worth nothing, for the numbers differ.
"""

from __future__ import annotations

import hmac
import os
import secrets
import selectors
import socket
import struct
import time
from contextlib import ExitStack, suppress
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch.distributed as dist

from ucformat.errors import UcformatError
from ucformat.torch.comm.wire import message

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Address", "Host", "Peer", "connect", "host_here", "listen"]

#: Host and port.
Address = tuple[str, int]

_HELLO = struct.Struct("<8sIIB32s")  # a word, who calls whom, for what, a number
_WORD = b"ucformat"
_NUMBER = 32  # bytes of the numbers, and of the secret
_PROOF = 32
_LINE, _BELL = 0, 1
_WELCOME = b"w"
_HANDSHAKE_S = 10.0  # seconds in which whoever connects has to prove that he may; else he may try again
_AGAIN = 0.02  # seconds until who was not let in calls again
_MAX_HANDSHAKES = 256  # that may be about to, besides those who are expected
#: A host that vanished is noticed after two minutes in which nothing is said.
_ALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 6))


class Peer(NamedTuple):
    """The connections to another rank."""

    line: socket.socket
    bell: socket.socket


def connect(
    listener: socket.socket, rank: int, places: Sequence[Address], secret: bytes, timeout: float
) -> dict[int, Peer]:
    """Connect with all other ranks, each of which calls this at its place; the listener is closed then.

    Raises:
        UcformatError: one did not come within so many seconds, or does not know the secret.
    """
    end = time.monotonic() + timeout
    with ExitStack() as on_failure, listener:
        found: dict[tuple[int, int], socket.socket] = {}
        for other in range(rank):
            for use in (_LINE, _BELL):
                found[other, use] = on_failure.enter_context(_connect_to(rank, other, use, places[other], secret, end))
        missing = {(other, use) for other in range(rank + 1, len(places)) for use in (_LINE, _BELL)}
        for who, connection in _accept_all(listener, rank, missing, secret, end):
            found[who] = on_failure.enter_context(connection)
        if late := sorted({other for other, _ in missing - found.keys()}):
            raise UcformatError(
                f"rank {late[0]} did not connect to rank {rank} within {timeout:g} s"
                + (f", nor did {len(late) - 1} other ranks" if len(late) > 1 else ""),
                hint="check that it is running and that it reaches this rank's address "
                f"{places[rank][0]}: MASTER_ADDR and the route to it determine the interface",
            )
        on_failure.pop_all()
    for connection in found.values():
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _ALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
    return {o: Peer(found[o, _LINE], found[o, _BELL]) for o in range(len(places)) if o != rank}


def _connect_to(rank: int, other: int, use: int, place: Address, secret: bytes, end: float) -> socket.socket:
    """Connect to another rank, and prove each other."""
    hello = _HELLO.pack(_WORD, rank, other, use, secrets.token_bytes(_NUMBER))
    try:
        return _connect_until(place, hello, secret, end)
    except OSError as error:
        raise UcformatError(
            f"rank {other} died or is unreachable: rank {rank} could not connect to it at {place[0]}:{place[1]} "
            f"({error})",
            hint="see the first error in the log of that rank, and check that all hosts reach that address: "
            "MASTER_ADDR and the route to it determine the interface",
        ) from error


def _connect_until(place: Address, hello: bytes, secret: bytes, end: float) -> socket.socket:
    """A connection on which this rank proved who it is; it calls again where that took too long for the other one."""
    while (left := end - time.monotonic()) > 0:
        with ExitStack() as on_failure:
            connection = on_failure.enter_context(socket.create_connection(place, left))
            if _is_let_in(connection, hello, secret, end):
                on_failure.pop_all()
                return connection
        time.sleep(_AGAIN)
    raise TimeoutError("it answered but did not accept this rank")


def _is_let_in(connection: socket.socket, hello: bytes, secret: bytes, end: float) -> bool:
    """Whether this rank proved in time who it is; OSError where the other one does not."""

    def hear(size: int) -> bytes:
        said = b""
        while len(said) < size:
            connection.settimeout(max(0.1, end - time.monotonic()))
            more = connection.recv(size - len(said))
            if not more:
                return b""
            said += more
        return said

    try:
        connection.sendall(hello)
        answer = hear(_NUMBER + _PROOF)
        if answer:
            number, proof = answer[:_NUMBER], answer[_NUMBER:]
            if not hmac.compare_digest(proof, _proof(secret, b"called", hello + number)):
                raise PermissionError("the process at that address does not know this job's secret")
            connection.sendall(_proof(secret, b"caller", hello + number))
            return hear(len(_WELCOME)) == _WELCOME
    except ConnectionError:  # it did not wait
        pass
    return False


def _accept_all(
    listener: socket.socket, rank: int, missing: set[tuple[int, int]], secret: bytes, end: float
) -> Iterator[tuple[tuple[int, int], socket.socket]]:
    """Let in whoever proves to be one of those that are missing, until all are here or it is too late."""
    missing, guests = set(missing), dict[socket.socket, _Handshake]()
    listener.setblocking(False)
    with selectors.DefaultSelector() as ready:
        listening = False
        try:
            while missing and time.monotonic() < end:
                room = len(guests) < _MAX_HANDSHAKES + len(missing)
                if room != listening:
                    if room:
                        ready.register(listener, selectors.EVENT_READ)
                    else:
                        ready.unregister(listener)
                    listening = room
                soonest = min([end, *(g.end for g in guests.values())])
                for key, _ in ready.select(max(0.0, soonest - time.monotonic())):
                    if key.fileobj is listener:
                        with suppress(OSError):  # it is gone again
                            guest = listener.accept()[0]
                            guests[guest] = _Handshake(guest)
                            ready.register(guest, selectors.EVENT_READ)
                        continue
                    connection: socket.socket = key.fileobj  # type: ignore[assignment]
                    hello = guests[connection].hear(secret)
                    if hello is None:
                        continue
                    ready.unregister(connection)
                    del guests[connection]
                    who = _who(hello, rank)
                    if who in missing and _welcomes(connection):
                        missing.discard(who)
                        yield who, connection
                    else:
                        connection.close()
                for connection in [c for c, g in guests.items() if g.end <= time.monotonic()]:
                    ready.unregister(connection)
                    connection.close()
                    del guests[connection]
        finally:
            for connection in guests:
                connection.close()


class _Handshake:
    """Who connected, and has not proved to be one of us; nothing that he says is looked at."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.said, self.asked = connection, b"", b""
        self.end = time.monotonic() + _HANDSHAKE_S
        connection.setblocking(False)

    def hear(self, secret: bytes) -> bytes | None:
        """Take what he says; the hello of one who proved it, b"" of one who cannot, None as long as that is open."""
        due = _HELLO.size + (_PROOF if self.asked else 0) - len(self.said)
        try:
            more = self.connection.recv(due)
        except BlockingIOError:
            return None
        except OSError:
            return b""
        self.said += more
        if len(more) < due:
            return None if more else b""
        if not self.asked:
            self.asked = self.said + secrets.token_bytes(_NUMBER)
            with suppress(OSError):  # he is gone, which the next call finds
                self.connection.send(self.asked[_HELLO.size :] + _proof(secret, b"called", self.asked))
            return None
        hello, proof = self.said[: _HELLO.size], self.said[_HELLO.size :]
        return hello if hmac.compare_digest(proof, _proof(secret, b"caller", self.asked)) else b""


def _welcomes(connection: socket.socket) -> bool:
    """Tell a rank that it is let in; false where it is gone."""
    try:
        return connection.send(_WELCOME) == len(_WELCOME)
    except OSError:
        return False


def _who(hello: bytes, rank: int) -> tuple[int, int] | None:
    """Which rank calls, and for what; None of one who proved nothing, or calls another."""
    if not hello:
        return None
    word, who, whom, use, _ = _HELLO.unpack(hello)
    return (who, use) if word == _WORD and whom == rank else None


def _proof(secret: bytes, role: bytes, said: bytes) -> bytes:
    return hmac.digest(secret, role + said, "sha256")


_LOOPBACK = "127.0.0.1"


@message
class Host:
    """Where a rank is: what tells its host from others, and its address on the way to the store, or "" if that is here.

    Two ranks with the same `identity` share a loopback interface.
    """

    identity: str
    address: str


def host_here(store: dist.Store | None) -> Host:
    """The host of this process, among those that met at a store."""
    return Host(_identity(), _way_to(*_place_of(store)))


def listen(hosts: Sequence[Host], rank: int) -> socket.socket:
    """A socket that listens to these ranks, on the one interface through which they come."""
    here = hosts[rank]
    others = [h for h in hosts if h.identity != here.identity]
    address = _LOOPBACK
    if others:
        # The host of the store sees itself by any name: its way to another one tells the interface.
        ways = (_way_to(h.address, 1) for h in others if h.address)
        address = here.address or next((way for way in ways if way), "") or _own_address()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=len(hosts) + 16)


def _identity() -> str:
    """The kernel that runs, and the network that this process sees of it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/net').readlink()}"
    except OSError:
        return socket.gethostname()


def _way_to(host: str, port: int) -> str:
    """The address of this host on the way to another one; "" where that is this one, or not known."""
    try:
        known = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM) if host else []
    except OSError:  # resolved by others alone
        return ""
    for family, kind, protocol, _, address in known:
        with suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # of datagrams: nothing is sent, but the way there is chosen
            here = str(probe.getsockname()[0])
            local = ip_address(here.partition("%")[0]).is_loopback or here in {str(a[4][0]) for a in known}
            return "" if local else here
    return ""


def _own_address() -> str:
    """What this host's name stands for."""
    return str(socket.getaddrinfo(socket.gethostname(), 0, type=socket.SOCK_STREAM)[0][4][0])


def _place_of(store: dist.Store | None) -> tuple[str, int]:
    """Host and port at which all ranks met; of a store without, as of a file, those of the environment."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if isinstance(store, dist.TCPStore):
        return str(store.host), int(store.port)
    return os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "1"))
