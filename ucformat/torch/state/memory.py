"""Tensors as bytes: dtype names, synchronization of devices, host memory, and boxes in it.

Functions of PyTorch without a device argument use the current device of the calling thread, which in threads of a pool
is the first one, and those without a stream argument its current stream. So all functions here pass both, or wait for
all streams.
"""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from typing import TYPE_CHECKING

import numpy as np
import torch

from ucformat.errors import UsageError
from ucformat.geometry.box import Box
from ucformat.schema.dtypes import ITEMSIZE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager
    from typing import Any

    from numpy.typing import NDArray

    from ucformat.geometry.tensor import Piece

    Memory = NDArray[np.uint8]
    Elements = NDArray[np.generic]

__all__ = [
    "blocks_of",
    "check_fillable",
    "copied_to_host",
    "copy_common",
    "dense_elements",
    "device_of_first",
    "devices_of",
    "dtype_name",
    "elements_of",
    "elements_within",
    "host_memory",
    "keep_current_device",
    "record_events",
    "row_major_bytes",
    "span",
    "synchronize",
    "torch_dtype",
]


def devices_of(tensors: Iterable[torch.Tensor]) -> list[torch.device]:
    """Return the accelerator devices of tensors; copies to and from any other device are synchronous.

    Args:
        tensors: on any devices.
    """
    found = dict.fromkeys(t.device for t in tensors)
    accelerator = torch.accelerator.current_accelerator() if any(d.type != "cpu" for d in found) else None
    return [d for d in found if accelerator is not None and d.type == accelerator.type]


def synchronize(tensors: Iterable[torch.Tensor]) -> None:
    """Wait for all kernels and copies of all threads and streams on the devices of tensors.

    If there are pinned tensors and none on a device, waits for the current device, which may copy to them.

    Args:
        tensors: on any devices.
    """
    tensors = list(tensors)
    devices = devices_of(tensors)
    if not devices and any(t.device.type == "cpu" and t.is_pinned() for t in tensors):
        torch.accelerator.synchronize()
    for device in devices:
        torch.accelerator.synchronize(device)


def record_events(devices: Iterable[torch.device]) -> list[torch.Event]:
    """Record an event on the current stream of each device, to be waited for on the host.

    Args:
        devices: of the accelerator.
    """
    return [torch.accelerator.current_stream(device).record_event() for device in devices]


def device_of_first(devices: Iterable[torch.device]) -> AbstractContextManager[object]:
    """Return a context in which the first of the devices is current, so that pinned memory is allocated for it.

    Args:
        devices: of the accelerator; if there are none, the current device stays.
    """
    first = next(iter(devices), None)
    return nullcontext() if first is None else torch.accelerator.device_index(first.index)


def keep_current_device() -> Callable[[], None]:
    """Return an initializer for new threads, which sets their current device to that of the calling thread."""
    if not torch.accelerator.is_available():
        return lambda: None
    index = torch.accelerator.current_device_index()
    return lambda: torch.accelerator.set_device_index(index)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a torch dtype.

    Args:
        dtype: the torch dtype.

    Raises:
        UsageError: it cannot be stored.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in ITEMSIZE:
        raise UsageError(f"ucformat cannot store the dtype {name!r}", hint=f"supported: {', '.join(ITEMSIZE)}")
    return name


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a name.

    Args:
        name: of a stored dtype.

    Raises:
        UsageError: this version of torch does not have it.
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise UsageError(f"torch {torch.__version__} has no dtype {name!r}", hint="read that tensor with ucformat.open")
    return found


def check_fillable(label: str, tensor: torch.Tensor) -> None:
    """Check that the memory of a tensor contains its values, so that it can be filled.

    Args:
        label: names the tensor in the error.
        tensor: the tensor.

    Raises:
        UsageError: it is a lazy conjugate or negative of another tensor.
    """
    if tensor.is_conj() or tensor.is_neg():
        kind = "conjugate" if tensor.is_conj() else "negative"
        raise UsageError(
            f"{label} is a lazy {kind}: its memory contains the values of another tensor",
            hint=f"use a tensor with its own memory: tensor.resolve_{'conj' if tensor.is_conj() else 'neg'}()",
        )


def copied_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the host: the tensor itself if it is there, else a row-major copy.

    Waits for all streams of its device.

    Args:
        tensor: on any device.
    """
    synchronize([tensor])
    return tensor if tensor.device.type == "cpu" else tensor.contiguous().cpu()


def span(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> int:
    """Return the bytes from the first element of a strided tensor to the end of the last.

    Args:
        shape: of the tensor.
        strides: in elements.
        itemsize: bytes of an element.
    """
    if 0 in shape:
        return 0
    return (sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1) * itemsize


def host_memory(tensor: torch.Tensor) -> Memory:
    """Return all bytes that a tensor on the host spans, from its first element, without a copy.

    Args:
        tensor: on the host; it is kept alive.
    """
    nbytes = span(tensor.shape, tensor.stride(), tensor.element_size())
    if not nbytes:
        return np.empty(0, np.uint8)
    raw = (ctypes.c_uint8 * nbytes).from_address(tensor.data_ptr())
    raw.owner = tensor  # type: ignore[attr-defined] # kept alive with the array
    return np.frombuffer(memoryview(raw), np.uint8)


#: The default maximum size of a block.
BLOCK_BYTES = 4 << 20


_UNITS = {n: np.dtype(f"V{n}") if n > 8 else np.dtype(f"u{n}") for n in (1, 2, 4, 8, 16)}


def elements_of(piece: Piece, memory: Memory, itemsize: int) -> Elements:
    """Return a piece as an array of elements of an untyped dtype.

    Args:
        piece: the piece.
        memory: the host memory of its tensor, which the array shares.
        itemsize: bytes of an element.
    """
    strides = tuple(s * itemsize for s in piece.strides)
    return np.ndarray(piece.box.shape, _UNITS[itemsize], memory, piece.offset * itemsize, strides)


def dense_elements(shape: tuple[int, ...], memory: Memory, itemsize: int) -> Elements:
    """Return the row-major array of elements at the beginning of a memory.

    Args:
        shape: of the array.
        memory: which the array shares.
        itemsize: bytes of an element.
    """
    return np.ndarray(shape, _UNITS[itemsize], memory)


def elements_within(elements: Elements, of: Box, box: Box) -> Elements:
    """Return the part of an array for a box, a view.

    Args:
        elements: the array.
        of: the box of the whole array.
        box: the wanted box, inside `of`.
    """
    index: tuple[Any, ...] = tuple(
        slice(a - b, a - b + n) for a, b, n in zip(box.start, of.start, box.shape, strict=True)
    )
    return elements[(..., *index)]  # without `...` a 0-d array would give a scalar


def row_major_bytes(elements: Elements) -> Memory:
    """Return the bytes of an array in row-major order: a view if it is contiguous, else a copy.

    Args:
        elements: the array.
    """
    return np.ascontiguousarray(elements).reshape(-1).view(np.uint8)


def copy_common(source: Elements, source_box: Box, target: Elements, target_box: Box) -> None:
    """Copy the elements that two boxes have in common.

    Args:
        source: the array to copy from.
        source_box: its box.
        target: the array to copy to.
        target_box: its box.
    """
    common = source_box.intersect(target_box)
    if common is not None:
        elements_within(target, target_box, common)[...] = elements_within(source, source_box, common)


def blocks_of(box: Box, itemsize: int, most: int = BLOCK_BYTES) -> Sequence[Box]:
    """Split a box into blocks that are consecutive in its row-major order.

    Args:
        box: the box.
        itemsize: bytes of an element.
        most: the maximum size of a block in bytes.
    """
    if box.size * itemsize <= most or not box.shape:
        return [box] if box.size else []
    row = box.size // box.shape[0] * itemsize
    rows = max(1, most // row)
    out: list[Box] = []
    for first in range(0, box.shape[0], rows):
        count = min(rows, box.shape[0] - first)
        cut = Box((box.start[0] + first, *box.start[1:]), (count, *box.shape[1:]))
        if count == 1 and row > most:  # split the row itself
            below = blocks_of(Box(cut.start[1:], cut.shape[1:]), itemsize, most)
            out += [Box((cut.start[0], *b.start), (1, *b.shape)) for b in below]
        else:
            out.append(cut)
    return out
