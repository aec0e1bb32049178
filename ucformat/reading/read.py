"""Reading into memory: planned, compared with the sizes of the files, and executed."""

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

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from ucformat.geometry.box import Box
    from ucformat.geometry.tensor import Extent, TensorInfo, Tiles
    from ucformat.reading.execute import Memory, Progress
    from ucformat.reading.plan import Plan, Verify
    from ucformat.storage.base import Costs, Store

__all__ = ["read_extents", "read_flat", "read_items", "read_planned"]

#: Bytes: a plan that reads less runs without asking for the sizes of files first (docs/security.md, rule 15).
_SMALL = 256 << 20


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
        plan: what to read.
        store: where the files are.
        memories: gives the memory of each buffer of the plan; called when the files are known to be large enough.
        labels: what errors call each buffer.
        threads: how many threads read; by default as many as the store can use.
        progress: called with the bytes of each request that is done.

    Raises:
        IntegrityError: a file ends before what is to be read.
        MissingData: a file is missing.
        ChecksumError: a chunk does not match its checksum.
    """
    _check_sizes(plan, store)
    execute(plan, store, memories(), labels, threads, progress)


def read_items(
    store: Store,
    wanted: Sequence[ReadItem],
    memories: Sequence[Memory],
    labels: Sequence[str],
    *,
    verify: Verify = "whole",
    costs: Costs | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Plan what is wanted, and run the plan.

    Args:
        store: where the files are.
        wanted: the tensors, and the pieces of each.
        memories: the memory of each buffer that the pieces name.
        labels: what errors call each buffer.
        verify: which checksums to check.
        costs: how requests are merged and cut (default: as the store is best read).
        threads: as of `read_planned`.
        progress: as of `read_planned`.

    Returns:
        the plan.

    Raises:
        IntegrityError: as of `read_planned`.
    """
    plan = make_plan(wanted, verify, costs or store.costs)
    read_planned(plan, store, lambda: memories, labels, threads, progress)
    return plan


def read_flat(store: Store, info: TensorInfo, extents: Iterable[Extent | Tiles], first: int, last: int) -> NDArray[Any]:
    """Read the elements `first … last` of a tensor, counted row-major.

    Args:
        store: where the files are.
        info: the tensor.
        extents: of the tensor, at least those that hold these elements.
        first: index of the first element.
        last: index after the last element.

    Returns:
        one-dimensional, in the tensor's dtype.
    """
    strides = row_major(info.shape)
    pieces = [
        (0, Piece(box, sum(i * s for i, s in zip(box.start, strides, strict=True)) - first, strides))
        for box in flat_boxes(info.shape, first, last)
    ]
    raw = np.empty((last - first) * info.itemsize, np.uint8)
    read_items(store, [ReadItem(info, extents, pieces)], [raw], [str(info.key)], threads=1)
    return raw.view(numpy_dtype(info.dtype))


def read_extents(
    store: Store, locate: Callable[[Box], Iterable[Extent]], boxes: Iterable[Box], itemsize: int, what: str
) -> bytes:
    """Read boxes of a tensor, one after another, straight from its extents: for a few bytes that prove something.

    Args:
        store: where the files are.
        locate: gives the extents that meet a box.
        boxes: of the tensor.
        itemsize: bytes of an element.
        what: the tensor, for errors.

    Returns:
        the bytes of each box in row-major order.

    Raises:
        IntegrityError: elements are stored in no file.
    """
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
            raise IntegrityError(f"{what} is not all there: {left} elements are stored in no file")
        out.append(into.tobytes())
    return b"".join(out)


def _check_sizes(plan: Plan, store: Store) -> None:
    """Compare what a large plan reads with the sizes of its files, before memory is allocated.

    Raises:
        IntegrityError: a file ends before what is to be read.
        MissingData: a file is missing.
    """
    if plan.bytes_read < _SMALL:
        return
    ends: dict[str, int] = {}
    for r in plan.requests:
        ends[r.file] = max(ends.get(r.file, 0), r.end)
    for file, end in ends.items():
        try:
            size = store.info(file).size
        except NotFound as error:
            raise MissingData(error.message) from error
        if size < end:
            raise IntegrityError(
                f"{store.url}/{file} has {size} bytes, but tensors of the checkpoint reach to byte {end}",
                hint="the file is truncated: restore it from another copy",
            )
