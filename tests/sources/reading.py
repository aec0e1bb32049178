"""A reference reader: walks the extents of a tensor one by one, with nothing clever, and proves that they cover it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucformat.geometry.tensor import TensorInfo
    from ucformat.sources.base import OpenSource
    from ucformat.storage.base import Info, Store


def read_tensor(source: OpenSource, info: TensorInfo) -> bytes:
    """The row-major bytes of a tensor; every element must be covered exactly once."""
    out, seen = np.zeros(info.shape, f"V{info.itemsize}"), np.zeros(info.shape, np.int8)
    for extent in source.extents(info.key):
        box = extent.box
        where = tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))
        span = info.itemsize + sum((n - 1) * s for n, s in zip(box.shape, extent.strides, strict=True))
        raw = source.store.read(extent.file, extent.offset, span)
        out[where] = np.ndarray(box.shape, out.dtype, raw, 0, extent.strides)
        seen[where] += 1
    assert (seen == 1).all(), f"{info.key} is not covered exactly once"
    return out.tobytes()


class Counting:
    """A store that counts what is read of each file."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.bytes: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def list(self, prefix: str = "") -> Iterator[Info]:
        return self._store.list(prefix)

    def read(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        data = self._store.read(key, offset, nbytes)
        self.bytes[key] += len(data)
        self.requests[key] += 1
        return data
