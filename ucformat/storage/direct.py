"""Reads past the page cache (`O_DIRECT`) of files that are not in it, where `ucp doctor` has found them faster.

Offsets, sizes and addresses have to be multiples of a page, which those of chunks and tensors are
not: whole pages are read into memory of the reading thread. From there bytes are copied to their
destination, and checked, while other threads wait for the disk.
"""

from __future__ import annotations

import ctypes
import functools
import os
from typing import TYPE_CHECKING, Any

from ucformat.storage.base import Costs
from ucformat.storage.concurrency import thread_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucformat.storage.local_files import OpenFile

#: Nobody reads ahead, so requests are long, and neighbouring ones are made together.
DIRECT = Costs(request=8 << 20, together=64, in_flight=64 << 20)

_PAGE = 4096
_GAP = 64 << 10  # bytes between ranges that are read along with them
_MIN, _MAX = 256 << 10, 16 << 20  # bytes of a run of pages, and of the memory of a thread


def read_direct(
    file: OpenFile, ranges: Sequence[tuple[int, int]], use: str
) -> list[memoryview] | None:
    """Read ranges of a file into memory of this thread, past the page cache.

    Args:
        ranges: pairs of offset and size in bytes, by offset.
        use: what the memory is for; the next call for the same use overwrites it.

    Returns:
        None if they are cached, small, scattered or beyond the end of the file, or the file system
        or the disk refuses: an ordinary read succeeds, or fails with the right error.
    """
    runs: list[list[int]] = []  # first byte and end of pages, and the end of what is wanted there
    at: list[int] = []  # where each range begins in the memory
    total = 0
    for offset, nbytes in ranges:
        first, stop = offset // _PAGE * _PAGE, -(-(offset + nbytes) // _PAGE) * _PAGE
        if not runs or not runs[-1][0] <= first <= runs[-1][1] + _GAP:
            runs.append([first, first, 0])
        run = runs[-1]
        total += max(0, stop - run[1])
        run[1:] = max(stop, run[1]), max(offset + nbytes, run[2])
        at.append(total - (run[1] - offset))
    if total > _MAX or total < _MIN * max(1, len(runs)):
        return None
    direct = file.direct()
    if direct is None or is_cached(file.fd, ranges[len(ranges) // 2][0]):
        return None
    memory = thread_memory(use, total + _PAGE)
    aligned = memory[-memory.__array_interface__["data"][0] % _PAGE :][:total].data
    begin = 0
    for first, stop, end in runs:
        if not _fill(direct.fd, first, aligned[begin : begin + stop - first], end - first):
            return None
        begin += stop - first
    return [aligned[a : a + nbytes] for a, (_, nbytes) in zip(at, ranges, strict=True)]


def _fill(fd: int, offset: int, pages: memoryview, wanted: int) -> bool:
    """Read pages of a file; False if fewer bytes than wanted come."""
    done = 0
    try:
        while done < wanted:
            got = os.preadv(fd, [pages[done:]], offset + done)
            done += got
            if not got or got % _PAGE:  # the end of the file
                break
    except OSError:
        return False
    return done >= wanted


def is_cached(fd: int, offset: int) -> bool:
    """Whether the page of a file with this byte is in the page cache; True if that is unknown."""
    calls = _calls()
    if calls is None:
        return True
    resident = ctypes.c_ubyte(1)
    address = calls.mmap(None, _PAGE, 1, 1, fd, offset // _PAGE * _PAGE)  # PROT_READ, MAP_SHARED
    if address == ctypes.c_void_p(-1).value:
        return True
    # it is not touched, so that it does not matter if the file is shorter
    failed = calls.mincore(address, _PAGE, ctypes.byref(resident))
    calls.munmap(address, _PAGE)
    return bool(failed or resident.value & 1)


@functools.cache
def _calls() -> Any:
    """The C library, to ask which pages are cached; None where there is no `O_DIRECT`."""
    if not hasattr(os, "O_DIRECT"):
        return None
    try:
        library = ctypes.PyDLL(None)  # to release the GIL would take longer than the calls
        library.mmap.restype = ctypes.c_void_p
        library.mmap.argtypes = [
            *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
            ctypes.c_int64,
        ]
        library.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
        library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    except (OSError, AttributeError):
        return None
    return library
