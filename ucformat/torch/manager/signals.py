"""Signals that ask a training to end, and what all ranks make of them together."""

from __future__ import annotations

import logging
import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

    from ucformat.torch.comm.group import Group

__all__ = ["Signals", "any_rank_bits"]

_log = logging.getLogger("ucformat")
_FAN_OUT = 8


class Signals:
    """Notes that one of these signals came, and then calls the handler that was there before.

    Handlers can be installed in the main thread only; in another one a warning says that none is. A process that was
    forked afterwards (a data loader's) dies of the signal as if there were no handler of ours.
    """

    def __init__(self, signals: Sequence[int]) -> None:
        self.caught = False
        self._pid = os.getpid()
        self._handler = self._handle  # one object, by which it is known again
        self._before: dict[int, Any] = {}
        if signals and threading.current_thread() is not threading.main_thread():
            names = ", ".join(signal.Signals(s).name for s in signals)
            _log.warning(
                "%s will end this process without a last save: the manager was not made in the main thread", names
            )
            return
        for number in signals:
            self._before[number] = signal.signal(number, self._handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        before = self._before.get(number)
        if os.getpid() != self._pid:
            signal.signal(number, before if before is not None else signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        again, self.caught = self.caught, True
        if callable(before) and (
            again or before is not signal.default_int_handler
        ):  # the first Ctrl-C ends nothing yet
            before(number, frame)

    def close(self) -> None:
        """Put the handlers back that were there before, where nobody has put another since."""
        for number, before in self._before.items():
            if signal.getsignal(number) is self._handler:
                signal.signal(number, before if before is not None else signal.SIG_DFL)
        self._before.clear()


def any_rank_bits(group: Group, bits: int) -> int:
    """The bits (of eight) that any rank has set, on all ranks: up and down a tree, for it is asked at every step."""
    found = np.array([bits], np.uint8)
    first = group.rank * _FAN_OUT + 1
    children = range(first, min(first + _FAN_OUT, group.size))
    theirs = {child: np.zeros(1, np.uint8) for child in children}
    group.receive_all(theirs)
    for bit in theirs.values():
        found |= bit
    if group.rank:
        parent = (group.rank - 1) // _FAN_OUT
        group.send(found, parent)
        group.receive(found, parent)
    for child in children:
        group.send(found, child)
    return int(found[0])
