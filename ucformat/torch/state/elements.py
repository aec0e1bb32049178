"""Host memory as arrays of elements, without torch: the process that writes in the background does not import it."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import secrets
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ucformat.geometry.box import Box, reach
from ucformat.storage.strided import copy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any

    import torch
    from numpy.typing import NDArray

    from ucformat.geometry.tensor import Piece

    Memory = NDArray[np.uint8]
    Elements = NDArray[np.generic]
#: The bytes `[start, stop)` of the buffer that each tensor occupies.
Slots = tuple[tuple[int, int], ...]


def span(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> int:
    """Return the bytes from the first element of a strided tensor to the end of the last."""
    if 0 in shape:
        return 0
    return (reach(shape, strides) + 1) * itemsize


def host_memory(tensor: torch.Tensor) -> Memory:
    """Return all bytes that a tensor on the host spans, from its first element, without a copy."""
    nbytes: int = tensor.nbytes
    if not tensor.is_contiguous():
        nbytes = span(tensor.shape, tensor.stride(), tensor.element_size())
    if not nbytes:
        return np.empty(0, np.uint8)
    raw = (ctypes.c_uint8 * nbytes).from_address(tensor.data_ptr())
    raw.owner = tensor  # type: ignore[attr-defined] # kept alive with the array
    return np.frombuffer(memoryview(raw), np.uint8)


#: The default maximum size of a block.
BLOCK_BYTES = 4 << 20

_VECTORS = 1024  # IOV_MAX of Linux


_UNITS = {n: np.dtype(f"V{n}") if n > 8 else np.dtype(f"u{n}") for n in (1, 2, 4, 8, 16)}


def elements_of(piece: Piece, memory: Memory, itemsize: int) -> Elements:
    """Return a piece as an array of elements of an untyped dtype."""
    strides = tuple(s * itemsize for s in piece.strides)
    return np.ndarray(piece.box.shape, _UNITS[itemsize], memory, piece.offset * itemsize, strides)


def dense_elements(shape: tuple[int, ...], memory: Memory, itemsize: int) -> Elements:
    """Return the row-major array of elements at the beginning of a memory."""
    return np.ndarray(shape, _UNITS[itemsize], memory)


def elements_within(elements: Elements, whole: Box, box: Box) -> Elements:
    """Return the part of an array for a box, a view."""
    index: tuple[Any, ...] = tuple(
        slice(a - b, a - b + n) for a, b, n in zip(box.start, whole.start, box.shape, strict=True)
    )
    return elements[(..., *index)]  # without `...` a 0-d array would give a scalar


def row_major_bytes(elements: Elements) -> Memory:
    """Return the bytes of an array in row-major order: a view if it is contiguous, else a copy."""
    return np.ascontiguousarray(elements).reshape(-1).view(np.uint8)


def copy_common(source: Elements, source_box: Box, target: Elements, target_box: Box) -> None:
    """Copy the elements that two boxes have in common."""
    common = source_box.intersect(target_box)
    if common is not None:
        copy(
            elements_within(target, target_box, common), elements_within(source, source_box, common)
        )


def blocks_of(box: Box, itemsize: int, most: int = BLOCK_BYTES) -> Sequence[Box]:
    """Split a box into blocks that are consecutive in its row-major order."""
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


def map_shared(fd: int, nbytes: int) -> Memory:
    """Map shared memory."""
    return np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)


_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SharedMemory:
    """Anonymous memory that the other ranks of this host can use, or private if the system refuses such memory.

    Its size never changes, so a process that maps it is not killed by another that truncates it.

    Attributes:
        fd: its file descriptor; -1 if it is private.
    """

    def __init__(self, nbytes: int) -> None:
        self.name = secrets.token_hex(16).encode()
        self.fd = -1
        self.memory = np.empty(0, np.uint8)
        if not nbytes:
            return
        self.fd = os.memfd_create(self.name.decode(), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, nbytes)  # a limit on the size of files holds here too
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        except OSError:
            self.close()
        self.memory = map_shared(self.fd, nbytes)

    def range(self, start: int, stop: int) -> SharedRange:
        """Return what another process needs to use a part of the memory; it has no process if the memory is private."""
        return SharedRange(
            os.getpid() if self.fd >= 0 else 0, self.fd, start, stop - start, self.name
        )

    def close(self) -> None:
        """Release the memory when no array refers to it any more."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1
        self.memory = np.empty(0, np.uint8)


class SharedRange(NamedTuple):
    """A range of the shared memory of a process; 0 is no process.

    The name is random, because in another container the same numbers belong to another file.
    """

    pid: int
    fd: int
    start: int
    nbytes: int
    name: bytes


@contextmanager
def _opened(target: SharedRange) -> Iterator[int | None]:
    """The descriptor of the shared memory of another process; None if this process may not open it."""
    try:
        fd = os.open(f"/proc/{target.pid}/fd/{target.fd}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        yield None
        return
    try:
        same = (
            os.fsencode(Path(f"/proc/self/fd/{fd}").readlink())
            == b"/memfd:%b (deleted)" % target.name
        )
        yield fd if same else None
    finally:
        os.close(fd)


def write_shared(target: SharedRange, parts: Sequence[memoryview]) -> bool:
    """Write to the shared memory of another process of this host.

    Returns:
        whether this process may write there; if not, nothing is written, or only a part.
    """
    with suppress(OSError), _opened(target) as fd:
        if fd is not None:
            end = in_turn(parts, lambda buffers, done: os.pwritev(fd, buffers, target.start + done))
            return end == target.nbytes
    return False


def map_range(target: SharedRange) -> Memory | None:
    """Map the shared memory of another process of this host; None if this process may not."""
    with suppress(OSError), _opened(target) as fd:
        if fd is not None and fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            return map_shared(fd, target.nbytes) if os.fstat(fd).st_size >= target.nbytes else None
    return None


def in_turn(parts: Sequence[memoryview], act: Callable[[list[memoryview], int], int]) -> int:
    """Pass buffers to a function like `os.writev` until it has used them all.

    Args:
        act: called with the buffers that are left, at most 1,024, and the bytes used so far;
            returns how many it used.
    """
    done = first = 0
    remaining = list(parts)
    while first < len(remaining):
        used = act(remaining[first : first + _VECTORS], done)
        done += used
        while first < len(remaining) and used >= len(remaining[first]):
            used -= len(remaining[first])
            first += 1
        if used:
            remaining[first] = remaining[first][used:]
    return done
