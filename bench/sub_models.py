"""What a sub-model of one tensor costs: opening the view, planning, reading, and the bytes that are read.

`python -m bench.sub_models`. The tensors are the two sides of an MLP, (14336, 4096) and (4096,
14336) in float16, as arrays and as safetensors. The bytes read are counted by the store. Each time
is the least of some runs.
"""

from __future__ import annotations

import os
import shutil
import time
from typing import TYPE_CHECKING, Any

import numpy as np

import ucformat
from bench.common import OUT, table, targets
from tests.fakes import FakeSource
from ucformat.checkpoint import Checkpoint
from ucformat.storage.local import LocalStore
from ucformat.storage.memory import MemoryStore
from ucformat.storage.wrappers import RecordingStore

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

WIDE, HIDDEN, KEPT, ROUNDS = 14336, 4096, 4096, 3


def main() -> None:
    rng = np.random.default_rng(0)
    mixed = rng.permutation(WIDE)[:KEPT].tolist()
    hidden = sorted(rng.permutation(HIDDEN)[:1024].tolist())
    cases: dict[str, list[dict[str, Any]]] = {
        "first quarter of the rows": [{"take": "up", "first": WIDE // 4}],
        "4 of 32 blocks of columns": [
            {"take": "down", "dim": 1, "of": 32, "indices": [0, 3, 9, 30]}
        ],
        "4,096 rows, sorted": [{"take": "up", "indices": sorted(mixed)}],
        "4,096 rows, unsorted": [{"take": "up", "indices": mixed}],
        "4,096 columns, sorted": [{"take": "down", "dim": 1, "indices": sorted(mixed)}],
        "4,096 columns, unsorted": [{"take": "down", "dim": 1, "indices": mixed}],
        "4,096 rows, 1,024 columns": [
            {"take": "up", "indices": sorted(mixed)},
            {"take": "up", "dim": 1, "indices": hidden},
        ],
    }
    arrays = {"up": numbers(WIDE, HIDDEN), "down": numbers(HIDDEN, WIDE)}
    slowest: dict[str, float] = {}
    quarter: dict[str, float] = {}
    for form, folder in made(arrays).items():
        store = RecordingStore(LocalStore(folder))
        ck, rows = ucformat.open(store), []
        for case, steps in cases.items():
            took, found = measure(ck, store, steps, arrays)
            ratio = found["read"] / found["needed"]
            cells = [f"{1e3 * took[k]:.1f}" for k in ("open", "plan", "read")]
            rows.append([case, *cells, f"{found['planned'] / found['needed']:.3f}", f"{ratio:.3f}"])
            slowest[form] = max(slowest.get(form, 0), 1e3 * (took["open"] + took["plan"]))
            quarter.setdefault(form, ratio)
        print(
            table(
                [form, "view, ms", "plan, ms", "read, ms", "planned / needed", "read / needed"],
                rows,
            )
            + "\n"
        )
    print(
        targets(
            *(
                (f"first quarter, bytes read / needed: {form}", "<= 1.02", ratio)
                for form, ratio in quarter.items()
            ),
            *((f"slowest view and plan, ms: {form}", "<= 100", ms) for form, ms in slowest.items()),
        )
    )
    print(f"\nLoad average: {os.getloadavg()[0]:.1f}. Every tensor was compared with NumPy's.")


def numbers(*shape: int) -> NDArray[Any]:
    return (
        np.arange(WIDE * HIDDEN, dtype=np.uint32).astype(np.uint16).view(np.float16).reshape(shape)
    )


def made(arrays: dict[str, NDArray[Any]]) -> dict[str, Path]:
    from safetensors.numpy import save_file

    folder = OUT / "sub-models"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "safetensors").mkdir(parents=True)
    weights = {(n, "weight"): a for n, a in arrays.items()}
    ucformat.convert(Checkpoint(FakeSource.write(MemoryStore("sub"), weights)), folder / "arrays")
    save_file(arrays, folder / "safetensors" / "model.safetensors")
    return {n: folder / n for n in ("arrays", "safetensors")}


def measure(
    ck: Checkpoint,
    store: RecordingStore,
    steps: list[dict[str, Any]],
    arrays: dict[str, NDArray[Any]],
) -> tuple[dict[str, float], dict[str, int]]:
    """The least seconds of each stage, and the bytes."""
    name = steps[0]["take"]
    expected, least, found = arrays[name], {"open": 1e9, "plan": 1e9, "read": 1e9}, {}
    for step in steps:
        expected = np.take(
            expected, indices_of(step, expected.shape[step.get("dim", 0)]), step.get("dim", 0)
        )
    for _ in range(ROUNDS):
        times = [time.perf_counter()]
        tensor = ck.view(steps)[name]
        times.append(time.perf_counter())
        plan = tensor.plan()
        times.append(time.perf_counter())
        store.clear()
        array = tensor.read()
        times.append(time.perf_counter())
        for i, stage in enumerate(least):
            least[stage] = min(least[stage], times[i + 1] - times[i])
        found = {"needed": plan.bytes_needed, "planned": plan.bytes_read, "read": store.nbytes}
        if array.tobytes() != expected.tobytes():
            raise SystemExit(f"{name} differs under {steps}")
    return least, found


def indices_of(step: dict[str, Any], length: int) -> list[int]:
    picks = range(step["first"]) if "first" in step else step["indices"]
    width = length // step.get("of", length)
    return [p * width + i for p in picks for i in range(width)]


if __name__ == "__main__":
    main()
