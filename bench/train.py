"""Saving and loading in the training loop, beside PyTorch DCP and the same bytes through `write` and `readinto`.

`python -m bench.train`. A Llama-like model of 1.1 GB over FSDP2, on 2 and 4 ranks of one machine
over gloo; alternated rounds, of which the first is not counted; page-cached; each time is that of
the slowest rank. Loads are compared with the best of the raw ways of `bench.read`, the stall of
`async_save` with the better copy of PyTorch's and NumPy's.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from itertools import product
from typing import TYPE_CHECKING

from bench.common import OUT, ROOT, median, table, targets
from bench.readers import RAW

if TYPE_CHECKING:
    from collections.abc import Iterator

ROUNDS = 7
WORLDS = (2, 4)
KINDS = ("fsdp2", "tp", "columns")


def main() -> None:
    found = {world: measured(world) for world in WORLDS}
    print("Seconds (range), and speed as a multiple of the peer's.\n")
    compare("Save", "`write` + `fsync`", SAVES, found)
    compare("Load under the same layout", "best raw", loads("fsdp2"), found)
    compare("Load under tensor parallelism", "best raw", loads("tp"), found)
    compare("Load sharded along columns", "best raw", loads("columns"), found)
    rows = {
        "stall of `async_save`, × best `memcpy`": [
            m["blocked"] / m["memcpy"] for m in found.values()
        ]
    }
    for form in ("packed", "zarr"):
        for kind in KINDS:
            rows[f"bytes read by all ÷ held, {form}, {kind}"] = [
                m.mean(f"read {form} {kind}") for m in found.values()
            ]
        label = f"bytes read by all ÷ state, `broadcast_group`, {form}"
        rows[label] = [m.sum(f"read shared {form}") for m in found.values()]
    rows["largest extra memory of a rank ÷ size of its shards"] = [
        m["memory"] for m in found.values()
    ]
    print("Where the milliseconds of a verified load with one thread go.\n")
    print(profile(found) + "\n")
    print(
        table(
            ["", *(f"{w} ranks" for w in WORLDS)],
            [[k, *(f"{v:.3f}" for v in row)] for k, row in rows.items()],
        )
    )
    print()
    print(targets(*(row for world, m in found.items() for row in asked(world, m))))


def asked(world: int, m: Measures) -> Iterator[tuple[str, str, float]]:
    """What was asked of so many ranks."""
    for form, raw, dcp in (("packed", 1.0, 1.5), ("zarr", 0.85, 1.2)):
        yield (
            f"`save`, {form} ÷ `write` + `fsync`, {world} ranks",
            f">= {raw}",
            m["save raw"] / m[f"save {form}"],
        )
        yield (
            f"`save`, {form}, × `dcp.save`, {world} ranks",
            f">= {dcp}",
            m["save dcp"] / m[f"save {form}"],
        )
    for kind in KINDS:
        for form in ("packed", "zarr"):
            name = f"`load`, {kind}, {form}"
            yield (
                f"{name} ÷ best raw, {world} ranks",
                ">= 0.7",
                m["load raw"] / m[f"load {form} {kind}"],
            )
            ratio = m["load raw"] / m[f"load {form} unverified {kind}"]
            yield f"{name}, unverified ÷ best raw, {world} ranks", ">= 0.75", ratio
            if kind != "fsdp2":
                yield (
                    f"{name}, × `dcp.load`, {world} ranks",
                    ">= 5",
                    m[f"load dcp {kind}"] / m[f"load {form} {kind}"],
                )
    yield (
        f"stall of `async_save`, × best `memcpy`, {world} ranks",
        "<= 1.1",
        m["blocked"] / m["memcpy"],
    )
    read = [m.mean(f"read {form} {kind}") for form in ("packed", "zarr") for kind in KINDS]
    shared = [m.sum(f"read shared {form}") for form in ("packed", "zarr")]
    yield (
        f"bytes read ÷ held, or with `broadcast_group` ÷ state: the highest, {world} ranks",
        "<= 1.05",
        max(read + shared),
    )


def compare(
    title: str, limit: str, measures: dict[str, tuple[str, str, str]], found: dict[int, Measures]
) -> None:
    """Print a table of seconds, beside DCP's and the raw limit's."""
    rows = []
    for name, (ours, dcp, raw) in measures.items():
        row = [name]
        for m in found.values():
            row.append(f"{m[ours]:.2f} ({min(m.all[ours]):.2f}–{max(m.all[ours]):.2f})")
            row += [f"{m[dcp] / m[ours]:.2f}", f"{m[raw] / m[ours]:.2f}"]
        rows.append(row)
    print(
        table([title, *(c for w in found for c in (f"{w} ranks", "× DCP", f"× {limit}"))], rows)
        + "\n"
    )


def profile(found: dict[int, Measures]) -> str:
    """A table of the parts of loads, means over ranks."""
    rows = []
    for form, kind, (world, m) in product(("packed", "zarr"), KINDS, found.items()):
        part = {
            p: 1000 * m.average(f"profile {form} {kind} {p}")
            for p in ("all", "exchange", "plan", "execute", "read")
        }
        rest = part["all"] - part["exchange"] - part["plan"] - part["execute"]
        values = (
            m["load raw"] * 1000,
            part["all"],
            part["read"],
            part["execute"] - part["read"],
            part["plan"],
        )
        rows.append(
            [
                f"{kind}, {form}, {world} ranks",
                *(f"{v:.0f}" for v in (*values, part["exchange"], rest)),
            ]
        )
    head = [
        "best raw",
        "load",
        "in `read_into`",
        "Python between",
        "plan",
        "exchange",
        "open, match, check",
    ]
    return table(["", *head], rows)


SAVES = {
    "`write` + `fsync`, one file per rank": ("save raw", "save dcp", "save raw"),
    "`dcp.save`": ("save dcp", "save dcp", "save raw"),
    "`save`, packed": ("save packed", "save dcp", "save raw"),
    "`save`, zarr": ("save zarr", "save dcp", "save raw"),
}


def loads(kind: str) -> dict[str, tuple[str, str, str]]:
    names = {
        f"`load`, {form}{', unverified' if unverified else ''}": (
            f"load {form}{unverified} {kind}",
            f"load dcp {kind}",
            "load raw",
        )
        for form in ("packed", "zarr")
        for unverified in ("", " unverified")
    }
    return {
        **{f"raw, {way}": (f"load raw {way}", f"load dcp {kind}", "load raw") for way in RAW},
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
        for best in ("load raw", "memcpy"):
            self.all[best] = min(
                (v for k, v in self.all.items() if k.startswith(f"{best} ")), key=median
            )

    def __getitem__(self, measure: str) -> float:
        return median(self.all[measure])

    def mean(self, measure: str) -> float:
        """The mean over ranks, of the last round."""
        return sum(self.ranks[measure][-1]) / len(self.ranks[measure][-1])

    def average(self, measure: str) -> float:
        """The median over rounds of the mean over ranks."""
        return median([sum(values) / len(values) for values in self.ranks[measure]])

    def sum(self, measure: str) -> float:
        """The sum over ranks, of the last round."""
        return sum(self.ranks[measure][-1])


def measured(world: int) -> Measures:
    folder = OUT / f"train-{world}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    run = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(world),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    program = [str(ROOT / "bench/train_program.py"), str(folder), str(ROUNDS)]
    done = subprocess.run(
        [*run, *program], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr[-4000:])
    shutil.rmtree(folder)
    return Measures([line for line in done.stdout.splitlines() if line.startswith("{")])


if __name__ == "__main__":
    main()
