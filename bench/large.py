"""Loading a state of 8 GB on one rank, from the page cache and from the disk.

`python -m bench.large [LAYERS]`; one layer is 1.9 GB. `ucformat.torch.load` of a Llama-like state,
packed and as arrays, alternated with raw ways to read the same files into the same memory of huge
pages. Before each cold read the files are dropped from the page cache; loads read in the way that
`ucp doctor` has found best for the place, one of them as where it was not asked.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import sys
import time
import warnings
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import ucformat
import ucformat.torch as uct
from bench.common import OUT, median, table, targets
from bench.readers import RAW

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Acts = dict[str, Callable[[], object]]

HIDDEN, INTER, LAYERS, VOCAB = 4096, 11264, 9, 32_000
ROUNDS, COLD_ROUNDS = 7, 3
HUGE = 2 << 20
FOLDER = OUT / "large"
PROFILES = OUT / "large-profiles"
GOALS = {"unverified": 0.75, "verified": 0.7}
COLD_GOAL = 0.95


def main(layers: int = LAYERS) -> None:
    warnings.simplefilter("ignore")
    os.environ["UCP_CATALOG"] = "none"
    shapes = {"embed": (VOCAB, HIDDEN), "head": (VOCAB, HIDDEN)}
    for i in range(layers):
        shapes |= {f"layers.{i}.{name}": (HIDDEN, HIDDEN) for name in "qkvo"}
        shapes |= {f"layers.{i}.up": (INTER, HIDDEN), f"layers.{i}.gate": (INTER, HIDDEN)}
        shapes |= {f"layers.{i}.down": (HIDDEN, INTER)}
    memory = touched(4 * sum(rows * columns for rows, columns in shapes.values()))
    state, at = {}, 0
    for name, (rows, columns) in shapes.items():
        flat = memory[at : at + 4 * rows * columns].view(np.float32)
        flat[:] = np.arange(flat.size, dtype=np.float32)
        state[name] = torch.from_numpy(flat.reshape(rows, columns))
        at += flat.nbytes
    print(
        f"{memory.nbytes / 1e9:.1f} GB in {len(state)} tensors, medians; {os.cpu_count()} threads.\n"
    )
    wanted = []
    for form in ("packed", "zarr"):
        for folder in (FOLDER, PROFILES):
            shutil.rmtree(folder, ignore_errors=True)
        os.environ["XDG_DATA_HOME"] = str(PROFILES.absolute())  # what doctor keeps
        uct.save({"model": state}, FOLDER, form=form)
        files = [f for f in FOLDER.rglob("*") if f.stat().st_size > HUGE]
        load = partial(uct.load, {"model": state}, FOLDER)
        loads = {"unverified": partial(load, verify="never"), "verified": load}
        ours: Acts = {f"`load`, {form}, {how}": act for how, act in loads.items()}
        ways: Acts = {f"raw, {name}": partial(raw, files, memory, way) for name, way in RAW.items()}
        few: Acts = {name: ways[name] for name in ("raw, calls of 4 MiB", "raw, `mmap` + copy")}
        few["raw, calls of 4 MiB, `O_DIRECT`"] = partial(
            raw, files, memory, RAW["calls of 4 MiB"], os.O_DIRECT
        )
        unasked: Acts = {f"`load`, {form}, verified, no `doctor`": partial(without_profiles, load)}
        for where, acts in (("page cache", {**ways, **ours}), ("disk", {**few, **ours, **unasked})):
            cold = where == "disk"
            if cold:
                diagnosis = ucformat.doctor(FOLDER)
                print(
                    f"`doctor`: {diagnosis.disk_mb_per_s or 0:.0f} MB/s through the page cache, "
                    f"{diagnosis.direct_mb_per_s or 0:.0f} past it.\n"
                )
            times = alternated(COLD_ROUNDS if cold else ROUNDS, files, acts, cold=cold)
            seconds = {name: median(found) for name, found in times.items()}
            best = min(took for name, took in seconds.items() if name.startswith("raw"))
            lines = [
                [n, f"{t:.2f}", f"{memory.nbytes / t / 1e9:.2f}", f"{best / t:.2f}"]
                for n, t in seconds.items()
            ]
            print(
                table([f"{form}, from the {where}", "seconds", "GB/s", "÷ best raw"], lines) + "\n"
            )
            wanted += [
                (
                    f"{n}, from the {where} ÷ best raw",
                    f">= {COLD_GOAL if cold else GOALS[n.split(', ')[2]]}",
                    best / seconds[n],
                )
                for n in ours
            ]
    assert all(
        np.array_equal(t.numpy().ravel()[:HUGE], np.arange(HUGE, dtype=np.float32))
        for t in state.values()
    )
    print(targets(*wanted))
    for folder in (FOLDER, PROFILES):
        shutil.rmtree(folder)


def without_profiles(load: Callable[[], object]) -> None:
    """Load as where `doctor` was never asked."""
    kept = os.environ["XDG_DATA_HOME"]
    os.environ["XDG_DATA_HOME"] = f"{kept}-none"
    try:
        load()
    finally:
        os.environ["XDG_DATA_HOME"] = kept


def touched(nbytes: int) -> Any:
    """Memory of huge pages, all of which are there."""
    mapping = mmap.mmap(-1, nbytes + HUGE)
    begin = -ctypes.addressof(ctypes.c_char.from_buffer(mapping)) % HUGE
    mapping.madvise(mmap.MADV_HUGEPAGE, begin, nbytes)
    memory = np.frombuffer(mapping, np.uint8, nbytes, begin)
    memory[:] = 1
    return memory


def raw(
    files: list[Path], memory: Any, way: Callable[[int, memoryview, int], None], flags: int = 0
) -> None:
    """Read the bytes of the files, with a thread for each core, as far as the memory has room."""
    parts, left, cores = [], memoryview(memory), os.cpu_count() or 1
    for file in files:
        size = min(file.stat().st_size, len(left)) // mmap.PAGESIZE * mmap.PAGESIZE
        step = -(-size // cores // mmap.PAGESIZE) * mmap.PAGESIZE
        parts += [(file, left[at : min(at + step, size)], at) for at in range(0, size, step)]
        left = left[size:]

    def read(part: tuple[Path, memoryview, int]) -> None:
        fd = os.open(part[0], os.O_RDONLY | flags)
        try:
            way(fd, *part[1:])
        finally:
            os.close(fd)

    with ThreadPoolExecutor(cores) as pool:
        list(pool.map(read, parts))


def alternated(
    rounds: int, files: list[Path], acts: Acts, *, cold: bool = False
) -> dict[str, list[float]]:
    """The seconds of each round; the first, which warms the page cache, does not count unless each read is cold."""
    found: dict[str, list[float]] = defaultdict(list)
    for number in range(rounds if cold else rounds + 1):
        for name, act in acts.items():
            for file in files if cold else ():
                fd = os.open(file, os.O_RDONLY)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)
            begun = time.perf_counter()
            act()
            if number or cold:
                found[name].append(time.perf_counter() - begun)
    return found


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
