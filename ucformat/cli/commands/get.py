"""`ucp get`: read a tensor or a slice of one, to a `.npy` file or to the terminal."""

from __future__ import annotations

import os
import secrets
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ucformat.cli.ui.options import CATALOG, LOSSY, OLDER, OPENING, SRC, Opening, bundle, command
from ucformat.cli.ui.output import terminal_width
from ucformat.errors import Conflict, NotFound, UsageError
from ucformat.texts import bytes_text, shape_text

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ucformat.cli.ui.output import Output
    from ucformat.reading.indexing import Index
    from ucformat.reading.lazy import Tensor

_MAX_PRINTED = 10_000  # values


@dataclass(frozen=True)
class Wanted:
    """What is read: a tensor, or a slice of one."""

    name: str
    where: str | None = None
    state: str | None = None
    lossy: bool = False
    older: bool = False


@command
@SRC
@bundle(
    "wanted",
    Wanted,
    click.argument("name", metavar="NAME"),
    click.argument("where", metavar="[SLICE]", required=False),
    click.option(
        "-s", "--state", metavar="STATE", help="The tensor's state.  [default: weight, else master]"
    ),
    LOSSY,
    OLDER,
)
@click.option(
    "-o",
    "--out",
    "target",
    default="-",
    metavar="FILE",
    help="A .npy file, or - to print.  [default: -]",
)
@click.option(
    "--dtype", metavar="DTYPE", help="Cast to this dtype, such as float32.  [default: no cast]"
)
@click.option("-f", "--force", is_flag=True, help="Replace FILE if it exists.")
@OPENING
@CATALOG
def get(
    src: str,
    wanted: Wanted,
    target: str,
    dtype: str | None,
    force: bool,  # noqa: FBT001
    opening: Opening,
    out: Output,
) -> None:
    """Read a tensor or a slice of one, and nothing else of the checkpoint.

    SLICE is in NumPy's syntax: '0:512,128:' or '[3, ..., ::2]'. By default the whole tensor is
    read.

    A .npy file cannot hold bfloat16 or float8: their bits are stored as uint16 or uint8, with a
    note on stderr. Use --dtype float32 to store values instead.
    """
    from ucformat.reading.indexing import parse_slice

    index: Index = (...,) if wanted.where is None else parse_slice(wanted.where)
    file = None if target == "-" else Path(target)
    if file is not None:
        check_target(file, force=force)
    ck = opening.open(src)
    if wanted.lossy:
        ck = ck.with_lossy()
    if wanted.older:
        ck = ck.with_older()
    tensor = ck[wanted.name] if wanted.state is None else ck[wanted.name, wanted.state]
    shape = _shape(tensor, index)
    if file is None:
        _check_small(shape)
    array = cast(_read(tensor, index), dtype)
    stored = array if file is None else as_stored(array)
    if file is not None:
        save(file, stored, force=force)
        if stored.dtype != array.dtype:
            out.note(
                f"{file} has the bits of {array.dtype} as {stored.dtype}; --dtype float32 stores "
                "the values"
            )

    def data() -> dict[str, Any]:
        data = {
            "url": ck.url,
            "name": tensor.name,
            "state": tensor.state,
            "slice": wanted.where,
            "dtype": tensor.info.dtype,
            "cast_to": dtype,
            "shape": list(array.shape),
            "bytes": array.nbytes,
            "out": target,
            "stored_as": None if file is None else str(stored.dtype),
        }
        return data | ({"values": _values(array)} if file is None else {})

    def lines() -> list[str]:
        if file is None:
            return _printed(array)
        bits = "" if stored.dtype == array.dtype else f" as {stored.dtype} bits"
        return [
            (
                f"{file}: {tensor.info.key}, {shape_text(array.shape)} {array.dtype}{bits}, "
                f"{bytes_text(array.nbytes)}"
            )
        ]

    out.result(lines, data, lambda: _printed(array) if file is None else ())


def _shape(tensor: Tensor, index: Index) -> tuple[int, ...]:
    """The shape of an indexed tensor, without reading it."""
    import numpy as np

    try:
        return np.broadcast_to(np.empty(()), tensor.shape)[index].shape
    except IndexError as error:
        raise UsageError(
            f"{tensor.info.key} has the shape {list(tensor.shape)}: {error}",
            hint=(
                "give an integer or a slice such as 0:512 for each dim; `...` means all other dims"
            ),
        ) from None


def _check_small(shape: tuple[int, ...]) -> None:
    import math

    if math.prod(shape) > _MAX_PRINTED:
        raise UsageError(
            f"{math.prod(shape):,} values are too many to print",
            hint="give a smaller slice, or write them to a file with --out x.npy",
        )


def _read(tensor: Tensor, index: Index) -> NDArray[Any]:
    import numpy as np

    return np.asarray(tensor.read() if index == (...,) else tensor[index])


def _plain(array: NDArray[Any]) -> NDArray[Any]:
    """Convert values of `ml_dtypes` to those of a dtype of NumPy that represents all of them."""
    import numpy as np

    name = array.dtype.name
    if hasattr(np, name):
        return array
    return array.astype(
        np.complex64 if "complex" in name else np.float32 if "float" in name else np.int8
    )


def _printed(array: NDArray[Any]) -> list[str]:
    import numpy as np

    width = terminal_width() or 10**6
    text = np.array2string(
        _plain(array), threshold=sys.maxsize, max_line_width=width, floatmode="unique"
    )
    return text.splitlines()


def _values(array: NDArray[Any]) -> Any:
    import numpy as np

    array = _plain(array)
    if array.dtype.kind == "c":
        array = np.stack([array.real, array.imag], -1)
    return array.tolist()


# a cast to one further left would lose more than precision
_KINDS = ("bool", "uint", "int", "float", "complex")


def cast(array: NDArray[Any], dtype: str | None) -> NDArray[Any]:
    """Cast an array."""
    if dtype is None:
        return array
    import numpy as np

    from ucformat.reading.dtypes import dtype_name, numpy_dtype

    target = numpy_dtype(dtype)
    source = dtype_name(array.dtype)
    # only the bits are known of its elements
    for unknown in {dtype, source} - {target.name, array.dtype.name}:
        raise UsageError(
            f"{source} is not cast to {dtype}", hint=f"elements of {unknown} are not single numbers"
        )
    if _kind(dtype) < _kind(source):
        raise UsageError(
            f"casting {source} to {dtype} would lose more than precision",
            hint="cast it in your own program",
        )
    with np.errstate(all="ignore"):
        return array.astype(target)


def _kind(dtype: str) -> int:
    name = dtype.removeprefix("b") if dtype.startswith(("bfloat", "bcomplex")) else dtype
    return next(i for i, kind in enumerate(_KINDS) if name.startswith(kind))


def as_stored(array: NDArray[Any]) -> NDArray[Any]:
    """View dtypes that NumPy lacks as the unsigned integers of their bits, since `.npy` files cannot hold them."""
    import numpy as np

    from ucformat.reading.dtypes import dtype_name

    # np.save would call the others `|V2`, `|V1`, `<f1`
    in_numpy = hasattr(np, dtype_name(array.dtype))
    return array if in_numpy else array.view(f"<u{array.itemsize}")


def check_target(file: Path, *, force: bool) -> None:
    """Check that a file can be written, before anything is read."""
    if not file.parent.is_dir():
        raise NotFound(
            f"there is no folder {file.parent} for {file.name}", hint=f"mkdir -p {file.parent}"
        )
    if file.is_dir():
        raise UsageError(f"{file} is a folder", hint=f"name a file in it: {file / 'x.npy'}")
    if file.is_file() and not force:
        raise _exists(file)


def _exists(file: Path) -> Conflict:
    return Conflict(f"{file} exists", hint="choose another name, or pass --force to replace it")


def save(file: Path, array: NDArray[Any], *, force: bool) -> None:
    """Write a `.npy` file atomically."""
    import numpy as np

    if file.exists() and not file.is_file():  # a device: written in place
        with file.open("wb") as device:
            np.save(device, array, allow_pickle=False)
        return
    file = file.resolve()
    # a unique name: it is removed on any error
    scratch = file.with_name(f".{file.name}.{secrets.token_hex(8)}.part")
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
    """Rename a file unless the name exists."""
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
