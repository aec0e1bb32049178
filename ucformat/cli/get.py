"""`ucp get`: a tensor, or a slice of one, as a `.npy` file or printed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ucformat.cli.options import CATALOG, SRC, VIEW, command
from ucformat.cli.output import terminal_width
from ucformat.cli.source_options import SOURCE
from ucformat.cli.text import bytes_text, shape_text

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ucformat.cli.output import Output
    from ucformat.reading.lazy import Index, Tensor

__all__ = ["get"]

_MOST_PRINTED = 10_000


@command
@SRC
@click.argument("name", metavar="NAME")
@click.argument("where", metavar="[SLICE]", required=False)
@click.option("-s", "--state", metavar="STATE", help="In which state.  [default: weight, else master]")
@click.option("-o", "--out", "target", default="-", metavar="FILE", help="A .npy file, or - to print.  [default: -]")
@click.option("--dtype", metavar="DTYPE", help="Cast to this dtype, float32 for one; by default nothing is cast.")
@click.option("-f", "--force", is_flag=True, help="Replace FILE if it exists.")
@VIEW
@SOURCE
@CATALOG
def get(
    src: str,
    name: str,
    where: str | None,
    state: str | None,
    target: str,
    dtype: str | None,
    force: bool,  # noqa: FBT001
    view: str | None,
    options: dict[str, Any] | None,
    out: Output,
) -> None:
    """Read a tensor, or a slice of one, and nothing else of the checkpoint.

    SLICE is NumPy's: '0:512,128:', '[3, ..., ::2]'; all of it by default.

    A .npy file has no word for bfloat16 and float8: their bits are stored as uint16 and uint8, and a note says so.
    Give --dtype float32 to have values instead.
    """
    import ucformat
    from ucformat.cli.npy import as_stored, cast, check_target, save
    from ucformat.cli.slices import parse_slice

    index = (...,) if where is None else parse_slice(where)
    file = None if target == "-" else Path(target)
    if file is not None:
        check_target(file, force=force)
    ck = ucformat.open(src, view=view, options=options)
    tensor = ck[name] if state is None else ck[name, state]
    shape = _shape(tensor, index)
    if file is None:
        _check_small(shape)
    array = cast(_read(tensor, index), dtype)
    stored = array if file is None else as_stored(array)
    if file is not None:
        save(file, stored, force=force)
        if stored.dtype != array.dtype:
            out.note(f"{file} holds the bits of {array.dtype} as {stored.dtype}; --dtype float32 would give the values")

    def data() -> dict[str, Any]:
        found = {
            "url": ck.url,
            "name": tensor.name,
            "state": tensor.state,
            "slice": where,
            "dtype": tensor.info.dtype,
            "cast_to": dtype,
            "shape": list(array.shape),
            "bytes": array.nbytes,
            "out": target,
            "stored_as": None if file is None else str(stored.dtype),
        }
        return found | ({"values": _values(array)} if file is None else {})

    def lines() -> list[str]:
        if file is None:
            return _printed(array)
        bits = "" if stored.dtype == array.dtype else f" as {stored.dtype} bits"
        return [f"{file}: {tensor.info.key}, {shape_text(array.shape)} {array.dtype}{bits}, {bytes_text(array.nbytes)}"]

    out.result(lines, data, lambda: _printed(array) if file is None else ())


def _shape(tensor: Tensor, index: Index) -> tuple[int, ...]:
    """The shape that an index gives, found without reading."""
    import numpy as np

    from ucformat.errors import UsageError

    try:
        return np.broadcast_to(np.empty(()), tensor.shape)[index].shape
    except IndexError as error:
        raise UsageError(
            f"{tensor.info.key} has the shape {list(tensor.shape)}: {error}",
            hint="for each dim an integer inside it, or a slice such as 0:512; `...` stands for the dims between",
        ) from None


def _check_small(shape: tuple[int, ...]) -> None:
    import math

    from ucformat.errors import UsageError

    if math.prod(shape) > _MOST_PRINTED:
        raise UsageError(
            f"{math.prod(shape):,} values are too many to print",
            hint="give a smaller slice, or write them to a file with --out x.npy",
        )


def _read(tensor: Tensor, index: Index) -> NDArray[Any]:
    import numpy as np

    return np.asarray(tensor.read() if index == (...,) else tensor[index])


def _plain(array: NDArray[Any]) -> NDArray[Any]:
    """With bfloat16 and float8 as float32, which holds each of their values."""
    import numpy as np

    return array.astype(np.float32) if array.dtype.kind == "V" or array.dtype.name.startswith("float8") else array


def _printed(array: NDArray[Any]) -> list[str]:
    import numpy as np

    width = terminal_width() or 10**6
    text = np.array2string(_plain(array), threshold=sys.maxsize, max_line_width=width, floatmode="unique")
    return text.splitlines()


def _values(array: NDArray[Any]) -> Any:
    import numpy as np

    array = _plain(array)
    if array.dtype.kind == "c":
        array = np.stack([array.real, array.imag], -1)
    return array.tolist()
