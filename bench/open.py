"""Opening the 1.1 GB ZeRO-3 checkpoint in place and reading one row of one tensor.

`python -m bench.open`. Time from a fresh interpreter with imports done, and the bytes read, as a recording
store counts them.
"""

from __future__ import annotations

import time

import ucformat
from bench.common import median, real_checkpoint, table, targets
from ucformat.storage.local import LocalStore
from ucformat.storage.wrappers import RecordingStore


def main() -> None:
    folder = real_checkpoint()
    seconds, store = [], RecordingStore(LocalStore(folder))
    for _ in range(9):
        store = RecordingStore(LocalStore(folder))
        begun = time.perf_counter()
        ucformat.open(store)["layers.3.up_proj.weight", "exp_avg"][5]
        seconds.append(time.perf_counter() - begun)
    rows = [
        [
            f"{median(seconds) * 1e3:.0f}",
            f"{max(seconds) * 1e3:.0f}",
            f"{store.nbytes / 1e3:.0f}",
            str(len(store.reads)),
        ]
    ]
    print(table(["median, ms", "slowest, ms", "kB read", "reads"], rows) + "\n")
    print(targets(("median, ms", "<= 500", median(seconds) * 1e3), ("kB read", "<= 2000", store.nbytes / 1e3)))


if __name__ == "__main__":
    main()
