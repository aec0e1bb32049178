"""PyTorch DCP checkpoints as tensors and extents."""

from ucformat.sources.dcp.source import Dcp

__all__ = ["Dcp"]
