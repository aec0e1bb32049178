"""ByteCheckpoint's checkpoints as tensors and extents."""

from ucformat.sources.bytecheckpoint.source import ByteCheckpoint, OpenByteCheckpoint

__all__ = ["ByteCheckpoint", "OpenByteCheckpoint"]
