"""Run trainings on several ranks, many jobs in one start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.forkserver import Program
from tests.forkserver import run as forked
from tests.patience import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MODULES", "environment", "fork", "run", "torchrun"]

#: What ranks import, some of it late; imported once before they are forked.
MODULES = (
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "ucformat.catalog.recording",
    "ucformat.jobs.gc",
    "ucformat.torch",
)

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
    return fork(nproc, [str(_HERE / "train.py"), str(document)], folder / f"log-{nproc}.txt")


def fork(
    nproc: int,
    script: Sequence[str],
    log: Path,
    modules: Sequence[str] = (),
    *,
    cwd: Path = _ROOT,
    **env: str,
) -> str:
    """Run a script with its arguments as under torchrun, by ranks that are forked with torch imported.

    Args:
        nproc: ranks; 0 for a program that is none.
        script: its file, or `-m` and a module, and its arguments.
        log: for what all ranks print.
        modules: what else is imported before the ranks are forked.
        cwd: the working directory.
        env: more of the environment.

    Raises:
        AssertionError: a rank failed, or hangs; the message ends with the log's last lines.
    """
    log.unlink(missing_ok=True)
    program = Program(
        script, environment(env), [str(log)], ranks=nproc, cwd=str(cwd), modules=modules
    )
    try:
        codes = forked(sys.executable, MODULES, program, PATIENCE)
    except TimeoutError:
        raise AssertionError(f"not done after {PATIENCE:g} s, see {log}:\n{_tail(log)}") from None
    assert not any(codes), f"the ranks ended with {codes}, see {log}:\n{_tail(log)}"
    return log.read_text()


def torchrun(nproc: int, script: Sequence[str], log: Path) -> str:
    """Run a script with its arguments under torchrun itself, with a rendezvous on a free port of its own."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(nproc),
        *script,
    ]
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=environment(), stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"not done after {PATIENCE:g} s, see {log}:\n{_tail(log)}"
            ) from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # the launcher; its ranks die with it
                process.wait()
    assert code == 0, f"torchrun failed with {code}, see {log}:\n{_tail(log)}"
    return log.read_text()


def environment(more: dict[str, str] | None = None) -> dict[str, str]:
    """The environment of a rank."""
    return {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(_ROOT),
        "PYTHONSAFEPATH": "1",  # the names of the test modules hide no others
        "UCP_CATALOG": "none",
        **(more or {}),
    }


def _tail(log: Path) -> str:
    """The end of a log without the launcher's own report, which is long and says nothing."""
    lines = log.read_text(errors="replace").splitlines()
    last = next(
        (i for i, line in enumerate(lines) if "torch/distributed/run.py" in line), len(lines)
    )
    return "\n".join(lines[max(0, last - 80) : last])
