"""Messages between ranks: columns of plain data, decoded only as the kind that the receiver expects.

A message contains numbers, strings and raw bytes; it names no class or function. Both sides pass
the same kind, a Python annotation (`tuple[WriteItem, ...] | None`, where `WriteItem` is a
`message`). All values of one field are one column, so a hundred thousand boxes are a few arrays of
integers: faster and smaller than pickle.

| kind | encoded as |
|---|---|
| `int`, `float`, `bool`, `str`, `bytes`, `datetime`, `Literal` of strings | themselves; equal strings once |
| `NDArray` of numbers | dtype, shape and bytes |
| `tuple`, `list`, `frozenset`, `Mapping`, unions | lengths or choices, then the elements |
| dataclasses, named tuples | their fields; decoded by their constructors, which validate |
| pydantic models | their JSON |
| exceptions | class name, message and hint of an error of `ucformat.errors`; any other becomes a `UcformatError` |
| `Any` | JSON, the form in which non-tensor values of a state are kept anyway |
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
import types
import typing
from abc import ABC, abstractmethod
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from datetime import datetime
from functools import cache
from itertools import accumulate, chain, pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, dataclass_transform

import numpy as np
from pydantic import BaseModel

from ucformat import errors
from ucformat.errors import IntegrityError, UcformatError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from ucformat.storage.base import Bytes


# Codecs that encode values of one kind as columns of a message: arrays of numbers and runs of
# bytes, in order.


# the digest of the kind, the number of columns, whether their sizes are bytes
_HEADER = struct.Struct("<8sI?")
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
            numbers = np.frombuffer(wide, np.int64)
            low, high = numbers.min(), numbers.max()
            for narrow in _NARROW_DTYPES:
                if np.iinfo(narrow).min <= low and high <= np.iinfo(narrow).max:
                    self.put(np.dtype(narrow).char, numbers.astype(narrow).data)
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
        kind, count, small = _HEADER.unpack_from(data)
        if kind != digest:
            raise ValueError("it contains values of another kind")
        begin = _HEADER.size + (2 if small else 9) * count
        sizes = np.frombuffer(
            data[_HEADER.size + count : begin], np.uint8 if small else np.int64
        ).tolist()
        if len(sizes) != count or any(n < 0 for n in sizes) or begin + sum(sizes) != len(data):
            raise ValueError("its sizes are wrong")
        ends = [*accumulate(sizes, initial=begin)]
        self._columns = zip(
            bytes(data[_HEADER.size :][:count]).decode("ascii"), pairwise(ends), strict=True
        )
        self._data = data

    def take(self, codes: str) -> NDArray[Any]:
        """Read the next column."""
        code, (begin, end) = next(self._columns, ("", (0, 0)))
        if not code or code not in codes:
            raise ValueError(f"a column has type {code!r}, expected one of {codes!r}")
        return np.frombuffer(self._data[begin:end], code)

    def integers(self, count: int, low: int = -(1 << 63), high: int = 1 << 63) -> list[int]:
        """Read a column of integers."""
        numbers = self.take("bhiq")
        if len(numbers) != count or (
            count and not (low <= int(numbers.min()) and int(numbers.max()) < high)
        ):
            raise ValueError("a column does not have the expected integers")
        return numbers.tolist()  # type: ignore[no-any-return]

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

    `types` are the Python types of the values, by which a `Union` chooses. `text` describes the
    encoding, on which the sender and the receiver must agree.
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
            raise UsageError(
                f"expected None, got a {type(next(v for v in values if v is not None)).__name__}"
            )
        out.blank(len(values))

    def read(self, count: int, source: ColumnReader) -> list[Any]:
        source.blank(count)
        return [None] * count


class Int(Codec):
    """Integers of 64 bits, in the narrowest type that holds them all."""

    def __init__(self, kind: type = int) -> None:
        self.types, self.text = (kind,), kind.__name__

    def write(self, values: Sequence[Any], out: ColumnWriter) -> None:
        try:
            out.integers(values)
        except (TypeError, OverflowError) as error:
            raise UsageError(f"expected an integer of 64 bits: {error}") from None

    def read(self, count: int, source: ColumnReader) -> list[Any]:
        numbers = source.integers(count)
        return numbers if self.types == (int,) else list(map(self.types[0], numbers))


class Float(Codec):
    """Floating-point numbers of 64 bits."""

    types, text = (float,), "float"

    def write(self, values: Sequence[Any], out: ColumnWriter) -> None:
        try:
            out.put("d", array("d", values))
        except (TypeError, OverflowError) as error:
            raise UsageError(f"expected a number: {error}") from None

    def read(self, count: int, source: ColumnReader) -> list[Any]:
        numbers = source.take("d")
        if len(numbers) != count:
            raise ValueError("a column does not have the expected length")
        return numbers.tolist()  # type: ignore[no-any-return]


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
        distinct = [whole[a:b] for a, b in pairwise(ends)]
        return [distinct[i] for i in codes.tolist()]


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
        self,
        kinds: tuple[type, ...],
        inner: Codec,
        to: Callable[[Any], Any],
        back: Callable[[Any], Any],
        text: str,
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
        length = sizes[0] if sizes else 0
        if self.make is tuple and length and sizes.count(length) == count:
            return list(zip(*[iter(flat)] * length, strict=True))
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
        self.inner.write([v for mapping in values for v in mapping.values()], out)

    def read(self, count: int, source: ColumnReader) -> list[Any]:
        sizes = source.lengths(count)
        keys, values = self.keys.read(sum(sizes), source), self.inner.read(sum(sizes), source)
        return [
            dict(zip(keys[a:b], values[a:b], strict=True))
            for a, b in pairwise(accumulate(sizes, initial=0))
        ]


EVERYBODY = -1  # the receiver of an answer for all ranks that get no other

# rank, whether it failed, bytes of the name of the call, and of the data
_RECORD = struct.Struct("<iBHq")
_MAX_DEPTH = 100  # levels of nesting in which a value without a JSON form is located
_NUMERIC_DTYPE = re.compile(r"[<>|][biufc][0-9]{1,2}", re.ASCII)
_SEE_LOG = "see the traceback in the log of that rank"
_TEXT = Str()
_ERRORS = {
    name: getattr(errors, name)
    for name in errors.__all__
    if isinstance(getattr(errors, name), type)
}


_T = TypeVar("_T")


@dataclass_transform(frozen_default=True)
def message(cls: type[_T]) -> type[_T]:
    """Make a class a frozen dataclass that ranks can send each other; its annotations define the encoding."""
    return dataclass(frozen=True, slots=True)(cls)


def encode(value: Any, kind: Any) -> bytes:
    """Encode a value."""
    codec, digest = _codec_of(kind)
    out = ColumnWriter()
    codec.write([value], out)
    return out.to_bytes(digest)


def decode(data: Bytes, kind: Any) -> Any:
    """Decode a value; no code is run, whatever the bytes are."""
    codec, digest = _codec_of(kind)
    try:
        source = ColumnReader(memoryview(data).cast("B"), digest)
        (value,) = codec.read(1, source)
        source.end()
    except (
        ValueError,
        TypeError,
        OverflowError,
        RecursionError,
        LookupError,
        struct.error,
    ) as error:
        raise _undecodable(error) from error
    return value


class Addressed(NamedTuple):
    """An answer to all ranks, and others to some of them, by rank."""

    common: Any
    others: Mapping[int, Any]


class Record(NamedTuple):
    """What a rank contributes to a collective, or the answer for a rank: a value or an error, encoded."""

    rank: int
    failed: bool
    call: str
    data: Bytes


def pack(records: Sequence[Record]) -> list[memoryview]:
    """Encode records; the encoded forms of several lists, one after another, are that of all their records."""
    parts = []
    for rank, failed, call, data in records:
        name = call.encode()
        parts += [
            memoryview(_RECORD.pack(rank, failed, len(name), len(data)) + name),
            memoryview(data).cast("B"),
        ]
    return parts


def unpack(*packed: Bytes) -> list[Record]:
    """Decode records; their data is not copied."""
    return [record for data in packed for record in _unpack(memoryview(data).cast("B"))]


def _unpack(view: memoryview) -> list[Record]:
    records: list[Record] = []
    at = 0
    try:
        while at < len(view) or not records:
            rank, failed, name_size, size = _RECORD.unpack_from(view, at)
            at += _RECORD.size + name_size + size
            if size < 0 or at > len(view):
                raise ValueError("it is cut off")  # noqa: TRY301 - one message for all
            call = bytes(view[at - size - name_size : at - size]).decode()
            records.append(Record(rank, _boolean(failed), call, view[at - size : at]))
    except (ValueError, struct.error) as error:
        raise _undecodable(error) from error
    return records


def failures(records: Sequence[Record], call: str) -> list[Record]:
    """If a rank has failed or is in another call, return what rank 0 has to know: the first record of each kind."""
    if not any(r.failed or r.call != call for r in records):
        return []
    first: dict[tuple[str, bool], Record] = {}
    for record in sorted(records, key=lambda r: r.rank):
        first.setdefault(
            (record.call, record.failed), record if record.failed else record._replace(data=b"")
        )
    return list(first.values())


def _undecodable(error: Exception) -> IntegrityError:
    return IntegrityError(
        f"a message from another rank cannot be decoded ({type(error).__name__}: {error})",
        hint="check that all ranks make the same call with the same arguments, and run the same "
        "version of ucformat",
    )


def name_rank(rank: int, error: BaseException, size: int) -> BaseException:
    """Prefix an error's message with the rank on which it occurred; a group of one rank keeps the error as it is."""
    if size == 1:
        return error
    if isinstance(error, UcformatError):
        return type(error)(f"rank {rank}: {error.message}", hint=error.hint)
    return UcformatError(f"rank {rank}: {type(error).__name__}: {error}", hint=_SEE_LOG)


def _literal(allowed: tuple[Any, ...]) -> Codec:
    """One of several strings."""

    def check(word: str) -> str:
        if word not in allowed:
            raise ValueError(f"{word!r} is not one of {allowed}")
        return word

    return Converted((str,), _TEXT, lambda v: v, check, f"one of {allowed}")


def _boolean(value: int) -> bool:
    if value not in (0, 1):
        raise ValueError(f"{value} is not a boolean")
    return bool(value)


def _from_array(value: NDArray[Any]) -> tuple[str, tuple[int, ...], bytes]:
    if not _NUMERIC_DTYPE.fullmatch(value.dtype.str):
        raise UsageError(f"an array of {value.dtype} cannot be sent to other ranks")
    return value.dtype.str, value.shape, value.tobytes()


def _to_array(encoded: tuple[str, tuple[int, ...], bytes]) -> NDArray[Any]:
    dtype, shape, data = encoded
    if not _NUMERIC_DTYPE.fullmatch(dtype):
        raise ValueError(f"the dtype {dtype!r} is not numeric")
    return np.frombuffer(data, dtype).reshape(shape)


def _from_error(error: BaseException) -> tuple[str, str, str | None]:
    """The name of the nearest class of `ucformat.errors` ("" if there is none), the message and the hint."""
    name = next((k.__name__ for k in type(error).__mro__ if _ERRORS.get(k.__name__) is k), "")
    if isinstance(error, UcformatError):
        return name, error.message, error.hint
    return "", f"{type(error).__name__}: {error}", _SEE_LOG


def _to_error(encoded: tuple[str, str, str | None]) -> UcformatError:
    name, text, hint = encoded
    return _ERRORS.get(name, UcformatError)(text, hint=hint)  # type: ignore[no-any-return]


def _to_json(value: Any) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        where, odd = _without_json(value)
        raise UsageError(
            f"{where or 'a value'} cannot be sent to other ranks: it is a {type(odd).__name__}, "
            "which has no JSON form "
            f"({error})",
            hint=(
                "use plain values: strings, numbers, booleans, lists, and mappings with string keys"
            ),
        ) from None


def _without_json(value: Any, path: str = "", depth: int = 0) -> tuple[str, Any]:
    """The dotted path of the part of a value that has no JSON form, and this part."""
    inner: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        inner = value.items()
    elif isinstance(value, list | tuple):
        inner = enumerate(value)
    for key, element in inner:
        try:
            json.dumps({key: element})
        except (TypeError, ValueError, RecursionError):
            if depth < _MAX_DEPTH:
                return _without_json(element, f"{path}.{key}" if path else str(key), depth + 1)
    return path, value


class Struct(Codec):
    """Values with fields of different kinds: dataclasses, named tuples, and tuples of fixed length."""

    def __init__(self, make: Callable[..., Any], kind: type, parts: Mapping[str, Codec]) -> None:
        self.types, self.make = (kind,), make
        self.parts = parts
        self.text = f"{kind.__name__}({', '.join(f'{k}: {c.text}' for k, c in parts.items())})"

    def write(self, values: Sequence[Any], out: ColumnWriter) -> None:
        kind = self.types[0]
        if not all(type(v) is kind for v in values):
            odd = next(v for v in values if type(v) is not kind)
            raise UsageError(f"expected a {kind.__name__}, got a {type(odd).__name__}")
        if kind is tuple:
            columns: Iterable[Sequence[Any]] = (
                zip(*values, strict=True) if values else [[]] * len(self.parts)
            )
            for part, column in zip(self.parts.values(), columns, strict=True):
                part.write(column, out)
            return
        if not self.parts:
            out.blank(len(values))
        for name, part in self.parts.items():
            try:
                part.write(list(map(attrgetter(name), values)), out)
            except UsageError as error:
                raise type(error)(
                    f"{kind.__name__}.{name}: {error.message}", hint=error.hint
                ) from None

    def read(self, count: int, source: ColumnReader) -> list[Any]:
        columns = [part.read(count, source) for part in self.parts.values()]
        if not columns:
            source.blank(count)
            return [self.make() for _ in range(count)]
        return list(map(self.make, *columns))


class Union(Codec):
    """Values of several kinds, distinguished by their types."""

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
        raise UsageError(f"expected {self.text}, got a {type(value).__name__}")

    def read(self, count: int, source: ColumnReader) -> list[Any]:
        chosen = source.integers(count, 0, len(self.parts))
        by_part = [iter(part.read(chosen.count(i), source)) for i, part in enumerate(self.parts)]
        return [next(by_part[i]) for i in chosen]


@cache
def _codec_of(kind: Any) -> tuple[Codec, bytes]:
    codec = _codec(kind)
    return codec, hashlib.sha256(codec.text.encode()).digest()[:8]


_PLAIN: dict[Any, Callable[[], Codec]] = {
    None: Null,
    types.NoneType: Null,
    int: Int,
    bool: lambda: Converted((bool,), Int(), lambda v: v, _boolean, "bool"),
    float: Float,
    str: Str,
    bytes: RawBytes,
    datetime: lambda: Converted(
        (datetime,), _TEXT, datetime.isoformat, datetime.fromisoformat, "datetime"
    ),
    Any: lambda: Converted((), _TEXT, _to_json, json.loads, "JSON"),
}


def _codec(kind: Any) -> Codec:
    """The codec for an annotation."""
    if kind in _PLAIN:
        return _PLAIN[kind]()
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return _literal(arguments)
    if origin in (types.UnionType, typing.Union):
        return Union([_codec(k) for k in arguments])
    if origin in (list, frozenset) or (origin is tuple and arguments[-1] is ...):
        return Repeated(origin, _codec(arguments[0]))
    if origin is tuple:
        return Struct(lambda *row: row, tuple, {str(i): _codec(k) for i, k in enumerate(arguments)})
    if origin is Mapping:
        return Map(_codec(arguments[0]), _codec(arguments[1]))
    if origin is np.ndarray:
        return Converted(
            (np.ndarray,),
            _codec(tuple[str, tuple[int, ...], bytes]),
            _from_array,
            _to_array,
            "array",
        )
    return _codec_of_class(kind)


def _codec_of_class(kind: type) -> Codec:
    if is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return Struct(kind, kind, {f.name: _codec(hints[f.name]) for f in fields(kind)})
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        hints = typing.get_type_hints(kind)
        return Struct(kind, kind, {name: _codec(hints[name]) for name in kind._fields})
    if issubclass(kind, int):
        return Int(kind)
    if issubclass(kind, BaseModel):
        return Converted(
            (kind,), _TEXT, lambda v: v.model_dump_json(), kind.model_validate_json, kind.__name__
        )
    if issubclass(kind, BaseException):
        return Converted(
            (kind,), _codec(tuple[str, str, str | None]), _from_error, _to_error, "error"
        )
    raise TypeError(f"{kind} cannot be sent between ranks")
