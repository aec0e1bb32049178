"""Meshes: named axes, and the rank at each coordinate."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ucformat.errors import LayoutError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_MAX_RANKS = 1 << 22  # of a mesh, because each rank is listed


class Mesh:
    """Named axes and their sizes, slowest first; immutable.

    Args:
        ranks: the rank at each coordinate, in row-major order of coordinates (default: 0, 1, 2, …).
    """

    __slots__ = ("_index", "axes", "ranks", "size")

    def __init__(self, axes: Mapping[str, int], ranks: Sequence[int] | None = None) -> None:
        self.axes: dict[str, int] = dict(axes)
        for axis, n in self.axes.items():
            if n < 1:
                raise LayoutError(f"mesh axis {axis!r} has the invalid size {n}")
        self.size = math.prod(self.axes.values())
        if self.size > _MAX_RANKS:
            raise LayoutError(f"a mesh of {self.size if self.size < 1 << 63 else 'far too many'} ranks is too large")
        self.ranks: tuple[int, ...] = tuple(range(self.size) if ranks is None else ranks)
        if sorted(self.ranks) != list(range(self.size)):
            raise LayoutError(
                f"mesh {self} needs each of the ranks 0 … {self.size - 1} once, but lists {len(self.ranks)} ranks",
                hint="ranks are given in row-major order of coordinates, the last axis fastest",
            )
        self._index = {rank: i for i, rank in enumerate(self.ranks)}

    def coordinate(self, rank: int) -> dict[str, int]:
        """The coordinate of a rank: its index on each axis."""
        if rank not in self._index:
            raise UsageError(f"rank {rank} is not in the mesh {self} of {self.size} ranks")
        at, out = self._index[rank], {}
        for axis, n in reversed(self.axes.items()):
            at, out[axis] = divmod(at, n)
        return {axis: out[axis] for axis in self.axes}

    def coordinates(self, axes: Sequence[str], base: Mapping[str, int] | None = None) -> Iterator[dict[str, int]]:
        """Every coordinate that differs from `base` only in these axes, in row-major order."""
        base = dict.fromkeys(self.axes, 0) if base is None else base
        return (self.move(base, axes, i) for i in range(self.degree(axes)))

    def move(self, base: Mapping[str, int], axes: Sequence[str], index: int) -> dict[str, int]:
        """The coordinate at an index along these axes that equals `base` on all others."""
        out = dict(base)
        for axis in reversed(axes):
            index, out[axis] = divmod(index, self.axes[axis])
        return out

    def rank(self, coordinate: Mapping[str, int]) -> int:
        """The rank at a coordinate."""
        return self.ranks[self.index(tuple(self.axes), coordinate)]

    def degree(self, axes: Sequence[str]) -> int:
        """Number of coordinates along these axes together."""
        return math.prod(self.axes[axis] for axis in axes)

    def index(self, axes: Sequence[str], coordinate: Mapping[str, int]) -> int:
        """The index of a coordinate along several axes, row-major over the axes as listed."""
        at = 0
        for axis in axes:
            at = at * self.axes[axis] + coordinate[axis]
        return at

    def __eq__(self, other: object) -> bool:  # the order of axes matters, unlike that of dict keys
        return isinstance(other, Mesh) and (tuple(self.axes.items()), self.ranks) == (
            tuple(other.axes.items()), other.ranks)  # fmt: skip

    def __hash__(self) -> int:
        return hash((tuple(self.axes.items()), self.ranks))

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{axis}={n}' for axis, n in self.axes.items())})"

    def __str__(self) -> str:
        return "(" + ", ".join(f"{axis}={n}" for axis, n in self.axes.items()) + ")"
