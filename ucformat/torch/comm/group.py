"""Collectives of ranks that save or load together, over connections of their own.

The process groups of the training are never used, so a thread can communicate while training runs. The connections are
set up through the store of the default process group, under a prefix of their own. An error on one rank is raised on
all ranks, with the number of that rank in its message.

Several threads may save and load concurrently, in a different order on each rank. The main thread must make its calls
in the same order on all ranks, as with any collective. Each other thread uses a channel for its call and url (`save
s3://bucket/run7/step-100`), whose messages have tags of their own; the store assigns its number, the same on all ranks.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from ucformat.errors import UcformatError, UsageError
from ucformat.torch.comm.handshake import Host, connect, gather_through_store, host_here, listen
from ucformat.torch.comm.links import Links
from ucformat.torch.comm.wire import decode, encode, message, name_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch.distributed as dist
    from numpy.typing import NDArray

    from ucformat.torch.comm.handshake import Peer
    from ucformat.torch.state.elements import Memory, SharedMemory

__all__ = [
    "TIMEOUT",
    "Group",
    "connect_by_store",
    "group_for_call",
    "group_of",
    "is_live",
    "single_process_group",
]

#: Seconds after which an unresponsive rank is considered dead, and so the longest time that a rank may write while
#: others wait for it. A rank that dies is noticed at once, by its broken connection.
TIMEOUT = 1800.0

_LISTEN_HINT = "MASTER_ADDR and the route to it determine the interface on which ranks listen"

_groups: dict[tuple[object, ...], Group] = {}
#: By store, ranks and timeout.
_locks: dict[tuple[object, ...], threading.Lock] = {}
os.register_at_fork(after_in_child=_groups.clear)


class Group:
    """A group of ranks, numbered from 0, or one channel of it.

    Only one thread may use a channel at a time, except that a second one may send while the first receives. Each
    message carries `call`, the name of the function that communicates: if ranks are in different calls, all raise.
    """

    def __init__(self, links: Links) -> None:
        self._set_up(links, "", 0, {})

    def _set_up(self, links: Links, call: str, number: int, channels: dict[str, Group]) -> Group:
        self.links, self.call, self._number = links, call, number
        self._channels = channels  # by name; shared by all channels of these connections
        self.rank, self.size, self.timeout = links.rank, links.size, links.timeout
        self.cache = links.cache  # what callers keep from one call to the next, as long as the connections exist
        self._turn = threading.Lock()
        self._users, self._counting = 0, threading.Lock()
        self._contested = False
        return self

    @property
    def intact(self) -> bool:
        """Whether no connection is broken."""
        return self.links.intact

    def end(self) -> None:
        """Close the connections of all channels; the group cannot be used any more."""
        self.links.end()

    def for_call(self, call: str) -> Group:
        """Return this channel for another call.

        Args:
            call: the name of the function that communicates.
        """
        return Group.__new__(Group)._set_up(self.links, call, self._number, self._channels)  # noqa: SLF001 - own class

    def channel(self, call: str, name: str) -> Group:
        """Return the channel of a name, which is created on first use.

        Args:
            call: the name of the function that communicates.
            name: of the channel, the same on all ranks.
        """
        if self.size == 1:
            return self
        links = self.links
        with links.opening:
            if name not in self._channels:
                with links.communicating("to open a channel at the store of", 0):
                    number = links.channel_number(name)
                made = Group.__new__(Group)._set_up(links, call, number, self._channels)  # noqa: SLF001 - own class
                self._channels[name] = made
            return self._channels[name]

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

    def send(self, data: NDArray[np.uint8], to: int) -> None:
        """Send bytes to a rank; messages, and separately bulk data, are received in the order in which they are sent.

        Args:
            data: the bytes, contiguous; may be changed when this returns.
            to: the receiving rank.
        """
        if self.size > 1 and data.size:
            self.links.send(to, 2 * self._number, data.data.cast("B"))

    def send_bulk(self, parts: Sequence[Memory], to: int) -> None:
        """Send bulk data to a rank when it has its buffer ready.

        Args:
            parts: the bytes, each part contiguous; may be changed when this returns.
            to: the receiving rank.
        """
        if self.size > 1 and any(part.size for part in parts):
            self.links.send_bulk(to, 2 * self._number + 1, [part.data.cast("B") for part in parts])

    def receive(self, out: NDArray[np.uint8], source: int) -> None:
        """Receive bytes from a rank.

        Args:
            out: the buffer to fill, of exactly the size that is sent.
            source: the sending rank.
        """
        if self.size > 1 and out.size:
            out[...] = np.frombuffer(self._received(source), np.uint8)

    def receive_bulk(self, shared: SharedMemory, slots: Mapping[int, tuple[int, int]]) -> None:
        """Receive bulk data from several ranks.

        Args:
            shared: the memory to fill.
            slots: by sending rank, the bytes `[start, stop)` of the memory, exactly as many as are sent.
        """
        wanted = {source: (start, stop) for source, (start, stop) in slots.items() if self.size > 1 and stop > start}
        self.links.receive_bulk(2 * self._number + 1, shared, wanted)

    def _received(self, source: int) -> bytearray:
        return self.links.receive(source, 2 * self._number)

    def gather_scatter(
        self, value: Any, compute: Callable[[list[Any]], Sequence[Any]], kind: Any = Any, answer_kind: Any = Any
    ) -> Any:
        """Gather values on rank 0, compute an answer for each rank there, and scatter the answers.

        Args:
            value: of this rank; an exception is raised on all ranks, with the number of this rank in its message.
            compute: called on rank 0 with the values of all ranks; returns the answers by rank, or raises on all ranks.
            kind: the type of the values, an annotation that `ucformat.torch.comm.wire` supports.
            answer_kind: the type of the answers.

        Returns:
            the answer for this rank.
        """
        if self._contested and not isinstance(value, BaseException):
            value = UsageError(
                f"several threads call {self.call} with the same url at once, and ranks cannot tell these calls apart",
                hint="pass a different process group as `group` in each thread",
            )
        if self.rank:
            try:
                encoded = self._encode(value, kind)
            except UsageError as error:
                encoded = self._encode(error, kind)
            self._send_message(0, encoded)
            answer = self._receive_message(0).value(answer_kind)
        else:
            answer = self._answer(value, compute, kind, answer_kind)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _answer(self, value: Any, compute: Callable[[list[Any]], Sequence[Any]], kind: Any, answer_kind: Any) -> Any:
        """Rank 0's part of `gather_scatter`."""
        found: Sequence[Any] = ()
        try:
            received = [self._receive_message(r) for r in range(1, self.size)]
            self._check_same_call(received)
            errors = [value if isinstance(value, BaseException) else None, *(m.error for m in received)]
            failed = next(((r, e) for r, e in enumerate(errors) if e is not None), None)
            if failed is not None:
                found = [name_rank(*failed, self.size)] * self.size
            else:
                found = compute([value, *(m.value(kind) for m in received)])
            encoded = self._encode_all(found, answer_kind)
        except Exception as error:  # noqa: BLE001 - raised on all ranks
            found = [error] * self.size
            encoded = self._encode_all(found, answer_kind)
        for rank, data in enumerate(encoded, 1):
            self._send_message(rank, data)
        return found[0]

    def _encode_all(self, values: Sequence[Any], kind: Any) -> list[bytes]:
        """The messages to all ranks but rank 0; a value that consecutive ranks get is encoded once."""
        encoded: list[bytes] = []
        for rank in range(1, self.size):
            same = rank > 1 and values[rank] is values[rank - 1]
            encoded.append(encoded[-1] if same else self._encode(values[rank], kind))
        return encoded

    def _check_same_call(self, received: Sequence[_Envelope]) -> None:
        """UsageError if ranks are in different calls."""
        for rank, envelope in enumerate(received, 1):
            if envelope.call != self.call:
                raise UsageError(
                    f"rank {rank} calls {envelope.call} while rank 0 calls {self.call}",
                    hint="make the same calls in the same order on all ranks; concurrent threads need different urls",
                )

    def _encode(self, value: Any, kind: Any) -> bytes:
        """A message with a value or an error; UsageError if the value cannot be encoded."""
        if isinstance(value, BaseException):
            return encode(_Envelope(self.call, value, b""), _Envelope)
        return encode(_Envelope(self.call, None, encode(value, kind)), _Envelope)

    def _send_message(self, to: int, data: bytes) -> None:
        self.send(np.frombuffer(data, np.uint8), to)

    def _receive_message(self, source: int) -> _Envelope:
        envelope: _Envelope = decode(self._received(source), _Envelope)
        return envelope

    @contextmanager
    def sharing_errors(self) -> Iterator[None]:
        """If an error is raised inside, send it to the other ranks in their next collective, so that all raise it."""
        try:
            yield
        except Exception as error:
            self.gather_scatter(error, list)
            raise

    def all_gather(self, value: Any, kind: Any = Any) -> list[Any]:
        """Gather the values of all ranks on every rank.

        Args:
            value: of this rank; an exception is raised on all ranks.
            kind: the type of the values, as for `gather_scatter`.
        """
        found: list[Any] = self.gather_scatter(value, lambda values: [values] * self.size, kind, list[kind])
        return found


@message
class _Envelope:
    """A message of a collective: the call of the sender, and its error or its encoded value."""

    call: str
    error: BaseException | None
    data: bytes

    def value(self, kind: Any) -> Any:
        """The value, or the error."""
        return decode(self.data, kind) if self.error is None else self.error


def single_process_group() -> Group:
    """Return a group that consists of this process alone."""
    return Group(Links({}, 0, 1, TIMEOUT))


def group_of(process_group: dist.ProcessGroup | None = None, timeout: float = TIMEOUT, call: str = "") -> Group:
    """Return the group of the ranks of a process group; it is created on first use, in a collective call.

    The main thread always gets the same channel; any other thread gets one for `call` and the process group. Without
    torch.distributed the group is this process alone.

    Args:
        process_group: the ranks (None: all).
        timeout: seconds after which an unresponsive rank is considered dead.
        call: the function that communicates and what it works on, as `save s3://bucket/run7/step-100`.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        _groups.clear()
        return single_process_group()
    wanted = process_group or dist.group.WORLD
    ranks = tuple(dist.get_process_group_ranks(wanted))
    store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - there is no public way to the store
    key = (id(store), ranks, timeout)
    with _locks.setdefault(key, threading.Lock()):
        if key not in _groups or not _groups[key].intact:
            for old in [k for k, g in _groups.items() if g.links.store is not store]:  # before init_process_group
                del _groups[old]
            _groups[key] = _make(store, ranks, timeout)
        made = _groups[key]
    function = call.partition(" ")[0]
    if not call or threading.current_thread() is threading.main_thread():
        return made.for_call(function)
    return made.channel(function, f"{wanted.group_name} {call}")


def _make(store: dist.Store, ranks: tuple[int, ...], timeout: float) -> Group:
    """A new group. Each rank counts its attempts in the store, so that after a failure all ranks use a new prefix."""
    import torch.distributed as dist

    name = f"ucformat/{'-'.join(map(str, ranks)) if len(ranks) < dist.get_world_size() else 'all'}/{timeout}"
    rank = ranks.index(dist.get_rank())
    count = store.add(f"{name}/count/{rank}", 1) if len(ranks) > 1 else 1
    links = connect_by_store(dist.PrefixStore(f"{name}/{count}", store), rank, len(ranks), timeout)
    links.store = store
    return Group(links)


def connect_by_store(store: dist.Store, rank: int, size: int, timeout: float) -> Links:
    """Connect ranks with each other through a store; all of them call this.

    Args:
        store: used by nothing else.
        rank: of this process, from 0.
        size: the number of ranks.
        timeout: seconds to wait for the other ranks, and then for each message.

    Raises:
        UcformatError: a rank did not join in time, or cannot listen.
    """
    if size == 1:
        return Links({}, rank, size, timeout, store)
    if not rank:
        store.set("secret", secrets.token_hex(32))
    mine = host_here(store)
    known = gather_through_store(store, "host", json.dumps([mine.identity, mine.address]), rank, size, timeout)
    try:
        listener = listen([Host(*h) for h in known], rank)
    except OSError as error:
        store.set(f"address/{rank}", json.dumps(["", str(error)]))
        raise UcformatError(f"rank {rank} cannot listen: {error}", hint=_LISTEN_HINT) from error
    with listener:
        known = gather_through_store(store, "address", json.dumps(listener.getsockname()[:2]), rank, size, timeout)
        for other, (host, why) in enumerate(known):
            if not host:
                raise UcformatError(f"rank {other} cannot listen: {why}", hint=_LISTEN_HINT)
        secret = bytes.fromhex(store.get("secret").decode())
        peers: dict[int, Peer] = connect(listener, rank, [(str(h), int(p)) for h, p in known], secret, timeout)
    if not rank:
        with suppress(RuntimeError):  # all ranks have read it; some stores cannot delete keys
            store.delete_key("secret")
    return Links(peers, rank, size, timeout, store)


@contextmanager
def group_for_call(process_group: dist.ProcessGroup | None, timeout: float, call: str, url: object) -> Iterator[Group]:
    """Use the group of the ranks of a process group for one collective call with a url.

    Concurrent calls in threads other than the main one are distinguished by url and process group; if two of them have
    both in common, all ranks raise a UsageError.

    Args:
        process_group: the ranks (None: all).
        timeout: seconds after which an unresponsive rank is considered dead.
        call: the name of the public function.
        url: what it works on.
    """
    group = group_of(process_group, timeout, f"{call} {url}")
    if threading.current_thread() is threading.main_thread():
        yield group
    else:
        with group.exclusive():
            yield group


def is_live(links: Links) -> bool:
    """Check whether a group is current: neither broken nor from before the last `init_process_group`.

    Args:
        links: the connections of the group.
    """
    return links.intact and any(g.links is links for g in _groups.values())
