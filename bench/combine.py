"""Combining ten checkpoints, one tensor of which is a real 32,000 x 4,096 embedding: peak memory, and speed.

`python -m bench.combine`. In a folder in memory, ten models in bfloat16 (and for one line in
float32), as safetensors and as universal checkpoints. Each method runs in a process of its own,
which reports its peak memory (`VmHWM`). Its time is compared with that of reading the same files
once, in calls of 4 MiB, with a thread for each core.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

import ucformat
from bench.common import median, ours, table, targets

INPUTS, VOCAB, HIDDEN, ROUNDS = 10, 32_000, 4096, 1
MOST_MB = 400
_READ = 4 << 20
_WORK = """
import json, re, sys, time
import ucformat
name, sources, target, options = json.loads(sys.argv[1])
begun, worked = time.perf_counter(), time.process_time()
if name == "average":
    ucformat.average(sources, target, overwrite=True, **options)
elif name == "convert":
    ucformat.convert(sources[0], target, overwrite=True)
else:
    ucformat.merge(name, sources, target, overwrite=True, **options)
seconds, worked = time.perf_counter() - begun, time.process_time() - worked
peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
print(json.dumps([seconds, worked, peak / 1e3]))
"""


def write_inputs(folder: Path, dtype: Any) -> list[Path]:
    """Ten fine-tuned models; all but the embedding is small."""
    base = np.random.default_rng(0).standard_normal((VOCAB, HIDDEN), np.float32)
    places = []
    for n in range(INPUTS):
        rng = np.random.default_rng(n + 1)
        tuned = (
            base
            + rng.standard_normal((VOCAB, 1), np.float32)
            * rng.standard_normal(HIDDEN, np.float32)
            / 100
        )
        layers = {
            f"layers.{i}.weight": rng.standard_normal((512, 512), np.float32).astype(dtype)
            for i in range(8)
        }
        place = folder / f"m{n}"
        place.mkdir(parents=True)
        save_file({"embed.weight": tuned.astype(dtype), **layers}, place / "model.safetensors")
        places.append(place)
    return places


def combined(
    name: str, sources: list[Path], target: Path, **options: Any
) -> tuple[float, float, float]:
    """The seconds of one run, those of the processor, and the peak of its process in MB."""
    given = json.dumps([name, list(map(str, sources)), str(target), options])
    environment = {**os.environ, "UCP_CATALOG": "none", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [ours(), "-c", _WORK, given], check=True, stdout=subprocess.PIPE, env=environment
    )
    seconds, worked, peak = json.loads(done.stdout)
    return seconds, worked, peak


def read_raw(sources: list[Path]) -> float:
    """The seconds of reading all files once."""
    files = [f for place in sources for f in place.rglob("*") if f.is_file()]

    def read(file: Path) -> None:
        buffer = bytearray(_READ)
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass

    begun = time.perf_counter()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(read, files))
    return time.perf_counter() - begun


def main() -> None:
    os.environ["UCP_CATALOG"] = "none"
    memory = Path(tempfile.mkdtemp(prefix="ucp-bench-", dir="/dev/shm"))
    try:
        lines, wanted = measured(memory)
        load = ", ".join(f"{n:.1f}" for n in os.getloadavg())
        print(
            f"{INPUTS} models with one tensor of {VOCAB:,} x {HIDDEN:,} each; {ROUNDS} run; load average {load}.\n"
        )
        print(
            table(
                [
                    "",
                    "inputs",
                    "seconds",
                    "of processors",
                    "input MB/s",
                    "raw read, s",
                    "÷ raw",
                    "peak, MB",
                ],
                lines,
            )
            + "\n"
        )
        print(targets(*wanted))
    finally:
        shutil.rmtree(memory)


def measured(memory: Path) -> tuple[list[list[str]], list[tuple[str, str, float]]]:
    """The lines of the table, and the targets."""
    lines, wanted = [], []
    for dtype, kinds in (
        (ml_dtypes.bfloat16, ("safetensors", "universal")),
        (np.float32, ("safetensors",)),
    ):
        name = np.dtype(dtype).name
        for kind in kinds:
            places = write_inputs(memory / "src", dtype)
            if kind == "universal":
                for place in places:
                    ucformat.convert(place, memory / "universal" / place.name)
                shutil.rmtree(memory / "src")
                places = [memory / "universal" / place.name for place in places]
            base = {"base": str(places[0])}
            runs: list[tuple[str, list[Path], dict[str, Any]]] = [("average", places, {})]
            if name == "bfloat16" and kind == "safetensors":
                runs += [
                    ("convert", places[:1], {}),
                    ("task-arithmetic", places[1:], base),
                    ("slerp", places[:2], {}),
                    ("ties", places[1:], base),  # it reads them three times, or four
                    ("dare", places[1:], {**base, "density": 0.5, "seed": 0}),
                ]
            for method, sources, options in runs:
                read = sources + ([places[0]] if options.get("base") else [])
                nbytes = sum(
                    f.stat().st_size for place in read for f in place.rglob("*") if f.is_file()
                )
                found = [
                    combined(method, sources, memory / "out", **options) for _ in range(ROUNDS)
                ]
                seconds, worked, peak = (
                    *(median([f[n] for f in found]) for n in (0, 1)),
                    max(f[2] for f in found),
                )
                raw = median([read_raw(read) for _ in range(ROUNDS)])
                what = f"{len(read)} {kind}, {name}"
                speed = f"{nbytes / seconds / 1e6:,.0f}"
                cells = [
                    f"{seconds:.2f}",
                    f"{worked:.2f}",
                    speed,
                    f"{raw:.2f}",
                    f"{seconds / raw:.1f}",
                    f"{peak:.0f}",
                ]
                lines.append([f"`{method}`", what, *cells])
                print(lines[-1], file=sys.stderr)
                if method != "convert":
                    wanted.append((f"peak of `{method}`, {what}, MB", f"<= {MOST_MB}", peak))
                shutil.rmtree(memory / "out")
            shutil.rmtree(memory / "universal", ignore_errors=True)
            shutil.rmtree(memory / "src", ignore_errors=True)
    return lines, wanted


if __name__ == "__main__":
    main()
