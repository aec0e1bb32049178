"""Bytes by url: ranged reads into caller memory, streamed writes, put-if-absent."""
