"""The engines whose checkpoints are read, written and trained with, each in its room."""
