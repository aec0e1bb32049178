"""The integration of Megatron-Core."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ucformat.errors import UnsupportedError
from ucformat.torch.integration import AttachedEntries, Integration

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    import torch

__all__ = ["MEGATRON"]

_FSDP = "megatron_fsdp"  # the package of Megatron-FSDP, alone or inside Megatron-Core


class _Megatron(Integration):
    title = "Megatron-Core"
    module = "ucformat.torch.megatron"

    def attached_entries(
        self,
        module: torch.nn.Module,
        keys: Collection[str],  # noqa: ARG002
    ) -> Iterable[AttachedEntries]:
        """None; refuses Megatron-FSDP, whose DTensors are not where their placements say."""
        if any(_FSDP in name for name in sys.modules) and any(map(_is_sharded, module.modules())):
            raise UnsupportedError(
                f"a {type(module).__name__} is sharded by Megatron-FSDP, whose DTensors do not say "
                "where in the tensors they are",
                hint=(
                    "with Megatron-Core pass the chunk and its optimizer to "
                    "ucformat.torch.megatron.save and load; without it pass the state dicts that the "
                    "engine has prepared for torch.distributed.checkpoint"
                ),
            )
        return ()


def _is_sharded(module: torch.nn.Module) -> bool:
    return any(_FSDP in kind.__module__.split(".") for kind in type(module).__mro__)


MEGATRON = _Megatron()
