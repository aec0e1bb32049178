"""One order on all ranks for saves in the background that several threads begin at once."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucformat.torch.group import Group

__all__ = ["turn"]


class _Turns:
    """Saves of several threads, one after another: in the order in which rank 0 drew their numbers."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._drawn = self._ended = 0
        self.broken = False

    def draw(self) -> int:
        """The next number."""
        with self._change:
            self._drawn += 1
            return self._drawn - 1

    def wait_for(self, number: int) -> None:
        """Wait until all before this one ended."""
        with self._change:
            self._change.wait_for(lambda: self._ended >= number or self.broken)

    def end(self, *, broken: bool = False) -> None:
        """Let the next one begin; where the ranks lost each other, all."""
        with self._change:
            self._ended += 1
            self.broken = self.broken or broken
            self._change.notify_all()


_alone = _Turns()


@contextmanager
def turn(ranks: Group) -> Iterator[None]:
    """Begin a save when those before it have begun, in one order on all ranks, as their writers do."""
    turns: _Turns = ranks.memory.setdefault("turns", _Turns()) if ranks.size > 1 else _alone
    try:
        number = ranks.meet(None, lambda _: [turns.draw()] * ranks.size, None, int)
    except Exception:
        if not ranks.whole:
            turns.end(broken=True)
        raise
    turns.wait_for(number)
    try:
        yield
    finally:
        turns.end()
