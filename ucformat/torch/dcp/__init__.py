"""`Writer` and `Reader`: PyTorch's `torch.distributed.checkpoint` over universal checkpoints."""
