"""Ranks that cost little to start: one process imports torch once, and forks all ranks of one scenario after another.

A scenario is a function of a module; each rank calls it inside an initialised gloo process group, and may be killed.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import IO, Any

from tests.patience import PATIENCE

__all__ = ["Ranks"]

_ROOT = Path(__file__).parents[2]
#: What ranks import late; imported once here, before they are forked.
_LATE = ("torch._dynamo.variables", "ucformat.catalog.recording", "ucformat.jobs.gc")
#: What a rank that was killed gives.
KILLED = "killed"


class Ranks:
    """The process that forks ranks for the scenarios of a module."""

    def __init__(self, module: str) -> None:
        environment = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",
            "GLOO_SOCKET_IFNAME": "lo",
            "MASTER_ADDR": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "PYTHONPATH": str(_ROOT),
            "UCP_CATALOG": "none",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.torch.ranks", module],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, scenario: str, size: int, folder: Path, **arguments: Any) -> list[Any]:
        """What each of `size` ranks gave; `KILLED` of one that ended by SIGKILL. AssertionError where one failed."""
        folder.mkdir(parents=True, exist_ok=True)
        job = {
            "scenario": scenario,
            "size": size,
            "folder": str(folder),
            "arguments": arguments,
        }
        pipe_in, pipe_out = self._process.stdin, self._process.stdout
        assert pipe_in is not None
        assert pipe_out is not None
        pipe_in.write(json.dumps(job) + "\n")
        pipe_in.flush()
        codes: list[int] = json.loads(pipe_out.readline())
        return [self._outcome(folder, scenario, rank, code) for rank, code in enumerate(codes)]

    def _outcome(self, folder: Path, scenario: str, rank: int, code: int) -> Any:
        if code == -signal.SIGKILL:
            return KILLED
        log = (folder / f"rank-{rank}.log").read_text(errors="replace")
        assert code == 0, f"{scenario}: rank {rank} ended with {code}:\n{log[-4000:]}"
        return pickle.loads((folder / f"rank-{rank}.pickle").read_bytes())  # noqa: S301

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.kill()  # it has no ranks now, and taking torch apart takes time
        self._process.wait()
        self._process.stdout.close()


def _serve(module: Any, orders: IO[str], answers: IO[str]) -> None:
    for number, line in enumerate(orders):
        job = json.loads(line)
        children = [_fork(module, job, rank, number) for rank in range(job["size"])]
        end = time.monotonic() + PATIENCE
        codes: list[int | None] = [None] * len(children)
        while None in codes:
            for rank, pid in enumerate(children):
                if codes[rank] is None:
                    done, status = os.waitpid(pid, os.WNOHANG)
                    codes[rank] = os.waitstatus_to_exitcode(status) if done else None
            if time.monotonic() > end:
                for rank, pid in enumerate(children):
                    if codes[rank] is None:
                        os.kill(pid, signal.SIGABRT)  # its log gets the traceback of every thread
            time.sleep(0.01)
        answers.write(json.dumps(codes) + "\n")
        answers.flush()


def _fork(module: Any, job: dict[str, Any], rank: int, number: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    folder = Path(job["folder"])
    log = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    code = 1
    try:
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(job["size"]))
        _be_rank(module, job, rank, folder / f"store-{number}")
        code = 0
    except BaseException:  # noqa: BLE001 - in the log
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _be_rank(module: Any, job: dict[str, Any], rank: int, store: Path) -> None:
    import faulthandler
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    faulthandler.enable()
    torch.set_num_threads(1)
    made = dist.FileStore(str(store), job["size"])
    dist.init_process_group("gloo", store=made, rank=rank, world_size=job["size"], timeout=timedelta(seconds=PATIENCE))
    folder = Path(job["folder"])
    given = getattr(module, job["scenario"])(folder, **job["arguments"])
    (folder / f"rank-{rank}.pickle").write_bytes(pickle.dumps(given))


if __name__ == "__main__":
    for late in _LATE:
        importlib.import_module(late)
    _serve(importlib.import_module(sys.argv[1]), sys.stdin, sys.stdout)
