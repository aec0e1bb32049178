"""Ranks that train an FSDP2 model, save it with DCP, and resume it from any DCP checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from pathlib import Path

_VOCAB, _WIDTH = 23, 10  # which no number of ranks divides


class Model(torch.nn.Module):
    def __init__(self, *, tied: bool, experts: int) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(_VOCAB, _WIDTH)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(experts))
        self.norm = torch.nn.LayerNorm(_WIDTH)
        self.head = torch.nn.Linear(_WIDTH, _VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        return self.head(self.norm(h + sum(torch.tanh(e(h)) for e in self.experts)))


class _Run:
    def __init__(self, seed: int, *, tied: bool, experts: int, dtype: str, flat: bool) -> None:
        torch.manual_seed(seed)
        self.model = Model(tied=tied, experts=experts).to(getattr(torch, dtype))
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for expert in self.model.experts:
            fully_shard(expert, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        norms = [p for n, p in self.model.named_parameters() if p.dim() == 1]
        others = [p for n, p in self.model.named_parameters() if p.dim() > 1]
        groups = [{"params": others}, {"params": norms, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2, foreach=False)
        self.options = StateDictOptions(flatten_optimizer_state_dict=flat)

    def step(self, number: int) -> float:
        x = torch.randint(0, _VOCAB, (4, 5), generator=torch.Generator().manual_seed(number))
        self.optimizer.zero_grad()
        logits = self.model(x).float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), x.roll(1).flatten())
        loss.backward()
        self.optimizer.step()
        return float(loss.item())

    def state(self) -> dict[str, Any]:
        model, optim = get_state_dict(self.model, self.optimizer, options=self.options)
        return {"model": model, "optim": optim}

    def whole(self) -> dict[str, bytes]:
        out = {}
        for key, value in _flat(self.state()).items():
            if isinstance(value, torch.Tensor):
                full = value.full_tensor() if isinstance(value, DTensor) else value
                out[key] = (
                    full.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                )
            else:
                out[key] = repr(value).encode()
        return out


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {
            k: v for key, inner in value.items() for k, v in _flat(inner, f"{prefix}{key}.").items()
        }
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return {
            k: v for i, inner in enumerate(value) for k, v in _flat(inner, f"{prefix}{i}.").items()
        }
    return {prefix: value}


def train(folder: Path, **how: Any) -> tuple[dict[str, bytes], list[float]]:
    """Train, save into `<folder>/dcp`, train on."""
    run = _Run(1, **how)
    for number in range(2):
        run.step(number)
    train_state = {"step": 2, "seen": torch.arange(3), "note": ("a", None), "nested": [{"x": 1.5}]}
    dcp.save({**run.state(), "train": train_state}, checkpoint_id=folder / "dcp")
    return run.whole(), [run.step(number) for number in (2, 3)]


def resume(folder: Path, checkpoint: str, *, values: bool = True, **how: Any) -> Any:
    """Load into another model, with PyTorch's own reader, and train on."""
    run = _Run(2, **how)
    state = run.state()
    if values:
        state["train"] = {
            "step": 0,
            "seen": torch.zeros(3, dtype=torch.int64),
            "note": (),
            "nested": [{"x": 0.0}],
        }
    dcp.load(state, checkpoint_id=checkpoint)
    set_state_dict(
        run.model,
        run.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optim"],
        options=run.options,
    )
    train_state = {
        k: v.tolist() if torch.is_tensor(v) else v for k, v in state.get("train", {}).items()
    }
    return run.whole(), [run.step(number) for number in (2, 3)], train_state
