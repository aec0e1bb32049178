"""The globals that a pickle may name, and their meanings.

A global is one of three things: a function or type of plain values, containers or tensors, which a
function below replaces; a class of a training framework, which becomes an `Inert` that keeps its
arguments and state and does nothing; or an error. Nothing is ever imported for a pickle, and
nothing is called but the functions below.
"""

from __future__ import annotations

import datetime as dt
import math
import re
import reprlib
from dataclasses import replace
from functools import cache
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from ucformat.errors import IntegrityError, UnsafeError, option_text
from ucformat.geometry.box import reach
from ucformat.reading.stand_ins import (
    AttributedTensor,
    Dtype,
    Inert,
    InertClass,
    LocalPart,
    Maker,
    NdArray,
    NumpyDtype,
    NumpyScalar,
    Size,
    Storage,
    StorageType,
    StoredTensor,
    Stream,
)
from ucformat.schema import ITEMSIZE
from ucformat.sources.registry import all_sources

if TYPE_CHECKING:
    from collections.abc import Callable

#: Packages of no engine whose classes become inert stand-ins.
_PACKAGES = (
    "argparse",
    "numpy.random",
    "omegaconf",
    "timm",
    "torch._dynamo.decorators",
    "torch._subclasses",
    "torch.distributed",
    "torch.masked",
    "torch.nested",
    "torch.nn",
    "torch.optim",
    "torch.sparse",
    "torch.utils.data",
)


@cache
def _inert_packages() -> tuple[str, ...]:
    """All packages whose classes become inert stand-ins, those of the sources included."""
    return (*_PACKAGES, *(package for source in all_sources() for package in source.packages))


#: Among the packages that are allowed: what a rank has of a DTensor or a ShardedTensor is read.
PARTS = "torch.distributed.tensor.DTensor"
#: Likewise: attributes of tensors that are texts are kept.
TEXTS = "torch.Tensor"

_SHARDED = re.compile(r"torch\.distributed\._shard\.sharded_tensor\.(\w+\.)*ShardedTensor")
_DTENSOR = re.compile(r"torch\.distributed\._?tensor(\.\w+)?\.DTensor")
#: Classes of tensors whose elements are all that there is to them.
_PLAIN_TENSORS = ("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer")

#: Why a tensor is not read, to follow its name.
_LAZY = "is conjugated or negated only when it is used; it must be saved after .resolve_conj().resolve_neg()"
_SPARSE = (
    "is a sparse tensor ({}), which ucformat does not read; it must be saved after .to_dense()"
)
_NESTED = "is a nested tensor, which ucformat does not read"
_META = "has no elements: it was on the device `meta`"
_OTHER_CLASS = "is of the class {}, which ucformat does not read; save whole plain tensors, or with torch's DCP"

_MAX_DIMS = 64  # torch's own limit
_MAX_LAYOUT = 40  # characters of the name of a layout
_MAX_NUMBER = 1 << 62  # of a size or a stride
# elements that an expanded (stride 0) view may have beyond those of its storage
_MAX_EXPANDED = 1 << 26
# of a tuple and a number used as a key: Python caches the hash of neither
_MAX_KEY_PARTS, _MAX_KEY_BITS = (64, 64)


def sizes(value: Any, what: str) -> tuple[int, ...]:
    """Check a shape, a size or strides."""
    if type(value) in (tuple, list, Size):
        for n in value:
            if type(n) is not int or not 0 <= n < _MAX_NUMBER:
                break
        else:
            return tuple(value)
    raise IntegrityError(f"a tensor has the impossible {what} {reprlib.repr(value)}")


def _tensor(
    storage: Any,
    offset: Any,
    shape: Any,
    strides: Any,
    dtype: str | None = None,
    special: Any = None,
) -> StoredTensor:
    """Create a tensor in a storage, after checking that it does not leave the storage."""
    if not isinstance(storage, Storage):
        raise IntegrityError("a tensor without a storage")
    dtype = dtype or storage.dtype
    if dtype is None:
        raise IntegrityError("a tensor without a dtype")
    shape, strides = sizes(shape, "shape"), sizes(strides, "strides")
    if dtype not in ITEMSIZE:
        return StoredTensor(storage.key, dtype, shape, strides, 0, 0)
    numel = storage.nbytes // ITEMSIZE[dtype]
    if type(offset) is not int or offset < 0 or not len(shape) == len(strides) <= _MAX_DIMS:
        raise IntegrityError(
            f"a tensor with shape {reprlib.repr(shape)}, strides {reprlib.repr(strides)} and "
            f"offset {reprlib.repr(offset)}"
        )
    size = math.prod(shape)
    last = offset + reach(shape, strides)
    if size and last >= numel:
        raise IntegrityError(
            f"a tensor of shape {shape}, strides {strides} from element {offset} on reaches past "
            f"the {numel} "
            f"elements of its storage {storage.key!r}"
        )
    if size > numel + _MAX_EXPANDED:
        raise UnsafeError(
            f"a tensor of shape {shape} expands a storage of {numel} elements to {size}"
        )
    tensor = StoredTensor(storage.key, dtype, shape, strides, offset, numel)
    return tensor.refused(_LAZY) if special else tensor


def _rebuild(storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> StoredTensor:
    # What follows: `requires_grad`, hooks and, only if one of them is set, the conj and neg bits.
    return _tensor(storage, offset, shape, strides, special=rest[2] if len(rest) > 2 else None)


def _rebuild_v3(
    storage: Any,
    offset: Any,
    shape: Any,
    strides: Any,
    _grad: Any,
    _hooks: Any,
    dtype: Any,
    *rest: Any,
) -> StoredTensor:
    if not isinstance(dtype, Dtype):
        raise IntegrityError(f"a tensor with the dtype {reprlib.repr(dtype)}")
    return _tensor(storage, offset, shape, strides, dtype.name, rest[0] if rest else None)


def _rebuild_quantized(
    storage: Any, offset: Any, shape: Any, strides: Any, *_: Any
) -> StoredTensor:
    return _tensor(storage, offset, shape, strides)


def _without_storage(dtype: Any, shape: Any, reason: str) -> StoredTensor:
    """A tensor that cannot be read, and is not in one storage."""
    if not isinstance(dtype, Dtype):
        raise IntegrityError(f"a tensor with the dtype {reprlib.repr(dtype)}")
    shape = sizes(shape, "shape")
    return StoredTensor("", dtype.name, shape, (0,) * len(shape), 0, 0).refused(reason)


def _sparse(layout: Any, data: Any) -> StoredTensor:
    """A sparse tensor, of which `data` has the indices, the values and, as its only tuple, the shape."""
    values = [v for v in data if isinstance(v, StoredTensor)] if isinstance(data, tuple) else []
    shapes = [v for v in data if isinstance(v, tuple)] if values else []
    if len(shapes) != 1 or not isinstance(layout, Inert):
        raise IntegrityError("a sparse tensor without a layout, values and one shape")
    kind = str(layout.args[0] if layout.args else "").removeprefix("torch.")[:_MAX_LAYOUT]
    return _without_storage(Dtype(values[-1].dtype), shapes[0], _SPARSE.format(kind))


def _nested(values: Any, *_: Any) -> StoredTensor:
    if not isinstance(values, StoredTensor):
        raise IntegrityError("a nested tensor without values")
    return values.refused(_NESTED)


def _meta(dtype: Any, shape: Any, *_: Any) -> StoredTensor:
    return _without_storage(dtype, shape, _META)


def _copied(data: Any, dtype: Any, *_: Any) -> StoredTensor:
    """A tensor of a device (XLA) whose memory torch copies to save it."""
    if not isinstance(data, StoredTensor) or not isinstance(dtype, Dtype):
        raise IntegrityError("a tensor of a device without its elements and dtype")
    return (
        data
        if dtype.name == data.dtype
        else data.refused(f"is {dtype.name}, stored as {data.dtype}")
    )


def _parameter(data: Any, *_: Any) -> StoredTensor:
    if not isinstance(data, StoredTensor):
        raise IntegrityError("a parameter without a tensor")
    return data


def _from_type(function: Any, kind: Any, args: Any, _state: Any) -> Any:
    if not isinstance(kind, InertClass) or not isinstance(args, tuple):
        raise IntegrityError(f"a tensor of the class {reprlib.repr(kind)}")
    value = (
        function.make(*args) if isinstance(function, Maker) else StoredTensor("", "", (), (), 0, 0)
    )
    if kind.name in _PLAIN_TENSORS and isinstance(function, Maker):
        return value
    if not isinstance(value, StoredTensor):
        raise IntegrityError(f"a tensor of the class {kind.name} that is made of something else")
    return replace(value, dtype=f"{value.dtype.partition(' ')[0]} {_OTHER_CLASS.format(kind.name)}")


def _from_type_with_texts(function: Any, kind: Any, args: Any, state: Any) -> Any:
    """Like `_from_type`, and the attributes of a tensor that are texts are kept."""
    value = _from_type(function, kind, args, state)
    if isinstance(state, tuple) and len(state) == 2:  # of the object, and of its slots
        state = state[0]
    texts = {
        k: v
        for k, v in (state if isinstance(state, dict) else {}).items()
        if type(k) is type(v) is str
    }
    if not texts or not isinstance(value, StoredTensor):
        return value
    parts = (value.storage, value.dtype, value.shape, value.strides, value.offset, value.numel)
    return AttributedTensor(*parts, texts)


def _wrapped(kind: Any, dtype: Any, shape: Any, *_: Any) -> StoredTensor:
    return _without_storage(dtype, shape, _OTHER_CLASS.format(getattr(kind, "name", "?")))


def _from_type_or_part(function: Any, kind: Any, args: Any, state: Any) -> Any:
    """Like `_from_type`, and a DTensor or a ShardedTensor is the part of it that its rank has."""
    if isinstance(kind, InertClass) and _SHARDED.fullmatch(kind.name):
        return _shards_of_rank(args, state)
    if not (isinstance(kind, InertClass) and _DTENSOR.fullmatch(kind.name)):
        return _from_type(function, kind, args, state)
    if isinstance(state, tuple) and len(state) == 2:  # of the object, and of its slots
        state = state[1]
    attributes = state if isinstance(state, dict) else {}
    local, spec = attributes.get("_local_tensor"), attributes.get("_spec")
    placements = spec.get("placements") if isinstance(spec, Inert) else None
    shape = args[2] if isinstance(args, tuple) and len(args) > 2 else None
    if (
        not isinstance(local, StoredTensor)
        or not isinstance(placements, tuple)
        or not isinstance(shape, tuple)
    ):
        raise IntegrityError("a DTensor without a local tensor, placements and a shape")
    names = {p.name.rpartition(".")[2] for p in placements if isinstance(p, Inert)}
    return LocalPart(
        # A `Partial` one has the whole shape, too, but is only a summand.
        local,
        whole=local.shape == shape and names <= {"Shard", "Replicate", "_StridedShard"},
        shape=sizes(shape, "shape"),
        spec=spec,
    )


def _shards_of_rank(args: Any, state: Any) -> LocalPart:
    """The only shard that a rank has of a ShardedTensor; no elements if it has none."""
    shape = args[2] if isinstance(args, tuple) and len(args) > 2 else None
    shards = state[0] if isinstance(state, tuple) and state else None
    if (
        not isinstance(shape, tuple)
        or not isinstance(shards, list)
        or not isinstance(args[1], Dtype)
    ):
        raise IntegrityError("a ShardedTensor without a shape, a dtype and shards")
    states = [
        s.state[1]
        for s in shards
        if isinstance(s, Inert) and isinstance(s.state, tuple) and len(s.state) == 2
    ]
    values = [s.get("tensor") for s in states if isinstance(s, dict)]
    tensors = [t for t in values if isinstance(t, StoredTensor)]
    if len(tensors) != len(shards):
        raise IntegrityError("a ShardedTensor with a shard that is not a tensor")
    if not tensors:
        empty = sizes((0, *shape[1:]), "shape")
        return LocalPart(
            StoredTensor("", args[1].name, empty, (0,) * len(empty), 0, 0),
            whole=False,
            shape=sizes(shape, "shape"),
        )
    shard = (
        tensors[0]
        if len(tensors) == 1
        else tensors[0].refused(f"is stored as {len(tensors)} shards of one rank")
    )
    whole = len(tensors) == 1 and shard.shape == shape
    return LocalPart(shard, whole=whole, shape=sizes(shape, "shape"))


def _encode(text: str, encoding: str = "utf-8") -> bytes:
    if encoding not in ("latin1", "latin-1", "utf-8", "ascii"):
        raise UnsafeError(
            f"the text encoding {reprlib.repr(encoding)} is not one that torch.save writes"
        )
    return text.encode(encoding)


def _bytes(data: Any = b"") -> bytes:
    """`bytes` and `bytearray` of bytes: never of a length."""
    if not isinstance(data, bytes | bytearray):
        raise UnsafeError(f"the pickle makes bytes from a {type(data).__name__}")
    return bytes(data)


def checked_key(value: Any) -> Any:
    """Check a key before it is hashed: hashing a tuple whose parts are shared at many levels would not end.

    Returns:
        the value: a scalar, or a tuple of at most 64 of them.
    """
    if _is_scalar(value) or (
        isinstance(value, tuple) and len(value) <= _MAX_KEY_PARTS and all(map(_is_scalar, value))
    ):
        return value
    raise UnsafeError(f"the pickle has a {type(value).__name__} as a key")


def _is_scalar(value: Any) -> bool:
    return isinstance(value, _SCALARS) and (
        type(value) is not int or value.bit_length() <= _MAX_KEY_BITS
    )


def _str(value: Any = "") -> str:
    """`str` of a scalar: of a list it would write out all items, each time the list is shared."""
    if not isinstance(value, str | int | float):
        raise UnsafeError(f"the pickle makes text of a {type(value).__name__}")
    return str(value)


def _path(*parts: Any) -> PurePosixPath:
    if not all(isinstance(part, str | PurePosixPath) for part in parts):
        raise UnsafeError("the pickle makes a path of something other than text")
    return PurePosixPath(*parts)


def _set(members: Any = ()) -> set[Any]:
    return {checked_key(v) for v in members}


def _dict(pairs: Any = ()) -> dict[Any, Any]:
    return dict(pairs) if isinstance(pairs, dict) else {checked_key(k): v for k, v in pairs}


def _attribute(owner: Any, name: Any) -> Inert:
    """`getattr` of a class with a constant name: how Python 3.11 pickles a member of an enumeration."""
    if not isinstance(owner, InertClass) or not isinstance(name, str):
        raise UnsafeError(
            "the pickle calls builtins.getattr", hint="nothing was run; do not trust this file"
        )
    return Inert(owner.name, (name,))


def _reconstructor(owner: Any, *_: Any) -> Inert:
    if not isinstance(owner, InertClass):
        raise UnsafeError(f"the pickle rebuilds an object of {reprlib.repr(owner)}")
    return Inert(owner.name)


def _dtype(code: Any, *_: Any) -> NumpyDtype:
    if not isinstance(code, str) or "O" in code or code[:1] not in "?bBhHiIlLqQfdeFDgGuicSUVMm<>=|":
        raise UnsafeError(
            f"a numpy array of dtype {reprlib.repr(code)} is not read: it may hold any Python "
            "object"
        )
    return NumpyDtype(code)


def _scalar(dtype: NumpyDtype, data: bytes) -> Any:
    import numpy as np

    return np.frombuffer(data, dtype_text(dtype), count=1)[0].item()


def _exact_scalar(dtype: NumpyDtype, data: bytes) -> Any:
    import numpy as np

    kind = np.dtype(dtype_text(dtype))
    value = _scalar(dtype, data)
    name = {"U": "str_", "S": "bytes_"}.get(kind.kind, kind.name)
    return NumpyScalar(f"numpy.{name}", value) if name in ITEMSIZE or kind.kind in "US" else value


def _frombuffer(data: Any, dtype: NumpyDtype, shape: Any, order: str = "C") -> NdArray:
    return NdArray(dtype_text(dtype), sizes(shape, "shape"), bytes(data), order == "F")


def dtype_text(dtype: Any) -> str:
    """The NumPy spelling of a dtype, with its byte order: `<f4`."""
    if not isinstance(dtype, NumpyDtype):
        raise IntegrityError(f"a numpy array of dtype {reprlib.repr(dtype)}")
    return dtype.text


_SCALARS = (
    str,
    int,
    float,
    bytes,
    type(None),
    Dtype,
    Inert,
    InertClass,
    NumpyScalar,
    PurePosixPath,
    dt.date,
    dt.timedelta,
)

_ALIASES = {
    "chalf": "complex32",
    "half": "float16",
    "float": "float32",
    "double": "float64",
    "cfloat": "complex64",
    "cdouble": "complex128",
}
_TORCH_DTYPES = {**{name: name for name in ITEMSIZE}, **_ALIASES}

_STORAGES = {
    "BoolStorage": "bool",
    "ByteStorage": "uint8",
    "CharStorage": "int8",
    "ShortStorage": "int16",
    "IntStorage": "int32",
    "LongStorage": "int64",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "QInt8Storage": "qint8",
    "QInt32Storage": "qint32",
    "QUInt8Storage": "quint8",
    "QUInt4x2Storage": "quint4x2",
    "QUInt2x4Storage": "quint2x4",
    "UntypedStorage": None,
}
#: Names of dtypes in torch, of future versions too. Naming one has no effect, and calling it is
#: refused.
_DTYPE = re.compile(r"(q?u?int|b?float|b?complex|bits)\d{1,3}[a-z0-9_]{0,20}")
_QUANTIZATION = re.compile(r"per_(tensor|channel)_(affine|symmetric|affine_float_qparams)")

_BUILTINS: dict[str, Callable[..., Any]] = {
    "set": _set,
    "frozenset": lambda members=(): frozenset(_set(members)),
    "dict": _dict,
    "bytearray": _bytes,
    "bytes": _bytes,
    "range": lambda *args: Inert("builtins.range", args),
    "getattr": _attribute,
    **{kind.__name__: kind for kind in (list, tuple, int, float, bool, complex, slice)},
    "str": _str,
}

_HASHING = {"set", "frozenset", "dict", "OrderedDict", "Counter", "defaultdict"}

_GLOBALS: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": _dict,
    "collections.Counter": _dict,
    "collections.defaultdict": lambda _factory=None, pairs=(): _dict(pairs),
    "collections.deque": lambda items=(), _length=None: list(items),
    "torch.Size": lambda value=(): sizes(value, "size"),
    "torch._utils._rebuild_tensor": _rebuild,
    "torch._utils._rebuild_tensor_v2": _rebuild,
    "torch._utils._rebuild_tensor_v3": _rebuild_v3,
    "torch._utils._rebuild_qtensor": _rebuild_quantized,
    "torch._utils._rebuild_sparse_tensor": _sparse,
    "torch._utils._rebuild_nested_tensor": _nested,
    "torch._utils._rebuild_meta_tensor_no_storage": _meta,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _copied,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _from_type,
    "torch._utils._rebuild_wrapper_subclass": _wrapped,
    "torch.torch_version.TorchVersion": _str,
    "_codecs.encode": _encode,
    **dict.fromkeys(("_io.BytesIO", "io.BytesIO"), lambda data=b"": Stream(_bytes(data))),
    "copyreg._reconstructor": _reconstructor,
    "copy_reg._reconstructor": _reconstructor,
    "datetime.date": dt.date,
    "datetime.datetime": dt.datetime,
    "datetime.time": dt.time,
    "datetime.timedelta": dt.timedelta,
    "datetime.timezone": dt.timezone,
    "pathlib.Path": _path,
    "pathlib.PosixPath": _path,
    "pathlib.PurePosixPath": _path,
    "pathlib._local.PosixPath": _path,  # its name in Python 3.13
    "numpy.dtype": _dtype,
    **{f"numpy.{core}.multiarray._reconstruct": lambda *_: NdArray() for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": _scalar for core in ("core", "_core")},
    **{f"numpy.{core}.numeric._frombuffer": _frombuffer for core in ("core", "_core")},
    **{
        f"{module}.{name}": make
        for module in ("builtins", "__builtin__")
        for name, make in _BUILTINS.items()
    },
}


_EXACT_GLOBALS: dict[str, Callable[..., Any]] = {
    **_GLOBALS,
    "torch.Size": lambda value=(): Size(sizes(value, "size")),
    **{f"numpy.{core}.multiarray.scalar": _exact_scalar for core in ("core", "_core")},
    **{
        f"{module}.bytearray": lambda *args: bytearray(_bytes(*args))
        for module in ("builtins", "__builtin__")
    },
}


def resolve(module: str, name: str, allow: tuple[str, ...] = (), *, exact: bool = False) -> Any:
    """Find the stand-in for a global of a pickle.

    Args:
        exact: NumPy scalars, byte arrays and `torch.Size` keep their types.
    """
    full_name = f"{module}.{name}"
    stand_ins = _EXACT_GLOBALS if exact else _GLOBALS
    if PARTS in allow and full_name == "torch._tensor._rebuild_from_type_v2":
        return Maker(full_name, _from_type_or_part)
    if TEXTS in allow and full_name == "torch._tensor._rebuild_from_type_v2":
        return Maker(full_name, _from_type_with_texts)
    if full_name in stand_ins:
        return Maker(
            full_name, stand_ins[full_name], hashes=full_name.rpartition(".")[2] in _HASHING
        )
    if module == "torch" and name in _TORCH_DTYPES:
        return Dtype(_TORCH_DTYPES[name])
    if module == "torch" and _DTYPE.fullmatch(name):
        return Dtype(name)
    if module == "torch" and _QUANTIZATION.fullmatch(name):
        return InertClass(full_name)
    if module in ("torch", "torch.storage", "torch.cuda") and name in _STORAGES:
        return StorageType(_STORAGES[name])
    if full_name in (
        "torch.device",
        "torch.Tensor",
        "numpy.ndarray",
        "types.SimpleNamespace",
        "torch.serialization._get_layout",
    ):
        return InertClass(full_name)
    if any(
        module == package or module.startswith(package + ".")
        for package in _inert_packages() + allow
    ):
        return InertClass(full_name)
    package = module.partition(".")[0]
    raise UnsafeError(
        f"the pickle names {full_name}, which is not one of the plain classes that a checkpoint needs",
        hint="nothing was imported or run. If you trust the class, name its package, and its state is kept as "
        f"plain values: {option_text('allow', f'[{package!r}]', package)}",
    )
