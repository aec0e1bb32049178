"""`FusedAdam` of Transformer Engine, which trainings with Megatron-Core on GPUs have, in plain PyTorch, for tests.

It keeps the step in its groups, from the first one on, and moments alone for each parameter.
PyTorch's Adam, which Megatron takes without a GPU, keeps a step for each parameter.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

__all__ = ["provide"]


class FusedAdam(torch.optim.Optimizer):
    """AdamW whose groups have the step."""

    def __init__(
        self,
        params: Any,
        lr: float | None = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        adam_w_mode: bool = True,
        **_: Any,
    ) -> None:
        assert adam_w_mode
        options = {
            "lr": 1e-3 if lr is None else lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, {**options, "bias_correction": True})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update the parameters that have gradients."""
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = step = group.get("step", 0) + 1
            first, second = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state |= {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
                average, square = state["exp_avg"], state["exp_avg_sq"]
                average.lerp_(p.grad, 1 - first)
                square.mul_(second).addcmul_(p.grad, p.grad, value=1 - second)
                root = (square / (1 - second**step)).sqrt_().add_(group["eps"])
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.addcdiv_(average, root, value=-group["lr"] / (1 - first**step))


def provide() -> None:
    """Have Megatron take it, as it does where Transformer Engine is installed."""
    optimizer: Any = importlib.import_module("megatron.core.optimizer")
    distributed: Any = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    optimizer.Adam = distributed.Adam = FusedAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distributed.HAVE_APEX_OR_TE = distributed.USING_TE_OPTIMIZER = True
