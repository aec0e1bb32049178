"""What one rank keeps of a tensor's dims after shards, and the pieces that makes.

Shards act on one dim each, so a local tensor is a product over dims, each a list of *runs*: where an interval of the
global dim lies in the local one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, product
from typing import TYPE_CHECKING, NamedTuple

from ucformat.errors import LayoutError
from ucformat.geometry.box import Box, row_major
from ucformat.geometry.flat_buffer import flat_boxes
from ucformat.geometry.tensor import Piece

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ucformat.geometry.placement import Shard

__all__ = ["Cut", "Dim", "Run", "local_dims", "pieces_of"]


class Run(NamedTuple):
    """`size` indices from `start` of the global dim lie from `at` on in the local one.

    For `padding`, `start` counts from the end of the tensor: it is an index of the padding tensor.
    """

    start: int
    at: int
    size: int
    padding: bool


@dataclass(frozen=True, slots=True)
class Dim:
    """One dim of a local tensor: its size and its runs, ascending in `at`."""

    size: int
    runs: tuple[Run, ...]

    def take(self, intervals: Iterable[tuple[int, int]]) -> Dim:
        """The concatenation of intervals of this dim."""
        runs: list[Run] = []
        at = 0
        for a, b in intervals:
            for r in self.runs:
                lo, hi = max(a, r.at), min(b, r.at + r.size)
                if lo >= hi:
                    continue
                run = Run(r.start + lo - r.at, at + lo - a, hi - lo, r.padding)
                last = runs[-1] if runs else None
                if last and (last.start + last.size, last.at + last.size, last.padding) == (*run[:2], run.padding):
                    runs[-1] = last._replace(size=last.size + run.size)
                else:
                    runs.append(run)
            at += b - a
        return Dim(at, tuple(runs))


class Cut(NamedTuple):
    """A shard, as the coordinate at index `at` of `degree` sees it."""

    shard: Shard
    degree: int
    at: int


@lru_cache(maxsize=1 << 16)  # layers repeat: a model has few distinct (shape, cut)
def local_dims(shape: tuple[int, ...], cuts: tuple[Cut, ...]) -> tuple[Dim, ...]:
    """The dims of the local tensor after these cuts, in order; LayoutError (without a tensor's name) if impossible."""
    dims = [Dim(n, (Run(0, 0, n, False),) if n else ()) for n in shape]
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
                raise LayoutError(f"shard {shard.dim} with pad_to must come before anything else that cuts that dim")
            if padded is not None:
                raise LayoutError(f"shard {shard.dim} pads a second dim, after dim {padded}; one can be padded")
            padded, dims[d] = d, _pad(dims[d], shard.pad_to, degree)
        dims[d] = dims[d].take(_intervals(shard, dims[d].size, degree, at))
        done.add(d)
    return tuple(dims)


def _pad(dim: Dim, to: int, degree: int) -> Dim:
    size = -(-dim.size // to) * to
    if size % degree:
        raise LayoutError(
            f"a dim of {dim.size}, padded to {size}, cannot be cut evenly over {degree} coordinates",
            hint=f"make pad_to, now {to}, a multiple of {degree}",
        )
    extra = size - dim.size
    return Dim(size, (*dim.runs, Run(0, dim.size, extra, True))) if extra else dim


def _intervals(shard: Shard, n: int, degree: int, index: int) -> list[tuple[int, int]]:
    """The intervals of a dim of `n` that one coordinate takes: one, or one for each part."""
    shard.check_degree(degree)
    if shard.sizes is not None:
        if sum(shard.sizes) != n:
            raise LayoutError(f"the sizes {shard.sizes} add up to {sum(shard.sizes)}, not to the {n} of the dim")
        return [_nth(shard.sizes, index)]
    if shard.parts is None:
        return [_chunk(n, degree, index, even=shard.even)]
    total = sum(p if isinstance(p, int) else sum(p) for p in shard.parts)
    scale, rest = divmod(n, total)
    if rest:
        raise LayoutError(
            f"the parts {shard.parts} add up to {total}, which is neither the {n} of the dim nor divides it"
        )
    out, base = [], 0
    for part in shard.parts:
        widths = None if isinstance(part, int) else tuple(w * scale for w in part)
        width = part * scale if isinstance(part, int) else sum(w * scale for w in part)
        a, b = _chunk(width, degree, index, even=shard.even) if widths is None else _nth(widths, index)
        out.append((base + a, base + b))
        base += width
    return out


def _chunk(n: int, degree: int, index: int, *, even: bool) -> tuple[int, int]:
    """Part `index` as `torch.chunk` cuts: ceil(n / degree) each, the last smaller or empty."""
    if even and n % degree:
        raise LayoutError(f"{n} cannot be cut evenly over {degree} coordinates")
    step = -(-n // degree)
    return min(n, index * step), min(n, (index + 1) * step)


def _nth(sizes: tuple[int, ...], index: int) -> tuple[int, int]:
    stop = list(accumulate(sizes))[index]
    return stop - sizes[index], stop


def pieces_of(
    dims: tuple[Dim, ...], flat: tuple[int, int] | None = None, offset: int = 0, buffer: str | None = None
) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
    """The pieces of a local tensor and those of its padding, both ascending in offset.

    `flat` takes a range of the flattened local tensor only, whose first element lies at `offset` of `buffer`.
    """
    shape = tuple(d.size for d in dims)
    strides = row_major(shape)
    start, stop = flat or (0, math.prod(shape))
    pieces: list[Piece] = []
    padding: list[Piece] = []
    for box in flat_boxes(shape, start, stop):
        clipped = [d.take(((a, a + n),)).runs for d, a, n in zip(dims, box.start, box.shape, strict=True)]
        for runs in product(*clipped):
            at = sum((b + r.at) * s for b, r, s in zip(box.start, runs, strides, strict=True))
            piece = Piece(
                Box(tuple(r.start for r in runs), tuple(r.size for r in runs)), offset + at - start, strides, buffer
            )
            (padding if any(r.padding for r in runs) else pieces).append(piece)
    return tuple(pieces), tuple(padding)
