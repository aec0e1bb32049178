"""Devices that work beside the program: what is begun on one is waited for on that one.

PyTorch's calls that name no device mean the calling thread's current one, which in a pool's thread is the first, and
those that name no stream mean that thread's; so every call here names both, or waits for all streams.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager

__all__ = ["devices_of", "marks", "on", "same_device", "synchronize"]


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


def marks(devices: Iterable[torch.device]) -> list[torch.Event]:
    """Events on these devices, each behind all that this thread has begun there; they are waited for on the host."""
    return [torch.accelerator.current_stream(device).record_event() for device in devices]


def on(devices: Iterable[torch.device]) -> AbstractContextManager[object]:
    """Make the first of the devices the current one, on which pinned memory is allocated; none leaves it as it is."""
    first = next(iter(devices), None)
    return nullcontext() if first is None else torch.accelerator.device_index(first.index)


def same_device() -> Callable[[], None]:
    """What a new thread calls first, so that its current device is that of the thread which makes it."""
    if not torch.accelerator.is_available():
        return lambda: None
    index = torch.accelerator.current_device_index()
    return lambda: torch.accelerator.set_device_index(index)
