"""PyTorch DCP checkpoints as tensors and extents."""

from ucformat.sources.dcp.source import Dcp, OpenDcp

__all__ = ["Dcp", "OpenDcp"]
