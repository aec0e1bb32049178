"""Faults at random, by a seed that names a kind of run."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING

from tests.storage.proxy import FAULTS

if TYPE_CHECKING:
    from tests.storage.proxy import Fault, Request

__all__ = ["Weather"]


class Weather:
    """Chooses at random: how often each fault comes is drawn from the seed, `much` is the most of all together.

    With a `storm`, from that request on every second one fails, or nearly each.
    """

    def __init__(self, seed: int, much: float = 0.35, storm: int | None = None) -> None:
        self._random = random.Random(seed)
        drawn = {fault: self._random.random() ** 2 for fault in FAULTS}
        total = self._random.uniform(0.2, 1) * much / sum(drawn.values())
        self.chances = {fault: p * total for fault, p in drawn.items()}
        self._lock = threading.Lock()
        self._storm, self._worse = (
            storm,
            self._random.choice((0.5, 0.9, 1.0)) / sum(self.chances.values()),
        )

    def __call__(self, request: Request) -> Fault | None:
        """What is done to a request."""
        with self._lock:
            at = self._random.random()
            if self._storm is not None:
                self._storm -= 1
                at /= self._worse if self._storm < 0 else 1
        for fault, chance in self.chances.items():
            at -= chance
            if at < 0:
                return "slow" if fault in ("lost", "lied") and not request.writes else fault
        return None
