"""Fingerprints: how fast they are computed, beside checksums and copies of the same memory, and what a read costs more.

`python -m bench.fingerprints`. One thread; the best of the rounds, interleaved.
"""

from __future__ import annotations

import shutil
import time
from typing import TYPE_CHECKING

import numpy as np
import torch

import ucformat
from bench.common import OUT, table, targets
from ucformat.geometry import fingerprint
from ucformat.geometry.box import Box
from ucformat.geometry.fingerprint import fingerprint_of
from ucformat.geometry.tensor import Piece
from ucformat.storage.strided import checksum
from ucformat.torch import save
from ucformat.torch.state.fingerprint import sums_on_device

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

ROUNDS = 15
CACHED, LARGE = 1 << 18, 1 << 28  # bytes
ROW = 4096  # bytes of a strided row
DTYPES = {"1 byte": "u1", "2 bytes": "u2", "4 bytes": "u4", "8 bytes": "u8"}
FOLDER = OUT / "fingerprints"


def main() -> None:
    torch.set_num_threads(1)
    rows, floor = [], {}
    for name, dtype in DTYPES.items():
        speeds = speeds_of(dtype)
        rows.append([name, *(f"{speed:.1f}" for speed in speeds.values())])
        floor[name] = min(speeds["cached"], speeds["rows of 4 KiB"], speeds["memory"])
    print(table(["elements of", *speeds], rows))
    print("\nGB/s of one core.\n")
    read, both = reads()
    print(
        targets(
            ("slowest of the three, 4 bytes, GB/s", ">= 5", floor["4 bytes"]),
            ("slowest of the three, 2 bytes, GB/s", ">= 3", floor["2 bytes"]),
            ("verified read of 1 GiB / the same with a fingerprint", ">= 0.7", read / both),
        )
    )


def speeds_of(dtype: str) -> dict[str, float]:
    """The speeds of all ways, in GB/s."""
    cached = random(CACHED, dtype).reshape(-1)
    large = random(LARGE, dtype)
    matrix = large.reshape(-1, 4 * ROW // large.itemsize)
    part = matrix[: CACHED // ROW, : matrix.shape[1] // 4]
    box = Box((0, matrix.shape[1] // 4), part.shape)
    tensor = torch.from_numpy(large.view(f"i{large.itemsize}" if large.itemsize > 1 else "u1"))
    piece = Piece(Box((0,), large.shape), 0, (1,))
    out = np.empty_like(large)
    ways: dict[str, tuple[int, Callable[[], object]]] = {
        "cached": (CACHED, lambda: whole(cached)),
        "rows of 4 KiB": (CACHED, lambda: fingerprint_of(part, matrix.shape, box)),
        "memory": (LARGE, lambda: whole(large)),
        "in Python": (CACHED, lambda: in_python(cached)),
        "PyTorch": (LARGE, lambda: sums_on_device(tensor, large.shape, piece)),
        "CRC-32C, cached": (CACHED, lambda: checksum(cached.data.cast("B"))),
        "CRC-32C, memory": (LARGE, lambda: checksum(large.data.cast("B"))),
        "copy, memory": (LARGE, lambda: np.copyto(out, large)),
    }
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(ROUNDS):
        for name, (nbytes, way) in ways.items():
            times = max(1, (1 << 24) // nbytes)
            begun = time.perf_counter()
            for _ in range(times):
                way()
            best[name] = min(best[name], (time.perf_counter() - begun) / times)
    return {name: nbytes / best[name] / 1e9 for name, (nbytes, _) in ways.items()}


def random(nbytes: int, dtype: str) -> NDArray[np.generic]:
    return np.random.default_rng(0).integers(0, 256, nbytes, np.uint8).view(dtype)


def whole(array: NDArray[np.generic]) -> object:
    return fingerprint_of(array, array.shape, Box.whole(array.shape))


def in_python(array: NDArray[np.generic]) -> object:
    native, fingerprint.NATIVE = fingerprint.NATIVE, False
    try:
        return whole(array)
    finally:
        fingerprint.NATIVE = native


def reads() -> tuple[float, float]:
    """The best seconds of a verified read of 1 GiB from the page cache, and of the same with its fingerprint."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    array = random(1 << 30, "<f4").reshape(16384, 16384)
    ck = ucformat.convert(saved(array), FOLDER / "u")
    tensor, out = ck["w", "weight"], np.empty_like(array)
    read, both = [], []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        tensor.read(out, threads=1)
        read.append(time.perf_counter() - begun)
        whole(out)
        both.append(time.perf_counter() - begun)
    assert ck.manifest.tensors[0].fingerprint == fingerprint.text_of(
        fingerprint_of(out, out.shape, Box.whole(out.shape))
    )
    shutil.rmtree(FOLDER)
    return min(read), min(both)


def saved(array: NDArray[np.generic]) -> str:
    FOLDER.mkdir(parents=True)
    save({"w": torch.from_numpy(array)}, FOLDER / "s")
    return str(FOLDER / "s")


if __name__ == "__main__":
    main()
