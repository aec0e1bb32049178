"""How long a test waits for what should come by itself: until it comes, for a machine may be as slow as it likes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["PATIENCE", "wait_until"]

PATIENCE = (
    1200.0  #: seconds: only what hangs takes so long, and it fails before pytest's own time-out
)


def wait_until(condition: Callable[[], object]) -> None:
    """Look every now and then until it holds; AssertionError where that never happens."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "what is waited for has not happened"
        time.sleep(0.005)
