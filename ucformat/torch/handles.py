"""What `async_save` gives: a save that goes on in another process."""

from __future__ import annotations

from concurrent.futures import Future, InvalidStateError
from contextlib import suppress

from ucformat.errors import UcformatError
from ucformat.torch.writing import Saved

__all__ = ["SaveHandle", "conclude", "settle"]


class SaveHandle:
    """A save that goes on in another process."""

    def __init__(self, url: str, stall: float) -> None:
        self.url = url
        self.stall = stall  # seconds for which training stood still
        self.seen = False  # its outcome was asked for
        self._done: Future[Saved] = Future()

    def disown(self) -> None:
        """Say in a forked child that only its parent learns how the save ends."""
        self._done = Future()
        self._done.set_exception(UcformatError(f"{self.url} is saved by the process that this one was forked from"))

    @property
    def staged(self) -> bool:
        """Whether the state was copied, so that training may change it: true as soon as there is a handle."""
        return True

    @property
    def committed(self) -> bool:
        """Whether the checkpoint stands."""
        return self._done.done() and self._done.exception() is None

    @property
    def done(self) -> bool:
        """Whether it was committed, or failed."""
        return self._done.done()

    def wait(self, timeout: float | None = None) -> Saved:
        """Wait for the commit, or for so many seconds.

        Raises:
            TimeoutError: it takes longer.
            UcformatError: a rank failed, or its writer died; nothing is committed.
        """
        try:
            return self._done.result(timeout)
        finally:
            self.seen = self._done.done()

    def error(self) -> BaseException | None:
        """What it failed of, if it has."""
        self.seen = self.seen or self._done.done()
        return self._done.exception() if self._done.done() else None


def conclude(handle: SaveHandle, outcome: Saved | BaseException) -> None:
    """Give a save its outcome; only the first counts."""
    with suppress(InvalidStateError):
        if isinstance(outcome, Saved):
            handle._done.set_result(outcome)  # noqa: SLF001 - two halves of one thing
        else:
            handle._done.set_exception(outcome)  # noqa: SLF001


def settle(handle: SaveHandle) -> None:
    """Wait until a save has succeeded or failed."""
    handle._done.exception()  # noqa: SLF001
