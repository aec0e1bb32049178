"""Many small tensors: saves and loads of 20,000 tensors of 128 bytes, and those of PyTorch in the same processes.

`python -m bench.small`. In memory, so that no disk is measured; processes of their own, of which each
saves and loads a state of one tensor first, so that no import is measured. A first save plans the
tensors; the next ones, of other values and with another step, have its plan. `torch.save` ends with
`fsync`, and what `torch.load` returns is copied into the tensors of the program, as `load` does it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bench.common import median, table, targets
from ucformat.torch import load, save

if TYPE_CHECKING:
    from collections.abc import Callable

FOLDER = Path("/dev/shm/ucformat-small")  # noqa: S108 - memory
TENSORS, ELEMENTS = 20_000, 32
PROCESSES, ROUNDS = 3, 3
FORMS = ("packed", "zarr")
COLUMNS = ("torch.save", "first save", "next save", "torch.load", "load")


def main() -> None:
    if len(sys.argv) > 1:
        print(json.dumps(measured(sys.argv[1])))
        return
    rows: list[list[str]] = []
    asked: list[tuple[str, str, float]] = []
    for form in FORMS:
        timed: dict[str, list[float]] = {name: [] for name in COLUMNS}
        for _ in range(PROCESSES):
            command = [sys.executable, "-m", "bench.small", form]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            for name, seconds in json.loads(done.stdout).items():
                timed[name] += seconds
        s = {name: median(seconds) for name, seconds in timed.items()}
        rows.append([form, *(f"{1e3 * s[name]:.0f}" for name in COLUMNS)])
        asked += [
            (f"next save / torch.save, {form}", "<= 1.0", s["next save"] / s["torch.save"]),
            (f"first save / torch.save, {form}", "<= 1.0", s["first save"] / s["torch.save"]),
            (f"load / torch.load, {form}", "<= 1.0", s["load"] / s["torch.load"]),
        ]
    print(table([f"{TENSORS:,} tensors, ms", *COLUMNS], rows))
    print("\n" + targets(*asked))


def measured(form: Any) -> dict[str, list[float]]:
    """The seconds of each call, in alternated rounds."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    try:
        one = {"model": {"w": torch.ones(ELEMENTS)}, "step": 0}
        save(one, FOLDER / "one", form=form)
        load(one, FOLDER / "one")
        timed: dict[str, list[float]] = {name: [] for name in COLUMNS}
        target = state(-1)
        for step in range(ROUNDS + 1):
            values, place, file = state(step), FOLDER / f"{step}", FOLDER / f"{step}.pt"
            which = "next save" if step else "first save"
            timed[which].append(seconds(save, values, place, form=form))
            timed["torch.save"].append(seconds(save_with_torch, values, file))
            timed["torch.load"].append(seconds(load_with_torch, target, file))
            assert all(map(torch.equal, target["model"].values(), values["model"].values()))
            timed["load"].append(seconds(load, target, place))
            assert target["step"] == step
            assert all(map(torch.equal, target["model"].values(), values["model"].values()))
            shutil.rmtree(place)
            file.unlink()
        return timed
    finally:
        shutil.rmtree(FOLDER)


def state(step: int) -> dict[str, Any]:
    names = [f"layers.{n}.weight" for n in range(TENSORS)]
    return {"model": {name: torch.randn(ELEMENTS) for name in names}, "step": step}


def save_with_torch(values: dict[str, Any], file: Path) -> None:
    with file.open("wb") as out:
        torch.save(values, out)
        out.flush()
        os.fsync(out.fileno())


def load_with_torch(target: dict[str, Any], file: Path) -> None:
    loaded = torch.load(file)
    for name, tensor in target["model"].items():
        tensor.copy_(loaded["model"][name])
    target["step"] = loaded["step"]


def seconds(call: Callable[..., object], *arguments: Any, **options: Any) -> float:
    begun = time.perf_counter()
    call(*arguments, **options)
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
