"""Ctrl-C at every instant: a KeyboardInterrupt before the n-th bytecode instruction that chosen modules execute."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType, ModuleType

__all__ = ["interruptions"]


def interruptions(
    work: Callable[[], object], modules: tuple[ModuleType, ...], step: int = 1, first: int = 0
) -> Iterator[int]:
    """Run `work` again and again, each time interrupted `step` instructions later, until it ends; yields each instant.

    Only this thread is interrupted, as by a signal, and once in each run.
    """
    at = first
    while _interrupted(work, {m.__file__ for m in modules}, at):
        yield at
        at += step


def _interrupted(work: Callable[[], object], files: set[str | None], at: int) -> bool:
    left = at

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in files or _in_finalizer(frame):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def _in_finalizer(frame: FrameType | None) -> bool:
    """Whether Python would only print an interrupt that came here, and go on."""
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False
