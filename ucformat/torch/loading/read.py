"""Reads matched tensors straight into their memory, and those that are cast or on a device through host memory."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, overload

import numpy as np
import torch

from ucformat.errors import UsageError
from ucformat.geometry.box import Box, is_non_overlapping, row_major
from ucformat.geometry.tensor import FileRun, Piece, Tiles
from ucformat.reading.execute import ReadOptions, default_threads, read_items
from ucformat.reading.rank import item_for
from ucformat.storage.concurrency import gc_paused, grouped
from ucformat.torch.loading.match import Matched
from ucformat.torch.state.elements import blocks_of, host_memory
from ucformat.torch.state.fingerprint import piece_in
from ucformat.torch.state.local import LocalShard
from ucformat.torch.state.memory import (
    check_fillable,
    device_of_first,
    devices_of,
    own_streams,
    record_events,
    synchronize,
    torch_dtype,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    from ucformat.checkpoint import Checkpoint
    from ucformat.geometry.tensor import TensorInfo

#: The most bytes of a part; batches of parts have half as many, unless a part is larger.
STAGED_BYTES = 32 << 20
_ALIGNMENT = 16  # bytes, of parts in host memory: that of the largest dtypes

_DEFAULTS = ReadOptions()


class ReadAmount(NamedTuple):
    """Bytes that were read from storage, and how many of them are of tensors whose checksums were not checked."""

    nbytes: int = 0
    unverified: int = 0

    def plus(self, other: ReadAmount) -> ReadAmount:
        """Return the sum."""
        return ReadAmount(self.nbytes + other.nbytes, self.unverified + other.unverified)


def read(
    ck: Checkpoint,
    matched: Sequence[Matched],
    options: ReadOptions = _DEFAULTS,
) -> ReadAmount:
    """Fill targets from a checkpoint."""
    check_targets(matched)
    synchronize(m.target.tensor for m in matched)  # kernels of the training may still use them
    return read_checked(ck, matched, options)


def read_checked(
    ck: Checkpoint,
    matched: Sequence[Matched],
    options: ReadOptions = _DEFAULTS,
) -> ReadAmount:
    """Fill targets that `check_targets` has checked, or parts of them, after their devices were waited for."""
    direct: list[Matched] = []
    staged: list[Matched] = []
    for m in matched:
        (direct if _is_direct(m) else staged).append(m)
    done = _read_straight(ck, direct, options)
    devices = devices_of(m.target.tensor for m in staged)

    def copy(part: Matched, stored: torch.Tensor) -> None:
        target = target_of(part)
        # casts and copies to memory with other strides are done on the device
        target.copy_(stored, non_blocking=target.device in devices)

    return done.plus(read_staged(ck, staged, options, copy)) if staged else done


def check_targets(matched: Sequence[Matched]) -> None:
    """Check that targets can be filled."""
    for m in matched:
        tensor = m.target.tensor
        if not m.target.pieces:
            continue
        check_fillable(str(m.target.key), tensor)
        if not (tensor.is_contiguous() or is_non_overlapping(tuple(tensor.shape), tensor.stride())):
            raise UsageError(
                f"{m.target.key} is expanded: several of its elements share memory",
                hint="use a tensor with its own memory: tensor.clone()",
            )


def _is_direct(m: Matched) -> bool:
    return m.target.tensor.is_cpu and m.stored.dtype == m.target.info.dtype


def _read_straight(ck: Checkpoint, matched: Sequence[Matched], options: ReadOptions) -> ReadAmount:
    """Read into targets on the host that have the stored dtype."""
    with gc_paused():
        items = [
            item_for(ck.source, m.stored, [(n, p) for p in m.target.pieces])
            for n, m in enumerate(matched)
            if m.target.pieces
        ]
        memories = [host_memory(m.target.tensor) for m in matched]
        labels = _Labels(matched)
    plan = read_items(ck.store, items, memories, labels, options)
    return ReadAmount(plan.bytes_read, plan.bytes_unverified)


class _Labels(Sequence[str]):
    """What errors call targets."""

    def __init__(self, matched: Sequence[Matched]) -> None:
        self._matched = matched

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        if isinstance(index, slice):
            return _Labels(self._matched[index])
        return str(self._matched[index].target.key)

    def __len__(self) -> int:
        return len(self._matched)


def read_staged(
    ck: Checkpoint,
    matched: Sequence[Matched],
    options: ReadOptions,
    use: Callable[[Matched, torch.Tensor], object],
) -> ReadAmount:
    """Read parts of what targets are matched with in the stored dtypes, in bounded memory.

    Batches of parts, one for each core, are read into a ring of host memory, pinned if there are
    devices, while earlier ones are used. What is begun on devices, which must have been waited for,
    runs in streams of its own.

    Args:
        use: gets each part of a target, and a tensor with what is stored of it, from which it may
            begin copies to the devices of the targets.
    """
    devices = devices_of(m.target.tensor for m in matched)
    threads = options.threads or ck.store.costs.parallel or default_threads()
    at_once = min(threads, default_threads())
    options = replace(options, threads=-(-threads // at_once))
    total = ReadAmount()
    reading: deque[_Staged] = deque()

    def use_next() -> None:
        nonlocal total
        staged = reading.popleft()
        total = total.plus(staged.amount.result())
        for part, stored in zip(staged.parts, staged.stored, strict=True):
            use(part, stored.target.tensor)
        on = {part.target.tensor.device for part in staged.parts}
        staged.copied = record_events(d for d in devices if d in on)

    with own_streams(devices), ThreadPoolExecutor(at_once, "ucformat-stage") as pool:
        ring = _Ring(_host_buffer(_ring_bytes(matched, at_once), devices))
        try:
            for parts in _batches(ck, matched):
                start, stop = ring.place(sum(map(room, parts)))
                while (oldest := ring.in_the_way(start, stop)) is not None:
                    while oldest in reading:
                        use_next()
                    # what is read there next must not get into a copy that still runs
                    for event in oldest.copied:
                        event.synchronize()
                    ring.free()
                starts = accumulate(map(room, parts), initial=start)
                stored = [
                    stored_in(ring.memory, at, part)
                    for at, part in zip(starts, parts, strict=False)
                ]
                amount = pool.submit(copy_context().run, _read_straight, ck, stored, options)
                staged = _Staged(start, stop, parts, stored, amount)
                ring.staged.append(staged)
                reading.append(staged)
                if len(reading) > at_once:
                    use_next()
            while reading:
                use_next()
        finally:  # also after an error: the memory is freed
            pool.shutdown(cancel_futures=True)
            for event in record_events(devices):
                event.synchronize()
    return total


@dataclass(eq=False, slots=True)
class _Staged:
    """A batch of parts, where they are stored in `[start, stop)` of a ring, and the events after its copies."""

    start: int
    stop: int
    parts: Sequence[Matched]
    stored: Sequence[Matched]
    amount: Future[ReadAmount]
    copied: Sequence[torch.Event] = ()


class _Ring:
    """Host memory that is used in a circle, and the batches in it, the oldest first."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.staged: deque[_Staged] = deque()

    def place(self, nbytes: int) -> tuple[int, int]:
        """Where the next batch belongs, which is no larger than the memory."""
        start = self.staged[-1].stop if self.staged else 0
        start = start if start + nbytes <= self.memory.numel() else 0
        return start, start + nbytes

    def in_the_way(self, start: int, stop: int) -> _Staged | None:
        """The oldest batch, while any batch is in a range."""
        overlaps = any(batch.start < stop and start < batch.stop for batch in self.staged)
        return self.staged[0] if overlaps else None

    def free(self) -> None:
        """Forget the oldest batch, which has been copied."""
        self.staged.popleft()


def _ring_bytes(matched: Sequence[Matched], at_once: int) -> int:
    """The bytes of a ring: of one batch, if that is all, or of those that are read and a few that are copied.

    It has room for two of the largest parts.
    """
    whole = sum(room(part_of(m, p, p.box)) for m in matched for p in m.target.pieces)
    batch = _aligned(STAGED_BYTES // 2)
    if whole <= batch:
        return whole
    return max(2 * _aligned(STAGED_BYTES), min((at_once + at_once // 4) * batch, whole + batch))


def _host_buffer(nbytes: int, devices: Sequence[torch.device]) -> torch.Tensor:
    """Host memory, pinned if there are devices and the system allows it."""
    if devices:
        with device_of_first(devices), suppress(RuntimeError):
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    return torch.from_numpy(np.empty(nbytes, np.uint8))  # in huge pages, unlike that of PyTorch


def _batches(ck: Checkpoint, matched: Sequence[Matched]) -> Iterator[list[Matched]]:
    """Batches of parts, of which a ring has room for four unless parts are larger."""
    return grouped((p for m in matched for p in parts_of(ck, m)), room, STAGED_BYTES // 2)


def parts_of(ck: Checkpoint, m: Matched) -> Iterator[Matched]:
    """Cut a target into parts of one box each, of at most `STAGED_BYTES`, if possible at the ends of chunks.

    A chunk that is cut is read, and checked, twice.
    """
    for piece in m.target.pieces:
        for box in _cut(ck, m.stored, piece):
            yield part_of(m, piece, box)


def part_of(m: Matched, piece: Piece, box: Box) -> Matched:
    """Return the part of a target that is a box in one of its pieces."""
    return Matched(replace(m.target, pieces=(piece.part(box),)), m.stored)


def _cut(ck: Checkpoint, stored: TensorInfo, piece: Piece) -> Iterator[Box]:
    box, itemsize = piece.box, stored.itemsize
    if box.size * itemsize <= STAGED_BYTES or not box.shape:
        yield from blocks_of(box, itemsize, STAGED_BYTES)
        return
    extents = item_for(ck.source, stored, [(0, piece)]).extents
    runs = [(e.box, e.first if isinstance(e, FileRun) else e) for e in extents]
    tiled = [(box, tiles.chunk[0]) for box, tiles in runs if isinstance(tiles, Tiles)]
    ends = sorted({n for box, edge in tiled for n in range(box.start[0], box.stop[0] + 1, edge)})
    rows = max(1, STAGED_BYTES // (box.size // box.shape[0] * itemsize))
    first, stop = box.start[0], box.stop[0]
    while first < stop:
        last = min(first + rows, stop)
        end = ends[at - 1] if (at := bisect_right(ends, last)) else first
        last = end if first < end and last < stop else last
        part = Box((first, *box.start[1:]), (last - first, *box.shape[1:]))
        yield from blocks_of(part, itemsize, STAGED_BYTES)
        first = last


def room(part: Matched) -> int:
    """Return the bytes of a part in a buffer, rounded up so that the next part is aligned for any dtype."""
    (piece,) = part.target.pieces
    return _aligned(piece.box.size * part.stored.itemsize)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def stored_in(buffer: torch.Tensor, at: int, part: Matched) -> Matched:
    """Return a place in a buffer as the target of a part, row-major and in the stored dtype."""
    (piece,) = part.target.pieces
    place = buffer[at : at + piece.box.size * part.stored.itemsize].view(
        torch_dtype(part.stored.dtype)
    )
    info = replace(part.target.info, dtype=part.stored.dtype)
    dense = Piece(piece.box, 0, row_major(piece.box.shape))
    return Matched(LocalShard(info, (dense,), place.view(piece.box.shape)), part.stored)


def target_of(part: Matched) -> torch.Tensor:
    """Return the part of a target's tensor that holds its box."""
    (piece,) = part.target.pieces
    tensor = part.target.tensor
    if tensor.is_contiguous():
        return piece_in(tensor, piece)
    strides = tensor.stride() if tensor.device.type == "cpu" else row_major(tuple(tensor.shape))
    local = _index(piece.offset, tuple(tensor.shape), strides)
    return tensor[tuple(slice(a, a + n) for a, n in zip(local, piece.box.shape, strict=True))]


def _index(offset: int, shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """The index of an element from its offset in memory, for any order of strides."""
    out = [0] * len(shape)
    for d in sorted(range(len(shape)), key=lambda d: -strides[d]):
        if shape[d] > 1:
            out[d], offset = divmod(offset, strides[d])
    return out
