"""Proves that boxes cover a tensor: no hole, and no overlap except exact replicas.

Boxes are split into slabs that no box straddles, along one dim after another, until each slab holds
one box that fills it. The boxes of every placement can be separated like this in a few sorts: O(n
log n). What cannot (a pinwheel, an overlap) is decided by a sweep over its pairs. Single elements
are never visited.
"""

from __future__ import annotations

import math
from operator import itemgetter
from typing import TYPE_CHECKING

from ucformat.errors import CoverageError
from ucformat.geometry.box import Box

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ucformat.geometry.tensor import TensorInfo


Owner = int | str
# (start, stop) for each dim: plain tuples sort and hash faster than boxes
_Bounds = tuple[tuple[int, int], ...]


def prove(info: TensorInfo, boxes: Iterable[tuple[Owner, Box]], *, partial: bool = False) -> None:
    """Prove that boxes cover a tensor exactly; equal boxes are replicas and count once.

    Args:
        partial: each owner has values of its own, so its boxes alone must cover the tensor
            (default: no).
    """
    if partial:
        by_owner: dict[Owner, list[tuple[Owner, Box]]] = {}
        for owner, box in boxes:
            by_owner.setdefault(owner, []).append((owner, box))
        for own in by_owner.values() or [[]]:
            prove(info, own)
        return
    whole = tuple((0, n) for n in info.shape)
    owners = _owners(info, whole, boxes)
    if any(a == b for a, b in whole):
        return
    pending = [(whole, list(owners))]
    while pending:
        region, inside = pending.pop()
        if not inside:
            raise _hole_error(info, region, owners)
        if len(inside) == 1 and inside[0] == region:
            continue
        slabs = next(filter(None, (_slabs(region, inside, d) for d in range(len(region)))), None)
        if slabs is None:
            _sweep(info, region, inside, owners)
        else:
            pending += slabs


def _owners(
    info: TensorInfo, whole: _Bounds, boxes: Iterable[tuple[Owner, Box]]
) -> dict[_Bounds, Owner]:
    """The distinct non-empty boxes, each with its first owner; all must be within the tensor."""
    owners: dict[_Bounds, Owner] = {}
    for owner, box in boxes:
        if len(box.start) != len(whole):
            raise CoverageError(
                f"{info.key} of shape {info.shape}: {_name(owner)} holds a box of other dims, {box}"
            )
        bounds = tuple((a, a + n) for a, n in zip(box.start, box.shape, strict=True))
        if all(a < b for a, b in bounds):
            owners.setdefault(bounds, owner)
            if any(a < 0 or b > n for (a, b), (_, n) in zip(bounds, whole, strict=True)):
                raise CoverageError(
                    f"{info.key} of shape {info.shape}: {_name(owner)} holds {box}, which leaves "
                    "the tensor"
                )
    return owners


def _slabs(
    region: _Bounds, boxes: list[_Bounds], d: int
) -> list[tuple[_Bounds, list[_Bounds]]] | None:
    """The region cut along dim `d` wherever no box straddles the cut, gaps included; None if it cannot be cut."""
    boxes = sorted(boxes, key=itemgetter(d))
    out: list[tuple[_Bounds, list[_Bounds]]] = []
    end, stop = region[d]
    first = 0  # index of the first box of the slab that ends at `end`

    def add_slab(a: int, b: int, inside: list[_Bounds]) -> None:
        out.append(((*region[:d], (a, b), *region[d + 1 :]), inside))

    begin = end
    for i, box in enumerate(boxes):
        a, b = box[d]
        if a >= end:
            if i > first:
                add_slab(begin, end, boxes[first:i])
            if a > end:
                add_slab(end, a, [])
            first, begin = i, a
        end = max(end, b)
    add_slab(begin, end, boxes[first:])
    if end < stop:
        add_slab(end, stop, [])
    return out if len(out) > 1 else None


def _sweep(
    info: TensorInfo, region: _Bounds, boxes: list[_Bounds], owners: dict[_Bounds, Owner]
) -> None:
    """Check boxes that no slab separates: raise for the first overlap, or for a hole if their sizes fall short."""
    # The sweep keeps the boxes that extend past the current start: sweep along the dim in which
    # they are shortest.
    d = min(
        range(len(region)),
        key=lambda d: sum(b[d][1] - b[d][0] for b in boxes) / (region[d][1] - region[d][0]),
    )
    active: list[_Bounds] = []
    for box in sorted(boxes, key=itemgetter(d)):
        active = [other for other in active if other[d][1] > box[d][0]]
        for other in active:
            if (shared := _intersection(box, other)) is not None:
                mine, theirs = owners[box], owners[other]
                raise CoverageError(
                    f"{info.key} of shape {info.shape}: {_name(theirs)} holds {_box(other)} and "
                    f"{_name(mine)} holds "
                    f"{_box(box)}, which are not the same box but share {_box(shared)}",
                    hint=(
                        "two placements or ranks claim these elements; replicas must hold equal "
                        "boxes"
                    ),
                )
        active.append(box)
    while sum(map(_size, boxes)) < _size(region):  # bisect the region towards the hole
        if not boxes:
            raise _hole_error(info, region, owners)
        region, boxes = next(
            (r, inside)
            for r, inside in _halves(region, boxes)
            if sum(map(_size, inside)) < _size(r)
        )


def _halves(region: _Bounds, boxes: list[_Bounds]) -> Iterator[tuple[_Bounds, list[_Bounds]]]:
    """The region cut in two at the median edge of its boxes, each half with the boxes clipped to it."""
    edges = {
        d: sorted({x for b in boxes for x in b[d]} - set(region[d])) for d in range(len(region))
    }
    d = max(edges, key=lambda d: len(edges[d]))
    middle = edges[d][len(edges[d]) // 2]
    for interval in ((region[d][0], middle), (middle, region[d][1])):
        half = (*region[:d], interval, *region[d + 1 :])
        yield half, [clipped for b in boxes if (clipped := _intersection(b, half)) is not None]


def _intersection(a: _Bounds, b: _Bounds) -> _Bounds | None:
    out = tuple((max(p, r), min(q, s)) for (p, q), (r, s) in zip(a, b, strict=True))
    return out if all(p < q for p, q in out) else None


def _size(bounds: _Bounds) -> int:
    return math.prod(b - a for a, b in bounds)


def _box(bounds: _Bounds) -> Box:
    return Box(tuple(a for a, _ in bounds), tuple(b - a for a, b in bounds))


def _name(owner: Owner) -> str:
    return f"rank {owner}" if isinstance(owner, int) else owner


def _hole_error(info: TensorInfo, region: _Bounds, owners: dict[_Bounds, Owner]) -> CoverageError:
    """The error for a region that no box covers; it names the owner of the nearest box before it."""
    before = max((b for b in owners if b < region), default=None)
    after = f"; {_name(owners[before])} holds {_box(before)} before it" if before else ""
    return CoverageError(
        f"{info.key} of shape {info.shape}: no rank or file holds {_box(region)}{after}",
        hint="a rank, a file or a rule is missing" if owners else "no part of the tensor is held",
    )
