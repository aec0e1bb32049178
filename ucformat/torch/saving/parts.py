"""Which rank writes each part of the safetensors files, and what others send for it.

A part consists of consecutive blocks of one file, about 8 MiB, perhaps of many tensors. Every rank knows which rank
provides each box of a weight, so it computes its own parts and messages, and rank 0 deals none.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ucformat.format.sidecar import decode
from ucformat.geometry.box import Box, row_major
from ucformat.schema.tensors import TensorDoc, TensorTable
from ucformat.storage.upload import unit_for
from ucformat.torch.comm.wire import message
from ucformat.torch.saving.assignment import BATCH_BYTES, Fragment, ShardBatch, ShardTask, Transfer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from ucformat.geometry.tensor import TensorInfo
    from ucformat.jobs.weight_files import WeightFiles

PART_BYTES = 8 << 20  # an upload takes at least 5 MiB, and a block is at most 1 MiB


@message
class ListedBoxes:
    """The boxes of a weight that the ranks cannot describe, and the rank that provides each."""

    ranks: tuple[int, ...]
    boxes: tuple[Box, ...]


class Part(NamedTuple):
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

    parts: Sequence[Part]
    batches: tuple[ShardBatch, ...] = ()
    messages: tuple[Transfer, ...] = ()


class Providers:
    """Which rank provides each box of a weight; each element is provided by one rank.

    Args:
        listed: the boxes of the other ones, which are the last.
    """

    def __init__(self, infos: Sequence[TensorInfo], described: bytes, listed: Sequence[ListedBoxes]) -> None:
        table = TensorTable.of(TensorDoc(*i.key, i.dtype, i.shape) for i in infos)
        self._infos, self._listed, self._first = infos, listed, len(infos) - len(listed)
        found = decode(described, table, "the plan of the weights").described
        self._rows = {row.tensor: row for row in (found.rows if found else ())}

    def of(self, number: int, within: Box) -> list[tuple[Box, int]]:
        """The boxes that intersect a box of a weight, in order, each with the rank that provides it."""
        if number < self._first:
            _, d, writer, _ = self._rows[number]
            held = d.holdings(self._infos[number].shape, within)
            return sorted((box, int(d.mesh.ranks[d.coordinate(at, writer)])) for at, box in held)
        listed = self._listed[number - self._first]
        found = zip(listed.boxes, listed.ranks, strict=True)
        return sorted((box, rank) for box, rank in found if box.intersect(within) is not None)

    def contiguous(self, number: int) -> bool:
        """Whether each box of a weight is known to be one range of the file."""
        shape = self._infos[number].shape
        if number < self._first:
            first = next((d for d, n in enumerate(shape) if n > 1), 0)
            return all(cut.dim <= first for cut in self._rows[number].distribution.cuts)
        return all(_is_range(box, shape) for box in self._listed[number - self._first].boxes)


def _is_range(box: Box, shape: tuple[int, ...]) -> bool:
    """Whether the elements of a box follow each other in row-major order."""
    between = sum((n - 1) * step for n, step in zip(box.shape, row_major(shape), strict=True))
    return between + 1 == box.size or not box.size


def parts_of(files: WeightFiles, chosen: NDArray[np.bool_]) -> list[Part]:
    """Cut files into parts, of which all but the last of a file have at least 7 MiB if all blocks are chosen."""
    out: list[Part] = []
    for file, target in enumerate(files.files):
        sizes, numbers, before = files.block_sizes(file), files.numbers(file), len(out)
        if not len(sizes):
            continue
        begin = np.cumsum(sizes) - sizes
        most = max(PART_BYTES, unit_for(target.nbytes))
        window = np.maximum(begin - sizes[0], 0) // most  # the header, which may be large, is in the first part
        mask = chosen[numbers.start : numbers.stop]
        cuts = np.flatnonzero((np.diff(window) != 0) | (mask[1:] != mask[:-1])) + 1
        for first, stop in pairwise([0, *cuts.tolist(), len(sizes)]):
            if mask[first]:
                blocks = range(numbers.start + first, numbers.start + stop)
                nbytes = int(sizes[first:stop].sum())
                out.append(Part(file, len(out) - before, blocks, int(begin[first]), nbytes))
    return out


def owners_of(parts: Sequence[Part], ranks: int, files: int | None = None) -> NDArray[np.int64]:
    """The rank that writes each part: consecutive parts are written by one rank, and all ranks write as many."""
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
        parts: Sequence[Part],
        owners: NDArray[np.int64],
    ) -> None:
        self._infos, self._files, self._providers, self._parts, self._owners = infos, files, providers, parts, owners
        self._together = max(1, BATCH_BYTES // PART_BYTES)
        self._batch = (np.arange(len(parts)) - np.searchsorted(owners, owners)) // self._together
        self._placed = [t for t in files.tensors.values() if t.count]
        self._firsts = [t.first for t in self._placed]
        self._starts = [part.blocks.start for part in parts]
        self._number = {info.key: n for n, info in enumerate(infos)}

    def plan(self, rank: int, provided: Mapping[tuple[int, Box], tuple[int, int]]) -> PartPlan:
        """Plan what a rank writes and sends."""
        mine, step = np.flatnonzero(self._owners == rank).tolist(), self._together
        tasks = [self._task(number, rank, provided) for number in mine]
        batches = tuple(ShardBatch(tuple(tasks[n : n + step])) for n in range(0, len(tasks), step))
        return PartPlan(self._parts, batches, self._messages(rank, provided))

    def _boxes(self, part: Part) -> Iterator[tuple[int, Box]]:
        """The boxes of weights that a part consists of, in order."""
        for n in range(max(bisect_right(self._firsts, part.blocks.start) - 1, 0), len(self._placed)):
            tensor = self._placed[n]
            if tensor.first >= part.blocks.stop:
                return
            for box in tensor.boxes(part.blocks):
                yield self._number[tensor.info.key], box

    def _task(self, number: int, rank: int, provided: Mapping[tuple[int, Box], tuple[int, int]]) -> ShardTask:
        found = []
        for tensor, box in self._boxes(self._parts[number]):
            for held, sender in self._providers.of(tensor, box):
                common = held.intersect(box)
                assert common is not None  # noqa: S101 - it is one of those that intersect
                item, piece = provided[tensor, held] if sender == rank else (-1, -1)
                found.append(Fragment(sender, tensor, item, piece, common))
        return ShardTask(number, (), tuple(found))

    def _messages(self, rank: int, provided: Mapping[tuple[int, Box], tuple[int, int]]) -> tuple[Transfer, ...]:
        """What the rank sends, in the order in which the owners of parts expect it."""
        sent: dict[tuple[int, int], list[tuple[tuple[int, int, int, Box], Fragment]]] = {}
        for (number, held), (item, piece) in provided.items():
            tensor = self._files.tensors[self._infos[number].key]
            blocks = tensor.blocks_around(held)
            first = max(bisect_right(self._starts, blocks.start) - 1, 0)
            for n in range(first, bisect_right(self._starts, blocks.stop - 1)):
                if self._owners[n] == rank:
                    continue
                of = sent.setdefault((int(self._batch[n]), int(self._owners[n])), [])
                for k, box in enumerate(tensor.boxes(self._parts[n].blocks)):
                    if (common := held.intersect(box)) is not None:
                        of.append(((n, tensor.first, k, held), Fragment(rank, number, item, piece, common)))
        return tuple(
            Transfer(owner, number, tuple(f for _, f in sorted(found, key=itemgetter(0))))
            for (number, owner), found in sorted(sent.items())
            if found
        )
