"""Writes pickles of plain values, tensors, and instances of known classes, which are not imported.

A class or function is a `Global`, which must be in `ALLOWED`. Nothing that was read from a
checkpoint becomes one: other objects are refused. Protocol 2 is the one that PyTorch writes and its
restricted unpickler reads.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from ucformat.errors import UnsupportedError
from ucformat.geometry.box import row_major
from ucformat.schema import TORCH_SAVE_DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ucformat.exporters.base import Span


class Global(NamedTuple):
    """A class or function by its name."""

    module: str
    name: str


@dataclass(frozen=True, eq=False)
class Call:
    """The result of calling a global with these arguments; `state` is what `__setstate__` then gets."""

    function: Global
    args: tuple[Any, ...] = ()
    state: Any = None


@dataclass(frozen=True, eq=False)
class Instance:
    """An instance of a class, made without `__init__`; `state` becomes its attributes, or `__setstate__` gets it."""

    kind: Global
    state: Any


@dataclass(frozen=True, eq=False)
class Storage:
    """The elements of one or several tensors; `data` are those that are no elements of a checkpoint's tensors."""

    span: Span
    data: bytes | None = None


@dataclass(frozen=True, eq=False)
class SavedTensor:
    """A tensor whose elements are in a storage, row-major unless strides are given (all in elements)."""

    storage: Storage
    shape: tuple[int, ...]
    offset: int = 0
    strides: tuple[int, ...] | None = None
    requires_grad: bool = False


#: The classes of storages that PyTorch names after their dtypes; tensors of others have an untyped
#: storage.
_STORAGES = {
    "bool": "BoolStorage",
    "int8": "CharStorage",
    "int16": "ShortStorage",
    "int32": "IntStorage",
    "int64": "LongStorage",
    "uint8": "ByteStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "float32": "FloatStorage",
    "float64": "DoubleStorage",
    "complex64": "ComplexFloatStorage",
    "complex128": "ComplexDoubleStorage",
}
_UNTYPED = Global("torch.storage", "UntypedStorage")
_REBUILD = Global("torch._utils", "_rebuild_tensor_v2")
_REBUILD_UNTYPED = Global("torch._utils", "_rebuild_tensor_v3")
_ORDERED = Global("collections", "OrderedDict")
_ENCODE = Global("_codecs", "encode")
_SET = Global("builtins", "set")
_COMPLEX = Global("builtins", "complex")

#: What the pickles of all exporters may name.
ALLOWED = {
    _UNTYPED,
    _REBUILD,
    _REBUILD_UNTYPED,
    _ORDERED,
    _ENCODE,
    _SET,
    _COMPLEX,
    Global("torch", "Size"),
    Global("torch", "device"),
    *(Global("torch", name) for name in _STORAGES.values()),
    *(Global("torch", name) for name in TORCH_SAVE_DTYPES),
}


def dump(value: Any, locate: Callable[[Storage], str]) -> bytes:
    """Pickle a value.

    Args:
        value: `None`, booleans, numbers, text, bytes, lists, tuples, sets and dictionaries of such
            values, ordered ones too; and instances of the classes above.
    """
    writer = _Writer(locate)
    writer.save(value)
    return b"\x80\2" + bytes(writer.out) + b"."


class _Writer:
    """Appends the opcodes of values to `out`; `pickletools` of the standard library describes them."""

    def __init__(self, locate: Callable[[Storage], str]) -> None:
        self.out = bytearray()
        self._locate = locate
        self._memo: dict[str | Global, int] = {}  # of those that are written once and then fetched

    def save(self, value: Any) -> None:
        """Append a value."""
        out = self.out
        match value:
            case None:
                out += b"N"
            case bool():
                out += b"\x88" if value else b"\x89"
            case Global():
                self._save_global(value)
            case Call():
                self._save_call(value.function, value.args)
                if value.state is not None:
                    self.save(value.state)
                    out += b"b"
            case Instance():
                self._save_global(value.kind)
                out += b")\x81"
                self.save(value.state)
                out += b"b"
            case SavedTensor():
                self._save_tensor(value)
            case Storage():
                self._save_storage(value)
            case OrderedDict():
                self._save_call(_ORDERED, ())
                self._save_items(value)
            case _ if (save := self._plain.get(type(value))) is not None:
                save(self, value)
            case _:
                raise UnsupportedError(
                    f"a value of type {type(value).__qualname__} is not written to a pickle"
                )

    def _fetch(self, value: str | Global) -> bool:
        """Append a value that has been appended before; False if it has not."""
        number = self._memo.get(value)
        if number is not None:
            self.out += b"j" + struct.pack("<I", number)
        return number is not None

    def _keep(self, value: str | Global) -> None:
        self._memo[value] = number = len(self._memo)
        self.out += b"r" + struct.pack("<I", number)

    def _save_global(self, value: Global) -> None:
        if value not in ALLOWED:
            raise UnsupportedError(f"{value.module}.{value.name} is not written to a pickle")
        if not self._fetch(value):
            self.out += f"c{value.module}\n{value.name}\n".encode()
            self._keep(value)

    def _save_call(self, function: Global, args: tuple[Any, ...]) -> None:
        self._save_global(function)
        self.save(args)
        self.out += b"R"

    def _save_storage(self, value: Storage) -> None:
        """As PyTorch identifies it: its kind, key, device, and size."""
        dtype = value.span.dtype
        typed = dtype in _STORAGES
        kind = Global("torch", _STORAGES[dtype]) if typed else _UNTYPED
        size = value.span.size if typed else value.span.nbytes
        self.save(("storage", kind, self._locate(value), "cpu", size))
        self.out += b"Q"

    def _save_tensor(self, value: SavedTensor) -> None:
        dtype = value.storage.span.dtype
        strides = row_major(value.shape) if value.strides is None else value.strides
        args = (
            value.storage,
            value.offset,
            value.shape,
            strides,
            value.requires_grad,
            OrderedDict[str, Any](),
        )
        if dtype in _STORAGES:
            self._save_call(_REBUILD, args)
        else:
            self._save_call(_REBUILD_UNTYPED, (*args, Global("torch", dtype)))

    def _save_int(self, value: int) -> None:
        if 0 <= value < 1 << 8:
            self.out += b"K" + value.to_bytes(1, "little")
        elif -(1 << 31) <= value < 1 << 31:
            self.out += b"J" + struct.pack("<i", value)
        else:
            # One bit more than `bit_length`, for the sign.
            data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            if len(data) >= 1 << 8:
                raise UnsupportedError(
                    f"an integer of {len(data)} bytes is not written to a pickle"
                )
            self.out += b"\x8a" + len(data).to_bytes(1, "little") + data

    def _save_float(self, value: float) -> None:
        self.out += b"G" + struct.pack(">d", value)

    def _save_text(self, value: str) -> None:
        if not self._fetch(value):
            data = value.encode("utf-8", "surrogatepass")
            self.out += b"X" + struct.pack("<I", len(data)) + data
            self._keep(value)

    def _save_bytes(self, value: bytes) -> None:
        """Append bytes, which protocol 2 spells as a text."""
        self._save_call(_ENCODE, (value.decode("latin-1"), "latin1"))

    def _save_set(self, value: set[Any]) -> None:
        self._save_call(_SET, (sorted(value, key=repr),))

    def _save_complex(self, value: complex) -> None:
        self._save_call(_COMPLEX, (value.real, value.imag))

    def _save_tuple(self, value: tuple[Any, ...]) -> None:
        self.out += b"(" if len(value) > 3 else b""
        for item in value:
            self.save(item)
        self.out += (b")", b"\x85", b"\x86", b"\x87")[len(value)] if len(value) <= 3 else b"t"

    def _save_list(self, value: list[Any]) -> None:
        self.out += b"]("
        for item in value:
            self.save(item)
        self.out += b"e"

    def _save_dict(self, value: dict[Any, Any]) -> None:
        self.out += b"}"
        self._save_items(value)

    def _save_items(self, value: Mapping[Any, Any]) -> None:
        self.out += b"("
        for key, item in value.items():
            self.save(key)
            self.save(item)
        self.out += b"u"

    _plain: ClassVar[dict[type, Callable[[_Writer, Any], None]]] = {
        int: _save_int,
        float: _save_float,
        str: _save_text,
        bytes: _save_bytes,
        set: _save_set,
        complex: _save_complex,
        tuple: _save_tuple,
        list: _save_list,
        dict: _save_dict,
    }
