"""Reads matched tensors straight into their memory; tensors that are cast or on a device pass through host buffers.

A tensor that several ranks hold can be read by one of them, which broadcasts it over their process group.
"""

from __future__ import annotations

from bisect import bisect_right
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from ucformat.errors import UsageError
from ucformat.geometry.box import Box, is_non_overlapping, row_major
from ucformat.geometry.tensor import Piece, Tiles
from ucformat.reading.plan import ReadItem
from ucformat.reading.rank import item_for
from ucformat.reading.read import read_items
from ucformat.torch.comm.group import group_of
from ucformat.torch.state.elements import blocks_of, host_memory
from ucformat.torch.state.memory import (
    check_fillable,
    device_of_first,
    devices_of,
    keep_current_device,
    record_events,
    synchronize,
    torch_dtype,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ucformat.checkpoint import Checkpoint
    from ucformat.geometry.tensor import Extent
    from ucformat.reading.plan import Verify
    from ucformat.torch.comm.group import Group
    from ucformat.torch.loading.match import Matched

__all__ = ["STAGED_BYTES", "ReadAmount", "read", "read_and_broadcast"]

#: Bytes of each of the two host buffers.
STAGED_BYTES = 32 << 20


class ReadAmount(NamedTuple):
    """Bytes that were read from storage, and how many of them are of tensors whose checksums were not checked."""

    nbytes: int = 0
    unverified: int = 0

    def plus(self, other: ReadAmount) -> ReadAmount:
        """Return the sum.

        Args:
            other: another amount.
        """
        return ReadAmount(self.nbytes + other.nbytes, self.unverified + other.unverified)


def read(
    ck: Checkpoint,
    matched: Sequence[Matched],
    verify: Verify = "whole",
    threads: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> ReadAmount:
    """Fill targets from a checkpoint.

    Args:
        ck: the checkpoint.
        matched: the targets, and the stored tensors from which they are read.
        verify: which checksums to check, as for `load`.
        threads: how many threads read (default: as many as the storage can use).
        progress: called with the bytes of each read that is done.

    Returns:
        how much was read from storage.

    Raises:
        UsageError: elements of a target share memory.
        ChecksumError: a chunk does not match its checksum.
        MissingData: a part of a tensor is stored in no file.
    """
    for m in matched:
        tensor = m.target.tensor
        if m.target.pieces:
            check_fillable(str(m.target.key), tensor)
        if m.target.pieces and not is_non_overlapping(tuple(tensor.shape), tensor.stride()):
            raise UsageError(
                f"{m.target.key} is expanded: several of its elements share memory",
                hint="use a tensor with its own memory: tensor.clone()",
            )
    direct = [m for m in matched if _is_direct(m)]
    synchronize(m.target.tensor for m in direct)
    wanted = [
        item_for(ck.source, m.stored, [(n, p) for p in m.target.pieces])
        for n, m in enumerate(direct)
        if m.target.pieces
    ]
    memories = [host_memory(m.target.tensor) for m in direct]
    labels = [str(m.target.key) for m in direct]
    plan = read_items(ck.store, wanted, memories, labels, verify=verify, threads=threads, progress=progress)
    staged = [m for m in matched if not _is_direct(m)]
    done = ReadAmount(plan.bytes_read, plan.bytes_unverified)
    return done.plus(_staged(ck, staged, verify, threads, progress)) if staged else done


def _is_direct(m: Matched) -> bool:
    return m.target.tensor.device.type == "cpu" and m.stored.dtype == m.target.info.dtype


def _staged(
    ck: Checkpoint,
    matched: Sequence[Matched],
    verify: Verify,
    threads: int | None,
    progress: Callable[[int], None] | None,
) -> ReadAmount:
    """Read batches alternately into two host buffers: one is copied to the device while the other is filled."""
    targets = [m.target.tensor for m in matched]
    devices = devices_of(targets)
    synchronize(targets)  # kernels of the training may still use them
    total = ReadAmount()
    buffers: list[torch.Tensor | None] = [None, None]
    copied: list[list[torch.Event]] = [[], []]
    try:
        for number, batch in enumerate(_batches(ck, matched)):
            turn = number % 2
            need = sum(_room(m, _box(wanted)) for m, wanted in batch)
            for event in copied[turn]:
                event.synchronize()
            held = buffers[turn]
            if held is None or held.numel() < need:
                buffers[turn] = held = _host_buffer(max(need, STAGED_BYTES), devices)
            total = total.plus(_fill(ck, batch, held, devices, verify, threads, progress))
            copied[turn] = record_events(d for d in devices if any(m.target.tensor.device == d for m, _ in batch))
    finally:  # also after an error: the buffers are freed
        synchronize(targets)
    return total


def _host_buffer(nbytes: int, devices: Sequence[torch.device]) -> torch.Tensor:
    """Host memory, pinned if there are devices and the system allows it."""
    if devices:
        with device_of_first(devices), suppress(RuntimeError):
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    return torch.empty(nbytes, dtype=torch.uint8)


def _box(wanted: ReadItem) -> Box:
    ((_, piece),) = wanted.pieces
    return piece.box


def _room(m: Matched, box: Box) -> int:
    """Bytes of a box in a buffer, rounded up so that the next box is aligned for any dtype."""
    return -(-box.size * m.stored.itemsize // 16) * 16


def _batches(ck: Checkpoint, matched: Sequence[Matched]) -> Iterator[list[tuple[Matched, ReadItem]]]:
    """Batches of the targets' boxes that fit in a buffer; large boxes are split."""
    batch: list[tuple[Matched, ReadItem]] = []
    total = 0
    for m in matched:
        extents = list(item_for(ck.source, m.stored, [(0, p) for p in m.target.pieces]).extents)
        for piece in m.target.pieces:
            for box in _cut(piece.box, m.stored.itemsize, extents):
                room = _room(m, box)
                if batch and total + room > STAGED_BYTES:
                    yield batch
                    batch, total = [], 0
                dense = Piece(box, 0, row_major(box.shape))
                batch.append((m, ReadItem(m.stored, extents, [(len(batch), dense)])))
                total += room
    if batch:
        yield batch


def _cut(box: Box, itemsize: int, extents: Sequence[Extent | Tiles]) -> Iterator[Box]:
    """Split a box along its first dims into boxes that fit in a buffer, if possible at the ends of chunks.

    A chunk that is split is read, and checked, twice.
    """
    if box.size * itemsize <= STAGED_BYTES or not box.shape:
        yield from blocks_of(box, itemsize, STAGED_BYTES)
        return
    tiles = [e for e in extents if isinstance(e, Tiles)]
    ends = sorted({n for t in tiles for n in range(t.box.start[0], t.box.stop[0] + 1, t.chunk[0])})
    rows = max(1, STAGED_BYTES // (box.size // box.shape[0] * itemsize))
    first, stop = box.start[0], box.stop[0]
    while first < stop:
        last = min(first + rows, stop)
        end = ends[at - 1] if (at := bisect_right(ends, last)) else first
        last = end if first < end and last < stop else last
        part = Box((first, *box.start[1:]), (last - first, *box.shape[1:]))
        yield from blocks_of(part, itemsize, STAGED_BYTES)
        first = last


def _fill(
    ck: Checkpoint,
    batch: Sequence[tuple[Matched, ReadItem]],
    buffer: torch.Tensor,
    devices: Sequence[torch.device],
    verify: Verify,
    threads: int | None,
    progress: Callable[[int], None] | None,
) -> ReadAmount:
    memory, views, at = host_memory(buffer), [], 0
    for m, wanted in batch:
        box = _box(wanted)
        nbytes = box.size * m.stored.itemsize
        views.append((memory[at : at + nbytes], buffer[at : at + nbytes]))
        at += _room(m, box)
    memories, labels = [v for v, _ in views], [str(m.target.key) for m, _ in batch]
    items = [wanted for _, wanted in batch]
    plan = read_items(ck.store, items, memories, labels, verify=verify, threads=threads, progress=progress)
    for (m, wanted), (_, held) in zip(batch, views, strict=True):
        box = _box(wanted)
        data = held.view(torch_dtype(m.stored.dtype)).view(box.shape)
        target = _region(m, box)
        target.copy_(data, non_blocking=target.device in devices)
    return ReadAmount(plan.bytes_read, plan.bytes_unverified)


def _region(m: Matched, box: Box) -> torch.Tensor:
    """The part of the target's tensor that holds a box."""
    tensor = m.target.tensor
    piece = next(p for p in m.target.pieces if p.box.contains(box))
    start = sum((a - b) * s for a, b, s in zip(box.start, piece.box.start, piece.strides, strict=True)) + piece.offset
    strides = tensor.stride() if tensor.device.type == "cpu" else row_major(tuple(tensor.shape))
    local = _index(start, tuple(tensor.shape), strides)
    return tensor[tuple(slice(a, a + n) for a, n in zip(local, box.shape, strict=True))]


def _index(offset: int, shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """The index of an element from its offset in memory, for any order of strides."""
    out = [0] * len(shape)
    for d in sorted(range(len(shape)), key=lambda d: -strides[d]):
        if shape[d] > 1:
            out[d], offset = divmod(offset, strides[d])
    return out


#: Bytes that each rank reads in a round; they are broadcast while it reads those of the next round.
_ROUND_BYTES = 64 << 20
#: The boxes of each tensor that a rank wants.
_Wants = list[tuple[str, tuple[Box, ...]]]


def read_and_broadcast(
    ck: Checkpoint,
    matched: Sequence[Matched],
    replicas: dist.ProcessGroup,
    timeout: float,
    verify: Verify = "whole",
    threads: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> ReadAmount:
    """Fill targets; a tensor of which all replicas want the same boxes is read by one of them, balanced by bytes.

    Args:
        ck: the checkpoint.
        matched: the targets of this rank, and the stored tensors from which they are read.
        replicas: over which tensors are broadcast; its backend must support the devices of the targets.
        timeout: seconds after which an unresponsive rank is considered dead.
        verify: which checksums to check, as for `load`.
        threads: how many threads read (default: as many as the storage can use).
        progress: called with the bytes of each read that is done.

    Returns:
        how much this rank read from storage.
    """
    ranks = group_of(replicas, timeout, f"share {ck.url}")
    rank, size = ranks.rank, ranks.size
    wants = [(str(m.stored.key), tuple(p.box for p in m.target.pieces)) for m in matched]
    wanted_by_all: _Wants = ranks.combine(wants, _common, _Wants)
    common = set(wanted_by_all)
    alone = [m for m, want in zip(matched, wants, strict=True) if want not in common]
    order = {want: i for i, want in enumerate(wanted_by_all)}
    shared = sorted(
        ((m, order[want]) for m, want in zip(matched, wants, strict=True) if want in common and m.target.pieces),
        key=lambda found: found[1],
    )
    load = [0] * size
    assigned: list[tuple[Matched, int]] = []
    for m, _ in sorted(shared, key=lambda found: -found[0].target.nbytes):
        reader = min(range(size), key=lambda r: load[r])
        load[reader] += m.target.nbytes
        assigned.append((m, reader))
    rounds = list(_rounds(assigned, size))
    total = ReadAmount()
    with ThreadPoolExecutor(1, "ucformat-share", keep_current_device()) as pool:

        def begin(units: Sequence[tuple[Matched, int]]) -> Future[ReadAmount]:
            return pool.submit(read, ck, [m for m, reader in units if reader == rank], verify, threads, progress)

        reading = [begin(rounds[0])] if rounds else []
        for number, units in enumerate(rounds):
            total = total.plus(_all_have_read(reading.pop(), ranks))
            reading += [begin(following) for following in rounds[number + 1 : number + 2]]
            for m, reader in units:
                _broadcast(m.target.tensor, reader, replicas)
    synchronize(m.target.tensor for m, _ in assigned)  # a broadcast on a device is asynchronous
    return total.plus(read(ck, alone, verify, threads, progress))


def _all_have_read(reading: Future[ReadAmount], ranks: Group) -> ReadAmount:
    """Wait until all ranks have read their part of a round; an error of one of them is raised on all."""
    ranks.combine(reading.exception())
    return reading.result()


def _common(a: _Wants, b: _Wants) -> _Wants:
    """What both want, in the order of `a`."""
    wanted = set(b)
    return [want for want in a if want in wanted]


def _rounds(assigned: Sequence[tuple[Matched, int]], size: int) -> Iterator[list[tuple[Matched, int]]]:
    units: list[tuple[Matched, int]] = []
    total = 0
    for m, reader in assigned:
        if units and total + m.target.nbytes > _ROUND_BYTES * size:
            yield units
            units, total = [], 0
        units.append((m, reader))
        total += m.target.nbytes
    if units:
        yield units


def _broadcast(tensor: torch.Tensor, reader: int, replicas: dist.ProcessGroup) -> None:
    """Broadcast one local tensor as bytes, since not every backend supports every dtype."""
    dense = tensor if tensor.is_contiguous() else tensor.contiguous()
    flat = dense.as_strided((dense.numel(),), (1,))  # a single element may have any stride, which `view` refuses
    dist.broadcast(flat.view(torch.uint8), group=replicas, group_src=reader)
    if dense is not tensor:
        tensor.copy_(dense)
