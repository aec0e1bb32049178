"""Run a script under torchrun in the virtual environment of an engine."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["run_engine"]

_ROOT = Path(__file__).parents[2]


def run_engine(engine: str, ranks: int, script: str, arguments: Sequence[str]) -> None:
    """Run a script below this folder; skip the test if the engine is not installed.

    `.engines/<engine>` has it, or `UCFORMAT_<ENGINE>_PYTHON` names an interpreter that has.
    """
    python = os.environ.get(f"UCFORMAT_{engine.upper()}_PYTHON") or str(
        _ROOT / ".engines" / engine / "bin" / "python"
    )
    if not Path(python).exists():
        pytest.skip(f"{engine} is not installed in .engines/{engine}")
    command = [
        python,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
    ]
    env = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }
    script = str(Path(__file__).parent / script)
    done = subprocess.run(
        [*command, script, *arguments], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
