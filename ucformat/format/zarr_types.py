"""The dtypes bfloat16 and float8 for zarr-python, which lacks them, under the names that TensorStore uses.

zarr-python 3.4 and later finds them through an entry point, earlier versions after
`register_zarr_dtypes()`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import ml_dtypes
import numpy as np
from zarr.core.dtype.common import HasEndianness, HasItemSize
from zarr.dtype import DataTypeValidationError, ZDType, data_type_registry

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["BFloat16", "Float8E4M3FN", "Float8E5M2", "register_zarr_dtypes"]


class _MlFloat(ZDType[Any, Any], HasItemSize):
    """A float of `ml_dtypes`, always little-endian."""

    dtype_cls: ClassVar[Any]
    scalar: ClassVar[type]
    _zarr_v3_name: ClassVar[str]

    @property
    def item_size(self) -> int:
        return int(np.dtype(self.scalar).itemsize)

    @classmethod
    def from_native_dtype(cls, dtype: np.dtype[Any]) -> Self:
        if isinstance(dtype, cls.dtype_cls):
            return cls()
        raise DataTypeValidationError(f"{dtype} is not {cls._zarr_v3_name}")

    def to_native_dtype(self) -> np.dtype[Any]:
        return np.dtype(self.scalar)

    @classmethod
    def _from_json_v2(cls, data: object) -> Self:
        raise DataTypeValidationError(f"Zarr v2 has no {cls._zarr_v3_name}: {data!r}")

    @classmethod
    def _from_json_v3(cls, data: object) -> Self:
        if data == cls._zarr_v3_name:
            return cls()
        raise DataTypeValidationError(f"{data!r} is not {cls._zarr_v3_name}")

    def to_json(self, zarr_format: int) -> Any:
        if zarr_format == 3:
            return self._zarr_v3_name
        raise ValueError(f"Zarr v2 has no {self._zarr_v3_name}")

    def _check_scalar(self, data: object) -> bool:
        try:
            self.scalar(data)
        except (TypeError, ValueError):
            return False
        return True

    def cast_scalar(self, data: object) -> Any:
        if not self._check_scalar(data):
            raise TypeError(f"{data!r} is not a {self._zarr_v3_name}")
        return self.scalar(data)

    def default_scalar(self) -> Any:
        return self.scalar(0)

    def from_json_scalar(self, data: Any, *, zarr_format: int) -> Any:  # noqa: ARG002 - zarr's signature
        """A number, a name (`NaN`, `Infinity`, `-Infinity`), or the bits in hexadecimal (`0x7fc0`)."""
        if isinstance(data, str) and data.startswith("0x"):
            return np.array(int(data, 16), f"<u{self.item_size}").view(self.scalar)[()]
        return self.cast_scalar(float(data))

    def to_json_scalar(self, data: object, *, zarr_format: int) -> float | str:  # noqa: ARG002 - zarr's signature
        value = float(self.cast_scalar(data))
        if np.isnan(value):
            return "NaN"
        if np.isinf(value):
            return "Infinity" if value > 0 else "-Infinity"
        return value


@dataclass(frozen=True, kw_only=True)
class BFloat16(_MlFloat, HasEndianness):
    """`bfloat16`. Without `HasEndianness` zarr-python writes a `bytes` codec that TensorStore refuses."""

    dtype_cls = type(np.dtype(ml_dtypes.bfloat16))
    scalar = ml_dtypes.bfloat16
    _zarr_v3_name = "bfloat16"


@dataclass(frozen=True, kw_only=True)
class Float8E4M3FN(_MlFloat):
    """`float8_e4m3fn`, as in PyTorch, and `F8_E4M3` in safetensors; it has no infinity."""

    dtype_cls = type(np.dtype(ml_dtypes.float8_e4m3fn))
    scalar = ml_dtypes.float8_e4m3fn
    _zarr_v3_name = "float8_e4m3fn"


@dataclass(frozen=True, kw_only=True)
class Float8E5M2(_MlFloat):
    """`float8_e5m2`."""

    dtype_cls = type(np.dtype(ml_dtypes.float8_e5m2))
    scalar = ml_dtypes.float8_e5m2
    _zarr_v3_name = "float8_e5m2"


_TYPES: Mapping[str, type[_MlFloat]] = {
    "bfloat16": BFloat16,
    "float8_e4m3fn": Float8E4M3FN,
    "float8_e5m2": Float8E5M2,
}


def register_zarr_dtypes() -> None:
    """Register bfloat16 and float8 with zarr-python; calling it again has no effect.

    Needs the extra `zarr`: `pip install 'ucformat[zarr]'`.
    """
    for name, cls in _TYPES.items():
        if name not in data_type_registry.contents:
            data_type_registry.register(name, cls)
