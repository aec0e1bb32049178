"""Planning of a save by all ranks together: which rank writes what, cached from step to step, and the attempt."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from ucformat.errors import UsageError
from ucformat.format.arrays import lay_out, own_folder
from ucformat.format.chunking import Grid, Tiling
from ucformat.format.commit import begin
from ucformat.format.described import Described, DescribedRow, file_order
from ucformat.format.digest import document_digest
from ucformat.geometry.tensor import Key, TensorInfo
from ucformat.reading.garbage import gc_paused
from ucformat.schema.tensors import TensorDoc, TensorTable
from ucformat.torch.comm.wire import decode, encode, message
from ucformat.torch.saving.agree import agree
from ucformat.torch.saving.assignment import (
    GlobalTensor,
    ShardBatch,
    Transfer,
    WriteItem,
    assign_pieces,
    assign_shards,
    merge_items,
)
from ucformat.torch.saving.equality import check_replicas, checksums, manifest_paths, object_owners, paths_by_key
from ucformat.torch.saving.shards import plan_shards
from ucformat.torch.saving.statement import Exceptions, Facts, Statement

if TYPE_CHECKING:
    from ucformat.format.arrays import Array
    from ucformat.format.commit import Attempt
    from ucformat.format.distribution import Distribution
    from ucformat.storage.base import Store
    from ucformat.torch.comm.group import Group
    from ucformat.torch.saving.agree import Joined
    from ucformat.torch.state.elements import Elements

__all__ = ["Assignment", "GlobalPlan", "Held", "SaveOptions", "WritePlan", "plan_save"]

Form = Literal["zarr", "packed"]
_Items = tuple[WriteItem, ...]


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


class Held(NamedTuple):
    """What one rank saves.

    Attributes:
        items: the boxes of each tensor.
        distributions: of each item; None if it is not known.
        aliases: tied names.
        objects: as JSON.
        elements: returns the array of an (item, piece).
    """

    items: Sequence[WriteItem]
    distributions: Sequence[Distribution | None]
    aliases: Mapping[str, str]
    objects: Mapping[str, Any]
    elements: Callable[[int, int], Elements]


@dataclass(frozen=True, slots=True)
class GlobalPlan:
    """The plan of all ranks, kept on rank 0.

    Attributes:
        infos: all tensors.
        paths: of each tensor, in the form of manifests.
        tensors: all tensors, if their boxes were listed.
        items: of each rank, likewise.
        pieces: the (item, piece) that each rank writes, if boxes were listed and the form is packed.
        described: all tensors, if they were described and the form is packed.
        table: all tensors as in the manifest; None if they are arrays.
    """

    infos: tuple[TensorInfo, ...]
    paths: tuple[tuple[tuple[str | int, ...], ...], ...]
    tensors: tuple[GlobalTensor, ...] = ()
    items: tuple[tuple[WriteItem, ...], ...] = ()
    pieces: tuple[tuple[tuple[int, int], ...], ...] = ()
    described: Described | None = None
    table: TensorTable | None = None

    def arrays(self, attempt: str, options: SaveOptions) -> list[Array]:
        """Return all arrays of the Zarr form.

        Args:
            attempt: under which they are written.
            options: of the save.
        """
        return lay_out(self.infos, f"data/{attempt}", options.chunk_bytes, options.shard_bytes)


@message
class WritePlan:
    """The part of one rank.

    Attributes:
        infos: in the Zarr form, the tensors to which batches and messages refer by number: all of the checkpoint, or
            those of the rank's items if tensors were described.
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


@message
class Assignment:
    """This rank's assignment: its part of the plan, the attempt, and the names of the objects that it provides."""

    attempt: str
    part: WritePlan
    object_names: frozenset[str]

    def arrays(self, options: SaveOptions) -> list[Array]:
        """Return the arrays of the Zarr form to which this rank's part refers.

        Args:
            options: of the save.
        """
        part = self.part
        return lay_out(part.infos, f"data/{self.attempt}", options.chunk_bytes, options.shard_bytes, part.folders)


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
    group: Group, options: SaveOptions, store: Store, held: Held
) -> tuple[Assignment, Attempt | None, GlobalPlan | None]:
    """Plan a save in one small collective, if nothing but values has changed since the last one.

    All ranks call this together. They describe their tensors, or list their boxes if some rank cannot.

    Args:
        group: the ranks.
        options: of the save.
        store: of the checkpoint.
        held: what this rank saves.

    Returns:
        the assignment of this rank; on rank 0 also the attempt and the plan of all ranks.

    Raises:
        UsageError: options, a tensor's dtype or shape, or replicas differ between ranks.
        CoverageError: no rank holds some part of a tensor.
        Conflict: a checkpoint exists, and is not to be replaced or is protected.
    """
    with group.sharing_errors():
        sums = checksums(held.items, held.elements)
        digests = {k: document_digest(v) for k, v in held.objects.items()}
    found = _plan_described(group, options, store, held, sums, digests)
    if found is not None:
        return found
    with group.sharing_errors():
        encoded = encode(tuple(held.items), _Items)
        digest = hashlib.sha256(encoded + encode(held.aliases, Mapping[str, str])).hexdigest()
        mine = group.cache.get("part")  # (plan, digest, WritePlan) of the last save
        known = mine[0] if mine is not None and mine[1] == digest else ""
        joined = np.concatenate([np.zeros(0, np.uint32), *sums])
    for again in (False, True):
        sent = None if known and not again else encoded
        offer = _LocalPlan(options, digest, known, sent, held.aliases, joined, digests)
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


def _plan_described(
    group: Group,
    options: SaveOptions,
    store: Store,
    held: Held,
    sums: Sequence[NDArray[np.uint32]],
    digests: Mapping[str, str],
) -> tuple[Assignment, Attempt | None, GlobalPlan | None] | None:
    """`plan_save` by descriptions; None if all ranks have to list their boxes."""
    arrays, grid = options.form == "zarr", (options.form, options.chunk_bytes, options.shard_bytes)
    with group.sharing_errors():
        facts = Facts(held.aliases, digests)
        stated: tuple[Any, Statement] | None = group.cache.get("statement")
        if stated is None or stated[0] != grid or not stated[1].is_of(held.items, held.distributions, facts):
            if arrays:  # which raises if a tensor cannot be an array
                lay_out([i.info for i in held.items], "", options.chunk_bytes, options.shard_bytes)
            stated = group.cache["statement"] = (grid, Statement(group.rank, held.items, held.distributions, facts))
    statement = stated[1]
    attempt: Attempt | None = None

    def begun() -> str:
        nonlocal attempt
        attempt = begin(store, {"save": uuid4().hex}, overwrite=options.overwrite)
        return attempt.id

    equal = options.replicas == "equal"
    answer, joined = agree(group, statement, str(options), sums, begun, equal=equal, arrays=arrays)
    if answer.attempt is None:
        return None
    objects = frozenset(name for name, rank in answer.providers.items() if rank == group.rank)
    exceptions = answer.exceptions or Exceptions()
    part: tuple[Statement, Exceptions, WritePlan] | None = group.cache.get("described part")
    if part is None or part[0] is not statement or part[1] != exceptions:
        part = group.cache["described part"] = (statement, exceptions, write_plan(statement, exceptions, options))
    assignment = Assignment(answer.attempt, part[2], objects)
    if joined is None:
        return assignment, attempt, None
    plan: tuple[Joined, str, GlobalPlan] | None = group.cache.get("described plan")
    if plan is None or plan[0] is not joined or plan[1] != options.form:
        plan = group.cache["described plan"] = (joined, options.form, described_plan(joined, options.form))
    return assignment, attempt, plan[2]


@gc_paused()
def write_plan(statement: Statement, exceptions: Exceptions, options: SaveOptions) -> WritePlan:
    """Return the part of one rank, which follows from what it states.

    Args:
        statement: of the rank.
        exceptions: from rank 0.
        options: of the save.
    """
    if options.form == "packed":
        return WritePlan(pieces=tuple(statement.pieces(exceptions)))
    infos = tuple(item.info for item in statement.items)
    folders = {i.key: exceptions.folders.get(i.key) or own_folder(i.key) for i in infos}
    grids = [Grid.of(i.shape, i.itemsize, options.chunk_bytes, options.shard_bytes) for i in infos]
    batches, messages = plan_shards(statement, exceptions, grids)
    return WritePlan(infos, batches=batches, messages=messages, folders=folders)


@gc_paused()
def described_plan(joined: Joined, form: Form) -> GlobalPlan:
    """Return the plan of described tensors, in the order of rank 0, then of further ranks.

    Args:
        joined: all descriptions.
        form: of the checkpoint.
    """
    infos = tuple(w.row.info for _, w in sorted(joined.rows, key=lambda r: r[0]))
    paths = manifest_paths(infos, paths_by_key(((rank, d.rows) for rank, d in joined.stated), {}))
    if form == "zarr":
        return GlobalPlan(infos, paths)
    number = {info.key: n for n, info in enumerate(infos)}
    written = sorted((w for _, w in joined.rows), key=lambda w: file_order(w.row.info, w.distribution))
    rows = [
        DescribedRow(number[i.key], w.distribution, w.writer, Tiling.of(i.shape, i.itemsize).tile)
        for w, i in ((w, w.row.info) for w in written)
    ]
    return GlobalPlan(infos, paths, described=Described(rows, infos, ""), table=_table(infos, paths))


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
            check_replicas(made[1].tensors, made[1].items, [o.sums for o in offers])
        object_names = object_owners(
            [(rank, o.objects) for rank, o in enumerate(offers)], equal=options.replicas == "equal"
        )
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
    paths = manifest_paths(infos, paths_by_key(enumerate(items), {a: n for o in offers for a, n in o.aliases.items()}))
    if options.form == "packed":
        pieces = [tuple(p) for p in assign_pieces(tensors, len(items))]
        return GlobalPlan(infos, paths, tuple(tensors), tuple(items), tuple(pieces), table=_table(infos, paths)), [
            WritePlan(pieces=p) for p in pieces
        ]
    grids = [a.grid for a in lay_out(infos, "", options.chunk_bytes, options.shard_bytes)]
    batches, messages = assign_shards(tensors, len(items), grids)
    parts = [WritePlan(infos, batches=tuple(b), messages=tuple(m)) for b, m in zip(batches, messages, strict=True)]
    return GlobalPlan(infos, paths, tuple(tensors), tuple(items)), parts


def _table(infos: Sequence[TensorInfo], paths: Sequence[Any]) -> TensorTable:
    return TensorTable.of(TensorDoc(*i.key, i.dtype, i.shape, at=at) for i, at in zip(infos, paths, strict=True))


def _without_empty(item: WriteItem) -> WriteItem:
    """The item without empty boxes: a rank with an empty shard cannot know that the tensor is tied."""
    return WriteItem(item.info, tuple(b for b in item.boxes if b.size))
