"""Copies a local state to host memory that another process can map; the memory is kept and used again."""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import torch

from ucformat.geometry.box import row_major
from ucformat.geometry.tensor import Piece
from ucformat.torch.state.memory import dense_elements, devices_of, elements_of, host_memory, synchronize

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import ThreadPoolExecutor

    from numpy.typing import NDArray

    from ucformat.geometry.tensor import TensorInfo
    from ucformat.torch.state.local import LocalShard, LocalState
    from ucformat.torch.state.memory import Memory

__all__ = ["HostBuffer", "Slots", "map_shared", "room_for", "stage"]

_ALIGNED = 64  # bytes
_CHUNK = 8 << 20  # bytes that one thread copies at a time
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices

#: Where each tensor's bytes lie in the buffer: begin and end.
Slots = tuple[tuple[int, int], ...]


class HostBuffer:
    """Anonymous shared memory, pinned when tensors of a GPU are first copied to it, so that they are at full speed."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        self.fd = os.memfd_create("ucformat-stage", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, self.nbytes)
        self.memory = map_shared(self.fd, self.nbytes)
        self._pinned_for: torch.device | None = None
        self._refused = False

    def pin(self, device: torch.device) -> None:
        """Pin the memory for a CUDA device, and with it for all; where that is refused, copies are slower."""
        if self._pinned_for is not None or self._refused:
            return
        with torch.cuda.device(device):
            done = torch.cuda.cudart().cudaHostRegister(self.memory.ctypes.data, self.nbytes, _PORTABLE)
        if int(done):
            self._refused = True
            _clear_error(device)
        else:
            self._pinned_for = device

    def leave(self) -> None:
        """Let go of the memory in a forked child."""
        os.close(self.fd)
        self.memory = np.empty(0, np.uint8)

    def close(self) -> None:
        """Give the memory back, when nobody here uses it any more."""
        if self._pinned_for is not None:
            with torch.cuda.device(self._pinned_for):
                done = torch.cuda.cudart().cudaHostUnregister(self.memory.ctypes.data)
            if int(done):
                _clear_error(self._pinned_for)
        self.memory = np.empty(0, np.uint8)
        os.close(self.fd)


def _clear_error(device: torch.device) -> None:
    """Take the last error of the CUDA runtime back, which the next kernel of the training would raise as its own.

    PyTorch has no call for that, but the check after a kernel both raises and resets it.
    """
    with suppress(RuntimeError):
        torch.ones(1, device=device)


def map_shared(fd: int, nbytes: int) -> Memory:
    """The memory behind a descriptor, shared with whoever else maps it."""
    return np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)


def room_for(state: LocalState) -> int:
    """Bytes of the buffer that a state needs."""
    return sum(-(-_nbytes(t) // _ALIGNED) * _ALIGNED for t in state.tensors)


def _nbytes(t: LocalShard) -> int:
    return t.nbytes if t.tensor.device.type == "cpu" else t.tensor.numel() * t.info.itemsize


def stage(
    state: LocalState, buffer: HostBuffer, pool: ThreadPoolExecutor
) -> tuple[tuple[tuple[TensorInfo, tuple[Piece, ...]], ...], Slots]:
    """Copy a state to a buffer; its tensors as they lie there, and where.

    On the host the pieces are copied, each in row-major order; from a device the whole local tensor is. What training
    has begun on the devices is waited for before, and the copies from each of them after.
    """
    held = [t.tensor for t in state.tensors]
    synchronize(held)
    devices = devices_of(held)
    if devices and devices[0].type == "cuda":
        buffer.pin(devices[0])
    try:
        return _copy_all(state, buffer, pool, devices)
    finally:  # where one copy failed too: the memory may be used again
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
        at = -(-end // _ALIGNED) * _ALIGNED
    for done in [pool.submit(copy) for copy in copies]:
        done.result()
    return tuple(out), tuple(slots)


def _copy_pieces(t: LocalShard, memory: Memory, copies: list[Callable[[], None]]) -> tuple[Piece, ...]:
    """Note how to copy a tensor's pieces to memory; the pieces as they lie there."""
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
            copies.append(_copy(dense_elements(p.box.shape, to, itemsize), elements_of(p, source, itemsize)))
        at += nbytes
    return tuple(pieces)


def _copies(to: Memory, source: Memory) -> Sequence[Callable[[], None]]:
    return [_copy(to[i : i + _CHUNK], source[i : i + _CHUNK]) for i in range(0, len(to), _CHUNK)]


def _copy(to: NDArray[np.generic], source: NDArray[np.generic]) -> Callable[[], None]:
    return lambda: np.copyto(to, source)
