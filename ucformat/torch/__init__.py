"""In the training loop: save universal checkpoints from any layout, load them into any other (extra `torch`)."""
