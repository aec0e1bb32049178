"""`Writer` and `Reader`: universal checkpoints as a storage of PyTorch's `torch.distributed.checkpoint`."""
