"""NumPy's basic indexing of a tensor that is not read yet: the box that a slice needs."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from ucformat.errors import OutOfBounds, UsageError
from ucformat.geometry.box import Box

if TYPE_CHECKING:
    from types import EllipsisType

    Index = int | slice | EllipsisType | tuple[int | slice | EllipsisType, ...]


def parts_of(
    index: Index, shape: tuple[int, ...], label: str
) -> tuple[int | slice | EllipsisType, ...]:
    """One part of an index for each dim: `...`, and dims that are left out, are whole."""
    parts = index if isinstance(index, tuple) else (index,)
    if sum(p is Ellipsis for p in parts) > 1 or len([p for p in parts if p is not Ellipsis]) > len(
        shape
    ):
        raise UsageError(f"{label}: the index {index!r} does not fit the shape {shape}")
    if not any(p is Ellipsis for p in parts):
        parts = (*parts, Ellipsis)
    ellipsis = next(i for i, p in enumerate(parts) if p is Ellipsis)
    missing = len(shape) - (len(parts) - 1)
    return (*parts[:ellipsis], *[slice(None)] * missing, *parts[ellipsis + 1 :])


def parse_index(
    index: Index, shape: tuple[int, ...], label: str
) -> tuple[Box, tuple[int | slice, ...]]:
    """The box to read, and how to index it: integers drop their dim, slices apply their step."""
    parts = parts_of(index, shape, label)
    start: list[int] = []
    lengths: list[int] = []
    selection: list[int | slice] = []
    for dim, (part, n) in enumerate(zip(parts, shape, strict=True)):
        if isinstance(part, slice):
            chosen = range(n)[part]
            low, high = (
                (min(chosen[0], chosen[-1]), max(chosen[0], chosen[-1]) + 1) if chosen else (0, 0)
            )
            selection.append(slice(None, None, chosen.step))
        elif isinstance(part, int | np.integer) and not isinstance(part, bool):
            low = int(part)
            if not -n <= low < n:
                raise OutOfBounds(
                    f"{label}: index {low} is out of bounds for dim {dim} of size {n}"
                )
            low, high = low % n, low % n + 1
            selection.append(0)
        else:
            raise UsageError(
                f"{label}: cannot index by {part!r}",
                hint=(
                    "integers, slices and `...` are read exactly; for more, index the array: "
                    "np.asarray(t)[…]"
                ),
            )
        start.append(low)
        lengths.append(high - low)
    return Box(tuple(start), tuple(lengths)), tuple(selection)


_INT = r"\s*([+-]?\d+)?\s*"
_SLICE = re.compile(rf"{_INT}:{_INT}(?::{_INT})?", re.ASCII)


def parse_slice(text: str) -> tuple[int | slice | EllipsisType, ...]:
    """Parse a slice such as `0:512, 128:`."""
    inside = text.strip()
    if inside.startswith("[") and inside.endswith("]"):
        inside = inside[1:-1].strip()
    if not inside:
        raise _not_a_slice(text, "it is empty")
    parts = inside.split(",")
    if len(parts) > 1 and not parts[-1].strip():  # NumPy allows a trailing comma
        parts.pop()
    return tuple(_part(part.strip(), text) for part in parts)


def _part(part: str, text: str) -> int | slice | EllipsisType:
    if part == "...":
        return ...
    if re.fullmatch(r"[+-]?\d{1,20}", part, re.ASCII):
        return int(part)
    match = _SLICE.fullmatch(part)
    if match is None or max(map(len, match.groups(default="")), default=0) > 20:
        raise _not_a_slice(text, f"{part!r} is not an integer, a slice such as 0:512, or ...")
    start, stop, step = (None if n is None else int(n) for n in match.groups())
    if step == 0:
        raise _not_a_slice(text, "the step cannot be 0")
    return slice(start, stop, step)


def _not_a_slice(text: str, why: str) -> UsageError:
    return UsageError(
        f"{text!r} is not a slice: {why}",
        hint="write it as NumPy does: '0:512,128:' or '[3, ..., ::2]'",
    )
