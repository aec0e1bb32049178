"""Reading and checksums of strided memory.

A *strided buffer* is a memoryview of bytes whose last dim is contiguous: rows at regular distances,
such as a slice of a matrix. `ucformat/_native.c` does all of it at memory speed and releases the
GIL. It is built for Linux on x86-64; elsewhere, and where there was no compiler, the same functions
here do it in Python.
"""

from __future__ import annotations

import os
import threading
import zlib
from array import array
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, overload

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    from ucformat.storage.base import Bytes, Checksums


# CRCs combined from those of parts, which may be computed in any order.
#
# The CRC of two concatenated runs of bytes is the CRC of the first, shifted by the length of the
# second, xor the CRC of the second: a CRC is linear, and the inversions at its ends cancel out.


_Tables = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]


class CrcShift:
    """Shifts CRCs of a polynomial, given with its lowest coefficient as the highest bit."""

    def __init__(self, polynomial: int) -> None:
        self._polynomial = polynomial
        self._lock = threading.Lock()
        self._doubled: list[_Tables] = []  # for 1, 2, 4, … bytes, computed when first needed

    def __call__(self, crc: int, nbytes: int) -> int:
        """The contribution of a CRC to that of its bytes followed by `nbytes` others."""
        power = 0
        while nbytes:
            if nbytes & 1:
                if power >= len(self._doubled):
                    with self._lock:
                        self._make(power)
                a, b, c, d = self._doubled[power]
                crc = a[crc & 255] ^ b[crc >> 8 & 255] ^ c[crc >> 16 & 255] ^ d[crc >> 24]
            nbytes >>= 1
            power += 1
        return crc

    def _make(self, power: int) -> None:
        """Compute the tables for 1, 2, 4, … `2 ** power` bytes."""
        while len(self._doubled) <= power:
            if self._doubled:
                half = self._doubled[-1]
                # to shift by twice as many bytes is to shift twice
                rows = [self._apply(half, self._apply(half, 1 << bit)) for bit in range(32)]
            else:
                rows = [self._over_byte(1 << bit) for bit in range(32)]
            tables = tuple(
                tuple(_xor(rows[8 * k : 8 * k + 8], value) for value in range(256))
                for k in range(4)
            )
            self._doubled.append((tables[0], tables[1], tables[2], tables[3]))

    def _over_byte(self, crc: int) -> int:
        for _ in range(8):
            crc = crc >> 1 ^ (self._polynomial if crc & 1 else 0)
        return crc

    @staticmethod
    def _apply(tables: _Tables, crc: int) -> int:
        return (
            tables[0][crc & 255]
            ^ tables[1][crc >> 8 & 255]
            ^ tables[2][crc >> 16 & 255]
            ^ tables[3][crc >> 24]
        )


def _xor(rows: list[int], chosen: int) -> int:
    out = 0
    for bit, row in enumerate(rows):
        if chosen >> bit & 1:
            out ^= row
    return out


CRC32_SHIFT = CrcShift(0xEDB88320)
CRC32C_SHIFT = CrcShift(0x82F63B78)


try:
    from ucformat._native import copy as _native_copy
    from ucformat._native import crc32 as _native_crc32
    from ucformat._native import crc32c as _native_crc32c
    from ucformat._native import crc32c_each as _native_crc32c_each
    from ucformat._native import fill as _native_fill
    from ucformat._native import read_into as _native_read_into
    from ucformat._native import write_all as _native_write_all

    NATIVE = True
except ImportError:
    NATIVE = False


#: Bytes of rows that are cheaper to read into contiguous memory and to copy than to read directly
#: into place.
SHORT_ROW = 0 if NATIVE else 8 << 10

_IOV_MAX = 1024
# bytes of one write(2): ext4 was up to nine times slower with 8 MiB in measurements
_WRITE = 256 << 10
_CALL = 8 << 20  # bytes that are written before a signal is handled
_RELEASE_GIL = 256 << 10  # bytes whose checksum takes longer than releasing and reacquiring the GIL


class Column(NamedTuple):
    """Chunks that a file has one behind the other, where the first dim is that of chunks, and what follows each.

    `behind` is contiguous, and None if nothing follows.
    """

    chunks: NDArray[np.uint8]
    behind: memoryview | None = None


class ChunkBuffers(Sequence[memoryview]):
    """The buffers of columns of chunks, those of chunks and of what follows them alternately.

    For `_native` it takes no object for each of them: threads would wait for the GIL.
    """

    def __init__(self, columns: Sequence[Column]) -> None:
        self.columns = columns

    @property
    def nbytes(self) -> int:
        """The bytes of all buffers."""
        return sum(c.chunks.nbytes + (c.behind.nbytes if c.behind else 0) for c in self.columns)

    def __len__(self) -> int:
        return sum(len(c.chunks) * (1 if c.behind is None else 2) for c in self.columns)

    def __iter__(self) -> Iterator[memoryview]:
        for chunks, behind in self.columns:
            gap = len(behind) // len(chunks) if behind else 0
            for number, chunk in enumerate(chunks):
                yield chunk.data
                if behind is not None:
                    yield behind[number * gap : (number + 1) * gap]

    @overload
    def __getitem__(self, index: int) -> memoryview: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[memoryview]: ...
    def __getitem__(self, index: int | slice) -> memoryview | Sequence[memoryview]:
        if isinstance(index, slice):
            return list(self)[index]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return next(islice(self, index % len(self), None))


def nbytes_of(buffers: Sequence[memoryview]) -> int:
    """The bytes of all buffers."""
    return buffers.nbytes if isinstance(buffers, ChunkBuffers) else sum(b.nbytes for b in buffers)


def _for_native(
    buffers: Sequence[memoryview], crcs: Checksums | None
) -> Sequence[memoryview] | Sequence[Column]:
    """Buffers as `_native` takes them: columns if their checksums are an array."""
    return (
        buffers.columns
        if isinstance(buffers, ChunkBuffers) and isinstance(crcs, array)
        else buffers
    )


def rows(buffer: memoryview) -> Iterator[memoryview]:
    """The contiguous parts of a buffer, in C order, each as a memoryview of bytes."""
    if not buffer.nbytes:
        return
    if buffer.c_contiguous:
        yield buffer.cast("B")
        return
    import numpy as np  # here, because most commands read no tensors

    array = np.asarray(buffer)
    for at in np.ndindex(array.shape[:-1]):
        yield array[at].data


def fill(buffers: Sequence[memoryview], data: memoryview, crcs: Checksums | None = None) -> None:
    """Copy bytes into buffers, one after another; large buffers past the processor's cache.

    Args:
        data: contiguous bytes, at least as many as the buffers have.
    """
    if NATIVE:
        _native_fill(_for_native(buffers, crcs), data, crcs)
        return
    import numpy as np

    for buffer in buffers:
        if buffer.nbytes > data.nbytes:
            raise ValueError("the buffers are larger than the data")
        if buffer.nbytes:
            to = np.asarray(buffer.cast("B") if buffer.c_contiguous else buffer)
            # releases the GIL
            np.copyto(to, np.frombuffer(data, np.uint8, to.size).reshape(to.shape))
            data = data[to.size :]
    extend(crcs, buffers)


def copy(target: NDArray[np.generic], source: NDArray[np.generic]) -> None:
    """Copy an array in C order, row by row if the last dims of both are contiguous.

    NumPy visits the elements in the order of the target. Where rows are short, that of the source
    is faster: the caller chooses it by the order of the dims.

    Args:
        target: the array to copy to, which does not overlap the source.
    """
    if NATIVE and all(
        a.ndim and (a.strides[-1] == a.itemsize or a.shape[-1] == 1) for a in (target, source)
    ):
        _native_copy(target.data, source.data)
    else:
        target[...] = source


def extend(crcs: Checksums | None, buffers: Sequence[memoryview]) -> None:
    """Continue a CRC-32C with each buffer, in place.

    Args:
        crcs: the CRC-32C of what precedes each buffer (None: do nothing).
    """
    if crcs is not None:
        for number, buffer in enumerate(buffers):
            crcs[number] = checksum(buffer, crcs[number])


def checksum(data: Bytes, before: int = 0) -> int:
    """The CRC-32C (Castagnoli, RFC 3720) of bytes.

    Args:
        before: CRC-32C of preceding bytes to continue from (default: none).
    """
    if NATIVE:
        return _native_crc32c(data, before)
    from crc32c import crc32c

    for row in rows(memoryview(data)):
        before = crc32c(row, before, gil_release_mode=1 if row.nbytes >= _RELEASE_GIL else 0)
    return before


def checksums(items: Bytes, nbytes: int, before: int) -> array[int]:
    """The CRC-32C of each of short items of so many bytes.

    Args:
        before: CRC-32C of what precedes each of them.
    """
    if NATIVE:
        return array("I", _native_crc32c_each(items, nbytes, before))
    view = memoryview(items).cast("B")
    each = (view[at : at + nbytes] for at in range(0, len(view), nbytes))
    return array("I", [checksum(item, before) for item in each])


def crc32(data: Bytes, before: int = 0) -> int:
    """The CRC-32 of bytes that zip files contain; zlib may take twenty times as long as `ucformat._native`."""
    if NATIVE:
        return _native_crc32(data, before)
    for row in rows(memoryview(data)):
        before = zlib.crc32(row, before)
    return before


def read_scattered(
    fd: int, offset: int, buffers: Sequence[memoryview], crcs: Checksums | None = None
) -> int:
    """Read a contiguous range of a file into buffers, one after another.

    Returns:
        the number of bytes read, which is less than the size of the buffers only at the end of the
        file.
    """
    if NATIVE:
        return _native_read_into(fd, offset, _for_native(buffers, crcs), crcs)
    remaining = [row for buffer in buffers for row in rows(buffer)]
    remaining.reverse()
    done = 0
    while remaining:
        # the next ones are at the end of the list, where `pop` is cheap
        got = os.preadv(fd, remaining[: -_IOV_MAX - 1 : -1], offset + done)
        if got == 0:
            break
        done += got
        while remaining and got >= remaining[-1].nbytes:
            got -= remaining.pop().nbytes
        if got:
            remaining[-1] = remaining[-1][got:]
    extend(crcs, buffers)
    return done


def write_all(fd: int, data: Bytes) -> None:
    """Write all of a buffer to a file, from its current position.

    Each system call that Python makes ends with waiting for the GIL: in a conversion with two
    threads these waits took as long as the writing itself.
    """
    view = memoryview(data)
    if not view.nbytes:
        return
    view = view.cast("B")
    while NATIVE and view.nbytes > _WRITE:
        _native_write_all(fd, view[:_CALL])
        view = view[_CALL:]
    while view:
        view = view[os.write(fd, view[:_WRITE]) :]
