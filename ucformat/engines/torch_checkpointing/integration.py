"""The integration of torch_checkpointing."""

from __future__ import annotations

from ucformat.torch.integration import Integration

__all__ = ["TORCH_CHECKPOINTING"]


class _TorchCheckpointing(Integration):
    title = "torch_checkpointing"
    module = "ucformat.torch.integrations.torch_checkpointing"


TORCH_CHECKPOINTING = _TorchCheckpointing()
