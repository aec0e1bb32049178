"""What a checkpoint of each step costs: deltas of compressed gradients against whole saves; and 50 recoveries.

`python -m bench.deltas`. One process and /dev/shm. A transformer of 14 million parameters is trained on two threads; in
each case the training compresses its gradients to the largest hundredth, as LowDiff's (2509.04084) does, and applies
these.
LowDiff reports that a checkpoint of each step takes at most 3.1 % of an iteration. Cases take turns, block by block.
"""

from __future__ import annotations

import hashlib
import random
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench.common import table
from ucformat.torch import Deltas, Manager, gradients, replay

FOLDER = Path("/dev/shm/ucformat-deltas")  # noqa: S108 - memory, so that no disk is measured
WIDTH, LAYERS, WORDS, LENGTH, BATCH = 384, 6, 4096, 128, 8
SHARE = 0.01
BLOCK, ROUNDS = 16, 5  # steps of a case at a time, and how often it has its turn
RECOVERIES = 50


class Training:
    """A transformer that learns to copy, with AdamW, by compressed gradients."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 6, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.model = nn.Sequential(
            nn.Embedding(WORDS, WIDTH),
            nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False),
            nn.Linear(WIDTH, WORDS),
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 1000)

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def step(self, number: int) -> dict[str, torch.Tensor]:
        """Train a step, and return what it applied."""
        words = torch.randint(
            WORDS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(number)
        )
        loss = nn.functional.cross_entropy(self.model(words).flatten(0, 1), words.flatten())
        loss.backward()
        deltas = {name: compressed(grad) for name, grad in gradients(self.state).items()}
        for name, parameter in self.model.named_parameters():
            parameter.grad = deltas[name].to_dense()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return deltas

    def digest(self) -> str:
        """A digest of all weights and moments."""
        made = hashlib.sha256()
        for parameter in self.model.parameters():
            for tensor in (parameter, *self.optimizer.state[parameter].values()):
                made.update(tensor.detach().numpy().tobytes())
        return made.hexdigest()


def compressed(grad: torch.Tensor) -> torch.Tensor:
    flat = grad.flatten()
    at = flat.abs().topk(max(1, int(flat.numel() * SHARE)), sorted=False).indices
    where = torch.stack(torch.unravel_index(at, grad.shape))
    return torch.sparse_coo_tensor(where, flat[at], grad.shape, check_invariants=False)


class Case:
    """A training that saves in its way; the seconds of each block of steps, with the waits for its last save."""

    def __init__(self, name: str, **arguments: Any) -> None:
        self.name, self.training, self.done = name, Training(), 0
        self.manager: Manager | None = None
        self.is_delta = isinstance(arguments.get("partial"), Deltas)
        if arguments:
            self.manager = Manager(FOLDER / name, form="packed", asynchronous=True, **arguments)
        self.seconds: list[float] = []

    def block(self) -> None:
        begun = time.perf_counter()
        for number in range(self.done + 1, self.done + BLOCK + 1):
            deltas = self.training.step(number)
            if self.manager is not None:
                given: dict[str, Any] = {"deltas": deltas} if self.is_delta else {}
                self.manager.save(number, self.training.state, **given)
        if self.manager is not None:
            self.manager.wait()  # so that it does not take time from the next case
        self.done += BLOCK
        self.seconds.append((time.perf_counter() - begun) / BLOCK)


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    torch.set_num_threads(2)
    try:
        print(costs())
        print(recoveries())
    finally:
        shutil.rmtree(FOLDER, ignore_errors=True)


def costs() -> str:
    cases = [
        Case("none"),
        *(Case(f"deltas-{n}", partial=Deltas(batch=n), keep=2) for n in (1, 8, 16)),
        Case("whole", every=1, keep=2),
    ]
    for case in cases:
        case.block()  # the first whole save, and processes that start
    for case in cases:
        case.seconds.clear()
    for _ in range(ROUNDS):
        for case in cases:
            case.block()
    for case in cases:
        if case.manager is not None:
            case.manager.close()
    plain = cases[0].seconds
    rows = [["no checkpoints", f"{statistics.median(plain) * 1e3:,.0f}", "", ""]]
    for case in cases[1:]:
        ratios = [own / base - 1 for own, base in zip(case.seconds, plain, strict=True)]
        label = case.name.replace("deltas-", "deltas, batches of ").replace("whole", "whole, async")
        target = "≤ 3.1%" if case.is_delta else ""
        median = statistics.median(ratios)
        spread = f"{median:.1%} ({min(ratios):.1%} to {max(ratios):.1%})"
        rows.append([label, f"{statistics.median(case.seconds) * 1e3:,.0f}", spread, target])
    return table(["a checkpoint of each step", "iteration, ms", "added", "target"], rows)


def recoveries() -> str:
    training, truth = Training(), dict[int, str]()
    with Manager(FOLDER / "each", form="packed", partial=Deltas(batch=1, full=20)) as manager:
        for number in range(1, RECOVERIES + 11):
            manager.save(number, training.state, deltas=training.step(number))
            truth[number] = training.digest()
    chosen = sorted(random.Random(7).sample(sorted(truth), RECOVERIES))
    equal, seconds = 0, []
    for number in chosen:
        fresh, begun = Training(), time.perf_counter()
        replay(FOLDER / "each" / f"step-{number:08}", fresh.state)
        seconds.append(time.perf_counter() - begun)
        equal += fresh.digest() == truth[number]
    text = f"{equal} of {RECOVERIES} recoveries at random steps are equal bit for bit"
    return (
        f"{text}; up to {max(seconds):.1f} s, for up to 19 steps after the load of what is whole.\n"
    )


if __name__ == "__main__":
    main()
