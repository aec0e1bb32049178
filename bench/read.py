"""Reading 1/8 along dim 0, 1/8 along dim 1 and all of a 1 GiB tensor into existing memory.

`python -m bench.read`. ucformat against the best raw way to read as many bytes from the page cache,
alternated with it in one process and into the same memory, for memory of 4 KiB pages and of huge
pages; then from the disk; then PyTorch DCP, safetensors' `get_slice` and a copy, and TensorStore,
each in a process of its own (`bench/readers.py`).
"""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import numpy as np

import ucformat
from bench.common import OUT, engine_environment, median, ours, run, table, targets
from bench.readers import NOWHERE
from tests.engines import engine
from tests.fakes import FakeSource
from ucformat.checkpoint import Checkpoint
from ucformat.storage.local import LocalStore

SHAPE = (16384, 16384)
ROUNDS = 9
COLD_ROUNDS = 3
PEER_ROUNDS = 3
SLICES = ["dim 0", "dim 1", "all"]
THREADS = ("1 thread", "2 threads")
GOALS = {"unverified": 0.85, "verified": 0.7}
#: name -> (reader, arguments, needs torch)
READERS = {
    "ucformat verified, 1 thread": ("ours", ["1", "whole"], False),
    "TensorStore": ("tensorstore", [], False),
    "safetensors": ("safetensors", [], False),
    "PyTorch DCP": ("dcp", [], True),
}


def main() -> None:
    make_files()
    print(
        f"float32 {SHAPE}; medians of {ROUNDS} alternated rounds; the best raw way is that of any pages.\n"
    )
    for what in SLICES:
        warm(what)
    cold()
    peers()


def read(reader: str, what: str, arguments: list[str], *, torch: bool = False) -> Any:
    """What a process of `bench/readers.py` prints."""
    python = str(engine("deepspeed")) if torch else ours()
    environment = engine_environment() if torch else dict(os.environ)
    run([python, "bench/readers.py", reader, what, *arguments], environment | {"PYTHONPATH": "."})
    return json.loads((OUT / "command.log").read_text().splitlines()[-1])


def nbytes(what: str) -> int:
    return SHAPE[0] * SHAPE[1] * 4 // (1 if what == "all" else 8)


def warm(what: str) -> None:
    found = {
        pages: {name: median(times) for name, times in of.items()}
        for pages, of in read("compare", what, [str(ROUNDS)]).items()
    }
    raw = {
        name for name in next(iter(found.values())) if not name.startswith(("ucformat", NOWHERE))
    }
    best = {
        n: min(of[name] for of in found.values() for name in raw if name.endswith(n))
        for n in THREADS
    }
    names = list(next(iter(found.values())))
    rows = [
        [name, *(f"{nbytes(what) / 1e9 / of[name]:.2f}" for of in found.values())]
        + [f"{best[name.rpartition(', ')[2]] / of[name]:.2f}" for of in found.values()]
        for name in names
    ]
    print(f"**{what}**\n")
    print(
        table([what, *(f"GB/s, {p}" for p in found), *(f"÷ best raw, {p}" for p in found)], rows)
        + "\n"
    )
    least = {n: min(of[f"{NOWHERE}, {n}"] for of in found.values()) for n in THREADS}
    bounds = " and ".join(f"{best[n] / least[n]:.2f} with {n}" for n in THREADS)
    print(
        "`preadv` of 256 KiB again and again into one buffer, a bound of every reader that does not map files:"
    )
    print(f"{bounds} of the best raw way.\n")
    ours_ = found["huge pages"]
    goals = [(f"ucformat {kind}, {n}", n, goal) for n in THREADS for kind, goal in GOALS.items()]
    print(
        targets(
            *(
                (f"{name} ÷ best raw", f">= {goal}", best[n] / ours_[name])
                for name, n, goal in goals
            )
        )
        + "\n"
    )


def cold() -> None:
    """Read in the way that `doctor` finds best for the place."""
    os.environ["XDG_DATA_HOME"] = str((OUT / "read-profiles").absolute())  # what it keeps
    diagnosis = ucformat.doctor(OUT)
    print(
        f"`doctor`: {diagnosis.disk_mb_per_s or 0:.0f} MB/s from the disk through the page cache, "
        f"{diagnosis.direct_mb_per_s or 0:.0f} past it.\n"
    )
    rows, goals = [], []
    for what in SLICES:
        times = {
            name: median(values) for name, values in read("cold", what, [str(COLD_ROUNDS)]).items()
        }
        rows.append([what, *(f"{nbytes(what) / 1e9 / seconds:.2f}" for seconds in times.values())])
        *raw, ours_ = times.values()
        goals.append((f"{what}, from the disk ÷ best raw", ">= 0.95", min(raw) / ours_))
    print(f"From the disk: GB/s, medians of {COLD_ROUNDS} alternated rounds.\n")
    print(table(["", *times], rows) + "\n")
    print(targets(*goals) + "\n")


def peers() -> None:
    """Beside the peers, and the peak memory."""
    rows, goals = [], []
    for what in SLICES:
        results: dict[str, list[dict[str, float]]] = {name: [] for name in READERS}
        for _ in range(PEER_ROUNDS):
            for name, (reader, arguments, torch) in READERS.items():
                results[name].append(read(reader, what, arguments, torch=torch))
        seconds = {name: median([r["seconds"] for r in of]) for name, of in results.items()}
        for name, of in results.items():
            peak = max(r["peak"] for r in of) / 1e6
            ratio = seconds["PyTorch DCP"] / seconds[name]
            rows.append(
                [
                    what,
                    name,
                    f"{nbytes(what) / 1e9 / seconds[name]:.2f}",
                    f"{ratio:.1f}",
                    f"{peak:.0f}",
                ]
            )
        name = next(iter(READERS))
        goals.append((f"{what}: {name}, × DCP", ">= 5", seconds["PyTorch DCP"] / seconds[name]))
    print(f"Beside peers: medians of {PEER_ROUNDS} interleaved rounds.\n")
    print(table(["", "reader", "GB/s", "× DCP", "peak RSS above the tensor, MB"], rows) + "\n")
    print(targets(*goals) + "\n")


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
    subprocess.run(
        [str(engine("deepspeed")), *script],
        check=True,
        env={**engine_environment(), "PYTHONPATH": "."},
    )


if __name__ == "__main__":
    main()
