"""What consecutive ranks state, merged on the way to rank 0."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Ranges = tuple[tuple[int, int], ...]  # of ranks, [start, stop), ascending


def merged(
    a: Mapping[Any, Any], b: Mapping[Any, Any], join_values: Callable[[Any, Any], Any]
) -> dict[Any, Any]:
    """Return the items of both mappings; values of a key that both have are joined."""
    return {**b, **{k: join_values(v, b[k]) if k in b else v for k, v in a.items()}}


def adjoined(a: Ranges, b: Ranges) -> Ranges:
    """Return the ranges of lower and of higher ranks together."""
    return (*a[:-1], (a[-1][0], b[0][1]), *b[1:]) if a[-1][1] == b[0][0] else (*a, *b)
