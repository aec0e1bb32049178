"""Tiers: checkpoints in the memory of nodes, copied to peers and to slower storage, and recovered from the rest."""
