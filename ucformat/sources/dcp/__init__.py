"""PyTorch DCP checkpoints as tensors and extents."""
