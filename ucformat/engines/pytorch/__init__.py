"""PyTorch: torch.save and torch.distributed.checkpoint."""
