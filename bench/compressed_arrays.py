"""Arrays of compressed chunks: decoding by ucformat and by Zarr's readers, and what a codec costs a conversion.

`python -m bench.compressed_arrays`. Each array is read whole on one core, in processor time, which
other programs do not change; the best of the rounds, interleaved. The values are random: normal
weights in bfloat16, and squares of normal gradients in float32. A conversion is of both, from an
uncompressed checkpoint, on all cores. Files are in the page cache.
"""

from __future__ import annotations

import os
import shutil
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorstore
import torch
import zarr
from numcodecs import blosc  # type: ignore[import-untyped]

import ucformat
from bench.common import OUT, table, targets
from ucformat.torch import save

if TYPE_CHECKING:
    from collections.abc import Callable

    from ucformat.checkpoint import Checkpoint

ROUNDS = 7
ELEMENTS = 1 << 26
FOLDER = OUT / "compressed_arrays"
#: A checkpoint of each, by the name of its folder.
CODECS: dict[str, Any] = {"plain": None, "blosc": "blosc"}


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(ELEMENTS // 4096, 4096, generator=generator)
    state = {
        "bf16 weights": (0.02 * values).bfloat16(),
        "fp32 moments": (1e-4 * values[: len(values) // 2]) ** 2,
    }
    save(state, FOLDER / "source")
    seconds = conversions()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    opened = {codec: ucformat.open(FOLDER / codec) for codec in CODECS}
    rows, checks = [], []
    for name in state:
        sizes = {codec: stored(ck, name) for codec, ck in opened.items()}
        share = sizes["blosc"] / sizes["plain"]
        speeds = speeds_of(opened, name)
        rows.append([name, f"{share:.3f}", *(f"{speed:.2f}" for speed in speeds.values())])
        ours, theirs = speeds["ucformat"], speeds["zarr-python"]
        checks += [
            (f"{name}, GB/s a core", ">= 1", ours),
            (f"{name}, ÷ zarr-python", ">= 3", ours / theirs),
            (f"{name}, ÷ TensorStore", ">= 1", ours / speeds["TensorStore"]),
        ]
    print(table(["read", "stored / plain", *speeds], rows))
    print("\nGB/s of decoded bytes.\n")
    nbytes = sum(info.nbytes for info in opened["plain"].tensors.values())
    took = [[codec, f"{s:.2f}", f"{nbytes / s / 1e6:,.0f}"] for codec, s in seconds.items()]
    print(table(["conversion", "s", "MB/s"], took) + "\n")
    print(targets(*checks))


def stored(ck: Checkpoint, name: str) -> int:
    """The bytes that reading an array takes."""
    return ck[name].plan().through(ck.store).bytes_read


def conversions() -> dict[str, float]:
    """The seconds of a conversion with each codec."""
    seconds = dict.fromkeys(CODECS, float("inf"))
    for _ in range(3):
        for name, codec in CODECS.items():
            shutil.rmtree(FOLDER / name, ignore_errors=True)
            begun = time.perf_counter()
            ucformat.convert(FOLDER / "source", FOLDER / name, codec=codec)
            seconds[name] = min(seconds[name], time.perf_counter() - begun)
    return seconds


def speeds_of(opened: dict[str, Checkpoint], name: str) -> dict[str, float]:
    """The GB/s with which each reads an array into memory on one core."""
    ucformat.register_zarr_dtypes()
    ck = opened["blosc"]
    tensor, out = ck[name], ck[name].read()
    folder = FOLDER / "blosc" / str(next(t.path for t in ck.manifest.tensors if t.name == name))
    blosc.use_threads = False
    one = {"limit": 1}
    context = tensorstore.Context({"data_copy_concurrency": one, "file_io_concurrency": one})
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(folder.absolute())}}
    theirs = tensorstore.open(spec, context=context).result()
    array = zarr.open_array(folder, mode="r")
    ways: dict[str, Callable[[], Any]] = {
        "ucformat": lambda: tensor.read(out, threads=1),
        "ucformat, plain": lambda: opened["plain"][name].read(out, threads=1),
        "zarr-python": lambda: array[...],
        "TensorStore": lambda: theirs.read().result(),
    }
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(ROUNDS):
        for way, read in ways.items():
            begun = time.process_time()
            got = read()
            best[way] = min(best[way], time.process_time() - begun)
            assert np.array_equal(np.asarray(got).view("u1")[:9], out.view("u1")[:9])
    return {way: tensor.nbytes / seconds / 1e9 for way, seconds in best.items()}


if __name__ == "__main__":
    with zarr.config.set({"threading.max_workers": 1, "async.concurrency": 1}):
        main()
