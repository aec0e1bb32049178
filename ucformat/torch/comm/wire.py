"""Messages among ranks: columns of plain data, decoded as what the receiver expects and nothing else.

A message holds numbers, text and raw bytes; it names no class and no function. Both sides know what is told: a kind, as
Python's annotations have it (`tuple[Claim, ...] | None`, where `Claim` is a `message`). All values of one place in it
are one column, so a hundred thousand boxes are a few arrays of integers: faster than pickle, and smaller.

| kind | encoded as |
|---|---|
| `int`, `float`, `bool`, `str`, `bytes`, `datetime`, `Literal` of text | themselves; equal text once |
| `NDArray` of numbers | dtype, shape and bytes |
| `tuple`, `list`, `frozenset`, `Mapping`, unions | lengths or choices, and what is inside |
| dataclasses, named tuples | their fields; made again by their constructors, which check |
| models of pydantic | their JSON |
| exceptions | the name of an error of ours, the message, the hint; any other becomes a `UcformatError` of its words |
| `Any` | JSON: what of a state is no tensor has that form already |
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, TypeVar, dataclass_transform

import numpy as np
from pydantic import BaseModel

from ucformat import errors
from ucformat.errors import IntegrityError, UcformatError, UsageError
from ucformat.torch.comm.codecs import (
    As,
    Codec,
    ColumnReader,
    ColumnWriter,
    Fields,
    Float,
    Int,
    Many,
    Map,
    Nothing,
    RawBytes,
    Str,
    Union,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray

    from ucformat.storage.base import Bytes

__all__ = ["decode", "encode", "message"]

_DEEP = 100  # levels to which what has no JSON form is looked for
_NUMBERS = re.compile(r"[<>|][biufc][0-9]{1,2}", re.ASCII)  # dtypes
_TEXT = Str()
_ERRORS = {name: getattr(errors, name) for name in errors.__all__ if isinstance(getattr(errors, name), type)}


_T = TypeVar("_T")


@dataclass_transform(frozen_default=True)
def message(cls: type[_T]) -> type[_T]:
    """A frozen dataclass that ranks can send each other; its annotations define the encoding."""
    return dataclass(frozen=True, slots=True)(cls)


def encode(value: Any, kind: Any) -> bytes:
    """Encode a value.

    Raises:
        UsageError: part of it is not of the kind, or has no JSON form where that is needed; the message names it.
    """
    codec, digest = _codec_of(kind)
    out = ColumnWriter()
    codec.write([value], out)
    return out.joined(digest)


def decode(data: Bytes, kind: Any) -> Any:
    """Decode a value of a kind; whatever the bytes are, no code is run.

    Raises:
        IntegrityError: they tell something else.
    """
    codec, digest = _codec_of(kind)
    try:
        source = ColumnReader(memoryview(data).cast("B"), digest)
        (value,) = codec.read(1, source)
        source.end()
    except (ValueError, TypeError, OverflowError, RecursionError, LookupError, struct.error) as error:
        raise IntegrityError(
            f"a message of another rank cannot be read ({type(error).__name__}: {error})",
            hint="do all ranks run the same version of ucformat?",
        ) from error
    return value


def _literal(known: tuple[Any, ...]) -> Codec:
    """One of some words."""

    def check(word: str) -> str:
        if word not in known:
            raise ValueError(f"{word!r} is none of {known}")
        return word

    return As((str,), _TEXT, lambda v: v, check, f"one of {known}")


def _truth(value: int) -> bool:
    if value not in (0, 1):
        raise ValueError(f"{value} is no truth value")
    return bool(value)


def _of_array(value: NDArray[Any]) -> tuple[str, tuple[int, ...], bytes]:
    if not _NUMBERS.fullmatch(value.dtype.str):
        raise UsageError(f"an array of {value.dtype} cannot be sent to other ranks")
    return value.dtype.str, value.shape, value.tobytes()


def _array(told: tuple[str, tuple[int, ...], bytes]) -> NDArray[Any]:
    dtype, shape, data = told
    if not _NUMBERS.fullmatch(dtype):
        raise ValueError(f"there are no arrays of {dtype!r} here")
    return np.frombuffer(data, dtype).reshape(shape)


def _of_error(error: BaseException) -> tuple[str, str, str | None]:
    """The nearest error of ours, the message and the hint; of any other one its words."""
    name = next((k.__name__ for k in type(error).__mro__ if _ERRORS.get(k.__name__) is k), "")
    if isinstance(error, UcformatError):
        return name, error.message, error.hint
    return "", f"{type(error).__name__}: {error}", "its log has the traceback"


def _error(told: tuple[str, str, str | None]) -> UcformatError:
    name, text, hint = told
    return _ERRORS.get(name, UcformatError)(text, hint=hint)  # type: ignore[no-any-return]


def _to_json(value: Any) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        where, odd = _without_json(value)
        raise UsageError(
            f"{where or 'a value'} cannot be sent to other ranks: it is a {type(odd).__name__}, which has no JSON form "
            f"({error})",
            hint="give plain values: text, numbers, true or false, lists, and mappings of these by text",
        ) from None


def _without_json(value: Any, path: str = "", depth: int = 0) -> tuple[str, Any]:
    """Where a value has no JSON form, and what lies there."""
    inner: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        inner = value.items()
    elif isinstance(value, list | tuple):
        inner = enumerate(value)
    for key, one in inner:
        try:
            json.dumps({key: one})
        except (TypeError, ValueError, RecursionError):
            if depth < _DEEP:
                return _without_json(one, f"{path}.{key}" if path else str(key), depth + 1)
    return path, value


@cache
def _codec_of(kind: Any) -> tuple[Codec, bytes]:
    codec = _made(kind)
    return codec, hashlib.sha256(codec.text.encode()).digest()[:8]


_PLAIN: dict[Any, Callable[[], Codec]] = {
    None: Nothing,
    types.NoneType: Nothing,
    int: Int,
    bool: lambda: As((bool,), Int(), lambda v: v, _truth, "bool"),
    float: Float,
    str: Str,
    bytes: RawBytes,
    datetime: lambda: As((datetime,), _TEXT, datetime.isoformat, datetime.fromisoformat, "datetime"),
    Any: lambda: As((), _TEXT, _to_json, json.loads, "JSON"),
}


def _made(kind: Any) -> Codec:
    """The codec of an annotation."""
    if kind in _PLAIN:
        return _PLAIN[kind]()
    origin, given = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return _literal(given)
    if origin in (types.UnionType, typing.Union):
        return Union([_made(k) for k in given])
    if origin in (list, frozenset) or (origin is tuple and given[-1] is ...):
        return Many(origin, _made(given[0]))
    if origin is tuple:
        return Fields(lambda *row: row, tuple, {str(i): _made(k) for i, k in enumerate(given)})
    if origin is Mapping:
        return Map(_made(given[0]), _made(given[1]))
    if origin is np.ndarray:
        return As((np.ndarray,), _made(tuple[str, tuple[int, ...], bytes]), _of_array, _array, "array")
    return _made_of_class(kind)


def _made_of_class(kind: type) -> Codec:
    if is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return Fields(kind, kind, {f.name: _made(hints[f.name]) for f in fields(kind)})
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        hints = typing.get_type_hints(kind)
        return Fields(kind, kind, {name: _made(hints[name]) for name in kind._fields})
    if issubclass(kind, int):
        return Int(kind)
    if issubclass(kind, BaseModel):
        return As((kind,), _TEXT, lambda v: v.model_dump_json(), kind.model_validate_json, kind.__name__)
    if issubclass(kind, BaseException):
        return As((kind,), _made(tuple[str, str, str | None]), _of_error, _error, "error")
    raise TypeError(f"{kind} cannot be sent between ranks")
