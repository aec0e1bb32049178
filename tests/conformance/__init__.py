"""Checkpoints, good and bad, with what a reader must make of them: see README.md."""
