"""Whether a commit is slower than another: `python -m bench.commits OLD [NEW] [--rounds 10] [--only NAME …]`.

Each round runs every workload of `bench/workloads.py` with the package of either commit, in a
process of its own, in turn. What is printed is the median of the ratios of all rounds, new ÷ old,
and its 95 % interval, which comes from the order of the ratios and assumes nothing of how they are
distributed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.common import OUT, engine_environment, median, ours, run, table
from bench.workloads import WORKLOADS
from tests.engines import engine

#: The loss that the interval must exclude.
LOSS = 1.03
_FEWEST = 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old")
    parser.add_argument("new", nargs="?", default="HEAD")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--only", nargs="*", choices=list(WORKLOADS), default=list(WORKLOADS), metavar="NAME"
    )
    args = parser.parse_args()
    if args.rounds < _FEWEST:
        parser.error(f"a 95 % interval takes at least {_FEWEST} rounds")
    OUT.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=OUT) as folder:
        trees = [
            _checkout(commit, Path(folder).resolve() / f"tree-{n}")
            for n, commit in enumerate((args.old, args.new))
        ]
        rows = []
        for name in args.only:
            rounds = [
                [_once(name, tree) for tree in _in_turn(trees, n)] for n in range(args.rounds)
            ]
            pairs = [pair if n % 2 == 0 else pair[::-1] for n, pair in enumerate(rounds)]
            row = [name, f"{median([p[1]['seconds'] for p in pairs]):.3g}"]
            for what in ("seconds", "processor"):
                ratios = sorted(new[what] / old[what] for old, new in pairs)
                low, high = interval(ratios)
                row += [f"{median(ratios):.3f} ({low:.3f}–{high:.3f})", _verdict(low, high)]
            rows.append(row)
            print(" ".join(row), flush=True)
    head = [
        "",
        "seconds",
        "new ÷ old",
        "no loss above 3 %",
        "processor, new ÷ old",
        "no loss above 3 %",
    ]
    print(f"\n{args.old} and {args.new}, {args.rounds} rounds in turn:\n\n{table(head, rows)}")


def interval(ratios: list[float]) -> tuple[float, float]:
    """The 95 % interval of the median of at least six ratios, which are sorted."""
    n = len(ratios)
    below, tail = 0, 0.5**n
    while tail <= 0.025 and below < n // 2:
        below += 1
        tail += math.comb(n, below) * 0.5**n
    k = max(below - 1, 0)
    return ratios[k], ratios[n - 1 - k]


def _verdict(low: float, high: float) -> str:
    if high <= LOSS:
        return "yes"
    return "**slower**" if low > LOSS else "not excluded"


def _in_turn(trees: list[Path], number: int) -> list[Path]:
    return trees if number % 2 == 0 else trees[::-1]


def _checkout(commit: str, folder: Path) -> Path:
    """The package at a commit."""
    folder.mkdir()
    archive = subprocess.run(
        ["git", "archive", commit, "ucformat"], capture_output=True, check=True
    )
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    shutil.copy(Path(__file__).with_name("workloads.py"), folder / "workloads.py")
    return folder


def _once(name: str, tree: Path) -> dict[str, float]:
    torch = name.startswith(("save", "load"))
    environment = engine_environment() if torch else dict(os.environ)
    python = str(engine("deepspeed")) if torch else ours()
    command = [python, str(tree / "workloads.py"), name, str(tree / "out")]
    run(command, {**environment, "PYTHONPATH": str(tree)})
    said: dict[str, float] = json.loads((OUT / "command.log").read_text().splitlines()[-1])
    return said


if __name__ == "__main__":
    main()
