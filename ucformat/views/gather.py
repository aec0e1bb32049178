"""Scattered indices: rows of a file are read with the gaps between them, and the indices are picked in memory.

Where a file stores the indices of a dim so close to each other that one request reads several of them, an extent for
each would be read in requests of a few bytes, or read the same bytes again and again.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np

from ucformat.geometry.box import Box, row_major
from ucformat.geometry.flat_buffer import flat_boxes
from ucformat.geometry.tensor import Piece, TensorInfo, single_extents
from ucformat.reading.copies import merges
from ucformat.reading.dtypes import numpy_dtype
from ucformat.reading.plan import ReadItem, make_plan
from ucformat.reading.read import read_items
from ucformat.views.picks import Picks, clipped, mapped, source_box

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from ucformat.geometry.tensor import Extent, Tiles
    from ucformat.storage.base import Costs, Store
    from ucformat.views.picks import Run
    from ucformat.views.table import Formula

    Locate = Callable[[Box], Iterable[Extent | Tiles]]

_FEW = 64  # combinations of runs that are read one by one in any case
_DENSE = 8  # all of a span is read if at least one index in so many is wanted
_AT_ONCE = 4 << 20  # bytes that are read at once, gaps included


def is_scattered(formula: Formula, locate: Locate, costs: Costs) -> bool:
    """Whether indices are picked in memory; otherwise each run of them has extents of its own."""
    runs = clipped(formula.axes, Box.whole(formula.info.shape))
    if not all(runs) or math.prod(map(len, runs)) <= _FEW:
        return False
    return any(
        len(list(_across_gaps(of_dim, stride, costs))) < len(of_dim)
        for of_dim, stride in zip(runs, _strides(runs, locate), strict=True)
    )


def gather(store: Store, formula: Formula, locate: Locate, first: int, last: int) -> NDArray[np.generic]:
    """Read a range of a tensor of scattered indices."""
    info, out = formula.info, np.empty(last - first, numpy_dtype(formula.info.dtype))
    steps = row_major(info.shape)
    for box in flat_boxes(info.shape, first, last):
        for part, runs, near in _parts(formula, box, locate, store.costs):
            at = sum(a * s for a, s in zip(part.start, steps, strict=True)) - first
            into = np.lib.stride_tricks.as_strided(out[at:], part.shape, [s * info.itemsize for s in steps])
            into[...] = _read(store, info, locate, part, runs, near)
    return out


def bytes_read(store: Store, formula: Formula, locate: Locate, first: int, last: int) -> int:
    """The bytes that are read for a range of a tensor of scattered indices."""
    boxes = flat_boxes(formula.info.shape, first, last)
    parts = (part for box in boxes for part in _parts(formula, box, locate, store.costs))
    plans = (make_plan([_item(formula.info, locate, near)], "whole", store.costs) for _, _, near in parts)
    return sum(plan.through(store).bytes_read for plan in plans)


def in_order(formula: Formula) -> tuple[Formula, Picks | None]:
    """The indices with those of the first dim in the order of the source.

    A range of the tensor has only some of these, so that each range would otherwise read from everywhere.

    Returns:
        The indices, and which of the first dim they were in the order in which they are wanted; None if it is the same.
    """
    axis = formula.axes[0]
    if axis is None or list(axis.runs) == sorted(axis.runs):
        return formula, None
    runs = sorted(axis.runs)
    begins = dict(zip(runs, accumulate((n for _, n in runs), initial=0), strict=False))
    return (
        replace(formula, axes=(Picks(tuple(runs)), *formula.axes[1:])),
        Picks(tuple((begins[run], run[1]) for run in axis.runs)),
    )


def _parts(
    formula: Formula, box: Box, locate: Locate, costs: Costs
) -> Iterator[tuple[Box, list[list[Run]], list[list[Run]]]]:
    """Parts of a box that are small enough to be read at once, with their runs, and these joined across gaps."""
    strides = _strides(clipped(formula.axes, box), locate)

    @cache  # only some of the dims are cut
    def of_dim(d: int, start: int, length: int) -> tuple[list[Run], list[Run]]:
        (runs,) = clipped(formula.axes[d : d + 1], Box((start,), (length,)))
        return runs, list(_across_gaps(runs, strides[d], costs))

    todo = [box]
    while todo:
        part = todo.pop()
        dims = [of_dim(d, start, n) for d, (start, n) in enumerate(zip(part.start, part.shape, strict=True))]
        near = [joined for _, joined in dims]
        if _size(near) * formula.info.itemsize <= _AT_ONCE or part.size == 1:
            yield part, [runs for runs, _ in dims], near
            continue
        d = next(d for d, n in enumerate(part.shape) if n > 1)
        half = part.shape[d] // 2
        for skip, n in ((half, part.shape[d] - half), (0, half)):
            start = tuple(a + skip * (i == d) for i, a in enumerate(part.start))
            todo.append(Box(start, (*part.shape[:d], n, *part.shape[d + 1 :])))


def _item(info: TensorInfo, locate: Locate, near: list[list[Run]]) -> ReadItem:
    """What is read for a part: joined runs."""
    shape = tuple(sum(n for _, n, _ in of_dim) for of_dim in near)
    box = source_box(near)
    extents = mapped(near, single_extents(locate(box), box))
    piece = Piece(Box.whole(shape), 0, row_major(shape))
    return ReadItem(TensorInfo(info.name, info.state, info.dtype, shape), extents, [(0, piece)])


def _read(
    store: Store, info: TensorInfo, locate: Locate, part: Box, runs: list[list[Run]], near: list[list[Run]]
) -> NDArray[np.generic]:
    """Read joined runs, and pick the indices of a part."""
    item = _item(info, locate, near)
    raw = np.empty(item.info.size, numpy_dtype(info.dtype))
    read_items(store, [item], [raw.view(np.uint8)], [str(info.key)], threads=1)
    positions = [_positions(*of_dim) for of_dim in zip(runs, near, part.start, part.shape, strict=True)]
    return raw.reshape(item.info.shape)[np.ix_(*positions)]


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
    found = next((e for e in single_extents(locate(first), first) if e.box.intersect(first)), None)
    return (
        row_major(first.shape) if found is None else tuple(map(abs, found.strides))
    )  # reading reports what is missing


def _across_gaps(runs: Sequence[Run], stride: int, costs: Costs) -> Iterator[Run]:
    """Runs of one dim, in the order of the source, together with gaps between them that are read along."""
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
    return math.prod(sum(n for _, n, _ in of_dim) for of_dim in runs)  # in elements
