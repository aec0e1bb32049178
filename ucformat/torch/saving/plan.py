"""Planning of a save by all ranks together: which rank writes what, cached from step to step, and the attempt."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from ucformat.errors import UsageError
from ucformat.format.arrays import lay_out
from ucformat.format.commit import begin
from ucformat.format.digest import document_digest
from ucformat.geometry.box import Box
from ucformat.geometry.flat_buffer import flat_boxes
from ucformat.geometry.tensor import Key, TensorInfo
from ucformat.reading.readable import path_to_json
from ucformat.sources.dcp.names import dotted
from ucformat.storage.strided import checksum
from ucformat.torch.comm.wire import decode, encode, message
from ucformat.torch.saving.assignment import (
    GlobalTensor,
    ShardBatch,
    Transfer,
    WriteItem,
    assign_pieces,
    assign_shards,
    merge_items,
)
from ucformat.torch.state.elements import elements_within, row_major_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ucformat.format.arrays import Array
    from ucformat.format.commit import Attempt
    from ucformat.sources.dcp.names import Path
    from ucformat.storage.base import Store
    from ucformat.torch.comm.group import Group
    from ucformat.torch.state.elements import Elements

__all__ = ["Assignment", "GlobalPlan", "SaveOptions", "WritePlan", "plan_save"]

Form = Literal["zarr", "packed"]
_Items = tuple[WriteItem, ...]

#: Replicas of at most this many bytes are compared before they are saved. Of larger tensors that ranks hold whole, some
#: samples are compared: ranks that hold different parts of the same shape under one name differ in all samples.
_COMPARED_WHOLE = 64 << 10
_SAMPLES, _SAMPLE_BYTES = 4, 1 << 10


@message
class SaveOptions:
    """Where and how a checkpoint is written: the arguments of `save` that must be the same on all ranks.

    Raises:
        UsageError: an argument has a value that `save` does not take.
    """

    url: str
    form: Form = "zarr"
    overwrite: bool = False
    replicas: Literal["equal", "first"] = "equal"
    chunk_bytes: int | None = None
    shard_bytes: int | None = None

    def __post_init__(self) -> None:
        for name, known in (("form", ("zarr", "packed")), ("replicas", ("equal", "first"))):
            if getattr(self, name) not in known:
                raise UsageError(
                    f"{name}={getattr(self, name)!r} is not supported", hint=f'"{known[0]}" or "{known[1]}"'
                )
        for name in ("chunk_bytes", "shard_bytes"):
            given = getattr(self, name)
            if given is not None and given < 1:
                raise UsageError(f"{name} must be at least 1, not {given}")


@message
class GlobalPlan:
    """The plan of all ranks, kept on rank 0: the tensors, the items of each rank, and the pieces assigned to it."""

    tensors: tuple[GlobalTensor, ...]
    items: tuple[tuple[WriteItem, ...], ...]
    pieces: tuple[tuple[tuple[int, int], ...], ...] = ()
    paths: tuple[tuple[tuple[str | int, ...], ...], ...] = ()  # of each tensor, in the form of manifests


@message
class WritePlan:
    """The part of one rank: `pieces` in the packed form; `batches` in the Zarr form, and the messages that it sends."""

    infos: tuple[TensorInfo, ...]
    pieces: tuple[tuple[int, int], ...] = ()  # (item, piece)
    batches: tuple[ShardBatch, ...] = ()
    messages: tuple[Transfer, ...] = ()


@message
class Assignment:
    """This rank's assignment: its part of the plan, the attempt, and the names of the objects that it provides."""

    attempt: str
    part: WritePlan
    object_names: frozenset[str]

    def arrays(self, options: SaveOptions) -> list[Array]:
        """Return the arrays of the Zarr form.

        Args:
            options: of the save.
        """
        return lay_out(self.part.infos, f"data/{self.attempt}", options.chunk_bytes, options.shard_bytes)


@message
class _LocalPlan:
    """The message of a rank to rank 0. `items`, encoded, is None if they are those of the plan `known`."""

    options: SaveOptions
    digest: str
    known: str
    items: bytes | None
    aliases: Mapping[str, str]
    sums: NDArray[np.uint32]
    objects: Mapping[str, str]


@message
class _Reply:
    """Rank 0's reply; `part` is None if it is that of the plan that the rank knows."""

    plan: str
    part: WritePlan | None
    attempt: str
    object_names: frozenset[str]


def plan_save(
    group: Group,
    options: SaveOptions,
    store: Store,
    items: Sequence[WriteItem],
    aliases: Mapping[str, str],
    objects: Mapping[str, Any],
    elements: Callable[[int, int], Elements],
) -> tuple[Assignment, Attempt | None, GlobalPlan | None]:
    """Plan a save in one small collective; all ranks call this together.

    A new plan is made only if the items of a rank have changed since the last save; otherwise only digests are sent.

    Args:
        group: the ranks.
        options: of the save.
        store: of the checkpoint.
        items: what this rank holds.
        aliases: tied names of this rank.
        objects: of this rank, as JSON.
        elements: returns the array of an (item, piece).

    Returns:
        the assignment of this rank; on rank 0 also the attempt and the plan of all ranks.

    Raises:
        UsageError: options, a tensor's dtype or shape, or replicas differ between ranks.
        CoverageError: no rank holds some part of a tensor.
        Conflict: a checkpoint exists, and is not to be replaced or is protected.
    """
    with group.sharing_errors():
        encoded = encode(tuple(items), _Items)
        digest = hashlib.sha256(encoded + encode(aliases, Mapping[str, str])).hexdigest()
        mine = group.cache.get("part")  # (plan, digest, WritePlan) of the last save
        known = mine[0] if mine is not None and mine[1] == digest else ""
        digests = {k: document_digest(v) for k, v in objects.items()}
        sums = _sums(items, elements)
    for again in (False, True):
        sent = None if known and not again else encoded
        offer = _LocalPlan(options, digest, known, sent, aliases, sums, digests)
        coordinator = _Coordinator(group, store)
        answer: _Reply | None = group.gather_scatter(offer, coordinator.answer, _LocalPlan, _Reply | None)
        if answer is not None:
            break
    assert answer is not None  # noqa: S101 - all items were sent
    part = answer.part
    if part is None:
        assert mine is not None  # noqa: S101 - this rank sent it as known
        part = mine[2]
    group.cache["part"] = (answer.plan, digest, part)
    return Assignment(answer.attempt, part, answer.object_names), coordinator.attempt, coordinator.plan


def _sums(items: Sequence[WriteItem], elements: Callable[[int, int], Elements]) -> NDArray[np.uint32]:
    """A checksum for each piece, to compare replicas: of a small piece, or of samples of a whole tensor; else 0."""
    out = []
    for i, item in enumerate(items):
        for j, box in enumerate(item.boxes):
            if box.size * item.info.itemsize <= _COMPARED_WHOLE:
                out.append(checksum(row_major_bytes(elements(i, j)).data))
            else:
                out.append(_sum_of_samples(elements(i, j)) if box.shape == item.info.shape else 0)
    return np.array(out, np.uint32)


def _sum_of_samples(elements: Elements) -> int:
    whole, few = Box.whole(elements.shape), _SAMPLE_BYTES // elements.itemsize
    step = (whole.size - few) // (_SAMPLES - 1)
    boxes = [box for i in range(_SAMPLES) for box in flat_boxes(whole.shape, i * step, i * step + few)]
    return checksum(np.concatenate([row_major_bytes(elements_within(elements, whole, b)) for b in boxes]).data)


class _Coordinator:
    """Rank 0's part of `plan_save`."""

    def __init__(self, group: Group, store: Store) -> None:
        self.group, self.store = group, store
        self.attempt: Attempt | None = None
        self.plan: GlobalPlan | None = None

    def answer(self, offers: Sequence[_LocalPlan]) -> list[_Reply | None]:
        options = offers[0].options
        for rank, offer in enumerate(offers):
            if offer.options != options:
                raise UsageError(
                    f"rank {rank} saves with {offer.options}, rank 0 with {options}",
                    hint="give all ranks the same arguments",
                )
        plan = document_digest([[o.digest for o in offers], options.form, options.chunk_bytes, options.shard_bytes])
        made: tuple[str, GlobalPlan, list[WritePlan]] | None = self.group.cache.get("plan")
        if made is None or made[0] != plan:
            items = [o.items for o in offers if o.items is not None]
            if len(items) < len(offers):
                return [None] * len(offers)  # the cached plan does not fit: all ranks send their items
            made = (plan, *_make(options, [decode(c, _Items) for c in items], offers))
            self.group.cache["plan"] = made
        self.plan = made[1]
        if options.replicas == "equal":
            _check_replicas(made[1], offers)
        object_names = _object_owners(offers, options)
        self.attempt = begin(self.store, {"save": uuid4().hex}, overwrite=options.overwrite)
        return [
            _Reply(
                plan,
                None if o.known == plan else part,
                self.attempt.id,
                frozenset(k for k, r in object_names.items() if r == rank),
            )
            for rank, (o, part) in enumerate(zip(offers, made[2], strict=True))
        ]


def _make(
    options: SaveOptions, items: Sequence[tuple[WriteItem, ...]], offers: Sequence[_LocalPlan]
) -> tuple[GlobalPlan, list[WritePlan]]:
    aliases = {a for o in offers for a in o.aliases}
    tensors = merge_items([[_without_empty(c) if c.info.name in aliases else c for c in of_rank] for of_rank in items])
    tied = [t for t in tensors if t.info.name in aliases]
    held = next((t for t in tied if t.holders), None)
    if held is not None:
        raise UsageError(f"{held.info.key} is tied to another tensor on some ranks, and on others it is not")
    tensors = [t for t in tensors if t.info.name not in aliases]
    infos = tuple(t.info for t in tensors)
    by_key = _paths(items, {a: n for o in offers for a, n in o.aliases.items()})
    paths = tuple(tuple(tuple(path_to_json(p)) for p in by_key.get(i.key, ())) for i in infos)
    if options.form == "packed":
        pieces = [tuple(p) for p in assign_pieces(tensors, len(items))]
        return GlobalPlan(tuple(tensors), tuple(items), tuple(pieces), paths), [
            WritePlan(infos, pieces=p) for p in pieces
        ]
    grids = [a.grid for a in lay_out(infos, "", options.chunk_bytes, options.shard_bytes)]
    batches, messages = assign_shards(tensors, len(items), grids)
    parts = [WritePlan(infos, batches=tuple(b), messages=tuple(m)) for b, m in zip(batches, messages, strict=True)]
    return GlobalPlan(tuple(tensors), tuple(items), paths=paths), parts


def _paths(items: Sequence[Sequence[WriteItem]], aliases: Mapping[str, str]) -> dict[Key, list[Path]]:
    """The paths of each tensor on any rank; UsageError if two ranks give one path different names."""
    first: dict[Path, tuple[Key, int]] = {}
    out: dict[Key, list[Path]] = {}
    for rank, listed in enumerate(items):
        for item in listed:
            key = Key(aliases.get(item.info.name, item.info.name), item.info.state)
            for path in item.paths:
                named, other = first.setdefault(path, (key, rank))
                if named != key:
                    raise UsageError(
                        f"{dotted(path)} is named {named} on rank {other}, but {key} on rank {rank}",
                        hint='use the same keys on all ranks, and keep the model under "model"',
                    )
                if (named, other) == (key, rank):
                    out.setdefault(key, []).append(path)
    return out


def _without_empty(item: WriteItem) -> WriteItem:
    """The item without empty boxes: a rank with an empty shard cannot know that the tensor is tied."""
    return WriteItem(item.info, tuple(b for b in item.boxes if b.size))


def _check_replicas(plan: GlobalPlan, offers: Sequence[_LocalPlan]) -> None:
    """UsageError if the checksums of replicas of a box differ."""
    starts = [np.cumsum([0, *(len(c.boxes) for c in items)]) for items in plan.items]
    for tensor in plan.tensors:
        for holders in tensor.holders.values():
            if len(holders) < 2:
                continue
            sums = [offers[r].sums[starts[r][item] + piece] for r, item, piece in holders]
            other = next((i for i, s in enumerate(sums) if s != sums[0]), None)
            if other is not None:
                raise UsageError(
                    f"{tensor.info.key} has a different value on rank {holders[other][0]} than on rank {holders[0][0]}",
                    hint='save per-rank values as ucformat.torch.PerRank(value), or pass replicas="first" '
                    "to save that of the first rank",
                )


def _object_owners(offers: Sequence[_LocalPlan], options: SaveOptions) -> dict[str, int]:
    """The rank that provides each object: the first that has it; UsageError if ranks have different values."""
    first: dict[str, tuple[int, str]] = {}
    for rank, offer in enumerate(offers):
        for name, digest in offer.objects.items():
            giver, expected = first.setdefault(name, (rank, digest))
            if digest != expected and options.replicas == "equal":
                raise UsageError(
                    f"the object {name!r} has a different value on rank {rank} than on rank {giver}",
                    hint='save per-rank values as ucformat.torch.PerRank(value), or pass replicas="first" '
                    "to save that of the first rank",
                )
    return {name: rank for name, (rank, _) in first.items()}
