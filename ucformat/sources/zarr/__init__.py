"""Zarr groups and arrays as tensors and extents."""

from ucformat.sources.zarr.source import Zarr

__all__ = ["Zarr"]
