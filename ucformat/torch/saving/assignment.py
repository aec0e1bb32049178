"""Who writes what of a state that many ranks hold: pure planning, from all ranks' items to each rank's part."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ucformat.errors import CoverageError, UsageError
from ucformat.geometry.box import Box
from ucformat.geometry.coverage import prove
from ucformat.geometry.tensor import Key, TensorInfo
from ucformat.sources.dcp.names import Path
from ucformat.torch.comm.wire import message

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucformat.format.chunking import Grid

__all__ = [
    "Fragment",
    "GlobalTensor",
    "ShardBatch",
    "ShardTask",
    "Transfer",
    "WriteItem",
    "assign_pieces",
    "assign_shards",
    "merge_items",
]

#: Small shards of one rank are bundled up to this many bytes: each sender sends one message for them.
BATCH_BYTES = 32 << 20


@message
class WriteItem:
    """What one rank holds of one tensor, and its paths in the state of the program."""

    info: TensorInfo
    boxes: tuple[Box, ...]
    paths: tuple[Path, ...] = ()


@message
class GlobalTensor:
    """A tensor of the checkpoint, and who holds its boxes: (rank, number of the item, number of the box), by box."""

    info: TensorInfo
    holders: dict[Box, list[tuple[int, int, int]]]


@message
class Fragment:
    """A box of tensor number `tensor` that its sender has in piece number `piece` of its item number `item`."""

    sender: int
    tensor: int
    item: int
    piece: int
    box: Box


@message
class ShardTask:
    """One shard to write: of tensor number `tensor` of the checkpoint, at `at` in its grid of shards."""

    tensor: int
    at: tuple[int, ...]
    fragments: tuple[Fragment, ...]


@message
class ShardBatch:
    """Shards that one rank writes one after another. Each sender sends all its fragments of them at once, in order."""

    shards: tuple[ShardTask, ...]

    def sent_by(self, rank: int) -> list[Fragment]:
        """What a rank sends for this batch, in the order in which it lies in the message."""
        return [f for s in self.shards for f in s.fragments if f.sender == rank]


@message
class Transfer:
    """What a rank sends for batch number `number` of another rank."""

    to: int
    number: int
    fragments: tuple[Fragment, ...]


def merge_items(items: Sequence[Sequence[WriteItem]]) -> list[GlobalTensor]:
    """The tensors of all ranks, in the order in which rank 0, then the next, lists them.

    Raises:
        UsageError: two ranks give one tensor different dtypes or shapes, or a rank lists one twice.
        CoverageError: nobody holds some part of a tensor, or two ranks hold overlapping boxes that are not equal.
    """
    found: dict[Key, GlobalTensor] = {}
    first: dict[Key, int] = {}
    for rank, listed in enumerate(items):
        seen: set[Key] = set()
        for number, item in enumerate(listed):
            key = item.info.key
            if key in seen:
                raise UsageError(f"rank {rank} saves two tensors as {key}", hint="give them different names")
            seen.add(key)
            held = found.setdefault(key, GlobalTensor(item.info, {}))
            if held.info != item.info:
                raise UsageError(
                    f"{key} is {held.info.dtype} {held.info.shape} on rank {first[key]}, but {item.info.dtype} "
                    f"{item.info.shape} on rank {rank}",
                    hint="a value that differs from rank to rank is saved as ucformat.torch.PerRank(value)",
                )
            first.setdefault(key, rank)
            for piece, box in enumerate(item.boxes):
                held.holders.setdefault(box, []).append((rank, number, piece))
    for held in found.values():
        whole = next(iter(held.holders), None)
        if len(held.holders) == 1 and whole is not None and whole.shape == held.info.shape and not any(whole.start):
            continue
        try:
            prove(held.info, ((who[0][0], box) for box, who in held.holders.items()))
        except CoverageError as error:
            raise CoverageError(error.message, hint="are all ranks of the mesh part of this save?") from None
    return list(found.values())


def assign_pieces(tensors: Sequence[GlobalTensor], ranks: int) -> list[list[tuple[int, int]]]:
    """Which (item, piece) each rank writes, each box once, balanced over its replicas by bytes; in order of items."""
    load = [0] * ranks
    out: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    boxes = [(box.size * t.info.itemsize, who) for t in tensors for box, who in t.holders.items()]
    for nbytes, who in sorted(boxes, key=lambda b: -b[0]):
        rank, item, piece = min(who, key=lambda w: load[w[0]])
        load[rank] += nbytes
        out[rank].append((item, piece))
    return [sorted(mine) for mine in out]


def assign_shards(
    tensors: Sequence[GlobalTensor], ranks: int, grids: Sequence[Grid]
) -> tuple[list[list[ShardBatch]], list[list[Transfer]]]:
    """The batches that each rank writes, and the messages that it sends, in the order in which it does.

    A shard goes to the rank that is done first if it writes and receives the shard on top of all that it was dealt
    before, so those that hold most of it are preferred. Each byte is sent at most once; what the owner holds is not
    sent. All ranks send in the order of batch numbers, so whoever waits for a batch waits for nothing that waits for
    it.
    """
    work = np.zeros(ranks)
    sent = np.zeros(ranks)
    owned: list[list[tuple[int, ShardTask]]] = [[] for _ in range(ranks)]
    shards = [(grid.box(at), number, at) for number, grid in enumerate(grids) for at in grid.shards()]
    size = [t.info.itemsize for t in tensors]
    for whole, number, at in sorted(shards, key=lambda s: -s[0].size * size[s[1]]):
        itemsize = size[number]
        met = [(box, who) for b, who in tensors[number].holders.items() if (box := b.intersect(whole)) is not None]
        missing = np.full(ranks, float(whole.size * itemsize))
        for box, who in met:
            missing[[w[0] for w in who]] -= box.size * itemsize
        owner = int(np.argmin(work + whole.size * itemsize + missing))
        work[owner] += whole.size * itemsize + missing[owner]
        fragments = []
        for box, who in met:
            own = next((w for w in who if w[0] == owner), None)
            rank, item, piece = own or min(who, key=lambda w: float(sent[w[0]]))
            sent[rank] += 0 if own else box.size * itemsize
            fragments.append(Fragment(rank, number, item, piece, box))
        owned[owner].append((whole.size * itemsize, ShardTask(number, at, tuple(fragments))))
    batches = [_batched(mine) for mine in owned]
    return batches, _transfers(batches)


def _transfers(batches: Sequence[Sequence[ShardBatch]]) -> list[list[Transfer]]:
    """What each rank sends, in the order of batch numbers."""
    messages: list[list[Transfer]] = [[] for _ in batches]
    for number in range(max(map(len, batches), default=0)):
        for owner, mine in enumerate(batches):
            if number < len(mine):
                by_sender: dict[int, list[Fragment]] = {}
                for shard in mine[number].shards:
                    for f in shard.fragments:
                        by_sender.setdefault(f.sender, []).append(f)
                for sender, found in by_sender.items():
                    if sender != owner:
                        messages[sender].append(Transfer(owner, number, tuple(found)))
    return messages


def _batched(shards: Sequence[tuple[int, ShardTask]]) -> list[ShardBatch]:
    """Shards in their order, bundled while they are small."""
    out: list[ShardBatch] = []
    held: list[ShardTask] = []
    total = 0
    for nbytes, shard in shards:
        if held and total + nbytes > BATCH_BYTES:
            out.append(ShardBatch(tuple(held)))
            held, total = [], 0
        held.append(shard)
        total += nbytes
    return [*out, ShardBatch(tuple(held))] if held else out
