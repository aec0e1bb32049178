"""Jobs over several processes: what the coordinator costs, and how a Dask cluster scales.

`python -m bench.jobs [--gb 2] [--shards 20000]`. In a folder in memory: a ZeRO-3 checkpoint of two
ranks, whose checksums are verified, is converted by one and by two workers of one thread, in turn;
by workers whose memory is a tenth of it; on the disk; and, cut into many small shards, in parts, of
which the commit is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np

from bench.common import OUT, median, ours, table, targets
from tests.jobs.dask_cluster import cluster
from tests.zero_files import FLAT, write_zero3

ROUNDS = 3
_COMMIT = """
import sys, time, json
import ucformat, ucformat.jobs.convert
begun = time.process_time()
nbytes = int(sys.argv[3])
made = ucformat.convert(sys.argv[1], sys.argv[2], shard_bytes=nbytes, chunk_bytes=nbytes, on="commit")
print(json.dumps([time.process_time() - begun, sum(1 for _ in made.manifest.tensors)]))
"""


def write_source(folder: Path, gb: float) -> int:
    """A checkpoint of about so many gigabytes; the bytes of its tensors."""
    pattern = np.random.default_rng(0).standard_normal((4096, 2048), np.float32)
    count = max(1, round(gb * 1e9 / pattern.nbytes / len(FLAT)))
    write_zero3(folder, {(f"t{n}", s): pattern for n in range(count) for s in FLAT}, ranks=2)
    return count * len(FLAT) * pattern.nbytes


def converted(source: Path, target: Path, *options: str) -> tuple[float, float]:
    """The seconds of a conversion by the command, and the processor seconds of its own process."""
    shutil.rmtree(target, ignore_errors=True)
    begun, before = time.perf_counter(), os.times()
    command = [ours(), "-m", "ucformat.cli", "convert", str(source), str(target), "-q", *options]
    subprocess.run(
        command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "UCP_CATALOG": "none"}
    )
    after = os.times()
    used = (
        after.children_user + after.children_system - before.children_user - before.children_system
    )
    os.sync()
    return time.perf_counter() - begun, used


def commit_cost(source: Path, target: Path, shard_bytes: int) -> tuple[float, int]:
    """The processor seconds of the commit of two parts, and the number of shards."""
    shutil.rmtree(target, ignore_errors=True)
    for part in ("0/2", "1/2"):
        options = (
            "--shard-bytes",
            str(shard_bytes),
            "--chunk-bytes",
            str(shard_bytes),
            "--part",
            part,
        )
        command = [
            ours(),
            "-m",
            "ucformat.cli",
            "convert",
            str(source),
            str(target),
            "-q",
            *options,
        ]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    shards = sum(1 for p in (target / "data").rglob("*") if p.is_file())
    command = [ours(), "-c", _COMMIT, str(source), str(target), str(shard_bytes)]
    done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, env={**os.environ, "UCP_CATALOG": "none"}
    )
    seconds, _ = json.loads(done.stdout)
    return seconds, shards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--shards", type=int, default=20_000)
    given = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    memory = Path(tempfile.mkdtemp(prefix="ucp-bench-", dir="/dev/shm"))
    try:
        nbytes = write_source(memory / "src", given.gb)
        view = memory / "view.yaml"
        view.write_text("version: 1\nview:\n  - {cast: '*', dtype: float16}\n")
        rows, seconds = [], {}
        with cluster(1) as (one, _), cluster(2) as (two, _):
            for name, target, where in (
                ("threads of one process", memory / "dst", "threads"),
                ("1 worker", memory / "dst", f"dask://{one}"),
                ("2 workers", memory / "dst", f"dask://{two}"),
                ("1 worker, cast to float16", memory / "dst", f"dask://{one}"),
                ("2 workers, cast to float16", memory / "dst", f"dask://{two}"),
                ("1 worker, to the disk", OUT / "dst", f"dask://{one}"),
                ("2 workers, to the disk", OUT / "dst", f"dask://{two}"),
            ):
                options = ("--on", where, *(("--view", str(view)) if "cast" in name else ()))
                converted(memory / "src", target, *options)
                taken = [converted(memory / "src", target, *options) for _ in range(ROUNDS)]
                seconds[name] = median([s for s, _ in taken])
                own = median([u for _, u in taken])
                rows.append(
                    [
                        name,
                        f"{seconds[name]:.1f}",
                        f"{nbytes / seconds[name] / 1e6:,.0f}",
                        f"{own:.2f}",
                    ]
                )
        budget = nbytes // 20  # each of two workers
        with cluster(2, str(max(budget, 200 << 20))) as (small, _):
            taken_small, own = converted(memory / "src", memory / "dst", "--on", f"dask://{small}")
        name = f"2 workers of {max(budget, 200 << 20) >> 20} MiB each"
        rows.append(
            [name, f"{taken_small:.1f}", f"{nbytes / taken_small / 1e6:,.0f}", f"{own:.2f}"]
        )
        shutil.rmtree(memory / "src")
        shutil.rmtree(memory / "dst")
        write_source(memory / "src", 0.1)
        commit_s, shards = commit_cost(
            memory / "src", memory / "dst", max(4, 100_663_296 // given.shards)
        )
    finally:
        shutil.rmtree(memory, ignore_errors=True)
        shutil.rmtree(OUT / "dst", ignore_errors=True)
    head = [
        f"convert {nbytes / 1e9:.1f} GB, ZeRO-3 of two ranks, verified",
        "seconds",
        "MB/s",
        "coordinator's processor s",
    ]
    print(table(head, rows))
    print(
        f"\nLoad average: {os.getloadavg()[0]:.1f}. Commit of {shards:,} shards of two parts: {commit_s:.2f} s.\n"
    )
    scaling = seconds["1 worker"] / seconds["2 workers"]
    cast = seconds["1 worker, cast to float16"] / seconds["2 workers, cast to float16"]
    print(
        targets(
            ("2 workers ÷ 1 worker, limited by the processor: cast to float16", ">= 1.7", cast),
            (
                "2 workers ÷ 1 worker, limited by memory and the start of the command",
                ">= 1.7",
                scaling,
            ),
            ("processor ms of the coordinator for a shard", "<= 0.3", commit_s / shards * 1e3),
        )
    )


if __name__ == "__main__":
    main()
