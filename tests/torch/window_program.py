"""What ranks do in `test_windows.py`: train experts in bf16 with fp32 master weights, and replay windows."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from tests.torch.moe import Model, batch, digests
from ucformat.torch import Window, replay, save

if TYPE_CHECKING:
    from pathlib import Path

Digests = dict[tuple[str, str], str]
EXPERTS = 8


class Training:
    """A model in bf16, master weights in fp32, and Adam; this rank has an equal part of the experts."""

    def __init__(self, degree: int = 1, seed: int = 1, experts: int = EXPERTS) -> None:
        rank = int(os.environ.get("RANK", "0")) % degree
        part: Any = {"rank": rank, "degree": degree, "seed": seed}
        self.model = Model(experts, dtype=torch.bfloat16, **part)
        self.master = Model(experts, **part)
        with torch.no_grad():
            for p, master in self._pairs():
                master.copy_(p)
        self.optimizer = torch.optim.Adam(self.master.parameters(), lr=1e-2)

    def _pairs(self) -> Any:
        return zip(self.model.parameters(), self.master.parameters(), strict=True)

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "master": self.master, "optimizer": self.optimizer}

    def train(self, step: int) -> None:
        self.model.zero_grad()
        loss = self.model(batch(step, 128).bfloat16()).float().square().mean()
        loss.backward()
        with torch.no_grad():
            for p, master in self._pairs():
                master.grad = None if p.grad is None else p.grad.float()
            self.optimizer.step()
            for p, master in self._pairs():
                p.copy_(master)

    def digests(self) -> Digests:
        """A digest of each tensor of this rank."""
        named = {
            ("model", *key): d
            for key, d in digests(self.model, torch.optim.SGD([torch.zeros(1)])).items()
        }
        named |= {("master", *key): d for key, d in digests(self.master, self.optimizer).items()}
        return {(".".join(key[:2]), key[2]): d for key, d in named.items()}


def window(steps: int) -> Window:
    # the weights that the optimizer has keep their names, and those of `model` have it before them
    return Window(steps=steps, update=("layers.*",))


def saved(folder: Path, *, degree: int, steps: int, form: Any = "packed", of: int = 4) -> Any:
    """Train, and save each step; what this rank had at each, and the bytes that it wrote."""
    training, at, written = Training(degree), dict[int, Digests](), []
    for step in range(1, steps + 1):
        training.train(step)
        at[step] = training.digests()
        given: Any = {"step": step, "form": form, "partial": window(of)}
        written.append(save(training.state, folder / str(step), **given).nbytes)
    return at, written


def replayed(folder: Path, *, degree: int, steps: list[int], further: int = 1) -> Any:
    """What this rank has after a replay of each of these checkpoints, and after some further steps."""
    out: dict[int, tuple[bool, list[Digests]]] = {}
    for step in steps:
        training = Training(degree, seed=9)
        report = replay(folder / str(step), training.state, training.train)
        assert report.step == step
        having = [training.digests()]
        for later in range(step + 1, step + 1 + further):
            training.train(later)
            having.append(training.digests())
        out[step] = bool(report), having
    return out
