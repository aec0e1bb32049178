"""Run trainings under torchrun, many jobs in one start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.patience import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["run", "torchrun"]

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]


def run(nproc: int, jobs: Sequence[dict[str, Any]], folder: Path) -> str:
    """Do these jobs of `train.py` one after the other on `nproc` ranks; what the ranks printed.

    Args:
        nproc: processes, one for each rank.
        jobs: as `train.py` describes them.
        folder: for the jobs' document and the log; it is made.

    Raises:
        AssertionError: a rank failed, or hangs; the message ends with the log's last lines.
    """
    folder.mkdir(parents=True, exist_ok=True)
    document = folder / f"jobs-{nproc}.json"
    document.write_text(json.dumps(list(jobs)))
    return torchrun(nproc, [str(_HERE / "train.py"), str(document)], folder / f"log-{nproc}.txt")


def torchrun(nproc: int, script: Sequence[str], log: Path, env: dict[str, str] | None = None) -> str:
    """Run a script with its arguments under torchrun on this machine, with a rendezvous on a free port of its own."""
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(_ROOT),
        "PYTHONSAFEPATH": "1",  # the names of the test modules hide no others
        "UCP_CATALOG": "none",
        **(env or {}),
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc), *script]
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
        try:
            code = process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not done after {PATIENCE:g} s, see {log}:\n{_tail(log)}") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # the launcher; its ranks die with it
                process.wait()
    assert code == 0, f"torchrun failed with {code}, see {log}:\n{_tail(log)}"
    return log.read_text()


def _tail(log: Path) -> str:
    """The end of a log without the launcher's own report, which is long and says nothing."""
    lines = log.read_text(errors="replace").splitlines()
    last = next((i for i, line in enumerate(lines) if "torch/distributed/run.py" in line), len(lines))
    return "\n".join(lines[max(0, last - 80) : last])
