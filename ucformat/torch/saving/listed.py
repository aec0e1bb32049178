"""Planning of a save from lists of boxes: rank 0 deals those of tensors that the ranks cannot describe."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ucformat.errors import UsageError
from ucformat.format.digest import document_digest
from ucformat.torch.comm.wire import decode, encode, message
from ucformat.torch.saving.agree import check_replicas, manifest_paths, object_owners, paths_by_key
from ucformat.torch.saving.assignment import (
    GlobalPlan,
    WriteItem,
    WritePlan,
    assign_pieces,
    assign_shards,
    merge_items,
    table_of,
)
from ucformat.torch.saving.options import SaveOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ucformat.format.commit import Attempt
    from ucformat.torch.comm.group import Group

_Items = tuple[WriteItem, ...]


class Dealt(NamedTuple):
    """What rank 0 has dealt to this rank, and on rank 0 the attempt, and the plan of all tensors."""

    attempt: str
    part: WritePlan
    object_names: frozenset[str]
    begun: Attempt | None
    plan: GlobalPlan | None


@message
class _LocalPlan:
    """The message of a rank to rank 0. `items`, encoded, is None if they are those of the plan `known`.

    `begin` is the byte of the rank's file at which the boxes of listed tensors begin in the packed
    form.
    """

    options: SaveOptions
    digest: str
    known: str
    begin: int
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


def plan_listed(
    group: Group,
    options: SaveOptions,
    start: Callable[[], Attempt],
    items: Sequence[WriteItem],
    sums: Sequence[NDArray[np.uint32]],
    aliases: Mapping[str, str],
    digests: Mapping[str, str],
    begin_at: int = 0,
    described: GlobalPlan | None = None,
) -> Dealt:
    """Plan the writing of tensors whose boxes are listed, and begin the attempt; all ranks call this together.

    Args:
        begin_at: in the packed form, the bytes that precede these items in this rank's file.

    Raises:
        Conflict: a checkpoint exists, and is not to be replaced or is protected.
    """
    with group.sharing_errors():
        encoded = encode(tuple(items), _Items)
        more = encode(aliases, Mapping[str, str])
        digest = hashlib.sha256(begin_at.to_bytes(8, "little") + encoded + more).hexdigest()
        mine = group.cache.get("part")  # (plan, digest, WritePlan) of the last save
        known = mine[0] if mine is not None and mine[1] == digest else ""
        joined = np.concatenate([np.zeros(0, np.uint32), *sums])
    for again in (False, True):
        sent = None if known and not again else encoded
        offer = _LocalPlan(options, digest, known, begin_at, sent, aliases, joined, digests)
        coordinator = _Coordinator(group, start, described)
        answer: _Reply | None = group.gather_scatter(
            offer, coordinator.answer, _LocalPlan, _Reply | None
        )
        if answer is not None:
            break
    assert answer is not None  # noqa: S101 - all items were sent
    part = answer.part
    if part is None:
        assert mine is not None  # noqa: S101 - this rank sent it as known
        part = mine[2]
    group.cache["part"] = (answer.plan, digest, part)
    return Dealt(answer.attempt, part, answer.object_names, coordinator.attempt, coordinator.plan)


class _Coordinator:
    """Rank 0's part of `plan_save` for tensors whose boxes are listed, which come after those that are described."""

    def __init__(
        self, group: Group, start: Callable[[], Attempt], described: GlobalPlan | None
    ) -> None:
        self.group, self._start, self._described = group, start, described
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
        plan = document_digest(
            [[o.digest for o in offers], options.form, options.chunk_bytes, options.shard_bytes]
        )
        made: tuple[str, GlobalPlan, list[WritePlan]] | None = self.group.cache.get("plan")
        if made is None or made[0] != plan:
            items = [o.items for o in offers if o.items is not None]
            if len(items) < len(offers):
                return [None] * len(
                    offers
                )  # the cached plan does not fit: all ranks send their items
            made = (plan, *_make(options, [decode(c, _Items) for c in items], offers))
            self.group.cache["plan"] = made
        self.plan = made[1] if self._described is None else self._joint(self._described, made[1])
        if options.replicas == "equal":
            check_replicas(made[1].tensors, made[1].items, [o.sums for o in offers])
        object_names = object_owners(
            [(rank, o.objects) for rank, o in enumerate(offers)], equal=options.replicas == "equal"
        )
        self.attempt = self._start()
        return [
            _Reply(
                plan,
                None if o.known == plan else part,
                self.attempt.id,
                frozenset(k for k, r in object_names.items() if r == rank),
            )
            for rank, (o, part) in enumerate(zip(offers, made[2], strict=True))
        ]

    def _joint(self, described: GlobalPlan, listed: GlobalPlan) -> GlobalPlan:
        """The plan of all tensors."""
        known: tuple[GlobalPlan, GlobalPlan, GlobalPlan] | None = self.group.cache.get("joint plan")
        if known is not None and known[0] is described and known[1] is listed:
            return known[2]
        infos, paths = (*described.infos, *listed.infos), (*described.paths, *listed.paths)
        if both := {p for of in described.paths for p in of} & {
            p for of in listed.paths for p in of
        }:
            raise UsageError(
                f"{'.'.join(map(str, min(both)))} is not the same tensor on all ranks",
                hint='use the same keys on all ranks, and keep the model under "model"',
            )
        table = None if listed.table is None else table_of(infos, paths)
        joint = replace(
            listed, infos=infos, paths=paths, described=described.described, table=table
        )
        self.group.cache["joint plan"] = (described, listed, joint)
        return joint


def _make(
    options: SaveOptions, items: Sequence[tuple[WriteItem, ...]], offers: Sequence[_LocalPlan]
) -> tuple[GlobalPlan, list[WritePlan]]:
    aliases = {a for o in offers for a in o.aliases}
    tensors = merge_items(
        [[_without_empty(c) if c.info.name in aliases else c for c in of_rank] for of_rank in items]
    )
    tied = [t for t in tensors if t.info.name in aliases]
    held = next((t for t in tied if t.holders), None)
    if held is not None:
        raise UsageError(
            f"{held.info.key} is tied to another tensor on some ranks, and on others it is not"
        )
    tensors = [t for t in tensors if t.info.name not in aliases]
    infos = tuple(t.info for t in tensors)
    paths = manifest_paths(
        infos, paths_by_key(enumerate(items), {a: n for o in offers for a, n in o.aliases.items()})
    )
    if options.form == "packed":
        pieces = [tuple(p) for p in assign_pieces(tensors, len(items))]
        begins, table = tuple(o.begin for o in offers), table_of(infos, paths)
        plan = GlobalPlan(
            infos, paths, tuple(tensors), tuple(items), tuple(pieces), begins, table=table
        )
        return plan, [WritePlan(pieces=p) for p in pieces]
    grids = [a.grid for a in options.arrays(infos, "")]
    batches, messages = assign_shards(tensors, len(items), grids)
    parts = [
        WritePlan(infos, batches=tuple(b), messages=tuple(m))
        for b, m in zip(batches, messages, strict=True)
    ]
    return GlobalPlan(infos, paths, tuple(tensors), tuple(items)), parts


def _without_empty(item: WriteItem) -> WriteItem:
    """The item without empty boxes: a rank with an empty shard cannot know that the tensor is tied."""
    return WriteItem(item.info, tuple(b for b in item.boxes if b.size))
