"""torchtitan's own trainer: the checkpoint manager that a configuration names (docs/guides/torchtitan.md)."""

from ucformat.engines.torchtitan.config import UniversalCheckpointManager

__all__ = ["UniversalCheckpointManager"]
