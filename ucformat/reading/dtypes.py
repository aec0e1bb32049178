"""NumPy dtypes for the names in `schema.tensors`; bfloat16 and float8 come from `ml_dtypes`."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from ucformat.errors import UsageError
from ucformat.schema import FLOATS, ITEMSIZE

__all__ = ["dtype_name", "fill_value", "numpy_dtype"]

_EXTRA = {n: np.dtype(getattr(ml_dtypes, n)) for n in ("bfloat16", "float8_e4m3fn", "float8_e5m2")}


def numpy_dtype(name: str) -> np.dtype[np.generic]:
    """The little-endian NumPy dtype of a name.

    Args:
        name: a name of `schema.tensors`.

    Raises:
        UsageError: the name is unknown.
    """
    if name not in ITEMSIZE:
        raise UsageError(f"unknown dtype {name!r}", hint=f"known are {', '.join(ITEMSIZE)}")
    return _EXTRA[name] if name in _EXTRA else np.dtype(name).newbyteorder("<")


def dtype_name(dtype: np.dtype[np.generic] | type) -> str:
    """The name of a NumPy dtype.

    Args:
        dtype: the dtype, of either byte order.

    Raises:
        UsageError: ucformat cannot store the dtype.
    """
    name = np.dtype(dtype).name
    if name not in ITEMSIZE:
        raise UsageError(f"ucformat cannot store the dtype {name!r}", hint=f"known are {', '.join(ITEMSIZE)}")
    return name


def fill_value(name: str) -> object:
    """Zarr's `fill_value` in JSON: NaN if the dtype has it, so that no reader takes missing data for zeros.

    Args:
        name: a name of `schema.tensors`.
    """
    if name.startswith("complex"):
        return ["NaN", "NaN"]
    if name in FLOATS:
        return "NaN"
    return False if name == "bool" else 0
