"""safetensors files as tensors and extents."""

from ucformat.sources.safetensors.source import OpenSafetensors, Safetensors

__all__ = ["OpenSafetensors", "Safetensors"]
