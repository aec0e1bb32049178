"""How much may be in flight at once, over all threads and stores of this process: requests, and bytes of them."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Budget"]


class Budget:
    """At most so many requests and bytes at once; who asks for more than that waits until he is alone."""

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
