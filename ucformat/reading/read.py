"""Reading into memory: plan, compare with the sizes of the files, execute."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ucformat.errors import IntegrityError, MissingData, NotFound
from ucformat.geometry.box import row_major
from ucformat.geometry.flat_buffer import flat_boxes
from ucformat.geometry.tensor import Piece
from ucformat.reading.dtypes import numpy_dtype
from ucformat.reading.execute import execute
from ucformat.reading.plan import ReadItem, make_plan
from ucformat.storage.cache.scope import read_consistently
from ucformat.storage.concurrency import map_io
from ucformat.storage.watched import first_info

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from ucformat.geometry.box import Box
    from ucformat.geometry.tensor import Extent, TensorInfo, Tiles
    from ucformat.reading.execute import Memory, Progress
    from ucformat.reading.plan import Plan, Verify
    from ucformat.storage.base import Costs, Store

#: A plan that reads fewer bytes runs without checking the sizes of files first (docs/security.md, rule 15).
_CHECK_SIZES = 256 << 20


def read_planned(
    plan: Plan,
    store: Store,
    memories: Callable[[], Sequence[Memory]],
    labels: Sequence[str],
    threads: int | None = None,
    progress: Progress | None = None,
) -> None:
    """Run a plan.

    Args:
        memories: returns the memory of each buffer of the plan; called once the files are known to be large enough,
            and again if they change while they are read from a cache.
        threads: number of reading threads (None: as many as suit the store).
        progress: called with the number of bytes of each finished request.
    """

    def read() -> None:
        _check_sizes(plan, store)
        execute(plan, store, memories(), labels, threads, progress)

    read_consistently(read)


def read_items(
    store: Store,
    items: Sequence[ReadItem],
    memories: Sequence[Memory],
    labels: Sequence[str],
    *,
    verify: Verify = "whole",
    costs: Costs | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Plan a read, and run the plan.

    Args:
        verify: which checksums to verify (default: of chunks that are read whole).
        costs: how requests are merged and split (None: as suits the store).
    """
    plan = make_plan(items, verify, costs or store.costs)
    read_planned(plan, store, lambda: memories, labels, threads, progress)
    return plan


def read_flat(store: Store, info: TensorInfo, extents: Iterable[Extent | Tiles], start: int, stop: int) -> NDArray[Any]:
    """Read the elements `[start, stop)` of a row-major flattened tensor.

    Args:
        extents: extents of the tensor, at least those that contain these elements.
    """
    strides = row_major(info.shape)
    pieces = [
        (0, Piece(box, sum(i * s for i, s in zip(box.start, strides, strict=True)) - start, strides))
        for box in flat_boxes(info.shape, start, stop)
    ]
    raw = np.empty((stop - start) * info.itemsize, np.uint8)
    read_items(store, [ReadItem(info, extents, pieces)], [raw], [str(info.key)], threads=1)
    return raw.view(numpy_dtype(info.dtype))


def read_extents(
    store: Store, locate: Callable[[Box], Iterable[Extent]], boxes: Iterable[Box], itemsize: int, label: str
) -> bytes:
    """Read boxes of a tensor one after another directly from its extents, for comparisons of a few bytes."""
    out = []
    for box in boxes:
        into, left = np.zeros(box.shape, f"V{itemsize}"), box.size
        for e in locate(box):
            clip = e.box.intersect(box)
            if clip is None:
                continue
            at = e.offset + sum((a - b) * s for a, b, s in zip(clip.start, e.box.start, e.strides, strict=True))
            span = itemsize + sum((n - 1) * s for n, s in zip(clip.shape, e.strides, strict=True))
            where = tuple(slice(a - b, a - b + n) for a, b, n in zip(clip.start, box.start, clip.shape, strict=True))
            into[where] = np.ndarray(clip.shape, into.dtype, store.read(e.file, at, span), 0, e.strides)
            left -= clip.size
        if left:
            raise IntegrityError(f"{label} is incomplete: {left} elements are stored in no file")
        out.append(into.tobytes())
    return b"".join(out)


def _check_sizes(plan: Plan, store: Store) -> None:
    """Compare the ranges of a large plan with the sizes of its files, before memory is allocated."""
    if plan.bytes_read < _CHECK_SIZES:
        return
    ends = plan.ends

    def size_of(file: str) -> int:
        try:
            return first_info(store, file).size
        except NotFound as error:
            raise MissingData(error.message) from error

    for (file, end), size in zip(ends.items(), map_io(size_of, ends), strict=True):
        if size < end:
            raise IntegrityError(
                f"{store.url}/{file} has {size} bytes, but tensors of the checkpoint extend to byte {end}",
                hint="the file is truncated: restore it from another copy",
            )
