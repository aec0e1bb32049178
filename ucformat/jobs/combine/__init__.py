"""Combining checkpoints into a new one, block by block: averages, merges, adapters."""
