"""Which rank writes each shard of the Zarr form, and what others send for it, as a function of what ranks describe.

Every rank computes this for its own descriptions, so nothing is told by rank 0, and the work does
not grow with the number of ranks that hold a description.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ucformat.torch.saving.assignment import BATCH_BYTES, Fragment, ShardBatch, ShardTask, Transfer
from ucformat.torch.saving.statement import distributions_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ucformat.format.chunking import Grid
    from ucformat.geometry.box import Box
    from ucformat.geometry.distribution import Distribution
    from ucformat.torch.saving.statement import Exceptions, Statement


class _Shards(NamedTuple):
    """The shards at one index of the grid, of all rows that one distribution holds in one shape and item size."""

    distribution: Distribution
    shape: tuple[int, ...]
    rows: list[int]
    at: tuple[int, ...]
    box: Box
    nbytes: int  # of each


class _Dealt(NamedTuple):
    """The shards of a description, and for each of their rows, in this order, who writes it."""

    shards: list[_Shards]
    first: NDArray[np.int64]  # of each of `shards`, the number of its first row
    owner: NDArray[np.int64]  # the coordinate, counted in row-major order
    batch: NDArray[np.int64]  # the number of the owner's batch


def plan_shards(
    statement: Statement, exceptions: Exceptions, grids: Sequence[Grid]
) -> tuple[tuple[ShardBatch, ...], tuple[Transfer, ...]]:
    """Return the batches of shards that a rank writes, and the messages that it sends, both in order.

    A shard is written by one of the ranks that hold some of it, balanced by the bytes that they
    write and receive. Of replicas, those with the owner's indices send. All ranks take descriptions
    in the order of their digests, then batches in the order of their numbers, so there are no
    deadlocks.
    """
    batches: list[ShardBatch] = []
    messages: list[Transfer] = []
    for digest in sorted(statement.descriptions):
        mine = _Mine(statement, digest, exceptions, grids)
        batches += mine.batches()
        messages += mine.messages()
    return tuple(batches), tuple(messages)


class _Mine:
    """One rank's part of a description; arguments as for `plan_shards`."""

    def __init__(
        self, statement: Statement, digest: bytes, exceptions: Exceptions, grids: Sequence[Grid]
    ) -> None:
        description = statement.descriptions[digest]
        distributions = distributions_of(description, digest, exceptions)
        left_out = set(exceptions.left_out.get(digest, ()))
        self._items, self._order = statement.items, statement.order[digest]
        self._mesh = distributions[-1].mesh
        at = self._mesh.coordinate(statement.rank)
        assert at is not None  # noqa: S101 - the rank holds what it states
        self._at, self._rank = at, statement.rank
        self._me = int(np.ravel_multi_index(at, self._mesh.sizes))
        rows: dict[tuple[Distribution, Grid], list[int]] = {}
        for number, row in enumerate(description.rows):
            if number not in left_out:
                key = (distributions[row.distribution], grids[self._order[number]])
                rows.setdefault(key, []).append(number)
        self._dealt = _deal(rows, self._mesh.size)

    def _item(self, shards: _Shards, row: int) -> int:
        return self._order[shards.rows[row]]

    def batches(self) -> list[ShardBatch]:
        """The batches that this rank writes."""
        dealt = self._dealt
        mine = np.flatnonzero(dealt.owner == self._me)
        of = np.searchsorted(dealt.first, mine, "right") - 1
        held: dict[
            int, list[tuple[int, Box, Box]]
        ] = {}  # sender, box that it holds, box that it sends
        out: dict[int, list[ShardTask]] = {}
        for number, kind, batch in zip(
            mine.tolist(), of.tolist(), dealt.batch[mine].tolist(), strict=True
        ):
            shards = dealt.shards[kind]
            if kind not in held:
                held[kind] = self._held(shards)
            item = self._item(shards, number - int(dealt.first[kind]))
            fragments = (
                self._own(item, box, part)
                if sender == self._rank
                else Fragment(sender, item, -1, -1, part)
                for sender, box, part in held[kind]
            )
            out.setdefault(batch, []).append(ShardTask(item, shards.at, tuple(fragments)))
        return [ShardBatch(tuple(tasks)) for _, tasks in sorted(out.items())]

    def _held(self, shards: _Shards) -> list[tuple[int, Box, Box]]:
        """Who sends this rank what of a shard; it is among them."""
        d, ranks, out = shards.distribution, self._mesh.ranks, []
        axes, coordinate = d.axes, list(self._at)
        for at, box in d.holdings(shards.shape, shards.box):
            part = box.intersect(shards.box)
            if part is not None:
                for axis, i in zip(axes, at, strict=True):
                    coordinate[axis] = (
                        i  # on the axes over which there are replicas, it is that of this rank
                    )
                out.append((int(ranks[tuple(coordinate)]), box, part))
        return out

    def messages(self) -> list[Transfer]:
        """The messages that this rank sends."""
        dealt, ranks = self._dealt, self._mesh.ranks.reshape(-1)
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
            told = (copies[owners] == copies[self._me]) & (owners != self._me)
            for row in np.flatnonzero(told).tolist() if sent else ():
                key = (int(dealt.batch[first + row]), int(owners[row]))
                item = self._item(shards, row)
                out.setdefault(key, []).extend(self._own(item, box, part) for box, part in sent)
        return [
            Transfer(int(ranks[owner]), batch, tuple(sent))
            for (batch, owner), sent in sorted(out.items())
        ]

    def _own(self, item: int, box: Box, part: Box) -> Fragment:
        return Fragment(self._rank, item, item, self._items[item].boxes.index(box), part)


def _copies(d: Distribution) -> NDArray[np.int64]:
    """Which replica each coordinate of the mesh is, in row-major order of coordinates."""
    sizes = [n if axis in d.replicas else 1 for axis, n in enumerate(d.mesh.sizes)]
    return np.broadcast_to(np.arange(d.copies).reshape(sizes), d.mesh.sizes).reshape(-1)


def _deal(rows: dict[tuple[Distribution, Grid], list[int]], size: int) -> _Dealt:
    """Deal the shards of a description to the coordinates of its mesh, the largest first."""
    shards = [
        _Shards(d, grid.shape, found, at, box, box.size * grid.itemsize)
        for (d, grid), found in rows.items()
        for at in grid.shards()
        for box in (grid.box(at),)
    ]
    shards.sort(key=lambda s: -s.nbytes)
    counts = np.array([len(s.rows) for s in shards], np.int64)
    loads = np.zeros(size, np.int64)  # bytes written and received
    owner = np.array([o for s in shards for o in _owners(s, loads)], np.int64)
    nbytes = np.repeat(np.array([s.nbytes for s in shards], np.int64), counts)
    return _Dealt(shards, np.cumsum(counts) - counts, owner, _batches(owner, nbytes))


def _owners(shards: _Shards, loads: NDArray[np.int64]) -> list[int]:
    """The owner of each of equal shards: in turn the holder that would finish first; adds to the loads."""
    d = shards.distribution
    itemsize = shards.nbytes // shards.box.size
    held = np.broadcast_to(d.overlap(shards.shape, shards.box), d.mesh.sizes).reshape(-1)
    holders = np.flatnonzero(held)
    cost = 2 * shards.nbytes - held[holders] * itemsize
    finish = loads[holders] + cost
    best = np.argsort(finish, kind="stable")[: len(shards.rows)]  # no further ones can be needed
    heap = list(
        zip(finish[best].tolist(), holders[best].tolist(), cost[best].tolist(), strict=True)
    )
    out = []
    for _ in shards.rows:
        finished, holder, more = heap[0]
        out.append(holder)
        heapq.heapreplace(heap, (finished + more, holder, more))
    for finished, holder, more in heap:
        loads[holder] = finished - more
    return out


def _batches(owner: NDArray[np.int64], nbytes: NDArray[np.int64]) -> NDArray[np.int64]:
    """The number of the batch of each shard among those of its owner: at most `BATCH_BYTES`, or one shard."""
    order = np.argsort(owner, kind="stable")
    sorted_owner, sizes = owner[order], nbytes[order]
    first = np.searchsorted(sorted_owner, sorted_owner)
    before = np.cumsum(sizes) - sizes
    half = (before - before[first]) // (
        BATCH_BYTES // 2
    )  # the last one begins in it, and is not the largest
    begins = np.ones(len(order), np.bool_)
    begins[1:] = (np.diff(half) > 0) | (np.diff(sorted_owner) > 0)
    number = np.cumsum(begins)
    out = np.empty_like(owner)
    out[order] = number - number[first]
    return out
