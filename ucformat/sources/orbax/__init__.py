"""Orbax checkpoints as tensors and extents."""

from ucformat.sources.orbax.source import OpenOrbax, Orbax

__all__ = ["OpenOrbax", "Orbax"]
