"""What Megatron-Core's Muon takes from `emerging_optimizers`, for tests: that package needs Triton and another Python.

Megatron's own classes do the rest: which parameters Muon takes, its groups, how whole parameters
are given to data-parallel ranks, and the state dicts. The state of a matrix, `momentum_buffer`, is
that of the package (0.1.0 to 0.3.0).
"""

from __future__ import annotations

import math
import sys
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["provide"]

_PACKAGE = "emerging_optimizers"


class OrthogonalizedOptimizer(torch.optim.Optimizer):
    """Momentum, of which a function of the subclass makes the update."""

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum_beta: float,
        weight_decay: float,
        *,
        scaled_orthogonalize_fn: Callable[..., torch.Tensor],
        **_: Any,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "momentum_beta": momentum_beta, "weight_decay": weight_decay}
        )
        self.scaled_orthogonalize_fn = scaled_orthogonalize_fn

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update the parameters that have gradients."""
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p.grad))
                buffer.lerp_(p.grad, 1 - group["momentum_beta"])
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(self.orthogonalize(p, buffer), alpha=-group["lr"])

    def orthogonalize(self, p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """The update of a parameter."""
        raise NotImplementedError


def newton_schulz_tp(grad: torch.Tensor, **_: Any) -> torch.Tensor:
    """A matrix with the same row and column spaces, and singular values near one."""
    u, _singular, v = torch.linalg.svd(grad.float(), full_matrices=False)
    return (u @ v).to(grad.dtype)


def get_muon_scale_factor(rows: int, columns: int, **_: Any) -> float:
    """What is in proportion to the largest gain of an update."""
    return math.sqrt(max(rows, columns))


def provide() -> None:
    """Make the package importable, if it is not installed, and Megatron's layer-wise optimizer run on gloo."""
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer

    # its own reference, as gloo gathers no tensors of several sizes
    LayerWiseDistributedOptimizer.allgather_params = LayerWiseDistributedOptimizer.broadcast_params
    if _PACKAGE in sys.modules or find_spec(_PACKAGE) is not None:
        return
    optimizers = f"{_PACKAGE}.orthogonalized_optimizers"
    contents: dict[str, dict[str, Any]] = {
        _PACKAGE: {},
        optimizers: {
            "OrthogonalizedOptimizer": OrthogonalizedOptimizer,
            "get_muon_scale_factor": get_muon_scale_factor,
        },
        f"{optimizers}.muon_utils": {"newton_schulz_tp": newton_schulz_tp},
    }
    for name, members in contents.items():
        module = sys.modules[name] = ModuleType(name)
        vars(module).update(members, __path__=[])
