"""A gloo group of our own for the ranks that save or load together; the training's groups are never used.

It is made over the store of the process group, under a prefix of its own, and known to nobody else, so a thread or
another process can use it while training runs. Whatever goes wrong on one rank comes to all of them as one error that
names the rank. When a rank dies, the others learn it from their broken connections, or by the time-out; whoever learns
it notes in the store whom it waited for, and ends its own connections, so that all learn it and name the same rank.

Several threads may save and load at once, in another order on each rank. What the main thread does is in one order on
all ranks, as collectives are. Any other thread has a channel for what it does (`save s3://bucket/run7/step-100`), whose
messages have tags of their own: its number is given out by the store, so it is the same on all ranks.
"""

from __future__ import annotations

import os
import pickle
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from ucformat.errors import UcformatError, UsageError
from ucformat.torch.links import Links

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from ucformat.storage.base import Bytes

__all__ = ["TIMEOUT", "Group", "group_of", "is_live", "lone", "meeting", "of_rank"]

#: Seconds after which a rank that says nothing is taken for dead, so the longest that one may write while others wait.
#: One that dies is noticed at once, by its broken connection.
TIMEOUT = 1800.0

_made: dict[tuple[object, ...], Group] = {}
_making: dict[tuple[object, ...], threading.Lock] = {}
os.register_at_fork(after_in_child=_made.clear)


class Group:
    """Some ranks, and this process among them; ranks count from 0 in this group.

    One channel of it: only one thread may use it at a time, save that another one may send while this one receives.
    `what` says for which call, and is told with each message: ranks that call different things get an error.
    """

    def __init__(self, store: dist.Store | None, rank: int, size: int, timeout: float = TIMEOUT) -> None:
        self._on(Links(store, rank, size, timeout), "", 0)

    def _on(self, links: Links, what: str, number: int) -> Group:
        self.links, self.what, self._number = links, what, number
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

    def calling(self, what: str) -> Group:
        """This channel, for a call of this kind."""
        return Group.__new__(Group)._on(self.links, what, self._number)  # noqa: SLF001 - one of us

    def channel(self, what: str, name: str) -> Group:
        """The channel of this name, for a call of this kind, whichever rank asks for it first."""
        if self.size == 1:
            return self
        links = self.links
        with links.opening:
            if name not in links.channels:
                with links.waiting("to open a channel at the store of", 0):
                    number = links.number_of(name)
                links.channels[name] = Group.__new__(Group)._on(links, what, number)  # noqa: SLF001
            return links.channels[name]

    @contextmanager
    def alone(self) -> Iterator[Group]:
        """Use the channel of this thread's; where several threads of some rank do at once, all ranks raise it."""
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
        if self.links.pg is not None and data.size:
            with self.links.waiting("to send to", to):
                self.links.pg.send([_tensor(data)], to, self._tag(bulk)).wait()

    def receive(self, out: NDArray[np.uint8], source: int, *, bulk: bool = False) -> None:
        """Fill `out` with the bytes that a rank sends."""
        self.receive_all([(out, source)], bulk=bulk)

    def receive_all(self, buffers: Sequence[tuple[NDArray[np.uint8], int]], *, bulk: bool = False) -> None:
        """Fill several buffers, each with the bytes that one rank sends."""
        works: list[tuple[dist.Work, int]] = []
        for out, source in buffers:
            if self.links.pg is not None and out.size:
                with self.links.waiting("to receive from", source):
                    works.append((self.links.pg.recv([_tensor(out)], source, self._tag(bulk)), source))
        for work, source in works:
            with self.links.waiting("to receive from", source):
                work.wait()

    def _tag(self, bulk: bool) -> int:  # noqa: FBT001
        return 2 * self._number + bulk

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, on rank 0; elsewhere an empty list."""
        if self.rank:
            _send_object(self, value, 0)
            return []
        return [value, *(_receive_object(self, r) for r in range(1, self.size))]

    def scatter(self, values: Sequence[Any]) -> Any:
        """This rank's of the values that rank 0 gives, one for each; they are not looked at elsewhere."""
        if self.rank:
            return _receive_object(self, 0)
        for r in range(1, self.size):
            _send_object(self, values[r], r)
        return values[0]

    def meet(self, value: Any, then: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """Gather values on rank 0, where `then` makes of them an answer for each rank; this rank's answer.

        A value, or an outcome of `then`, that is an exception is raised on all ranks, and says which rank it is of.
        """
        if self._contested and not isinstance(value, BaseException):
            value = UsageError(
                f"several threads call {self.what} with the same url at once, and no rank can tell them apart",
                hint="give each of them a process group of its own as `group`",
            )
        told = self.gather(_Told(self.what, value))
        answers: Sequence[Any] = ()
        if not self.rank:
            values = [t.value for t in told]
            failed = [(r, v) for r, v in enumerate(values) if isinstance(v, BaseException)]
            try:
                _check_same_call(told)
                answers = [of_rank(*failed[0], self.size)] * self.size if failed else then(values)
            except Exception as error:  # noqa: BLE001 - it is everybody's
                answers = [error] * self.size
        answer = self.scatter(answers)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Take part in the next meeting with what is raised inside, so that all ranks raise it."""
        try:
            yield
        except Exception as error:
            self.meet(error, list)
            raise

    def agree(self, value: Any) -> list[Any]:
        """The values of all ranks, on every rank; an exception among them is raised on all."""
        found: list[Any] = self.meet(value, lambda values: [values] * self.size)
        return found


class _Told:
    """What a rank says in a meeting, and in which call."""

    def __init__(self, what: str, value: Any) -> None:
        self.what, self.value = what, value

    def __reduce__(self) -> tuple[Any, ...]:
        return _told, (self.what, _packed(self.value))


def _told(what: str, packed: bytes) -> _Told:
    return _Told(what, pickle.loads(packed))  # noqa: S301 - a rank of our own job, never a file


def _check_same_call(told: Sequence[_Told]) -> None:
    """UsageError where ranks are in different calls."""
    for rank, one in enumerate(told):
        if one.what != told[0].what:
            raise UsageError(
                f"rank {rank} calls {one.what} while rank 0 calls {told[0].what}",
                hint="all ranks call the same in the same order; what threads do at once has a url of its own",
            )


def lone() -> Group:
    """The group of this process alone."""
    return Group(None, 0, 1)


def group_of(process_group: dist.ProcessGroup | None = None, timeout: float = TIMEOUT, what: str = "") -> Group:
    """Our group over the ranks of a process group (None: of all), made when it is first asked for.

    All of its ranks must ask. Without torch.distributed it is this process alone. In the main thread it is one channel,
    whatever it is for; in others it is that of `what` and the process group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        _made.clear()
        return lone()
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
        return made.calling(call)
    return made.channel(call, f"{wanted.group_name} {what}")


def _make(store: dist.Store, ranks: tuple[int, ...], timeout: float) -> Group:
    """A new group. Each rank counts in the store how often it made this one: one that broke is made anew by all."""
    name = f"ucformat/{'-'.join(map(str, ranks)) if len(ranks) < dist.get_world_size() else 'all'}/{timeout}"
    rank = ranks.index(dist.get_rank())
    count = store.add(f"{name}/count/{rank}", 1) if len(ranks) > 1 else 1
    made = Group(dist.PrefixStore(f"{name}/{count}", store), rank, len(ranks), timeout)
    made.links.store = store
    return made


@contextmanager
def meeting(process_group: dist.ProcessGroup | None, timeout: float, call: str, url: object) -> Iterator[Group]:
    """Our group for a call with a url, which all ranks make.

    In other threads than the main one, calls that ranks make at once are told apart by the url, and by the process
    group: where two have both in common, all ranks raise a UsageError.
    """
    group = group_of(process_group, timeout, f"{call} {url}")
    if threading.current_thread() is threading.main_thread():
        yield group
    else:
        with group.alone():
            yield group


def is_live(links: Links) -> bool:
    """Whether a group is the one that `group_of` gives: neither broken, nor of an earlier init_process_group."""
    return links.whole and any(g.links is links for g in _made.values())


def of_rank(rank: int, error: BaseException, size: int) -> BaseException:
    """The error, saying whose it is."""
    if size == 1:
        return error
    if isinstance(error, UcformatError):
        return type(error)(f"rank {rank}: {error.message}", hint=error.hint)
    return UcformatError(f"rank {rank}: {type(error).__name__}: {error}", hint="its log has the traceback")


def _tensor(data: NDArray[np.uint8]) -> torch.Tensor:
    return torch.from_numpy(data)


def _as_bytes(data: Bytes) -> NDArray[np.uint8]:
    return np.frombuffer(data, np.uint8)


def _send_object(group: Group, value: Any, to: int) -> None:
    data = _as_bytes(bytearray(_packed(value)))
    group.send(_as_bytes(bytearray(np.int64(data.size).tobytes())), to)
    group.send(data, to)


def _packed(value: Any) -> bytes:
    """A pickle of a value; of an exception that has none, or could not be made again, one of its words."""
    try:
        pickled = pickle.dumps(value, protocol=5)
        if isinstance(value, BaseException):
            pickle.loads(pickled)  # noqa: S301 - not every exception can be made again
    except Exception as error:  # noqa: BLE001 - an exception that does not pickle
        return pickle.dumps(UcformatError(f"{type(value).__name__}: {value} ({error})"))
    return pickled


def _receive_object(group: Group, source: int) -> Any:
    size = np.zeros(8, np.uint8)
    group.receive(size, source)
    data = np.empty(int(size.view(np.int64)[0]), np.uint8)
    group.receive(data, source)
    return pickle.loads(data.tobytes())  # noqa: S301 - a rank of our own job, never a file
