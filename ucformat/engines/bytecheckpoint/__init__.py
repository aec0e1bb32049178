"""ByteCheckpoint."""
