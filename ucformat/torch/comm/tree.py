"""The tree over the ranks of a group: hosts first, and below one rank of a host the others of it.

Rank 0 reads the hosts of all ranks at the store of the process group, and tells each rank its place in the tree. So a
rank makes a few requests, however many ranks there are; only rank 0 reads and writes a value for each, in one request
if the store supports that.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from contextlib import suppress
from datetime import timedelta
from ipaddress import ip_address
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ucformat.errors import UcformatError
from ucformat.torch.comm.connections import Node
from ucformat.torch.comm.links import Links

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch.distributed as dist

#: The most children of a rank on its own host, and on other hosts.
FAN_OUT = 8
_MOST_CHILDREN = 14  # of both kinds: with those to the parent and to itself a rank has no more than 16 sockets
_OTHERS = 4  # hosts by which a rank may find its interface
_LATE_S = 30.0  # how much longer ranks wait for rank 0 than it for them, so that they learn what it found
_BACKLOG = 1024
_LISTEN_HINT = "MASTER_ADDR and the route to it determine the interface on which ranks listen"
_JOIN_HINT = "make the same call on all ranks; see the first error in the log of that rank"


class Host(NamedTuple):
    """The host of a rank.

    Ranks with the same `identity` share a loopback interface. `address` is that of the interface through which the host
    reaches the store, or "" on the host of the store.
    """

    identity: str
    address: str


def ranks_of_hosts(hosts: Sequence[str]) -> list[range]:
    """Return the ranks of each host; none if those of some host are not consecutive."""
    ends = [0, *(r for r in range(1, len(hosts)) if hosts[r] != hosts[r - 1]), len(hosts)]
    return [range(a, b) for a, b in pairwise(ends)] if len(ends) == len(set(hosts)) + 1 else []


def parents_of(hosts: Sequence[str]) -> list[int]:
    """Return the parent of each rank; that of rank 0 is -1.

    Each rank has the lowest number of its subtree, whose ranks are consecutive: so values that are merged on the way up
    are in the order of ranks. If ranks of a host are not consecutive, the tree ignores the hosts.
    """
    runs = [list(ranks) for ranks in ranks_of_hosts(hosts) or [range(len(hosts))]]
    near = min(FAN_OUT, max(map(len, runs)) - 1)
    far = min(FAN_OUT, _MOST_CHILDREN - near)
    parents = [-1] * len(hosts)
    subtrees = [runs]
    while subtrees:
        (root, *rest), *others = subtrees.pop()
        for part in [*([p] for p in _cut(rest, near)), *_cut(others, far)]:
            parents[part[0][0]] = root
            subtrees.append(part)
    return parents


def _cut(whole: list[Any], parts: int) -> list[list[Any]]:
    """Cut a list into at most so many parts of about the same length."""
    count, parts = len(whole), min(parts, len(whole))
    return [whole[count * i // parts : count * (i + 1) // parts] for i in range(parts)]


def connect_by_store(store: dist.Store, rank: int, size: int, timeout: float) -> Links:
    """Connect ranks with each other through a store; all of them call this.

    Args:
        timeout: seconds to wait for the other ranks, and then for each message.
    """
    if size == 1:
        return Links(Node(0, 1, -1, ()), timeout, store=store)
    if not rank:
        store.set("secret", secrets.token_hex(32))
    mine = host_here(store)
    store.set(f"host/{rank}", json.dumps(mine))
    if not rank:
        _assign_places(store, size, timeout)
    found = _await(store, f"place/{rank}", 0, rank, timeout + _LATE_S)
    if isinstance(found, str):
        raise UcformatError(found, hint=_JOIN_HINT)
    parent, children, others, here = found
    meeting, problem, listening = None, "", None
    if rank:
        meeting, problem = _await(store, f"address/{parent}", parent, rank, timeout + _LATE_S)
    if not problem:
        try:
            listening = listen([mine, *(Host(*h) for h in others)], 0)
        except OSError as error:
            problem = f"rank {rank} cannot listen: {error}"
    store.set(f"address/{rank}", json.dumps([listening and listening.getsockname()[:2], problem]))
    secret = bytes.fromhex(store.get("secret").decode())
    place = Node(rank, size, parent, tuple(children) if listening else (), (here[0], here[1]))
    links = Links(place, timeout, listening, secret, store)
    failure = UcformatError(problem, hint=_LISTEN_HINT) if problem else None
    if failure is not None and not meeting:  # the parent cannot listen, or there is none
        raise failure
    links.join(meeting and (meeting[0], meeting[1]), failure)
    if not rank:
        with suppress(RuntimeError):  # all ranks have read it; some stores cannot delete keys
            store.delete_key("secret")
    return links


def _assign_places(store: dist.Store, size: int, timeout: float) -> None:
    """Rank 0's part: wait for all ranks, and tell each its parent, children, some other hosts, and its host's ranks."""
    names = [f"host/{r}" for r in range(size)]
    places = [f"place/{r}" for r in range(size)]
    try:
        store.wait(names, timedelta(seconds=timeout))
    except RuntimeError as error:
        why = f"rank {_first_missing(store, names)} did not join rank 0 within {timeout:g} s"
        _set_all(store, places, [json.dumps(f"{why} ({str(error).splitlines()[0][:200]})")] * size)
        return
    several = store.has_extended_api()
    hosts = [Host(*json.loads(h)) for h in (store.multi_get(names) if several else map(store.get, names))]
    identities = [h.identity for h in hosts]
    parents = parents_of(identities)
    children: list[list[int]] = [[] for _ in hosts]
    for rank, parent in enumerate(parents[1:], 1):
        children[parent].append(rank)
    distinct = {h.identity: h for h in hosts} | {h.identity: h for h in hosts if h.address}
    some = list(distinct.values())[: _OTHERS + 1]
    others = [[h for h in some if h.identity != host.identity] for host in hosts]
    here = [(run.start, run.stop) for run in ranks_of_hosts(identities) for _ in run] or [(0, 0)] * size
    _set_all(store, places, [json.dumps(place) for place in zip(parents, children, others, here, strict=True)])


def _set_all(store: dist.Store, names: list[str], values: list[str]) -> None:
    if store.has_extended_api():
        store.multi_set(names, values)
    else:
        for name, value in zip(names, values, strict=True):
            store.set(name, value)


def _first_missing(store: dist.Store, names: list[str]) -> int:
    """The number of the first name that is not set."""
    first, last = 0, len(names) - 1
    while first < last:
        middle = (first + last) // 2
        if store.check(names[first : middle + 1]):
            first = middle + 1
        else:
            last = middle
    return first


def _await(store: dist.Store, name: str, other: int, rank: int, seconds: float) -> Any:
    """The value of a name, which another rank sets."""
    end = time.monotonic() + seconds
    try:
        store.wait([name], timedelta(seconds=max(0.001, end - time.monotonic())))
    except RuntimeError as error:
        raise UcformatError(
            f"rank {other} did not join rank {rank} within {seconds:g} s ({str(error).splitlines()[0][:200]})",
            hint=_JOIN_HINT,
        ) from error
    return json.loads(store.get(name))


_LOOPBACK = "127.0.0.1"


def host_here(store: dist.Store | None) -> Host:
    """Return the host of this process."""
    return Host(_identity(), _route_to(*_address_of(store)))


def listen(hosts: Sequence[Host], rank: int) -> socket.socket:
    """Return a socket that listens on the one interface through which the other ranks connect."""
    here = hosts[rank]
    others = [h for h in hosts if h.identity != here.identity]
    address = _LOOPBACK
    if others:
        # The host of the store reaches itself by any name: its route to another host determines the interface.
        routes = (_route_to(h.address, 1) for h in others if h.address)
        address = here.address or next((route for route in routes if route), "") or _own_address()
    return listen_at(address)


def listen_at(address: str) -> socket.socket:
    """Return a socket that listens on the interface of an address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=_BACKLOG)


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
