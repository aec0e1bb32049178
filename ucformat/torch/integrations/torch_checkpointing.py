"""torch_checkpointing: its checkpoint manager, with universal checkpoints (docs/guides/torch_checkpointing.md)."""

from ucformat.engines.torch_checkpointing.live import CheckpointManager

__all__ = ["CheckpointManager"]
