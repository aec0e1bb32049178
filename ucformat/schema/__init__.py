"""Documents that cross a boundary, as pydantic models, and their JSON Schemas; and the dtypes that tensors may have."""

from __future__ import annotations

__all__ = ["FLOATS", "ITEMSIZE"]

#: Bytes of one element, by the name of the dtype, which is that of Zarr v3 and TensorStore.
ITEMSIZE: dict[str, int] = {
    "bool": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}

FLOATS = frozenset(n for n in ITEMSIZE if n.startswith(("float", "bfloat", "complex")))
