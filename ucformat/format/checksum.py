"""CRC-32C of chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from crc32c import crc32c

if TYPE_CHECKING:
    from ucformat.storage.base import Bytes

__all__ = ["checksum"]

_LONG = 256 << 10  # bytes that take longer than handing the GIL over and back


def checksum(data: Bytes, before: int = 0) -> int:
    """The CRC-32C (Castagnoli, RFC 3720) of some bytes, or of those of which `before` is it, followed by them."""
    return crc32c(data, before, gil_release_mode=1 if len(data) >= _LONG else 0)
