"""Connects the ranks of a group; both sides prove by a shared secret that they belong to it.

Each pair of ranks has two connections: a line for messages, and a bell, on which a rank signals that it gives up. The
higher rank connects to the lower one. Until all ranks are connected, each listens on one interface: the loopback if all
ranks are on this host.

    client:  its rank, the rank that it connects to, a nonce                              (49 bytes)
    server:  its nonce, HMAC-SHA256(secret, "called" + all of the above)                  (64 bytes)
    client:  HMAC-SHA256(secret, "caller" + all of the above)                             (32 bytes)
    server:  welcome                                                                      (1 byte)

Data from an unauthenticated client is never interpreted, only compared with the one valid proof. A proof that was
recorded on another connection is invalid, since the nonces differ.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import selectors
import socket
import struct
import time
from contextlib import ExitStack, suppress
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ucformat.errors import UcformatError
from ucformat.torch.comm.wire import message

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch.distributed as dist

__all__ = ["Address", "Host", "Peer", "connect", "gather_through_store", "host_here", "listen"]

#: Host and port.
Address = tuple[str, int]

_HELLO = struct.Struct("<8sIIB32s")  # magic, rank of the client, rank of the server, use, nonce
_MAGIC = b"ucformat"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_LINE, _BELL = 0, 1
_WELCOME = b"w"
_HANDSHAKE_S = 10.0  # seconds in which a client has to authenticate itself; after that it may retry
_RETRY_S = 0.02
_MAX_HANDSHAKES = 256  # at once, besides those that are expected
#: Detects a host that vanished after two minutes of silence.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 6))


class Peer(NamedTuple):
    """The connections to another rank."""

    line: socket.socket
    bell: socket.socket


def connect(
    listener: socket.socket, rank: int, addresses: Sequence[Address], secret: bytes, timeout: float
) -> dict[int, Peer]:
    """Connect to all other ranks, which call this too, and close the listener.

    Args:
        listener: of this rank, as `listen` returns it.
        rank: of this process.
        addresses: where each rank listens.
        secret: which all ranks share.
        timeout: seconds to wait for all ranks.

    Returns:
        the connections to each other rank.

    Raises:
        UcformatError: a rank did not connect in time, is unreachable, or does not know the secret.
    """
    end = time.monotonic() + timeout
    with ExitStack() as on_failure, listener:
        found: dict[tuple[int, int], socket.socket] = {}
        for other in range(rank):
            for use in (_LINE, _BELL):
                connection = _connect_to(rank, other, use, addresses[other], secret, end)
                found[other, use] = on_failure.enter_context(connection)
        missing = {(other, use) for other in range(rank + 1, len(addresses)) for use in (_LINE, _BELL)}
        for connected, connection in _accept_all(listener, rank, missing, secret, end):
            found[connected] = on_failure.enter_context(connection)
        if late := sorted({other for other, _ in missing - found.keys()}):
            raise UcformatError(
                f"rank {late[0]} did not connect to rank {rank} within {timeout:g} s"
                + (f", nor did {len(late) - 1} other ranks" if len(late) > 1 else ""),
                hint="check that it is running and that it reaches this rank's address "
                f"{addresses[rank][0]}: MASTER_ADDR and the route to it determine the interface",
            )
        on_failure.pop_all()
    for connection in found.values():
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
    return {o: Peer(found[o, _LINE], found[o, _BELL]) for o in range(len(addresses)) if o != rank}


def _connect_to(rank: int, other: int, use: int, address: Address, secret: bytes, end: float) -> socket.socket:
    """Connect to another rank, with mutual authentication."""
    hello = _HELLO.pack(_MAGIC, rank, other, use, secrets.token_bytes(_NONCE_BYTES))
    try:
        return _connect_until(address, hello, secret, end)
    except OSError as error:
        raise UcformatError(
            f"rank {other} died or is unreachable: rank {rank} could not connect to it at {address[0]}:{address[1]} "
            f"({error})",
            hint="see the first error in the log of that rank, and check that all hosts reach that address: "
            "MASTER_ADDR and the route to it determine the interface",
        ) from error


def _connect_until(address: Address, hello: bytes, secret: bytes, end: float) -> socket.socket:
    """An authenticated connection; retries if the handshake took longer than the other rank waits."""
    while (left := end - time.monotonic()) > 0:
        with ExitStack() as on_failure:
            connection = on_failure.enter_context(socket.create_connection(address, left))
            if _authenticate(connection, hello, secret, end):
                on_failure.pop_all()
                return connection
        time.sleep(_RETRY_S)
    raise TimeoutError("it answered but did not accept this rank")


def _authenticate(connection: socket.socket, hello: bytes, secret: bytes, end: float) -> bool:
    """Whether the other rank accepted this one; OSError if the other one cannot prove that it knows the secret."""

    def receive(size: int) -> bytes:
        data = b""
        while len(data) < size:
            connection.settimeout(max(0.1, end - time.monotonic()))
            more = connection.recv(size - len(data))
            if not more:
                return b""
            data += more
        return data

    try:
        connection.sendall(hello)
        answer = receive(_NONCE_BYTES + _PROOF_BYTES)
        if answer:
            nonce, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
            if not hmac.compare_digest(proof, _proof(secret, b"called", hello + nonce)):
                raise PermissionError("the process at that address does not know this job's secret")
            connection.sendall(_proof(secret, b"caller", hello + nonce))
            return receive(len(_WELCOME)) == _WELCOME
    except ConnectionError:  # the other rank gave up on this handshake
        pass
    return False


def _accept_all(
    listener: socket.socket, rank: int, missing: set[tuple[int, int]], secret: bytes, end: float
) -> Iterator[tuple[tuple[int, int], socket.socket]]:
    """Accept connections from the missing ranks until all are connected or time is up."""
    missing, pending = set(missing), dict[socket.socket, _Handshake]()
    listener.setblocking(False)
    with selectors.DefaultSelector() as ready:
        listening = False
        try:
            while missing and time.monotonic() < end:
                room = len(pending) < _MAX_HANDSHAKES + len(missing)
                if room != listening:
                    if room:
                        ready.register(listener, selectors.EVENT_READ)
                    else:
                        ready.unregister(listener)
                    listening = room
                soonest = min([end, *(h.end for h in pending.values())])
                for key, _ in ready.select(max(0.0, soonest - time.monotonic())):
                    if key.fileobj is listener:
                        with suppress(OSError):  # the client has already closed it
                            client = listener.accept()[0]
                            pending[client] = _Handshake(client)
                            ready.register(client, selectors.EVENT_READ)
                        continue
                    connection: socket.socket = key.fileobj  # type: ignore[assignment]
                    hello = pending[connection].receive(secret)
                    if hello is None:
                        continue
                    ready.unregister(connection)
                    del pending[connection]
                    connected = _identify(hello, rank)
                    if connected in missing and _send_welcome(connection):
                        missing.discard(connected)
                        yield connected, connection
                    else:
                        connection.close()
                for connection in [c for c, h in pending.items() if h.end <= time.monotonic()]:
                    ready.unregister(connection)
                    connection.close()
                    del pending[connection]
        finally:
            for connection in pending:
                connection.close()


class _Handshake:
    """The server's side of a handshake; data from the client is not interpreted before it is authenticated."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.received, self.challenge = connection, b"", b""
        self.end = time.monotonic() + _HANDSHAKE_S
        connection.setblocking(False)

    def receive(self, secret: bytes) -> bytes | None:
        """Receive data: returns the hello of an authenticated client, b"" if it failed, None while undecided."""
        due = _HELLO.size + (_PROOF_BYTES if self.challenge else 0) - len(self.received)
        try:
            more = self.connection.recv(due)
        except BlockingIOError:
            return None
        except OSError:
            return b""
        self.received += more
        if len(more) < due:
            return None if more else b""
        if not self.challenge:
            self.challenge = self.received + secrets.token_bytes(_NONCE_BYTES)
            with suppress(OSError):  # the client is gone, which the next call detects
                self.connection.send(self.challenge[_HELLO.size :] + _proof(secret, b"called", self.challenge))
            return None
        hello, proof = self.received[: _HELLO.size], self.received[_HELLO.size :]
        return hello if hmac.compare_digest(proof, _proof(secret, b"caller", self.challenge)) else b""


def _send_welcome(connection: socket.socket) -> bool:
    """Tell a rank that it is accepted; false if it is gone."""
    try:
        return connection.send(_WELCOME) == len(_WELCOME)
    except OSError:
        return False


def _identify(hello: bytes, rank: int) -> tuple[int, int] | None:
    """The rank of the client and the use of the connection; None if it failed, or connects to another rank."""
    if not hello:
        return None
    magic, client, server, use, _ = _HELLO.unpack(hello)
    return (client, use) if magic == _MAGIC and server == rank else None


def _proof(secret: bytes, role: bytes, exchanged: bytes) -> bytes:
    return hmac.digest(secret, role + exchanged, "sha256")


_LOOPBACK = "127.0.0.1"


@message
class Host:
    """The host of a rank.

    Ranks with the same `identity` share a loopback interface. `address` is that of the interface through which the host
    reaches the store, or "" on the host of the store.
    """

    identity: str
    address: str


def gather_through_store(store: dist.Store, key: str, mine: str, rank: int, size: int, timeout: float) -> list[Any]:
    """Gather a value of each rank through a store.

    Args:
        store: used by all ranks.
        key: the same on all ranks; used once.
        mine: the value of this rank, as JSON.
        rank: of this process.
        size: the number of ranks.
        timeout: seconds to wait for the other ranks.

    Raises:
        UcformatError: a rank did not join in time.
    """
    store.set(f"{key}/{rank}", mine)
    names = [f"{key}/{r}" for r in range(size)]
    end = time.monotonic() + timeout
    for other, name in enumerate(names):
        try:
            store.wait([name], timedelta(seconds=max(0.001, end - time.monotonic())))
        except RuntimeError as error:
            raise UcformatError(
                f"rank {other} did not join rank {rank} within {timeout:g} s ({str(error).splitlines()[0][:200]})",
                hint="make the same call on all ranks; see the first error in the log of that rank",
            ) from error
    return [json.loads(store.get(name)) for name in names]


def host_here(store: dist.Store | None) -> Host:
    """Return the host of this process.

    Args:
        store: at which the ranks meet.
    """
    return Host(_identity(), _route_to(*_address_of(store)))


def listen(hosts: Sequence[Host], rank: int) -> socket.socket:
    """Return a socket that listens on the one interface through which the other ranks connect.

    Args:
        hosts: of all ranks.
        rank: of this process.
    """
    here = hosts[rank]
    others = [h for h in hosts if h.identity != here.identity]
    address = _LOOPBACK
    if others:
        # The host of the store reaches itself by any name: its route to another host determines the interface.
        routes = (_route_to(h.address, 1) for h in others if h.address)
        address = here.address or next((route for route in routes if route), "") or _own_address()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=len(hosts) + 16)


def _identity() -> str:
    """The boot id of the kernel and the network namespace of this process."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/net').readlink()}"
    except OSError:
        return socket.gethostname()


def _route_to(host: str, port: int) -> str:
    """The address of the interface through which this host reaches another; "" if that is this one, or unknown."""
    try:
        known = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM) if host else []
    except OSError:  # a name that only other hosts can resolve
        return ""
    for family, kind, protocol, _, address in known:
        with suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # UDP: nothing is sent, but the route is chosen
            here = str(probe.getsockname()[0])
            local = ip_address(here.partition("%")[0]).is_loopback or here in {str(a[4][0]) for a in known}
            return "" if local else here
    return ""


def _own_address() -> str:
    """The address to which this host's name resolves."""
    return str(socket.getaddrinfo(socket.gethostname(), 0, type=socket.SOCK_STREAM)[0][4][0])


def _address_of(store: dist.Store | None) -> tuple[str, int]:
    """Host and port of a store; of one without, such as a FileStore, those in the environment."""
    import torch.distributed as dist

    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if isinstance(store, dist.TCPStore):
        return str(store.host), int(store.port)
    return os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "1"))
