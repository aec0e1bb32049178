"""How values of one kind become columns of a message: arrays of numbers and runs of bytes, in one order."""

from __future__ import annotations

import struct
import types
from abc import ABC, abstractmethod
from array import array
from collections.abc import Mapping
from itertools import accumulate, chain, pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from ucformat.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from ucformat.storage.base import Bytes

__all__ = [
    "As",
    "Codec",
    "ColumnReader",
    "ColumnWriter",
    "Fields",
    "Float",
    "Int",
    "Many",
    "Map",
    "Nothing",
    "RawBytes",
    "Str",
    "Union",
]

_HEAD = struct.Struct("<8sI")  # the digest of the kind, and the number of columns
_NARROW = 64  # values from which on it pays to look whether fewer bytes hold them
_INTEGERS = (np.int8, np.int16, np.int32)


class ColumnWriter:
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


class ColumnReader:
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


class Codec(ABC):
    """How values of one kind are columns; `types` are those of the values, by which unions choose."""

    types: tuple[type, ...] = ()
    text: str  # what both sides must agree on

    @abstractmethod
    def write(self, values: Sequence[Any], out: ColumnWriter) -> None:
        """Put values into the next columns; UsageError where one is not of the kind."""

    @abstractmethod
    def read(self, count: int, source: ColumnReader) -> list[Any]:
        """So many values of the next columns; ValueError where these are not what `write` makes."""


class Nothing(Codec):
    """`None`."""

    types, text = (types.NoneType,), "None"

    def write(self, values: Sequence[Any], out: ColumnWriter) -> None:
        if any(v is not None for v in values):
            raise UsageError(f"a {type(values[0]).__name__} was given where nothing is expected")
        out.blank(len(values))

    def read(self, count: int, source: ColumnReader) -> list[Any]:
        source.blank(count)
        return [None] * count


class Int(Codec):
    """Integers of 64 bits, in as few bytes as hold them all."""

    def __init__(self, of: type = int) -> None:
        self.types, self.text = (of,), of.__name__

    def write(self, values: Sequence[Any], out: ColumnWriter) -> None:
        try:
            out.integers(values)
        except (TypeError, OverflowError) as error:
            raise UsageError(f"what should be an integer of 64 bits is not: {error}") from None

    def read(self, count: int, source: ColumnReader) -> list[Any]:
        found = source.integers(count)
        return found if self.types == (int,) else list(map(self.types[0], found))


class Float(Codec):
    """Numbers of 64 bits."""

    types, text = (float,), "float"

    def write(self, values: Sequence[Any], out: ColumnWriter) -> None:
        try:
            out.put("d", array("d", values))
        except (TypeError, OverflowError) as error:
            raise UsageError(f"what should be a number is not: {error}") from None

    def read(self, count: int, source: ColumnReader) -> list[Any]:
        found = source.take("d")
        if len(found) != count:
            raise ValueError("a column has other numbers than it should")
        return found.tolist()  # type: ignore[no-any-return]


class Str(Codec):
    """Each text once, and which of them are meant."""

    types, text = (str,), "str"

    def write(self, values: Sequence[Any], out: ColumnWriter) -> None:
        index: dict[str, int] = {}
        out.integers([index.setdefault(v, len(index)) for v in values])
        try:
            joined = "".join(index)
        except TypeError:
            odd = next(v for v in index if not isinstance(v, str))
            raise UsageError(f"what should be text is {odd!r}, a {type(odd).__name__}") from None
        out.integers(list(map(len, index)))
        out.put("B", joined.encode("utf-8", "surrogatepass"))

    def read(self, count: int, source: ColumnReader) -> list[Any]:
        codes, sizes = source.take("bhiq"), source.take("bhiq")
        whole = source.take("B").tobytes().decode("utf-8", "surrogatepass")
        ends = [*accumulate(sizes.tolist(), initial=0)]
        if len(codes) != count or ends[-1] != len(whole) or (len(sizes) and int(sizes.min()) < 0):
            raise ValueError("a column has other text than it should")
        if count and not (int(codes.min()) >= 0 and int(codes.max()) < len(sizes)):
            raise ValueError("a column names text that is not there")
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
            raise ValueError("a column has other bytes than it should")
        return [bytes(whole[a:b]) for a, b in pairwise(ends)]


class As(Codec):
    """Values that are told as others: `to` makes these, and `back` the values again."""

    def __init__(
        self, kinds: tuple[type, ...], inner: Codec, to: Callable[[Any], Any], back: Callable[[Any], Any], text: str
    ) -> None:
        self.types, self.text = kinds, f"{text} as {inner.text}"
        self.inner, self.to, self.back = inner, to, back

    def write(self, values: Sequence[Any], out: ColumnWriter) -> None:
        self.inner.write(list(map(self.to, values)), out)

    def read(self, count: int, source: ColumnReader) -> list[Any]:
        return list(map(self.back, self.inner.read(count, source)))


class Many(Codec):
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


class Fields(Codec):
    """Values of some fields: dataclasses, named tuples, and tuples of which each place has a kind of its own."""

    def __init__(self, make: Callable[..., Any], kind: type, parts: Mapping[str, Codec]) -> None:
        self.types, self.make = (kind,), make
        self.parts = parts
        self.text = f"{kind.__name__}({', '.join(f'{k}: {c.text}' for k, c in parts.items())})"

    def write(self, values: Sequence[Any], out: ColumnWriter) -> None:
        kind = self.types[0]
        if not all(type(v) is kind for v in values):
            odd = next(v for v in values if type(v) is not kind)
            raise UsageError(f"what should be a {kind.__name__} is a {type(odd).__name__}")
        if kind is tuple:
            columns: Iterable[Sequence[Any]] = zip(*values, strict=True) if values else [[]] * len(self.parts)
            for part, column in zip(self.parts.values(), columns, strict=True):
                part.write(column, out)
            return
        if not self.parts:
            out.blank(len(values))
        for name, part in self.parts.items():
            try:
                part.write(list(map(attrgetter(name), values)), out)
            except UsageError as error:
                raise type(error)(f"{kind.__name__}.{name}: {error.message}", hint=error.hint) from None

    def read(self, count: int, source: ColumnReader) -> list[Any]:
        columns = [part.read(count, source) for part in self.parts.values()]
        if not columns:
            source.blank(count)
            return [self.make() for _ in range(count)]
        return list(map(self.make, *columns))


class Union(Codec):
    """One of several kinds, by the type of the value."""

    def __init__(self, parts: Sequence[Codec]) -> None:
        self.parts = parts
        self.types = tuple(t for part in parts for t in part.types)
        self.text = " | ".join(part.text for part in parts)
        self._exact = {t: i for i, part in enumerate(parts) for t in part.types}

    def write(self, values: Sequence[Any], out: ColumnWriter) -> None:
        chosen = [self._exact.get(type(v), -1) for v in values]
        if -1 in chosen:
            chosen = [self._choose(v) if i < 0 else i for i, v in zip(chosen, values, strict=True)]
        out.integers(chosen)
        for number, part in enumerate(self.parts):
            part.write([v for i, v in zip(chosen, values, strict=True) if i == number], out)

    def _choose(self, value: Any) -> int:
        for number, part in enumerate(self.parts):
            if isinstance(value, part.types):
                return number
        raise UsageError(f"a {type(value).__name__} was given where {self.text} is expected")

    def read(self, count: int, source: ColumnReader) -> list[Any]:
        chosen = source.integers(count, 0, len(self.parts))
        found = [iter(part.read(chosen.count(i), source)) for i, part in enumerate(self.parts)]
        return [next(found[i]) for i in chosen]
