"""Tensors as bytes: dtype names, synchronization of devices, host memory, and boxes in it.

Functions of PyTorch without a device argument use the current device of the calling thread, which
in threads of a pool is the first one, and those without a stream argument its current stream. So
all functions here pass both, or wait for all streams.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from ucformat.errors import UsageError
from ucformat.schema import ITEMSIZE
from ucformat.torch.state.subclasses import own_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager


def devices_of(tensors: Iterable[torch.Tensor]) -> list[torch.device]:
    """Return the accelerator devices of tensors; copies to and from any other device are synchronous."""
    devices = dict.fromkeys(t.device for t in tensors)
    accelerator = (
        torch.accelerator.current_accelerator() if any(d.type != "cpu" for d in devices) else None
    )
    return [d for d in devices if accelerator is not None and d.type == accelerator.type]


def synchronize(tensors: Iterable[torch.Tensor]) -> None:
    """Wait for all kernels and copies of all threads and streams on the devices of tensors.

    If there are pinned tensors, waits for the current device, too, which may copy to them.
    """
    tensors = list(tensors)
    if any(t.is_cpu and t.is_pinned() for t in tensors):
        torch.accelerator.synchronize()
    for device in devices_of(tensors):
        torch.accelerator.synchronize(device)


def record_events(devices: Iterable[torch.device]) -> list[torch.Event]:
    """Record an event on the current stream of each device, to be waited for on the host.

    Devices without events are waited for at once.
    """
    events = []
    for device in devices:
        try:
            events.append(torch.accelerator.current_stream(device).record_event())
        except RuntimeError:
            torch.accelerator.synchronize(device)
    return events


@contextmanager
def own_streams(devices: Iterable[torch.device]) -> Iterator[None]:
    """Let the calling thread use a new stream on each device, so that its copies and events wait for nothing else.

    Where a device has one stream only, it stays the current one.
    """
    with ExitStack() as streams:
        for device in devices:
            with suppress(RuntimeError):
                streams.enter_context(torch.Stream(device))
        yield


def device_of_first(devices: Iterable[torch.device]) -> AbstractContextManager[object]:
    """Return a context in which the first of the devices is current, so that pinned memory is allocated for it."""
    first = next(iter(devices), None)
    return nullcontext() if first is None else torch.accelerator.device_index(first.index)


def keep_current_device() -> Callable[[], None]:
    """Return an initializer for new threads, which sets their current device to that of the calling thread."""
    if not torch.accelerator.is_available():
        return lambda: None
    index = torch.accelerator.current_device_index()
    return lambda: torch.accelerator.set_device_index(index)


@lru_cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a torch dtype."""
    name = str(dtype).removeprefix("torch.")
    if name not in ITEMSIZE:
        raise UsageError(
            f"ucformat cannot store the dtype {name!r}", hint=f"supported: {', '.join(ITEMSIZE)}"
        )
    return name


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UsageError(
            f"torch {torch.__version__} has no dtype {name!r}",
            hint="read that tensor with ucformat.open",
        )
    return dtype


def check_fillable(label: str, tensor: torch.Tensor) -> None:
    """Check that the memory of a tensor contains its values, so that it can be filled."""
    tensor = own_memory(label, tensor)
    if tensor.is_conj() or tensor.is_neg():
        kind = "conjugate" if tensor.is_conj() else "negative"
        raise UsageError(
            f"{label} is a lazy {kind}: its memory contains the values of another tensor",
            hint=(
                "use a tensor with its own memory: "
                f"tensor.resolve_{'conj' if tensor.is_conj() else 'neg'}()"
            ),
        )


def copied_to_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors on the host: those that are there themselves, row-major copies of others.

    Waits for all streams of their devices.
    """
    synchronize(tensors)
    return [t if t.device.type == "cpu" else t.contiguous().cpu() for t in tensors]
