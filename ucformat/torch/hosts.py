"""Where a rank listens to the others: at the loopback if all are on this host, else at the interface they come by."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from ucformat.torch.wire import message

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Host", "host_here", "listen"]

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
