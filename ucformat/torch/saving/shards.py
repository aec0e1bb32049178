"""The plan of a save, and who writes each shard and sends what: functions of descriptions.

Every rank computes this for its own descriptions, so nothing is told by rank 0, and the work does
not grow with the number of ranks that hold a description.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ucformat.geometry.fingerprint import total, unpacked_sums
from ucformat.schema.tensors import TableColumns, TensorDoc, TensorTable
from ucformat.torch.saving.statement import Fragment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from ucformat.format.chunking import Grid
    from ucformat.format.described import Described
    from ucformat.geometry.box import Box
    from ucformat.geometry.distribution import BoxList, Distribution
    from ucformat.geometry.fingerprint import Sums
    from ucformat.geometry.tensor import Key, TensorInfo
    from ucformat.reading.readable import StatePath
    from ucformat.torch.saving.statement import (
        Description,
        Exceptions,
        ListedTensor,
        SharedRow,
        Statement,
    )

#: Small shards of one rank are batched up to this many bytes; each sender sends one message per
#: batch.
BATCH_BYTES = 32 << 20

#: Of a tensor in the program's state, in the form of manifests.
Paths = tuple[tuple[str | int, ...], ...]


class ShardTask(NamedTuple):
    """A shard to write: of tensor number `tensor`, at index `at` of its grid of shards."""

    tensor: int
    at: tuple[int, ...]
    fragments: tuple[Fragment, ...]


#: Shards that a rank writes in order; a sender puts all its fragments in one message.
ShardBatch = tuple[ShardTask, ...]


class Transfer(NamedTuple):
    """What a rank sends for a batch of another: number `number` of those dealt together.

    The receiver takes the messages of each sender in the order in which they are sent.
    """

    to: int
    number: int
    fragments: tuple[Fragment, ...]


@dataclass(frozen=True)
class PlannedTensors:
    """Tensors that are stored in one way, in the order of rank 0, then of others; listed ones last.

    Attributes:
        paths: of each tensor, in the form of manifests.
        described: those that are described, unless they are arrays.
    """

    infos: tuple[TensorInfo, ...]
    paths: tuple[Paths, ...]
    listed: tuple[ListedTensor, ...] = ()
    described: Described | None = None

    @cached_property
    def table(self) -> TensorTable:
        """The tensors as in the manifest, if they are no arrays."""
        columns = TableColumns()
        for info, paths in zip(self.infos, self.paths, strict=True):
            columns.add(info.name, paths, (info.state, info.dtype, info.shape))
        return columns.table()

    def docs(self) -> Iterator[TensorDoc]:
        """The rows of `table`."""
        rows = zip(self.infos, self.paths, strict=True)
        return (TensorDoc(*i.key, i.dtype, i.shape, at=at) for i, at in rows)


class GlobalPlan(NamedTuple):
    """The plan of all ranks, on rank 0.

    Attributes:
        digest: of the exceptions.
        aliases: the tied names.
        keys: of the rows of each description, by its digest.
        stated: the descriptions, each with the first rank that states it, and its digest.
        places: of each tensor, the first rank that states it, and its number there: the order of all.
        state_paths: of each tensor in the program's state.
    """

    exceptions: Exceptions
    digest: bytes
    aliases: Mapping[str, str]
    arrays: PlannedTensors
    packed: PlannedTensors
    weights: PlannedTensors
    keys: Mapping[bytes, tuple[Key, ...]]
    stated: Sequence[tuple[int, bytes, Description]]
    places: Mapping[Key, tuple[int, int]]
    state_paths: Mapping[Key, Sequence[StatePath]]

    def sums(self, by_description: Mapping[bytes, bytes]) -> dict[Key, Sums]:
        """The sums of tensors, from those of the rows of each description."""
        return self.by_tensor(by_description, total)

    def by_tensor(
        self, by_description: Mapping[bytes, bytes], join: Callable[[list[Sums]], Sums]
    ) -> dict[Key, Sums]:
        """What `join` makes of pairs of numbers that stand for the rows of each description."""
        parts: dict[Key, list[Sums]] = {}
        for digest, data in by_description.items():
            for key, sums in zip(self.keys[digest], unpacked_sums(data), strict=True):
                parts.setdefault(key, []).append(sums)
        return {key: join(of_key) for key, of_key in parts.items()}


class OwnPart(NamedTuple):
    """What follows from descriptions for one rank.

    Attributes:
        pieces: the (item, piece) of its packed file, in order.
        listed_at: the byte of this file at which the boxes of listed tensors begin.
        batches: the shards of arrays that it writes.
        messages: the fragments that it sends.
        weights: the (item, piece) that it provides of weights.
    """

    pieces: tuple[tuple[int, int], ...]
    listed_at: int
    batches: tuple[ShardBatch, ...]
    messages: tuple[Transfer, ...]
    weights: tuple[tuple[int, int], ...]


class _Shards(NamedTuple):
    """The shards at one index of the grid, of rows of one distribution, shape and item size."""

    distribution: Distribution | BoxList
    shape: tuple[int, ...]
    rows: list[int]  # the rank's items
    at: tuple[int, ...]
    box: Box
    nbytes: int  # of each


class _Owners(NamedTuple):
    """The shards of a description, and for each of their rows, in this order, who writes it."""

    shards: list[_Shards]
    first: NDArray[np.int64]  # of each of `shards`, the number of its first row
    owner: NDArray[np.int64]  # the coordinate, counted in row-major order
    batch: NDArray[np.int64]  # the number of the owner's batch


def plan_shards(
    statement: Statement, exceptions: Exceptions, grid_of: Callable[[TensorInfo], Grid]
) -> tuple[tuple[ShardBatch, ...], tuple[Transfer, ...]]:
    """Return the batches that a rank writes, and the messages that it sends, both in order.

    A shard is written by one of the ranks that hold some of it, balanced by the bytes that they
    write and receive. Of replicas, those with the owner's indices send. All ranks take descriptions
    in the same order, then batches in the order of their numbers, so there are no deadlocks.
    """
    batches: list[ShardBatch] = []
    messages: list[Transfer] = []
    for rows in statement.shared(exceptions, "array"):
        if rows and (at := rows[0].distribution.mesh.coordinate(statement.rank)) is not None:
            own = _OwnShards(statement, rows, at, grid_of)
            batches += own.batches()
            messages += own.messages()
    return tuple(batches), tuple(messages)


class _OwnShards:
    """One rank's part of a description, whose rows have one mesh; `at` is its coordinate."""

    def __init__(
        self,
        statement: Statement,
        rows: Sequence[SharedRow],
        at: tuple[int, ...],
        grid_of: Callable[[TensorInfo], Grid],
    ) -> None:
        self._items, self._rank, self._at = statement.items, statement.rank, at
        self._mesh = rows[0].distribution.mesh
        self._me = int(np.ravel_multi_index(at, self._mesh.sizes))
        alike: dict[tuple[Distribution | BoxList, Grid], list[int]] = {}
        for item, info, distribution in rows:
            alike.setdefault((distribution, grid_of(info)), []).append(item)
        self._shards = _deal(alike, self._mesh.size)

    def batches(self) -> list[ShardBatch]:
        """The batches that this rank writes."""
        dealt = self._shards
        own_numbers = np.flatnonzero(dealt.owner == self._me)
        kinds = np.searchsorted(dealt.first, own_numbers, "right") - 1
        # rank, box that it holds, that it sends
        senders: dict[int, list[tuple[int, Box, Box]]] = {}
        out: dict[int, list[ShardTask]] = {}
        for number, kind, batch in zip(
            own_numbers.tolist(), kinds.tolist(), dealt.batch[own_numbers].tolist(), strict=True
        ):
            shards = dealt.shards[kind]
            if kind not in senders:
                senders[kind] = self._senders(shards)
            item = shards.rows[number - int(dealt.first[kind])]
            fragments = (
                self._own(item, box, part)
                if sender == self._rank
                else Fragment(sender, item, -1, -1, part)
                for sender, box, part in senders[kind]
            )
            out.setdefault(batch, []).append(ShardTask(item, shards.at, tuple(fragments)))
        return [tuple(tasks) for _, tasks in sorted(out.items())]

    def _senders(self, shards: _Shards) -> list[tuple[int, Box, Box]]:
        """Who sends this rank what of a shard; it is among them."""
        d, ranks, out = shards.distribution, self._mesh.ranks, []
        axes, coordinate = d.axes, list(self._at)
        for at, box in d.holdings(shards.shape, shards.box):
            part = box.intersect(shards.box)
            if part is not None:
                for axis, i in zip(axes, at, strict=True):
                    # on the axes over which there are replicas, it is that of this rank
                    coordinate[axis] = i
                out.append((int(ranks[tuple(coordinate)]), box, part))
        return out

    def messages(self) -> list[Transfer]:
        """The messages that this rank sends."""
        dealt, ranks = self._shards, self._mesh.ranks.reshape(-1)
        out: dict[tuple[int, int], list[Fragment]] = {}  # by batch and owner
        for shards, first in zip(dealt.shards, dealt.first.tolist(), strict=True):
            d = shards.distribution
            sent = [
                (b, p)
                for b in d.boxes(shards.shape, self._at)
                if (p := b.intersect(shards.box)) is not None
            ]
            owners = dealt.owner[first : first + len(shards.rows)]
            copies = _copies(d)
            receives = (copies[owners] == copies[self._me]) & (owners != self._me)
            for row in np.flatnonzero(receives).tolist() if sent else ():
                key = (int(dealt.batch[first + row]), int(owners[row]))
                item = shards.rows[row]
                out.setdefault(key, []).extend(self._own(item, box, part) for box, part in sent)
        return [
            Transfer(int(ranks[owner]), batch, tuple(sent))
            for (batch, owner), sent in sorted(out.items())
        ]

    def _own(self, item: int, box: Box, part: Box) -> Fragment:
        return Fragment(self._rank, item, item, self._items[item].boxes.index(box), part)


def _copies(d: Distribution | BoxList) -> NDArray[np.int64]:
    """Which replica each coordinate of the mesh is, in row-major order of coordinates."""
    sizes = [n if axis in d.replicas else 1 for axis, n in enumerate(d.mesh.sizes)]
    return np.broadcast_to(np.arange(d.copies).reshape(sizes), d.mesh.sizes).reshape(-1)


def _deal(rows: dict[tuple[Distribution | BoxList, Grid], list[int]], size: int) -> _Owners:
    """Deal the shards of a description to the coordinates of its mesh, the largest first."""
    shards = [
        _Shards(d, grid.shape, items, at, box, box.size * grid.itemsize)
        for (d, grid), items in rows.items()
        for at in grid.shards()
        for box in (grid.box(at),)
    ]
    shards.sort(key=lambda s: -s.nbytes)
    counts = np.array([len(s.rows) for s in shards], np.int64)
    loads = np.zeros(size, np.int64)  # bytes written and received
    owner = np.array([o for s in shards for o in _owners(s, loads)], np.int64)
    nbytes = np.repeat(np.array([s.nbytes for s in shards], np.int64), counts)
    return _Owners(shards, np.cumsum(counts) - counts, owner, _batches(owner, nbytes))


def _owners(shards: _Shards, loads: NDArray[np.int64]) -> list[int]:
    """The owners of equal shards: in turn the holder that finishes first; adds to the loads."""
    d = shards.distribution
    itemsize = shards.nbytes // shards.box.size
    elements = np.broadcast_to(d.overlap(shards.shape, shards.box), d.mesh.sizes).reshape(-1)
    holders = np.flatnonzero(elements)
    # the bytes of the shard are written once, and those that others hold are received
    cost = 2 * shards.nbytes - elements[holders] * itemsize
    finish = loads[holders] + cost
    best = np.argsort(finish, kind="stable")[: len(shards.rows)]  # no further ones can be needed
    # sorted by finish time, so it is a heap already
    heap = list(
        zip(finish[best].tolist(), holders[best].tolist(), cost[best].tolist(), strict=True)
    )
    out = []
    for _ in shards.rows:
        finished, holder, own_cost = heap[0]
        out.append(holder)
        heapq.heapreplace(heap, (finished + own_cost, holder, own_cost))
    # an entry holds the time after one more shard, which nobody has got
    for finished, holder, own_cost in heap:
        loads[holder] = finished - own_cost
    return out


def _batches(owner: NDArray[np.int64], nbytes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Each shard's batch among its owner's: at most `BATCH_BYTES`, or one shard."""
    order = np.argsort(owner, kind="stable")
    sorted_owner, sizes = owner[order], nbytes[order]
    first = np.searchsorted(sorted_owner, sorted_owner)
    before = np.cumsum(sizes) - sizes
    # A batch is what begins in one window of half its size. Its last shard, the smallest, reaches
    # past the window by at most the other half, or is the only one.
    half = (before - before[first]) // (BATCH_BYTES // 2)
    begins = np.ones(len(order), np.bool_)
    begins[1:] = (np.diff(half) > 0) | (np.diff(sorted_owner) > 0)
    number = np.cumsum(begins)
    out = np.empty_like(owner)
    out[order] = number - number[first]
    return out
