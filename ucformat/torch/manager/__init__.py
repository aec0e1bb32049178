"""`Manager`: the checkpoints of one training run."""
