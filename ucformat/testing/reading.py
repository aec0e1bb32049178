"""A reference reader: walks the extents of a tensor one by one, with nothing clever, and proves that they cover it."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np

from ucformat.geometry.box import reach

__all__ = ["Counting", "nbytes_read", "read_tensor"]

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ucformat.geometry.tensor import TensorInfo
    from ucformat.sources.base import OpenSource
    from ucformat.storage.base import Info, Store


def read_tensor(source: OpenSource, info: TensorInfo) -> bytes:
    """Read the row-major bytes of a tensor; AssertionError unless every element is covered exactly once.

    Args:
        source: an opened checkpoint.
        info: the tensor.
    """
    out, seen = np.zeros(info.shape, f"V{info.itemsize}"), np.zeros(info.shape, np.int8)
    for extent in source.extents(info.key):
        box = extent.box
        where = tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))
        span = info.itemsize + sum(
            (n - 1) * s for n, s in zip(box.shape, extent.strides, strict=True)
        )
        raw = source.store.read(extent.file, extent.offset, span)
        out[where] = np.ndarray(box.shape, out.dtype, raw, 0, extent.strides)
        seen[where] += 1
    assert (seen == 1).all(), f"{info.key} is not covered exactly once"
    return out.tobytes()


class Counting:
    """A store that counts what is read of each file, and notes which bytes.

    Attributes:
        bytes: read of each file.
        requests: of each file.
        ranges: first and end of what was read of each file.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.bytes: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()
        self.ranges: dict[str, list[tuple[int, int]]] = defaultdict(list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def list(self, prefix: str = "") -> Iterator[Info]:
        """See Store."""
        return self._store.list(prefix)

    def read(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """See Store."""
        data = self._store.read(key, offset, nbytes)
        self.bytes[key] += len(data)
        self.requests[key] += 1
        self.ranges[key].append((offset, offset + len(data)))
        return data


def nbytes_read(
    ranges: Mapping[str, Sequence[tuple[int, int]]], source: OpenSource, info: TensorInfo
) -> int:
    """How many of the bytes of a tensor lie in ranges that were read; those read twice count twice.

    Args:
        ranges: what was read of each file, as first and end.
        source: an opened checkpoint.
        info: the tensor.
    """
    found = 0
    for extent in source.extents(info.key):
        stop = extent.offset + reach(extent.box.shape, extent.strides) + info.itemsize
        parts = ((max(a, extent.offset), min(b, stop)) for a, b in ranges.get(extent.file, ()))
        found += sum(max(0, b - a) for a, b in parts)
    return found
