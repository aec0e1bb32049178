"""How a tensor is put together from the local tensors of tensor-parallel ranks: its shape, and the regions of each.

It is what a `Shard` of a layout describes, from the other side: the shapes of the local tensors are known, and that
of the whole tensor follows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ucformat.errors import LayoutError
from ucformat.geometry.box import Box
from ucformat.geometry.local import ShardAt, keep_rows, local_dims, regions_of
from ucformat.geometry.placement import Shard
from ucformat.geometry.view import BoxPair

if TYPE_CHECKING:
    from collections.abc import Sequence

#: The axis of layouts.
TP = "tp"
_MAX_PARTS = 1 << 16

Shapes = tuple[tuple[int, ...], ...]  # of the local tensors, by tensor-parallel rank


@dataclass(frozen=True, slots=True)
class TPSharding:
    """A global tensor and its regions: the parts of it that are stored in each tensor-parallel rank's local tensor.

    Equal boxes of several ranks are replicas. `padding`: regions of rows that files hold beyond the
    end of the tensor. `mean`: the tensor is the mean of the ranks' values. `scaled`: stored values
    are those of the tensor times a factor; `factor` is that, or 0 if not all have the same.
    """

    shape: tuple[int, ...]
    regions: tuple[tuple[BoxPair, ...], ...]
    padding: tuple[tuple[BoxPair, ...], ...] = ()
    padding_rows: int = 0
    mean: bool = False
    scaled: bool = False
    factor: float = 0.0
    why: str = ""

    def because(self, why: str) -> TPSharding:
        """A copy with this reason."""
        return replace(self, why=why)

    def strip(self, rows: int) -> TPSharding:
        """A copy whose trailing rows are padding."""
        if not self.shape or rows >= self.shape[0]:
            return self
        cut = [keep_rows(regions, rows) for regions in self.regions]
        return replace(
            self,
            shape=(rows, *self.shape[1:]),
            regions=tuple(kept for kept, _ in cut),
            padding=tuple(spare for _, spare in cut),
            padding_rows=self.shape[0] - rows,
        )

    @property
    def padding_shape(self) -> tuple[int, ...]:
        """The shape of the padding tensor."""
        return (self.padding_rows, *self.shape[1:])


def replicate(shapes: Shapes) -> TPSharding:
    """Every rank holds the whole tensor."""
    if len(set(shapes)) > 1:
        raise LayoutError(f"its parts have the shapes {_list(shapes)}, so they cannot be replicas")
    whole = Box.whole(shapes[0])
    return TPSharding(shapes[0], ((BoxPair.aligned(whole, whole),),) * len(shapes))


def mean(shapes: Shapes) -> TPSharding:
    """The tensor is the mean of the ranks' values."""
    return replace(replicate(shapes), mean=len(shapes) > 1)


def concatenate(shapes: Shapes, dim: int) -> TPSharding:
    """The ranks' parts are concatenated along a dim, in which they may differ."""
    d = dim + len(shapes[0]) if dim < 0 else dim
    if not 0 <= d < len(shapes[0]):
        raise LayoutError(
            f"its parts of the shape {list(shapes[0])} cannot be joined along dim {dim}"
        )
    return shard(shapes, Shard(d, TP, sizes=tuple(s[d] if d < len(s) else 0 for s in shapes)))


def shard(shapes: Shapes, sharding: Shard, size: int | None = None) -> TPSharding:
    """The ranks' parts are those of a `Shard`.

    Args:
        size: global size of the dim; None: the sum of the parts, which include any padding.
    """
    ndim = len(shapes[0])
    d = sharding.dim + ndim if sharding.dim < 0 else sharding.dim
    if not 0 <= d < ndim or any(len(s) != ndim for s in shapes):
        raise LayoutError(
            f"its parts have the shapes {_list(shapes)}, which cannot be joined along dim "
            f"{sharding.dim}"
        )
    # the widths are those of the files
    if sharding.sizes is None and sharding.parts is None and sharding.pad_to is None:
        sharding = replace(sharding, sizes=tuple(s[d] for s in shapes))
    total = sum(s[d] for s in shapes) if size is None else size
    whole = (*shapes[0][:d], total, *shapes[0][d + 1 :])
    regions, padding = [], []
    for at, shape in enumerate(shapes):
        dims = local_dims(whole, (ShardAt(sharding, len(shapes), at),))
        expected = tuple(n.size for n in dims)
        if expected != shape:
            raise LayoutError(
                f"the part of tensor-parallel rank {at} has the shape {list(shape)}, where "
                f"{_shard_text(sharding)} of "
                f"{list(whole)} gives {list(expected)}"
            )
        kept, spare = regions_of(dims)
        regions.append(kept)
        padding.append(spare)
    rows = -total % sharding.pad_to if sharding.pad_to else 0
    if rows and d:
        raise LayoutError(
            f"{_shard_text(sharding)} pads dim {d}; padding is supported along dim 0 only"
        )
    return TPSharding(whole, tuple(regions), tuple(padding) if rows else (), rows)


def sub_params(
    shapes: Shapes, view: Sequence[int | Sequence[int]], dim: int, widths: Sequence[Sequence[int]]
) -> TPSharding:
    """Several tensors, concatenated along a dim of a view, are each cut separately.

    Args:
        view: shape of the global tensor as a view, which may have more dims; -1: the remaining
            elements.
    """
    sizes: list[int] = [n if isinstance(n, int) else sum(n) for n in view]
    if not 0 <= dim < len(sizes):
        raise LayoutError(f"its sub-parameters are along dim {dim} of a view of {len(sizes)} dims")
    if any(len(w) != len(shapes) for w in widths):
        raise LayoutError(f"its sub-parameters are not cut for {len(shapes)} ranks")
    sizes[dim] = sum(sum(w) for w in widths)
    total = sum(math.prod(s) for s in shapes)
    free = [i for i, n in enumerate(sizes) if n < 0]
    fixed_size = math.prod(n for n in sizes if n >= 0)
    if free and fixed_size:
        sizes[free[0]] = total // fixed_size
    if len(free) > 1 or math.prod(sizes) != total:
        raise LayoutError(
            f"its parts of the shapes {_list(shapes)} are not {total} elements of the view {sizes}"
        )
    own_dim, outer, inner = _dim_of(shapes[0], sizes, dim)
    if outer * len(widths) > _MAX_PARTS:
        raise LayoutError(f"it would be split into {outer * len(widths):,} parts")
    parts = tuple(tuple(w * inner for w in part) for part in widths) * outer
    return shard(shapes, Shard(own_dim, TP, parts=parts))


def _dim_of(shape: tuple[int, ...], view: list[int], dim: int) -> tuple[int, int, int]:
    """The dim of the tensor that a dim of its view is in, and the product of those before and after it in there."""
    for d in range(len(shape)):
        for first in range(dim + 1):
            for last in range(dim + 1, len(view) + 1):
                if _splits(view[:first], shape[:d]) and _splits(view[last:], shape[d + 1 :]):
                    return d, math.prod(view[first:dim]), math.prod(view[dim + 1 : last])
    raise LayoutError(
        f"the view {view} of its sub-parameters does not split the dims of {list(shape)}"
    )


def _splits(view: list[int], shape: tuple[int, ...]) -> bool:
    """Whether a view is of this shape, each dim perhaps split into several."""
    remaining = list(view)
    for size in shape:
        product = 1
        while remaining and (product < size or remaining[0] == 1):
            product *= remaining.pop(0)
        if product != size:
            return False
    return not remaining


def _shard_text(sharding: Shard) -> str:
    settings = {"sizes": sharding.sizes, "parts": sharding.parts, "pad_to": sharding.pad_to}
    return f"shard {sharding.dim}" + "".join(
        f" {k} {v}" for k, v in settings.items() if v is not None
    )


def _list(shapes: Shapes) -> str:
    return ", ".join(str(list(s)) for s in shapes[:8]) + (", …" if len(shapes) > 8 else "")
