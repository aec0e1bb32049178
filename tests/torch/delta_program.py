"""What ranks do in `test_deltas.py`: train a model under a layout, save what each step applied, and replay it."""

from __future__ import annotations

import os
import random
import signal
import threading
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from ucformat.torch import Deltas, Manager, gradients, replay, save
from ucformat.torch.state.sharded import is_dtensor

if TYPE_CHECKING:
    from pathlib import Path

State = dict[tuple[str, str], torch.Tensor]
WIDTH = 22


class Training:
    """A model with buffers and frozen weights; every rank trains on the whole batch.

    Args:
        layout: `plain` is whole on each rank; `fsdp` and `tp` are sharded over all ranks.
        sparse: apply only the largest tenth of each gradient, as `torch.sparse_coo` tensors.
    """

    def __init__(self, layout: str = "plain", *, sparse: bool = False, seed: int = 1) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Linear(WIDTH, 31),
            nn.LayerNorm(31),
            nn.GELU(),
            nn.BatchNorm1d(31),
            nn.Linear(31, WIDTH, bias=False),
            nn.Linear(WIDTH, WIDTH),
        )
        self.model[5].requires_grad_(requires_grad=False)
        if layout != "plain":
            world = int(os.environ.get("WORLD_SIZE", "1"))
            mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("shards",))
            if layout == "fsdp":
                fully_shard(self.model, mesh=mesh)
            else:
                whole = ColwiseParallel(output_layouts=Replicate())
                parallelize_module(self.model, mesh, {"0": whole, "4": whole})
        learned = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(learned, lr=1e-2, weight_decay=0.1)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 40)
        self.sparse = sparse

    @property
    def state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
        }

    def train(self, step: int) -> dict[str, torch.Tensor]:
        """Train a step, and return what it applied; each seventh step applies nothing to the output's layer."""
        batch = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step))
        self.optimizer.zero_grad()
        (self.model(batch) - batch.flip(-1)).square().mean().backward()
        if step % 7 == 0:
            self.model[4].weight.grad = None
        applied = gradients(self.state)
        if self.sparse:
            applied = {name: largest(grad) for name, grad in applied.items()}
            for name, p in self.model.named_parameters():
                p.grad = applied[name].to_dense() if name in applied else None
        self.optimizer.step()
        self.scheduler.step()
        return applied

    def whole(self) -> State:
        """All tensors of the model and the optimizer, whole."""
        tensors = {(name, "weight"): t for name, t in self.model.state_dict().items()}
        for name, p in self.model.named_parameters():
            for state, t in self.optimizer.state.get(p, {}).items():
                tensors[name, state] = t
        return {
            key: (t.full_tensor() if is_dtensor(t) else t).clone() for key, t in tensors.items()
        }


def largest(grad: torch.Tensor) -> torch.Tensor:
    """The largest tenth of a gradient, or a few elements more."""
    flat = grad.flatten()
    at = flat.abs().topk(max(1, flat.numel() // 10)).indices
    where = torch.stack(torch.unravel_index(at, grad.shape))
    return torch.sparse_coo_tensor(where, flat[at], grad.shape, check_invariants=True)


def saved(
    folder: Path, *, layout: str, steps: int, batch: int, form: Any = "packed", sparse: bool = False
) -> Any:
    """Train; save everything at step 2, and then each batch of deltas; what there was after each step.

    Two more steps are trained.
    """
    training, at = Training(layout, sparse=sparse), dict[int, State]()
    deltas = dict[int, dict[str, torch.Tensor]]()
    for step in range(1, steps + 3):
        applied = training.train(step)
        at[step] = training.whole()
        if step > 2:
            deltas[step] = {name: delta.clone() for name, delta in applied.items()}
        if step == 2 or len(deltas) == batch:
            given: Any = {"step": step, "form": form, "partial": Deltas()}
            save(training.state, folder / str(step), **given, deltas=deltas or None)
            deltas = {}
    return at


def replayed(folder: Path, *, layout: str, steps: list[int], further: int = 2) -> Any:
    """What ranks have after a replay of each of these checkpoints, and after some further steps."""
    out = {}
    for step in steps:
        training = Training(layout, seed=9)
        report = replay(folder / str(step), training.state)
        having = [training.whole()]
        for later in range(step + 1, step + 1 + further):
            training.train(later)
            having.append(training.whole())
        out[step] = bool(report), report.step, report.lineage.kind, having
    return out


def trained(folder: Path, *, steps: int) -> dict[int, State]:
    """Train without any checkpoint; what there was after each step."""
    training, at = Training(), dict[int, State]()
    for step in range(steps + 1):
        if step:
            training.train(step)
        at[step] = training.whole()
    return at


def killed(folder: Path, *, seed: int, layout: str = "plain", steps: int = 400) -> Any:
    """Restore, and train on, until this rank is killed at some instant; what was restored."""
    chance = random.Random(seed)
    training = Training(layout)
    partial = Deltas(batch=chance.randint(1, 4), full=chance.randint(5, 30))
    given: Any = {"form": "packed", "partial": partial, "asynchronous": chance.random() < 0.7}
    with Manager(folder / "run", **given) as manager:
        report = manager.restore_latest(training.state)
        first = 1 if report is None else (report.step or 0) + 1
        kept = folder / f"restored-{seed}-{os.environ.get('RANK', '0')}.pt"
        torch.save((first - 1, training.whole()), kept)
        timer = threading.Timer(chance.uniform(0.05, 1.5), os.kill, (os.getpid(), signal.SIGKILL))
        timer.start()
        for step in range(first, first + steps):
            manager.save(step, training.state, deltas=training.train(step))
    return first


def differing(folder: Path) -> Any:
    """Save deltas that are not the same on all ranks."""
    training = Training()
    training.train(1)
    save(training.state, folder / "1", step=1, form="packed", partial=Deltas())
    applied = training.train(2)
    if dist.get_rank():
        applied["0.weight"] = applied["0.weight"] + 1
    try:
        save(
            training.state,
            folder / "2",
            step=2,
            form="packed",
            partial=Deltas(),
            deltas={2: applied},
        )
    except Exception as error:  # noqa: BLE001 - what the test looks at
        return type(error).__name__, str(error)
    return "", ""
