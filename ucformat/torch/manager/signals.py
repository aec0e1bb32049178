"""Signals that ask a training to stop, and the collective by which all ranks learn of them."""

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
_FAN_OUT = 8  # children of a rank in the tree


class Signals:
    """Records that a signal was received, and then calls the handler that was installed before.

    Handlers can only be installed in the main thread; in any other a warning is logged. In processes that are forked
    later (of a data loader), the handlers that were installed before take effect.

    Args:
        signals: their numbers.
    """

    def __init__(self, signals: Sequence[int]) -> None:
        self.caught = False
        self._pid = os.getpid()
        self._handler = self._handle  # one object, to compare with the installed handler
        self._before: dict[int, Any] = {}
        if signals and threading.current_thread() is not threading.main_thread():
            names = ", ".join(signal.Signals(s).name for s in signals)
            _log.warning(
                "%s will end this process without a last save: the manager was not created in the main thread", names
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
        # The first Ctrl-C asks to save and stop; only the second one raises KeyboardInterrupt.
        if callable(before) and (again or before is not signal.default_int_handler):
            before(number, frame)

    def close(self) -> None:
        """Restore the previous handlers, except where another one has been installed since."""
        for number, before in self._before.items():
            if signal.getsignal(number) is self._handler:
                signal.signal(number, before if before is not None else signal.SIG_DFL)
        self._before.clear()


def any_rank_bits(group: Group, bits: int) -> int:
    """Combine the bits of all ranks by or, over a tree, since this happens at every step.

    Args:
        group: the group of ranks.
        bits: of this rank, eight bits.

    Returns:
        the bits that any rank has set.
    """
    found = np.array([bits], np.uint8)
    first = group.rank * _FAN_OUT + 1
    children = range(first, min(first + _FAN_OUT, group.size))
    theirs = {child: np.zeros(1, np.uint8) for child in children}
    for child, bit in theirs.items():
        group.receive(bit, child)
        found |= bit
    if group.rank:
        parent = (group.rank - 1) // _FAN_OUT
        group.send(found, parent)
        group.receive(found, parent)
    for child in children:
        group.send(found, child)
    return int(found[0])
