"""The optimizer states of a checkpoint by the names of a DeepSpeed engine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from ucformat.geometry.tensor import Key
from ucformat.torch.loading.match import PARAMETER, holds_training
from ucformat.torch.loading.values import plain_states
from ucformat.torch.state.memory import torch_dtype

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ucformat.checkpoint import Checkpoint


@dataclass(frozen=True)
class StoredStates:
    """A checkpoint's optimizer states by the engine's names; `names` has the stored."""

    ck: Checkpoint
    names: Mapping[str, str]

    @cached_property
    def plain(self) -> dict[str, dict[str, Any]]:
        """States that are plain numbers, by stored name and state."""
        return plain_states(self.ck)

    @cached_property
    def trained(self) -> bool:
        """Whether the checkpoint contains optimizer states, or groups, which exist before the first step."""
        return holds_training(self.ck)

    def stepped(self, name: str) -> bool:
        """Check whether the checkpoint has optimizer states of a parameter."""
        stored = self.names.get(name)
        if stored is None:
            return False
        has_tensors = any(state not in PARAMETER for state in self.ck.states(stored))
        return bool(self.plain.get(stored)) or has_tensors

    def number(self, name: str, state: str) -> Any:
        """Return a state that is stored as a plain number, or None."""
        return self.plain.get(self.names.get(name, ""), {}).get(state)

    def scalar(self, name: str, state: str) -> torch.Tensor:
        """Return a tensor for a 0-d state, in its stored dtype."""
        info = self.ck.tensors.get(Key(self.names.get(name, name), state))
        return torch.zeros((), dtype=torch_dtype(info.dtype) if info is not None else torch.float32)
