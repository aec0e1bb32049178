"""Limits of concurrent requests, threads for small ones, groups by bytes, memory that threads use again, caches."""

from __future__ import annotations

import gc
import resource
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import numpy as np
    from numpy.typing import NDArray


class RequestBudget:
    """Limits the requests and bytes in flight; a request larger than the budget waits until it is the only one."""

    def __init__(self, requests: int, nbytes: int) -> None:
        self.requests, self.nbytes = requests, nbytes
        self._free = threading.Condition()
        self._requests = self._nbytes = 0
        self.peak = 0  # maximum of bytes that were in flight at once

    def set(self, requests: int, nbytes: int) -> None:
        """Change the limits."""
        with self._free:
            self.requests, self.nbytes = requests, nbytes
            self._free.notify_all()

    @contextmanager
    def take(self, requests: int, nbytes: int) -> Iterator[None]:
        """Wait until a number of requests fits into the budget, and reserve it for the block."""
        with self._free:
            self._free.wait_for(lambda: self._fits(requests, nbytes))
            self._requests += requests
            self._nbytes += nbytes
            self.peak = max(self.peak, self._nbytes)
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

THREADS = 32  # that wait for requests at the same time
_MIN_WAIT = 1e-3  # mean seconds of waiting for each item above which threads are faster


def map_io(call: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Call a function that makes a small request for each item, in threads if the requests wait.

    It starts with one call after another. Small files in the page cache cost only CPU time, and the
    GIL lets one thread run: eight threads took four times as long to open 100,000 files. Once calls
    turn out to wait, the rest runs in threads, in copies of the caller's context. A thread that the
    system suspends, because others want its core, does not wait.
    """
    remaining = iter(items)
    out: list[R] = []
    wall, busy, waits = time.perf_counter(), time.thread_time(), _waits()
    for item in remaining:
        out.append(call(item))
        spent, least = time.perf_counter() - wall, _MIN_WAIT * len(out)
        # the processor time is asked for, by a system call, only where calls take so long
        if spent < least or spent - (time.thread_time() - busy) < least:
            continue
        if _waits() - waits >= len(out):
            break
    rest = list(remaining)
    if rest:
        with ThreadPoolExecutor(min(THREADS, len(rest)), "ucformat-wait") as pool:
            context = [copy_context() for _ in rest]
            out += pool.map(lambda item, own: own.run(call, item), rest, context)
    return out


# only Linux counts those of a thread
_OWN_USAGE: int = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)


def _waits() -> int:
    """How often this thread, or where that is not known this process, has given up its core to wait for something."""
    return resource.getrusage(_OWN_USAGE).ru_nvcsw


def grouped(items: Iterable[T], size: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Consecutive items in groups of at most so many bytes, unless a single one has more."""
    group: list[T] = []
    nbytes = 0
    for item in items:
        more = size(item)
        if group and nbytes + more > limit:
            yield group
            group, nbytes = [], 0
        group.append(item)
        nbytes += more
    if group:
        yield group


_own = threading.local()


def thread_memory(use: str, nbytes: int) -> NDArray[np.uint8]:
    """Memory of this thread, the same for a use unless it has to grow: fresh pages cost more."""
    import numpy as np  # here, because most commands read no tensors

    memory: NDArray[np.uint8] | None = getattr(_own, use, None)
    if memory is None or memory.size < nbytes:
        memory = np.empty(nbytes, np.uint8)
        setattr(_own, use, memory)
    return memory[:nbytes]


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the garbage collector while many objects are made: it takes up to half of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


_CACHE_BYTES = 256 << 20  # of decoded chunks
_MIN_CACHED = 4  # chunks that are kept, however large: each is read in many requests


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


S = TypeVar("S", bound=_Sized)


class Cache(Generic[S]):
    """The values that were used last, by key. Each is made once: threads that need it meanwhile wait for it."""

    def __init__(self, limit: int = _CACHE_BYTES, min_entries: int = _MIN_CACHED) -> None:
        self._limit, self._min_entries = limit, min_entries
        self._lock = threading.Lock()
        self._held: OrderedDict[str, S] = OrderedDict()
        self._making: dict[str, Future[S]] = {}
        self._nbytes = 0

    def __reduce__(self) -> tuple[type[Cache[S]], tuple[int, int]]:
        return Cache, (self._limit, self._min_entries)

    def get(self, key: str, make: Callable[[str], S]) -> S:
        """Look up a value, or make it; errors are not kept."""
        with self._lock:
            if (kept := self._held.get(key)) is not None:
                self._held.move_to_end(key)
                return kept
            running = self._making.get(key)
            own = self._making.setdefault(key, Future())
        if running is not None:
            return running.result()
        try:
            value = make(key)
        except BaseException as error:
            with self._lock:
                del self._making[key]
            own.set_exception(error)
            raise
        with self._lock:
            del self._making[key]
            self._held[key] = value
            self._nbytes += value.nbytes
            while self._nbytes > self._limit and len(self._held) > self._min_entries:
                self._nbytes -= self._held.popitem(last=False)[1].nbytes
        own.set_result(value)
        return value
