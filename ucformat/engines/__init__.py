"""The engines whose checkpoints are read, written and trained with: a room for each, and none imports another."""
