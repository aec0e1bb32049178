"""Executes read plans: each range goes straight into the destination's memory where its bytes lie as they must."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from crc32c import crc32c

from ucformat.errors import ChecksumError, MissingData, NotFound, UsageError
from ucformat.geometry.box import is_non_overlapping
from ucformat.reading.dtypes import numpy_dtype
from ucformat.storage.base import read_ranges

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from ucformat.geometry.tensor import Block
    from ucformat.reading.copies import Copy
    from ucformat.reading.plan import Plan, Request
    from ucformat.storage.base import Bytes, Costs, Store

    Memory = NDArray[np.uint8]
    Progress = Callable[[int], None]

__all__ = ["check_out", "checksum", "default_threads", "execute", "is_direct", "memory_of", "place_checksum"]

#: Rows at least this long are handed to the kernel one by one; shorter ones go through a scratch buffer.
_LONG_ROW = 8 << 10

_LONG = 256 << 10  # bytes that take longer than handing the GIL over and back


def default_threads() -> int:
    """Threads that read unless told otherwise: one for each core, 2 at least and 16 at most."""
    return min(16, max(2, len(os.sched_getaffinity(0))))


def _batches(plan: Plan, costs: Costs) -> list[list[Request]]:
    """The plan's requests, those together that one thread makes at once: of one file, no larger than one may be.

    With a thread for each, those that wait for a network wait for one another, too.
    """
    batches: list[list[Request]] = []
    nbytes = ranges = 0
    for r in plan.requests:
        nbytes, ranges = nbytes + r.total, ranges + r.count
        if not batches or batches[-1][0].file != r.file or nbytes > costs.request or ranges > costs.together:
            batches.append([])
            nbytes, ranges = r.total, r.count
        batches[-1].append(r)
    return batches


def _parallel(plan: Plan, costs: Costs, batches: int) -> int:
    """Threads: no more than the bytes in flight keep busy, because a thread keeps memory that it freed."""
    most = costs.parallel or default_threads()
    if costs.in_flight is None:
        return most
    return min(most, max(2, costs.in_flight * batches // max(1, plan.bytes_read)))


def check_out(array: object, dtype: str, shape: tuple[int, ...], label: str) -> None:
    """See that an array of a caller's can be filled exactly: of this dtype and shape, with memory of its own.

    Raises:
        UsageError: it cannot; nothing was written.
    """
    if not isinstance(array, np.ndarray):
        raise UsageError(
            f"{label}: the array to fill is a {type(array).__name__}, not a NumPy array",
            hint="of a torch tensor on the CPU: tensor.numpy(), or for training states ucformat.torch.load",
        )
    if isinstance(array, np.ma.MaskedArray):
        raise UsageError(f"{label}: the array to fill has a mask, which hides values", hint="give its data: out.data")
    if array.shape != shape or array.dtype != numpy_dtype(dtype):
        raise UsageError(
            f"{label}: the array to fill has dtype {array.dtype.str if array.dtype.byteorder == '>' else array.dtype} "
            f"and shape {array.shape}; needed is {dtype} {shape}",
            hint="nothing is cast unasked: read first, then cast",
        )
    if not array.flags.writeable:
        raise UsageError(f"{label}: the array to fill is read-only")
    if array.size and not is_non_overlapping(array.shape, array.strides, array.itemsize):
        raise UsageError(
            f"{label}: elements of the array to fill share memory, and can hold but one value",
            hint="read into an array with memory of its own, then assign",
        )


def is_direct(array: NDArray[np.generic]) -> bool:
    """Whether plans can fill an array in place: its strides are whole elements, and none is negative."""
    return all(s >= 0 and s % array.itemsize == 0 for n, s in zip(array.shape, array.strides, strict=True) if n > 1)


def memory_of(array: NDArray[np.generic]) -> Memory:
    """All bytes that an array that `is_direct` spans, as one writable run that begins at its first element.

    A strided array's run holds bytes of others too; a plan writes only those that are the array's own.
    """
    if array.size == 0:
        return np.empty(0, np.uint8)
    span = sum((n - 1) * s for n, s in zip(array.shape, array.strides, strict=True)) + array.itemsize
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
    """Fill the memories (buffer numbers of the plan index them) with what the plan says.

    At most `threads` read at once, and each holds at most the bytes of a request besides.

    Raises:
        ChecksumError: a chunk that was read whole does not match its checksum; `labels` name the tensors.
        MissingData: a file is not there, or ends before what is to be read.
    """
    costs = store.costs
    batches = _batches(plan, costs)
    todo = iter(batches)
    lock = threading.Lock()
    failed = threading.Event()

    def next_batch() -> list[Request] | None:
        with lock:
            return None if failed.is_set() else next(todo, None)

    def work() -> None:
        scratch = np.empty(0, np.uint8)
        try:
            while (batch := next_batch()) is not None:
                try:
                    if costs.in_flight is None or not _serve_ranges(store, batch, memories, labels):
                        for r in batch:
                            scratch = _serve(store, r, memories, labels, scratch)
                except NotFound as error:  # the checkpoint speaks of this file: it is not the caller who erred
                    of = labels[batch[0].copies[0].buffer]
                    raise MissingData(f"{of}: {error.message}") from error
                if progress is not None:
                    progress(sum(r.total for r in batch))
        except BaseException:
            failed.set()
            raise

    count = min(threads or _parallel(plan, costs, len(batches)), len(batches))
    if count <= 1:
        work()
        return
    with ThreadPoolExecutor(count, thread_name_prefix="ucformat-read") as pool:
        jobs = [pool.submit(work) for _ in range(count)]
        for job in jobs:
            job.result()


def _serve_ranges(store: Store, batch: Sequence[Request], memories: Sequence[Memory], labels: Sequence[str]) -> bool:
    """A few requests of one file, from the memory in which the store got them; False if it lends nothing."""
    lent = read_ranges(store, batch[0].file, [(r.offset + k * r.step, r.nbytes) for r in batch for k in range(r.count)])
    if lent is None:
        return False
    with lent as found:
        views = iter(found)
        for r in batch:
            if r.count == 1:
                _deal(r, next(views), memories, labels)
                continue
            one = r.copies[0]
            for k in range(r.count):
                _copy(replace(one, src=0, dst=one.dst + k * one.dst_step), next(views), memories[one.buffer])
    return True


def _serve(store: Store, r: Request, memories: Sequence[Memory], labels: Sequence[str], scratch: Memory) -> Memory:
    """One request; returns the scratch buffer, grown if it had to be."""
    if r.count > 1:
        return _serve_rows(store, r, memories, scratch)
    if len(r.copies) == 1:
        one = r.copies[0]
        memory = memories[one.buffer]
        sums: list[memoryview] = []
        direct = list(_straight(one, r.nbytes, memory, sums))
        if direct:
            store.read_into(r.file, r.offset, direct)
            if one.block is not None:
                _check(r.file, one, one.block, (bytes(s) for s in sums), direct[::2] if sums else direct, labels)
            return scratch
    if scratch.size < r.nbytes:
        scratch = np.empty(r.nbytes, np.uint8)
    found = scratch.data[: r.nbytes]  # what is behind was read before, for others
    store.read_into(r.file, r.offset, [found])
    _deal(r, found, memories, labels)
    return scratch


def _deal(r: Request, view: memoryview, memories: Sequence[Memory], labels: Sequence[str]) -> None:
    """Check a request's bytes, and copy them to where they belong."""
    for one in r.copies:
        if one.block is not None:
            n, first = one.block.nbytes, one.block.offset - r.offset
            begins = [first + k * one.src_step for k in range(one.count)]
            stored = (bytes(view[b + n : b + n + 4]) for b in begins)
            _check(r.file, one, one.block, stored, [view[b : b + n] for b in begins], labels)
        _copy(one, view, memories[one.buffer])


def _serve_rows(store: Store, r: Request, memories: Sequence[Memory], scratch: Memory) -> Memory:
    """A request of several ranges, each straight into memory where its bytes lie as they must."""
    one = r.copies[0]
    memory = memories[one.buffer]
    if one.shape == (r.nbytes,):
        begin, view = one.dst, memory.data
        starts = range(begin, begin + r.count * one.dst_step, one.dst_step) if one.dst_step else [begin] * r.count
        store.read_rows(r.file, r.offset, r.step, [view[a : a + r.nbytes] for a in starts])
        return scratch
    if scratch.size < r.total:
        scratch = np.empty(r.total, np.uint8)
    found = scratch.data[: r.total]
    rows = [found[a : a + r.nbytes] for a in range(0, r.total, r.nbytes)]
    store.read_rows(r.file, r.offset, r.step, rows)
    _copy(replace(one, src=0, count=r.count, src_step=r.nbytes), found, memory)
    return scratch


def _straight(one: Copy, nbytes: int, memory: Memory, sums: list[memoryview]) -> Iterator[memoryview]:
    """The buffers to read into if the bytes lie in the file as they must in memory; none where they do not.

    Memory for stored checksums is put between the chunks, and into `sums`.
    """
    block = one.block
    view = memory.data
    if block is not None:
        if one.shape != (block.nbytes,):
            return
        for k in range(one.count):
            begin = one.dst + k * one.dst_step
            yield view[begin : begin + block.nbytes]
            if block.crc32c is None:
                sums.append(memoryview(bytearray(4)))
                yield sums[-1]
    elif len(one.shape) == 1 and one.count == 1 and one.shape[0] == nbytes:
        yield view[one.dst : one.dst + nbytes]
    elif len(one.shape) == 2 and one.shape[1] >= _LONG_ROW and one.src_strides[0] == one.shape[1]:
        rows, run = one.shape
        for k in range(rows):
            begin = one.dst + k * one.dst_strides[0]
            yield view[begin : begin + run]


def _check(
    file: str, one: Copy, block: Block, stored: Iterator[bytes], chunks: Sequence[memoryview], labels: Sequence[str]
) -> None:
    for k, chunk in enumerate(chunks):
        expected = int.from_bytes(next(stored), "little") if block.crc32c is None else block.crc32c
        at = block.offset + k * one.src_step
        if checksum(chunk, place_checksum(file, at) if block.placed else 0) != expected:
            raise ChecksumError(
                f"{labels[one.buffer]}: the chunk at bytes {at}:{at + block.nbytes} of {file} is damaged "
                f"(its crc32c is not {expected:#010x})",
                hint="restore the file from another copy; `ucp verify` names every damaged chunk",
            )


def _copy(one: Copy, found: memoryview, memory: Memory) -> None:
    shape, src_strides, dst_strides = one.shape, one.src_strides, one.dst_strides
    unit = np.dtype(np.uint8)
    if shape[-1] in (2, 4, 8):  # scattered elements: move each in one go
        unit = np.dtype(f"u{shape[-1]}")
        shape, src_strides, dst_strides = shape[:-1], src_strides[:-1], dst_strides[:-1]
    if one.count > 1:
        shape = (one.count, *shape)
        src_strides, dst_strides = (one.src_step, *src_strides), (one.dst_step, *dst_strides)
    source = np.ndarray(shape, unit, found, one.src, src_strides)
    np.ndarray(shape, unit, memory, one.dst, dst_strides)[...] = source


def checksum(data: Bytes, before: int = 0) -> int:
    """The CRC-32C (Castagnoli, RFC 3720) of some bytes, or of those of which `before` is it, followed by them."""
    return crc32c(data, before, gil_release_mode=1 if len(data) >= _LONG else 0)


def place_checksum(file: str, offset: int) -> int:
    """The CRC-32C of what stands before a tile's bytes under its checksum: where it lies.

    So bytes of another save, rank or tile in its place do not match, though they bring their checksum along.

    Args:
        file: the path of the packed file; of its parts the last two count, which a save gives to no other file.
        offset: the byte of the file at which the tile begins.
    """
    return crc32c(offset.to_bytes(8, "little"), _name_checksum(file))


@lru_cache(256)
def _name_checksum(file: str) -> int:
    return crc32c("/".join(file.split("/")[-2:]).encode())
