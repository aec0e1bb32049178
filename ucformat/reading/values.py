"""Non-tensor values of a checkpoint as JSON, and back.

None, booleans, finite numbers and text are themselves, lists and tuples are arrays, and a
dictionary whose keys are text is an object. Any other value is an object with a key that begins
with `$`:

| form | value |
|---|---|
| `{"$float": "nan"}`, `"inf"`, `"-inf"` | a float that is not finite |
| `{"$bytes": "…"}` | bytes, base64 |
| `{"$stream": "…"}` | a file in memory (`io.BytesIO`): its bytes, base64; restored with the position at 0 |
| `{"$complex": [re, im]}` | a complex number, each part as a float |
| `{"$set": […]}` | a set, sorted by their JSON |
| `{"$slice": [start, stop, step]}` | a slice |
| `{"$datetime": "…"}`, `{"$path": "…"}` | a date or time in ISO 8601 (a time span in seconds), a path |
| `{"$dtype": "bfloat16"}` | a data type |
| `{"$tensor": {"dtype", "shape", "data"}}` | a small tensor: little-endian row-major bytes, base64 |
| `{"$ref": "client_state.ema.weight"}` | a larger tensor: that tensor of the checkpoint, in the state `weight` |
| `{"$class": "deepspeed….LossScaler", "$args", "$state", "$items"}` | an object; empty parts are left out |
| `{"$class": "numpy.float32", "$args": [1.5]}` | a NumPy scalar; in the same form `numpy.dtype`, `torch.Size`, … |
| `{"$class": "numpy.ndarray", "$args": ["<f4", [2, 3]], "$items": …}` | a NumPy array; `$items` are row-major bytes |
| `{"$class": "main.Point", "$fields": ["x", "y"], "$args": [1, 2]}` | a named tuple |
| `{"$class": "main.Mode", "$value": 1}` | a member of an enumeration, or a value of a class derived from a plain one |
| `{"$opaque": "…"}` | a pickle, base64, that only `ucformat.torch.load(…, trust=True)` opens |
| `{"$dict": [[key, value], …]}` | a dictionary with keys other than text and integers |
| `{"$packed": value}` | a dictionary or list that a planner of PyTorch DCP saved as one entry |

Keys: an integer `3` becomes `"$int:3"`; text that begins with `$` gets another `$` in front.

The values that PyTorch programs save keep their Python types. In all others tuples are arrays like
lists, frozen sets are sets, NumPy scalars numbers, and NumPy arrays tensors, as far as a dtype of
PyTorch can hold them.
"""

from __future__ import annotations

import base64
import datetime as dt
import io
import json
import math
import reprlib
from collections.abc import Mapping
from functools import partial
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ucformat.errors import IntegrityError, UnsupportedError, UpgradeNeeded
from ucformat.reading.readable import json_key
from ucformat.reading.stand_ins import (
    Dtype,
    Inert,
    InertClass,
    Maker,
    NamedFields,
    NdArray,
    NumpyDtype,
    NumpyScalar,
    OfClass,
    Opaque,
    Size,
    SmallTensor,
    StoredTensor,
    Stream,
)
from ucformat.schema import ITEMSIZE
from ucformat.schema.limits import MAX_BITS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

SMALL = 64 << 10  # bytes of a tensor up to which it is stored inside the JSON
_MAX_DEPTH = 200
_MAX_NODES = 5_000_000
_MAX_SHARED = 100_000  # items of repeated containers: a few lists that share others expand to any number of items
_MAX_BYTES = 1 << 30  # of all bytes and tensors together
_MAX_PATH = 4096  # characters of a path


def to_json(
    value: Any,
    *,
    read: Callable[[StoredTensor], bytes] | None = None,
    spill: Callable[[str, StoredTensor], str] | None = None,
    path: str = "",
    small: int = SMALL,
    exact: bool = False,
) -> Any:
    """Convert an unpickled value to its JSON form.

    Args:
        read: gives the row-major bytes of a tensor; None: tensors are errors.
        spill: called with the path and each tensor of more than `small` bytes; adds it to the
            checkpoint's tensors and returns its name. None: such tensors are errors.
        small: bytes of a tensor up to which it is stored inside the JSON.
    """
    return _Encoder(read, spill, small, exact).encode(value, path, 0)


class _Encoder:
    def __init__(
        self,
        read: Callable[[StoredTensor], bytes] | None,
        spill: Callable[[str, StoredTensor], str] | None,
        small: int,
        exact: bool,  # noqa: FBT001
    ) -> None:
        self.read, self.spill, self.small, self.exact = read, spill, small, exact
        self.nodes = self.shared = self.nbytes = 0
        self.seen: set[int] = set()  # by `id`: the value keeps its parts alive

    def encode(self, value: Any, path: str, depth: int) -> Any:
        self.nodes += 1
        if depth > _MAX_DEPTH or self.nodes > _MAX_NODES:
            raise _too_large(path)
        if isinstance(value, int) and value.bit_length() > MAX_BITS:
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
            if isinstance(value, Size) and self.exact:
                return {"$class": "torch.Size", "$args": [items]}
            return {"$tuple": items} if self.exact and isinstance(value, tuple) else items
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
        return {
            "$dict": [
                [self.encode(k, path, depth), self.encode(v, _join(path, i), depth)]
                for i, (k, v) in pairs
            ]
        }

    def special(self, value: Any, path: str, depth: int) -> Any:
        if isinstance(value, StoredTensor):
            return self.tensor(value, path)
        if isinstance(value, Inert):
            self.count(value.items, path)
            out: dict[str, Any] = {"$class": value.name}
            for name, part in (
                ("$args", value.args),
                ("$state", value.state),
                ("$items", value.items),
            ):
                if part is not None and not (isinstance(part, tuple | list) and not part):
                    out[name] = self.encode(part, path, depth)
            return out
        if isinstance(value, set | frozenset):
            self.count(value, path)
            items = sorted((self.encode(v, path, depth) for v in value), key=json.dumps)
            frozen = isinstance(value, frozenset) and self.exact
            return {"$class": "builtins.frozenset", "$args": [items]} if frozen else {"$set": items}
        if isinstance(value, slice):
            return {"$slice": self.encode([value.start, value.stop, value.step], path, depth)}
        if isinstance(value, NumpyScalar | OfClass | NamedFields):
            return self.of_class(value, path, depth)
        if isinstance(value, NdArray | SmallTensor | Stream):
            self.count(value.data, path)
            self.weigh(len(value.data), path)
            return (
                _array(value, exact=self.exact)
                if isinstance(value, NdArray)
                else _plain(value, path)
            )
        if isinstance(value, bytes | bytearray):
            self.count(value, path)
            self.weigh(len(value), path)
            if isinstance(value, bytearray) and self.exact:
                return {"$class": "builtins.bytearray", "$args": [_plain(bytes(value), path)]}
        return _plain(value, path)

    def of_class(self, value: NumpyScalar | OfClass | NamedFields, path: str, depth: int) -> Any:
        if isinstance(value, NamedFields):
            items = [self.encode(v, _join(path, i), depth) for i, v in enumerate(value.items)]
            return {"$class": value.name, "$fields": list(value.fields), "$args": items}
        plain = self.encode(value.value, path, depth)
        if isinstance(value, OfClass):
            return {"$class": value.name, "$value": plain}
        return {"$class": value.name, "$args": [plain]} if self.exact else plain

    def tensor(self, value: StoredTensor, path: str) -> Any:
        if (value.nbytes > self.small or value.dtype not in ITEMSIZE) and self.spill:
            return {"$ref": self.spill(path, value)}
        if value.dtype not in ITEMSIZE:
            raise UnsupportedError(
                f"{path} is stored as {value.dtype}, which ucformat does not read"
            )
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
    if isinstance(value, Stream):
        return {"$stream": base64.b64encode(value.data).decode()}
    if isinstance(value, SmallTensor):
        return _tensor(value.dtype, value.shape, value.data)
    if isinstance(value, Opaque):
        return {"$opaque": base64.b64encode(value.data).decode()}
    if isinstance(value, complex):
        return {
            "$complex": [
                x if math.isfinite(x) else {"$float": str(x)} for x in (value.real, value.imag)
            ]
        }
    if isinstance(value, Dtype):
        return {"$dtype": value.name}
    if isinstance(value, NumpyDtype):
        return {"$class": "numpy.dtype", "$args": [value.text]}
    if isinstance(value, InertClass | Maker):  # the class itself, not an object of it
        return {"$class": value.name}
    if isinstance(value, dt.timedelta):
        return {"$datetime": value.total_seconds()}
    if isinstance(value, dt.date | dt.time | dt.timezone):
        return {"$datetime": str(value) if isinstance(value, dt.timezone) else value.isoformat()}
    if isinstance(value, PurePosixPath):
        return {"$path": str(value)}
    raise UnsupportedError(
        f"{path or 'a value'} of the checkpoint is a {type(value).__name__}, which has no JSON form"
    )


def _tensor(dtype: str, shape: tuple[int, ...], data: bytes) -> Any:
    return {
        "$tensor": {"dtype": dtype, "shape": list(shape), "data": base64.b64encode(data).decode()}
    }


def _array(value: NdArray, *, exact: bool) -> Any:
    import numpy as np

    dtype = numpy_dtype(value.dtype)
    try:
        array = np.frombuffer(value.data, dtype).reshape(
            value.shape, order="F" if value.fortran else "C"
        )
    except ValueError as error:
        raise IntegrityError(f"the checkpoint has an invalid NumPy array: {error}") from error
    if not exact and dtype.name in ITEMSIZE:
        from ucformat.reading.dtypes import dtype_name

        little = array.astype(dtype.newbyteorder("<")).tobytes()
        return _tensor(dtype_name(dtype), value.shape, little)
    args = [array_dtype_text(dtype), list(value.shape)]
    return {"$class": "numpy.ndarray", "$args": args, "$items": _plain(array.tobytes(), "")}


def array_dtype_text(dtype: Any) -> str:
    """The name of a NumPy dtype, as `numpy_dtype` takes it."""
    import numpy as np

    from ucformat.reading.dtypes import dtype_name

    name = dtype_name(dtype) if dtype.name in ITEMSIZE else ""
    return name if name and not hasattr(np, name) else str(dtype.str)


def numpy_dtype(text: str) -> Any:
    """The NumPy dtype of a name: NumPy's own (`<f4`), or one of `ml_dtypes` (`bfloat16`)."""
    import numpy as np

    from ucformat.reading import dtypes

    try:
        dtype = dtypes.numpy_dtype(text) if text in ITEMSIZE else np.dtype(text)
    except (AttributeError, OverflowError, SyntaxError, TypeError, ValueError) as error:
        raise IntegrityError(f"the checkpoint has an invalid NumPy dtype: {error}") from error
    if dtype.hasobject or (dtype.kind == "V" and dtype.name not in ITEMSIZE):
        raise IntegrityError(
            f"the checkpoint has a NumPy dtype {reprlib.repr(text)}, whose elements are not "
            "plain values"
        )
    return dtype


def _join(path: str, part: object) -> str:
    text = str(part)[:_MAX_PATH]
    return f"{path}.{text}"[:_MAX_PATH] if path else text


def from_json(value: Any, makers: Mapping[str, Callable[..., Any]] = MappingProxyType({})) -> Any:
    """Convert the JSON form of a value back.

    Small tensors become NumPy arrays, dates and paths text, named tuples tuples, values of derived
    classes plain ones. `$ref`, `$opaque`, and objects of other classes than those of Python and
    NumPy remain as they are.
    """

    def decode(inner: Any) -> Any:
        return from_json(inner, makers)

    if isinstance(value, list):
        return [decode(v) for v in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        (key, inner), *_ = value.items()
        if key == "$opaque" and key in makers:
            return makers[key](base64.b64decode(inner))
        if key in _DECODERS:
            decoded = _DECODERS[key](inner)
            return makers[key](decoded) if key in makers else decoded
        if key in _CONTAINERS:
            return _CONTAINERS[key](inner, decode)
    if _is_of_class(value):
        plain = decode(value["$value"])
        return makers["$value"](value["$class"], plain) if "$value" in makers else plain
    if (make := _maker(value, makers)) is not None:
        parts = [decode(v) for v in _args(value) or ()]
        return make(*parts, decode(value["$items"])) if "$items" in value else make(*parts)
    if any(k in value for k in _KEPT):
        return {k: v if k in _KEPT else decode(v) for k, v in value.items()}
    return {unkey(k): decode(v) for k, v in value.items()}


def _args(value: Mapping[str, Any]) -> list[Any] | None:
    """The arguments of an object."""
    args = value.get("$args")
    args = args["$tuple"] if isinstance(args, dict) and args.keys() == {"$tuple"} else args
    return args if isinstance(args, list) else None


def _maker(
    value: Mapping[str, Any], makers: Mapping[str, Callable[..., Any]]
) -> Callable[..., Any] | None:
    """What makes an object of a class of Python or NumPy, or a named tuple."""
    name = value.get("$class")
    if not isinstance(name, str) or _args(value) is None:
        return None
    if value.keys() == {"$class", "$fields", "$args"}:
        make = makers.get("$fields")
        return (
            (lambda *items: tuple(items))
            if make is None
            else partial(make, name, tuple(value["$fields"]))
        )
    if value.keys() - {"$items"} != {"$class", "$args"} or ("$items" in value) != (
        name == "numpy.ndarray"
    ):
        return None
    return makers.get(name) or _CLASSES.get(name) or _scalar_maker(name)


def _scalar_maker(name: str) -> Callable[..., Any] | None:
    module, _, kind = name.partition(".")
    if module not in ("numpy", "ml_dtypes") or kind not in ITEMSIZE:
        return None
    return lambda number: numpy_dtype(kind).type(number)


def unkey(key: str) -> str | int:
    """The key of a dictionary that `json_key` has spelled."""
    if key.startswith("$int:"):
        return int(key[5:])
    if key.startswith("$") and not key.startswith("$$"):
        raise UpgradeNeeded(
            f"{key[:100]!r} is a form of value that this version of ucformat does not know"
        )
    return key.removeprefix("$")


def _tensor_of(inner: dict[str, Any]) -> Any:
    import numpy as np

    return np.frombuffer(base64.b64decode(inner["data"]), numpy_dtype(inner["dtype"])).reshape(
        inner["shape"]
    )


def _array_of(text: str, shape: list[int], data: bytes) -> Any:
    import numpy as np

    # of a bytearray, so that the array is writable
    return np.frombuffer(bytearray(data), numpy_dtype(text)).reshape(shape)


def _text_of(text: str) -> Any:
    import numpy as np

    return np.str_(text)


def _bytes_of(data: bytes) -> Any:
    import numpy as np

    return np.bytes_(data)


_KEPT = ("$class", "$ref", "$opaque")
_DECODERS: dict[str, Callable[[Any], Any]] = {
    "$float": float,
    "$bytes": base64.b64decode,
    "$stream": lambda text: io.BytesIO(base64.b64decode(text)),
    "$complex": lambda parts: complex(*map(from_json, parts)),
    "$datetime": lambda text: text,
    "$path": lambda text: text,
    "$dtype": lambda name: name,
    "$tensor": _tensor_of,
}
#: The classes whose objects are made without PyTorch; NumPy's scalars are further ones.
_CLASSES: dict[str, Callable[..., Any]] = {
    "builtins.bytearray": bytearray,
    "builtins.frozenset": lambda items: frozenset(map(_hashable, items)),
    "numpy.bytes_": _bytes_of,
    "numpy.dtype": numpy_dtype,
    "numpy.ndarray": _array_of,
    "numpy.str_": _text_of,
    "torch.Size": tuple,
}
#: The special values that contain others, which the second argument decodes.
_CONTAINERS: dict[str, Callable[[Any, Callable[[Any], Any]], Any]] = {
    "$tuple": lambda items, decode: tuple(map(decode, items)),
    "$set": lambda items, decode: {_hashable(decode(v)) for v in items},
    "$slice": lambda parts, decode: slice(*map(decode, parts)),
    "$packed": lambda inner, decode: decode(inner),
    "$dict": lambda pairs, decode: {_hashable(decode(k)): decode(v) for k, v in pairs},
}


def _hashable(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_hashable, value))
    return frozenset(value) if isinstance(value, set) else value


def plain_form(value: Any) -> Any:
    """The JSON form of a value without its Python type, as it is where types are not kept.

    Its parts are not changed.
    """
    if not isinstance(value, dict):
        return value
    if value.keys() == {"$packed"}:
        return value["$packed"]
    if _is_of_class(value):
        return plain_form(value["$value"])
    name, args = value.get("$class"), _args(value)
    if not isinstance(name, str) or not args:
        return value
    if value.keys() == {"$class", "$fields", "$args"}:
        return {"$tuple": args}
    if name == "numpy.ndarray" and "$items" in value:
        dtype = numpy_dtype(args[0])
        tensor_form = _array(
            NdArray(args[0], tuple(args[1]), from_json(value["$items"])), exact=False
        )
        return tensor_form if dtype.name in ITEMSIZE else value
    if name in ("numpy.str_", "numpy.bytes_", "builtins.bytearray") or _scalar_maker(name):
        return args[0]
    if name in ("torch.Size", "builtins.frozenset"):
        return {"$tuple" if name == "torch.Size" else "$set": args[0]}
    return {"$dtype": args[0]} if name == "numpy.dtype" else value


def _is_of_class(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and value.keys() == {"$class", "$value"}
        and isinstance(value["$class"], str)
    )


def without_class(value: Any) -> Any:
    """The JSON form of a value of a derived class as one of the class that it is derived from; any other as it is."""
    return value["$value"] if _is_of_class(value) else value


def is_special(value: Any) -> bool:
    """Whether a JSON form is that of a value other than a dictionary, a list, a text, a number or `None`."""
    return isinstance(value, Mapping) and any(
        k.startswith("$") and not k.startswith(("$$", "$int:")) for k in value
    )


def packed(value: Any) -> Any:
    """The JSON form of an entry of PyTorch DCP, marked if DCP's own planners would save its parts as entries."""
    plain = without_class(value)
    parts = isinstance(plain, Mapping) and (not is_special(plain) or "$dict" in plain)
    return (
        {"$packed": value} if parts or (isinstance(plain, list) and is_flattened(plain)) else value
    )


def is_flattened(items: Sequence[Any]) -> bool:
    """Whether DCP saves the items of a list as entries: if dictionaries are among them."""
    plain = map(without_class, items)
    return any(
        (isinstance(v, dict) and not is_special(v)) or (isinstance(v, list) and is_flattened(v))
        for v in plain
    )


def shared_value(values: dict[str, Any], count: int | None = None) -> Any:
    """The value, if all (`count`, if given) have the same; otherwise the values by name."""
    first = next(iter(values.values()))
    same = all(type(v) is type(first) and v == first for v in values.values())
    return first if same and count in (None, len(values)) else values


def references(value: Any) -> Iterator[str]:
    """The names of tensors that a value in JSON refers to."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if key == "$ref" and isinstance(inner, str):
                yield inner
            else:
                yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)
