"""Programs that log to trackers, run beside the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["last_line_of"]


def last_line_of(folder: Path, *words: str, **variables: str) -> str:
    """Run Python in a folder with further variables of the environment, and return its last line; empty without one."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={**os.environ, **variables},
    )
    assert done.returncode == 0, done.stderr
    return next(iter(done.stdout.splitlines()[-1:]), "")
