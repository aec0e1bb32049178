"""Stand-ins for the objects in a pickle: tensors that are not read, and classes that are never imported."""

from __future__ import annotations

import math
import reprlib
import struct
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ucformat.schema import ITEMSIZE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ucformat.errors import UcformatError
    from ucformat.storage.base import ByteRange, Store


@dataclass(frozen=True, slots=True)
class Dtype:
    """A torch dtype by its name, which `schema` may lack: a tensor of such a dtype is not read."""

    name: str


@dataclass(frozen=True, slots=True)
class Storage:
    """The bytes of one or several tensors: a member of the file. `dtype` is None if each tensor has its own."""

    key: str
    dtype: str | None
    nbytes: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file, not read: `offset` and `strides` count elements of its storage.

    One that cannot be read has a `dtype` that `schema` lacks, which may end in
    a space and the reason (`refused`).
    """

    storage: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    numel: int  # elements in the whole storage

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self.size * ITEMSIZE.get(self.dtype, 1)

    @property
    def readable(self) -> bool:
        """Whether its elements can be read."""
        return self.dtype in ITEMSIZE

    def refused(self, reason: str) -> StoredTensor:
        """The same tensor, marked as one that cannot be read.

        Args:
            reason: why not, to follow its name: `is a sparse tensor`.
        """
        return self if not self.readable else replace(self, dtype=f"{self.dtype} {reason}")


@dataclass(frozen=True, slots=True)
class AttributedTensor(StoredTensor):
    """A tensor to which a program has given attributes; these are its texts."""

    attributes: Mapping[str, str] = field(default_factory=dict, compare=False)


def unknown_dtype(dtype: str) -> str:
    """Why a tensor is unreadable: it has a dtype that `schema` lacks."""
    if dtype.startswith(("qint", "quint")):
        return (
            f"is a quantized tensor ({dtype}), of which ucformat does not read scale and zero point"
        )
    return f"has the dtype {reprlib.repr(dtype)}, which ucformat does not know"


def why_refused(dtype: str) -> str:
    """Why a `StoredTensor` is unreadable."""
    return dtype.partition(" ")[2] or unknown_dtype(dtype)


@dataclass(frozen=True, slots=True)
class LocalPart:
    """What one rank has of a tensor that several share, and whether that is the whole tensor.

    `shape` is that of the whole tensor, and `spec` how a DTensor is placed: `mesh` and `placements`.
    """

    tensor: StoredTensor
    whole: bool
    shape: tuple[int, ...] = ()
    spec: Inert | None = None


@dataclass(frozen=True, slots=True)
class InertClass:
    """A class of a framework, by name only."""

    name: str


@dataclass(slots=True, eq=False)
class Inert:
    """An object of a framework: its constructor arguments, its state and, for a container, its items."""

    name: str  # the only field in the `repr`: the others may contain each other
    args: tuple[Any, ...] = field(default=(), repr=False)
    state: Any = field(default=None, repr=False)
    items: list[Any] = field(default_factory=list, repr=False)

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes in the state; none if it is something else."""
        return self.state if isinstance(self.state, dict) else {}

    def get(self, key: str, default: Any = None) -> Any:
        """An attribute in the state."""
        return self.attributes.get(key, default)


@dataclass(slots=True, eq=False)
class NdArray:
    """A NumPy array as raw bytes: `dtype` is NumPy's spelling (`<f4`) or, if little-endian, the name of a torch one."""

    dtype: str = ""
    shape: tuple[int, ...] = ()
    data: bytes = field(default=b"", repr=False)
    fortran: bool = False


@dataclass(slots=True, eq=False)
class Stream:
    """A file in memory (`io.BytesIO`): its bytes."""

    data: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class Opaque:
    """A value without a JSON form, as a pickle that is never opened here."""

    data: bytes


@dataclass(slots=True, eq=False)
class NumpyDtype:
    """A numpy dtype."""

    code: str
    order: str = "<"

    @property
    def text(self) -> str:
        """NumPy's spelling, with the byte order: `<f4`."""
        if self.code[:1] in "<>=|":
            return self.code
        return (self.order if self.order in "<>" else "") + self.code


@dataclass(frozen=True, slots=True)
class NumpyScalar:
    """A NumPy scalar: the name of its class, and its value as Python has it."""

    name: str
    value: Any


@dataclass(frozen=True, slots=True)
class SmallTensor:
    """A tensor in memory: its dtype by name, and its row-major bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class NamedFields:
    """A named tuple: the name of its class, and its fields in order."""

    name: str
    fields: tuple[str, ...]
    items: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class OfClass:
    """A member of an enumeration, or a value of a class derived from a plain one: its class, and the plain value."""

    name: str
    value: Any


class Size(tuple[int, ...]):
    """A `torch.Size`."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Maker:
    """A function of this package that replaces the named global.

    Attributes:
        hashes: whether it hashes what its arguments contain.
    """

    name: str
    make: Callable[..., Any]
    hashes: bool = False


@dataclass(frozen=True, slots=True)
class StorageType:
    """The class of a storage, which determines its dtype."""

    dtype: str | None


_MAX_OPAQUE = 16 << 20  # bytes of a file that is kept as an opaque value


class OpaqueFile:
    """A file of `torch.save` whose pickle is not allowed or not supported: its bytes can be kept, but not its value."""

    def __init__(self, store: Store, file: ByteRange, error: UcformatError) -> None:
        self.key = file.file
        self._store, self._file, self._error = store, file, error

    @property
    def value(self) -> Any:
        """Raises the error for which the file was refused."""
        raise self._error

    def opaque(self) -> Opaque:
        """Read the file as an opaque value."""
        if self._file.nbytes > _MAX_OPAQUE:
            raise self._error
        return opaque_file(self._store.read(*self._file))


def opaque_file(data: bytes) -> Opaque:
    """Create a pickle that is `functools.partial(torch.load, weights_only=False)(io.BytesIO(data))`.

    A file of torch.save is a zip archive; an opaque value is a pickle, which `trust=True` opens. It
    is assembled here without `pickle`, which would need torch.
    """
    load = b"ctorch\nload\n"
    partial = (
        b"cfunctools\npartial\n("
        + load
        + b"tR("
        + load
        + b"(t}X\x0c\x00\x00\x00weights_only\x89sNtb"
    )
    file = b"cio\nBytesIO\n(B" + struct.pack("<I", len(data)) + data + b"tR"
    return Opaque(b"\x80\x03" + partial + b"(" + file + b"tR.")
