"""Copies a local state to host memory that another process can map; the memory is kept and used again."""

from __future__ import annotations

import mmap
import os
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from ucformat.geometry.box import row_major
from ucformat.geometry.tensor import Piece
from ucformat.torch.fragments import region_of
from ucformat.torch.memory import host_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import ThreadPoolExecutor

    from numpy.typing import NDArray

    from ucformat.geometry.tensor import TensorInfo
    from ucformat.torch.local import Local, LocalState
    from ucformat.torch.memory import Memory

__all__ = ["HostBuffer", "Slots", "map_shared", "room_for", "stage"]

_ALIGNED = 64  # bytes
_CHUNK = 8 << 20  # bytes that one thread copies at a time

#: Where each tensor's bytes lie in the buffer: begin and end.
Slots = tuple[tuple[int, int], ...]


class HostBuffer:
    """Anonymous shared memory; where there is a GPU it is pinned, so that copies from it run at full speed."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        self.fd = os.memfd_create("ucformat-stage", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, self.nbytes)
        self.memory = map_shared(self.fd, self.nbytes)
        self._pinned = torch.cuda.is_available()
        if self._pinned:
            pin = torch.cuda.cudart().cudaHostRegister(self.memory.ctypes.data, self.nbytes, 0)
            self._pinned = int(pin) == 0

    def close(self) -> None:
        """Give the memory back, when nobody here uses it any more."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self.memory.ctypes.data)
        self.memory = np.empty(0, np.uint8)
        os.close(self.fd)


def map_shared(fd: int, nbytes: int) -> Memory:
    """The memory behind a descriptor, shared with whoever else maps it."""
    return np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)


def room_for(state: LocalState) -> int:
    """Bytes of the buffer that a state needs."""
    return sum(-(-_nbytes(t) // _ALIGNED) * _ALIGNED for t in state.tensors)


def _nbytes(t: Local) -> int:
    return t.nbytes if t.tensor.device.type == "cpu" else t.tensor.numel() * t.info.itemsize


def stage(
    state: LocalState, buffer: HostBuffer, pool: ThreadPoolExecutor
) -> tuple[tuple[tuple[TensorInfo, tuple[Piece, ...]], ...], Slots]:
    """Copy a state to a buffer; its tensors as they lie there, and where.

    On the host the pieces are copied, each in row-major order; from a device the whole local tensor is.
    """
    out: list[tuple[TensorInfo, tuple[Piece, ...]]] = []
    slots: list[tuple[int, int]] = []
    copies: list[Callable[[], None]] = []
    at, device = 0, False
    for t in state.tensors:
        end = at + _nbytes(t)
        memory = buffer.memory[at:end]
        if t.tensor.device.type == "cpu":
            out.append((t.info, _copy_pieces(t, memory, copies)))
        else:
            device = True
            target = torch.from_numpy(memory).view(t.tensor.dtype).view(t.tensor.shape)
            target.copy_(t.tensor, non_blocking=True)
            out.append((t.info, t.pieces))
        slots.append((at, end))
        at = -(-end // _ALIGNED) * _ALIGNED
    for done in [pool.submit(copy) for copy in copies]:
        done.result()
    if device and torch.cuda.is_available():
        torch.cuda.synchronize()
    return tuple(out), tuple(slots)


def _copy_pieces(t: Local, memory: Memory, copies: list[Callable[[], None]]) -> tuple[Piece, ...]:
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
            target = region_of(replace(pieces[-1], offset=0), to, itemsize)
            copies.append(_copy(target.elements(itemsize), region_of(p, source, itemsize).elements(itemsize)))
        at += nbytes
    return tuple(pieces)


def _copies(to: Memory, source: Memory) -> Sequence[Callable[[], None]]:
    return [_copy(to[i : i + _CHUNK], source[i : i + _CHUNK]) for i in range(0, len(to), _CHUNK)]


def _copy(to: NDArray[np.generic], source: NDArray[np.generic]) -> Callable[[], None]:
    return lambda: np.copyto(to, source)
