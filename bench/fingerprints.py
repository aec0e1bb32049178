"""Fingerprints: how fast they are computed, beside checksums and copies of the same memory, and what they cost.

`python -m bench.fingerprints`. One thread; the best of the rounds, interleaved. Saves are of 1.1 GB
over FSDP2 on ranks of one machine, in pairs with and without fingerprints, whose computation is
patched out; the time is that of the slowest rank, and the ratio the median of the pairs' own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import torch

import ucformat
from bench.common import OUT, ROOT, median, table, targets
from ucformat.geometry import fingerprint
from ucformat.geometry.box import Box
from ucformat.geometry.fingerprint import fingerprint_of
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
PAIRS = 9  # of saves
FORMS = ("packed", "zarr")
#: Where saves compute fingerprints.
COMPUTED = ("ucformat.torch.saving.write.fingerprint_of", "ucformat.format.shard.fingerprint_of")


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
    saves = {(form, world): saved_in_pairs(form, world) for world in (2, 4) for form in FORMS}
    print(
        table(
            ["save", "without, s", "with, s", "without / with (range)", "load average"],
            [[f"{form}, {world} ranks", *cells] for (form, world), (cells, _) in saves.items()],
        )
        + "\n"
    )
    print(
        targets(
            *(
                (f"save without / with fingerprints, {form}, {world} ranks", ">= 0.9", ratio)
                for (form, world), (_, ratio) in saves.items()
            ),
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
    all_of_it = Box((0,), large.shape)
    out = np.empty_like(large)
    ways: dict[str, tuple[int, Callable[[], object]]] = {
        "cached": (CACHED, lambda: whole(cached)),
        "rows of 4 KiB": (CACHED, lambda: fingerprint_of(part, matrix.shape, box)),
        "memory": (LARGE, lambda: whole(large)),
        "in Python": (CACHED, lambda: in_python(cached)),
        "PyTorch": (LARGE, lambda: sums_on_device(tensor, large.shape, all_of_it)),
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


def saved_in_pairs(form: str, world: int) -> tuple[list[str], float]:
    """The cells of a row, and the median of the ratios."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "UCP_CATALOG": "none",
    }
    ranks = ["--standalone", "--nproc-per-node", str(world)]
    program = [str(ROOT / "bench/fingerprints.py"), str(FOLDER.absolute()), form]
    before = os.getloadavg()[0]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *ranks, *program],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr[-4000:])
    shutil.rmtree(FOLDER)
    pairs = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    ratios = [without / computed for without, computed in pairs]
    cells = [f"{median(list(times)):.2f}" for times in zip(*pairs, strict=True)]
    cells += [f"{median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"]
    return [*cells, f"{before:.1f}–{os.getloadavg()[0]:.1f}"], median(ratios)


def save_in_pairs(folder: Path, form: Any) -> None:
    """What each rank does; rank 0 prints the seconds of each pair after the first, without and with fingerprints."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from bench import train_program

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {"model": train_program.state(mesh, "fsdp2", fill=True)}

    def seconds(*, computed: bool) -> float:
        place = train_program.fresh(folder, form)
        with ExitStack() as stack:
            for name in () if computed else COMPUTED:
                stack.enter_context(patch(name, lambda *_: fingerprint.NO_ELEMENTS))
            taken: float = train_program.timed(partial(save, state, place, form=form))[0]
        recorded = {t.fingerprint for t in ucformat.open(place).manifest.tensors}
        assert (recorded != {"0" * 32}) is computed
        return taken

    for number in range(PAIRS + 1):
        pair = {
            computed: seconds(computed=computed) for computed in (number % 2 > 0, number % 2 < 1)
        }
        if number and not dist.get_rank():
            print(json.dumps([pair[False], pair[True]]), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        save_in_pairs(Path(sys.argv[1]), sys.argv[2])
    else:
        main()
