"""The safetensors form: weights are written in files that other tools load, everything else as arrays.

The ranks plan both parts one after the other: who provides which box of a weight as in the packed
form, and the arrays as in the Zarr form. The place of each weight follows from the list of all
weights, which rank 0 tells the others. On a file system a weight whose boxes are ranges of the file
is written by those that provide them. Of any other weight, and on object stores of all, ranks send
each other what belongs to a part of a file, and one of them writes it.

A rank sums the checksum of a block over the bytes that it writes, as if all others were zeros:
since a CRC is linear, those of all ranks together are that of the block.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ucformat.errors import IntegrityError, UcformatError, UsageError
from ucformat.format.sidecar import decode, encode_columns
from ucformat.geometry.fingerprint import added, fingerprint_of, packed_sums
from ucformat.geometry.tensor import TensorInfo
from ucformat.jobs.weight_files import WeightFiles, weights_folder
from ucformat.schema.tensors import TensorDoc, TensorTable
from ucformat.storage.in_place import PartsWriter, Way, way_of
from ucformat.storage.strided import CRC32C_SHIFT, checksum, copy
from ucformat.storage.upload import unit_for
from ucformat.torch.comm.wire import message
from ucformat.torch.saving.shards import BATCH_BYTES, ShardBatch, ShardTask, Transfer
from ucformat.torch.saving.statement import Fragment
from ucformat.torch.saving.write import exchange, packed_extents
from ucformat.torch.state.elements import elements_within, row_major_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from ucformat.geometry.box import Box
    from ucformat.geometry.distribution import BoxList, Distribution
    from ucformat.geometry.fingerprint import Sums
    from ucformat.geometry.tensor import Key
    from ucformat.storage.base import Store
    from ucformat.torch.comm.group import Group
    from ucformat.torch.saving.shards import GlobalPlan
    from ucformat.torch.saving.statement import RankState, WriteItem
    from ucformat.torch.state.elements import Elements


# Which rank writes each part of the safetensors files, and what others send for it.
#
# A part consists of consecutive blocks of one file, about 8 MiB, perhaps of many tensors. Every
# rank knows which rank provides each box of a weight, so it computes its own parts and messages,
# and rank 0 deals none.


PART_BYTES = 8 << 20  # an upload takes at least 5 MiB, and a block is at most 1 MiB


class FilePart(NamedTuple):
    """Consecutive blocks of a file.

    Attributes:
        number: of the part among those of the file.
        begin: the byte of the file at which they begin.
    """

    file: int
    number: int
    blocks: range
    begin: int
    nbytes: int


class PartPlan(NamedTuple):
    """One rank's part of the plan; a task's `tensor` is the number of the part that it writes."""

    parts: Sequence[FilePart]
    batches: tuple[ShardBatch, ...] = ()
    messages: tuple[Transfer, ...] = ()


class Providers:
    """Which rank provides each box of a weight; each element is provided by one rank.

    Args:
        listed: the weights that are not described.
    """

    def __init__(
        self, infos: Sequence[TensorInfo], described: bytes, listed: Mapping[Key, BoxList]
    ) -> None:
        table = TensorTable.of(TensorDoc(*i.key, i.dtype, i.shape) for i in infos)
        self._infos, decoded = infos, decode(described, table, "the plan of the weights").described
        self._distributions: dict[int, tuple[Distribution | BoxList, int]] = {
            n: (listed[i.key], 0) for n, i in enumerate(infos) if i.key in listed
        }
        for row in decoded.rows if decoded else ():
            self._distributions[row.tensor] = (row.distribution, row.writer)

    def intersecting(self, number: int, within: Box) -> list[tuple[Box, int]]:
        """The boxes that intersect a box of a weight, in order, each with the rank that provides it."""
        d, writer = self._distributions[number]
        holdings = d.holdings(self._infos[number].shape, within)
        return sorted((box, int(d.mesh.ranks[d.coordinate(at, writer)])) for at, box in holdings)

    def contiguous(self, number: int) -> bool:
        """Whether each box of a weight is known to be one range of the file."""
        return self._distributions[number][0].contiguous(self._infos[number].shape)


def parts_of(files: WeightFiles, chosen: NDArray[np.bool_]) -> list[FilePart]:
    """Cut files into parts: at least 7 MiB each, but the last, if all blocks are chosen."""
    out: list[FilePart] = []
    for file, target in enumerate(files.files):
        sizes, numbers, first_part = files.block_sizes(file), files.numbers(file), len(out)
        if not len(sizes):
            continue
        begin = np.cumsum(sizes) - sizes
        part_bytes = max(PART_BYTES, unit_for(target.nbytes))
        # the header, which may be large, is in the first part
        window = np.maximum(begin - sizes[0], 0) // part_bytes
        mask = chosen[numbers.start : numbers.stop]
        cuts = np.flatnonzero((np.diff(window) != 0) | (mask[1:] != mask[:-1])) + 1
        for first, stop in pairwise([0, *cuts.tolist(), len(sizes)]):
            if mask[first]:
                blocks = range(numbers.start + first, numbers.start + stop)
                nbytes = int(sizes[first:stop].sum())
                out.append(FilePart(file, len(out) - first_part, blocks, int(begin[first]), nbytes))
    return out


def owners_of(parts: Sequence[FilePart], ranks: int, files: int | None = None) -> NDArray[np.int64]:
    """The rank that writes each part: consecutive ones by one rank, and all ranks as many."""
    if files is not None:
        return np.array([part.file for part in parts], np.int64) * ranks // max(files, 1)
    return np.arange(len(parts), dtype=np.int64) * ranks // max(len(parts), 1)


class PartPlanner:
    """Plans what a rank writes and sends."""

    def __init__(
        self,
        files: WeightFiles,
        infos: Sequence[TensorInfo],
        providers: Providers,
        parts: Sequence[FilePart],
        owners: NDArray[np.int64],
    ) -> None:
        self._infos, self._files, self._providers, self._parts, self._owners = (
            infos,
            files,
            providers,
            parts,
            owners,
        )
        self._together = max(1, BATCH_BYTES // PART_BYTES)
        self._batch = (np.arange(len(parts)) - np.searchsorted(owners, owners)) // self._together
        self._placed = [t for t in files.tensors.values() if t.count]
        self._firsts = [t.first for t in self._placed]
        self._starts = [part.blocks.start for part in parts]
        self._number = {info.key: n for n, info in enumerate(infos)}

    def plan(self, rank: int, provided: Mapping[tuple[int, Box], tuple[int, int]]) -> PartPlan:
        """Plan what a rank writes and sends."""
        own_numbers, step = np.flatnonzero(self._owners == rank).tolist(), self._together
        tasks = [self._task(number, rank, provided) for number in own_numbers]
        batches = tuple(tuple(tasks[n : n + step]) for n in range(0, len(tasks), step))
        return PartPlan(self._parts, batches, self._messages(rank, provided))

    def _boxes(self, part: FilePart) -> Iterator[tuple[int, Box]]:
        """The boxes of weights that a part consists of, in order."""
        for n in range(
            max(bisect_right(self._firsts, part.blocks.start) - 1, 0), len(self._placed)
        ):
            tensor = self._placed[n]
            if tensor.first >= part.blocks.stop:
                return
            for box in tensor.boxes(part.blocks):
                yield self._number[tensor.info.key], box

    def _task(
        self, number: int, rank: int, provided: Mapping[tuple[int, Box], tuple[int, int]]
    ) -> ShardTask:
        fragments = []
        for tensor, box in self._boxes(self._parts[number]):
            for box_there, sender in self._providers.intersecting(tensor, box):
                common = box_there.intersect(box)
                assert common is not None  # noqa: S101 - it is one of those that intersect
                item, piece = provided[tensor, box_there] if sender == rank else (-1, -1)
                fragments.append(Fragment(sender, tensor, item, piece, common))
        return ShardTask(number, (), tuple(fragments))

    def _messages(
        self, rank: int, provided: Mapping[tuple[int, Box], tuple[int, int]]
    ) -> tuple[Transfer, ...]:
        """What the rank sends, in the order in which the owners of parts expect it."""
        sent: dict[tuple[int, int], list[tuple[tuple[int, int, int, Box], Fragment]]] = {}
        for (number, own), (item, piece) in provided.items():
            tensor = self._files.tensors[self._infos[number].key]
            blocks = tensor.blocks_around(own)
            first = max(bisect_right(self._starts, blocks.start) - 1, 0)
            for n in range(first, bisect_right(self._starts, blocks.stop - 1)):
                if self._owners[n] == rank:
                    continue
                sorted_parts = sent.setdefault((int(self._batch[n]), int(self._owners[n])), [])
                for k, box in enumerate(tensor.boxes(self._parts[n].blocks)):
                    if (common := own.intersect(box)) is not None:
                        sorted_parts.append(
                            (
                                (n, tensor.first, k, own),
                                Fragment(rank, number, item, piece, common),
                            )
                        )
        return tuple(
            Transfer(owner, number, tuple(f for _, f in sorted(parts, key=itemgetter(0))))
            for (number, owner), parts in sorted(sent.items())
            if parts
        )


_SENT_AT_ONCE = 4  # parts of uploads


class InPlace(NamedTuple):
    """The weights of a save.

    Attributes:
        pieces: the (item, piece) that this rank writes itself.
        exchanged: what it writes and sends of other weights.
        agreed: what all ranks know.
    """

    pieces: tuple[tuple[int, int], ...]
    files: WeightFiles
    exchanged: PartPlan
    agreed: WeightFilesPlan


@message
class WrittenParts:
    """What some ranks have written.

    Attributes:
        sums: of each part of a block: the number of the block, the bytes, and what they contribute
            to its checksum, as three integers of 32 bits.
        etags: of parts of uploads: the number of the file, of the part, and its ETag.
        fingerprints: of the weights, in the order of the files: the sums of what was written.
    """

    sums: bytes = b""
    etags: tuple[tuple[int, int, str], ...] = ()
    fingerprints: bytes = b""

    def __add__(self, other: WrittenParts) -> WrittenParts:
        fingerprints = added(self.fingerprints, other.fingerprints)
        return WrittenParts(self.sums + other.sums, self.etags + other.etags, fingerprints)


@message
class WeightFilesPlan:
    """What rank 0 tells all ranks of the weights.

    Attributes:
        infos: of all weights, in the order of the files.
        described: who provides those that are described, as a sidecar.
        folder: of the files.
        uploads: the id of each file's upload, if they are written in parts.
    """

    infos: tuple[TensorInfo, ...]
    described: bytes
    tied: Mapping[str, str]
    folder: str
    way: Way
    uploads: tuple[str, ...]


OTHER_FORMS = 'save with form="zarr" or form="packed"'


def begin_weights(store: Store, attempt: str, plan: GlobalPlan) -> WeightFilesPlan:
    """Plan the files of the weights on rank 0, and begin their uploads."""
    infos, others = plan.weights.infos, (*plan.arrays.infos, *plan.packed.infos)
    if not infos:
        raise UsageError(
            "the state has no weights, and so there are none for safetensors files",
            hint=OTHER_FORMS,
        )
    if len({i.name for i in infos}) < len(infos):
        raise UsageError(
            "masters are a weight on some ranks, and on others there is another weight",
            hint=OTHER_FORMS,
        )
    folder = weights_folder(attempt, {i.state for i in others})
    files = WeightFiles(infos, plan.aliases, folder)  # raises if there can be none
    described = encode_columns(*packed_extents(replace(plan.weights, listed=()), "data/plan", {}))
    way, uploads = way_of(store)
    begun_uploads: list[tuple[str, str]] = []
    if uploads is not None:
        try:
            for file in files.files:
                begun_uploads.append((file.key, uploads.begin(file.key)))  # noqa: PERF401
        except BaseException:
            _abort(store, begun_uploads)
            raise
    ids = tuple(upload for _, upload in begun_uploads)
    return WeightFilesPlan(infos, described, plan.aliases, folder, way, ids)


class WeightPlanner:
    """Plans what a rank writes and sends of the weights; it keeps the plan for the next save."""

    def __init__(self) -> None:
        self._planned_from: tuple[object, ...] = ()
        self._own: set[Key] = set()  # the weights that are not exchanged
        self._planner: PartPlanner | None = None
        self._provided: Mapping[tuple[int, Box], tuple[int, int]] | None = None
        self._plan: PartPlan | None = None

    def plan(
        self,
        group: Group,
        items: Sequence[WriteItem],
        pieces: Sequence[tuple[int, int]],
        agreed: WeightFilesPlan,
        listed: Mapping[Key, BoxList],
    ) -> InPlace:
        """Plan the pieces that a rank provides: it writes them, or sends them to others."""
        files = WeightFiles(agreed.infos, agreed.tied, agreed.folder)
        planned_from = (agreed.infos, agreed.described, agreed.tied, agreed.way, listed)
        if self._planner is None or self._planned_from != planned_from:
            self._planned_from, self._plan = planned_from, None
            providers = Providers(agreed.infos, agreed.described, listed)
            self._own = {
                info.key
                for n, info in enumerate(agreed.infos)
                if agreed.way == "in place" and providers.contiguous(n)
            }
            chosen = np.full(files.count, agreed.way != "in place")
            for key, placed in files.tensors.items():
                chosen[placed.first : placed.first + placed.count] = key not in self._own
            parts = parts_of(files, chosen)
            count = len(files.files) if agreed.way == "whole" else None
            owners = owners_of(parts, group.size, count)
            self._planner = PartPlanner(files, agreed.infos, providers, parts, owners)
        number = {info.key: n for n, info in enumerate(agreed.infos)}
        own_pieces: list[tuple[int, int]] = []
        provided: dict[tuple[int, Box], tuple[int, int]] = {}
        for item, piece in pieces:
            key, box = items[item].info.key, items[item].boxes[piece]
            if key in self._own:
                own_pieces.append((item, piece))
            elif box.size:
                provided[number[key], box] = (item, piece)
        if self._plan is None or self._provided != provided:
            self._provided, self._plan = provided, self._planner.plan(group.rank, provided)
        return InPlace(tuple(own_pieces), files, self._plan, agreed)


def write_in_place(
    store: Store,
    weights: InPlace,
    state: RankState,
    group: Group,
    progress: Callable[[int], None],
    threads: int = 1,
) -> WrittenParts:
    """Write this rank's part of the files; on a file system rank 0 writes headers and index, too."""
    files, (parts, batches, messages), agreed = weights.files, weights.exchanged, weights.agreed
    targets = [(file.key, file.nbytes) for file in files.files]
    fixed = {block.number: block for block in files.fixed}
    threads = {"in place": threads, "parts": _SENT_AT_ONCE, "whole": 1}[agreed.way]
    with PartsWriter(store, targets, agreed.way, agreed.uploads) as out:

        def write(
            task: ShardTask, sources: Sequence[Elements]
        ) -> tuple[list[tuple[int, int, int]], list[tuple[int, Sums]]]:
            part = parts[task.tensor]
            raw, filled = np.empty(part.nbytes, np.uint8), 0
            if part.blocks.start in fixed:
                data = fixed[part.blocks.start].data
                raw[: len(data)], filled = np.frombuffer(data, np.uint8), len(data)
            fingerprints = []
            for f, source in zip(task.fragments, sources, strict=True):
                placed = files.tensors[agreed.infos[f.tensor].key]
                at = placed.at(f.box.start) - part.begin
                copy(np.ndarray(source.shape, source.dtype, raw, at, placed.strides), source)
                fingerprints.append((f.tensor, fingerprint_of(source, placed.info.shape, f.box)))
                filled += source.nbytes
            if filled != part.nbytes:
                raise IntegrityError(
                    f"the ranks provide {filled} of the {part.nbytes} bytes of a part of weights"
                )
            out.write(part.file, part.number, part.begin, raw.data)
            progress(part.nbytes)
            sums, begin = [], 0
            first = files.numbers(part.file).start
            for number, n in zip(
                part.blocks, sizes[part.file][part.blocks.start - first :], strict=False
            ):
                sums.append((number, n, _linear(raw[begin : begin + n].data, 0)))
                begin += n
            return sums, fingerprints

        written = {parts[task.tensor].file for batch in batches for task in batch}
        sizes = {file: files.block_sizes(file).tolist() for file in written}
        itemsizes = [info.itemsize for info in agreed.infos]
        written_parts = exchange(group, itemsizes, batches, messages, state.within, write, threads)
        if agreed.way == "in place":
            written_parts.append(_write_own(weights, state, out, progress, headers=not group.rank))
    sums = [s for part_sums, _ in written_parts for s in part_sums]
    fingerprints = (f for _, of_part in written_parts for f in of_part)
    etags = tuple((file, part, tag) for (file, part), tag in out.etags.items())
    return WrittenParts(
        np.array(sums, "<u4").tobytes(), etags, packed_sums(fingerprints, len(agreed.infos))
    )


def _write_own(
    weights: InPlace,
    state: RankState,
    out: PartsWriter,
    progress: Callable[[int], None],
    *,
    headers: bool,
) -> tuple[list[tuple[int, int, int]], list[tuple[int, Sums]]]:
    """Write the pieces that are ranges of a file, and the headers."""
    files, sums, fingerprints = weights.files, [], []
    number_of = {info.key: n for n, info in enumerate(weights.agreed.infos)}
    for fixed in files.fixed if headers else ():
        out.write(fixed.file, 0, 0, fixed.data)
        sums.append((fixed.number, len(fixed.data), _linear(memoryview(fixed.data), 0)))
        progress(len(fixed.data))
    for item, piece in weights.pieces:
        info, box = state.items[item].info, state.items[item].boxes[piece]
        placed, elements = files.tensors[info.key], state.elements(item, piece)
        for number, block in placed.blocks(box):
            common = box.intersect(block)
            assert common is not None  # noqa: S101 - it is one of those that intersect
            data, at = (
                row_major_bytes(elements_within(elements, box, common)),
                placed.at(common.start),
            )
            out.write(placed.file, 0, at, data.data)
            after = placed.at(block.start) + block.size * info.itemsize - at - data.nbytes
            sums.append((number, data.nbytes, _linear(data.data, after)))
            written = np.ndarray(common.shape, elements.dtype, data)
            part = fingerprint_of(written, info.shape, common)
            fingerprints.append((number_of[info.key], part))
            progress(data.nbytes)
    return sums, fingerprints


def _linear(data: memoryview, after: int) -> int:
    """The CRC-32C of bytes without that of as many zeros, followed by `after` zeros."""
    return CRC32C_SHIFT(checksum(data) ^ _zeros(data.nbytes), after)


@lru_cache(maxsize=1 << 10)
def _zeros(nbytes: int) -> int:
    return checksum(memoryview(bytes(nbytes)))


def block_crcs(files: WeightFiles, sums: bytes) -> NDArray[np.uint32]:
    """The CRC-32C of all blocks."""
    number, nbytes, part = np.frombuffer(sums, "<u4").reshape(-1, 3).T
    sizes = np.concatenate([files.block_sizes(file) for file in range(len(files.files))])
    written, crcs = np.zeros(files.count, np.int64), np.zeros(files.count, np.uint32)
    np.add.at(written, number, nbytes)
    np.bitwise_xor.at(crcs, number, part)
    if (incomplete := np.flatnonzero(written != sizes)).size:
        raise IntegrityError(
            f"the ranks wrote {written[incomplete[0]]} of the {sizes[incomplete[0]]} bytes of "
            "a block of weights"
        )
    distinct_sizes, size_index = np.unique(sizes, return_inverse=True)
    return crcs ^ np.array([_zeros(n) for n in distinct_sizes.tolist()], np.uint32)[size_index]


def complete_uploads(store: Store, weights: InPlace, etags: Sequence[tuple[int, int, str]]) -> None:
    """Make the files visible that were uploaded in parts; rank 0 calls this before the commit."""
    if not weights.agreed.uploads:
        return
    _, uploads = way_of(store)
    assert uploads is not None  # noqa: S101 - they were begun
    by_part = {(file, part): tag for file, part, tag in etags}
    tags: list[list[str]] = [[] for _ in weights.agreed.uploads]
    for part in weights.exchanged.parts:
        tags[part.file].append(by_part[part.file, part.number])
    for file, upload, file_tags in zip(
        weights.files.files, weights.agreed.uploads, tags, strict=True
    ):
        uploads.complete(file.key, upload, file_tags, file.nbytes)


def abort_uploads(store: Store, weights: InPlace) -> None:
    """Discard the uploads of a save that failed, if there are any."""
    keys = (file.key for file in weights.files.files)
    _abort(store, list(zip(keys, weights.agreed.uploads, strict=False)))


def _abort(store: Store, begun: Sequence[tuple[str, str]]) -> None:
    if not begun:
        return
    _, uploads = way_of(store)
    assert uploads is not None  # noqa: S101 - they were begun
    for key, upload in begun:
        # what remains is invisible; the error of the save is the one to report
        with suppress(UcformatError):
            uploads.abort(key, upload)
