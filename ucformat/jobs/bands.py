"""The parts of an exported file in bands of a few MiB, one of which is written while the next one is read."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from ucformat.exporters.base import Sealed, Span
from ucformat.geometry.tensor import cut_piece
from ucformat.schema import ITEMSIZE
from ucformat.storage.scratch import thread_memory

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from concurrent.futures import Future

    import numpy as np
    from numpy.typing import NDArray

    from ucformat.exporters.base import Part
    from ucformat.geometry.tensor import Piece, TensorInfo
    from ucformat.storage.base import Writer

_BAND_BYTES = 8 << 20
_PARTS = 4096  # of a band


@dataclass(frozen=True, slots=True)
class Cut:
    """A range of a part: of its bytes, or of the elements of a span."""

    part: bytes | Span
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Bytes of the range."""
        return (self.stop - self.start) * (1 if isinstance(self.part, bytes) else ITEMSIZE[self.part.dtype])

    def pieces(self) -> Iterator[tuple[TensorInfo, Piece]]:
        """The tensors in a range of a span, and the pieces, placed in a buffer of the range."""
        assert isinstance(self.part, Span)  # noqa: S101
        for info, piece in self.part.pieces:
            for cut in cut_piece(piece, self.start, self.stop):
                yield info, replace(cut, offset=cut.offset - self.start)


def bands(parts: Iterable[Part]) -> Iterator[list[Cut] | Sealed]:
    """Group the consecutive parts of a file that are read and written together, at most 8 MiB.

    Large spans are cut at multiples of that, which are mostly the ends of chunks in the source.
    """
    band: list[Cut] = []
    left = _BAND_BYTES
    for part in parts:
        if band and (isinstance(part, Sealed) or _nbytes(part) > left):
            yield band
            band, left = [], _BAND_BYTES
        if isinstance(part, Sealed):
            yield part
            continue
        unit, size = (1, len(part)) if isinstance(part, bytes) else (ITEMSIZE[part.dtype], part.size)
        at = 0
        while True:
            stop = min(size, at + max(1, left // unit))
            band.append(Cut(part, at, stop))
            left -= (stop - at) * unit
            at = stop
            if left < unit or len(band) >= _PARTS:
                yield band
                band, left = [], _BAND_BYTES
            if at >= size:
                break
    if band:
        yield band


def _nbytes(part: bytes | Span) -> int:
    return len(part) if isinstance(part, bytes) else part.nbytes


class WriteBehind:
    """Writes a band in a thread of its own, while the caller fills the next one.

    Args:
        nbytes: bytes of the file. One of a single band is written by the caller's thread.
    """

    def __init__(self, out: Writer, nbytes: int) -> None:
        self._out, self._turn = out, 0
        self._pool = ThreadPoolExecutor(1, "ucformat-write") if nbytes > _BAND_BYTES else None
        self._writing: Future[None] | None = None

    def memory(self, nbytes: int) -> NDArray[np.uint8]:
        """Memory to fill, of which nothing is being written."""
        return thread_memory(f"band {self._turn}", nbytes)

    def write(self, data: memoryview) -> None:
        """Write bytes, after all that were given before.

        Args:
            data: the bytes, which do not change before `wait`, or the next call of this method, returns.
        """
        self.wait()
        if self._pool is None:
            self._out.write(data)
            return
        self._writing = self._pool.submit(copy_context().run, self._out.write, data)
        self._turn ^= 1

    def wait(self) -> None:
        """Wait until everything is written."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()
