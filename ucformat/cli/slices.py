"""Slices in NumPy's spelling, read without evaluating anything."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ucformat.errors import UsageError

if TYPE_CHECKING:
    from types import EllipsisType

__all__ = ["parse_slice"]

_INT = r"\s*([+-]?\d+)?\s*"
_SLICE = re.compile(rf"{_INT}:{_INT}(?::{_INT})?", re.ASCII)


def parse_slice(text: str) -> tuple[int | slice | EllipsisType, ...]:
    """`0:512, 128:`, with or without brackets, as what `tensor[...]` takes; UsageError where it is none."""
    inside = text.strip()
    if inside.startswith("[") and inside.endswith("]"):
        inside = inside[1:-1].strip()
    if not inside:
        raise _error(text, "it is empty")
    parts = inside.split(",")
    if len(parts) > 1 and not parts[-1].strip():  # NumPy lets a comma stand at the end
        parts.pop()
    return tuple(_part(part.strip(), text) for part in parts)


def _part(part: str, text: str) -> int | slice | EllipsisType:
    if part == "...":
        return ...
    if re.fullmatch(r"[+-]?\d{1,20}", part, re.ASCII):
        return int(part)
    found = _SLICE.fullmatch(part)
    if found is None or max(map(len, found.groups(default="")), default=0) > 20:
        raise _error(text, f"{part!r} is not an integer, a slice such as 0:512, or ...")
    start, stop, step = (None if n is None else int(n) for n in found.groups())
    if step == 0:
        raise _error(text, "a step of 0 goes nowhere")
    return slice(start, stop, step)


def _error(text: str, why: str) -> UsageError:
    return UsageError(f"{text!r} is not a slice: {why}", hint="write it as NumPy does: '0:512,128:' or '[3, ..., ::2]'")
