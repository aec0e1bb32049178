"""Writes and checks a shard: chunks, each with its crc32c, and a Zarr index at the end (`sharding_indexed`)."""

from __future__ import annotations

import math
import struct
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from ucformat.errors import NotFound
from ucformat.format.digest import leaf, shard_digests
from ucformat.format.structure import Problem
from ucformat.geometry.box import Box, row_major
from ucformat.geometry.fingerprint import fingerprint_of
from ucformat.geometry.tensor import Piece
from ucformat.storage.concurrency import thread_memory
from ucformat.storage.strided import checksum, copy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from ucformat.format.chunking import Grid
    from ucformat.storage.base import Bytes, FileWriter, Store

#: Bytes of chunks that are gathered, encoded and written at once.
BAND_BYTES = 4 << 20

_ABSENT = (1 << 64) - 1


def bands(
    grid: Grid, shard: tuple[int, ...], most: int = BAND_BYTES
) -> Iterator[tuple[Piece, tuple[int, ...]]]:
    """Divide a shard into bands: consecutive chunks, in order, that together are a box of the tensor.

    Yields:
        The box, placed in a buffer of whole chunks (the last of which may exceed the tensor), and
        the number of chunks along each dim.
    """
    whole = grid.box(shard)
    chunk_counts = grid.tiles(shard, "").grid
    steps, budget = [1] * len(chunk_counts), max(1, most // grid.chunk_nbytes)
    for d in reversed(range(len(chunk_counts))):
        steps[d] = min(chunk_counts[d], budget)
        budget //= steps[d]
        if steps[d] < chunk_counts[d]:
            break
    for at in product(*(range(0, n, s) for n, s in zip(chunk_counts, steps, strict=True))):
        counts = tuple(min(s, n - a) for s, n, a in zip(steps, chunk_counts, at, strict=True))
        start = tuple(w + a * c for w, a, c in zip(whole.start, at, grid.chunk, strict=True))
        padded = tuple(n * c for n, c in zip(counts, grid.chunk, strict=True))
        shape = tuple(
            min(p, stop - a) for p, stop, a in zip(padded, whole.stop, start, strict=True)
        )
        yield Piece(Box(start, shape), 0, row_major(padded)), counts


def write_shard(
    store: Store,
    key: str,
    grid: Grid,
    shard: tuple[int, ...],
    fill: Callable[[Piece, NDArray[np.uint8]], NDArray[np.generic] | None],
) -> bytes:
    """Write a shard's file from beginning to end, with at most two bands in memory.

    Args:
        fill: copies the elements of a piece into a buffer of uint8, or returns them as an array
            whose last dim is contiguous; that only if the piece fills the buffer.

    Returns:
        The digests of the shard (`format.digest`).
    """
    leaves, parts = [], []
    with store.create(key, grid.chunk_nbytes + 4) as out:
        for piece, counts in bands(grid, shard):
            count = math.prod(counts)
            raw = thread_memory("gathered", count * grid.chunk_nbytes)
            if piece.box.size * grid.itemsize < raw.nbytes:
                raw[:] = 0
            if (elements := fill(piece, raw)) is not None:
                raw = elements.view(np.uint8)
            else:
                elements = _elements(grid, raw.data, piece.box.shape, piece.strides)
            parts.append(fingerprint_of(elements, grid.shape, piece.box))
            data, band_leaves = _encode(
                grid, counts, raw, thread_memory("encoded", count * (grid.chunk_nbytes + 4))
            )
            leaves += band_leaves
            out.write(data)
        out.write(index_of(grid, shard))
    return shard_digests(leaves, parts)


def _elements(
    grid: Grid, memory: Bytes, shape: tuple[int, ...], strides: tuple[int, ...]
) -> NDArray[np.generic]:
    """Elements in memory that also has what pads their chunks; `strides` in elements."""
    nbytes = [n * grid.itemsize for n in strides]
    return np.ndarray(shape, f"V{grid.itemsize}", memory, 0, nbytes)


def _encode(
    grid: Grid, counts: tuple[int, ...], raw: NDArray[np.uint8], out: NDArray[np.uint8]
) -> tuple[memoryview, list[bytes]]:
    """Encode a band into `out`, each chunk followed by its checksum; returns it with the digests of the chunks."""
    nbytes, pitch = grid.chunk_nbytes, grid.chunk_nbytes + 4
    count = math.prod(counts)
    chunk = (*grid.chunk[:-1], grid.chunk[-1] * grid.itemsize) if grid.chunk else (grid.itemsize,)
    counts = counts or (1,)
    # Rows of chunks may be short: in the order of the band, that of its memory, they are copied
    # twice as fast.
    shape = [x for pair in zip(counts, chunk, strict=True) for x in pair]
    strides = [
        x for pair in zip(row_major(counts, pitch), row_major(chunk), strict=True) for x in pair
    ]
    copy(np.ndarray(shape, np.uint8, out, 0, strides), raw.reshape(shape))
    view, leaves = out.data, []
    for begin in range(0, count * pitch, pitch):
        body = view[begin : begin + nbytes]
        leaves.append(leaf(body))
        struct.pack_into("<I", view, begin + nbytes, checksum(body))
    return view, leaves


def index_of(grid: Grid, shard: tuple[int, ...]) -> bytes:
    """The index at the end of a shard's file: the offset and length of each chunk, all ones for none, and a crc32c."""
    chunk_counts = grid.tiles(shard, "").grid
    nbytes = grid.chunk_nbytes + 4  # with the checksum, which a codec of the chunk appends
    index = np.full((*grid.chunks_in_shard, 2), _ABSENT, "<u8")
    entries = index[tuple(map(slice, chunk_counts))]
    entries[..., 0] = np.arange(math.prod(chunk_counts), dtype="<u8").reshape(chunk_counts) * nbytes
    entries[..., 1] = nbytes
    data = index.tobytes()
    return data + struct.pack("<I", checksum(data))


def check_shard(
    store: Store,
    key: str,
    grid: Grid,
    shard: tuple[int, ...],
    out: FileWriter | None = None,
    *,
    fingerprint: bool = True,
) -> tuple[bytes, list[Problem]]:
    """Read a shard's file back and check its size, every checksum and its index.

    Args:
        fingerprint: whether to compute the fingerprint among the digests; it is zeros otherwise.

    Returns:
        The digests of the shard (`format.digest`), and the problems, which do not name the tensor.
    """
    expected = grid.file_nbytes(shard)
    try:
        size = store.info(key).size
    except NotFound:
        return b"", [Problem(key, "the file is missing", kind="missing")]
    if size != expected:
        return b"", [Problem(key, f"the file has {size} bytes instead of {expected}")]
    tiles = grid.tiles(shard, key)
    pitch, nbytes, total = tiles.pitch, grid.chunk_nbytes, math.prod(tiles.grid)
    most = max(1, BAND_BYTES // pitch)
    leaves, parts, problems = [], [], []
    strides, boxes = row_major(grid.chunk), (extent.box for extent in tiles.extents())
    buffer = memoryview(bytearray(min(most, total) * pitch))
    for first in range(0, total, most):
        count = min(most, total - first)
        store.read_into(key, first * pitch, [buffer[: count * pitch]])
        if out is not None:
            out.write(buffer[: count * pitch])
        for k in range(count):
            body = buffer[k * pitch : k * pitch + nbytes]
            leaves.append(leaf(body))
            if fingerprint:
                box = next(boxes)
                elements = _elements(grid, body, box.shape, strides)
                parts.append(fingerprint_of(elements, grid.shape, box))
            if checksum(body) != int.from_bytes(
                buffer[k * pitch + nbytes : (k + 1) * pitch], "little"
            ):
                at = np.unravel_index(first + k, tiles.grid) if tiles.grid else ()
                where = tuple(
                    int(i) + s * n for i, s, n in zip(at, shard, grid.chunks_in_shard, strict=True)
                )
                reason = f"crc32c differs (chunk at byte {(first + k) * pitch})"
                problems.append(Problem(key, reason, chunk=where, kind="differs"))
    index = store.read(key, total * pitch)
    if out is not None:
        out.write(index)
    if index != index_of(grid, shard):
        problems.append(Problem(key, "the index at the end of the file is damaged"))
    return shard_digests(leaves, parts), problems
