"""Handles of saves that continue in the background."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from threading import Thread
from typing import TYPE_CHECKING

from ucformat.errors import UcformatError
from ucformat.torch.saving.save import Saved

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["SaveHandle", "saved_by", "set_outcome", "wait_until_done"]

_log = logging.getLogger("ucformat")


class SaveHandle:
    """A save that continues in the background.

    `url` is where the checkpoint is written, and `stall` the seconds for which the training was
    blocked.
    """

    def __init__(self, url: str, stall: float) -> None:
        self.url, self.stall = url, stall
        self.retrieved = False  # whether the caller has learnt the outcome
        self._done: Future[Saved] = Future()
        self._last: Thread | None = None  # acts after the commit

    def disown(self) -> None:
        """Make the outcome unavailable in a forked child."""
        self._done = Future()
        self._done.set_exception(
            UcformatError(f"{self.url} is saved by the process that this one was forked from")
        )

    @property
    def staged(self) -> bool:
        """Whether the state is copied, so that training may change it; always true."""
        return True

    @property
    def committed(self) -> bool:
        """Whether the checkpoint is committed."""
        return self._done.done() and self._done.exception() is None

    @property
    def done(self) -> bool:
        """Whether the save has ended: committed or failed."""
        return self._done.done()

    def then(self, act: Callable[[Saved], object]) -> None:
        """Call a function with the committed checkpoint, in a thread for which `wait` waits, too."""

        def wait_and_act() -> None:
            wait_until_done(self)
            if self.committed:
                act(self._done.result())

        # not a daemon: the program ends after it
        thread = Thread(target=wait_and_act, name="ucformat-then")
        try:
            thread.start()
        except RuntimeError as error:  # on this rank; the save goes on
            _log.warning("no reference to %s will be logged: %s", self.url, error)
            return
        self._last = thread

    def wait(self, timeout: float | None = None) -> Saved:
        """Wait until the checkpoint is committed, and with `log_to` until a tracker knows of it.

        Args:
            timeout: seconds to wait (None: no limit).

        Raises:
            TimeoutError: the save has not ended in time; it continues.
            UcformatError: a rank failed, or its writing process died; nothing is committed.
        """
        begun = time.monotonic()
        try:
            saved = self._done.result(timeout)
        finally:
            self.retrieved = self._done.done()
        if self._last is not None:
            self._last.join(timeout and max(0.0, begun + timeout - time.monotonic()))
        return saved

    def error(self) -> BaseException | None:
        """Return the error of a failed save; None if it is committed or has not ended."""
        self.retrieved = self.retrieved or self._done.done()
        return self._done.exception() if self._done.done() else None


def set_outcome(handle: SaveHandle, outcome: Saved | BaseException) -> None:
    """Set the outcome of a save, unless it has one."""
    with suppress(InvalidStateError):
        if isinstance(outcome, Saved):
            handle._done.set_result(outcome)  # noqa: SLF001 - not for users
        else:
            handle._done.set_exception(outcome)  # noqa: SLF001


def wait_until_done(handle: SaveHandle) -> None:
    """Wait until a save has ended, without raising its error."""
    handle._done.exception()  # noqa: SLF001


def saved_by(handle: SaveHandle, timeout: float | None = None) -> Saved:
    """As `wait`, but do not wait until a tracker knows of it, which only one rank would do."""
    try:
        return handle._done.result(timeout)  # noqa: SLF001
    finally:
        handle.retrieved = handle.done
