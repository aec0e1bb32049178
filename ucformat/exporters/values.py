"""Non-tensor values of a checkpoint, as values that are written to a pickle."""

from __future__ import annotations

import base64
import math
from typing import TYPE_CHECKING, Any

from ucformat.errors import IntegrityError, UnsupportedError
from ucformat.exporters.base import Span
from ucformat.exporters.pickle import ALLOWED, Call, Global, SavedTensor, Storage
from ucformat.reading.readable import path_from_json
from ucformat.reading.values import from_json, is_special, plain_form
from ucformat.schema import ITEMSIZE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ucformat.geometry.tensor import TensorInfo

_SET, _COMPLEX, _SLICE = (
    Global("__builtin__", "set"),
    Global("__builtin__", "complex"),
    Global("__builtin__", "slice"),
)
_STREAM, _PATH = Global("_io", "BytesIO"), Global("pathlib", "PosixPath")
ALLOWED |= {_SET, _COMPLEX, _SLICE, _STREAM, _PATH}


def constant(dtype: str, shape: tuple[int, ...], data: bytes) -> SavedTensor:
    """A tensor whose elements are known."""
    if dtype not in ITEMSIZE or len(data) != math.prod(shape) * ITEMSIZE[dtype]:
        raise IntegrityError(
            f"a value of the checkpoint is a {dtype} tensor of shape {list(shape)} in "
            f"{len(data):,} bytes"
        )
    return SavedTensor(Storage(Span(dtype, len(data) // ITEMSIZE[dtype], ()), data), shape)


def whole(info: TensorInfo) -> SavedTensor:
    """A tensor of the checkpoint."""
    return SavedTensor(Storage(Span.whole(info)), info.shape)


def key_of(text: str) -> str | int:
    """The key of a dictionary, from its JSON form."""
    (key,) = path_from_json([text])
    return key if isinstance(key, str) else int(key)


def value_of(
    data: Any, tensor: Callable[[str], TensorInfo], classes: Mapping[str, Global] = {}
) -> Any:
    """The value that a JSON form encodes."""

    def decode(inner: Any) -> Any:
        return value_of(inner, tensor, classes)

    data = plain_form(data)
    if isinstance(data, list):
        return [decode(v) for v in data]
    if not isinstance(data, dict):
        return data
    if not is_special(data):
        return {key_of(k): decode(v) for k, v in data.items()}
    (kind, inner), *_ = data.items()
    if kind in _PLAIN:
        return _PLAIN[kind](inner)
    if kind in _CONTAINERS:
        return _CONTAINERS[kind](inner, decode)
    if kind == "$ref":
        return whole(tensor(inner))
    if kind == "$dtype" and inner in ITEMSIZE:
        return Global("torch", inner)
    name = str(data.get("$class", ""))
    if name in classes and set(data) <= {"$class", "$args"}:
        return Call(classes[name], tuple(map(decode, data.get("$args", ()))))
    description = f"an instance of {name}" if name else f"a value of the form {kind}"
    raise UnsupportedError(f"{description} is not written to a pickle")


def _tensor(inner: dict[str, Any]) -> SavedTensor:
    return constant(inner["dtype"], tuple(inner["shape"]), base64.b64decode(inner["data"]))


_PLAIN: dict[str, Callable[[Any], Any]] = {
    "$tensor": _tensor,
    "$float": float,
    "$bytes": base64.b64decode,
    "$complex": lambda parts: Call(_COMPLEX, tuple(map(from_json, parts))),
    "$stream": lambda text: Call(_STREAM, (base64.b64decode(text),)),
    "$path": lambda text: Call(_PATH, (text,)),
}
#: The forms that contain others, which the second argument decodes.
_CONTAINERS: dict[str, Callable[[Any, Callable[[Any], Any]], Any]] = {
    "$tuple": lambda items, decode: tuple(map(decode, items)),
    "$set": lambda items, decode: Call(_SET, ([decode(v) for v in items],)),
    "$slice": lambda parts, decode: Call(_SLICE, tuple(map(decode, parts))),
    "$dict": lambda pairs, decode: {_hashable(decode(k)): decode(v) for k, v in pairs},
}


def _hashable(key: Any) -> Any:
    return tuple(map(_hashable, key)) if isinstance(key, list) else key
