"""Copies a local state to host memory that another process can map; the memory is reused."""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from ucformat.geometry.box import row_major
from ucformat.geometry.tensor import Piece
from ucformat.storage.strided import fill
from ucformat.torch.state.elements import Slots, dense_elements, elements_of, host_memory, map_shared
from ucformat.torch.state.memory import devices_of, synchronize

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import ThreadPoolExecutor

    from ucformat.geometry.tensor import TensorInfo
    from ucformat.torch.state.elements import Memory
    from ucformat.torch.state.local import LocalShard, LocalState

_ALIGNMENT = 64  # bytes
_COPY_BYTES = 8 << 20  # that one thread copies at a time
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices


class HostBuffer:
    """Anonymous shared memory, pinned when a tensor on a GPU is first copied to it, for full speed."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        self.fd = os.memfd_create("ucformat-stage", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, self.nbytes)
        self.memory = map_shared(self.fd, self.nbytes)
        self._pinned_for: torch.device | None = None
        self._refused = False

    def pin(self, device: torch.device) -> None:
        """Pin the memory for all CUDA devices; if the driver refuses, copies are slower."""
        if self._pinned_for is not None or self._refused:
            return
        with torch.cuda.device(device):
            done = torch.cuda.cudart().cudaHostRegister(self.memory.ctypes.data, self.nbytes, _PORTABLE)
        if int(done):
            self._refused = True
            _clear_error(device)
        else:
            self._pinned_for = device

    def close_after_fork(self) -> None:
        """Release the memory in a forked child."""
        os.close(self.fd)
        self.memory = np.empty(0, np.uint8)

    def close(self) -> None:
        """Release the memory, which must not be in use any more."""
        if self._pinned_for is not None:
            with torch.cuda.device(self._pinned_for):
                done = torch.cuda.cudart().cudaHostUnregister(self.memory.ctypes.data)
            if int(done):
                _clear_error(self._pinned_for)
        self.memory = np.empty(0, np.uint8)
        os.close(self.fd)


def _clear_error(device: torch.device) -> None:
    """Reset the last error of the CUDA runtime, which the next kernel of the training would raise as its own.

    PyTorch has no function for this, but its check after a kernel both raises and resets the error.
    """
    with suppress(RuntimeError):
        torch.ones(1, device=device)


def room_for(state: LocalState) -> int:
    """Return the size of the buffer that `stage` needs for a state, in bytes."""
    return sum(-(-_nbytes(t) // _ALIGNMENT) * _ALIGNMENT for t in state.tensors)


def _nbytes(t: LocalShard) -> int:
    return t.nbytes if t.tensor.device.type == "cpu" else t.tensor.numel() * t.info.itemsize


def stage(
    state: LocalState, buffer: HostBuffer, pool: ThreadPoolExecutor
) -> tuple[tuple[tuple[TensorInfo, tuple[Piece, ...]], ...], Slots]:
    """Copy the tensors of a state to a buffer.

    Of a tensor on the host the pieces are copied, each in row-major order; of a tensor on a device the whole local
    tensor. Kernels of the training are waited for before, and copies from devices after.

    Returns:
        the tensors with the pieces that describe them in the buffer, and their slots.
    """
    held = [t.tensor for t in state.tensors]
    synchronize(held)
    devices = devices_of(held)
    if devices and devices[0].type == "cuda":
        buffer.pin(devices[0])
    try:
        return _copy_all(state, buffer, pool, devices)
    finally:  # also if a copy failed: the buffer may be reused
        synchronize(held)


def _copy_all(
    state: LocalState, buffer: HostBuffer, pool: ThreadPoolExecutor, devices: Sequence[torch.device]
) -> tuple[tuple[tuple[TensorInfo, tuple[Piece, ...]], ...], Slots]:
    out: list[tuple[TensorInfo, tuple[Piece, ...]]] = []
    slots: list[tuple[int, int]] = []
    copies: list[Callable[[], None]] = []
    at = 0
    for t in state.tensors:
        end = at + _nbytes(t)
        memory = buffer.memory[at:end]
        if t.tensor.device.type == "cpu":
            out.append((t.info, _copy_pieces(t, memory, copies)))
        else:
            target = torch.from_numpy(memory).view(t.tensor.dtype).view(t.tensor.shape)
            target.copy_(t.tensor, non_blocking=t.tensor.device in devices)
            out.append((t.info, t.pieces))
        slots.append((at, end))
        at = -(-end // _ALIGNMENT) * _ALIGNMENT
    for done in [pool.submit(copy) for copy in copies]:
        done.result()
    return tuple(out), tuple(slots)


def _copy_pieces(t: LocalShard, memory: Memory, copies: list[Callable[[], None]]) -> tuple[Piece, ...]:
    """Append functions that copy a tensor's pieces to memory, and return the pieces that describe it there."""
    source, itemsize = host_memory(t.tensor), t.info.itemsize
    pieces: list[Piece] = []
    at = 0
    for p in t.pieces:
        dense = row_major(p.box.shape)
        pieces.append(Piece(p.box, at // itemsize, dense))
        nbytes = p.box.size * itemsize
        to = memory[at : at + nbytes]
        if all(n == 1 or s == d for n, s, d in zip(p.box.shape, p.strides, dense, strict=True)):
            begin = p.offset * itemsize
            copies += _copies(to, source[begin : begin + nbytes])
        else:
            own = dense_elements(p.box.shape, to, itemsize)
            copies.append(partial(np.copyto, own, elements_of(p, source, itemsize)))
        at += nbytes
    return tuple(pieces)


def _copies(to: Memory, source: Memory) -> Sequence[Callable[[], None]]:
    blocks = (slice(i, i + _COPY_BYTES) for i in range(0, len(to), _COPY_BYTES))
    return [partial(fill, [to[block].data], source[block].data) for block in blocks]
