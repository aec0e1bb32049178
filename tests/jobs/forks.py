"""Processes forked from one that has loaded everything, to be killed at any instant of their work."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Self

from tests.patience import PATIENCE

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Forks"]

_ROOT = Path(__file__).parents[2]
_LOOP = """
import ctypes, os, signal, struct, sys, time

def kill_after(seconds):  # of processor time
    libc, timer = ctypes.CDLL(None), ctypes.c_void_p()
    event = ctypes.create_string_buffer(struct.pack("qii", 0, signal.SIGKILL, 0), 64)  # SIGEV_SIGNAL
    assert libc.timer_create(time.CLOCK_PROCESS_CPUTIME_ID, event, ctypes.byref(timer)) == 0
    left = struct.pack("qqqq", 0, 0, int(seconds), int(seconds % 1 * 1e9) + 1)
    assert libc.timer_settime(timer, 0, left, None) == 0

for line in sys.stdin:
    after, *words = line.split()
    out, into = os.pipe()
    pid = os.fork()
    if pid == 0:
        if after != "never":
            kill_after(float(after))
        os.write(into, str(work(*words)).encode())
        os._exit(0)
    os.close(into)
    _, status, used = os.wait4(pid, 0)
    seconds = used.ru_utime + used.ru_stime
    print(os.waitstatus_to_exitcode(status), seconds, os.read(out, 4096).decode(), flush=True)
    os.close(out)
"""


class Forks:
    """Runs `work(*words)`, which `code` defines, in one forked process after another.

    They have their start behind them, so that the instants at which they are killed are all
    instants of the work. These are counted in the processor time of the process: what else the
    machine does shifts none of them.
    """

    def __init__(self, code: str) -> None:
        self.seconds = 0.0  #: the processor time of the last one
        self._process = subprocess.Popen(
            [sys.executable, "-c", code + _LOOP],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(_ROOT)},
        )

    def begin(self, *words: object, kill_after: float | None = None) -> None:
        """Fork one, let it work on these words, and have SIGKILL sent to it after so many seconds of processor time."""
        self._tell(" ".join(map(str, ("never" if kill_after is None else kill_after, *words))))

    def end(self) -> tuple[int, list[str]]:
        """Wait for it: its exit code, minus the signal's number if one ended it, and what `work` gave, in words."""
        code, seconds, *said = self._hear().split()
        self.seconds = float(seconds)
        return int(code), said

    def run(self, *words: object, kill_after: float | None = None) -> tuple[int, list[str]]:
        """`begin` one and wait for its `end`."""
        self.begin(*words, kill_after=kill_after)
        return self.end()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _hear(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._process.communicate(timeout=PATIENCE)
