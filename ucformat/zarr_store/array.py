"""A tensor of any checkpoint as a Zarr array: its document, its chunks, and the memory of each.

The array is not sharded, and its chunks are raw. Where the files store the tensor in chunks with checksums, the chunks
of the array are these, so that each is verified; elsewhere they are rows, which are contiguous in most files.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ucformat.format.arrays import chunked_array_json
from ucformat.format.chunking import chunk_shape
from ucformat.geometry.box import Box, each_index, row_major
from ucformat.geometry.flat_buffer import flat_boxes
from ucformat.geometry.tensor import Piece, Tiles
from ucformat.reading.dtypes import fill_value, numpy_dtype

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from ucformat.geometry.tensor import TensorInfo
    from ucformat.reading.readable import Readable

DOCUMENT = "zarr.json"
_MAX_DIGITS = 20  # of a chunk's index
_MIN_STORED, _MAX_STORED = 64 << 10, 16 << 20  # bytes of a stored chunk that is a chunk of the array, too


class TensorArray:
    """A tensor as an array of the store."""

    def __init__(self, source: Readable, info: TensorInfo) -> None:
        self.info, self._source = info, source

    @cached_property
    def chunk(self) -> tuple[int, ...]:
        """The edges of a chunk, in elements."""
        return _stored_chunk(self._source, self.info) or chunk_shape(self.info.shape, self.info.itemsize, cuts=1)

    @cached_property
    def document(self) -> bytes:
        """Its `zarr.json`."""
        return chunked_array_json(self.info, self.chunk)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of a chunk."""
        return Box.whole(self.chunk).size * self.info.itemsize

    @cached_property
    def grid(self) -> tuple[int, ...]:
        """Number of chunks along each dim."""
        return tuple(-(-n // c) for n, c in zip(self.info.shape, self.chunk, strict=True))

    def __iter__(self) -> Iterator[str]:
        """The keys of the document and of all chunks, below the array's folder."""
        yield DOCUMENT
        for at in each_index([range(n) for n in self.grid]):
            yield "/".join(["c", *map(str, at)])

    def at(self, parts: list[str]) -> tuple[int, ...] | None:
        """The coordinates of a chunk.

        Returns:
            The coordinates; None if the array has no such chunk.
        """
        if parts[:1] != ["c"] or len(parts) != 1 + len(self.grid) or not all(map(_is_number, parts[1:])):
            return None
        found = tuple(map(int, parts[1:]))
        return found if all(i < n for i, n in zip(found, self.grid, strict=True)) else None

    def pieces(self, at: tuple[int, ...], count: int, start: int, stop: int) -> tuple[list[Piece], NDArray[Any]]:
        """The parts of the tensor in the bytes `[start, stop)` of chunks, and memory for their elements.

        Elements that exceed the tensor are set to the fill value.

        Args:
            count: number of chunks that follow each other along the first dim.
        """
        unit = self.info.itemsize
        shape = (self.chunk[0] * count, *self.chunk[1:]) if self.chunk else ()
        begin = tuple(i * c for i, c in zip(at, self.chunk, strict=True))
        held = Box(begin, tuple(min(c, n - b) for c, n, b in zip(shape, self.info.shape, begin, strict=True)))
        first, last = start // unit, -(-stop // unit)
        strides = row_major(shape)
        out = np.empty(last - first, numpy_dtype(self.info.dtype))
        if held.shape == shape and last - first == held.size:
            return [Piece(held, 0, strides)], out
        out[...] = _fill(self.info.dtype)
        found = []
        for box in flat_boxes(shape, first, last):
            part = box.shift(begin).intersect(held)
            if part is not None:
                offset = sum((p - b) * s for p, b, s in zip(part.start, begin, strides, strict=True))
                found.append(Piece(part, offset - first, strides))
        return found, out


def _is_number(text: str) -> bool:
    return text.isdecimal() and text.isascii() and len(text) < _MAX_DIGITS and (text == "0" or text[0] != "0")


def _fill(dtype: str) -> Any:
    """The fill value of an array, which pads the chunks at its edges."""
    value = fill_value(dtype)
    return complex("nan+nanj") if isinstance(value, list) else float("nan") if value == "NaN" else value


def _stored_chunk(source: Readable, info: TensorInfo) -> tuple[int, ...] | None:
    """The chunk of a file that holds the first element; None if it is not in one, or in a very small or large one."""
    first = Box((0,) * len(info.shape), (1,) * len(info.shape))
    if not info.size or not info.shape:
        return None
    for extent in source.extents(info.key, first):
        if extent.box.intersect(first) is not None:
            chunk = extent.chunk if isinstance(extent, Tiles) else extent.box.shape if extent.block else None
            nbytes = Box.whole(chunk).size * info.itemsize if chunk else 0
            return chunk if min(_MIN_STORED, info.nbytes) <= nbytes <= _MAX_STORED else None
    return None
