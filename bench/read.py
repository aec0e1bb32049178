"""Reading 1/8 along dim 0, 1/8 along dim 1 and all of a 1 GiB tensor from the page cache into existing memory.

`python -m bench.read`. ucformat against `readinto` of as many bytes, PyTorch DCP, safetensors' `get_slice` and a
copy, and TensorStore; each in a process of its own (`bench/readers.py`), interleaved.
"""

from __future__ import annotations

import json
import os
import subprocess

import numpy as np

import ucformat
from bench.common import OUT, engine_environment, median, ours, run, table, targets
from tests.engines import engine
from tests.fakes import FakeSource
from ucformat.checkpoint import Checkpoint
from ucformat.storage.local import LocalStore

SHAPE = (16384, 16384)
ROUNDS = 3
SLICES = ["dim 0", "dim 1", "all"]
#: name -> (reader, arguments, needs torch)
READERS = {
    "readinto, 1 thread": ("raw", ["1"], False),
    "ucformat unverified, 1 thread": ("ours", ["1", "never"], False),
    "ucformat verified, 1 thread": ("ours", ["1", "whole"], False),
    "readinto, 2 threads": ("raw", ["2"], False),
    "ucformat unverified, 2 threads": ("ours", ["2", "never"], False),
    "ucformat verified, 2 threads": ("ours", ["2", "whole"], False),
    "TensorStore": ("tensorstore", [], False),
    "safetensors": ("safetensors", [], False),
    "PyTorch DCP": ("dcp", [], True),
}


THREADS = ("1 thread", "2 threads")
#: The least share of `readinto` that was asked.
LEAST = {"unverified": 0.7, "verified": 0.6}


def main() -> None:
    make_files()
    environment = {**os.environ, "PYTHONPATH": "."}
    results: dict[tuple[str, str], list[dict[str, float]]] = {}
    for _ in range(ROUNDS):
        for what in SLICES:
            for name, (reader, arguments, torch) in READERS.items():
                python = str(engine("deepspeed")) if torch else ours()
                env = {**engine_environment(), "PYTHONPATH": "."} if torch else environment
                run([python, "bench/readers.py", reader, what, *arguments], env)
                said = json.loads((OUT / "command.log").read_text().splitlines()[-1])
                results.setdefault((name, what), []).append(said)
    print(f"float32 {SHAPE}, {ROUNDS} interleaved rounds, medians:\n")
    for what in SLICES:
        seconds = {n: median([r["seconds"] for r in results[n, what]]) for n in READERS}
        rows = []
        for name in READERS:
            raw = seconds["readinto, 2 threads" if name.endswith("2 threads") else "readinto, 1 thread"]
            first = results[name, what][0]
            rows.append(
                [
                    name,
                    f"{first['needed'] / 1e9 / seconds[name]:.2f}",
                    f"{raw / seconds[name]:.2f}",
                    f"{seconds['PyTorch DCP'] / seconds[name]:.1f}",
                    f"{max(r['peak'] for r in results[name, what]) / 1e6:.0f}",
                ]
            )
        print(f"**{what}**\n")
        print(table([what, "GB/s", "of readinto", "× DCP", "peak RSS above the tensor, MB"], rows) + "\n")
        asked = [(f"ucformat {kind}, {n}", f"readinto, {n}", least) for n in THREADS for kind, least in LEAST.items()]
        ratios = [(f"{name} ÷ readinto", f">= {least}", seconds[raw] / seconds[name]) for name, raw, least in asked]
        name = "ucformat verified, 1 thread"
        print(targets(*ratios, (f"{name}, × DCP", ">= 5", seconds["PyTorch DCP"] / seconds[name])) + "\n")


def make_files() -> None:
    """The same tensor as a universal checkpoint, a raw file, a safetensors file and a DCP folder; made once."""
    OUT.mkdir(parents=True, exist_ok=True)
    if not (OUT / "tensor.bin").exists():
        np.random.default_rng(0).standard_normal(SHAPE, np.float32).tofile(OUT / "tensor.bin")
    if not (OUT / "universal" / "manifest.json").exists():
        a = np.fromfile(OUT / "tensor.bin", np.float32).reshape(SHAPE)
        source = FakeSource.write(LocalStore(OUT / "fake"), {("w", "weight"): a}, ranks=2)
        ucformat.convert(Checkpoint(source), OUT / "universal")
    script = ["bench/readers.py", "make", "", str(SHAPE[0]), str(SHAPE[1])]
    subprocess.run([str(engine("deepspeed")), *script], check=True, env={**engine_environment(), "PYTHONPATH": "."})


if __name__ == "__main__":
    main()
