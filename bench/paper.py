"""The Universal Checkpointing paper's sources and targets: is every rank's every byte right, and how many are read?

Each source is a checkpoint in Megatron-DeepSpeed's format, opened in place. For each target all
ranks plan and execute their reads, which are compared bit for bit with arrays made by NumPy. A cell
is the bytes read from the files divided by the bytes of the tensors that the ranks hold, over all
ranks; `≠` where a rank has a wrong byte. Exit code 1 if any.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from bench.common import table
from bench.paper_cell import Cell, read_all
from bench.paper_model import SOURCES, TARGETS, expected, layout, needed, to_gpt_model, write_source
from bench.paper_ranks import many_ranks
from ucformat.checkpoint import open_checkpoint
from ucformat.storage.local import LocalStore
from ucformat.storage.wrappers import RecordingStore

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bench.paper_model import Degrees

__all__ = ["Opened", "cells", "main"]


class Opened:
    """One source: written, opened in place, and seen under GPTModel's names."""

    def __init__(self, folder: Path, degrees: Degrees) -> None:
        self.degrees, self.truth = degrees, write_source(folder, degrees)
        self.recorder = RecordingStore(LocalStore(folder))
        ck = open_checkpoint(self.recorder)
        new = {n: to_gpt_model(n) for n in ck.names() if to_gpt_model(n) != n}
        self.ck = ck.view([{"rename": n, "to": to} for n, to in new.items()]) if new else ck

    def cell(self, target: Degrees) -> Cell:
        """Read it as all ranks of a target."""
        where = layout(target)
        found = read_all(
            self.ck, self.recorder, where, lambda rank: expected(self.truth, target, rank)
        )
        return Cell(
            str(self.degrees), str(target), target.ranks, needed(self.truth, target), *found
        )


def cells(folder: Path) -> Iterator[Cell]:
    """Write each source below `folder`, and read it under each target."""
    for source in SOURCES:
        opened = Opened(folder / str(source), source)
        yield from map(opened.cell, TARGETS)


def _table(found: Sequence[Cell]) -> str:
    rows = [[str(s), *(str(c) for c in found if c.source == str(s))] for s in SOURCES]
    read, needed, ranks = (
        sum(getattr(c, what) for c in found) for what in ("read", "needed", "ranks")
    )
    return (
        "Rows are sources, columns targets: TP×PP×DP(×SP), ZeRO stage. Cells: bytes read / bytes needed over all "
        "ranks, `≠` if any byte differs.\n\n"
        + table(["", *map(str, TARGETS)], rows)
        + f"\n\n{sum(not c.wrong for c in found)} of {len(found)} bit-exact, on {ranks} ranks in total: "
        f"{read:,} bytes read / {needed:,} needed = {read / needed:.4f}"
    )


def _ranks(found: Sequence[Cell]) -> str:
    rows = [
        [
            c.target,
            f"{c.needed:,}",
            f"{c.read:,}",
            "≠" if c.wrong else f"{c.ratio:.4f}",
            f"{c.planning:,}",
        ]
        for c in found
    ]
    return table([f"{found[0].source}, read as", "bytes needed", "read", "ratio", "to open"], rows)


def main(arguments: Sequence[str] = ()) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.paper", description=__doc__.split("\n", 1)[0]
    )
    parser.add_argument("--json", action="store_true", help="every cell as JSON")
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="instead: N ranks of ZeRO 3, read by N others"
    )
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as place:
        found = (
            list(many_ranks(Path(place), chosen.ranks))
            if chosen.ranks
            else list(cells(Path(place)))
        )
    wrong = [cell for cell in found if cell.wrong]
    if chosen.json:
        print(json.dumps([asdict(cell) for cell in found], indent=1))
    else:
        print(_ranks(found) if chosen.ranks else _table(found))
    for cell in wrong:
        print(f"{cell.source} -> {cell.target}: {cell.wrong}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
