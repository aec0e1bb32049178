"""The integration of DeepSpeed."""

from __future__ import annotations

from ucformat.torch.integration import Integration

__all__ = ["DEEPSPEED"]


class _DeepSpeed(Integration):
    title = "DeepSpeed"
    module = "ucformat.torch.deepspeed"


DEEPSPEED = _DeepSpeed()
