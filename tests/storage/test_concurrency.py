"""Many small reads."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.patience import PATIENCE
from ucformat.storage import concurrency
from ucformat.storage.concurrency import THREADS, map_io
from ucformat.storage.memory import MemoryStore
from ucformat.testing.stores import put
from ucformat.torch.loading.share import RememberingStore


class Clock:
    """In place of `time`: what waits says so itself, whatever else the machine does.

    Time that passes without a wait is that in which the system has suspended the thread.
    """

    def __init__(self) -> None:
        self.waited = 0.0
        self.waits = 0

    def wait(self, seconds: float) -> None:
        self.waited += seconds
        self.waits += seconds > 0

    def perf_counter(self) -> float:
        return self.waited

    def thread_time(self) -> float:
        return 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(concurrency, "time", clock)
    monkeypatch.setattr(concurrency, "_waits", lambda: clock.waits)
    return clock


def test_what_does_not_wait_is_read_in_this_thread(clock: Clock) -> None:
    seen: set[int] = set()

    def read(n: int) -> int:
        seen.add(threading.get_ident())
        clock.waited += 0.05  # suspended, or it would have given up its core
        return n * n

    assert map_io(read, range(1000)) == [n * n for n in range(1000)]
    assert seen == {threading.get_ident()}


def test_what_waits_is_read_at_once(clock: Clock) -> None:
    meeting = threading.Barrier(8, timeout=PATIENCE)

    def read(n: int) -> int:
        clock.wait(0.05)
        if n >= 8:
            meeting.wait()
        return n

    assert map_io(read, range(16)) == list(range(16))


@pytest.mark.parametrize("wait", [0, 0.01])
def test_the_first_error_ends_it(
    wait: float, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    cancelled = threading.Event()

    class Pool(ThreadPoolExecutor):
        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            cancelled.set()
            super().shutdown(wait, cancel_futures=cancel_futures)

    def fail(n: int) -> int:
        clock.wait(wait)
        read.append(n)
        if n == 5:
            raise ValueError(n)
        if n > 5:  # or they might be done before anybody sees the error
            assert cancelled.wait(PATIENCE)
        return n

    monkeypatch.setattr(concurrency, "ThreadPoolExecutor", Pool)
    with pytest.raises(ValueError, match="5"):
        map_io(fail, range(500))
    assert len(read) <= 6 + THREADS


def test_nothing_to_read() -> None:
    assert map_io(str, []) == []


def test_bytes_that_were_read_are_read_once() -> None:
    inner = MemoryStore("remembered")
    put(inner, "a", b"old")
    store = RememberingStore(inner, {})
    assert [store.read("a"), store.read("a", 1, 1)] == [b"old", b"l"]
    put(inner, "a", b"new")
    assert [store.read("a"), store.read("a", 1, 1), store.read("a", 1, 2)] == [b"old", b"l", b"ew"]
    store.forget_bytes()
    assert store.read("a") == b"new"


def test_calls_are_made_where_only_whole_processes_are_measured() -> None:
    """As on macOS."""
    program = (
        "import resource; del resource.RUSAGE_THREAD\n"
        "from ucformat.storage.concurrency import map_io\n"
        "print(map_io(abs, range(-3, 1)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.stdout == "[3, 2, 1, 0]\n", done.stderr
