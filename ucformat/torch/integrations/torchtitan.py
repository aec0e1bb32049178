"""torchtitan: a checkpoint manager for its training loop (docs/guides/torchtitan.md)."""

from ucformat.engines.torchtitan.live import CheckpointManager

__all__ = ["CheckpointManager"]
