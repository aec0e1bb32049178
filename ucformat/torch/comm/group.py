"""Connections of our own among the ranks that save or load together; the training's groups are never used.

They are made over the store of the process group, under a prefix of its own, and known to nobody else, so a thread can
use them while training runs. Whatever goes wrong on one rank comes to all of them as one error that names the rank.

Several threads may save and load at once, in another order on each rank. What the main thread does is in one order on
all ranks, as collectives are. Any other thread has a channel for what it does (`save s3://bucket/run7/step-100`), whose
messages have tags of their own: its number is given out by the store, so it is the same on all ranks.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.distributed as dist

from ucformat.errors import UcformatError, UsageError
from ucformat.torch.comm.handshake import Host, connect, host_here, listen
from ucformat.torch.comm.links import Links
from ucformat.torch.comm.wire import decode, encode, message

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from ucformat.torch.comm.handshake import Peer

__all__ = [
    "TIMEOUT",
    "Group",
    "connect_by_store",
    "group_for_call",
    "group_of",
    "is_live",
    "name_rank",
    "single_process_group",
]

#: Seconds after which an unresponsive rank is considered dead, so the longest that one may write while others wait.
#: One that dies is noticed at once, by its broken connection.
TIMEOUT = 1800.0

_NO_PLACE = "MASTER_ADDR and the route to it determine the interface on which ranks listen"

_made: dict[tuple[object, ...], Group] = {}
_making: dict[tuple[object, ...], threading.Lock] = {}
os.register_at_fork(after_in_child=_made.clear)


class Group:
    """Some ranks, and this process among them; ranks count from 0 in this group.

    One channel of it: only one thread may use it at a time, save that another one may send while this one receives.
    `what` says for which call, and is told with each message: ranks that call different things get an error.
    """

    def __init__(self, links: Links) -> None:
        self._on(links, "", 0, {})

    def _on(self, links: Links, what: str, number: int, channels: dict[str, Group]) -> Group:
        self.links, self.what, self._number = links, what, number
        self._channels = channels  # by name; the same of all groups that share the connections
        self.rank, self.size, self.timeout = links.rank, links.size, links.timeout
        self.memory = links.memory  # what users remember from one act to the next, and forget with the connections
        self._turn = threading.Lock()
        self._users, self._counting = 0, threading.Lock()
        self._contested = False
        return self

    @property
    def whole(self) -> bool:
        """Whether no connection was found broken."""
        return self.links.whole

    def end(self) -> None:
        """End the connections of all channels; the group can do nothing more."""
        self.links.end()

    def for_call(self, what: str) -> Group:
        """This channel, for a call of this kind."""
        return Group.__new__(Group)._on(self.links, what, self._number, self._channels)  # noqa: SLF001 - one of us

    def channel(self, what: str, name: str) -> Group:
        """The channel of this name, for a call of this kind, whichever rank asks for it first."""
        if self.size == 1:
            return self
        links = self.links
        with links.opening:
            if name not in self._channels:
                with links.communicating("to open a channel at the store of", 0):
                    number = links.number_of(name)
                made = Group.__new__(Group)._on(links, what, number, self._channels)  # noqa: SLF001 - one of us
                self._channels[name] = made
            return self._channels[name]

    @contextmanager
    def exclusive(self) -> Iterator[Group]:
        """Use the channel in this thread alone; where several of one rank use it at once, all ranks raise."""
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

    def send(self, data: NDArray[np.uint8], to: int, *, bulk: bool = False) -> None:
        """Send bytes; returns when they are gone.

        Those of one rank for another are received in the order in which they are sent, `bulk` and others apart.
        """
        if self.size > 1 and data.size:
            self.links.send(to, self._tag(bulk), data.data.cast("B"), bulk=bulk)

    def receive(self, out: NDArray[np.uint8], source: int, *, bulk: bool = False) -> None:
        """Fill `out` with the bytes that a rank sends."""
        self.receive_all({source: out}, bulk=bulk)

    def receive_all(self, buffers: Mapping[int, NDArray[np.uint8]], *, bulk: bool = False) -> None:
        """Fill several buffers, each with the bytes that the rank of this number sends."""
        wanted = {source: out for source, out in buffers.items() if self.size > 1 and out.size}
        if bulk:
            self.links.receive_bulk(self._tag(bulk), {source: out.data.cast("B") for source, out in wanted.items()})
            return
        for source, out in wanted.items():
            out[...] = np.frombuffer(self._received(source), np.uint8)

    def _received(self, source: int) -> bytearray:
        return self.links.receive(source, self._tag(bulk=False))

    def _tag(self, bulk: bool) -> int:  # noqa: FBT001
        return 2 * self._number + bulk

    def gather_scatter(
        self, value: Any, then: Callable[[list[Any]], Sequence[Any]], kind: Any = Any, answers: Any = Any
    ) -> Any:
        """Gather values on rank 0, where `then` makes of them an answer for each rank; this rank's answer.

        A value, or an outcome of `then`, that is an exception is raised on all ranks, and says which rank it is of.

        Args:
            value: what this rank tells.
            then: called on rank 0 with the values of all ranks.
            kind: of what kind the values are, as `ucformat.torch.comm.wire` has it.
            answers: of what kind the answers are.
        """
        if self._contested and not isinstance(value, BaseException):
            value = UsageError(
                f"several threads call {self.what} with the same url at once, and ranks cannot tell them apart",
                hint="give each a process group of its own as `group`",
            )
        if self.rank:
            try:
                said = self._encode(value, kind)
            except UsageError as error:
                said = self._encode(error, kind)
            self._send_message(0, said)
            answer = self._receive_message(0).value(answers)
        else:
            answer = self._answer(value, then, kind, answers)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _answer(self, value: Any, then: Callable[[list[Any]], Sequence[Any]], kind: Any, answers: Any) -> Any:
        """Rank 0's half of `gather_scatter`."""
        found: Sequence[Any] = ()
        try:
            told = [self._receive_message(r) for r in range(1, self.size)]
            self._check_same_call(told)
            errors = [value if isinstance(value, BaseException) else None, *(t.error for t in told)]
            failed = next(((r, e) for r, e in enumerate(errors) if e is not None), None)
            if failed is not None:
                found = [name_rank(*failed, self.size)] * self.size
            else:
                found = then([value, *(t.value(kind) for t in told)])
            said = self._encode_all(found, answers)
        except Exception as error:  # noqa: BLE001 - it is everybody's
            found = [error] * self.size
            said = self._encode_all(found, answers)
        for rank, one in enumerate(said, 1):
            self._send_message(rank, one)
        return found[0]

    def _encode_all(self, values: Sequence[Any], kind: Any) -> list[bytes]:
        """The messages for all ranks but the first; what several get is encoded once."""
        said: list[bytes] = []
        for rank in range(1, self.size):
            same = rank > 1 and values[rank] is values[rank - 1]
            said.append(said[-1] if same else self._encode(values[rank], kind))
        return said

    def _check_same_call(self, told: Sequence[_Envelope]) -> None:
        """UsageError where ranks are in different calls."""
        for rank, one in enumerate(told, 1):
            if one.what != self.what:
                raise UsageError(
                    f"rank {rank} calls {one.what} while rank 0 calls {self.what}",
                    hint="make the same calls in the same order on all ranks; concurrent threads need different urls",
                )

    def _encode(self, value: Any, kind: Any) -> bytes:
        """A message with a value, or with why there is none; UsageError where that cannot be told."""
        if isinstance(value, BaseException):
            return encode(_Envelope(self.what, value, b""), _Envelope)
        return encode(_Envelope(self.what, None, encode(value, kind)), _Envelope)

    def _send_message(self, to: int, data: bytes) -> None:
        self.send(np.frombuffer(data, np.uint8), to)

    def _receive_message(self, source: int) -> _Envelope:
        said: _Envelope = decode(self._received(source), _Envelope)
        return said

    @contextmanager
    def sharing_errors(self) -> Iterator[None]:
        """Send what is raised inside to the other ranks in their next `gather_scatter`, so that all ranks raise it."""
        try:
            yield
        except Exception as error:
            self.gather_scatter(error, list)
            raise

    def all_gather(self, value: Any, kind: Any = Any) -> list[Any]:
        """The values of all ranks, on every rank; an exception among them is raised on all."""
        found: list[Any] = self.gather_scatter(value, lambda values: [values] * self.size, kind, list[kind])
        return found


@message
class _Envelope:
    """What a rank sends in a collective, and in which call; `told` is its value, encoded."""

    what: str
    error: BaseException | None
    told: bytes

    def value(self, kind: Any) -> Any:
        """The value, or the error."""
        return decode(self.told, kind) if self.error is None else self.error


def single_process_group() -> Group:
    """The group of this process alone."""
    return Group(Links({}, 0, 1, TIMEOUT))


def group_of(process_group: dist.ProcessGroup | None = None, timeout: float = TIMEOUT, what: str = "") -> Group:
    """Our group over the ranks of a process group (None: of all), made when it is first asked for.

    All of its ranks must ask. Without torch.distributed it is this process alone. In the main thread it is one channel,
    whatever it is for; in others it is that of `what` and the process group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        _made.clear()
        return single_process_group()
    wanted = process_group or dist.group.WORLD
    ranks = tuple(dist.get_process_group_ranks(wanted))
    store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - there is no public way to the store
    key = (id(store), ranks, timeout)
    with _making.setdefault(key, threading.Lock()):
        if key not in _made or not _made[key].whole:
            for old in [k for k, g in _made.items() if g.links.store is not store]:  # of an earlier init_process_group
                del _made[old]
            _made[key] = _make(store, ranks, timeout)
        made = _made[key]
    call = what.partition(" ")[0]
    if not what or threading.current_thread() is threading.main_thread():
        return made.for_call(call)
    return made.channel(call, f"{wanted.group_name} {what}")


def _make(store: dist.Store, ranks: tuple[int, ...], timeout: float) -> Group:
    """A new group. Each rank counts in the store how often it made this one: one that broke is made anew by all."""
    name = f"ucformat/{'-'.join(map(str, ranks)) if len(ranks) < dist.get_world_size() else 'all'}/{timeout}"
    rank = ranks.index(dist.get_rank())
    count = store.add(f"{name}/count/{rank}", 1) if len(ranks) > 1 else 1
    links = connect_by_store(dist.PrefixStore(f"{name}/{count}", store), rank, len(ranks), timeout)
    links.store = store
    return Group(links)


def connect_by_store(store: dist.Store, rank: int, size: int, timeout: float) -> Links:
    """The connections among ranks that meet at a store, which nobody else uses; all of them call this.

    Raises:
        UcformatError: one does not come within so many seconds.
    """
    if size == 1:
        return Links({}, rank, size, timeout, store)
    if not rank:
        store.set("secret", secrets.token_hex(32))
    mine = host_here(store)
    known = _gather_at_store(store, "host", json.dumps([mine.identity, mine.address]), rank, size, timeout)
    try:
        listener = listen([Host(*h) for h in known], rank)
    except OSError as error:
        store.set(f"place/{rank}", json.dumps(["", str(error)]))
        raise UcformatError(f"rank {rank} cannot listen: {error}", hint=_NO_PLACE) from error
    with listener:
        known = _gather_at_store(store, "place", json.dumps(listener.getsockname()[:2]), rank, size, timeout)
        for other, (host, why) in enumerate(known):
            if not host:
                raise UcformatError(f"rank {other} cannot listen: {why}", hint=_NO_PLACE)
        secret = bytes.fromhex(store.get("secret").decode())
        peers: dict[int, Peer] = connect(listener, rank, [(str(h), int(p)) for h, p in known], secret, timeout)
    if not rank:
        with suppress(RuntimeError):  # all have read it; some stores forget nothing
            store.delete_key("secret")
    return Links(peers, rank, size, timeout, store)


def _gather_at_store(store: dist.Store, what: str, mine: str, rank: int, size: int, timeout: float) -> list[Any]:
    """What each rank says at the store."""
    store.set(f"{what}/{rank}", mine)
    names = [f"{what}/{r}" for r in range(size)]
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


@contextmanager
def group_for_call(process_group: dist.ProcessGroup | None, timeout: float, call: str, url: object) -> Iterator[Group]:
    """Our group for a call with a url, which all ranks make.

    In other threads than the main one, calls that ranks make at once are told apart by the url, and by the process
    group: where two have both in common, all ranks raise a UsageError.
    """
    group = group_of(process_group, timeout, f"{call} {url}")
    if threading.current_thread() is threading.main_thread():
        yield group
    else:
        with group.exclusive():
            yield group


def is_live(links: Links) -> bool:
    """Whether a group is the one that `group_of` gives: neither broken, nor of an earlier init_process_group."""
    return links.whole and any(g.links is links for g in _made.values())


def name_rank(rank: int, error: BaseException, size: int) -> BaseException:
    """The error, saying whose it is."""
    if size == 1:
        return error
    if isinstance(error, UcformatError):
        return type(error)(f"rank {rank}: {error.message}", hint=error.hint)
    return UcformatError(f"rank {rank}: {type(error).__name__}: {error}", hint="its log has the traceback")
