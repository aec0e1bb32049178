"""A command that is stopped with Ctrl-C while it works."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.patience import PATIENCE

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["interrupted"]

_PROGRAM = """
import os, signal
from ucformat.cli.main import main
from ucformat.storage import local
write, left = local.write_all, 40
def stopping(fd, data):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    write(fd, data)
local.write_all = stopping
main()
"""


def interrupted(words: list[str], place: Path) -> tuple[int, str, str]:
    """Run `ucp` until it has written a few shards of weights at a place, then stop it: exit code, stdout, stderr."""
    command = [sys.executable, "-c", _PROGRAM, *words]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        assert len(list(place.glob("data/*/weight/*/c/*/*"))) > 2
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGCONT)
        out, err = process.communicate(timeout=PATIENCE)
    return process.returncode, out, err
