"""The bytes of torch tensors: dtypes by name, and host memory as NumPy sees it."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np
import torch

from ucformat.errors import UsageError
from ucformat.schema.dtypes import ITEMSIZE
from ucformat.torch.devices import synchronize

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Memory = NDArray[np.uint8]

__all__ = ["check_fillable", "copied_to_host", "dtype_name", "host_memory", "span", "torch_dtype"]


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a torch dtype; UsageError where it cannot be stored."""
    name = str(dtype).removeprefix("torch.")
    if name not in ITEMSIZE:
        raise UsageError(f"ucformat cannot store the dtype {name!r}", hint=f"known are {', '.join(ITEMSIZE)}")
    return name


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of this name."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise UsageError(f"torch {torch.__version__} has no dtype {name!r}", hint="read that tensor by ucformat.open")
    return found


def check_fillable(label: str, tensor: torch.Tensor) -> None:
    """UsageError for a tensor whose memory holds other values than it shows: a lazy conjugate or negative."""
    if tensor.is_conj() or tensor.is_neg():
        what = "conjugate" if tensor.is_conj() else "negative"
        raise UsageError(
            f"{label} is a lazy {what}: its memory belongs to another tensor, of other values",
            hint=f"give a tensor with memory of its own: tensor.resolve_{'conj' if tensor.is_conj() else 'neg'}()",
        )


def copied_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself where it lies on the host; else a copy there, in row-major order.

    What was begun on its device is waited for, whatever stream it is in.
    """
    synchronize([tensor])
    return tensor if tensor.device.type == "cpu" else tensor.contiguous().cpu()


def span(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> int:
    """Bytes from the first element of a strided tensor to the end of its last; `strides` are in elements."""
    if 0 in shape:
        return 0
    return (sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1) * itemsize


def host_memory(tensor: torch.Tensor) -> Memory:
    """All bytes that a tensor in host memory spans, as one writable run that begins at its first element.

    It is the tensor's own memory, not a copy, and keeps the tensor alive.
    """
    nbytes = span(tensor.shape, tensor.stride(), tensor.element_size())
    if not nbytes:
        return np.empty(0, np.uint8)
    raw = (ctypes.c_uint8 * nbytes).from_address(tensor.data_ptr())
    raw.owner = tensor  # type: ignore[attr-defined] # it lives as long as what is made of it
    return np.frombuffer(memoryview(raw), np.uint8)
