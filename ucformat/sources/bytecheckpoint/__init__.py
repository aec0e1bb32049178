"""ByteCheckpoint's checkpoints as tensors and extents."""

from ucformat.sources.bytecheckpoint.source import ByteCheckpoint

__all__ = ["ByteCheckpoint"]
