"""Codecs that encode values of one kind as columns of a message: arrays of numbers and runs of bytes, in order."""

from __future__ import annotations

import struct
import types
from abc import ABC, abstractmethod
from array import array
from collections.abc import Mapping
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from ucformat.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from ucformat.storage.base import Bytes

_HEADER = struct.Struct("<8sI?")  # the digest of the kind, the number of columns, whether their sizes are bytes
_MIN_TO_NARROW = 64  # values; shorter columns of integers are written in 8 or in 64 bits
_NARROW_DTYPES = (np.int8, np.int16, np.int32)


class ColumnWriter:
    """Builds a message column by column."""

    def __init__(self) -> None:
        self.codes = bytearray()
        self.parts: list[Bytes | array[Any]] = []

    def put(self, code: str, data: Bytes | array[Any]) -> None:
        """Append a column.

        Args:
            code: the type of the elements, as `array` and NumPy name it.
        """
        self.codes += code.encode()
        self.parts.append(data)

    def integers(self, values: Sequence[int]) -> None:
        """Append a column of integers, in the narrowest type that holds them all."""
        wide = array("q", values)
        if len(wide) >= _MIN_TO_NARROW:
            found = np.frombuffer(wide, np.int64)
            low, high = found.min(), found.max()
            for narrow in _NARROW_DTYPES:
                if np.iinfo(narrow).min <= low and high <= np.iinfo(narrow).max:
                    self.put(np.dtype(narrow).char, found.astype(narrow).data)
                    return
        elif wide and min(wide) >= -128 and max(wide) < 128:
            self.put("b", array("b", wide))
            return
        self.put("q", wide)

    def blank(self, count: int) -> None:
        """Append a column for values without content.

        Each takes one byte, so that a short message cannot decode to a large number of values.
        """
        self.put("B", bytes(count))

    def to_bytes(self, digest: bytes) -> bytes:
        """Return the message."""
        sizes = [memoryview(p).nbytes for p in self.parts]
        small = max(sizes, default=0) < 256
        packed = bytes(sizes) if small else array("q", sizes)
        return b"".join([_HEADER.pack(digest, len(sizes), small), self.codes, packed, *self.parts])


class ColumnReader:
    """Reads the columns of a message, each once and in order."""

    def __init__(self, data: memoryview, digest: bytes) -> None:
        found, count, small = _HEADER.unpack_from(data)
        if found != digest:
            raise ValueError("it contains values of another kind")
        begin = _HEADER.size + (2 if small else 9) * count
        sizes = np.frombuffer(data[_HEADER.size + count : begin], np.uint8 if small else np.int64).tolist()
        if len(sizes) != count or any(n < 0 for n in sizes) or begin + sum(sizes) != len(data):
            raise ValueError("its sizes are wrong")
        ends = [*accumulate(sizes, initial=begin)]
        self._columns = zip(bytes(data[_HEADER.size :][:count]).decode("ascii"), pairwise(ends), strict=True)
        self._data = data

    def take(self, codes: str) -> NDArray[Any]:
        """Read the next column."""
        code, (begin, end) = next(self._columns, ("", (0, 0)))
        if not code or code not in codes:
            raise ValueError(f"a column has type {code!r}, expected one of {codes!r}")
        return np.frombuffer(self._data[begin:end], code)

    def integers(self, count: int, low: int = -(1 << 63), high: int = 1 << 63) -> list[int]:
        """Read a column of integers."""
        found = self.take("bhiq")
        if len(found) != count or (count and not (low <= int(found.min()) and int(found.max()) < high)):
            raise ValueError("a column does not have the expected integers")
        return found.tolist()  # type: ignore[no-any-return]

    def lengths(self, count: int) -> list[int]:
        """Read a column of lengths."""
        return self.integers(count, 0, 1 << 48)

    def blank(self, count: int) -> None:
        """Read a column that `ColumnWriter.blank` wrote."""
        if len(self.take("B")) != count:
            raise ValueError("a column does not have the expected length")

    def end(self) -> None:
        """Check that all columns were read."""
        if next(self._columns, None) is not None:
            raise ValueError("it has more columns than expected")


class Codec(ABC):
    """Encodes and decodes values of one kind.

    `types` are the Python types of the values, by which a `Union` chooses. `text` describes the encoding, on which the
    sender and the receiver must agree.
    """

    types: tuple[type, ...] = ()
    text: str

    @abstractmethod
    def write(self, values: Sequence[Any], out: ColumnWriter) -> None:
        """Append values as columns."""

    @abstractmethod
    def read(self, count: int, source: ColumnReader) -> list[Any]:
        """Read the columns that `write` appended."""


class Null(Codec):
    """`None`."""

    types, text = (types.NoneType,), "None"

    def write(self, values: Sequence[Any], out: ColumnWriter) -> None:
        if any(v is not None for v in values):
            raise UsageError(f"expected None, got a {type(next(v for v in values if v is not None)).__name__}")
        out.blank(len(values))

    def read(self, count: int, source: ColumnReader) -> list[Any]:
        source.blank(count)
        return [None] * count


class Int(Codec):
    """Integers of 64 bits, in the narrowest type that holds them all."""

    def __init__(self, of: type = int) -> None:
        self.types, self.text = (of,), of.__name__

    def write(self, values: Sequence[Any], out: ColumnWriter) -> None:
        try:
            out.integers(values)
        except (TypeError, OverflowError) as error:
            raise UsageError(f"expected an integer of 64 bits: {error}") from None

    def read(self, count: int, source: ColumnReader) -> list[Any]:
        found = source.integers(count)
        return found if self.types == (int,) else list(map(self.types[0], found))


class Float(Codec):
    """Floating-point numbers of 64 bits."""

    types, text = (float,), "float"

    def write(self, values: Sequence[Any], out: ColumnWriter) -> None:
        try:
            out.put("d", array("d", values))
        except (TypeError, OverflowError) as error:
            raise UsageError(f"expected a number: {error}") from None

    def read(self, count: int, source: ColumnReader) -> list[Any]:
        found = source.take("d")
        if len(found) != count:
            raise ValueError("a column does not have the expected length")
        return found.tolist()  # type: ignore[no-any-return]


class Str(Codec):
    """Strings: each distinct one once, and an index into these for each value."""

    types, text = (str,), "str"

    def write(self, values: Sequence[Any], out: ColumnWriter) -> None:
        index: dict[str, int] = {}
        out.integers([index.setdefault(v, len(index)) for v in values])
        try:
            joined = "".join(index)
        except TypeError:
            odd = next(v for v in index if not isinstance(v, str))
            raise UsageError(f"expected a string, got {odd!r}, a {type(odd).__name__}") from None
        out.integers(list(map(len, index)))
        out.put("B", joined.encode("utf-8", "surrogatepass"))

    def read(self, count: int, source: ColumnReader) -> list[Any]:
        codes, sizes = source.take("bhiq"), source.take("bhiq")
        whole = source.take("B").tobytes().decode("utf-8", "surrogatepass")
        ends = [*accumulate(sizes.tolist(), initial=0)]
        if len(codes) != count or ends[-1] != len(whole) or (len(sizes) and int(sizes.min()) < 0):
            raise ValueError("a column of strings is malformed")
        if count and not (int(codes.min()) >= 0 and int(codes.max()) < len(sizes)):
            raise ValueError("a column refers to a string that is missing")
        known = [whole[a:b] for a, b in pairwise(ends)]
        return [known[i] for i in codes.tolist()]


class RawBytes(Codec):
    """Bytes."""

    types, text = (bytes, bytearray), "bytes"

    def write(self, values: Sequence[Any], out: ColumnWriter) -> None:
        out.integers(list(map(len, values)))
        out.put("B", values[0] if len(values) == 1 else b"".join(values))

    def read(self, count: int, source: ColumnReader) -> list[Any]:
        ends = [*accumulate(source.lengths(count), initial=0)]
        whole = source.take("B").data
        if ends[-1] != len(whole):
            raise ValueError("a column of bytes does not have the expected length")
        return [bytes(whole[a:b]) for a, b in pairwise(ends)]


class Converted(Codec):
    """Values that are converted to another kind by `to`, and back by `back`."""

    def __init__(
        self, kinds: tuple[type, ...], inner: Codec, to: Callable[[Any], Any], back: Callable[[Any], Any], text: str
    ) -> None:
        self.types, self.text = kinds, f"{text} as {inner.text}"
        self.inner, self.to, self.back = inner, to, back

    def write(self, values: Sequence[Any], out: ColumnWriter) -> None:
        self.inner.write(list(map(self.to, values)), out)

    def read(self, count: int, source: ColumnReader) -> list[Any]:
        return list(map(self.back, self.inner.read(count, source)))


class Repeated(Codec):
    """`tuple[T, ...]`, `list[T]`, `frozenset[T]`."""

    def __init__(self, make: Any, inner: Codec) -> None:
        self.types, self.text = (make,), f"{make.__name__} of {inner.text}"
        self.make, self.inner = make, inner

    def write(self, values: Sequence[Any], out: ColumnWriter) -> None:
        out.integers(list(map(len, values)))
        self.inner.write(list(chain.from_iterable(values)), out)

    def read(self, count: int, source: ColumnReader) -> list[Any]:
        sizes = source.lengths(count)
        flat = self.inner.read(sum(sizes), source)
        each = sizes[0] if sizes else 0
        if self.make is tuple and each and sizes.count(each) == count:
            return list(zip(*[iter(flat)] * each, strict=True))
        return [self.make(flat[a:b]) for a, b in pairwise(accumulate(sizes, initial=0))]


class Map(Codec):
    """`Mapping[K, V]`."""

    types = (Mapping,)

    def __init__(self, keys: Codec, inner: Codec) -> None:
        self.text = f"{keys.text} to {inner.text}"
        self.keys, self.inner = keys, inner

    def write(self, values: Sequence[Any], out: ColumnWriter) -> None:
        out.integers(list(map(len, values)))
        self.keys.write(list(chain.from_iterable(values)), out)
        self.inner.write([v for one in values for v in one.values()], out)

    def read(self, count: int, source: ColumnReader) -> list[Any]:
        sizes = source.lengths(count)
        keys, values = self.keys.read(sum(sizes), source), self.inner.read(sum(sizes), source)
        return [dict(zip(keys[a:b], values[a:b], strict=True)) for a, b in pairwise(accumulate(sizes, initial=0))]
