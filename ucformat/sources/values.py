"""Non-tensor values of a checkpoint as JSON, and back.

None, booleans, finite numbers and text are themselves, lists and tuples are arrays, and a dictionary whose keys are
text is an object. Any other value is an object with a key that begins with `$`:

| form | value |
|---|---|
| `{"$float": "nan"}`, `"inf"`, `"-inf"` | a float that is not finite |
| `{"$bytes": "…"}` | bytes, base64 |
| `{"$stream": "…"}` | a file in memory (`io.BytesIO`): its bytes, base64; restored with the position at 0 |
| `{"$complex": [re, im]}` | a complex number, each part as a float |
| `{"$set": […]}` | a set or frozen set, sorted by their JSON |
| `{"$slice": [start, stop, step]}` | a slice |
| `{"$datetime": "…"}`, `{"$path": "…"}` | a date or time in ISO 8601 (a time span in seconds), a path |
| `{"$dtype": "bfloat16"}` | a data type |
| `{"$tensor": {"dtype", "shape", "data"}}` | a small tensor: little-endian row-major bytes, base64 |
| `{"$ref": "client_state.ema.weight"}` | a larger tensor: that tensor of the checkpoint, in the state `weight` |
| `{"$class": "deepspeed….LossScaler", "$args", "$state", "$items"}` | an object; empty parts are left out |
| `{"$opaque": "…"}` | a pickle, base64, that only `ucformat.torch.load(…, trust=True)` opens |
| `{"$dict": [[key, value], …]}` | a dictionary with keys other than text and integers |

Keys: an integer `3` becomes `"$int:3"`; text that begins with `$` gets another `$` in front. Tuples are arrays like
lists, except in the values that PyTorch programs save, where they are `{"$tuple": […]}`.
"""

from __future__ import annotations

import base64
import datetime as dt
import io
import json
import math
import reprlib
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from ucformat.errors import IntegrityError, UnsupportedError, UpgradeNeeded
from ucformat.reading.readable import json_key
from ucformat.schema import ITEMSIZE
from ucformat.sources.pickle.stand_ins import Dtype, Inert, InertClass, Maker, NdArray, Opaque, StoredTensor, Stream

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["SMALL", "all_equal", "from_json", "json_key", "to_json", "unkey"]

SMALL = 64 << 10  # bytes of a tensor up to which it is stored inside the JSON
_MAX_DEPTH = 200
_MAX_NODES = 5_000_000
_MAX_SHARED = 100_000  # items of repeated containers: a few lists that share others expand to any number of items
_MAX_BYTES = 1 << 30  # of all bytes and tensors together
_MAX_PATH = 4096  # characters of a path
_MAX_BITS = 1 << 13  # bits of an integer: Python's JSON parser stops at 4300 digits


def to_json(
    value: Any,
    *,
    read: Callable[[StoredTensor], bytes] | None = None,
    spill: Callable[[str, StoredTensor], str] | None = None,
    path: str = "",
    small: int = SMALL,
    tuples: bool = False,
) -> Any:
    """Convert an unpickled value to its JSON form.

    Args:
        value: the value, with stand-ins for tensors and objects.
        read: gives the row-major bytes of a tensor; None: tensors are errors.
        spill: called with the path and each tensor of more than `small` bytes; adds it to the checkpoint's tensors and
            returns its name. None: such tensors are errors.
        path: the path of the value, joined by dots, for `spill` and messages.
        small: bytes of a tensor up to which it is stored inside the JSON.
        tuples: distinguish tuples from lists.

    Raises:
        UnsupportedError: a value has no JSON form, is nested deeper than 200 levels (or contains itself), has more
            than 5 million parts or a gigabyte of bytes, or contains a tensor without a `read` or `spill` for it.
    """
    return _Encoder(read, spill, small, tuples).encode(value, path, 0)


class _Encoder:
    def __init__(
        self,
        read: Callable[[StoredTensor], bytes] | None,
        spill: Callable[[str, StoredTensor], str] | None,
        small: int,
        tuples: bool,  # noqa: FBT001
    ) -> None:
        self.read, self.spill, self.small, self.tuples = read, spill, small, tuples
        self.nodes = self.shared = self.nbytes = 0
        self.seen: set[int] = set()  # by `id`: the value keeps its parts alive

    def encode(self, value: Any, path: str, depth: int) -> Any:
        self.nodes += 1
        if depth > _MAX_DEPTH or self.nodes > _MAX_NODES:
            raise _too_large(path)
        if isinstance(value, int) and value.bit_length() > _MAX_BITS:
            raise _too_large(path)
        if value is None or isinstance(value, str | bool | int):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"$float": str(value)}
        if isinstance(value, dict):
            self.count(value, path)
            return self.dictionary(value, path, depth + 1)
        if isinstance(value, list | tuple):
            self.count(value, path)
            items = [self.encode(v, _join(path, i), depth + 1) for i, v in enumerate(value)]
            return {"$tuple": items} if self.tuples and isinstance(value, tuple) else items
        return self.special(value, path, depth + 1)

    def count(self, value: Any, path: str) -> None:
        """UnsupportedError if containers, or bytes, are shared so often that writing each occurrence would not end."""
        if id(value) not in self.seen:
            self.seen.add(id(value))
            return
        self.shared += 1 + len(value) // (1024 if isinstance(value, bytes | bytearray) else 1)
        if self.shared > _MAX_SHARED:
            raise _too_large(path)

    def weigh(self, nbytes: int, path: str) -> None:
        """UnsupportedError if the values have too many bytes."""
        self.nbytes += nbytes
        if self.nbytes > _MAX_BYTES:
            raise _too_large(path)

    def dictionary(self, value: dict[Any, Any], path: str, depth: int) -> Any:
        if all(type(k) in (str, int) for k in value):
            return {json_key(k): self.encode(v, _join(path, k), depth) for k, v in value.items()}
        pairs = enumerate(value.items())
        return {"$dict": [[self.encode(k, path, depth), self.encode(v, _join(path, i), depth)] for i, (k, v) in pairs]}

    def special(self, value: Any, path: str, depth: int) -> Any:
        if isinstance(value, StoredTensor):
            return self.tensor(value, path)
        if isinstance(value, Inert):
            self.count(value.items, path)
            out: dict[str, Any] = {"$class": value.name}
            for name, part in (("$args", value.args), ("$state", value.state), ("$items", value.items)):
                if part is not None and not (isinstance(part, tuple | list) and not part):
                    out[name] = self.encode(part, path, depth)
            return out
        if isinstance(value, set | frozenset):
            self.count(value, path)
            return {"$set": sorted((self.encode(v, path, depth) for v in value), key=json.dumps)}
        if isinstance(value, slice):
            return {"$slice": self.encode([value.start, value.stop, value.step], path, depth)}
        if isinstance(value, NdArray | Stream):
            self.count(value.data, path)
            self.weigh(len(value.data), path)
            return _array(value) if isinstance(value, NdArray) else {"$stream": base64.b64encode(value.data).decode()}
        if isinstance(value, bytes | bytearray):
            self.count(value, path)
            self.weigh(len(value), path)
        return _plain(value, path)

    def tensor(self, value: StoredTensor, path: str) -> Any:
        if value.nbytes > self.small and self.spill:
            return {"$ref": self.spill(path, value)}
        if value.nbytes > self.small or self.read is None:
            raise UnsupportedError(f"{path} is a tensor where a plain value is expected")
        self.weigh(value.nbytes, path)
        return _tensor(value.dtype, value.shape, self.read(value))


def _too_large(path: str) -> UnsupportedError:
    label = reprlib.repr(path) if path else "a value"
    return UnsupportedError(
        f"{label} of the checkpoint is nested too deeply or too large to be an object",
        hint="save large or self-referring values outside the client state",
    )


def _plain(value: Any, path: str) -> Any:
    """Encode the special values that contain no others."""
    if isinstance(value, bytes | bytearray):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, Opaque):
        return {"$opaque": base64.b64encode(value.data).decode()}
    if isinstance(value, complex):
        return {"$complex": [x if math.isfinite(x) else {"$float": str(x)} for x in (value.real, value.imag)]}
    if isinstance(value, Dtype):
        return {"$dtype": value.name}
    if isinstance(value, InertClass | Maker):  # the class itself, not an object of it
        return {"$class": value.name}
    if isinstance(value, dt.timedelta):
        return {"$datetime": value.total_seconds()}
    if isinstance(value, dt.date | dt.time):
        return {"$datetime": value.isoformat()}
    if isinstance(value, dt.timezone):
        return {"$datetime": str(value)}
    if isinstance(value, PurePosixPath):
        return {"$path": str(value)}
    raise UnsupportedError(f"{path or 'a value'} of the checkpoint is a {type(value).__name__}, which has no JSON form")


def _tensor(dtype: str, shape: tuple[int, ...], data: bytes) -> Any:
    return {"$tensor": {"dtype": dtype, "shape": list(shape), "data": base64.b64encode(data).decode()}}


def _array(value: NdArray) -> Any:
    import numpy as np

    if value.dtype in ITEMSIZE and not value.fortran:  # a torch dtype: NumPy knows not all of them
        return _tensor(value.dtype, value.shape, value.data)
    try:
        dtype = np.dtype(value.dtype)
        array = np.frombuffer(value.data, dtype).reshape(value.shape, order="F" if value.fortran else "C")
    except (ValueError, TypeError, OverflowError, SyntaxError) as error:
        raise IntegrityError(f"the checkpoint has an invalid NumPy array: {error}") from error
    if dtype.kind not in "biufc":
        return {"$class": "numpy.ndarray", "$args": [dtype.str, list(value.shape)], "$items": _plain(value.data, "")}
    return _tensor(dtype.name, value.shape, array.astype(dtype.newbyteorder("<")).tobytes())


def _join(path: str, part: object) -> str:
    text = str(part)[:_MAX_PATH]
    return f"{path}.{text}"[:_MAX_PATH] if path else text


def from_json(value: Any, opened: Callable[[bytes], Any] | None = None) -> Any:
    """Convert the JSON form of a value back.

    Small tensors become NumPy arrays, dates and paths text. `$ref`, `$class` and `$opaque` remain as they are.

    Args:
        value: the JSON form.
        opened: converts the pickle of an `$opaque` to a value; None: it remains as it is.

    Raises:
        UpgradeNeeded: a form is of a newer version of ucformat.
    """
    if isinstance(value, list):
        return [from_json(v, opened) for v in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        (key, inner), *_ = value.items()
        if key == "$opaque" and opened is not None:
            return opened(base64.b64decode(inner))
        if key in _DECODERS:
            return _DECODERS[key](inner)
        if key in _CONTAINERS:
            return _CONTAINERS[key](inner, lambda v: from_json(v, opened))
    if any(k in value for k in _KEPT):
        return {k: v if k in _KEPT else from_json(v, opened) for k, v in value.items()}
    return {unkey(k): from_json(v, opened) for k, v in value.items()}


def unkey(key: str) -> str | int:
    """The key of a dictionary that `json_key` has spelled.

    Args:
        key: the key in JSON.

    Raises:
        UpgradeNeeded: it is a form of a newer version of ucformat.
    """
    if key.startswith("$int:"):
        return int(key[5:])
    if key.startswith("$") and not key.startswith("$$"):
        raise UpgradeNeeded(f"{key[:100]!r} is a form of value that this version of ucformat does not know")
    return key.removeprefix("$")


def _array_of(inner: dict[str, Any]) -> Any:
    import ml_dtypes
    import numpy as np

    name = inner["dtype"]
    dtype = np.dtype(getattr(ml_dtypes, name) if hasattr(ml_dtypes, name) else name)
    return np.frombuffer(base64.b64decode(inner["data"]), dtype).reshape(inner["shape"])


_KEPT = ("$class", "$ref", "$opaque")
_DECODERS: dict[str, Callable[[Any], Any]] = {
    "$float": float,
    "$bytes": base64.b64decode,
    "$stream": lambda text: io.BytesIO(base64.b64decode(text)),
    "$complex": lambda parts: complex(*map(from_json, parts)),
    "$datetime": lambda text: text,
    "$path": lambda text: text,
    "$dtype": lambda name: name,
    "$tensor": _array_of,
}
#: The special values that contain others, which the second argument decodes.
_CONTAINERS: dict[str, Callable[[Any, Callable[[Any], Any]], Any]] = {
    "$tuple": lambda items, decode: tuple(map(decode, items)),
    "$set": lambda items, decode: {_hashable(decode(v)) for v in items},
    "$slice": lambda parts, decode: slice(*map(decode, parts)),
    "$dict": lambda pairs, decode: {_hashable(decode(k)): decode(v) for k, v in pairs},
}


def _hashable(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_hashable, value))
    return frozenset(value) if isinstance(value, set) else value


def all_equal(values: dict[str, Any]) -> bool:
    """Whether all values are the same.

    Args:
        values: at least one value, by name.
    """
    first = next(iter(values.values()))
    return all(type(v) is type(first) and v == first for v in values.values())
