"""The integration of Megatron-Core."""

from __future__ import annotations

from ucformat.torch.integration import Integration

__all__ = ["MEGATRON"]


class _Megatron(Integration):
    title = "Megatron-Core"
    module = "ucformat.torch.megatron"


MEGATRON = _Megatron()
