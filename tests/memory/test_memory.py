"""Memory ends under commands that read; here at some allocations, and at each in `python -m tests.memory`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE

#: What `make test` tries, too.
SOME = ("read packed", "read torch", "read zarr", "parts deepspeed", "convert torch")
pytest.importorskip(
    "_testcapi",
    reason="this Python lacks `_testcapi`, whose `set_nomemory` lets an allocation fail",
)


@pytest.mark.matrix
@pytest.mark.parametrize("what", [SOME, ()])
def test_memory_ends_at_some_allocations(what: tuple[str, ...]) -> None:
    """In a process of its own: it forks, and must have one thread."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.memory", "--every", "997", *what],
        capture_output=True,
        text=True,
        timeout=20 * PATIENCE,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONHASHSEED": "0"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "MemoryError" in done.stdout.splitlines()[-1]
