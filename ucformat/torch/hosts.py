"""Where the writing processes of several ranks meet: at the host of the group's first rank, whichever that is."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from ipaddress import ip_address
from typing import TYPE_CHECKING

import torch.distributed as dist

from ucformat.torch.worker import Start

if TYPE_CHECKING:
    from ucformat.torch.group import Group

__all__ = ["address_here", "meeting_place"]


def meeting_place(group: Group) -> tuple[Start, socket.socket | None]:
    """Where the writers of all ranks meet: a port on which rank 0's will serve."""
    listener, place = None, None
    if group.size > 1:
        if not group.rank:
            listener = _listening(group.size + 16)
            place = (address_here(group.links.store), listener.getsockname()[1])
        place = group.agree(place)[0]
    host, port = place or ("", 0)
    fd = listener.fileno() if listener else None
    return Start(group.rank, group.size, host, port, fd, group.timeout), listener


def _listening(backlog: int) -> socket.socket:
    """A socket that listens to whoever reaches this host, by IPv4 or IPv6."""
    if socket.has_dualstack_ipv6():
        with suppress(OSError):  # IPv6 may be switched off
            return socket.create_server(("", 0), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=backlog)


def address_here(store: dist.Store | None) -> str:
    """How other ranks reach this host: as they reached the store where that lies here, else as its host sees us."""
    host, port = _place_of(store)
    if not host:
        return socket.gethostname()
    try:
        known = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError:  # resolved by others alone
        return socket.gethostname()
    for family, kind, protocol, _, address in known:
        with suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # of datagrams: nothing is sent, but the way there is chosen
            here = str(probe.getsockname()[0])
            local = ip_address(here.partition("%")[0]).is_loopback or here in {str(a[4][0]) for a in known}
            return host if local else here
    return socket.gethostname()


def _place_of(store: dist.Store | None) -> tuple[str, int]:
    """Host and port at which all ranks met; of a store without, as of a file, those of the environment."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if isinstance(store, dist.TCPStore):
        return str(store.host), int(store.port)
    return os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "1"))
