"""A ZeRO-3 checkpoint through its Zarr store, and the same slices through its lazy tensors.

`python -m bench.zarr_store`. Slices of one chunk (1 MiB), of 16 chunks, and whole tensors, all of
one state, from the page cache; and the same arrays in zarr-python's store in memory, the bound that
zarr-python itself sets. The ways are alternated in one process, and each ratio is the median of
those of the rounds.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import zarr

import ucformat
from bench.common import median, real_checkpoint, table, targets

if TYPE_CHECKING:
    from typing import Any

ROUNDS = 7
STATE = "exp_avg"
GOAL = 0.5


def main() -> None:
    ck = ucformat.open(real_checkpoint())
    group = zarr.open_group(ck.zarr_store())
    infos = [i for key, i in ck.tensors.items() if key.state == STATE and i.nbytes >= 1 << 20]
    nbytes = sum(i.nbytes for i in infos)
    memory = zarr.open_group(held_in_memory(group, [f"{STATE}/{i.name}" for i in infos]), mode="r")
    rows, goals = [], []
    for what, chunks in {"1 MiB": 1, "16 MiB": 16, "whole tensors": 0}.items():
        edges = [chunks * array_of(group, i.name).chunks[0] or i.shape[0] for i in infos]
        ways = {
            "lazy tensors": [ck[i.name, STATE] for i in infos],
            "Zarr store": [array_of(group, i.name) for i in infos],
            "zarr in memory": [array_of(memory, i.name) for i in infos],
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(ROUNDS + 1):
            for name, arrays in ways.items():
                begun = time.perf_counter()
                for array, edge in zip(arrays, edges, strict=True):
                    for at in range(0, array.shape[0], edge):
                        array[at : at + edge]
                times[name].append(time.perf_counter() - begun)
        lazy, store, held = (of[1:] for of in times.values())
        ratio, most = (
            median([a / b for a, b in zip(lazy, of, strict=True)]) for of in (store, held)
        )
        speeds = (f"{nbytes / 1e9 / median(of):.2f}" for of in (lazy, store, held))
        rows.append([what, *speeds, f"{ratio:.2f}", f"{most:.2f}"])
        goals.append((f"{what}: Zarr store ÷ lazy tensors", f">= {GOAL}", ratio))
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    print(f"{len(infos)} tensors, {nbytes / 1e6:.0f} MB, {ROUNDS} rounds; load average {load}.\n")
    print(
        table(
            [
                "slices of",
                "lazy tensors, GB/s",
                "Zarr store, GB/s",
                "zarr in memory, GB/s",
                "Zarr store ÷ lazy",
                "zarr in memory ÷ lazy",
            ],
            rows,
        )
        + "\n"
    )
    print(targets(*goals))


def array_of(group: zarr.Group, name: str) -> Any:
    """The array of a tensor."""
    return group[f"{STATE}/{name}"]


def held_in_memory(group: zarr.Group, paths: list[str]) -> zarr.storage.MemoryStore:
    """The same arrays in zarr-python's own store in memory, which only looks up the chunks: a bound of every store."""
    store = zarr.storage.MemoryStore()
    for path in paths:
        array = group[path]
        assert isinstance(array, zarr.Array)
        made = zarr.create_array(
            store,
            name=path,
            shape=array.shape,
            chunks=array.chunks,
            dtype=array.dtype,
            compressors=None,
            filters=None,
        )
        made[...] = array[...]
    return store


if __name__ == "__main__":
    main()
