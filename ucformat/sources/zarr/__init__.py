"""Zarr groups and arrays as tensors and extents."""

from ucformat.sources.zarr.source import OpenZarr, Zarr

__all__ = ["OpenZarr", "Zarr"]
