"""The parts of a file that an exporter has planned, in bands of a few MiB that are read at once."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from ucformat.errors import UnsupportedError
from ucformat.exporters.base import Sealed, Span
from ucformat.geometry.box import bounding_box
from ucformat.geometry.tensor import cut_piece
from ucformat.schema import ITEMSIZE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from ucformat.exporters.base import Part, TargetFile
    from ucformat.geometry.tensor import Key, Piece, TensorInfo
    from ucformat.jobs.inputs import Input

#: Bytes of a band.
BAND_BYTES = 8 << 20
_PARTS = 4096  # of a band


@dataclass(frozen=True, slots=True)
class PartRange:
    """A range of a part: of its bytes, or of the elements of a span."""

    part: bytes | Span
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Bytes of the range."""
        return (self.stop - self.start) * (
            1 if isinstance(self.part, bytes) else ITEMSIZE[self.part.dtype]
        )

    def pieces(self) -> Iterator[tuple[TensorInfo, Piece]]:
        """The tensors in a range of a span, and the pieces, placed in a buffer of the range."""
        assert isinstance(self.part, Span)  # noqa: S101
        for info, piece in self.part.pieces:
            for within in cut_piece(piece, self.start, self.stop):
                yield info, replace(within, offset=within.offset - self.start)


def bands_of(parts: Iterable[Part]) -> Iterator[list[PartRange] | Sealed]:
    """Group the consecutive parts of a file that are read and written together, at most 8 MiB.

    Large spans are cut at multiples of that, which are mostly the ends of chunks in the source.
    """
    band: list[PartRange] = []
    left = BAND_BYTES
    for part in parts:
        if band and (isinstance(part, Sealed) or _nbytes(part) > left):
            yield band
            band, left = [], BAND_BYTES
        if isinstance(part, Sealed):
            yield part
            continue
        unit, size = (
            (1, len(part)) if isinstance(part, bytes) else (ITEMSIZE[part.dtype], part.size)
        )
        at = 0
        while True:
            stop = min(size, at + max(1, left // unit))
            band.append(PartRange(part, at, stop))
            left -= (stop - at) * unit
            at = stop
            if left < unit or len(band) >= _PARTS:
                yield band
                band, left = [], BAND_BYTES
            if at >= size:
                break
    if band:
        yield band


def _nbytes(part: bytes | Span) -> int:
    return len(part) if isinstance(part, bytes) else part.nbytes


def fill(source: Input, band: Sequence[PartRange], memory: NDArray[np.uint8]) -> bool:
    """Fill memory with consecutive parts of a file.

    Args:
        memory: of as many bytes as the band.

    Returns:
        Whether checksums cover all elements that were read, or none are compared at all.
    """
    buffers: list[NDArray[np.uint8]] = []
    wanted: dict[Key, tuple[TensorInfo, list[tuple[int, Piece]]]] = {}
    at = 0
    for part_range in band:
        own = memory[at : at + part_range.nbytes]
        at += part_range.nbytes
        if isinstance(part_range.part, bytes):
            own[:] = np.frombuffer(part_range.part, np.uint8)[part_range.start : part_range.stop]
            continue
        pieces_of_range = list(part_range.pieces())
        # elements in no piece are zeros, and the memory is that of an earlier band
        if sum(piece.box.size for _, piece in pieces_of_range) < part_range.stop - part_range.start:
            own[:] = 0
        for info, piece in pieces_of_range:
            wanted.setdefault(info.key, (info, []))[1].append((len(buffers), piece))
        buffers.append(own)
    boxes = []
    for info, pieces in wanted.values():
        near = bounding_box(piece.box for _, piece in pieces)
        assert near is not None  # noqa: S101 - no piece is empty
        boxes.append((source.within(info, near), pieces))
    return source.read(boxes, buffers)


class FileRanges:
    """A file that an exporter has planned, any range of which can be read without the bytes before it."""

    def __init__(self, file: TargetFile) -> None:
        self.nbytes = file.nbytes
        self._parts: list[bytes | Span] = []
        for part in file.parts():
            if isinstance(part, Sealed):
                raise UnsupportedError(
                    f"{file.key} holds checksums of its own bytes, so it has to be written whole",
                    hint="export the checkpoint",
                )
            self._parts.append(part)
        self._ends = list(accumulate(_nbytes(part) for part in self._parts))

    def end_of_read(self, start: int, size: int) -> int:
        """Where a read of at most `size` bytes should end, so that the next one begins where chunks of tensors do.

        Args:
            size: a power of two, up to `BAND_BYTES`.
        """
        stop = min(start + size, self.nbytes)
        if stop == self.nbytes:
            return stop
        number = bisect_right(self._ends, stop)
        begin = self._ends[number] - _nbytes(self._parts[number])
        if begin > start:
            return begin
        return begin + (stop - begin) // size * size

    def _ranges(self, start: int, stop: int) -> tuple[list[PartRange], int]:
        """The parts that the bytes `[start, stop)` lie in, cut at whole elements.

        Returns:
            The parts, and how many of their bytes are before `start`.
        """
        ranges: list[PartRange] = []
        before = 0
        for number in range(bisect_right(self._ends, start), len(self._parts)):
            part, end = self._parts[number], self._ends[number]
            begin = end - _nbytes(part)
            if begin >= stop:
                break
            unit = 1 if isinstance(part, bytes) else ITEMSIZE[part.dtype]
            first, last = max(0, start - begin) // unit, -(-(min(stop, end) - begin) // unit)
            if not ranges:
                before = max(0, start - begin) - first * unit
            ranges.append(PartRange(part, first, last))
        return ranges, before

    def read(self, source: Input, start: int, stop: int) -> NDArray[np.uint8]:
        """Read the bytes `[start, stop)`, from the extents of the tensors that they are of."""
        ranges, before = self._ranges(start, stop)
        memory = np.empty(sum(r.nbytes for r in ranges), np.uint8)
        fill(source, ranges, memory)
        return memory[before : before + stop - start]
