"""A loop of torchtitan's shape, trained, saved and resumed: `titan_program.py FOLDER`, under torchrun."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.lr_scheduler import LambdaLR
from torchdata.stateful_dataloader import StatefulDataLoader

import ucformat
from tests.torch.integrations.compare import differences, whole
from tests.torch.leaving import leave
from ucformat.engines.torchtitan.live import CheckpointManager


class Fused(torch.nn.Linear):
    """Keeps two weights as one, and saves them apart, as torchtitan's `FusedQKVLinear`."""

    def __init__(self) -> None:
        super().__init__(9, 9)
        self.register_state_dict_post_hook(self._split)
        self.register_load_state_dict_pre_hook(self._join)

    @staticmethod
    def _split(_module: Any, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        fused = state.pop(f"{prefix}weight")
        if isinstance(fused, DTensor):
            fused = fused.redistribute(fused.device_mesh, [Replicate()])
        for name, rows in (("wq.weight", slice(0, 6)), ("wk.weight", slice(6, 9))):
            state[prefix + name] = fused[rows].contiguous()

    @staticmethod
    def _join(_module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        if f"{prefix}wq.weight" in state:
            state[f"{prefix}weight"] = torch.cat(
                [state.pop(prefix + n) for n in ("wq.weight", "wk.weight")]
            )


class Layers(torch.nn.Module):
    """Some of the layers of a model: a pipeline stage, or all of it."""

    def __init__(self, numbers: range) -> None:
        super().__init__()
        torch.manual_seed(1)
        layers = {str(n): torch.nn.Sequential(Fused(), torch.nn.Dropout(0.1)) for n in range(4)}
        self.layers = torch.nn.ModuleDict(
            {n: layer for n, layer in layers.items() if int(n) in numbers}
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = torch.relu(layer(x)) + x
        return x


class OptimizersContainer:
    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers


class Trainer:
    """Cut in `parts` model parts; the same model whatever their number."""

    def __init__(self, folder: Path, parts: int, **options: Any) -> None:
        size = 4 // parts
        self.parts = [Layers(range(i * size, (i + 1) * size)) for i in range(parts)]
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
        for part in self.parts:
            fully_shard(part, mesh=mesh)
        make = torch.optim.AdamW
        optimizers: list[torch.optim.Optimizer] = [
            make(p.parameters(), 1e-2, foreach=False) for p in self.parts
        ]
        self.optimizers = OptimizersContainer(optimizers)
        self.schedulers = [LambdaLR(o, lambda step: 1 / (1 + step)) for o in optimizers]
        torch.manual_seed(100 + dist.get_rank())
        rows = torch.arange(40.0).reshape(40, 1).expand(40, 9) / 40 + dist.get_rank()
        own = torch.Generator().manual_seed(dist.get_rank())
        self.loader = StatefulDataLoader(list(rows), batch_size=2, shuffle=True, generator=own)
        self.step, self.losses = 0, dict[int, float]()
        objects: dict[str, Any] = {
            "model_parts": self.parts,
            "optimizers": self.optimizers,
            "lr_schedulers": self.schedulers,
            "dataloader": self.loader,
            "states": {"train_state": self},
        }
        self.checkpointer = CheckpointManager(folder, interval=2, **objects, **options)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]

    def train(self, steps: int, load_step: int = -1) -> bool:
        loaded = self.checkpointer.load(step=load_step)
        batches = iter(self.loader)
        while self.step < steps:
            self.step += 1
            x = next(batches)
            for part in self.parts:
                x = part(x)
            loss = x.square().mean()
            loss.backward()
            self.checkpointer.maybe_wait_for_staging()
            for optimizer, scheduler in zip(
                self.optimizers.optimizers, self.schedulers, strict=True
            ):
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
            self.losses[self.step] = loss.item()
            self.checkpointer.save(self.step, last_step=self.step == steps)
        self.checkpointer.close()
        return loaded

    def held(self) -> dict[str, Any]:
        out: dict[str, Any] = {"step": self.step, "schedulers": self.schedulers[0].state_dict()}
        for part, optimizer in zip(self.parts, self.optimizers.optimizers, strict=True):
            for name, p in part.named_parameters():
                out |= {f"weight/{name}": whole(p)}
                out |= {f"{state}/{name}": whole(v) for state, v in optimizer.state[p].items()}
        return out


def run(folder: Path) -> dict[str, Any]:
    out: dict[str, Any] = {}
    first = Trainer(
        folder / "run", 2, keep_latest_k=2, async_mode="async_with_pinned_mem", config={"layers": 4}
    )
    out["fresh"] = first.train(7)
    expected, losses = first.held(), first.losses
    out["kept"] = sorted(p.name for p in (folder / "run").iterdir())
    place = folder / "run" / "step-00000006"
    for parts in (2, 1, 4):
        again = Trainer(
            folder / f"again-{parts}",
            parts,
            initial_load_path=str(place),
            initial_load_model_only=False,
        )
        loaded = again.train(7)
        same = again.losses == {7: losses[7]}
        out[f"parts-{parts}"] = [loaded, same, differences(again.held(), expected)]
    here = Trainer(folder / "run", 1, keep_latest_k=0, overwrite=True)
    out["step-6"] = [
        here.train(7, load_step=6),
        here.losses == {7: losses[7]},
        differences(here.held(), expected),
    ]
    newest = Trainer(folder / "run", 1, load_only=True)
    out["newest"] = [
        newest.train(8),
        newest.step,
        len(newest.losses),
        differences(newest.held(), expected) != [],
    ]
    bare = Trainer(folder / "bare", 1, initial_load_path=str(place))
    out["model only"] = [bare.checkpointer.load(), bare.step, bare.schedulers[0].last_epoch]
    some = Trainer(
        folder / "run", 1, exclude_from_loading=["optimizer", "lr_scheduler", "dataloader"]
    )
    out["excluded"] = [some.checkpointer.load(), some.step, some.schedulers[0].last_epoch]
    out |= untrained(folder)
    ck = ucformat.open(place)
    out["states"] = sorted({k.state for k in ck.tensors})
    out["names"] = ck.names()
    out["facts"] = [ck.metadata.step, ck.manifest.config, sorted(ck.objects), sorted(ck.per_rank)]
    out["cut"] = all(isinstance(p, DTensor) for p in first.parts[1].parameters())
    wrongs: tuple[dict[str, Any], ...] = (
        {"exclude_from_loading": ["optimiser"]},
        {"model_parts": [torch.nn.Linear(1, 1)]},
    )
    for wrong in wrongs:
        options = {"model_parts": first.parts, "optimizers": first.optimizers, **wrong}
        try:
            CheckpointManager(folder / "x", **options)
        except ValueError as error:
            out.setdefault("errors", []).append(str(error))
    try:
        Trainer(folder / "run", 1).train(9, load_step=100)
    except LookupError as error:
        out["errors"].append(type(error).__name__)
    return out


def _bare(folder: Path, trainer: Trainer) -> CheckpointManager:
    return CheckpointManager(
        folder, model_parts=trainer.parts, optimizers=trainer.optimizers, interval=1
    )


def untrained(folder: Path) -> dict[str, Any]:
    """A save before the first step has no states of the optimizers, and takes away those of whoever loads it."""
    out: dict[str, Any] = {}
    first = Trainer(folder / "first", 2)
    _bare(folder / "untrained", first).save(1)
    out["states before"] = [len(o.state) for o in first.optimizers.optimizers]
    out["states saved"] = sorted(
        {k.state for k in ucformat.open(folder / "untrained" / "step-00000001").tensors}
    )
    trained = Trainer(folder / "trained", 4)
    trained.train(2)
    _bare(folder / "untrained", trained).load(1)
    out["states loaded"] = [len(o.state) for o in trained.optimizers.optimizers]
    only = first.optimizers.optimizers[1]  # one of two parts has states
    first.parts[1](torch.ones(2, 9)).sum().backward()
    only.step()
    _bare(folder / "half", first).save(2)
    one = Trainer(folder / "one", 1)
    _bare(folder / "half", one).load(2)
    names = {p: name for name, p in one.parts[0].named_parameters()}
    out["half"] = sorted({names[p].split(".")[1] for p in one.optimizers.optimizers[0].state})
    return out


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder = Path(sys.argv[1])
    found = run(folder)
    (folder / f"found-{dist.get_rank()}.json").write_text(json.dumps(found, default=str))
    leave()


if __name__ == "__main__":
    main()
