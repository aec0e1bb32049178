"""A checkpoint that a job reads, and the comparison of what is read of it with the checksums in its files."""

from __future__ import annotations

import threading
from bisect import bisect_right, insort
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakKeyDictionary

from ucformat.errors import ChecksumError, check_choice, first_names
from ucformat.geometry.tensor import Extent, Tiles, single_extents
from ucformat.jobs.finished import FinishedDoc, RecordedJob, StreamSum, SumPart, sums_of
from ucformat.jobs.run import run, workers_for
from ucformat.reading.execute import ReadOptions, place_checksum, read_items
from ucformat.reading.plan import ReadItem
from ucformat.schema.manifest import VerifiedDoc
from ucformat.storage.decoded import is_checked
from ucformat.storage.strided import CRC32C_SHIFT, checksum, rows
from ucformat.storage.wrappers import SyntheticStore, find_watched, layers

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from ucformat.checkpoint import Checkpoint
    from ucformat.geometry.box import Box
    from ucformat.geometry.tensor import Block, Key, Piece, TensorInfo
    from ucformat.jobs.finished import SumDoc
    from ucformat.reading.plan import Verify
    from ucformat.reading.readable import FileRecord
    from ucformat.sources.base import OpenSource
    from ucformat.storage.base import Store


class Input:
    """A checkpoint that a job reads.

    Args:
        compared: the keys of files that are compared as a whole otherwise (default: none).
        shared: whether others read the same checkpoint object at the same time; only what is read
            inside `task` is then compared (default: no).
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        compared: Collection[str] = (),
        *,
        verify: bool,
        shared: bool = False,
    ) -> None:
        check_choice("verify", verify, (True, False))
        self.checkpoint, self.verify = checkpoint, verify
        watching = find_watched(checkpoint.store) if verify else None
        self.verifier = None if watching is None else StreamVerifier(checkpoint, compared)
        self._observing = ExitStack()
        if watching is not None and self.verifier is not None:
            see = self.verifier.see_own if shared else self.verifier.see
            self._observing.enter_context(watching.observed(see))

    def close(self) -> None:
        """Stop comparing."""
        self._observing.close()

    def task(self) -> AbstractContextManager[list[SumPart]]:
        """Note what is read of checksums inside the block, as `StreamVerifier.task`."""
        return nullcontext([]) if self.verifier is None else self.verifier.task()

    def read(
        self,
        wanted: Sequence[tuple[InputBox, Sequence[tuple[int, Piece]]]],
        buffers: Sequence[NDArray[np.uint8]],
        threads: int | None = None,
    ) -> bool:
        """Read pieces of tensors into memory.

        Args:
            threads: number of reading threads (None: as many as suit the store).

        Returns:
            Whether checksums cover all of these bytes, or none are compared at all.
        """
        bare = [box for box, pieces in wanted for _, piece in pieces if not box.expect(piece.box)]
        store, costs = self.checkpoint.store, self.checkpoint.store.costs
        if self.verifier is not None:  # it combines the checksums of blocks that are read in parts
            costs = replace(costs, block=0)
        labels = [""] * len(buffers)
        for box, pieces in wanted:
            for number, _ in pieces:
                labels[number] = str(box.info.key)
        items = [ReadItem(box.info, box.planned, pieces) for box, pieces in wanted]
        verify: Verify = "whole" if self.verify else "never"
        options = ReadOptions(verify, costs, threads)
        read_items(store, items, buffers, labels, options)
        return not bare

    def within(self, info: TensorInfo, box: Box) -> InputBox:
        """A box of a tensor, to be read piece by piece."""
        return InputBox.of(self, info, box)


class InputsJob(RecordedJob):
    """A job whose tasks read inputs; a checksum of these may cover bytes that several tasks read.

    A task returns its record, and what it has noted of the checksums of each input.
    """

    inputs: Sequence[Input]

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for input_ in self.inputs:
            input_.close()
        super().__exit__(kind)

    def record(self, results: Mapping[int, Any]) -> str:
        """See Job."""
        sums = tuple(
            doc.model_copy(update={"input": n})
            for n in range(len(self.inputs))
            for doc in sums_of(noted[n] for _, noted in results.values())
        )
        tasks = tuple(doc for doc, _ in results.values())
        return FinishedDoc(parts=self.parts, tasks=tasks, sums=sums).model_dump_json()

    def take_sums(self, doc: FinishedDoc) -> None:
        """Take what finished tasks have read of checksums."""
        for n, input_ in enumerate(self.inputs):
            if input_.verifier is not None:
                input_.verifier.take(sums for sums in doc.sums if sums.input == n)


@dataclass(frozen=True, slots=True)
class InputBox:
    """A box of a tensor of an input, and the extents that hold it."""

    input: Input
    info: TensorInfo
    box: Box
    extents: Sequence[Extent | Tiles]
    planned: Sequence[Extent | Tiles]

    @classmethod
    def of(cls, input_: Input, info: TensorInfo, box: Box) -> Self:
        """Find the extents of a box."""
        candidates = input_.checkpoint.source.extents(info.key, box)
        extents = [e for e in candidates if e.box.intersect(box)]
        verifier = input_.verifier
        planned = extents if verifier is None else [verifier.planned(info, e) for e in extents]
        return cls(input_, info, box, extents, planned)

    @property
    def carries(self) -> bool:
        """Whether checksums are compared that cover any of its bytes."""
        verifier = self.input.verifier
        return verifier is not None and verifier.carries(self.info, self.extents)

    def expect(self, box: Box | None = None) -> bool:
        """Compare the checksums that cover a box.

        Returns:
            Whether checksums cover all of its bytes, or none are compared at all.
        """
        verifier = self.input.verifier
        return verifier is None or verifier.expect(self.info, self.extents, box or self.box)

    def read(self, piece: Piece, raw: NDArray[np.uint8]) -> bool:
        """Read a box into memory."""
        return self.input.read([(self, [(0, piece)])], [raw], threads=1)


# Compares the bytes of a source with the checksums in its files while they are read.
#
# Several threads read a record piece by piece, in any order. The CRC of each piece is computed when
# it is read, and combined with those of the others; a record is verified when all of its bytes have
# been read. At the end, the remaining bytes of partly read records are read only for this purpose,
# and counted. Chunks that are read whole are compared when they are read or decoded; chunks and
# blocks of which only parts are read, here.

_READ = 4 << 20  # bytes that are read at once of remaining bytes
_NAMED = 5  # tensors of a damaged record that an error names
_RESIDUE = checksum(bytes(4))  # the CRC-32C of any bytes followed by their own
#: What the running task has read of checksums.
_notes: ContextVar[Mapping[StreamVerifier, list[SumPart]]] = ContextVar(
    "ucformat_notes", default=MappingProxyType({})
)


class StreamVerifier:
    """Verifies the checksums in the files of a source; `see` must get all bytes that are read of them.

    The files in `compared` were compared as a whole before.
    """

    def __init__(self, source: Checkpoint, compared: Collection[str] = ()) -> None:
        self._source, self._origin, self._compared = source.source, source.origin, compared
        self._lock = threading.Lock()
        self.files: set[str] = set()  # those that `see_own` was told of
        self._records: Mapping[str, tuple[list[int], list[FileRecord]]] = {}
        self._of_records: dict[tuple[str, int], StreamSum] = {}
        self._blocks: dict[str, list[tuple[int, int, StreamSum]]] = {}
        self._longest: dict[str, int] = {}
        self._computed: dict[str, bool] = {}  # file -> whether checksums cover all of its inputs
        self._bare: set[Key] = set()  # tensors with bytes that no checksum covers
        self._besides = 0
        if source.foreign:
            self._records = _records_of(source.foreign)

    # --- what to verify

    def expect(self, info: TensorInfo, extents: Iterable[Extent | Tiles], box: Box | None) -> bool:
        """Verify the checksums that cover the extents of a tensor.

        Args:
            box: the box of the tensor that is read; None if unknown parts are.

        Returns:
            Whether checksums cover all of these bytes; if not, the tensor does not count as
            verified.
        """
        whole = True
        for extent in extents:
            whole &= self._expect(info, extent, box)
        if not whole:
            self._bare.add(info.key)
        return whole

    def _expect(self, info: TensorInfo, extent: Extent | Tiles, box: Box | None) -> bool:
        if box is not None and not extent.box.intersect(box):
            return True
        if isinstance(extent, Tiles):
            if box is None or not _is_aligned(extent, box):
                for single in extent.extents():
                    self._expect(info, single, box)
            return True
        if extent.block is not None:
            if box is None or not box.contains(extent.box) or not _fills(extent, info.itemsize):
                self._add(extent.file, extent.block)
            return True
        if extent.file in self._compared or is_checked(self._source.store, extent.file):
            return True
        inputs = _inputs_of(self._source.store, extent.file)
        if inputs is None:
            return self._is_in_record(extent, info.itemsize)
        if extent.file not in self._computed:
            whole = True
            for input_info, input_extents in inputs:
                for single in single_extents(input_extents):
                    whole &= self._expect(input_info, single, None)
            self._computed[extent.file] = whole
        return self._computed[extent.file]

    def planned(self, info: TensorInfo, extent: Extent | Tiles) -> Extent | Tiles:
        """An extent for planning: if it is only a part of its block, the block is left out.

        Otherwise each of the extents that share a block would read all of it.
        """
        if isinstance(extent, Tiles) or extent.block is None or _fills(extent, info.itemsize):
            return extent
        return replace(extent, block=None)

    def carries(self, info: TensorInfo, extents: Iterable[Extent | Tiles]) -> bool:
        """Whether a checksum covers any bytes of these extents."""
        for e in extents:
            if (
                isinstance(e, Tiles)
                or e.block is not None
                or is_checked(self._source.store, e.file)
            ):
                return True
            inputs = _inputs_of(self._source.store, e.file)
            if inputs is not None:
                if any(
                    self.carries(input_info, input_extents) for input_info, input_extents in inputs
                ):
                    return True
            elif e.box.size and self._in_records(e.file, e.offset, e.last + info.itemsize):
                return True
        return False

    def _add(self, file: str, block: Block) -> None:
        nbytes = block.nbytes + (4 if block.crc32c is None else 0)
        expected = _RESIDUE if block.crc32c is None else block.crc32c
        if block.placed:
            expected ^= CRC32C_SHIFT(place_checksum(file, block.offset), nbytes)
        if block.nbytes:
            self._add_sum(file, block.offset, nbytes, expected)

    def _add_sum(self, file: str, start: int, nbytes: int, expected: int) -> StreamSum:
        with self._lock:
            blocks = self._blocks.setdefault(file, [])
            at = bisect_right(blocks, (start, nbytes), key=lambda k: k[:2])
            if at and blocks[at - 1][:2] == (start, nbytes):
                return blocks[at - 1][2]
            what = f"crc32c differs (block at byte {start})"
            stream = StreamSum(file, what, start, nbytes, expected, castagnoli=True)
            insort(blocks, (start, nbytes, stream), key=lambda k: k[:2])
            self._longest[file] = max(self._longest.get(file, 0), nbytes)
            return stream

    def _is_in_record(self, extent: Extent, itemsize: int) -> bool:
        if not extent.box.size:
            return True
        stop = extent.last + itemsize
        sums = self._in_records(extent.file, extent.offset, stop)
        return any(s.start <= extent.offset and stop <= s.stop for s in sums)

    # --- what is read

    def see(self, file: str, at: int, data: memoryview) -> None:
        """Take note of bytes that were read."""
        stop = at + data.nbytes
        if not data.c_contiguous and not (
            self._in_records(file, at, stop) or self._in_blocks(file, at, stop)
        ):
            return  # there may be many rows
        for row in rows(data):
            self._see_row(file, at, row)
            at += row.nbytes

    def see_own(self, file: str, at: int, data: memoryview) -> None:
        """Take note of bytes that were read inside `task`, and of the file."""
        if self in _notes.get():
            self.files.add(file)
            self.see(file, at, data)

    def forget(self, parts: Iterable[SumPart]) -> None:
        """Undo what a task has noted: its bytes are to be read again."""
        with self._lock:
            for stream, ranges, value in parts:
                stream.value ^= value
                stream.left = sorted([*stream.left, *ranges])
                stream.waits += sum(b - a for a, b in ranges)

    def _see_row(self, file: str, at: int, data: memoryview) -> None:
        stop = at + data.nbytes
        for stream in (*self._in_records(file, at, stop), *self._in_blocks(file, at, stop)):
            with self._lock:
                parts = stream.claim(max(at, stream.start), min(stop, stream.stop))
            if not parts:
                continue
            # no other thread takes bytes that are claimed: their CRC is computed without the lock
            value = 0
            for a, b in parts:
                value ^= stream.shift(stream.crc(data[a - at : b - at]), stream.stop - b)
            if (log := _notes.get().get(self)) is not None:
                log.append(SumPart(stream, parts, value))
            with self._lock:
                stream.value ^= value
                stream.waits -= sum(b - a for a, b in parts)
                done = not stream.waits
            if done and stream.value != stream.expected:
                raise self._damaged(stream)

    def _in_records(self, file: str, at: int, stop: int) -> list[StreamSum]:
        if file not in self._records:
            return []
        # The exact place of a record may have to be read from the file; `near` is before it, so
        # only those records are located that may have these bytes.
        near, records = self._records[file]
        streams = []
        for n in range(max(0, bisect_right(near, at) - 1), len(records)):
            if near[n] >= stop:
                break
            stream = self._of_records.get((file, n))
            if stream is None:
                r = records[n]
                assert r.crc32 is not None  # noqa: S101 - others are left out
                what = f"the CRC-32 of its record {r.name} differs"
                stream = self._of_records.setdefault(
                    (file, n),
                    StreamSum(file, what, r.locate(), r.nbytes, r.crc32, castagnoli=False),
                )
            if stream.start < stop and at < stream.stop:
                streams.append(stream)
        return streams

    def _in_blocks(self, file: str, at: int, stop: int) -> list[StreamSum]:
        if file not in self._blocks:
            return []
        with self._lock:
            blocks = self._blocks[file]
            # blocks may overlap: one that reaches `at` begins before it by the longest one's length
            # at most
            first = bisect_right(blocks, at - self._longest[file], key=lambda k: k[0])
            last = bisect_right(blocks, stop - 1, key=lambda k: k[0])
            return [stream for start, nbytes, stream in blocks[first:last] if at < start + nbytes]

    # --- what tasks elsewhere have read

    @contextmanager
    def task(self) -> Iterator[list[SumPart]]:
        """Note what is read of checksums inside the block, also by threads that run in a copy of its context."""
        parts: list[SumPart] = []
        token = _notes.set({**_notes.get(), self: parts})
        try:
            yield parts
        finally:
            _notes.reset(token)

    def take(self, sums: Iterable[SumDoc]) -> None:
        """Take what tasks in other processes, or in an earlier run, have read of checksums.

        What includes bytes that were read here too is ignored, and its other bytes are read again
        at the end.
        """
        for doc in sums:
            stream = self._sum_of(doc)
            if stream is None:
                continue
            with self._lock:
                taken = stream.take(doc.ranges)
                if taken:
                    stream.value ^= doc.value
                done = taken and not stream.waits
            if done and stream.value != stream.expected:
                raise self._damaged(stream)

    def _sum_of(self, doc: SumDoc) -> StreamSum | None:
        if doc.kind == "crc32c":
            return self._add_sum(doc.file, doc.start, doc.nbytes, doc.expected)
        streams = self._in_records(doc.file, doc.start, doc.start + 1)
        return next(
            (
                stream
                for stream in streams
                if (stream.start, stream.stop) == (doc.start, doc.start + doc.nbytes)
            ),
            None,
        )

    # --- the end

    def unfinished(self) -> list[StreamSum]:
        """The checksums of which some bytes have been read, but not all."""
        sums = [
            *self._of_records.values(),
            *(stream for blocks in self._blocks.values() for *_, stream in blocks),
        ]
        return [stream for stream in sums if stream.begun and stream.waits]

    def finish(self, stream: StreamSum) -> None:
        """Read the remaining bytes of a checksum."""
        buffer = memoryview(bytearray(min(_READ, stream.waits)))
        for a, b in list(stream.left):
            for at in range(a, b, _READ):
                part = buffer[: min(_READ, b - at)]
                self._source.store.read_into(stream.file, at, [part])
                with self._lock:
                    self._besides += part.nbytes

    def complete_nearly(self, most: int) -> None:
        """Read the remaining bytes of checksums of which at least half has been read.

        Args:
            most: bytes that may remain of each.
        """
        for stream in self.unfinished():
            if stream.waits <= min(most, stream.stop - stream.start - stream.waits):
                self.finish(stream)

    def complete(self, workers: int | None = None) -> None:
        """Read the remaining bytes of all checksums of which some have been read."""
        for _ in run(self.finish, self.unfinished(), workers or workers_for(self._source.store)):
            pass

    @property
    def besides(self) -> int:
        """Bytes that `finish` has read."""
        return self._besides

    def described(self, infos: Sequence[TensorInfo], bare: Collection[Key] = ()) -> VerifiedDoc:
        """Which tensors were verified, for the manifest.

        Args:
            bare: those of which other processes have read bytes that no checksum covers (default:
                none).
        """
        return _verified(infos, self._bare.union(bare), self._besides)

    def _damaged(self, stream: StreamSum) -> ChecksumError:
        tensors = list(self._tensors_in(stream))
        named = f"; it holds {first_names(tensors, _NAMED)}" if tensors else ""
        return ChecksumError(
            f"{self._source.store.url}/{stream.file}: {stream.what}{named}",
            hint="restore the file from another copy, and run it again; nothing was committed (--no-verify, or "
            "verify=False, takes what is there)",
        )

    def _tensors_in(self, stream: StreamSum) -> Iterator[Key]:
        metadata = self._origin.metadata
        for info in metadata.tensor_list.tensors:
            for key in metadata.means.get(info.key, (info.key,)):
                for e in single_extents(self._origin.extents(key)):
                    if (
                        e.file == stream.file
                        and e.box.size
                        and e.offset < stream.stop
                        and e.last + info.itemsize > stream.start
                    ):
                        yield info.key
                        break


#: The records of sources that have a checksum, by file, each list in the order of where they begin.
_records: WeakKeyDictionary[OpenSource, dict[str, tuple[list[int], list[FileRecord]]]] = (
    WeakKeyDictionary()
)


def _records_of(source: OpenSource) -> Mapping[str, tuple[list[int], list[FileRecord]]]:
    """The records of a source that have a checksum, by file, and where each begins."""
    if source not in _records:
        by_file: dict[str, list[FileRecord]] = {}
        for record in source.records():
            if record.crc32 is not None and record.nbytes:
                by_file.setdefault(record.file, []).append(record)
        for records in by_file.values():
            records.sort(key=lambda r: r.near)
        _records[source] = {file: ([r.near for r in rs], rs) for file, rs in by_file.items()}
    return _records[source]


def _verified(
    infos: Sequence[TensorInfo], bare: Collection[tuple[str, str]], besides: int
) -> VerifiedDoc:
    default = 2 * len(bare) <= len(infos)
    but = tuple((i.name, i.state) for i in infos if (i.key in bare) == default)
    return VerifiedDoc(default=default, but=but, besides=besides)


def joined(parts: Sequence[tuple[Sequence[TensorInfo], VerifiedDoc]]) -> VerifiedDoc:
    """Which tensors of several conversions into one checkpoint were verified."""
    infos = [info for of_part, _ in parts for info in of_part]
    stated = [(of_part, frozenset(doc.but), doc.default) for of_part, doc in parts]
    bare = {i.key for of_part, but, default in stated for i in of_part if (i.key in but) == default}
    return _verified(infos, bare, sum(doc.besides for _, doc in parts))


def _fills(extent: Extent, itemsize: int) -> bool:
    """Whether an extent is all of its block."""
    return extent.block is not None and extent.box.size * itemsize == extent.block.nbytes


def _inputs_of(
    store: Store, file: str
) -> Iterator[tuple[TensorInfo, Iterable[Extent | Tiles]]] | None:
    """The tensors that a computed file is made of; None if it is no such file."""
    if not any(isinstance(layer, SyntheticStore) for layer in layers(store)):
        return None
    from ucformat.views.viewed import (
        inputs_of,
    )  # here, because most checkpoints are read without a view

    return inputs_of(store, file)


def _is_aligned(tiles: Tiles, box: Box) -> bool:
    """Whether a box contains all chunks that it intersects, as far as the tensor has them."""
    common = tiles.box.intersect(box)
    if common is None:
        return True
    for start, n, first, chunk, size in zip(
        common.start, common.shape, tiles.box.start, tiles.chunk, tiles.box.shape, strict=True
    ):
        end = start + n - first
        if (start - first) % chunk or (end % chunk and end != size):
            return False
    return True
