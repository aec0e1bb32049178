"""Reads matched tensors straight into their memory; tensors that are cast or on a device pass through host buffers."""

from __future__ import annotations

from bisect import bisect_right
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch

from ucformat.errors import UsageError
from ucformat.geometry.box import Box, is_non_overlapping, row_major
from ucformat.geometry.tensor import FileRun, Piece, Tiles
from ucformat.reading.execute import ReadOptions, read_items
from ucformat.reading.rank import item_for
from ucformat.storage.concurrency import gc_paused
from ucformat.torch.loading.match import Matched
from ucformat.torch.state.elements import blocks_of, host_memory
from ucformat.torch.state.local import LocalShard
from ucformat.torch.state.memory import (
    check_fillable,
    device_of_first,
    devices_of,
    record_events,
    synchronize,
    torch_dtype,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ucformat.checkpoint import Checkpoint
    from ucformat.geometry.tensor import TensorInfo

#: Bytes of each of the two host buffers, and the most of a part.
STAGED_BYTES = 32 << 20

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
    return read_checked(ck, matched, options)


def read_checked(
    ck: Checkpoint,
    matched: Sequence[Matched],
    options: ReadOptions = _DEFAULTS,
) -> ReadAmount:
    """Fill targets that `check_targets` has checked, or parts of them."""
    direct = [m for m in matched if _is_direct(m)]
    synchronize(m.target.tensor for m in direct)
    done = _read_straight(ck, direct, options)
    staged = [m for m in matched if not _is_direct(m)]
    return done.plus(read_staged(ck, staged, options, _copy)) if staged else done


def _copy(part: Matched, stored: torch.Tensor) -> None:
    target = target_of(part)
    target.copy_(stored, non_blocking=target.device in devices_of([target]))


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
    return m.target.tensor.device.type == "cpu" and m.stored.dtype == m.target.info.dtype


def _read_straight(ck: Checkpoint, matched: Sequence[Matched], options: ReadOptions) -> ReadAmount:
    """Read into targets on the host that have the stored dtype."""
    with gc_paused():
        items = [
            item_for(ck.source, m.stored, [(n, p) for p in m.target.pieces])
            for n, m in enumerate(matched)
            if m.target.pieces
        ]
        memories = [host_memory(m.target.tensor) for m in matched]
        labels = [str(m.target.key) for m in matched]
    plan = read_items(ck.store, items, memories, labels, options)
    return ReadAmount(plan.bytes_read, plan.bytes_unverified)


def read_staged(
    ck: Checkpoint,
    matched: Sequence[Matched],
    options: ReadOptions,
    use: Callable[[Matched, torch.Tensor], object],
) -> ReadAmount:
    """Read parts of what targets are matched with in the stored dtypes, in bounded memory.

    Batches are read alternately into two host buffers: one is used while the other is filled.

    Args:
        use: gets each part of a target, and a tensor with what is stored of it, which it may read
            on the devices of the targets until the next but one batch.
    """
    targets = [m.target.tensor for m in matched]
    devices = devices_of(targets)
    synchronize(targets)  # kernels of the training may still use them
    total = ReadAmount()
    buffers: list[torch.Tensor | None] = [None, None]
    copied: list[list[torch.Event]] = [[], []]
    try:
        for number, batch in enumerate(_batches(ck, matched)):
            turn = number % 2
            need = sum(map(room, batch))
            # the batch before the last one may still be copied from this buffer
            for event in copied[turn]:
                event.synchronize()
            buffer = buffers[turn]
            if buffer is None or buffer.numel() < need:
                buffers[turn] = buffer = _host_buffer(max(need, STAGED_BYTES), devices)
            starts = accumulate(map(room, batch), initial=0)
            stored = [stored_in(buffer, at, part) for at, part in zip(starts, batch, strict=False)]
            total = total.plus(_read_straight(ck, stored, options))
            for part, sources in zip(batch, stored, strict=True):
                use(part, sources.target.tensor)
            copied[turn] = record_events(
                d for d in devices if any(p.target.tensor.device == d for p in batch)
            )
    finally:  # also after an error: the buffers are freed
        synchronize(targets)
    return total


def _host_buffer(nbytes: int, devices: Sequence[torch.device]) -> torch.Tensor:
    """Host memory, pinned if there are devices and the system allows it."""
    if devices:
        with device_of_first(devices), suppress(RuntimeError):
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    return torch.empty(nbytes, dtype=torch.uint8)


def _batches(ck: Checkpoint, matched: Sequence[Matched]) -> Iterator[list[Matched]]:
    """Batches of parts that fit in a buffer."""
    batch: list[Matched] = []
    total = 0
    for part in (p for m in matched for p in parts_of(ck, m)):
        if batch and total + room(part) > STAGED_BYTES:
            yield batch
            batch, total = [], 0
        batch.append(part)
        total += room(part)
    if batch:
        yield batch


def parts_of(ck: Checkpoint, m: Matched) -> Iterator[Matched]:
    """Cut a target into parts of one box each, of at most `STAGED_BYTES`, if possible at the ends of chunks.

    A chunk that is cut is read, and checked, twice.
    """
    for piece in m.target.pieces:
        for box in _cut(ck, m.stored, piece):
            yield part_of(m, piece, box)


def part_of(m: Matched, piece: Piece, box: Box) -> Matched:
    """Return the part of a target that is a box in one of its pieces."""
    start = sum(
        (a - b) * s for a, b, s in zip(box.start, piece.box.start, piece.strides, strict=True)
    )
    part = Piece(box, piece.offset + start, piece.strides)
    return Matched(replace(m.target, pieces=(part,)), m.stored)


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
    return -(-piece.box.size * part.stored.itemsize // 16) * 16


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
