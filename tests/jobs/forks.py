"""Processes forked from one that has loaded everything, to be killed at any instant of their work."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Forks"]

_ROOT = Path(__file__).parents[2]
_LOOP = """
import os, sys
for line in sys.stdin:
    out, into = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(into, str(work(*line.split())).encode())
        os._exit(0)
    os.close(into)
    print(pid, flush=True)
    sys.stdin.readline()  # until then the number is that of no other process
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print(code, os.read(out, 4096).decode(), flush=True)
    os.close(out)
"""


class Forks:
    """Runs `work(*words)`, which `code` defines, in one forked process after another.

    They have their start behind them, so that the instants at which they are killed are all instants of the work.
    """

    def __init__(self, code: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", code + _LOOP],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(_ROOT)},
        )

    def begin(self, *words: object) -> int:
        """Fork one, and let it work on these words; its process number."""
        self._tell(" ".join(map(str, words)))
        return int(self._hear())

    def end(self) -> tuple[int, list[str]]:
        """Wait for it: its exit code, minus the signal's number if one ended it, and what `work` gave, in words."""
        self._tell("")
        code, *said = self._hear().split()
        return int(code), said

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _hear(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.communicate(timeout=300)
