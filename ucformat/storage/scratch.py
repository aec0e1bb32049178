"""Memory that a thread uses again: fresh pages would cost more than what is copied into them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_own = threading.local()


def thread_memory(use: str, nbytes: int) -> NDArray[np.uint8]:
    """Return memory of this thread, the same at every call for a use, unless it has to grow."""
    memory: NDArray[np.uint8] = getattr(_own, use, np.empty(0, np.uint8))
    if memory.size < nbytes:
        memory = np.empty(nbytes, np.uint8)
        setattr(_own, use, memory)
    return memory[:nbytes]
