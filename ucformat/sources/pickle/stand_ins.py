"""What stands for the objects in a pickle: tensors that are not read, and classes that are never imported."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ucformat.schema.dtypes import ITEMSIZE

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "Dtype",
    "Inert",
    "InertClass",
    "Maker",
    "NdArray",
    "NumpyDtype",
    "Opaque",
    "Storage",
    "StorageType",
    "StoredTensor",
    "Stream",
]


@dataclass(frozen=True, slots=True)
class Dtype:
    """A torch dtype, by the name that `schema.dtypes` gives it."""

    name: str


@dataclass(frozen=True, slots=True)
class Storage:
    """The bytes of one or several tensors: a member of the file. `dtype` is None where the tensor says it."""

    key: str
    dtype: str | None
    nbytes: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor that lies in a file and was not read: `offset` and `strides` count elements of its storage."""

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
        return self.size * ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class InertClass:
    """A class of a framework, by name only."""

    name: str


@dataclass(slots=True, eq=False)
class Inert:
    """An object of a framework: what it was made with, its state, and what it held if it was a container."""

    name: str  # alone in the `repr`: the others may hold each other, and be shared without end
    args: tuple[Any, ...] = field(default=(), repr=False)
    state: Any = field(default=None, repr=False)
    items: list[Any] = field(default_factory=list, repr=False)

    def get(self, key: str, default: Any = None) -> Any:
        """An attribute out of the state."""
        return self.state.get(key, default) if isinstance(self.state, dict) else default


@dataclass(slots=True, eq=False)
class NdArray:
    """An array, its bytes kept as they are: `dtype` is numpy's spelling (`<f4`), or for little-endian a torch name."""

    dtype: str = ""
    shape: tuple[int, ...] = ()
    data: bytes = field(default=b"", repr=False)
    fortran: bool = False


@dataclass(slots=True, eq=False)
class Stream:
    """A file in memory (`io.BytesIO`): its bytes, of which nothing is known."""

    data: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class Opaque:
    """A value that has no JSON form, as a pickle that is never opened here."""

    data: bytes


@dataclass(slots=True, eq=False)
class NumpyDtype:
    """A numpy dtype under construction."""

    code: str
    order: str = "<"


@dataclass(frozen=True, slots=True)
class Maker:
    """A function of ours that does what the named global would have done."""

    name: str
    make: Callable[..., Any]


@dataclass(frozen=True, slots=True)
class StorageType:
    """The class of a storage: names its dtype."""

    dtype: str | None
