"""The time that is left after a signal, at whose end what still waits fails instead of hanging."""

from __future__ import annotations

import math
import os
import select
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Notice:
    """The time from a signal until the process is killed.

    A thread waits for it: in the handler of a signal no lock may be taken, and no thread started.

    Args:
        seconds: the time.
        expire: called in the thread when the time is over, unless the notice is closed before.
    """

    def __init__(self, seconds: float, expire: Callable[[], None]) -> None:
        self.seconds = seconds
        self._expire = expire
        self._end = math.inf
        self._closed = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._wait, name="ucformat-notice", daemon=True)
        self._thread.start()

    @property
    def left(self) -> float:
        """The seconds that are left; infinite before a signal was received."""
        return self._end - time.monotonic()

    def receive(self, left: float = math.inf) -> None:
        """Let the time begin, unless it has.

        Args:
            left: at most so much of it is left, since another rank received a signal before.
        """
        if self._end == math.inf:
            self._end = time.monotonic() + min(left, self.seconds)
            os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """End the thread."""
        if not self._closed:
            self._closed = True
            os.eventfd_write(self._wake, 1)
            self._thread.join()
            os.close(self._wake)

    def _wait(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        while not self._closed:
            left = self.left
            if left <= 0:
                self._expire()
                return
            # of an infinite time poll waits without end
            if poll.poll(None if left == math.inf else left * 1000):
                os.eventfd_read(self._wake)
