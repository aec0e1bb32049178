"""Run a function of a program in one JAX process, or in several that know each other."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tests.patience import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["run_jax"]

_ROOT = Path(__file__).parents[2]


def run_jax(
    program: str,
    function: str,
    *arguments: str | Path,
    processes: int = 1,
    devices: int = 4,
    torch: bool = False,
    kill: bool = False,
) -> None:
    """Run it; fails unless all processes end well.

    Args:
        devices: of each process.
        torch: whether there is a PyTorch.
        kill: whether a process may be killed, by itself.
    """
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "WITHOUT_TORCH": "" if torch else "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(_ROOT),
    }
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [sys.executable, "-m", "tests.jax.main", program, function, address, str(processes)]
    started = [
        subprocess.Popen(
            [*command, str(number), *map(str, arguments)],
            env=environment,
            cwd=_ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(processes)
    ]
    outputs = _outputs(started)
    codes = [process.returncode for process in started]
    assert all(code == 0 or (kill and code == -9) for code in codes), "\n".join(
        f"process {number} ended with {code}:\n{output[-4000:]}"
        for number, (code, output) in enumerate(zip(codes, outputs, strict=True))
    )


def _outputs(started: Sequence[subprocess.Popen[str]]) -> list[str]:
    """What they print; none is left running."""
    end = time.monotonic() + PATIENCE
    try:
        return [p.communicate(timeout=max(1.0, end - time.monotonic()))[0] for p in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
