"""The blocks of a packed file, each of which a checksum covers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ucformat.format.checksum import checksum

if TYPE_CHECKING:
    from ucformat.geometry.tensor import Block
    from ucformat.storage.base import Store

__all__ = ["is_whole"]

_READ = 4 << 20  # bytes


def is_whole(store: Store, file: str, block: Block) -> bool:
    """Whether a block is what its checksum says; read at most 4 MiB at once.

    Raises:
        MissingData: the file ends before the block does.
        NotFound: there is no such file.
    """
    buffer = memoryview(bytearray(min(_READ, block.nbytes)))
    stored = bytearray(4 if block.crc32c is None else 0)
    crc = 0
    for at in range(0, block.nbytes, _READ) or (0,):
        part = buffer[: min(_READ, block.nbytes - at)]
        behind = [memoryview(stored)] if at + len(part) == block.nbytes else []
        store.read_into(file, block.offset + at, [part, *behind])
        crc = checksum(part, crc)
    return crc == (int.from_bytes(stored, "little") if block.crc32c is None else block.crc32c)
