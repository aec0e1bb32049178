"""Peak memory of a conversion: 1 GB, and 4 GB with one tensor of 1 GiB in it.

`python -m bench.memory`. The sources are ZeRO-3 files of two ranks with random content, as
DeepSpeed lays them out.
"""

from __future__ import annotations

import shutil

import numpy as np

from bench.common import OUT, ours, run, table, targets
from tests.zero_files import FLAT, write_zero3

GIB = 1 << 30
CASES = {
    "1 GB": [(4096, 2048)] * 10,
    "4 GB, one tensor of 1 GiB": [(16384, 16384), *[(4096, 2048)] * 8],
}


def main() -> None:
    idle = run(
        [ours(), "-c", "import ucformat; ucformat.convert, ucformat.open, ucformat.Layout"]
    ).peak
    rows, peaks = [], []
    for name, shapes in CASES.items():
        source, target = OUT / "memory", OUT / "target"
        for folder in (source, target):
            shutil.rmtree(folder, ignore_errors=True)
        pattern = np.random.default_rng(0).standard_normal(
            max(a * b for a, b in shapes), np.float32
        )
        arrays = {
            (f"t{i}", s): pattern[: a * b].reshape(a, b)
            for i, (a, b) in enumerate(shapes)
            for s in FLAT
        }
        write_zero3(source, arrays, ranks=2)
        size = sum(f.stat().st_size for f in source.rglob("*.pt"))
        done = run([ours(), "-m", "ucformat.cli", "convert", str(source), str(target)])
        peaks.append(done.peak)
        rows.append([name, f"{size / 1e9:.2f}", f"{(done.peak - idle) / 1e6:.0f}"])
        shutil.rmtree(source)
        shutil.rmtree(target)
    print(table(["checkpoint", "GB", "peak RSS above the interpreter's, MB"], rows) + "\n")
    print(
        targets(
            ("the most above the interpreter's, MB", "<= 400", (max(peaks) - idle) / 1e6),
            ("peak RSS of the second ÷ that of the first", "<= 1.1", peaks[1] / peaks[0]),
        )
    )


if __name__ == "__main__":
    main()
