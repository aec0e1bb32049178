"""Runs of experiment trackers, whose parameters and metrics are brought to checkpoints of the catalog."""
