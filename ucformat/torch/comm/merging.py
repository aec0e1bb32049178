"""What consecutive ranks state, merged on the way to rank 0."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

Ranges = tuple[tuple[int, int], ...]  # of ranks, [start, stop), ascending


def merged(
    a: Mapping[Any, Any], b: Mapping[Any, Any], join_values: Callable[[Any, Any], Any]
) -> dict[Any, Any]:
    """Return the items of both mappings; values of a key that both have are joined."""
    return {**b, **{k: join_values(v, b[k]) if k in b else v for k, v in a.items()}}


def bits_of(chosen: Iterable[bool]) -> bytes:
    """A bit for each element."""
    return np.packbits(np.fromiter(chosen, np.bool_)).tobytes()


def ones_of(bits: bytes) -> list[int]:
    """Return the numbers of the bits that are set."""
    ones: list[int] = np.flatnonzero(np.unpackbits(np.frombuffer(bits, np.uint8))).tolist()
    return ones


def either(a: bytes, b: bytes) -> bytes:
    """Return the bits that are set in one or both of two equally long texts of bits."""
    return (np.frombuffer(a, np.uint8) | np.frombuffer(b, np.uint8)).tobytes()


def adjoined(a: Ranges, b: Ranges) -> Ranges:
    """Return the ranges of lower and of higher ranks together."""
    return (*a[:-1], (a[-1][0], b[0][1]), *b[1:]) if a[-1][1] == b[0][0] else (*a, *b)
