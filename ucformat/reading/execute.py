"""Executes read plans: ranges are read directly into the destination's memory if the layout of their bytes allows."""

from __future__ import annotations

import os
import struct
import threading
from array import array
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ucformat.errors import ChecksumError, IntegrityError, MissingData, NotFound, UsageError
from ucformat.geometry.box import Box, is_non_overlapping, offset_of, reach, row_major
from ucformat.geometry.fingerprint import fingerprint_of, text_of, total
from ucformat.geometry.flat_buffer import flat_boxes
from ucformat.geometry.tensor import Piece
from ucformat.reading.copies import AlikeCopies
from ucformat.reading.dtypes import numpy_dtype
from ucformat.reading.plan import ReadItem, make_plan
from ucformat.storage.base import read_ranges, stored_key
from ucformat.storage.cache.scope import read_consistently
from ucformat.storage.concurrency import map_io
from ucformat.storage.strided import SHORT_ROW, ChunkBuffers, Column, checksum, checksums, fill
from ucformat.storage.wrappers import first_info, routed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from ucformat.geometry.fingerprint import Sums
    from ucformat.geometry.tensor import Block, Extent, TensorInfo, Tiles
    from ucformat.reading.copies import Copy
    from ucformat.reading.plan import Plan, Request, Verify
    from ucformat.reading.readable import Readable
    from ucformat.storage.base import Checksums, Costs, Store

    Memory = NDArray[np.uint8]
    Progress = Callable[[int], None]
    # fills buffers with the next bytes of a request
    Fill = Callable[[Sequence[memoryview], Checksums | None], None]


# Reading into memory: plan, compare with the sizes of the files, execute.


_CRC = struct.Struct("<I")  # a checksum that follows its chunk
_FINGERPRINT_BYTES = 4 << 20  # of a tensor that are read at once for its fingerprint

#: A plan that reads fewer bytes runs without checking the sizes of files first (docs/security.md,
#: rule 15).
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
        memories: returns the memory of each buffer of the plan; called once the files are known to
            be large enough, and again if they change while they are read from a cache.
    """

    def read() -> None:
        _check_sizes(plan, store)
        execute(plan, store, memories(), labels, threads, progress)

    read_consistently(read)


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How a read is planned and run.

    Attributes:
        verify: which checksums to verify (default: of chunks that are read whole).
        costs: how requests are merged and split (None: as suits the store).
        threads: number of reading threads (None: as many as suit the store).
        progress: called with the number of bytes of each finished request.
    """

    verify: Verify = "whole"
    costs: Costs | None = None
    threads: int | None = None
    progress: Progress | None = None


def read_items(
    store: Store,
    items: Sequence[ReadItem],
    memories: Sequence[Memory],
    labels: Sequence[str],
    options: ReadOptions = ReadOptions(),
) -> Plan:
    """Plan a read, and run the plan."""
    plan = make_plan(items, options.verify, options.costs or store.costs)
    read_planned(plan, store, lambda: memories, labels, options.threads, options.progress)
    return plan


def read_chunks(
    store: Store, tiles: Tiles, offsets: Sequence[int], outs: Sequence[memoryview], label: str
) -> None:
    """Read chunks that follow each other in a file, in this thread, each into contiguous memory, and verify them.

    Args:
        offsets: where they begin.
    """
    block = tiles.block_at(offsets[0])
    parts = [np.frombuffer(out, np.uint8)[None] for out in outs]

    def read() -> None:
        fill_next = partial(store.read_into, tiles.file, offsets[0])
        try:
            _fill_chunks(store, tiles.file, [_Chunks(block, offsets, parts, label)], fill_next)
        except NotFound as error:
            raise MissingData(f"{label}: {error.message}") from error

    read_consistently(read)


def read_flat(
    store: Store, info: TensorInfo, extents: Iterable[Extent | Tiles], start: int, stop: int
) -> NDArray[Any]:
    """Read the elements `[start, stop)` of a row-major flattened tensor.

    Args:
        extents: extents of the tensor, at least those that contain these elements.
    """
    strides = row_major(info.shape)
    pieces = [
        (0, Piece(box, offset_of(box.start, strides) - start, strides))
        for box in flat_boxes(info.shape, start, stop)
    ]
    raw = np.empty((stop - start) * info.itemsize, np.uint8)
    read_items(
        store, [ReadItem(info, extents, pieces)], [raw], [str(info.key)], ReadOptions(threads=1)
    )
    return raw.view(numpy_dtype(info.dtype))


def read_fingerprint(source: Readable, info: TensorInfo) -> str:
    """Read a tensor in blocks, and return its fingerprint."""
    extents, step = list(source.extents(info.key)), max(1, _FINGERPRINT_BYTES // info.itemsize)

    def part(start: int) -> Sums:
        stop = min(start + step, info.size)
        elements = read_flat(source.store, info, extents, start, stop)
        return fingerprint_of(elements, (info.size,), Box((start,), (stop - start,)))

    return text_of(total(map(part, range(0, info.size, step))))


def read_extents(
    store: Store,
    locate: Callable[[Box], Iterable[Extent]],
    boxes: Iterable[Box],
    itemsize: int,
    label: str,
) -> bytes:
    """Read boxes of a tensor one after another directly from its extents, for comparisons of a few bytes."""
    out = []
    for box in boxes:
        target, missing = np.zeros(box.shape, f"V{itemsize}"), box.size
        for e in locate(box):
            clip = e.box.intersect(box)
            if clip is None:
                continue
            at = e.offset + sum(
                (a - b) * s for a, b, s in zip(clip.start, e.box.start, e.strides, strict=True)
            )
            span = itemsize + reach(clip.shape, e.strides)
            where = tuple(
                slice(a - b, a - b + n)
                for a, b, n in zip(clip.start, box.start, clip.shape, strict=True)
            )
            target[where] = np.ndarray(
                clip.shape, target.dtype, store.read(e.file, at, span), 0, e.strides
            )
            missing -= clip.size
        if missing:
            raise IntegrityError(f"{label} is incomplete: {missing} elements are stored in no file")
        out.append(target.tobytes())
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
                f"{store.url}/{stored_key(file)} has {size} bytes, but tensors of the checkpoint extend to "
                f"byte {end}",
                hint="the file is truncated: restore it from another copy",
            )


_JOINS = 0.02  # seconds after which another thread joins those that read (`Costs.first`)
_MIN_WAITING = 4  # threads
# bytes of contiguous runs that are read directly into place although there are gaps between them
_MIN_RUN = 16 << 10


def default_threads() -> int:
    """Default number of reading threads: one for each core, at least 2 and at most 16."""
    return min(16, max(2, len(os.sched_getaffinity(0))))


def _batches(requests: Iterable[Request], costs: Costs) -> Iterator[list[Request]]:
    """Requests in batches that one thread makes at once: of one file, and limited by `costs`.

    The requests of a batch wait for the network together.
    """
    batch: list[Request] = []
    nbytes = ranges = 0
    for r in requests:
        nbytes, ranges = nbytes + r.total, ranges + r.count
        if batch and (batch[0].file != r.file or nbytes > costs.request or ranges > costs.together):
            yield batch
            batch, nbytes, ranges = [], r.total, r.count
        batch.append(r)
    if batch:
        yield batch


def _split(batch: list[Request]) -> Iterator[list[Request]]:
    """A batch, or one for each range of whole chunks, because these are as long as requests may be."""
    if batch[0].is_checked and batch[0].count > 1:
        yield from ([r] for r in batch[0].ranges())
    else:
        yield batch


def _parallel(plan: Plan, costs: Costs, batches: int) -> int:
    """Number of threads: no more than the bytes in flight keep busy, because a thread retains memory that it freed."""
    limit = costs.parallel or default_threads()
    if costs.in_flight is None:
        return limit
    if costs.parallel is None:  # of a disk: some wait for it while others copy
        limit = max(_MIN_WAITING, limit)
    return min(limit, max(2, costs.in_flight * batches // max(1, plan.bytes_read)))


def check_out(array: object, dtype: str, shape: tuple[int, ...], label: str) -> None:
    """Check that a caller's array can be filled exactly; nothing is written."""
    if not isinstance(array, np.ndarray):
        raise UsageError(
            f"{label}: the array to fill is a {type(array).__name__}, not a NumPy array",
            hint=(
                "for a torch tensor on the CPU pass tensor.numpy(), or load training states "
                "with ucformat.torch.load"
            ),
        )
    if isinstance(array, np.ma.MaskedArray):
        raise UsageError(
            f"{label}: the array to fill has a mask, which hides values",
            hint="pass its data: out.data",
        )
    if array.shape != shape or array.dtype != numpy_dtype(dtype):
        raise UsageError(
            f"{label}: the array to fill has dtype "
            f"{array.dtype.str if array.dtype.byteorder == '>' else array.dtype} "
            f"and shape {array.shape}; needed is {dtype} {shape}",
            hint="reading does not cast: read first, then cast",
        )
    if not array.flags.writeable:
        raise UsageError(f"{label}: the array to fill is read-only")
    if array.size and not is_non_overlapping(array.shape, array.strides, array.itemsize):
        raise UsageError(
            f"{label}: elements of the array to fill share memory",
            hint="read into an array with memory of its own, then assign",
        )


def is_direct(array: NDArray[np.generic]) -> bool:
    """Whether plans can fill an array in place: its strides are multiples of the itemsize, and none is negative."""
    return all(
        s >= 0 and s % array.itemsize == 0
        for n, s in zip(array.shape, array.strides, strict=True)
        if n > 1
    )


def memory_of(array: NDArray[np.generic]) -> Memory:
    """The bytes that an array spans, as one writable, contiguous view that begins at its first element.

    The view of a strided array also spans bytes that are not the array's; a plan writes only the
    array's own.
    """
    if array.size == 0:
        return np.empty(0, np.uint8)
    span = reach(array.shape, array.strides) + array.itemsize
    plain = np.asarray(array)
    first = (plain[tuple(slice(0, 1) for _ in array.shape)] if plain.ndim else plain).reshape(1)
    return np.lib.stride_tricks.as_strided(first.view(np.uint8), (span,), (1,))


def execute(
    plan: Plan,
    store: Store,
    memories: Sequence[Memory],
    labels: Sequence[str],
    threads: int | None = None,
    progress: Progress | None = None,
) -> None:
    """Read what a plan describes into memory.

    At most `threads` requests are in progress at once, and each thread buffers at most the bytes of
    one request.
    """
    costs = store.costs
    if any(r.others for r in plan.requests):  # there may be too many to make them all now
        pending, number = (
            chain.from_iterable(map(_split, _batches(plan.each(), costs))),
            plan.ranges,
        )
    else:
        batches = list(_batches(plan.requests, costs))
        pending = chain.from_iterable(map(_split, batches))
        number = sum(batch[0].count if batch[0].is_checked else 1 for batch in batches)
    lock = threading.Lock()
    ended = threading.Event()  # all is read or being read, or a request failed

    def next_batch() -> list[Request] | None:
        # two threads must not run the generators of `pending` at once
        with lock:
            batch = None if ended.is_set() else next(pending, None)
        if batch is None:
            ended.set()
        return batch

    def work(delay: float) -> None:
        if delay:
            ended.wait(delay)
        scratch = np.empty(0, np.uint8)
        try:
            while (batch := next_batch()) is not None:
                try:
                    if costs.in_flight is None or not _read_borrowed(
                        store, batch, memories, labels
                    ):
                        for r in batch:
                            scratch = _read_one(store, r, memories, labels, scratch)
                # the checkpoint refers to this file: the caller made no error
                except NotFound as error:
                    label = labels[batch[0].copies[0].buffer]
                    raise MissingData(f"{label}: {error.message}") from error
                if progress is not None:
                    progress(sum(r.total for r in batch))
        except BaseException:
            ended.set()
            raise

    count = min(threads or _parallel(plan, costs, number), number)
    _run_in_threads(work, count, count if costs.first is None else costs.first)


def _run_in_threads(work: Callable[[float], None], count: int, first: int) -> None:
    """Call a function with the seconds after which it begins, in threads, of which only the first begin at once."""
    if count <= 1:
        work(0)
        return
    delays = (max(0, number - first + 1) * _JOINS for number in range(count))
    with ThreadPoolExecutor(count, thread_name_prefix="ucformat-read") as pool:
        jobs = [pool.submit(copy_context().run, work, delay) for delay in delays]
        for job in jobs:
            job.result()


def _read_borrowed(
    store: Store, batch: Sequence[Request], memories: Sequence[Memory], labels: Sequence[str]
) -> bool:
    """Read a batch of requests from memory that the store lends; False if the store does not lend memory."""
    loan = read_ranges(
        store,
        batch[0].file,
        [(r.offset + k * r.step, r.nbytes) for r in batch for k in range(r.count)],
    )
    if loan is None:
        return False
    with loan as buffers:
        views = iter(buffers)
        for r in batch:
            if r.count == 1:
                view = next(views)
                if not _fill_in_place(store, r, partial(_fill_from, view), memories, labels):
                    _copy_out(store, r, view, memories, labels)
                continue
            copy = r.copies[0]
            for k in range(r.count):
                _copy(
                    replace(copy, src=0, dst=copy.dst + k * copy.dst_step),
                    next(views),
                    memories[copy.buffer],
                )
    return True


def _read_one(
    store: Store, r: Request, memories: Sequence[Memory], labels: Sequence[str], scratch: Memory
) -> Memory:
    """Read one request; returns the scratch buffer, which may have grown."""
    if r.count > 1:
        return _read_rows(store, r, memories, scratch)
    if _fill_in_place(store, r, partial(store.read_into, r.file, r.offset), memories, labels):
        return scratch
    if scratch.size < r.nbytes:
        scratch = np.empty(r.nbytes, np.uint8)
    data = scratch.data[: r.nbytes]  # the rest is left over from an earlier request
    store.read_into(r.file, r.offset, [data])
    _copy_out(store, r, data, memories, labels)
    return scratch


def _copy_out(
    store: Store,
    r: Request,
    view: memoryview,
    memories: Sequence[Memory],
    labels: Sequence[str],
) -> None:
    """Verify the bytes of a request and copy them to their destinations."""
    for copy in r.copies:
        if (block := copy.block) is not None:
            checks = (_checksums(r, block, k * copy.src_step, view) for k in range(copy.count))
            _check(store, r.file, block, checks, labels[copy.buffer])
        _copy(copy, view, memories[copy.buffer])


def _read_rows(store: Store, r: Request, memories: Sequence[Memory], scratch: Memory) -> Memory:
    """Read a request of several ranges, each directly into place if its bytes allow that."""
    copy = r.copies[0]
    memory = memories[copy.buffer]
    if copy.shape == (r.nbytes,):
        begin, view = copy.dst, memory.data
        starts = (
            range(begin, begin + r.count * copy.dst_step, copy.dst_step)
            if copy.dst_step
            else [begin] * r.count
        )
        store.read_rows(r.file, r.offset, r.step, [view[a : a + r.nbytes] for a in starts])
        return scratch
    if scratch.size < r.total:
        scratch = np.empty(r.total, np.uint8)
    data = scratch.data[: r.total]
    rows = [data[a : a + r.nbytes] for a in range(0, r.total, r.nbytes)]
    store.read_rows(r.file, r.offset, r.step, rows)
    _copy(replace(copy, src=0, count=r.count, src_step=r.nbytes), data, memory)
    return scratch


def _has_short_rows(copy: Copy) -> bool:
    return copy.shape[-1] < SHORT_ROW and len(copy.shape) > 1


def _contiguous(copy: Copy) -> tuple[int, int]:
    """The bytes of runs that are contiguous in the file, and the number of dims over which they are repeated."""
    run, outer = 1, len(copy.shape)
    while outer and copy.src_strides[outer - 1] == run:
        outer -= 1
        run *= copy.shape[outer]
    return run, outer


def _direct_chunks(copy: Copy, block: Block, memory: Memory) -> Memory | None:
    """The memory of chunks whose bytes have the same order in the file; the first dim is that of chunks."""
    if _has_short_rows(copy) or _contiguous(copy)[0] != block.nbytes:
        return None
    strides = (copy.dst_step, *copy.dst_strides)
    return np.ndarray((copy.count, *copy.shape), np.uint8, memory, copy.dst, strides)


def _direct_buffers(copy: Copy, nbytes: int, memory: Memory) -> Iterator[memoryview]:
    """The buffers to read a request into if its bytes have the same order in the file and in memory; none if not.

    Bytes between runs that are adjacent up to gaps go to a buffer that nobody reads.
    """
    shape = copy.shape
    if _has_short_rows(copy):
        return
    run, outer = _contiguous(copy)
    span = run
    for n, step in zip(reversed(shape[:outer]), reversed(copy.src_strides[:outer]), strict=True):
        if step < span or run < _MIN_RUN:
            return
        span += (n - 1) * step
    if copy.count > 1 or copy.src or span != nbytes:
        return
    begins = [(0, copy.dst)]
    for n, src_step, dst_step in zip(
        shape[:outer], copy.src_strides, copy.dst_strides, strict=False
    ):
        begins = [(src + i * src_step, dst + i * dst_step) for src, dst in begins for i in range(n)]
    at, inner, strides = 0, shape[outer:], copy.dst_strides[outer:]
    contiguous, unread = memory.data, memoryview(bytearray(nbytes - run * len(begins)))
    for src, dst in begins:
        if src > at:
            yield unread[: src - at]  # not shared with other gaps: observers see these bytes, too
            unread = unread[src - at :]
        yield (
            contiguous[dst : dst + run]
            if len(inner) == 1
            else _strided(memory, dst, inner, strides)
        )
        at = src + run


def _strided(
    memory: Memory, begin: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> memoryview:
    """A view of memory of which the last dim is contiguous."""
    if len(shape) == 1:
        return memory.data[begin : begin + shape[0]]
    return np.ndarray(shape, np.uint8, memory, begin, strides).data


def _fill_in_place(
    store: Store,
    r: Request,
    fill_next: Fill,
    memories: Sequence[Memory],
    labels: Sequence[str],
) -> bool:
    """Fill the destinations of a request's bytes with them if their order allows, and verify chunks; False if not."""
    if isinstance(r.copies, AlikeCopies) and _fill_alike(
        store, r, r.copies, fill_next, memories, labels
    ):
        return True
    if not r.is_checked:
        copy = r.copies[0]
        direct = (
            list(_direct_buffers(copy, r.nbytes, memories[copy.buffer]))
            if len(r.copies) == 1
            else []
        )
        if direct:
            fill_next(direct, None)
        return bool(direct)
    chunks: list[_Chunks] = []
    end = r.offset
    for copy in r.copies:
        if (
            block := copy.block
        ) is None or block.offset < end:  # of a chunk that another copy verifies
            return False
        if (own := _direct_chunks(copy, block, memories[copy.buffer])) is None:
            return False
        starts = [block.offset + k * copy.src_step for k in range(copy.count)]
        chunks.append(_Chunks(block, starts, [own], labels[copy.buffer]))
        end = starts[-1] + block.stored
    _fill_chunks(store, r.file, chunks, fill_next)
    return True


def _fill_alike(
    store: Store,
    r: Request,
    copies: AlikeCopies,
    fill_next: Fill,
    memories: Sequence[Memory],
    labels: Sequence[str],
) -> bool:
    """As `_fill_in_place`, where each of many tensors has a run of bytes."""
    first = copies.first
    if len(first.shape) > 1 or first.src:
        return False
    (nbytes,), block, begin = first.shape, first.block, first.dst
    if block is not None and nbytes < block.nbytes:  # all of it is verified, and a part wanted
        return False
    ends = (*copies.further[1:], r.nbytes)
    gaps = [end - at - nbytes for at, end in zip(copies.further, ends, strict=True)]
    between = memoryview(bytearray(sum(gaps)))  # not shared: observers see these bytes, too
    starts = list(accumulate(gaps, initial=0))
    buffers: list[memoryview] = []
    for number, start, gap in zip(copies.buffers, starts, gaps, strict=False):
        buffers += (memories[number].data[begin : begin + nbytes], between[start : start + gap])
    if block is None:
        fill_next(buffers, None)
        return True
    offsets = [block.offset + at for at in copies.further]
    # what is between blocks begins with the checksum of the one before
    crcs = [crc for at in offsets for crc in (_start(r.file, block, at), 0)]
    fill_next(buffers, crcs)
    stored = np.frombuffer(between, np.uint8)[np.add.outer(starts[:-1], range(4))]
    expected = stored.view("<u4").reshape(-1).tolist()
    wrong = (n for n, crc in enumerate(expected) if crc != crcs[2 * n])
    if (n := next(wrong, None)) is not None:
        check = offsets[n], crcs[2 * n], expected[n]
        _check(store, r.file, block, [check], labels[copies.buffers[n]])
    return True


class _Chunks(NamedTuple):
    """Adjacent chunks like `block` of a file: where they begin, and their memory, one part after another."""

    block: Block
    starts: Sequence[int]
    parts: Sequence[Memory]
    label: str


def _fill_chunks(store: Store, file: str, chunks: Sequence[_Chunks], fill_next: Fill) -> None:
    """Fill the memory of chunks with the next bytes of a file, without the gaps between them, and verify them."""
    columns: list[Column] = []
    crcs = array("I")
    # of each run of chunks: the number of its first buffer, and the stored checksums
    runs: list[tuple[int, memoryview | None]] = []
    end = chunks[0].starts[0]
    for block, starts, parts, _ in chunks:
        if (gap := starts[0] - end) > 0:
            columns.append(Column(np.empty((1, gap), np.uint8)))
            crcs.append(0)
        behind = memoryview(bytearray(_CRC.size * len(starts))) if block.crc32c is None else None
        runs.append((len(crcs), behind))
        _start_checksums(crcs, file, block, starts)
        at = 0
        for part in parts:
            stop = at + _CRC.size * len(part)
            columns.append(Column(part, None if behind is None else behind[at:stop]))
            at = stop
        end = starts[-1] + block.stored
    fill_next(ChunkBuffers(columns), crcs)
    computed = np.frombuffer(crcs, np.uint32)
    for (block, starts, _, label), (first, behind) in zip(chunks, runs, strict=True):
        if behind is None:
            own = computed[first : first + len(starts)]
            expected = np.full(len(starts), block.crc32c, np.uint32)
        else:
            own = computed[first : first + 2 * len(starts) : 2]
            expected = np.frombuffer(behind, "<u4")
        if (own != expected).any():
            checks = zip(starts, own.tolist(), expected.tolist(), strict=True)
            _check(store, file, block, checks, label)


def _start_checksums(crcs: array[int], file: str, block: Block, starts: Sequence[int]) -> None:
    """Append those from which the checksums of chunks, and of what is stored behind each, continue."""
    step = 1 if block.crc32c is not None else 2  # the checksum of a stored checksum is not used
    first = len(crcs)
    crcs.frombytes(bytes(crcs.itemsize * step * len(starts)))
    if block.placed:
        offsets = np.array(starts, "<u8").tobytes()
        crcs[first::step] = checksums(offsets, 8, name_checksum(file))


def _fill_from(data: memoryview, buffers: Sequence[memoryview], crcs: Checksums | None) -> None:
    fill(buffers, data, crcs)


def _check(
    store: Store,
    file: str,
    block: Block,
    checks: Iterable[tuple[int, int, int]],
    label: str,
) -> None:
    """Compare checksums: of each chunk its offset, the checksum of its bytes, and the one that is stored."""
    for offset, crc, expected in checks:
        if crc != expected:
            own = stored_key(file)
            other, key = routed(store, own)
            raise ChecksumError(
                f"{label}: the chunk at bytes {offset}:{offset + block.nbytes} of "
                f"{own if key == own else f'{other.url}/{key}'} is damaged "
                f"(its crc32c is not {expected:#010x})",
                hint="restore the file from another copy; `ucp verify` names every damaged chunk",
            )


def _checksums(r: Request, block: Block, skip: int, view: memoryview) -> tuple[int, int, int]:
    """Of a chunk in the bytes of a request: its offset, the checksum of its bytes, and the one that is stored."""
    at = block.offset + skip
    first = at - r.offset
    last = first + block.nbytes
    stored = (
        int.from_bytes(view[last : last + 4], "little") if block.crc32c is None else block.crc32c
    )
    return at, checksum(view[first:last], _start(r.file, block, at)), stored


def _start(file: str, block: Block, offset: int) -> int:
    """The checksum from which that of a block at this offset continues."""
    return place_checksum(file, offset) if block.placed else 0


def _copy(copy: Copy, data: memoryview, memory: Memory) -> None:
    shape, src_strides, dst_strides = copy.shape, copy.src_strides, copy.dst_strides
    if copy.count == len(shape) == 1:  # as most small tensors are
        (n,) = shape
        memory[copy.dst : copy.dst + n] = np.frombuffer(data, np.uint8, n, copy.src)
        return
    unit = np.dtype(np.uint8)
    if shape[-1] in (2, 4, 8):  # scattered elements: copy each as one integer
        unit = np.dtype(f"u{shape[-1]}")
        shape, src_strides, dst_strides = shape[:-1], src_strides[:-1], dst_strides[:-1]
    shape = (copy.count, *shape)
    src_strides, dst_strides = (copy.src_step, *src_strides), (copy.dst_step, *dst_strides)
    source = np.ndarray(shape, unit, data, copy.src, src_strides)
    np.ndarray(shape, unit, memory, copy.dst, dst_strides)[...] = source


def place_checksum(file: str, offset: int) -> int:
    """The CRC-32C of a tile's location, from which the checksum of its bytes continues.

    A tile of another save, rank or position therefore does not match, even together with its own
    checksum.

    Args:
        file: path of the packed file; only its last two parts count, which are unique to a save.
        offset: byte of the file at which the tile begins.
    """
    return checksum(offset.to_bytes(8, "little"), name_checksum(file))


@lru_cache(256)
def name_checksum(file: str) -> int:
    """The CRC-32C of what counts of a file's path, from which those of its offsets continue."""
    return checksum("/".join(file.split("/")[-2:]).encode())
