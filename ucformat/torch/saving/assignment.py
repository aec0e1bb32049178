"""Assigns the pieces or shards of a state to the ranks that write them: pure planning, from the items of all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ucformat.errors import CoverageError, UsageError
from ucformat.format.chunking import Tiling
from ucformat.format.described import ALIGNMENT
from ucformat.geometry.box import Box, prove
from ucformat.geometry.tensor import Key, TensorInfo
from ucformat.reading.readable import StatePath as Path
from ucformat.schema.tensors import TensorDoc, TensorTable
from ucformat.torch.comm.wire import message

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ucformat.format.chunking import Grid
    from ucformat.format.described import Described

#: Small shards of one rank are batched up to this many bytes; each sender sends one message per
#: batch.
BATCH_BYTES = 32 << 20


@message
class WriteItem:
    """The boxes of a tensor that one rank holds, and the paths of the tensor in the state of the program."""

    info: TensorInfo
    boxes: tuple[Box, ...]
    paths: tuple[Path, ...] = ()


@message
class GlobalTensor:
    """A tensor of the checkpoint, and the holders of each box: (rank, number of the item, number of the box)."""

    info: TensorInfo
    holders: dict[Box, list[tuple[int, int, int]]]


@message
class Fragment:
    """A box of tensor number `tensor`, which the sender holds in piece `piece` of its item `item`.

    If tensors were described, only the sender knows its item and piece; for others they are -1.
    """

    sender: int
    tensor: int
    item: int
    piece: int
    box: Box


@message
class ShardTask:
    """A shard to write: of tensor number `tensor` of the checkpoint, at index `at` of its grid of shards."""

    tensor: int
    at: tuple[int, ...]
    fragments: tuple[Fragment, ...]


@message
class ShardBatch:
    """Shards that one rank writes in order. Each sender sends all its fragments of a batch in one message, in order."""

    shards: tuple[ShardTask, ...]

    def sent_by(self, rank: int) -> list[Fragment]:
        """Return the fragments that a rank sends for this batch, in the order of the message."""
        return [f for s in self.shards for f in s.fragments if f.sender == rank]


@message
class Transfer:
    """The message that a rank sends for a batch of another rank: number `number` of those that are dealt together.

    The receiver takes the messages of each sender in the order in which they are sent.
    """

    to: int
    number: int
    fragments: tuple[Fragment, ...]


@dataclass(frozen=True, slots=True)
class GlobalPlan:
    """The plan of all ranks, kept on rank 0.

    Attributes:
        infos: all tensors, those that are described first.
        paths: of each tensor, in the form of manifests.
        pieces: the (item, piece) of these that each rank writes, in the packed form.
        begins: in the packed form, the bytes that precede them in each rank's file.
        described: the described tensors, in the packed form.
        table: all tensors as in the manifest; None if they are arrays.
    """

    infos: tuple[TensorInfo, ...]
    paths: tuple[tuple[tuple[str | int, ...], ...], ...]
    tensors: tuple[GlobalTensor, ...] = ()
    items: tuple[tuple[WriteItem, ...], ...] = ()
    pieces: tuple[tuple[tuple[int, int], ...], ...] = ()
    begins: tuple[int, ...] = ()
    described: Described | None = None
    table: TensorTable | None = None


@message
class WritePlan:
    """The part of one rank.

    Attributes:
        infos: in the Zarr form, the tensors to which batches and messages refer by number: those of
            the rank's items, if tensors were described, then all that were listed.
        pieces: in the packed form, the (item, piece) that the rank writes.
        batches: in the Zarr form, what it writes.
        messages: in the Zarr form, what it sends.
        folders: of the arrays, if tensors were described.
    """

    infos: tuple[TensorInfo, ...] = ()
    pieces: tuple[tuple[int, int], ...] = ()
    batches: tuple[ShardBatch, ...] = ()
    messages: tuple[Transfer, ...] = ()
    folders: Mapping[Key, str] | None = None

    def nbytes(self, items: Sequence[WriteItem]) -> int:
        """Return the bytes of the rank's file in the packed form."""
        end = 0
        for number, piece in self.pieces:
            info = items[number].info
            end += -end % ALIGNMENT + Tiling.of(info.shape, info.itemsize).nbytes(
                items[number].boxes[piece]
            )
        return end

    def followed_by(
        self, listed: WritePlan, numbers: Sequence[int], rank: int, folder: Callable[[Key], str]
    ) -> WritePlan:
        """Return this part, which follows from descriptions, and after it one that was dealt from lists."""
        before = len(self.infos)

        def own(f: Fragment) -> Fragment:
            item, piece = (numbers[f.item], f.piece) if f.sender == rank else (-1, -1)
            return Fragment(f.sender, before + f.tensor, item, piece, f.box)

        def batch(b: ShardBatch) -> ShardBatch:
            return ShardBatch(
                tuple(
                    ShardTask(before + s.tensor, s.at, tuple(map(own, s.fragments)))
                    for s in b.shards
                )
            )

        return WritePlan(
            (*self.infos, *listed.infos),
            (*self.pieces, *((numbers[item], piece) for item, piece in listed.pieces)),
            (*self.batches, *map(batch, listed.batches)),
            (
                *self.messages,
                *(Transfer(m.to, m.number, tuple(map(own, m.fragments))) for m in listed.messages),
            ),
            None
            if self.folders is None
            else {**self.folders, **{i.key: folder(i.key) for i in listed.infos}},
        )


def table_of(
    infos: Sequence[TensorInfo], paths: Sequence[tuple[tuple[str | int, ...], ...]]
) -> TensorTable:
    """Return the tensors of a packed checkpoint as in the manifest."""
    return TensorTable.of(
        TensorDoc(*i.key, i.dtype, i.shape, at=at) for i, at in zip(infos, paths, strict=True)
    )


def merge_items(items: Sequence[Sequence[WriteItem]]) -> list[GlobalTensor]:
    """Merge the items of all ranks to tensors, in the order of rank 0, then of further ranks."""
    found: dict[Key, GlobalTensor] = {}
    first: dict[Key, int] = {}
    for rank, listed in enumerate(items):
        seen: set[Key] = set()
        for number, item in enumerate(listed):
            key = item.info.key
            if key in seen:
                raise UsageError(
                    f"rank {rank} saves two tensors as {key}", hint="give them different names"
                )
            seen.add(key)
            held = found.setdefault(key, GlobalTensor(item.info, {}))
            if held.info != item.info:
                raise UsageError(
                    f"{key} is {held.info.dtype} {held.info.shape} on rank {first[key]}, but {item.info.dtype} "
                    f"{item.info.shape} on rank {rank}",
                    hint="save a value that differs between ranks as ucformat.torch.PerRank(value)",
                )
            first.setdefault(key, rank)
            for piece, box in enumerate(item.boxes):
                held.holders.setdefault(box, []).append((rank, number, piece))
    for held in found.values():
        whole = next(iter(held.holders), None)
        if (
            len(held.holders) == 1
            and whole is not None
            and whole.shape == held.info.shape
            and not any(whole.start)
        ):
            continue
        try:
            prove(held.info, ((holders[0][0], box) for box, holders in held.holders.items()))
        except CoverageError as error:
            raise CoverageError(
                error.message, hint="check that all ranks of the mesh take part in this save"
            ) from None
    return list(found.values())


def assign_pieces(tensors: Sequence[GlobalTensor], ranks: int) -> list[list[tuple[int, int]]]:
    """Assign pieces to ranks for the packed form: each box once, balanced over its replicas by bytes.

    Returns:
        the (item, piece) that each rank writes, in the order of its items.
    """
    load = [0] * ranks
    out: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    boxes = [
        (box.size * t.info.itemsize, holders) for t in tensors for box, holders in t.holders.items()
    ]
    for nbytes, holders in sorted(boxes, key=lambda b: -b[0]):
        rank, item, piece = min(holders, key=lambda w: load[w[0]])
        load[rank] += nbytes
        out[rank].append((item, piece))
    return [sorted(mine) for mine in out]


def assign_shards(
    tensors: Sequence[GlobalTensor], ranks: int, grids: Sequence[Grid]
) -> tuple[list[list[ShardBatch]], list[list[Transfer]]]:
    """Assign shards to ranks for the Zarr form.

    Each shard is assigned to the rank that would finish first, counting the bytes that it writes
    and receives, so that ranks that hold most of a shard are preferred. Each byte is sent at most
    once; fragments that the owner holds are not sent. All ranks send in the order of batch numbers,
    so there are no deadlocks.

    Returns:
        the batches that each rank writes, and the messages that it sends, both in order.
    """
    work = np.zeros(ranks)
    sent = np.zeros(ranks)
    owned: list[list[tuple[int, ShardTask]]] = [[] for _ in range(ranks)]
    shards = [
        (grid.box(at), number, at) for number, grid in enumerate(grids) for at in grid.shards()
    ]
    size = [t.info.itemsize for t in tensors]
    for whole, number, at in sorted(shards, key=lambda s: -s[0].size * size[s[1]]):
        itemsize = size[number]
        met = [
            (box, holders)
            for b, holders in tensors[number].holders.items()
            if (box := b.intersect(whole)) is not None
        ]
        missing = np.full(ranks, float(whole.size * itemsize))
        for box, holders in met:
            missing[[w[0] for w in holders]] -= box.size * itemsize
        owner = int(np.argmin(work + whole.size * itemsize + missing))
        work[owner] += whole.size * itemsize + missing[owner]
        fragments = []
        for box, holders in met:
            own = next((w for w in holders if w[0] == owner), None)
            rank, item, piece = own or min(holders, key=lambda w: float(sent[w[0]]))
            sent[rank] += 0 if own else box.size * itemsize
            fragments.append(Fragment(rank, number, item, piece, box))
        owned[owner].append((whole.size * itemsize, ShardTask(number, at, tuple(fragments))))
    batches = [_batched(mine) for mine in owned]
    return batches, _transfers(batches)


def _transfers(batches: Sequence[Sequence[ShardBatch]]) -> list[list[Transfer]]:
    """The messages that each rank sends, in the order of batch numbers."""
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
    """Batches of shards, in order."""
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
