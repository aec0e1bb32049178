"""Collectives of ranks that save or load together, over connections of their own.

The process groups of the training are never used, so a thread can communicate while training runs.
Collectives run over a tree: a rank sends its parent one message with those of all ranks below it,
and each answer goes down the same way. An error on one rank is raised on all ranks, with the number
of that rank in its message.

Several threads may save and load concurrently, in a different order on each rank. The main thread
must make its calls in the same order on all ranks, as with any collective. Each other thread uses a
channel for its call and url (`save s3://bucket/run7/step-100`), whose messages have tags of their
own, which follow from its name.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from ipaddress import ip_address
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from ucformat.errors import IntegrityError, UcformatError, UsageError
from ucformat.torch.comm.bulk import Links
from ucformat.torch.comm.connections import TreeNode
from ucformat.torch.comm.wire import (
    EVERYBODY,
    Addressed,
    Record,
    decode,
    encode,
    failures,
    name_rank,
    pack,
    unpack,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import torch.distributed as dist

    from ucformat.torch.state.elements import Memory, SharedMemory

    _Merge = Callable[[Any, Any], Any] | None
    _Then = Callable[[Any], Any] | None


# The ranks of a save or load as a group, which names a rank that died, authenticates peers and
# serves threads.
#
# They form a tree: hosts first, and below one rank of a host the others of it.
#
# Rank 0 reads the hosts of all ranks at the store of the process group, and tells each rank its
# place in the tree. So a rank makes a few requests, however many ranks there are; only rank 0 reads
# and writes a value for each, in one request if the store supports that.


T = TypeVar("T")

#: The most children of a rank on its own host, and on other hosts.
FAN_OUT = 8
# of both kinds: with those to the parent and to itself a rank has no more than 16 sockets
_MOST_CHILDREN = 14
_OTHERS = 4  # hosts by which a rank may find its interface
# how much longer ranks wait for rank 0 than it for them, so that they learn what it found
_LATE_S = 30.0
_BACKLOG = 1024
_LISTEN_HINT = "MASTER_ADDR and the route to it determine the interface on which ranks listen"
_JOIN_HINT = "make the same call on all ranks; see the first error in the log of that rank"


class MeetingStore(Protocol):
    """Where ranks leave values for each other before they are connected; the stores of torch.distributed are such.

    What waits too long, or cannot be done, raises a `RuntimeError`. One that is reached over a network has
    `host` and `port`.
    """

    def set(self, key: str, value: str) -> None:
        """Set a value."""

    def get(self, key: str) -> bytes:
        """Return a value that is set."""

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which is 0 before, and return the sum."""

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Wait until all of these are set."""

    def check(self, keys: list[str]) -> bool:
        """Return whether all of these are set."""

    def delete_key(self, key: str) -> bool:
        """Remove a value."""

    def has_extended_api(self) -> bool:
        """Return whether there are `multi_get(keys)` and `multi_set(keys, values)`."""


class Host(NamedTuple):
    """The host of a rank.

    Ranks with the same `identity` share a loopback interface. `address` is that of the interface
    through which the host reaches the store, or "" on the host of the store.
    """

    identity: str
    address: str


def ranks_of_hosts(hosts: Sequence[str]) -> list[range]:
    """Return the ranks of each host; none if those of some host are not consecutive."""
    ends = [0, *(r for r in range(1, len(hosts)) if hosts[r] != hosts[r - 1]), len(hosts)]
    return [range(a, b) for a, b in pairwise(ends)] if len(ends) == len(set(hosts)) + 1 else []


def parents_of(hosts: Sequence[str]) -> list[int]:
    """Return the parent of each rank; that of rank 0 is -1.

    Each rank has the lowest number of its subtree, whose ranks are consecutive: so values that are
    merged on the way up are in the order of ranks. If ranks of a host are not consecutive, the tree
    ignores the hosts.
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


def connect_by_store(store: MeetingStore, rank: int, size: int, timeout: float) -> Links:
    """Connect ranks with each other through a store; all of them call this."""
    if size == 1:
        return Links(TreeNode(0, 1, -1, ()), timeout, store=store)
    if not rank:
        store.set("secret", secrets.token_hex(32))
    own_host = host_here(store)
    store.set(f"host/{rank}", json.dumps(own_host))
    if not rank:
        _assign_places(store, size, timeout)
    answer = _await(store, f"place/{rank}", 0, rank, timeout + _LATE_S)
    if isinstance(answer, str):
        raise UcformatError(answer, hint=_JOIN_HINT)
    parent, children, others, host_ranks = answer
    meeting, problem, listening = None, "", None
    if rank:
        meeting, problem = _await(store, f"address/{parent}", parent, rank, timeout + _LATE_S)
    if not problem:
        try:
            listening = listen([own_host, *(Host(*h) for h in others)], 0)
        except OSError as error:
            problem = f"rank {rank} cannot listen: {error}"
    # even if it cannot listen: its children wait for this
    store.set(f"address/{rank}", json.dumps([listening and listening.getsockname()[:2], problem]))
    secret = bytes.fromhex(store.get("secret").decode())
    # if it cannot listen, its children learn that from its address, and do not connect
    place = TreeNode(
        rank, size, parent, tuple(children) if listening else (), (host_ranks[0], host_ranks[1])
    )
    links = Links(place, timeout, listening, secret, store)
    failure = UcformatError(problem, hint=_LISTEN_HINT) if problem else None
    if failure is not None and not meeting:  # the parent cannot listen, or there is none
        raise failure
    links.join(meeting and (meeting[0], meeting[1]), failure)
    if not rank:
        with suppress(RuntimeError):  # all ranks have read it; some stores cannot delete keys
            store.delete_key("secret")
    return links


def _assign_places(store: MeetingStore, size: int, timeout: float) -> None:
    """Rank 0's part: wait for all ranks, and tell each its parent, children, some other hosts, and its host's ranks."""
    names = [f"host/{r}" for r in range(size)]
    places = [f"place/{r}" for r in range(size)]
    try:
        store.wait(names, timedelta(seconds=timeout))
    except RuntimeError as error:
        why = f"rank {_first_missing(store, names)} did not join rank 0 within {timeout:g} s"
        _set_all(store, places, [json.dumps(f"{why} ({str(error).splitlines()[0][:200]})")] * size)
        return
    hosts = [Host(*json.loads(h)) for h in _get_all(store, names)]
    identities = [h.identity for h in hosts]
    parents = parents_of(identities)
    children: list[list[int]] = [[] for _ in hosts]
    for rank, parent in enumerate(parents[1:], 1):
        children[parent].append(rank)
    distinct = {h.identity: h for h in hosts} | {h.identity: h for h in hosts if h.address}
    candidates = list(distinct.values())[: _OTHERS + 1]
    others = [[h for h in candidates if h.identity != host.identity] for host in hosts]
    host_ranks = [(run.start, run.stop) for run in ranks_of_hosts(identities) for _ in run] or [
        (0, 0)
    ] * size
    _set_all(
        store,
        places,
        [json.dumps(place) for place in zip(parents, children, others, host_ranks, strict=True)],
    )


def _get_all(store: Any, names: list[str]) -> Iterable[bytes]:
    values: Iterable[bytes] = (
        store.multi_get(names) if store.has_extended_api() else map(store.get, names)
    )
    return values


def _set_all(store: Any, names: list[str], values: list[str]) -> None:
    if store.has_extended_api():
        store.multi_set(names, values)
    else:
        for name, value in zip(names, values, strict=True):
            store.set(name, value)


def _first_missing(store: MeetingStore, names: list[str]) -> int:
    """The number of the first name that is not set."""
    first, last = 0, len(names) - 1
    while first < last:
        middle = (first + last) // 2
        if store.check(names[first : middle + 1]):
            first = middle + 1
        else:
            last = middle
    return first


def _await(store: MeetingStore, name: str, other: int, rank: int, seconds: float) -> Any:
    """The value of a name, which another rank sets."""
    end = time.monotonic() + seconds
    try:
        store.wait([name], timedelta(seconds=max(0.001, end - time.monotonic())))
    except RuntimeError as error:
        raise UcformatError(
            f"rank {other} did not join rank {rank} within {seconds:g} s "
            f"({str(error).splitlines()[0][:200]})",
            hint=_JOIN_HINT,
        ) from error
    return json.loads(store.get(name))


_LOOPBACK = "127.0.0.1"


def host_here(store: MeetingStore | None) -> Host:
    """Return the host of this process."""
    return Host(_identity(), _route_to(*_address_of(store)))


def listen(hosts: Sequence[Host], rank: int) -> socket.socket:
    """Return a socket that listens on the one interface through which the other ranks connect."""
    own_host = hosts[rank]
    others = [h for h in hosts if h.identity != own_host.identity]
    address = _LOOPBACK
    if others:
        # The host of the store reaches itself by any name: its route to another host determines the
        # interface.
        routes = (_route_to(h.address, 1) for h in others if h.address)
        address = (
            own_host.address or next((route for route in routes if route), "") or _own_address()
        )
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
        routes = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM) if host else []
    except OSError:  # a name that only other hosts can resolve
        return ""
    for family, kind, protocol, _, address in routes:
        with suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # UDP: nothing is sent, but the route is chosen
            own_address = str(probe.getsockname()[0])
            local = ip_address(own_address.partition("%")[0]).is_loopback or own_address in {
                str(a[4][0]) for a in routes
            }
            return "" if local else own_address
    return ""


def _own_address() -> str:
    """The address to which this host's name resolves."""
    return str(socket.getaddrinfo(socket.gethostname(), 0, type=socket.SOCK_STREAM)[0][4][0])


def _address_of(store: Any) -> tuple[str, int]:
    """Host and port of a store; of one without, such as a FileStore, those in the environment."""
    while hasattr(store, "underlying_store"):  # one with a prefix
        store = store.underlying_store
    if hasattr(store, "host"):
        return str(store.host), int(store.port)
    return os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "1"))


#: Seconds after which an unresponsive rank is considered dead, and so the longest time that a rank
#: may write while others wait for it. A rank that dies is noticed at once, by its broken
#: connection.
TIMEOUT = 1800.0

_CHANNEL_BYTES = 7  # of the hash of a channel's name, its number; two of them do not meet
_ORDER_HINT = (
    "make the same calls in the same order on all ranks; concurrent threads need different urls"
)

_groups: dict[tuple[object, ...], Group] = {}
_locks: dict[tuple[object, ...], threading.Lock] = {}
os.register_at_fork(after_in_child=_groups.clear)


class Group:
    """A group of ranks, numbered from 0, or one channel of it, or the ranks of one host, whose lowest acts as rank 0.

    Only one thread may use a channel at a time, except that a second one may send while the first
    receives. Each message carries `call`, the name of the function that communicates: if ranks are
    in different calls, all raise.
    """

    def __init__(
        self,
        links: Links,
        place: TreeNode | None = None,
        call: str = "",
        number: int = 0,
        channels: dict[str, Group] | None = None,
    ) -> None:
        self.links, self._place = links, place or links.place
        self.call, self._number = call, number
        # by name; shared by all channels of these connections
        self._channels: dict[str, Group] = {} if channels is None else channels
        self.rank, self.size, self.timeout = self._place.rank, self._place.size, links.timeout
        self._turn, self._counting = threading.Lock(), threading.Lock()
        self._users, self._contested = 0, False

    @property
    def intact(self) -> bool:
        """Whether no connection is broken."""
        return self.links.intact

    def end(self) -> None:
        """Close the connections of all channels; the group cannot be used any more."""
        self.links.end()

    def for_call(self, call: str) -> Group:
        """Return this channel for another call."""
        return Group(self.links, self._place, call, self._number, self._channels)

    def on_host(self, *, alone: bool = False) -> Group:
        """Return this channel for collectives of the ranks of this host alone, which keep their numbers.

        Args:
            alone: of this rank alone, where ranks have nothing in common.
        """
        place = (self._place._replace(host=(0, 0)) if alone else self._place).on_host()
        return Group(self.links, place, self.call, self._number, self._channels)

    def channel(self, call: str, name: str) -> Group:
        """Return the channel of a name, which is created on first use."""
        if self.size == 1:
            return self
        with self.links.opening:
            if name not in self._channels:
                digest = hashlib.sha256(name.encode()).digest()
                number = 1 + int.from_bytes(digest[:_CHANNEL_BYTES], "little")
                self._channels[name] = Group(self.links, self._place, call, number, self._channels)
            return self._channels[name]

    def shared(self, kind: type[T]) -> T:
        """Return the one object of a type that all callers share as long as the connections exist."""
        shared_object: T = self.links.kept.setdefault(kind, kind())
        return shared_object

    @contextmanager
    def kept(self, kind: type[T]) -> Iterator[T]:
        """Use an object of a type that is kept for the next call; a concurrent call uses one of its own."""
        kept_object: T = self.links.kept.pop(kind, None) or kind()
        try:
            yield kept_object
        finally:
            self.links.kept[kind] = kept_object

    @contextmanager
    def exclusive(self) -> Iterator[Group]:
        """Use the channel in this thread alone; if several threads of a rank use it at once, all ranks raise."""
        with self._counting:
            self._users += 1
            self._contested = self._contested or self._users > 1
        try:
            with self._turn:
                yield self
        finally:
            with self._counting:
                self._users -= 1
                self._contested = self._contested and self._users > 0

    def send_bulk(self, messages: Iterable[tuple[int, Callable[[], Sequence[Memory]]]]) -> None:
        """As `Links.send_bulk`; the bytes may be changed when the next function is called."""

        def bytes_of(parts: Callable[[], Sequence[Memory]]) -> Sequence[memoryview]:
            return [part.data.cast("B") for part in parts()]

        self.links.send_bulk(
            2 * self._number + 1,
            ((rank, functools.partial(bytes_of, parts)) for rank, parts in messages),
        )

    def receive_bulk(self, shared: SharedMemory, slots: Mapping[int, tuple[int, int]]) -> None:
        """As `Links.receive_bulk`."""
        self.links.receive_bulk(2 * self._number + 1, shared, slots)

    def gather_scatter(
        self,
        value: Any,
        compute: Callable[[list[Any]], Sequence[Any]],
        kind: Any = Any,
        answer_kind: Any = Any,
    ) -> Any:
        """Gather values on rank 0, compute an answer for each rank there, and scatter the answers.

        Args:
            compute: called on rank 0 with the values of all ranks; returns the answers by rank, or
                raises on all ranks.
        """
        own = value if isinstance(value, BaseException) else {self.rank: value}

        def answers(by_rank: dict[int, Any]) -> Addressed:
            computed = compute([value for _, value in sorted(by_rank.items())])
            return Addressed(None, dict(enumerate(computed, self.rank)))

        kinds = Mapping[int, kind]
        return self.combine(own, lambda a, b: {**a, **b}, kinds, answers, answer_kind)

    def combine(
        self,
        value: Any,
        merge: _Merge = None,
        kind: Any = None,
        then: _Then = None,
        answer_kind: Any = None,
        relay: _Then = None,
    ) -> Any:
        """Merge the values of all ranks on the way to rank 0, and return the result on every rank.

        Args:
            merge: `merge(a, b)` returns the merged values of consecutive ranks, those of `a` below
                those of `b`; it must be associative. Any rank may call it; an error is raised on
                all. None: the result is None.
            then: called on rank 0 with the result; returns what all ranks get instead, or
                `Addressed`.
            relay: called on every other rank with the merged values of its subtree; returns what
                its parent gets instead. An error is raised on all ranks, with the number of that
                rank in its message.
        """
        own_record = self._own(value)
        bundles = [self.links.receive(child, 2 * self._number) for child in self._place.children]
        kind = kind if merge else None

        def merged(records: Sequence[Record]) -> Any:
            return (
                functools.reduce(merge, [value, *(decode(r.data, kind) for r in records[1:])])
                if merge
                else None
            )

        def answer() -> Sequence[Any]:
            result = merged(self._checked(own_record, bundles))
            addressed = then(result) if then else result
            addressed = addressed if isinstance(addressed, Addressed) else Addressed(addressed, {})
            return [addressed.others.get(self.rank + n, addressed.common) for n in range(self.size)]

        if self._place.parent < 0:
            return self._answer(answer, answer_kind if then else kind)
        try:
            records = [own_record, *unpack(*bundles)]
            part = failures(records, self.call) or [self._encoded(merged(records), kind, relay)]
        except Exception as error:  # noqa: BLE001 - raised on all ranks
            part = [Record(self.rank, True, self.call, encode(error, BaseException))]
        self.links.send(self._place.parent, 2 * self._number, pack(part))
        return self._answered(answer_kind if then else kind)

    def _own(self, value: Any) -> Record:
        """The record of this rank: an error, or without data."""
        if self._contested and not isinstance(value, BaseException):
            value = UsageError(
                f"several threads call {self.call} with the same url at once, and ranks cannot "
                "tell these calls apart",
                hint="pass a different process group as `group` in each thread",
            )
        return (
            self._failed(value)
            if isinstance(value, BaseException)
            else Record(self.rank, False, self.call, b"")
        )

    def _failed(self, error: BaseException) -> Record:
        """The record of an error of this rank."""
        if self.size == 1:
            raise error
        received = decode(encode(error, BaseException), BaseException)  # as the other ranks know it
        return Record(
            self.rank,
            True,
            self.call,
            encode(name_rank(self.rank, received, self.size), BaseException),
        )

    def _encoded(self, value: Any, kind: Any, relay: _Then = None) -> Record:
        """The record of a value, or of what `relay` makes of it; of an error if that or the encoding fails."""
        try:
            return Record(
                self.rank, False, self.call, encode(relay(value) if relay else value, kind)
            )
        except Exception as error:  # noqa: BLE001 - raised on all ranks
            return self._failed(error)

    def _checked(self, own_record: Record, bundles: Sequence[bytearray]) -> list[Record]:
        """Rank 0's check: the records by rank, if all ranks are in the same call, and none has failed."""
        records = sorted([own_record, *unpack(*bundles)], key=attrgetter("rank"))
        if other := next((r for r in records if r.call != self.call), None):
            calls = f"rank {other.rank} calls {other.call} while rank {self.rank} calls {self.call}"
            raise UsageError(calls, hint=_ORDER_HINT)
        if failed := next((r for r in records if r.failed), None):
            raise decode(failed.data, BaseException)
        return records

    def _answer(self, compute: Callable[[], Sequence[Any]], kind: Any) -> Any:
        """Rank 0's part of a collective: compute the answers, and send them."""
        try:
            answers = compute()
            if self.size == 1:
                return answers[0]
            # by identity: an object that most ranks get is encoded and sent once, for all
            ((common, _),) = Counter(map(id, answers[1:])).most_common(1)
            encoded = {id(v): encode(v, kind) for v in {id(v): v for v in answers[1:]}.values()}
            others = [
                (rank, id(v))
                for rank, v in enumerate(answers[1:], self.rank + 1)
                if id(v) != common
            ]
            records = [Record(rank, False, self.call, encoded[v]) for rank, v in others]
            records.append(Record(EVERYBODY, False, self.call, encoded[common]))
        except Exception as error:
            self._pass_on([Record(EVERYBODY, True, self.call, encode(error, BaseException))])
            raise
        self._pass_on(records)
        return answers[0]

    def _answered(self, kind: Any) -> Any:
        """The answer for this rank; those for the ranks below are passed on."""
        try:
            records = unpack(self.links.receive(self._place.parent, 2 * self._number))
        except IntegrityError as error:
            self._pass_on([Record(EVERYBODY, True, self.call, encode(error, BaseException))])
            raise
        self._pass_on(records)
        # the last record is that for everybody
        own_answer = next((r for r in records if r.rank == self.rank), records[-1])
        if own_answer.failed:
            raise decode(own_answer.data, BaseException)
        return decode(own_answer.data, kind)

    def _pass_on(self, records: Sequence[Record]) -> None:
        """Send each child the answers for the ranks of its subtree."""
        for child in self._place.children:
            child_records = [
                r for r in records if r.rank == EVERYBODY or r.rank in self.links.below[child]
            ]
            self.links.send(child, 2 * self._number, pack(child_records))

    @contextmanager
    def sharing_errors(self) -> Iterator[None]:
        """If an error is raised inside, send it to the other ranks in their next collective, so that all raise it."""
        try:
            yield
        except Exception as error:
            self.combine(error)
            raise


_kept_alone: dict[type, Any] = {}  # by `Group.kept`, without torch.distributed


def single_process_group() -> Group:
    """Return a group that consists of this process alone."""
    return Group(Links(TreeNode(0, 1, -1, ()), TIMEOUT))


def group_of(
    process_group: dist.ProcessGroup | None = None, timeout: float = TIMEOUT, call: str = ""
) -> Group:
    """Return the group of the ranks of a process group; it is created on first use, in a collective call.

    The main thread always gets the same channel; any other thread gets one for `call` and the
    process group. Without torch.distributed the group is this process alone.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return group_alone()
    torch_group = process_group or dist.group.WORLD
    store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - there is no public way to the store
    members = Members(
        store,
        lambda prefix: dist.PrefixStore(prefix, store),
        tuple(dist.get_process_group_ranks(torch_group)),
        dist.get_rank(),
        dist.get_world_size(),
    )
    return group_at(members, timeout, call, str(torch_group.group_name))


class Members(NamedTuple):
    """The ranks of a group, and where they meet.

    Attributes:
        store: the same object as long as the ranks run.
        below: returns the part of the store whose names have a prefix.
        ranks: which of all ranks are members.
        rank: which of all ranks this process is.
        world: how many ranks there are.
    """

    store: Any
    below: Callable[[str], Any]
    ranks: tuple[int, ...]
    rank: int
    world: int


def group_alone() -> Group:
    """Return the group of a process that has no others; what it keeps is kept for its next call."""
    _groups.clear()
    alone = single_process_group()
    alone.links.kept = _kept_alone
    return alone


def group_at(members: Members, timeout: float, call: str = "", name: str = "") -> Group:
    """Return the group of the ranks that meet at a store; see `group_of`.

    Args:
        name: of the group, among those in which one thread may make the same call.
    """
    _kept_alone.clear()
    key = (id(members.store), members.ranks, timeout)
    with _locks.setdefault(key, threading.Lock()):
        if key not in _groups or not _groups[key].intact:
            # before the ranks were started anew
            for old in [k for k, g in _groups.items() if g.links.store is not members.store]:
                del _groups[old]
            _groups[key] = _make(members, timeout)
        group = _groups[key]
    function = call.partition(" ")[0]
    if not call or threading.current_thread() is threading.main_thread():
        return group.for_call(function)
    return group.channel(function, f"{name} {call}")


def _make(members: Members, timeout: float) -> Group:
    """A new group. Each rank counts its attempts in the store, so that after a failure all ranks use a new prefix."""
    store, ranks = members.store, members.ranks
    name = (
        f"ucformat/{'-'.join(map(str, ranks)) if len(ranks) < members.world else 'all'}/{timeout}"
    )
    rank = ranks.index(members.rank)
    count = store.add(f"{name}/count/{rank}", 1) if len(ranks) > 1 else 1
    links = connect_by_store(members.below(f"{name}/{count}"), rank, len(ranks), timeout)
    links.store = store  # without the prefix, to be compared
    links.members = None if ranks == tuple(range(len(ranks))) else ranks
    return Group(links)


@contextmanager
def group_for_call(
    call: str,
    place: object,
    process_group: dist.ProcessGroup | None = None,
    timeout: float = TIMEOUT,
    find: Callable[[Any, float, str], Group] = group_of,
) -> Iterator[Group]:
    """Use the group of a process group's ranks for one collective call with a url, or what has one.

    Concurrent calls in threads other than the main one are distinguished by url and process group;
    if two of them have both in common, all ranks raise a UsageError.

    Args:
        find: returns the group, as `group_of` does.
    """
    group = find(process_group, timeout, f"{call} {getattr(place, 'url', place)}")
    on_main_thread = threading.current_thread() is threading.main_thread()
    with nullcontext() if on_main_thread else group.exclusive():
        yield group


def is_live(links: Links) -> bool:
    """Check whether a group is current: neither broken nor from before the last `init_process_group`."""
    return links.intact and any(g.links is links for g in _groups.values())
