"""Tensors as bytes: dtypes by name, devices that work beside the program, host memory, and boxes in it.

PyTorch's calls that name no device mean the calling thread's current one, which in a pool's thread is the first, and
those that name no stream mean that thread's; so every call here names both, or waits for all streams.
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
    """The accelerator's devices on which tensors lie. Copies to and from any other device are done when they return."""
    found = dict.fromkeys(t.device for t in tensors)
    accelerator = torch.accelerator.current_accelerator() if any(d.type != "cpu" for d in found) else None
    return [d for d in found if accelerator is not None and d.type == accelerator.type]


def synchronize(tensors: Iterable[torch.Tensor]) -> None:
    """Wait for all that any thread has begun, in any stream, on the devices of these tensors.

    Pinned memory may be the target of a copy from the current device, which is waited for then.
    """
    tensors = list(tensors)
    devices = devices_of(tensors)
    if not devices and any(t.device.type == "cpu" and t.is_pinned() for t in tensors):
        torch.accelerator.synchronize()
    for device in devices:
        torch.accelerator.synchronize(device)


def record_events(devices: Iterable[torch.device]) -> list[torch.Event]:
    """Events on these devices, each behind all that this thread has begun there; they are waited for on the host."""
    return [torch.accelerator.current_stream(device).record_event() for device in devices]


def device_of_first(devices: Iterable[torch.device]) -> AbstractContextManager[object]:
    """Make the first of the devices the current one, on which pinned memory is allocated; none leaves it as it is."""
    first = next(iter(devices), None)
    return nullcontext() if first is None else torch.accelerator.device_index(first.index)


def keep_current_device() -> Callable[[], None]:
    """What a new thread calls first, so that its current device is that of the thread which makes it."""
    if not torch.accelerator.is_available():
        return lambda: None
    index = torch.accelerator.current_device_index()
    return lambda: torch.accelerator.set_device_index(index)


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


#: Bytes of a block, unless its maker says otherwise.
BLOCK_BYTES = 4 << 20


_UNITS = {n: np.dtype(f"V{n}") if n > 8 else np.dtype(f"u{n}") for n in (1, 2, 4, 8, 16)}


def elements_of(piece: Piece, memory: Memory, itemsize: int) -> Elements:
    """A piece as an array of whole elements, whatever their type.

    Args:
        piece: the piece.
        memory: the host memory of its tensor, which the array shares.
        itemsize: bytes of an element.
    """
    strides = tuple(s * itemsize for s in piece.strides)
    return np.ndarray(piece.box.shape, _UNITS[itemsize], memory, piece.offset * itemsize, strides)


def dense_elements(shape: tuple[int, ...], memory: Memory, itemsize: int) -> Elements:
    """An array of whole elements that is at the beginning of `memory`, in row-major order."""
    return np.ndarray(shape, _UNITS[itemsize], memory)


def elements_within(elements: Elements, of: Box, box: Box) -> Elements:
    """The part of an array for a box, where the array holds the box `of`."""
    index: tuple[Any, ...] = tuple(
        slice(a - b, a - b + n) for a, b, n in zip(box.start, of.start, box.shape, strict=True)
    )
    return elements[(..., *index)]  # without `...` a 0-d array would give a scalar


def row_major_bytes(elements: Elements) -> Memory:
    """The bytes of an array in row-major order: its own memory where it is contiguous, else a copy."""
    return np.ascontiguousarray(elements).reshape(-1).view(np.uint8)


def copy_common(source: Elements, source_box: Box, target: Elements, target_box: Box) -> None:
    """Copy the elements that two boxes have in common, from the array of one to that of the other."""
    common = source_box.intersect(target_box)
    if common is not None:
        elements_within(target, target_box, common)[...] = elements_within(source, source_box, common)


def blocks_of(box: Box, itemsize: int, most: int = BLOCK_BYTES) -> Sequence[Box]:
    """A box cut in blocks that follow each other in its row-major order, each of at most `most` bytes."""
    if box.size * itemsize <= most or not box.shape:
        return [box] if box.size else []
    row = box.size // box.shape[0] * itemsize
    rows = max(1, most // row)
    out: list[Box] = []
    for first in range(0, box.shape[0], rows):
        count = min(rows, box.shape[0] - first)
        cut = Box((box.start[0] + first, *box.start[1:]), (count, *box.shape[1:]))
        if count == 1 and row > most:  # cut the row itself
            below = blocks_of(Box(cut.start[1:], cut.shape[1:]), itemsize, most)
            out += [Box((cut.start[0], *b.start), (1, *b.shape)) for b in below]
        else:
            out.append(cut)
    return out
