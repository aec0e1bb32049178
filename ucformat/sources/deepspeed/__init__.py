"""DeepSpeed checkpoints as tensors and extents."""

from ucformat.sources.deepspeed.source import DeepSpeed

__all__ = ["DeepSpeed"]
