"""Orbax checkpoints as tensors and extents."""

from ucformat.sources.orbax.source import Orbax

__all__ = ["Orbax"]
