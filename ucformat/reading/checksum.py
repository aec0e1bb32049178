"""CRC-32C of chunks, and of tiles along with the place where they lie."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from crc32c import crc32c

if TYPE_CHECKING:
    from ucformat.storage.base import Bytes

__all__ = ["checksum", "place_checksum"]

_LONG = 256 << 10  # bytes that take longer than handing the GIL over and back


def checksum(data: Bytes, before: int = 0) -> int:
    """The CRC-32C (Castagnoli, RFC 3720) of some bytes, or of those of which `before` is it, followed by them."""
    return crc32c(data, before, gil_release_mode=1 if len(data) >= _LONG else 0)


def place_checksum(file: str, offset: int) -> int:
    """The CRC-32C of what stands before a tile's bytes under its checksum: where it lies.

    So bytes of another save, rank or tile in its place do not match, though they bring their checksum along.

    Args:
        file: the path of the packed file; of its parts the last two count, which a save gives to no other file.
        offset: the byte of the file at which the tile begins.
    """
    return crc32c(offset.to_bytes(8, "little"), _name_checksum(file))


@lru_cache(256)
def _name_checksum(file: str) -> int:
    return crc32c("/".join(file.split("/")[-2:]).encode())
