"""Whether replicas are equal: of extents of one box any may be read, so all must hold the same bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ucformat.errors import IntegrityError, NotFound
from ucformat.format.structure import Problem
from ucformat.geometry.box import Box
from ucformat.geometry.tensor import Extent, TensorInfo
from ucformat.reading.read import read_flat

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ucformat.storage.base import Store

__all__ = ["unequal_replicas"]

_PART = 4 << 20  # bytes of each of two replicas that are held at once


def unequal_replicas(store: Store, info: TensorInfo, extents: Iterable[Extent]) -> Iterator[Problem]:
    """Read every replica of a tensor's boxes, and name those that differ from the first; bytes, not values.

    What cannot be read is no difference: it is found where the files themselves are checked.
    """
    first: dict[Box, Extent] = {}
    same: set[tuple[Box, str, int, tuple[int, ...]]] = set()
    for e in extents:
        here = (e.box, e.file, e.offset, e.strides)
        if not e.box.size or here in same:
            continue
        same.add(here)
        one = first.setdefault(e.box, e)
        if one is not e and not _equal(store, info, one, e):
            where = f"bytes from {e.offset} on" if one.file == e.file else e.file
            yield Problem(e.file, f"its replicas of {e.box} differ: {where}, and {one.file}", info.name, info.state)


def _equal(store: Store, info: TensorInfo, one: Extent, other: Extent) -> bool:
    part = TensorInfo(info.name, info.state, info.dtype, one.box.shape)
    whole, most = Box.whole(one.box.shape), max(1, _PART // info.itemsize)
    a, b = (Extent(whole, e.file, e.offset, e.strides) for e in (one, other))
    try:
        return all(
            read_flat(store, part, [a], at, min(at + most, part.size)).tobytes()
            == read_flat(store, part, [b], at, min(at + most, part.size)).tobytes()
            for at in range(0, part.size, most)
        )
    except (IntegrityError, NotFound):
        return True
