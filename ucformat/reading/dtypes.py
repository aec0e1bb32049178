"""NumPy dtypes for the names in `schema`.

Those of `ml_dtypes` are used where it has one of the name. Of other dtypes an element is an
unsigned integer with its bits, or a signed one for the integers that PyTorch stores in a byte;
NumPy's dtype then has the name as metadata.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import ml_dtypes
import numpy as np

from ucformat.errors import UsageError
from ucformat.schema import FLOATS, ITEMSIZE, ZARR_DTYPES

if TYPE_CHECKING:
    from collections.abc import Mapping

_METADATA = "ucformat"


def _numpy_dtype(name: str, itemsize: int) -> np.dtype[np.generic]:
    if name in ZARR_DTYPES and hasattr(np, name):
        return np.dtype(name).newbyteorder("<")
    if hasattr(ml_dtypes, name):
        return np.dtype(cast("type[np.generic]", getattr(ml_dtypes, name)))
    kind = "i" if name.startswith("int") else "u"
    bits: np.dtype[np.generic] = np.dtype(f"<{kind}{itemsize}", metadata={_METADATA: name})
    return bits


_NUMPY_DTYPES = {name: _numpy_dtype(name, itemsize) for name, itemsize in ITEMSIZE.items()}


def numpy_dtype(name: str) -> np.dtype[np.generic]:
    """The little-endian NumPy dtype of a name."""
    if name not in ITEMSIZE:
        raise UsageError(f"unknown dtype {name!r}", hint=f"known are {', '.join(ITEMSIZE)}")
    return _NUMPY_DTYPES[name]


def dtype_name(dtype: np.dtype[np.generic] | type) -> str:
    """The name of a NumPy dtype."""
    of_numpy = np.dtype(dtype)
    metadata: Mapping[str, Any] = of_numpy.metadata or {}
    name: str = metadata.get(_METADATA, of_numpy.name)
    if name not in ITEMSIZE:
        raise UsageError(
            f"ucformat cannot store the dtype {name!r}", hint=f"known are {', '.join(ITEMSIZE)}"
        )
    return name


def zarr_dtype(name: str) -> str:
    """Zarr's `data_type`: the dtype, or if Zarr has none of the name the unsigned integer of the same size."""
    return name if name in ZARR_DTYPES else f"uint{8 * ITEMSIZE[name]}"


def fill_value(name: str) -> object:
    """Zarr's `fill_value` in JSON: NaN if the dtype has it, so that no reader takes missing data for zeros."""
    if name not in ZARR_DTYPES:
        return 0
    if name.startswith("complex"):
        return ["NaN", "NaN"]
    if name in FLOATS:
        return "NaN"
    return False if name == "bool" else 0
