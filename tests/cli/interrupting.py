"""A command that is stopped with Ctrl-C while it works."""

from __future__ import annotations

import signal
import subprocess
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["interrupted"]


def interrupted(command: Sequence[str], place: Path) -> tuple[int, str, str]:
    """Run it until it has written a few shards of weights at a place, then stop it: exit code, stdout, stderr."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None and len(list(place.glob("data/*/weight/*/c/*/*"))) < 3:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    return process.returncode, out, err
