"""The items of `torch.distributed.checkpoint`, as several engines store them."""
