"""Tiles as the bytes of a packed file: each followed by its checksum, and its part in the fingerprint of its tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ucformat.format.chunking import CHECKSUM_BYTES
from ucformat.geometry.box import Box, offset_of, reach, row_major
from ucformat.geometry.fingerprint import LANES, fingerprint_of
from ucformat.reading.execute import name_checksum, place_checksum
from ucformat.storage.strided import checksum

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

try:
    from ucformat._native import pack as _native_pack

    NATIVE = True
except ImportError:
    NATIVE = False

#: In place of a tile's first element: its elements are no run of those of the tensor.
NO_RUN = -1


def run_of(box: Box, shape: tuple[int, ...]) -> int:
    """The number of a box's first element in its row-major tensor; NO_RUN if the others do not follow it."""
    steps = row_major(shape)
    is_run = 1 + reach(box.shape, steps) == box.size
    return offset_of(box.start, steps) if is_run else NO_RUN


def pack(
    room: NDArray[np.uint8],
    key: str,
    begin: int,
    elements: Sequence[NDArray[np.generic]],
    starts: Sequence[int],
    firsts: Sequence[int],
) -> NDArray[np.uint64]:
    """Put tiles into a part of a packed file, with zeros between them.

    Args:
        room: the bytes of the file from byte `begin` on.
        elements: those of each tile, row-major; perhaps in the room where they belong.
        starts: the byte of the room at which each begins, ascending.
        firsts: `run_of` each.

    Returns:
        the part of each in the fingerprint of its tensor; zeros where there is no run.
    """
    sums = np.zeros((len(starts), LANES), np.uint64)
    if NATIVE:
        at, first_of = (np.array(column, np.int64).data for column in (starts, firsts))
        file = name_checksum(key)
        _native_pack(room.data, file, begin, list(elements), at, first_of, sums.data)
        return sums
    end = 0
    for number, (tile, start, first) in enumerate(zip(elements, starts, firsts, strict=True)):
        room[end:start] = 0
        end = start + tile.nbytes
        room[start:end] = tile.reshape(-1).view(np.uint8)
        crc = checksum(room[start:end].data, place_checksum(key, begin + start))
        room[end : end + CHECKSUM_BYTES].data[:] = crc.to_bytes(CHECKSUM_BYTES, "little")
        end += CHECKSUM_BYTES
        if first != NO_RUN:
            run = Box((first,), (tile.size,))
            sums[number] = fingerprint_of(tile.reshape(-1), (first + tile.size,), run)
    room[end:] = 0
    return sums
