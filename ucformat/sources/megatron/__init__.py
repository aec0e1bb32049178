"""Megatron-Core's and Megatron-LM's checkpoints as tensors and extents."""

from ucformat.sources.megatron.source import Megatron

__all__ = ["Megatron"]
