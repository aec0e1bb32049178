"""Eight processes of a host read the same 200 MB from S3 through one cache, against one process and no cache.

`python -m bench.cache`. The checkpoint is served over HTTP on this machine by `tests/s3_files.py`,
20 ms after each request. Processes are started together; each opens the checkpoint and reads all of
it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.common import OUT, median, ours, table, targets
from tests.fakes import FakeSource, random_array
from tests.s3 import ENVIRONMENT
from tests.s3_files import Served, serving_files

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ROUNDS = 2
WAYS = 8
BOUND = 100_000_000
SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "one tensor": {"w": (25_000, 2_000)},
    "25 tensors": {"n": (2_000,), **{f"w{n}": (2_000, 1_000) for n in range(24)}},
    "500 tensors": {f"w{n}": (100_000,) for n in range(500)},
}
ENTRIES = 100_000


def main() -> None:
    folder, cache = OUT / "cache-checkpoints", OUT / "cache"
    for name, shapes in SHAPES.items():
        make(folder / _key(name), shapes)
    with serving_files(folder, 0.02) as served:
        for name in SHAPES:
            found: dict[str, list[dict[str, float]]] = {}
            for _ in range(ROUNDS):
                for title, count, with_cache, empty in CASES:
                    if empty:
                        shutil.rmtree(cache, ignore_errors=True)
                    took = read(
                        served.url(_key(name)), served, count, cache if with_cache else None
                    )
                    found.setdefault(title, []).append(took)
            show(name, found)
        most = bounded(served, served.url(_key("one tensor")), cache)
    blocks, evicted = against_raw(folder / _key("one tensor"), cache), eviction(cache)
    print(
        table(
            ["100 MB of one file, in the page cache", "GB/s"],
            [[k, f"{v:.1f}"] for k, v in blocks.items()],
        )
        + "\n"
    )
    print(
        targets(("most bytes on the disk with a bound of 100 MB, MB", "<= 100", most / 1e6)) + "\n"
    )
    print(
        f"To evict 5 % of {ENTRIES:,} blocks: {evicted:.2f} s. Load average: {os.getloadavg()[0]:.1f}."
    )
    shutil.rmtree(cache, ignore_errors=True)


CASES = (
    ("one process, no cache", 1, False, False),
    ("one process, empty cache", 1, True, True),
    ("one process, filled cache", 1, True, False),
    ("eight processes, no cache", WAYS, False, False),
    ("eight processes, empty cache", WAYS, True, True),
    ("eight processes, filled cache", WAYS, True, False),
)


def _key(name: str) -> str:
    return name.replace(" ", "-").replace(",", "")


def make(folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """A universal checkpoint of 200 MB."""
    import ucformat
    from ucformat.checkpoint import Checkpoint
    from ucformat.storage.memory import MemoryStore

    if not (folder / "manifest.json").exists():
        arrays = {
            (name, "weight"): random_array(shape, "float32", n)
            for n, (name, shape) in enumerate(shapes.items())
        }
        source = FakeSource.write(MemoryStore(f"bench-{folder.name}"), arrays, ranks=2)
        ucformat.convert(Checkpoint(source), folder, overwrite=True)


def read(url: str, served: Served, count: int, cache: Path | None, **more: str) -> dict[str, float]:
    """Start readers; what they have asked for, the seconds of the slowest, and of the processor in one."""
    environment = {
        **os.environ,
        **ENVIRONMENT,
        "PYTHONPATH": ".",
        "UCP_ENDPOINT": served.endpoint,
        **more,
    }
    environment["UCP_CACHE"] = str(cache.absolute()) if cache else "none"
    served.counts()
    command = [ours(), "-m", "bench.cache", url]
    readers = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    said = [json.loads(reader.communicate()[0]) for reader in readers]
    assert all(reader.returncode == 0 for reader in readers)
    assert len({one["digest"] for one in said}) == 1, "the readers have read different bytes"
    counts = served.counts()
    return {
        "requests": counts.requests,
        "nbytes": counts.nbytes,
        "processor": sum(one["processor"] for one in said) / count,
        "seconds": max(one["end"] for one in said) - min(one["begun"] for one in said),
    }


def reader(url: str) -> dict[str, Any]:
    """One process: open and read."""
    import hashlib

    import ucformat

    begun, spent = time.monotonic(), time.process_time()
    layout = ucformat.Layout({"dp": WAYS}, [{"match": "*", "place": ["replicate"]}])
    arrays = ucformat.open(url).plan(layout, 0).execute()
    end, spent = time.monotonic(), time.process_time() - spent
    digest = hashlib.blake2b()
    for key in sorted(arrays):
        digest.update(np.ascontiguousarray(arrays[key]).data)
    return {"begun": begun, "end": end, "processor": spent, "digest": digest.hexdigest()}


def show(name: str, found: dict[str, list[dict[str, float]]]) -> None:
    """The table of one checkpoint."""

    def of(title: str, what: str, pick: Callable[[list[float]], float] = median) -> float:
        return pick([took[what] for took in found[title]])

    rows = [
        [
            *(title, f"{of(title, 'requests'):.0f}", f"{of(title, 'nbytes') / 1e6:.1f}"),
            *(f"{of(title, what):.2f}" for what in ("seconds", "processor")),
        ]
        for title, *_ in CASES
    ]
    print(
        f"**{name}**, medians of {ROUNDS} interleaved rounds; load average {os.getloadavg()[0]:.1f}\n"
    )
    print(
        table(["200 MB", "requests", "MB received", "seconds", "processor seconds of each"], rows)
        + "\n"
    )
    eight = of("eight processes, empty cache", "requests", max)
    print(
        targets(
            *(
                (f"most requests of eight ÷ {alone}", "<= 1.05", eight / of(alone, "requests"))
                for alone in ("one process, empty cache", "one process, no cache")
            ),
            (
                "bytes of eight ÷ of one process, no cache",
                "<= 1.01",
                of("eight processes, empty cache", "nbytes", max)
                / of("one process, no cache", "nbytes"),
            ),
        )
        + "\n",
        flush=True,
    )


def bounded(served: Served, url: str, cache: Path) -> int:
    """The most bytes that a cache with a bound had on the disk while eight processes read twice as many."""
    shutil.rmtree(cache, ignore_errors=True)
    most, done = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.is_set():
            sizes = 0
            for entry in os.scandir(cache) if cache.exists() else ():
                try:
                    sizes += max(entry.stat().st_size, 512 * entry.stat().st_blocks)
                except FileNotFoundError:
                    continue
            most = max(most, sizes)

    watcher = threading.Thread(target=watch)
    watcher.start()
    read(url, served, WAYS, cache, UCP_CACHE_BYTES=str(BOUND))
    done.set()
    watcher.join()
    return most


def against_raw(folder: Path, cache: Path) -> dict[str, float]:
    """GB/s of reading a file into memory: raw, through the cache's entries, and of the checksums alone."""
    from ucformat.storage.cache.folder import CacheEntry, CacheFolder
    from ucformat.storage.strided import checksum

    path = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    size, block = path.stat().st_size >> 20 << 20, 1 << 20
    shutil.rmtree(cache, ignore_errors=True)
    kept = CacheFolder(str(cache), 1 << 30)
    entries = [CacheEntry(f"block {n}".encode()) for n in range(size // block)]
    target = np.empty(size, np.uint8).data
    with path.open("rb", buffering=0) as file:
        file.readinto(target)
        for n, entry in enumerate(entries):
            kept.write(entry, target[n * block : (n + 1) * block])

        def raw() -> None:
            file.seek(0)
            file.readinto(target)

        def cached() -> None:
            for n, entry in enumerate(entries):
                assert kept.read_into(entry, block, 0, [target[n * block : (n + 1) * block]])

        def checksums() -> None:
            for at in range(0, size, 64 << 10):
                checksum(target[at : at + (64 << 10)])

        took: dict[str, list[float]] = {}
        for _ in range(9):
            for title, work in (
                ("raw `readinto`", raw),
                ("blocks of the cache", cached),
                ("checksums alone", checksums),
            ):
                begun = time.perf_counter()
                work()
                took.setdefault(title, []).append(size / 1e9 / (time.perf_counter() - begun))
    return {title: median(speeds) for title, speeds in took.items()}


def eviction(cache: Path) -> float:
    """Seconds to write a block into a cache that is full with many others."""
    from ucformat.storage.cache.folder import CacheEntry, CacheFolder

    shutil.rmtree(cache, ignore_errors=True)
    limit = ENTRIES * (4096 + 128) + 8320
    kept = CacheFolder(str(cache), limit)
    for n in range(ENTRIES):
        (cache / f"{n:040x}").write_bytes(b"x")
    begun = time.perf_counter()
    kept.write(CacheEntry(b"one more"), b"x")
    return time.perf_counter() - begun


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(reader(sys.argv[1])))
    else:
        main()
