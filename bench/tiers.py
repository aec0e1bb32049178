"""Recovery from the memory of nodes, against a disk and S3.

`python -m bench.tiers [MIB] [ROUNDS]`. Two ranks stand for two nodes of one machine. Each restores its half of a
state of MIB (2,048) in fresh processes: from its own node's memory, from the other node's over the connections
between ranks, from a disk (cold), and from moto's S3 server. Beside it, what moves as many bytes and nothing else:
a copy in memory, and a file that one process sends and another one receives. The speed for the bytes that move is
that between an eighth of the state and all of it, which leaves out what a restore takes whatever its size. And the
choice of a step among 4,096 nodes.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from bench.common import median, table, targets
from tests.s3 import serving
from tests.torch.ranks import Ranks
from tests.torch.tiers.simulated import ATTEMPT, simulated
from ucformat.format.described import packed_file
from ucformat.schema import MANIFEST
from ucformat.torch.tiers.choice import choose_places, copies_of
from ucformat.torch.tiers.inventory import Contents

RANKS = Ranks("bench.tiers_program")
KEYS = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_REGION": "us-east-1"}


def main() -> None:
    arguments = [int(a) for a in sys.argv[1:]]
    mib, rounds = (*arguments, *(2048, 3)[len(arguments) :])
    os.environ.update(KEYS)
    all_seconds, part_seconds = measured(mib, rounds), measured(mib // 8, rounds)
    middle = {name: median(found) for name, found in all_seconds.items()}
    moved = {
        name: (mib - mib // 8) / 1024 / (middle[name] - median(found))
        for name, found in part_seconds.items()
    }
    rows = [
        [name, f"{middle[name]:.2f}", _range(found), f"{moved[name]:.2f}"]
        for name, found in all_seconds.items()
    ]
    print(f"{mib:,} MiB over two ranks, {rounds} rounds; seconds of the slower rank:\n")
    print(table(["from", "seconds", "range", "GiB/s for the bytes"], rows))
    chosen = _chosen(4096, 8)
    print(
        f"\n4,096 nodes of 8 ranks, of which 32 are lost: step and places chosen in {chosen:.2f} s\n"
    )
    own = moved["own memory"] / moved["a copy in memory"]
    other = moved["the other node's memory"] / moved["a file sent and received"]
    print(
        targets(
            ("speed from own memory / of a copy in memory", ">= 0.8", own),
            ("speed from the other node / of a file sent and received", ">= 0.8", other),
            ("choice among 4,096 nodes, s", "<= 3", chosen),
        )
    )


def measured(mib: int, rounds: int) -> dict[str, list[float]]:
    """The seconds of the slower rank, by way and round."""
    seconds: dict[str, list[float]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="ucp-tiers-", dir="/dev/shm") as nodes,
        tempfile.TemporaryDirectory(prefix="ucp-tiers-") as disk,
        serving() as bucket,
    ):
        os.environ["AWS_ENDPOINT_URL"] = bucket.endpoint
        os.environ["AWS_ALLOW_HTTP"] = "true"
        places = {"disk": f"{disk}/run", "s3": bucket.place("run")}
        work = Path(nodes) / "work"
        RANKS.run("saved", 2, work, mib=mib, **places)
        for _ in range(rounds):
            for name, scenario in (
                ("a copy in memory", "copied"),
                ("own memory", "own"),
                ("a file sent and received", "sent"),
                ("the other node's memory", "other"),
                ("a disk, cold", "disk"),
                ("S3 (moto)", "s3"),
            ):
                told = RANKS.run("measured", 2, work, what=scenario, mib=mib, **places)
                seconds.setdefault(name, []).append(max(told))
        shutil.rmtree(work)
    return seconds


def _range(found: list[float]) -> str:
    return f"{min(found):.2f}–{max(found):.2f}"


def _chosen(nodes: int, each: int) -> float:
    """The seconds in which rank 0 and the ranks on the way to it merge what all nodes have, and choose places."""
    parts = [part for n, part in enumerate(simulated(nodes, each)) if n // 32 != 17]
    begun = time.perf_counter()
    while len(parts) > 1:  # as a tree does
        parts = [
            functools.reduce(Contents.__add__, parts[at : at + 8]) for at in range(0, len(parts), 8)
        ]
    copies = copies_of(parts[0], ("step-00000002", "2" * 32), ATTEMPT, nodes)
    keys = [packed_file(f"data/{ATTEMPT}", n) for n in range(nodes * each)]
    near = [n // each for n in range(nodes * each)]
    _, lost = choose_places(copies, "step-00000002", [MANIFEST, *keys], near=near)
    if lost:
        raise SystemExit(f"{len(lost)} files are in no place")
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
