"""A message as columns: arrays of numbers and runs of bytes, which are written and read in one order."""

from __future__ import annotations

import struct
from array import array
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ucformat.storage.base import Bytes

__all__ = ["Columns", "Source"]

_HEAD = struct.Struct("<8sI")  # the digest of the kind, and the number of columns
_NARROW = 64  # values from which on it pays to look whether fewer bytes hold them
_INTEGERS = (np.int8, np.int16, np.int32)


class Columns:
    """The columns of a message that is written, in order."""

    def __init__(self) -> None:
        self.codes = bytearray()
        self.parts: list[Bytes | array[Any]] = []

    def put(self, code: str, data: Bytes | array[Any]) -> None:
        """The next column; codes are those of `array` and NumPy."""
        self.codes += code.encode()
        self.parts.append(data)

    def integers(self, values: Sequence[int]) -> None:
        """A column of integers; TypeError or OverflowError where they are none of 64 bits."""
        wide = array("q", values)
        if len(wide) >= _NARROW:
            many = np.frombuffer(wide, np.int64)
            low, high = many.min(), many.max()
            for narrow in _INTEGERS:
                if np.iinfo(narrow).min <= low and high <= np.iinfo(narrow).max:
                    self.put(np.dtype(narrow).char, many.astype(narrow).data)
                    return
        self.put("q", wide)

    def blank(self, count: int) -> None:
        """So many values that say nothing: a byte for each, so that few bytes never stand for many values."""
        self.put("B", bytes(count))

    def joined(self, digest: bytes) -> bytes:
        """The message."""
        sizes = array("q", [memoryview(p).nbytes for p in self.parts])
        return b"".join([_HEAD.pack(digest, len(sizes)), self.codes, sizes, *self.parts])


class Source:
    """The columns of a message that is read, each once and in order."""

    def __init__(self, data: memoryview, digest: bytes) -> None:
        told, count = _HEAD.unpack_from(data)
        if told != digest:
            raise ValueError("it tells values of another kind")
        begin = _HEAD.size + 9 * count
        sizes = np.frombuffer(data[_HEAD.size + count : begin], np.int64).tolist()
        if len(sizes) != count or any(n < 0 for n in sizes) or begin + sum(sizes) != len(data):
            raise ValueError("its sizes are wrong")
        ends = [*accumulate(sizes, initial=begin)]
        self._columns = zip(bytes(data[_HEAD.size :][:count]).decode("ascii"), pairwise(ends), strict=True)
        self._data = data

    def take(self, codes: str) -> NDArray[Any]:
        """The next column, which must be of one of these codes."""
        code, (begin, end) = next(self._columns, ("", (0, 0)))
        if not code or code not in codes:
            raise ValueError(f"a column is of type {code!r}, and should be of one of {codes!r}")
        return np.frombuffer(self._data[begin:end], code)

    def integers(self, count: int, low: int = -(1 << 63), high: int = 1 << 63) -> list[int]:
        """So many integers, all of them `low <= i < high`."""
        found = self.take("bhiq")
        if len(found) != count or (count and not (low <= int(found.min()) and int(found.max()) < high)):
            raise ValueError("a column has other numbers than it should")
        return found.tolist()  # type: ignore[no-any-return]

    def lengths(self, count: int) -> list[int]:
        """So many lengths of what follows."""
        return self.integers(count, 0, 1 << 48)

    def blank(self, count: int) -> None:
        """So many values that say nothing."""
        if len(self.take("B")) != count:
            raise ValueError("a column has other values than it should")

    def end(self) -> None:
        """ValueError where a column is left."""
        if next(self._columns, None) is not None:
            raise ValueError("it goes on where it should end")
