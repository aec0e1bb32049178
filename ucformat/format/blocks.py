"""The blocks of a packed file, each of which a checksum covers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ucformat.format.sidecar import NO_BLOCK, block_of
from ucformat.format.tiling import CHECKSUM_BYTES
from ucformat.geometry.tensor import Block
from ucformat.reading.execute import checksum, place_checksum

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucformat.format.sidecar import Sidecar
    from ucformat.storage.base import Store

__all__ = ["ALIGNED", "blocks_of", "is_whole"]

#: Bytes: each piece of a packed file begins at a multiple, for those who map the file; zeros fill up to it.
ALIGNED = 64

_READ = 4 << 20  # bytes


def is_whole(store: Store, file: str, block: Block) -> bool:
    """Whether a block is what its checksum says; read at most 4 MiB at once.

    Raises:
        MissingData: the file ends before the block does.
        NotFound: there is no such file.
    """
    buffer = memoryview(bytearray(min(_READ, block.nbytes)))
    stored = bytearray(4 if block.crc32c is None else 0)
    crc = place_checksum(file, block.offset) if block.placed else 0
    for at in range(0, block.nbytes, _READ) or (0,):
        part = buffer[: min(_READ, block.nbytes - at)]
        behind = [memoryview(stored)] if at + len(part) == block.nbytes else []
        store.read_into(file, block.offset + at, [part, *behind])
        crc = checksum(part, crc)
    return crc == (int.from_bytes(stored, "little") if block.crc32c is None else block.crc32c)


def blocks_of(sidecar: Sidecar) -> Iterator[tuple[str, int, Block]]:
    """Every block once, in the order of files and offsets: its file, the number of a tensor in it, and the block."""
    c = sidecar.columns
    rows = np.flatnonzero(c.block_offset != NO_BLOCK)
    tiled = np.flatnonzero(sidecar.tiled)
    at = np.concatenate([c.block_offset[rows], c.offset[tiled]])
    nbytes = np.concatenate([c.block_nbytes[rows], np.full(len(tiled), -1)])
    rows = np.concatenate([rows, tiled])
    known = np.stack([c.file[rows], at, nbytes, c.crc32c[rows]], axis=1)
    _, first = np.unique(known, axis=0, return_index=True)  # sorted by file and offset
    for k in first.tolist():
        row = int(rows[k])
        file, tensor, crc = sidecar.files[int(c.file[row])], int(c.tensor[row]), int(c.crc32c[row])
        if sidecar.tiled[row]:
            begin, tiling = int(c.offset[row]), sidecar.tiling(row)
            for box in tiling.boxes():
                size = box.size * tiling.itemsize
                yield file, tensor, Block(begin, size, placed=True)
                begin += size + CHECKSUM_BYTES
        else:
            yield file, tensor, block_of(int(at[k]), int(nbytes[k]), crc)
