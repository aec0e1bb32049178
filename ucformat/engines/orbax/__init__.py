"""Orbax and Zarr."""
