"""Partial saves of a mixture of experts: bytes, and seconds for which training waits, against whole ones.

`python -m bench.partial`. One process and /dev/shm. The model has the proportions of GPT-125M-16E, the smaller one of
MoC-System (2408.04307), at a quarter of its width: 12 layers, 16 experts in every other one. MoC-System reports
checkpoints that are 54.2 % smaller, and 98.9 % less overhead per checkpoint, on eight A800 of two nodes.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench.common import table
from ucformat.torch import Experts, async_save, save

FOLDER = Path("/dev/shm/ucformat-partial")  # noqa: S108 - memory, so that no disk is measured
WIDTH, LAYERS, EXPERTS, WORDS = 192, 12, 16, 12_500


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    try:
        print(measured())
    finally:
        shutil.rmtree(FOLDER, ignore_errors=True)


def dense(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class Layer(nn.Module):
    """A layer of a transformer; with experts, if there are any."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 4)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        if experts:
            self.router = nn.Linear(width, experts)
            self.experts = nn.ModuleList(dense(width) for _ in range(experts))
        else:
            self.mlp = dense(width)


def made() -> dict[str, Any]:
    """The model after a step of Adam."""
    torch.manual_seed(0)
    layers = [Layer(WIDTH, EXPERTS * (n % 2)) for n in range(LAYERS)]
    model = nn.ModuleDict({"embed": nn.Embedding(WORDS, WIDTH), "layers": nn.ModuleList(layers)})
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def measured() -> str:
    state, rows = made(), list[list[str]]()
    whole = save(state, FOLDER / "0", step=0, form="packed")
    whole_stall = stall(state, 1, None)
    rows.append(["all", f"{whole.nbytes / 1e6:,.0f}", "", f"{whole_stall:.3f}", ""])
    for number, k in enumerate((8, 4, 2, 1)):
        partial = Experts(k=k)
        place = FOLDER / f"k{k}"
        given: Any = {"form": "packed", "partial": partial, "base": FOLDER / "0"}
        written = save(state, place, step=10 + number, **given).nbytes
        seconds = stall(state, 100 + number, partial)
        rows.append(
            [
                str(k),
                f"{written / 1e6:,.0f}",
                f"{1 - written / whole.nbytes:.1%}",
                f"{seconds:.3f}",
                f"{1 - seconds / whole_stall:.1%}",
            ]
        )
    rows.append(["MoC-System", "", "54.2%", "", "98.9%"])
    return table(["experts of each layer", "MB", "smaller", "stall, s", "shorter"], rows)


def stall(state: dict[str, Any], step: int, partial: Experts | None) -> float:
    """The shortest time for which training waits for a save in the background; the first one starts a process."""
    best = float("inf")
    for turn in range(3):
        place = FOLDER / f"stall-{step}-{turn}"
        given: Any = {"form": "packed"}
        if partial is not None:
            given |= {"partial": partial, "base": FOLDER / "0"}
        begun = time.perf_counter()
        handle = async_save(state, place, step=step, **given)
        best = min(best, time.perf_counter() - begun) if turn else best
        handle.wait()
        shutil.rmtree(place)
    return best


if __name__ == "__main__":
    main()
