"""Checkpoints of any kind as stores of zarr-python."""
