"""Accelerate: the state of an Accelerator as a training state (docs/guides/huggingface.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucformat.errors import UnsupportedError
from ucformat.torch.state.objects import PerRank, Rng

if TYPE_CHECKING:
    from collections.abc import Mapping

    from accelerate import Accelerator

__all__ = ["accelerator_state"]


def accelerator_state(accelerator: Accelerator, merge_dataloader: Any = None) -> dict[str, Any]:
    """Return what `accelerator.save_state` saves, as a training state for `save`, `async_save` and `load`.

    These are the prepared models, optimizers and schedulers, data loaders with a state, objects
    registered for checkpointing, the gradient scaler, the random generators, and the accelerator's
    step.

    Args:
        merge_dataloader: `merge` of `PerRank` for the data loaders, with which another number of
            ranks loads them.

    Raises:
        UnsupportedError: the state is that of DeepSpeed or Megatron-LM.
    """
    kind = str(accelerator.distributed_type.value)
    if kind in ("DEEPSPEED", "MEGATRON_LM"):
        raise UnsupportedError(
            f"the state of this Accelerator is managed by {kind}",
            hint="the model that `prepare` returns is the engine, which ucformat.torch.deepspeed saves"
            if kind == "DEEPSPEED"
            else "ucformat.torch.megatron saves the chunks, `model.module`, with `model.optimizer`",
        )
    loaders = [d for d in accelerator._dataloaders if getattr(d, "use_stateful_dataloader", False)]  # noqa: SLF001
    parts: dict[str, list[Any]] = {
        "model": list(accelerator._models),  # noqa: SLF001 - there is no public list of prepared objects
        "optimizer": [unwrapped(o) for o in accelerator._optimizers],  # noqa: SLF001
        "scheduler": list(accelerator._schedulers),  # noqa: SLF001
        "dataloader": [_PreparedLoader(d, merge_dataloader) for d in loaders],
        "object": list(accelerator._custom_objects),  # noqa: SLF001
    }
    state = {
        name if len(all_) == 1 else f"{name}_{i}": x
        for name, all_ in parts.items()
        for i, x in enumerate(all_)
    }
    state |= {"accelerator": _Step(accelerator), "rng": Rng()}
    return state if accelerator.scaler is None else {**state, "scaler": accelerator.scaler}


class _PreparedLoader(PerRank):
    call = "accelerator_state(accelerator, merge_dataloader"


class _Step:
    """The step counter of an accelerator."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator

    def state_dict(self) -> dict[str, int]:
        return {"step": int(self.accelerator.step)}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.accelerator.step = state["step"]


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside an AcceleratedOptimizer, whose `step` may do nothing."""
    return getattr(optimizer, "optimizer", optimizer)
