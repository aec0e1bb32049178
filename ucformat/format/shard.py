"""Writes and checks a shard: chunks, each with its crc32c, and a Zarr index at the end (`sharding_indexed`)."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from ucformat.errors import ChecksumError, IntegrityError, MissingData, NotFound
from ucformat.format.chunking import CHECKSUM_BYTES
from ucformat.format.digest import leaf, shard_digests
from ucformat.format.encoded import Image
from ucformat.format.encoding import compress, decompress
from ucformat.format.structure import Problem
from ucformat.geometry.box import Box, row_major
from ucformat.geometry.fingerprint import fingerprint_of
from ucformat.geometry.tensor import Piece
from ucformat.storage.concurrency import thread_memory
from ucformat.storage.strided import checksum, copy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from ucformat.format.chunking import Grid
    from ucformat.storage.base import Bytes, FileWriter, Store

try:
    from ucformat._native import seal as _native_seal

    NATIVE = True
except ImportError:
    NATIVE = False

#: Bytes of chunks that are gathered, encoded and written at once.
BAND_BYTES = 4 << 20

_ABSENT = (1 << 64) - 1
_HINT = "restore the file from another copy; `ucp verify` names every damaged chunk"
_CHECKSUM = struct.Struct("<I")
# bytes of a chunk with its checksum, up to which XXH3 digests in ways that are not compiled
_DIGESTED_HERE = 240 + CHECKSUM_BYTES


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
    codec: str | None = None,
) -> bytes:
    """Write a shard's file from beginning to end, with at most two bands in memory.

    Args:
        fill: copies the elements of a piece into a buffer of uint8, or returns them as an array
            whose last dim is contiguous; that only if the piece fills the buffer.
        codec: how chunks are encoded (default: they are stored as they are).

    Returns:
        The digests of the shard (`format.digest`), the same with any codec.
    """
    leaves, parts, sizes = [], [], list[int]()
    with store.create(key, grid.chunk_limits(codec)[1]) as out:
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
            band = thread_memory("encoded", count * (grid.chunk_nbytes + CHECKSUM_BYTES))
            _arrange(grid, counts, raw, band)
            pitch = grid.chunk_nbytes + CHECKSUM_BYTES
            if codec is None:
                leaves.append(seal(band.data, pitch))
                sizes += [pitch] * count
                out.write(band.data)
                continue
            for begin in range(0, band.size, pitch):
                body = band.data[begin : begin + grid.chunk_nbytes]
                leaves.append(leaf(body))
                stored = compress(body, grid.itemsize)
                sizes.append(len(stored) + CHECKSUM_BYTES)
                out.write(stored + _CHECKSUM.pack(checksum(stored)))
        out.write(index_of(grid, shard, sizes))
    return shard_digests(leaves, parts)


def _elements(
    grid: Grid, memory: Bytes, shape: tuple[int, ...], strides: tuple[int, ...]
) -> NDArray[np.generic]:
    """Elements in memory that also has what pads their chunks; `strides` in elements."""
    nbytes = [n * grid.itemsize for n in strides]
    return np.ndarray(shape, f"V{grid.itemsize}", memory, 0, nbytes)


def seal(band: memoryview, pitch: int) -> bytes:
    """Put the checksum of each chunk of a band behind it; returns their digests.

    Args:
        pitch: the bytes of a chunk with its checksum.
    """
    if NATIVE and pitch > _DIGESTED_HERE:
        return _native_seal(band, pitch)
    digests = []
    for begin in range(0, len(band), pitch):
        body = band[begin : begin + pitch - CHECKSUM_BYTES]
        _CHECKSUM.pack_into(band, begin + len(body), checksum(body))
        digests.append(leaf(body))
    return b"".join(digests)


def _arrange(
    grid: Grid, counts: tuple[int, ...], raw: NDArray[np.uint8], band: NDArray[np.uint8]
) -> None:
    """Copy elements into a band chunk by chunk, each with room for its checksum behind it."""
    pitch = grid.chunk_nbytes + CHECKSUM_BYTES
    chunk = (*grid.chunk[:-1], grid.chunk[-1] * grid.itemsize) if grid.chunk else (grid.itemsize,)
    counts = counts or (1,)
    # Rows of chunks may be short: in the order of the band, that of its memory, they are copied
    # twice as fast.
    shape = [x for pair in zip(counts, chunk, strict=True) for x in pair]
    strides = [
        x for pair in zip(row_major(counts, pitch), row_major(chunk), strict=True) for x in pair
    ]
    copy(np.ndarray(shape, np.uint8, band, 0, strides), raw.reshape(shape))


def index_of(grid: Grid, shard: tuple[int, ...], sizes: NDArray[np.int64] | Sequence[int]) -> bytes:
    """The index at the end of a shard's file: the offset and length of each chunk, all ones for none, and a crc32c.

    Args:
        sizes: the bytes of each chunk that is stored, with its checksum.
    """
    chunk_counts = grid.tiles(shard, "").grid
    lengths = np.asarray(sizes, np.int64).reshape(chunk_counts)
    index = np.full((*grid.chunks_in_shard, 2), _ABSENT, "<u8")
    entries = index[tuple(map(slice, chunk_counts))]
    entries[..., 0] = np.cumsum(lengths).reshape(chunk_counts) - lengths
    entries[..., 1] = lengths
    data = index.tobytes()
    return data + _CHECKSUM.pack(checksum(data))


def chunk_sizes(
    grid: Grid, shard: tuple[int, ...], codec: str | None, index: bytes, end: int
) -> NDArray[np.int64]:
    """The bytes of each stored chunk with its checksum, by the index of a shard.

    Args:
        end: the bytes before the index, all of which are those of chunks.

    Raises:
        IntegrityError: the index is damaged, or is not one of chunks without gaps.
    """
    entries = np.frombuffer(index, "<i8", len(index) // 8).reshape(*grid.chunks_in_shard, 2)
    stored = tuple(map(slice, grid.tiles(shard, "").grid))
    sizes: NDArray[np.int64] = entries[..., 1][stored].ravel()
    least, most = grid.chunk_limits(codec)
    if (
        ((sizes >= least) & (sizes <= most)).all()
        and sizes.sum() == end
        and index == index_of(grid, shard, sizes)
    ):
        return sizes
    raise IntegrityError("the index at the end of the file is damaged")


@dataclass(frozen=True, eq=False)
class ShardImage(Image):
    """A shard whose chunks are encoded.

    Attributes:
        place: of its file, for messages.
    """

    itemsize: int
    place: str

    @classmethod
    def read(
        cls, store: Store, key: str, grid: Grid, shard: tuple[int, ...], codec: str
    ) -> ShardImage:
        """Read the index of a shard.

        Raises:
            MissingData: there is no such file.
            IntegrityError: it is damaged.
        """
        place = f"{store.url}/{key}"
        try:
            size = store.info(key).size
            grid.check_size(shard, codec, size)
            end = size - grid.index_nbytes
            stored = chunk_sizes(grid, shard, codec, store.read(key, end), end)
        except NotFound as error:
            raise MissingData(error.message) from error
        except IntegrityError as error:
            raise IntegrityError(f"{place}: {error.message}", hint=_HINT) from error
        sizes = np.full(len(stored), grid.chunk_nbytes)
        starts = np.arange(len(stored)) * (grid.chunk_nbytes + CHECKSUM_BYTES)
        begins = np.cumsum(stored) - stored
        return cls(grid.file_nbytes(shard), starts, sizes, begins, stored, grid.itemsize, place)

    def decode(self, number: int, stored: memoryview, out: memoryview) -> int:
        """See Image."""
        body, crc = stored[:-CHECKSUM_BYTES], stored[-CHECKSUM_BYTES:]
        where = f"the chunk at byte {self.stored_starts[number]} of {self.place}"
        if checksum(body) != int.from_bytes(crc, "little"):
            raise ChecksumError(f"{where} is damaged (its crc32c differs)", hint=_HINT)
        decompress(body, out, self.itemsize, where)
        return checksum(out)


def check_shard(
    store: Store,
    key: str,
    grid: Grid,
    shard: tuple[int, ...],
    out: FileWriter | None = None,
    codec: str | None = None,
    *,
    fingerprint: bool = True,
) -> tuple[bytes, list[Problem]]:
    """Read a shard's file back and check its size, its index, and every checksum.

    Args:
        codec: how chunks are encoded.
        fingerprint: whether to compute the fingerprint among the digests; it is zeros otherwise.

    Returns:
        The digests of the shard (`format.digest`), and the problems, which do not name the tensor.
    """
    try:
        size = store.info(key).size
        grid.check_size(shard, codec, size)
    except NotFound:
        return b"", [Problem(key, "the file is missing", kind="missing")]
    except IntegrityError as error:
        return b"", [Problem(key, error.message)]
    tiles, end = grid.tiles(shard, key), size - grid.index_nbytes
    index, problems = store.read(key, end), list[Problem]()
    try:
        sizes = chunk_sizes(grid, shard, codec, index, end)
    except IntegrityError as error:
        problems.append(Problem(key, error.message))
        if codec is not None:  # nothing else says where chunks are
            return b"", problems
        sizes = np.full(math.prod(tiles.grid), tiles.pitch)
    decoded = memoryview(bytearray(grid.chunk_nbytes if codec else 0))
    leaves, parts, strides = [], [], row_major(grid.chunk)
    stored = _read_chunks(store, key, sizes, max(1, BAND_BYTES // tiles.pitch), out)
    for k, (extent, (begin, data, crc)) in enumerate(zip(tiles.extents(), stored, strict=True)):
        reason = None if checksum(data) == crc else f"crc32c differs (chunk at byte {begin})"
        if reason is None and codec is not None:
            reason = _fault(data, decoded, grid, begin)
        body = data if codec is None else decoded
        if reason is not None:
            at = np.unravel_index(k, tiles.grid) if tiles.grid else ()
            where = tuple(
                int(i) + s * n for i, s, n in zip(at, shard, grid.chunks_in_shard, strict=True)
            )
            problems.append(Problem(key, reason, chunk=where, kind="differs"))
        leaves.append(leaf(body))
        if fingerprint:
            elements = _elements(grid, body, extent.box.shape, strides)
            parts.append(fingerprint_of(elements, grid.shape, extent.box))
    if out is not None:
        out.write(index)
    return shard_digests(leaves, parts), problems


def _read_chunks(
    store: Store, key: str, sizes: NDArray[np.int64], most: int, out: FileWriter | None
) -> Iterator[tuple[int, memoryview, int]]:
    """Read chunks, `most` at once: the byte at which each begins, its bytes, and the checksum behind them."""
    buffer, at = memoryview(bytearray(int(sizes[:most].sum()))), 0
    for first in range(0, len(sizes), most):
        some = sizes[first : first + most].tolist()
        if sum(some) > len(buffer):
            buffer = memoryview(bytearray(sum(some)))
        read = buffer[: sum(some)]
        store.read_into(key, at, [read])
        if out is not None:
            out.write(read)
        for size in some:
            body, crc = read[: size - CHECKSUM_BYTES], read[size - CHECKSUM_BYTES : size]
            yield at, body, int.from_bytes(crc, "little")
            read, at = read[size:], at + size


def _fault(stored: memoryview, decoded: memoryview, grid: Grid, begin: int) -> str | None:
    """Decode a chunk; returns why it is damaged, or None if it is not."""
    try:
        decompress(stored, decoded, grid.itemsize, f"the chunk at byte {begin}")
    except IntegrityError as error:
        return error.message
    return None
