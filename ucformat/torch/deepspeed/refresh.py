"""Bring the module up to date after the optimizer's tensors were read, by what the training step itself does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ucformat.torch.deepspeed.engine import Trainer

__all__ = ["refresh"]


@torch.no_grad()
def refresh(trainer: Trainer) -> None:
    """Round the masters into the module's parameters, and gather those that every rank keeps whole.

    All ranks must call it: ZeRO 1 to 3 gather.
    """
    optimizer: Any = trainer.optimizer
    zero3 = trainer.engine.optimizer if hasattr(trainer.engine.optimizer, "checkpoint_event_prologue") else None
    if zero3 is not None:
        zero3.checkpoint_event_prologue()  # lets go of what is gathered: the partitions were read
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        for number in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(number)  # noqa: SLF001 - what its step does
    elif hasattr(optimizer, "update_lp_params"):
        optimizer.update_lp_params()
        # DeepSpeed 0.19.8 links the states of each group to its parameters after the first group's first step alone
        optimizer._hp_optimizer_states_linked = False  # noqa: SLF001 - links all of them at the next step
    elif hasattr(optimizer, "fp32_groups_flat"):
        for parameters, flat in zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True):
            for parameter, master in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
                parameter.copy_(master.view(parameter.shape))
    elif hasattr(optimizer, "fp32_groups"):
        for parameters, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            for parameter, master in zip(parameters, masters, strict=True):
                parameter.copy_(master)
    if zero3 is not None:
        zero3.checkpoint_event_epilogue()
