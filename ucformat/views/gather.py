"""Scattered indices: rows of a file are read with the gaps between them, and the indices are picked in memory.

Where a file stores the indices of a dim so close to each other that one request reads several of them, an extent for
each would be read in requests of a few bytes, or read the same bytes again and again.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from ucformat.geometry.box import Box, row_major
from ucformat.geometry.flat_buffer import flat_boxes
from ucformat.geometry.tensor import Piece, TensorInfo, single_extents
from ucformat.reading.dtypes import numpy_dtype
from ucformat.reading.plan import ReadItem, merges
from ucformat.reading.read import read_items
from ucformat.views.picks import clipped, mapped, source_box

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from ucformat.geometry.tensor import Extent, Tiles
    from ucformat.storage.base import Costs, Store
    from ucformat.views.picks import Run
    from ucformat.views.table import Formula

    Locate = Callable[[Box], Iterable[Extent | Tiles]]

__all__ = ["bytes_of_gaps", "gather", "is_scattered"]

_FEW = 64  # combinations of runs that are read one by one in any case
_DENSE = 8  # all of a span is read if at least one index in so many is wanted
_AT_ONCE = 4 << 20  # bytes that are read at once, gaps included


def is_scattered(formula: Formula, locate: Locate, costs: Costs) -> bool:
    """Whether indices are picked in memory; otherwise each run of them has extents of its own.

    Args:
        formula: the indices that are taken of a tensor.
        locate: returns the extents of the tensor that intersect a box.
        costs: how requests are merged.
    """
    runs = clipped(formula.axes, Box.whole(formula.info.shape))
    if not all(runs) or math.prod(map(len, runs)) <= _FEW:
        return False
    joined = _joined(runs, _strides(runs, locate), costs)
    return any(len(a) < len(b) for a, b in zip(joined, runs, strict=True))


def gather(store: Store, formula: Formula, locate: Locate, first: int, last: int) -> NDArray[np.generic]:
    """Read a range of a tensor of scattered indices.

    Args:
        store: the store of the files.
        formula: the indices.
        locate: as for `is_scattered`.
        first: the first element of the flattened tensor.
        last: the element after the last.
    """
    info, out = formula.info, np.empty(last - first, numpy_dtype(formula.info.dtype))
    steps = row_major(info.shape)
    for box in flat_boxes(info.shape, first, last):
        for part, runs, near in _parts(formula, box, locate, store.costs):
            at = sum(a * s for a, s in zip(part.start, steps, strict=True)) - first
            into = np.lib.stride_tricks.as_strided(out[at:], part.shape, [s * info.itemsize for s in steps])
            into[...] = _read(store, info, locate, part, runs, near)
    return out


def bytes_of_gaps(formula: Formula, locate: Locate, costs: Costs, first: int, last: int) -> int:
    """The bytes that are read along with a range of a tensor of scattered indices.

    Args:
        formula: the indices.
        locate: as for `is_scattered`.
        costs: how requests are merged.
        first: the first element of the flattened tensor.
        last: the element after the last.
    """
    parts = (
        part for box in flat_boxes(formula.info.shape, first, last) for part in _parts(formula, box, locate, costs)
    )
    return sum(_size(near) - part.size for part, _, near in parts) * formula.info.itemsize


def _parts(
    formula: Formula, box: Box, locate: Locate, costs: Costs
) -> Iterator[tuple[Box, list[list[Run]], list[list[Run]]]]:
    """Parts of a box that are small enough to be read at once, with their runs, and these joined across gaps."""
    strides = _strides(clipped(formula.axes, box), locate)
    todo = [box]
    while todo:
        part = todo.pop()
        runs = clipped(formula.axes, part)
        near = _joined(runs, strides, costs)
        if _size(near) * formula.info.itemsize <= _AT_ONCE or part.size == 1:
            yield part, runs, near
            continue
        d = next(d for d, n in enumerate(part.shape) if n > 1)
        half = part.shape[d] // 2
        for skip, n in ((half, part.shape[d] - half), (0, half)):
            start = tuple(a + skip * (i == d) for i, a in enumerate(part.start))
            todo.append(Box(start, (*part.shape[:d], n, *part.shape[d + 1 :])))


def _read(
    store: Store, info: TensorInfo, locate: Locate, part: Box, runs: list[list[Run]], near: list[list[Run]]
) -> NDArray[np.generic]:
    """Read joined runs, and pick the indices of a part."""
    shape = tuple(sum(n for _, n, _ in of_dim) for of_dim in near)
    wide = TensorInfo(info.name, info.state, info.dtype, shape)
    raw = np.empty(math.prod(shape), numpy_dtype(info.dtype))
    extents = mapped(near, single_extents(locate(source_box(near))))
    piece = Piece(Box.whole(shape), 0, row_major(shape))
    read_items(store, [ReadItem(wide, extents, [(0, piece)])], [raw.view(np.uint8)], [str(info.key)], threads=1)
    positions = [_positions(*of_dim) for of_dim in zip(runs, near, part.start, part.shape, strict=True)]
    return raw.reshape(shape)[np.ix_(*positions)]


def _positions(runs: list[Run], near: list[Run], start: int, length: int) -> NDArray[np.intp]:
    """Where the indices of one dim of a part are among those that are read."""
    out, firsts = np.empty(length, np.intp), [first for first, _, _ in near]
    for first, n, to in runs:
        source, _, at = near[int(np.searchsorted(firsts, first, "right")) - 1]
        out[to - start : to - start + n] = np.arange(at + first - source, at + first - source + n)
    return out


def _strides(runs: Sequence[Sequence[Run]], locate: Locate) -> tuple[int, ...]:
    """The bytes between neighbouring indices of each dim in the file."""
    first = Box(tuple(of_dim[0][0] for of_dim in runs), (1,) * len(runs))
    found = next((e for e in single_extents(locate(first)) if e.box.intersect(first)), None)
    return (
        row_major(first.shape) if found is None else tuple(map(abs, found.strides))
    )  # reading reports what is missing


def _joined(runs: Sequence[Sequence[Run]], strides: Sequence[int], costs: Costs) -> list[list[Run]]:
    """The runs of each dim, in the order of the source, together with gaps between them that are read along."""
    return [list(_across_gaps(of_dim, stride, costs)) for of_dim, stride in zip(runs, strides, strict=True)]


def _across_gaps(runs: Sequence[Run], stride: int, costs: Costs) -> Iterator[Run]:
    gaps = [(b[0] - sum(a[:2])) * stride for a, b in pairwise(runs)]
    joins = [merges(gap, run[1] * stride, costs) for gap, run in zip(gaps, runs, strict=False)]
    first, last = runs[0], runs[-1]
    if 2 * sum(joins) < len(joins):
        joins = [False] * len(joins)  # most are read one by one in any case
    elif _DENSE * sum(n for _, n, _ in runs) >= sum(last[:2]) - first[0]:
        joins = [True] * len(joins)
    start, at = first[0], 0
    for a, b, joined in zip(runs, runs[1:], joins, strict=False):
        if not joined:
            yield start, sum(a[:2]) - start, at
            start, at = b[0], at + sum(a[:2]) - start
    yield start, sum(last[:2]) - start, at


def _size(runs: Sequence[Sequence[Run]]) -> int:
    return math.prod(sum(n for _, n, _ in of_dim) for of_dim in runs)
