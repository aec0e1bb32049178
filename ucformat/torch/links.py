"""The connections of a group of ranks; when one is found broken, all that wait learn whom to blame."""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import time
import weakref
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ucformat.errors import UcformatError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ucformat.torch.group import Group

__all__ = ["Links"]

_MOMENT = 1.0  # seconds for which to wait for the notes of a rank that may be dead
_MOMENTS = 10.0  # seconds for which to look for the rank that is to blame

_all: weakref.WeakSet[Links] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """End all connections, whoever holds a group: if the interpreter takes torch apart first, the process aborts."""
    for links in list(_all):
        links.end()


def _forked() -> None:
    """In a forked child: the connections are its parent's, and the threads that would end them are not here."""
    for links in list(_all):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(links.pg))  # so that nobody takes it apart
        links.pg = None
    _all.clear()


os.register_at_fork(after_in_child=_forked)


class Links:
    """The connections among the ranks of a group, and what broke them; all its channels share them."""

    def __init__(self, store: dist.Store | None, rank: int, size: int, timeout: float) -> None:
        self.rank, self.size, self.timeout, self.store = rank, size, timeout, store
        self.whole = True
        self.broken: UcformatError | None = None  # of what it broke first
        self.breaking = threading.Lock()  # by the thread that sends, or the one that receives
        self.notes = store
        self.pg = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout)) if size > 1 else None
        self.memory: dict[str, Any] = {}
        self.channels: dict[str, Group] = {}
        self.opening = threading.Lock()
        self.waits = 0  # threads that wait for another rank now, none longer than the time-out
        self._counting = threading.Lock()
        _all.add(self)

    def end(self) -> None:
        """End the connections; the group can do nothing more."""
        self.pg = self.store = self.notes = None

    def number_of(self, name: str) -> int:
        """The number of a channel, the same on all ranks; the first that asks gives it."""
        assert self.notes is not None  # noqa: S101 - of several ranks
        mine = self.notes.add("channels", 1)
        return int(self.notes.compare_set(f"channel/{name}", "", str(mine)))

    @contextmanager
    def waiting(self, what: str, other: int) -> Iterator[None]:
        """Says what a failed communication with another rank means."""
        if self.broken is not None:
            raise self.broken
        self._count_waits(1)
        try:
            yield
        except RuntimeError as error:
            with self.breaking:
                self.broken = self.broken or self._break(what, other, error)
            raise self.broken from error
        finally:
            self._count_waits(-1)

    def _count_waits(self, change: int) -> None:
        with self._counting:
            self.waits += change

    def _break(self, what: str, other: int, error: RuntimeError) -> UcformatError:
        """Note whom this rank waited for, end all connections, and find out who is to blame."""
        self.whole = False
        _within(_MOMENT, lambda: self.notes.set(f"waited/{self.rank}", str(other)))  # type: ignore[union-attr]
        with suppress(Exception):
            self.pg.abort()  # type: ignore[union-attr]
        blamed = _within(_MOMENTS, lambda: self._blamed(other))
        blamed = other if blamed is None else blamed
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
            while not self.notes.check([f"waited/{rank}"]):  # type: ignore[union-attr]
                if time.monotonic() > end:
                    return None
                time.sleep(0.02)
            return int(self.notes.get(f"waited/{rank}"))  # type: ignore[union-attr]
        return None


def _within(seconds: float, act: Callable[[], Any]) -> Any:
    """What a call gives; None where it fails or takes longer, as that of a store whose process died or is stopped."""
    found: list[Any] = []

    def run() -> None:
        with suppress(Exception):
            found.append(act())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None
