"""safetensors files as tensors and extents."""

from ucformat.sources.safetensors.source import Safetensors

__all__ = ["Safetensors"]
