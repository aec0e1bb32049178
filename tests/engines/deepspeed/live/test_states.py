"""States of an optimizer that has not made a step yet."""

from __future__ import annotations

from typing import Any

import torch

from ucformat.engines.deepspeed.live_engine import OptimizerTensor
from ucformat.engines.deepspeed.live_load import make_states


class Counting(torch.optim.AdamW):
    """An optimizer that counts its steps in the group, as DeepSpeed's FusedAdam does."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
        super().step(closure)


def test_they_are_made_and_nothing_else_changes() -> None:
    tensor, other = (torch.nn.Parameter(torch.randn(3)) for _ in range(2))
    tensor.grad = torch.ones(3)
    optimizer = Counting([tensor, other], lr=0.5, weight_decay=0.1)
    before, gradient = tensor.detach().clone(), tensor.grad
    make_states(OptimizerTensor(optimizer, 0, tensor, True, {"w": (3,)}, {"w": (0, 3, 0)}))
    assert torch.equal(tensor, before)
    assert tensor.grad is gradient
    assert optimizer.state[tensor].keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert other not in optimizer.state
    (group,) = optimizer.param_groups
    assert (group["params"][0], group["lr"], group["weight_decay"]) == (tensor, 0.5, 0.1)
    assert group["step"] == 1  # what a step adds is there for the checkpoint to fill
