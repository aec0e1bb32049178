"""Make the states of an optimizer that has not stepped yet, so that a checkpoint can be read into them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ucformat.torch.deepspeed.optimizer import OptimizerTensor

__all__ = ["forget_states", "make_states"]


def make_states(held: OptimizerTensor) -> None:
    """Have the optimizer make its states of one tensor, as its first step would.

    It is the optimizer itself that knows which there are, so it takes a step on that tensor alone, as ZeRO's own step
    does, with a gradient, a learning rate and a weight decay of zero: the tensor stays as it is. What the step counted
    is put right when the checkpoint's counters are read.
    """
    optimizer = held.optimizer
    real = optimizer.param_groups
    group = real[held.group]
    trial: dict[str, Any] = {**group, "params": [held.tensor]}
    for option in ("lr", "weight_decay"):
        if option in trial:
            trial[option] = torch.zeros_like(trial[option]) if torch.is_tensor(trial[option]) else 0.0
    lent = held.tensor.grad  # an offloaded optimizer keeps its gradient's memory
    held.tensor.grad = torch.zeros_like(held.tensor)
    optimizer.param_groups = [trial]
    try:
        optimizer.step()
    finally:
        optimizer.param_groups = real
        held.tensor.grad = lent
    group.update({k: v for k, v in trial.items() if k not in group})


def forget_states(held: OptimizerTensor) -> None:
    """Take a tensor's states away, so that the optimizer's next step is its first one on it."""
    held.optimizer.state.pop(held.tensor, None)
