"""A Dask cluster of real worker processes on this machine: prints the scheduler's address and the workers' processes.

It ends when its input does. With the configuration of TLS in the environment, it uses that.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]


@contextmanager
def cluster(workers: int, memory: str = "auto", **env: str) -> Iterator[tuple[str, list[int]]]:
    """The address of a scheduler, and the process numbers of its workers, of one thread each."""
    command = [sys.executable, "-m", "tests.jobs.dask_cluster", str(workers), memory]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=-1, stdout=-1, text=True
    ) as process:
        assert process.stdout is not None
        address, *pids = process.stdout.readline().split()
        try:
            yield address.rpartition("//")[2], [int(pid) for pid in pids]
        finally:
            process.communicate("")


def main() -> None:
    from distributed import LocalCluster

    secure = "DASK_DISTRIBUTED__COMM__TLS__CA_FILE" in os.environ
    with LocalCluster(
        protocol="tls" if secure else "tcp",
        n_workers=int(sys.argv[1]),
        threads_per_worker=1,
        memory_limit=sys.argv[2],
        dashboard_address=":0",
        host="127.0.0.1",
        silence_logs=50,
    ) as made:
        words = (made.scheduler_address, *(worker.pid for worker in made.workers.values()))
        sys.stdout.write(" ".join(map(str, words)) + "\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main()
