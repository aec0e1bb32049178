"""DeepSpeed checkpoints as tensors and extents."""

from ucformat.sources.deepspeed.source import DeepSpeed, OpenDeepSpeed

__all__ = ["DeepSpeed", "OpenDeepSpeed"]
