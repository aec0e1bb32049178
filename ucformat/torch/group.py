"""A gloo group of our own for the ranks that save or load together; the training's groups are never used.

It is made over the store of the process group, under a prefix of its own, and known to nobody else, so a thread or
another process can use it while training runs. Whatever goes wrong on one rank comes to all of them as one error that
names the rank. When a rank dies, the others learn it from their broken connections, or by the time-out; whoever learns
it notes in the store whom it waited for, and ends its own connections, so that all learn it and name the same rank.
"""

from __future__ import annotations

import atexit
import pickle
import threading
import time
import weakref
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from ucformat.errors import UcformatError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from ucformat.storage.base import Bytes

__all__ = ["TIMEOUT", "Group", "forget", "group_of", "lone", "of_rank"]

#: Seconds after which a rank that says nothing is taken for dead, so the longest that one may write while others wait.
#: One that dies is noticed at once, by its broken connection.
TIMEOUT = 1800.0

_MOMENT = 1.0  # seconds for which to wait for the notes of a rank that may be dead

_made: dict[tuple[object, ...], Group] = {}
_count: dict[tuple[object, ...], int] = {}
_all: weakref.WeakSet[Group] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """End all connections, whoever holds a group: if the interpreter takes torch apart first, the process aborts."""
    _made.clear()
    for group in list(_all):
        group.end()


class Group:
    """Some ranks, and this process among them; ranks count from 0 in this group.

    Only one thread may use it at a time, save that another one may send while this one receives.
    """

    def __init__(self, store: dist.Store | None, rank: int, size: int, timeout: float = TIMEOUT) -> None:
        self.rank, self.size, self.timeout, self.store = rank, size, timeout, store
        self.whole = True  # no connection was found broken
        self._broken: UcformatError | None = None  # of what it broke first
        self._breaking = threading.Lock()  # by the thread that sends, or the one that receives
        self._notes = store
        self.memory: dict[str, Any] = {}  # what its users remember from one act to the next, and forget with it
        self._pg = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout)) if size > 1 else None
        _all.add(self)

    def end(self) -> None:
        """End the connections; the group can do nothing more."""
        self._pg = self.store = self._notes = None

    def send(self, data: NDArray[np.uint8], to: int, tag: int = 0) -> None:
        """Send bytes; returns when they are gone."""
        if self._pg is not None and data.size:
            with self._waiting("to send to", to):
                self._pg.send([_tensor(data)], to, tag).wait()

    def receive(self, out: NDArray[np.uint8], source: int, tag: int = 0) -> None:
        """Fill `out` with the bytes that a rank sends."""
        self.receive_all([(out, source)], tag)

    def receive_all(self, buffers: Sequence[tuple[NDArray[np.uint8], int]], tag: int = 0) -> None:
        """Fill several buffers, each with the bytes that one rank sends."""
        works: list[tuple[dist.Work, int]] = []
        for out, source in buffers:
            if self._pg is not None and out.size:
                with self._waiting("to receive from", source):
                    works.append((self._pg.recv([_tensor(out)], source, tag), source))
        for work, source in works:
            with self._waiting("to receive from", source):
                work.wait()

    def broadcast(self, data: NDArray[np.uint8], source: int) -> None:
        """Fill `data` on every rank with what it holds on `source`."""
        if self._pg is not None and data.size:
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = source, 0
            with self._waiting("to receive from", source):
                self._pg.broadcast([_tensor(data)], options).wait()

    @contextmanager
    def _waiting(self, what: str, other: int) -> Iterator[None]:
        """Says what a failed communication with another rank means."""
        if self._broken is not None:
            raise self._broken
        try:
            yield
        except RuntimeError as error:
            with self._breaking:
                self._broken = self._broken or self._break(what, other, error)
            raise self._broken from error

    def _break(self, what: str, other: int, error: RuntimeError) -> UcformatError:
        """Note whom this rank waited for, end all connections, and find out who is to blame."""
        self.whole = False
        forget(self)
        with suppress(Exception):  # the store may have died too
            self._notes.set(f"waited/{self.rank}", str(other))  # type: ignore[union-attr]
        with suppress(Exception):
            self._pg.abort()  # type: ignore[union-attr]
        blamed = self._blamed(other)
        return UcformatError(
            f"rank {blamed} died, or said nothing for {self.timeout:g} s: rank {self.rank} waited in vain {what} rank "
            f"{other} ({str(error).splitlines()[0][:200]})",
            hint="look for the first error in the log of that rank; what was committed before is whole",
        )

    def _blamed(self, other: int) -> int:
        """The rank that waits for nobody, found along the ranks that wait for each other."""
        seen = {self.rank}
        while other not in seen:
            seen.add(other)
            note = self._note_of(other)
            if note is None:
                break
            other = note
        return other

    def _note_of(self, rank: int) -> int | None:
        """Whom a rank waited for; None if it says nothing about that for a moment, as one that is dead."""
        end = time.monotonic() + _MOMENT
        with suppress(Exception):
            while time.monotonic() < end:
                if self._notes.check([f"waited/{rank}"]):  # type: ignore[union-attr]
                    return int(self._notes.get(f"waited/{rank}"))  # type: ignore[union-attr]
                time.sleep(0.02)
        return None

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
        values = self.gather(value)
        answers: Sequence[Any] = ()
        if not self.rank:
            failed = [(r, v) for r, v in enumerate(values) if isinstance(v, BaseException)]
            try:
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


def lone() -> Group:
    """The group of this process alone."""
    return Group(None, 0, 1)


def group_of(process_group: dist.ProcessGroup | None = None, timeout: float = TIMEOUT) -> Group:
    """Our group over the ranks of a process group (None: of all), made when it is first asked for.

    All of its ranks must ask. Without torch.distributed it is this process alone.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return lone()
    ranks = tuple(dist.get_process_group_ranks(process_group or dist.group.WORLD))
    store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - there is no public way to the store
    key = (id(store), ranks, timeout)
    if key not in _made:
        for old in [k for k, g in _made.items() if g.store is not store]:  # of an earlier init_process_group
            del _made[old]
        _count[key] = _count.get(key, 0) + 1
        name = f"ucformat/{'-'.join(map(str, ranks)) if len(ranks) < dist.get_world_size() else 'all'}/{timeout}"
        prefixed = dist.PrefixStore(f"{name}/{_count[key]}", store)
        _made[key] = Group(prefixed, ranks.index(dist.get_rank()), len(ranks), timeout)
        _made[key].store = store
    return _made[key]


def forget(group: Group) -> None:
    """Have a new group made next time: a connection of this one is broken, or its ranks are out of step."""
    for key in [k for k, g in _made.items() if g is group]:
        del _made[key]


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
    try:
        pickled = pickle.dumps(value, protocol=5)
        if isinstance(value, BaseException):
            pickle.loads(pickled)  # noqa: S301 - not every exception can be made again
        data = _as_bytes(bytearray(pickled))
    except Exception as error:  # noqa: BLE001 - an exception that does not pickle
        data = _as_bytes(bytearray(pickle.dumps(UcformatError(f"{type(value).__name__}: {value} ({error})"))))
    group.send(_as_bytes(bytearray(np.int64(data.size).tobytes())), to)
    group.send(data, to)


def _receive_object(group: Group, source: int) -> Any:
    size = np.zeros(8, np.uint8)
    group.receive(size, source)
    data = np.empty(int(size.view(np.int64)[0]), np.uint8)
    group.receive(data, source)
    return pickle.loads(data.tobytes())  # noqa: S301 - a rank of our own job, never a file
