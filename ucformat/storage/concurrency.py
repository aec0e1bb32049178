"""Requests in flight at once: a budget for all threads and stores of this process, and small requests in threads."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["RequestBudget", "map_io"]


class RequestBudget:
    """At most so many requests and bytes at once; a larger request waits until it is the only one."""

    def __init__(self, requests: int, nbytes: int) -> None:
        self.requests, self.nbytes = requests, nbytes
        self._free = threading.Condition()
        self._requests = self._nbytes = 0
        self.most = 0  # bytes that were in flight at once

    def set(self, requests: int, nbytes: int) -> None:
        """Allow other numbers from now on."""
        with self._free:
            self.requests, self.nbytes = requests, nbytes
            self._free.notify_all()

    @contextmanager
    def take(self, requests: int, nbytes: int) -> Iterator[None]:
        """Wait for room, and keep it for the block."""
        with self._free:
            self._free.wait_for(lambda: self._fits(requests, nbytes))
            self._requests += requests
            self._nbytes += nbytes
            self.most = max(self.most, self._nbytes)
        try:
            yield
        finally:
            with self._free:
                self._requests -= requests
                self._nbytes -= nbytes
                self._free.notify_all()

    def _fits(self, requests: int, nbytes: int) -> bool:
        return not self._requests or (
            self._requests + requests <= self.requests and self._nbytes + nbytes <= self.nbytes
        )


T = TypeVar("T")
R = TypeVar("R")

_THREADS = 32
_PAYS = 1e-3  # seconds of waiting for each item from which on a thread of its own is quicker


def map_io(call: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Call a function that makes a small request for each item, in threads where the requests wait.

    Returns the results in order, and raises the first error.

    It begins one after another. Small files that the page cache holds cost the processor alone, and Python's lock lets
    one thread use it: with eight of them opening 100,000 took four times as long. Once they turn out to wait instead,
    the rest are done in threads.
    """
    todo = iter(items)
    out: list[R] = []
    wall, busy = time.perf_counter(), time.thread_time()
    for item in todo:
        out.append(call(item))
        if time.perf_counter() - wall - (time.thread_time() - busy) > _PAYS * len(out):
            break
    left = list(todo)
    if left:
        with ThreadPoolExecutor(min(_THREADS, len(left)), "ucformat-wait") as pool:
            out += pool.map(call, left)
    return out
