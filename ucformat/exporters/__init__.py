"""Checkpoints in the formats of other tools, as files that are planned here and written by `jobs`."""
