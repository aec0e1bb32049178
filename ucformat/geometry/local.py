"""The part of a tensor that one coordinate holds, as boxes of the local tensor and of the global tensor.

Each shard acts on one dim, so a local tensor is a product over dims. Each dim is a list of *runs*:
an interval of the global dim and its position in the local one.

Files may store a local tensor whole or as flat ranges (as ZeRO partitions it), which are boxes of
the local tensor. Clipped to its regions they are boxes of the global tensor, with their strides in
the file; a `View` whose sources are the local tensors computes this.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, product
from typing import TYPE_CHECKING, NamedTuple

from ucformat.errors import LayoutError
from ucformat.geometry.box import Box, chunk, row_major
from ucformat.geometry.flat_buffer import flat_boxes
from ucformat.geometry.tensor import Piece
from ucformat.geometry.view import BoxPair

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ucformat.geometry.placement import Shard


_MAX_BOXES = 1 << 16  # boxes that one piece may be split into


class IndexRun(NamedTuple):
    """Consecutive indices of the global dim, and the index of the local dim at which they begin.

    With `padding`, they are indices of the padding tensor and count from the end of the tensor.
    """

    indices: range
    at: int = 0
    padding: bool = False


@dataclass(frozen=True, slots=True)
class Dim:
    """One dim of a local tensor: its size and its runs, ascending in `at`."""

    size: int
    runs: tuple[IndexRun, ...]

    @classmethod
    def whole(cls, size: int, start: int = 0) -> Dim:
        """A dim with a single run."""
        return cls(size, (IndexRun(range(start, start + size)),) if size else ())

    def take(self, intervals: Iterable[tuple[int, int]]) -> Dim:
        """The concatenation of intervals of this dim.

        Args:
            intervals: pairs of start and exclusive end, as indices of the local dim.
        """
        runs: list[IndexRun] = []
        at = 0
        for a, b in intervals:
            for r in self.runs:
                low, high = max(a, r.at), min(b, r.at + len(r.indices))
                if low >= high:
                    continue
                run = IndexRun(r.indices[low - r.at : high - r.at], at + low - a, r.padding)
                last = runs[-1] if runs else None
                if (
                    last
                    and last.padding == run.padding
                    and last.at + len(last.indices) == run.at
                    and last.indices.stop == run.indices.start
                ):
                    runs[-1] = IndexRun(
                        range(last.indices.start, run.indices.stop), last.at, last.padding
                    )
                else:
                    runs.append(run)
            at += b - a
        return Dim(at, tuple(runs))


class ShardAt(NamedTuple):
    """A shard of degree `degree`, for the coordinate at index `at`."""

    shard: Shard
    degree: int
    at: int


@lru_cache(maxsize=1 << 16)  # layers repeat: a model has few distinct (shape, cut)
def local_dims(shape: tuple[int, ...], cuts: tuple[ShardAt, ...]) -> tuple[Dim, ...]:
    """The dims of the local tensor after a sequence of shards."""
    dims = [Dim.whole(n) for n in shape]
    done: set[int] = set()
    padded: int | None = None
    for shard, degree, at in cuts:
        d = shard.dim + len(shape) if shard.dim < 0 else shard.dim
        if not 0 <= d < len(shape):
            raise LayoutError(
                f"shard {shard.dim} is out of range for the shape {shape}",
                hint="match tensors of other shapes, such as a scalar step, by an earlier rule",
            )
        if shard.pad_to is not None:
            if d in done:
                raise LayoutError(
                    f"shard {shard.dim} with pad_to must come before anything else that cuts "
                    "that dim"
                )
            if padded is not None:
                raise LayoutError(
                    f"shard {shard.dim} pads a second dim, after dim {padded}; only one can be "
                    "padded"
                )
            padded, dims[d] = d, _pad(dims[d], shard.pad_to, degree)
        dims[d] = dims[d].take(_intervals(shard, dims[d].size, degree, at))
        done.add(d)
    return tuple(dims)


def _pad(dim: Dim, multiple: int, degree: int) -> Dim:
    size = -(-dim.size // multiple) * multiple
    if size % degree:
        raise LayoutError(
            f"a dim of {dim.size}, padded to {size}, cannot be cut evenly over {degree} "
            "coordinates",
            hint=f"make pad_to, now {multiple}, a multiple of {degree}",
        )
    extra = size - dim.size
    return Dim(size, (*dim.runs, IndexRun(range(extra), dim.size, padding=True))) if extra else dim


def _intervals(shard: Shard, n: int, degree: int, index: int) -> list[tuple[int, int]]:
    """The intervals of a dim of `n` indices that a coordinate takes: one, or one for each part."""
    shard.check_degree(degree)
    if shard.sizes is not None:
        if sum(shard.sizes) != n:
            raise LayoutError(
                f"the sizes {shard.sizes} add up to {sum(shard.sizes)}, not to the {n} of the dim"
            )
        return [_nth(shard.sizes, index)]
    if shard.parts is None:
        return [_chunk(n, degree, index, even=shard.even)]
    total = sum(p if isinstance(p, int) else sum(p) for p in shard.parts)
    scale, remainder = divmod(n, total)
    if remainder:
        raise LayoutError(
            f"the parts {shard.parts} add up to {total}, which is neither the {n} of the dim nor "
            "divides it"
        )
    out, base = [], 0
    for part in shard.parts:
        widths = None if isinstance(part, int) else tuple(w * scale for w in part)
        width = part * scale if isinstance(part, int) else sum(w * scale for w in part)
        a, b = (
            _chunk(width, degree, index, even=shard.even) if widths is None else _nth(widths, index)
        )
        out.append((base + a, base + b))
        base += width
    return out


def _chunk(n: int, degree: int, index: int, *, even: bool) -> tuple[int, int]:
    if even and n % degree:
        raise LayoutError(f"{n} cannot be cut evenly over {degree} coordinates")
    return chunk(n, degree, index)


def _nth(sizes: tuple[int, ...], index: int) -> tuple[int, int]:
    stop = list(accumulate(sizes))[index]
    return stop - sizes[index], stop


def pieces_of(
    dims: tuple[Dim, ...],
    flat: tuple[int, int] | None = None,
    offset: int = 0,
    buffer: str | None = None,
) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
    """The pieces of a local tensor and those of its padding, both in ascending order of offset.

    Args:
        flat: a range `[start, stop)` of the flattened local tensor (None: all of it).
        offset: element of the buffer at which the range begins.
        buffer: name of the flat buffer (None: the tensor has memory of its own).
    """
    shape = tuple(d.size for d in dims)
    strides = row_major(shape)
    start, stop = flat or (0, math.prod(shape))
    pieces: list[Piece] = []
    padding: list[Piece] = []
    for box in flat_boxes(shape, start, stop):
        clipped = [
            d.take(((a, a + n),)).runs for d, a, n in zip(dims, box.start, box.shape, strict=True)
        ]
        for runs in _products(shape, clipped):
            at = sum((b + r.at) * s for b, r, s in zip(box.start, runs, strides, strict=True))
            piece = Piece(
                Box(tuple(r.indices.start for r in runs), tuple(len(r.indices) for r in runs)),
                offset + at - start,
                strides,
                buffer,
            )
            (padding if any(r.padding for r in runs) else pieces).append(piece)
    return tuple(pieces), tuple(padding)


def _products(
    shape: tuple[int, ...], runs: Sequence[tuple[IndexRun, ...]]
) -> Iterator[tuple[IndexRun, ...]]:
    """The boxes of a local tensor: one for each choice of a run in every dim."""
    if math.prod(map(len, runs)) > _MAX_BOXES:  # a few runs in each of some dims make very many
        raise _too_many(shape)
    return product(*runs)


def _too_many(shape: tuple[int, ...]) -> LayoutError:
    return LayoutError(f"a piece of the shape {shape} splits into more than {_MAX_BOXES:,} boxes")


def regions_of(dims: tuple[Dim, ...]) -> tuple[tuple[BoxPair, ...], tuple[BoxPair, ...]]:
    """The parts of the global tensor that a local tensor holds, and those of the padding tensor."""
    regions: list[BoxPair] = []
    padding: list[BoxPair] = []
    for runs in _products(tuple(d.size for d in dims), [d.runs for d in dims]):
        shape = tuple(len(r.indices) for r in runs)
        region = BoxPair.aligned(
            Box(tuple(r.indices.start for r in runs), shape), Box(tuple(r.at for r in runs), shape)
        )
        (padding if any(r.padding for r in runs) else regions).append(region)
    return tuple(regions), tuple(padding)


def keep_rows(
    regions: Iterable[BoxPair], rows: int
) -> tuple[tuple[BoxPair, ...], tuple[BoxPair, ...]]:
    """Split regions at a row of the global tensor; the rows after it are padding that a file holds.

    Returns:
        the regions before the row, and the regions from it on, as boxes of the padding tensor.
    """
    kept: list[BoxPair] = []
    padding: list[BoxPair] = []
    for region in regions:
        box, local = region.target, region.box
        kept_rows = min(box.stop[0], rows) - box.start[0]
        if kept_rows > 0:
            kept.append(BoxPair.aligned(_rows(box, 0, kept_rows), _rows(local, 0, kept_rows)))
        if kept_rows < box.shape[0]:
            first = max(0, kept_rows)
            shift = (-rows, *[0] * (len(box.start) - 1))
            spare = _rows(box, first, box.shape[0]).shift(shift)
            padding.append(BoxPair.aligned(spare, _rows(local, first, box.shape[0])))
    return tuple(kept), tuple(padding)


def strided_regions(
    shape: tuple[int, ...],
    local_shape: tuple[int, ...],
    size: tuple[int, ...],
    source: tuple[int, tuple[int, ...]],
    target: tuple[int, tuple[int, ...]],
) -> Iterator[BoxPair]:
    """The regions of a strided piece: one, or one for each index of the axes that skip elements.

    Args:
        source: the piece in the global tensor: offset and strides in elements, as for
            `torch.as_strided`.
    """
    whole, inner = _place(shape, size, *source), _place(local_shape, size, *target)
    cut = [
        n > 1 and (a != 1 or b != 1) for n, a, b in zip(size, whole.steps, inner.steps, strict=True)
    ]
    if math.prod(n for n, c in zip(size, cut, strict=True) if c) > _MAX_BOXES:
        raise _too_many(size)
    if 0 in size:
        return
    part = tuple(1 if c else n for n, c in zip(size, cut, strict=True))
    for index in product(*(range(n if c else 1) for n, c in zip(size, cut, strict=True))):
        yield BoxPair.aligned(Box(whole.at(index), part), Box(inner.at(index), part))


def _rows(box: Box, first: int, last: int) -> Box:
    return Box((box.start[0] + first, *box.start[1:]), (last - first, *box.shape[1:]))


class _Place(NamedTuple):
    """A strided piece of a tensor: the index of its first element, and its step along each dim."""

    start: tuple[int, ...]
    steps: tuple[int, ...]

    def at(self, index: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(a + i * s for a, i, s in zip(self.start, index, self.steps, strict=True))


def _place(
    shape: tuple[int, ...], size: tuple[int, ...], offset: int, strides: tuple[int, ...]
) -> _Place:
    where = f"a piece of the shape {size} at element {offset} with the strides {strides}"
    if not len(shape) == len(size) == len(strides) or any(n < 0 for n in size) or offset < 0:
        raise LayoutError(f"{where} does not have the dims of a tensor of the shape {shape}")
    if 0 in size:
        return _Place((0,) * len(size), (1,) * len(size))
    start, steps, remaining = [], [], offset
    for n, count, stride, unit in zip(shape, size, strides, row_major(shape), strict=True):
        first, remaining = divmod(remaining, unit) if unit else (0, remaining)
        step, remainder = divmod(stride, unit) if unit and count > 1 else (1, 0)
        if remainder or step < 1 or first + (count - 1) * step >= n:
            raise LayoutError(
                f"{where} does not run along the dims of a tensor of the shape {shape}"
            )
        start.append(first)
        steps.append(step)
    return _Place(tuple(start), tuple(steps))
