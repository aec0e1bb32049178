"""Arrays in `.npy` files, without loss and without overwriting anything unasked."""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING, Any

import numpy as np

from ucformat.errors import Conflict, NotFound, UsageError
from ucformat.reading.dtypes import dtype_name, numpy_dtype

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = ["as_stored", "cast", "check_target", "save"]

_KINDS = ("bool", "uint", "int", "float", "complex")  # a cast to the left would drop more than digits


def cast(array: NDArray[Any], dtype: str | None) -> NDArray[Any]:
    """The array in this dtype; UsageError where the cast would drop a part, the imaginary one or the fraction."""
    if dtype is None:
        return array
    target = numpy_dtype(dtype)
    source = dtype_name(array.dtype)
    if _kind(dtype) < _kind(source):
        raise UsageError(
            f"casting {source} to {dtype} would lose more than digits", hint="cast it in a program of yours"
        )
    with np.errstate(all="ignore"):
        return array.astype(target)


def _kind(dtype: str) -> int:
    name = dtype.removeprefix("b") if dtype == "bfloat16" else dtype
    return next(i for i, kind in enumerate(_KINDS) if name.startswith(kind))


def as_stored(array: NDArray[Any]) -> NDArray[Any]:
    """As a `.npy` file can hold it: bfloat16 and float8 as the unsigned integers of their bits."""
    nameless = dtype_name(array.dtype).startswith(("bfloat", "float8"))  # np.save would call these `|V2`, `|V1`, `<f1`
    return array.view(f"<u{array.itemsize}") if nameless else array


def check_target(file: Path, *, force: bool) -> None:
    """Conflict where there is a file already, NotFound where no folder is for it: before anything is read."""
    if not file.parent.is_dir():
        raise NotFound(f"there is no folder {file.parent} to write {file.name} in", hint=f"mkdir -p {file.parent}")
    if file.is_dir():
        raise UsageError(f"{file} is a folder", hint=f"name a file in it: {file / 'x.npy'}")
    if file.is_file() and not force:
        raise _exists(file)


def _exists(file: Path) -> Conflict:
    return Conflict(f"{file} exists", hint="choose another name, or say --force to replace it")


def save(file: Path, array: NDArray[Any], *, force: bool) -> None:
    """Write the file; one that exists is replaced as a whole, and only with `force`."""
    if file.exists() and not file.is_file():  # a device: nothing to lose or to leave behind
        with file.open("wb") as device:
            np.save(device, array, allow_pickle=False)
        return
    file = file.resolve()
    scratch = file.with_name(
        f".{file.name}.{secrets.token_hex(8)}.part"
    )  # nobody else's: it is removed whatever happens
    try:
        with scratch.open("xb") as out:
            np.save(out, array, allow_pickle=False)
        if force:
            scratch.replace(file)
        else:
            _publish(scratch, file)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


def _publish(scratch: Path, file: Path) -> None:
    """Give a file its name if nothing has it."""
    try:
        os.link(scratch, file)
    except FileExistsError:
        raise _exists(file) from None
    except OSError:  # no hard links here
        if file.exists():
            raise _exists(file) from None
        scratch.replace(file)
    else:
        scratch.unlink()
