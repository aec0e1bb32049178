"""Many small reads."""

from __future__ import annotations

import threading
import time

import pytest

from ucformat.storage.waiting import map_waiting


def test_what_does_not_wait_is_read_in_this_thread() -> None:
    seen: set[int] = set()

    def read(n: int) -> int:
        seen.add(threading.get_ident())
        return n * n

    assert map_waiting(read, range(1000)) == [n * n for n in range(1000)]
    assert seen == {threading.get_ident()}


def test_what_waits_is_read_at_once() -> None:
    meeting = threading.Barrier(8, timeout=30)

    def read(n: int) -> int:
        time.sleep(0.05)
        if n >= 8:
            meeting.wait()
        return n

    assert map_waiting(read, range(16)) == list(range(16))


@pytest.mark.parametrize("wait", [0, 0.01])
def test_the_first_error_ends_it(wait: float) -> None:
    read: list[int] = []

    def fail(n: int) -> int:
        time.sleep(wait)
        read.append(n)
        if n >= 5:
            raise ValueError(n)
        return n

    with pytest.raises(ValueError, match="5"):
        map_waiting(fail, range(500))
    assert len(read) < 200


def test_nothing_to_read() -> None:
    assert map_waiting(str, []) == []
