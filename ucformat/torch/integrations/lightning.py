"""Lightning: strategies that save from all ranks, and a CheckpointIO for one rank (docs/guides/lightning.md)."""

from ucformat.engines.lightning.live import (
    UniversalCheckpointIO,
    UniversalDDPStrategy,
    UniversalModelParallelStrategy,
)

__all__ = ["UniversalCheckpointIO", "UniversalDDPStrategy", "UniversalModelParallelStrategy"]
