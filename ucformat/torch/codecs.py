"""How values of one kind are columns: all values of one place in a message at once."""

from __future__ import annotations

import types
from abc import ABC, abstractmethod
from array import array
from collections.abc import Mapping
from itertools import accumulate, chain, pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from ucformat.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ucformat.torch.columns import Columns, Source

__all__ = ["As", "Codec", "Float", "Int", "Many", "Map", "Nothing", "Raw", "Record", "Str", "Union"]


class Codec(ABC):
    """How values of one kind are columns; `types` are those of the values, by which unions choose."""

    types: tuple[type, ...] = ()
    text: str  # what both sides must agree on

    @abstractmethod
    def write(self, values: Sequence[Any], out: Columns) -> None:
        """Put values into the next columns; UsageError where one is not of the kind."""

    @abstractmethod
    def read(self, count: int, source: Source) -> list[Any]:
        """So many values of the next columns; ValueError where these are not what `write` makes."""


class Nothing(Codec):
    """`None`."""

    types, text = (types.NoneType,), "None"

    def write(self, values: Sequence[Any], out: Columns) -> None:
        if any(v is not None for v in values):
            raise UsageError(f"a {type(values[0]).__name__} was to be told where nothing is expected")
        out.blank(len(values))

    def read(self, count: int, source: Source) -> list[Any]:
        source.blank(count)
        return [None] * count


class Int(Codec):
    """Integers of 64 bits, in as few bytes as hold them all."""

    def __init__(self, of: type = int) -> None:
        self.types, self.text = (of,), of.__name__

    def write(self, values: Sequence[Any], out: Columns) -> None:
        try:
            out.integers(values)
        except (TypeError, OverflowError) as error:
            raise UsageError(f"what should be an integer of 64 bits is not: {error}") from None

    def read(self, count: int, source: Source) -> list[Any]:
        found = source.integers(count)
        return found if self.types == (int,) else list(map(self.types[0], found))


class Float(Codec):
    """Numbers of 64 bits."""

    types, text = (float,), "float"

    def write(self, values: Sequence[Any], out: Columns) -> None:
        try:
            out.put("d", array("d", values))
        except (TypeError, OverflowError) as error:
            raise UsageError(f"what should be a number is not: {error}") from None

    def read(self, count: int, source: Source) -> list[Any]:
        found = source.take("d")
        if len(found) != count:
            raise ValueError("a column has other numbers than it should")
        return found.tolist()  # type: ignore[no-any-return]


class Str(Codec):
    """Each text once, and which of them are meant."""

    types, text = (str,), "str"

    def write(self, values: Sequence[Any], out: Columns) -> None:
        index: dict[str, int] = {}
        out.integers([index.setdefault(v, len(index)) for v in values])
        try:
            joined = "".join(index)
        except TypeError:
            odd = next(v for v in index if not isinstance(v, str))
            raise UsageError(f"what should be text is {odd!r}, a {type(odd).__name__}") from None
        out.integers(list(map(len, index)))
        out.put("B", joined.encode("utf-8", "surrogatepass"))

    def read(self, count: int, source: Source) -> list[Any]:
        codes, sizes = source.take("bhiq"), source.take("bhiq")
        whole = source.take("B").tobytes().decode("utf-8", "surrogatepass")
        ends = [*accumulate(sizes.tolist(), initial=0)]
        if len(codes) != count or ends[-1] != len(whole) or (len(sizes) and int(sizes.min()) < 0):
            raise ValueError("a column has other text than it should")
        if count and not (int(codes.min()) >= 0 and int(codes.max()) < len(sizes)):
            raise ValueError("a column names text that is not there")
        known = [whole[a:b] for a, b in pairwise(ends)]
        return [known[i] for i in codes.tolist()]


class Raw(Codec):
    """Bytes."""

    types, text = (bytes, bytearray), "bytes"

    def write(self, values: Sequence[Any], out: Columns) -> None:
        out.integers(list(map(len, values)))
        out.put("B", values[0] if len(values) == 1 else b"".join(values))

    def read(self, count: int, source: Source) -> list[Any]:
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

    def write(self, values: Sequence[Any], out: Columns) -> None:
        self.inner.write(list(map(self.to, values)), out)

    def read(self, count: int, source: Source) -> list[Any]:
        return list(map(self.back, self.inner.read(count, source)))


class Many(Codec):
    """`tuple[T, ...]`, `list[T]`, `frozenset[T]`."""

    def __init__(self, make: Any, inner: Codec) -> None:
        self.types, self.text = (make,), f"{make.__name__} of {inner.text}"
        self.make, self.inner = make, inner

    def write(self, values: Sequence[Any], out: Columns) -> None:
        out.integers(list(map(len, values)))
        self.inner.write(list(chain.from_iterable(values)), out)

    def read(self, count: int, source: Source) -> list[Any]:
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

    def write(self, values: Sequence[Any], out: Columns) -> None:
        out.integers(list(map(len, values)))
        self.keys.write(list(chain.from_iterable(values)), out)
        self.inner.write([v for one in values for v in one.values()], out)

    def read(self, count: int, source: Source) -> list[Any]:
        sizes = source.lengths(count)
        keys, values = self.keys.read(sum(sizes), source), self.inner.read(sum(sizes), source)
        return [dict(zip(keys[a:b], values[a:b], strict=True)) for a, b in pairwise(accumulate(sizes, initial=0))]


class Record(Codec):
    """Values of some fields: dataclasses, named tuples, and tuples of which each place has a kind of its own."""

    def __init__(self, make: Callable[..., Any], kind: type, parts: Mapping[str, Codec]) -> None:
        self.types, self.make = (kind,), make
        self.parts = parts
        self.text = f"{kind.__name__}({', '.join(f'{k}: {c.text}' for k, c in parts.items())})"

    def write(self, values: Sequence[Any], out: Columns) -> None:
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

    def read(self, count: int, source: Source) -> list[Any]:
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

    def write(self, values: Sequence[Any], out: Columns) -> None:
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
        raise UsageError(f"a {type(value).__name__} was to be told where {self.text} is expected")

    def read(self, count: int, source: Source) -> list[Any]:
        chosen = source.integers(count, 0, len(self.parts))
        found = [iter(part.read(chosen.count(i), source)) for i, part in enumerate(self.parts)]
        return [next(found[i]) for i in chosen]
