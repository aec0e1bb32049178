"""Saving and loading in the training loop, beside PyTorch DCP and the same bytes through `write` and `readinto`.

`python -m bench.train`. A Llama-like model of 1.1 GB over FSDP2, on 2 and 4 ranks of one machine over gloo; interleaved
rounds, of which the first is not counted; page-cached; each time is that of the slowest rank.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from typing import TYPE_CHECKING

from bench.common import OUT, ROOT, median, table, targets

if TYPE_CHECKING:
    from collections.abc import Iterator

ROUNDS = 5
WORLDS = (2, 4)


def main() -> None:
    found = {world: measured(world) for world in WORLDS}
    print("Seconds (range), and speed as a multiple of the peer's.\n")
    compare("Save", "`write` + `fsync`", SAVES, found)
    compare("Load under the same layout", "`readinto`", loads("fsdp2"), found)
    compare("Load under tensor parallelism", "`readinto`", loads("tp"), found)
    compare("Load sharded along columns", "`readinto`", loads("columns"), found)
    rows = {"stall of `async_save`, × `memcpy`": [m["blocked"] / m["memcpy"] for m in found.values()]}
    for form in ("packed", "zarr"):
        for kind in ("fsdp2", "tp", "columns"):
            rows[f"bytes read by all ÷ held, {form}, {kind}"] = [m.mean(f"read {form} {kind}") for m in found.values()]
        label = f"bytes read by all ÷ state, `broadcast_group`, {form}"
        rows[label] = [m.sum(f"read shared {form}") for m in found.values()]
    rows["largest extra memory of a rank ÷ size of its shards"] = [m["memory"] for m in found.values()]
    print(table(["", *(f"{w} ranks" for w in WORLDS)], [[k, *(f"{v:.3f}" for v in row)] for k, row in rows.items()]))
    print()
    print(targets(*(row for world, m in found.items() for row in asked(world, m))))


def asked(world: int, m: Measures) -> Iterator[tuple[str, str, float]]:
    """What was asked of so many ranks."""
    yield f"`save`, packed, × `dcp.save`, {world} ranks", ">= 1.5", m["save dcp"] / m["save packed"]
    yield f"`save`, packed ÷ `write` + `fsync`, {world} ranks", ">= 0.8", m["save raw"] / m["save packed"]
    yield f"`save`, zarr ÷ `write` + `fsync`, {world} ranks", ">= 0.5", m["save raw"] / m["save zarr"]
    for kind in ("tp", "columns"):
        for form in ("packed", "zarr"):
            ratio = m[f"load dcp {kind}"] / m[f"load {form} {kind}"]
            yield f"resharded load, {kind}, {form}, × `dcp.load`, {world} ranks", ">= 4", ratio
    yield f"stall of `async_save`, × `memcpy`, {world} ranks", "<= 1.3", m["blocked"] / m["memcpy"]
    read = [m.mean(f"read {form} {kind}") for form in ("packed", "zarr") for kind in ("fsdp2", "tp", "columns")]
    shared = [m.sum(f"read shared {form}") for form in ("packed", "zarr")]
    yield (
        f"bytes read ÷ held, or with `broadcast_group` ÷ state: the highest, {world} ranks",
        "<= 1.05",
        max(read + shared),
    )


def compare(title: str, limit: str, measures: dict[str, tuple[str, str, str]], found: dict[int, Measures]) -> None:
    """Print a table of seconds, beside DCP's and the raw limit's."""
    rows = []
    for name, (ours, dcp, raw) in measures.items():
        row = [name]
        for m in found.values():
            row.append(f"{m[ours]:.2f} ({min(m.all[ours]):.2f}–{max(m.all[ours]):.2f})")
            row += [f"{m[dcp] / m[ours]:.2f}", f"{m[raw] / m[ours]:.2f}"]
        rows.append(row)
    print(table([title, *(c for w in found for c in (f"{w} ranks", "× DCP", f"× {limit}"))], rows) + "\n")


SAVES = {
    "`write` + `fsync`, one file per rank": ("save raw", "save dcp", "save raw"),
    "`dcp.save`": ("save dcp", "save dcp", "save raw"),
    "`save`, packed": ("save packed", "save dcp", "save raw"),
    "`save`, zarr": ("save zarr", "save dcp", "save raw"),
}


def loads(kind: str) -> dict[str, tuple[str, str, str]]:
    names = {f"`load`, {form}": (f"load {form} {kind}", f"load dcp {kind}", "load raw") for form in ("packed", "zarr")}
    return {
        "`readinto` of the same bytes": ("load raw", f"load dcp {kind}", "load raw"),
        "`dcp.load`": (f"load dcp {kind}", f"load dcp {kind}", "load raw"),
        **names,
    }


class Measures:
    """All values of each measure: for each round after the first, those of all ranks."""

    def __init__(self, lines: list[str]) -> None:
        self.ranks: dict[str, list[list[float]]] = defaultdict(list)
        for line in lines:
            told = json.loads(line)
            self.ranks[told["measure"]].append(told["values"])
        self.all = {k: [max(v) for v in (rounds[1:] or rounds)] for k, rounds in self.ranks.items()}

    def __getitem__(self, measure: str) -> float:
        return median(self.all[measure])

    def mean(self, measure: str) -> float:
        """The mean over ranks, of the last round."""
        return sum(self.ranks[measure][-1]) / len(self.ranks[measure][-1])

    def sum(self, measure: str) -> float:
        """The sum over ranks, of the last round."""
        return sum(self.ranks[measure][-1])


def measured(world: int) -> Measures:
    folder = OUT / f"train-{world}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    program = [str(ROOT / "bench/train_program.py"), str(folder), str(ROUNDS)]
    done = subprocess.run([*run, *program], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-4000:])
    shutil.rmtree(folder)
    return Measures([line for line in done.stdout.splitlines() if line.startswith("{")])


if __name__ == "__main__":
    main()
