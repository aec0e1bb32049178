"""Foreign checkpoints as tensors and extents, read in place."""
