"""Checkpoints that a server of ours answers."""
