"""Tensors whose values are computed when they are read: casts and means, as files that no disk has.

A computed tensor lies, row-major, in a file of its own of a `ComputedStore`; a range of that file is made by reading
the same range of its inputs. So planning, reading and converting need not know of it; what a plan counts as read is
what the computed file gives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ucformat.errors import UsageError
from ucformat.geometry.box import Box, row_major
from ucformat.geometry.tensor import Extent
from ucformat.reading.dtypes import numpy_dtype
from ucformat.reading.read import read_flat
from ucformat.storage.base import HIDDEN, Info, check_range
from ucformat.storage.wrappers import SyntheticStore, WrappedStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import Any

    from numpy.typing import NDArray

    from ucformat.geometry.tensor import TensorInfo, Tiles
    from ucformat.storage.base import Store
    from ucformat.views.table import Formula

__all__ = ["ComputedFile", "ComputedStore", "computed_extent", "file_name", "inputs_of"]

_PREFIX = f"{HIDDEN}computed/"  # no file of a checkpoint can be called so


@dataclass(frozen=True, slots=True)
class ComputedFile:
    """A computed tensor, and how the extents of its inputs are found."""

    formula: Formula
    inputs: tuple[Callable[[], Iterable[Extent | Tiles]], ...]


def file_name(level: int, number: int) -> str:
    """The key of a computed tensor's file; views of views, which share a store, are of different levels."""
    return f"{_PREFIX}{level}/{number}"


def computed_extent(info: TensorInfo, file: str) -> Extent:
    """Where a computed tensor lies."""
    return Extent(Box.whole(info.shape), file, 0, row_major(info.shape, info.itemsize))


def inputs_of(store: Store, key: str) -> Iterator[tuple[TensorInfo, Iterable[Extent | Tiles]]] | None:
    """What a file is computed from: tensors and their extents; None if it is not computed."""
    while isinstance(store, WrappedStore):
        found = store.computed(key) if isinstance(store, ComputedStore) else None
        if found is not None:
            return ((v.info, extents()) for v, extents in zip(found.formula.inputs, found.inputs, strict=True))
        store = store.inner
    return None


class ComputedStore(SyntheticStore):
    """A store with computed files besides its own."""

    def __init__(self, inner: Store, files: Mapping[str, ComputedFile]) -> None:
        super().__init__(inner)
        self._files = dict(files)

    def computed(self, key: str) -> ComputedFile | None:
        """The file of this key, if it is one of these."""
        return self._files.get(key)

    def _holds(self, key: str) -> bool:
        return key in self._files

    def _info(self, key: str) -> Info:
        return Info(key, self._files[key].formula.info.nbytes, "computed")

    def _content(self, key: str, offset: int, nbytes: int) -> memoryview:
        file = self._files[key]
        info, unit = file.formula.info, file.formula.info.itemsize
        check_range(str(info.key), offset, nbytes, info.nbytes)
        first, last = offset // unit, -(-(offset + nbytes) // unit)
        arrays = [
            read_flat(self, view.info, extents(), first, last)
            for view, extents in zip(file.formula.inputs, file.inputs, strict=True)
        ]
        made = _OPERATIONS[file.formula.operation](arrays, info)
        return made.view(np.uint8)[offset - first * unit :][:nbytes].data


def _cast(arrays: Sequence[NDArray[Any]], info: TensorInfo) -> NDArray[Any]:
    """Rounded to nearest, ties to even; UsageError where a finite value would become infinite or no number."""
    (array,) = arrays
    with np.errstate(over="ignore", invalid="ignore"):
        out = array.astype(numpy_dtype(info.dtype))
        lost = np.isfinite(array) & ~np.isfinite(out)
    if lost.any():
        raise UsageError(
            f"{info.key}: the value {array[lost][0]} does not fit {info.dtype}",
            hint="cast to a dtype of a larger range",
        )
    return out


def _mean(arrays: Sequence[NDArray[Any]], info: TensorInfo) -> NDArray[Any]:
    """Added up in order, in float32 (float64 where the tensors are), and divided by their number."""
    wide = np.result_type(np.float32, arrays[0].dtype) if arrays[0].dtype == np.float64 else np.dtype(np.float32)
    total = arrays[0].astype(wide)
    for array in arrays[1:]:
        total += array.astype(wide)
    return (total / wide.type(len(arrays))).astype(numpy_dtype(info.dtype))


_OPERATIONS = {"cast": _cast, "mean": _mean}
