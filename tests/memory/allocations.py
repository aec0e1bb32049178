"""Has the n-th allocation fail, of Python's own or of NumPy's for elements of arrays, and counts them."""

from __future__ import annotations

import _testcapi  # type: ignore[import-not-found]
import ctypes
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["WHOSE", "counted", "failing"]

#: Whose allocations can fail.
WHOSE = ("python", "numpy")

_MANY = 10_000_000  # more allocations than any command makes
_DEFAULT_HANDLER = 306  # PyDataMem_DefaultHandler in NumPy's table of functions
_MALLOC = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_CALLOC = _REALLOC = ctypes.PYFUNCTYPE(
    ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t
)


class _Handler(ctypes.Structure):
    """NumPy's `PyDataMem_Handler`, without the function that frees."""

    _fields_ = (
        ("name", ctypes.c_char * 127),
        ("version", ctypes.c_uint8),
        ("ctx", ctypes.c_void_p),
        ("malloc", _MALLOC),
        ("calloc", _CALLOC),
        ("realloc", _REALLOC),
    )


@contextmanager
def failing(whose: str, n: int) -> Iterator[None]:
    """In the block, the n-th allocation by Python or NumPy fails, counted from 1."""
    if whose == "numpy":
        with _numpy(n):
            yield
        return
    _testcapi.set_nomemory(n - 1, n)
    try:
        yield
    finally:
        _testcapi.remove_mem_hooks()


def counted(whose: str, act: Callable[[], object]) -> int:
    """How many allocations `act` makes."""
    if whose == "numpy":
        with _numpy(0) as count:
            act()
        return count[0]
    with failing("python", _MANY):
        act()
        made = _until_one_fails()
    with failing("python", _MANY):
        return _until_one_fails() - made


def _until_one_fails() -> int:
    k = 0
    try:
        for k in range(_MANY):  # noqa: B007
            bytes(100)
    except MemoryError:
        pass
    return 2 * k  # each time a number and these bytes


@contextmanager
def _numpy(n: int) -> Iterator[list[int]]:
    handler, count = _handler(), [0]
    old = (_MALLOC, handler.malloc), (_CALLOC, handler.calloc), (_REALLOC, handler.realloc)
    # the functions as they are now: the fields are to be overwritten
    malloc, calloc, realloc = (kind(ctypes.cast(f, ctypes.c_void_p).value or 0) for kind, f in old)

    def through(function: Any) -> Callable[..., int | None]:
        def call(*args: int) -> int | None:
            count[0] += 1
            return None if count[0] == n else function(*args)

        return call

    handler.malloc, handler.calloc, handler.realloc = (
        _MALLOC(through(malloc)), _CALLOC(through(calloc)), _REALLOC(through(realloc))
    )  # fmt: skip
    try:
        yield count
    finally:
        handler.malloc, handler.calloc, handler.realloc = malloc, calloc, realloc


def _handler() -> _Handler:
    """What all arrays are allocated with that say nothing else."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    table = ctypes.cast(
        pointer(np._core._multiarray_umath._ARRAY_API, None),  # type: ignore[attr-defined]
        ctypes.POINTER(ctypes.c_void_p),
    )
    capsule = ctypes.cast(
        table[_DEFAULT_HANDLER] or 0, ctypes.POINTER(ctypes.py_object)
    ).contents.value
    return _Handler.from_address(pointer(capsule, b"mem_handler"))
