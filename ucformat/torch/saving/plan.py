"""What all ranks agree on before they write: who writes what, remembered over steps, and under which attempt."""

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
from ucformat.geometry.flat_buffer import flat_boxes
from ucformat.geometry.tensor import Key, TensorInfo
from ucformat.reading.execute import checksum
from ucformat.reading.readable import path_to_json
from ucformat.sources.dcp.names import dotted
from ucformat.torch.comm.wire import decode, encode, message
from ucformat.torch.saving.assignment import Bundle, Claim, Held, Message, deal_pieces, deal_shards, merge

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ucformat.format.arrays import Array
    from ucformat.format.commit import Attempt
    from ucformat.sources.dcp.names import Path
    from ucformat.storage.base import Store
    from ucformat.torch.comm.group import Group
    from ucformat.torch.state.memory import Region

__all__ = ["Layout", "Part", "Terms", "Ticket", "agree"]

Form = Literal["zarr", "packed"]
_Claims = tuple[Claim, ...]

#: Replicas of at most this many bytes are compared before they are saved; of larger tensors, which every rank holds
#: whole, so many places of so many bytes: ranks that hold parts of one shape under one name differ in all of them.
_SMALL = 64 << 10
_PLACES, _PLACE = 4, 1 << 10


@message
class Terms:
    """What must be the same on all ranks."""

    url: str
    form: Form
    overwrite: bool
    chunk_bytes: int | None
    shard_bytes: int | None
    replicas: Literal["equal", "first"]


@message
class Layout:
    """What the coordinator knows of a plan: the tensors, what each rank claimed, and what it was dealt."""

    tensors: tuple[Held, ...]
    claims: tuple[tuple[Claim, ...], ...]
    pieces: tuple[tuple[tuple[int, int], ...], ...] = ()
    paths: tuple[tuple[tuple[str | int, ...], ...], ...] = ()  # of each tensor, as manifests have them


@message
class Part:
    """What one rank writes: of the packed form `pieces`; of the Zarr form `bundles`, and what it sends."""

    infos: tuple[TensorInfo, ...]
    pieces: tuple[tuple[int, int], ...] = ()  # (claim, piece)
    bundles: tuple[Bundle, ...] = ()
    messages: tuple[Message, ...] = ()


@message
class Ticket:
    """Leave to write: this rank's part, the attempt, and the objects that this rank is to give."""

    attempt: str
    part: Part
    give: frozenset[str]

    def arrays(self, terms: Terms) -> list[Array]:
        """The arrays of the Zarr form."""
        return lay_out(self.part.infos, f"data/{self.attempt}", terms.chunk_bytes, terms.shard_bytes)


@message
class _Offer:
    """What a rank brings. `claims`, encoded, is None where they are those of the plan `known`."""

    terms: Terms
    digest: str
    known: str
    claims: bytes | None
    aliases: Mapping[str, str]
    sums: NDArray[np.uint32]
    objects: Mapping[str, str]


@message
class _Answer:
    """What a rank is told; `part` is None where it is that of the plan that the rank knows."""

    plan: str
    part: Part | None
    attempt: str
    give: frozenset[str]


def agree(
    group: Group,
    terms: Terms,
    store: Store,
    claims: Sequence[Claim],
    aliases: Mapping[str, str],
    objects: Mapping[str, Any],
    region: Callable[[int, int], Region],
) -> tuple[Ticket, Attempt | None, Layout | None]:
    """Plan together, in one small collective; rank 0 also has the attempt and the layout.

    `region` gives where a (claim, piece) lies. A plan is made anew only where a rank's claims changed since the last
    save; otherwise nothing but digests is told.

    Raises:
        UsageError: ranks differ in their terms, in a tensor's dtype or shape, or in a value that should be the same.
        CoverageError: nobody holds some part of a tensor.
        Conflict: a checkpoint is committed at the place already, and is not to be replaced or protected.
    """
    with group.telling():
        encoded = encode(tuple(claims), _Claims)
        digest = hashlib.sha256(encoded + encode(aliases, Mapping[str, str])).hexdigest()
        mine = group.memory.get("part")  # (plan, digest, Part) of the last save
        known = mine[0] if mine is not None and mine[1] == digest else ""
        digests = {k: document_digest(v) for k, v in objects.items()}
        sums = _sums(claims, region)
    for again in (False, True):
        told = None if known and not again else encoded
        offer = _Offer(terms, digest, known, told, aliases, sums, digests)
        coordinator = _Coordinator(group, store)
        answer: _Answer | None = group.meet(offer, coordinator.answer, _Offer, _Answer | None)
        if answer is not None:
            break
    assert answer is not None  # noqa: S101 - all was told
    part = answer.part
    if part is None:
        assert mine is not None  # noqa: S101 - it is what this rank said to know
        part = mine[2]
    group.memory["part"] = (answer.plan, digest, part)
    return Ticket(answer.attempt, part, answer.give), coordinator.attempt, coordinator.layout


def _sums(claims: Sequence[Claim], region: Callable[[int, int], Region]) -> NDArray[np.uint32]:
    """A checksum for each piece by which replicas are compared: of a small one, or places of a whole tensor; else 0."""
    out = []
    for i, claim in enumerate(claims):
        itemsize = claim.info.itemsize
        for j, box in enumerate(claim.boxes):
            if box.size * itemsize <= _SMALL:
                out.append(checksum(region(i, j).row_major(itemsize).data))
            else:
                out.append(_sum_of_places(region(i, j), itemsize) if box.shape == claim.info.shape else 0)
    return np.array(out, np.uint32)


def _sum_of_places(region: Region, itemsize: int) -> int:
    shape, size, few = region.box.shape, region.box.size, _PLACE // itemsize
    step = (size - few) // (_PLACES - 1)
    boxes = [box for i in range(_PLACES) for box in flat_boxes(shape, i * step, i * step + few)]
    return checksum(np.concatenate([region.within(box).row_major(itemsize) for box in boxes]).data)


class _Coordinator:
    """Rank 0's half of `agree`."""

    def __init__(self, group: Group, store: Store) -> None:
        self.group, self.store = group, store
        self.attempt: Attempt | None = None
        self.layout: Layout | None = None

    def answer(self, offers: Sequence[_Offer]) -> list[_Answer | None]:
        terms = offers[0].terms
        for rank, offer in enumerate(offers):
            if offer.terms != terms:
                raise UsageError(
                    f"rank {rank} saves with {offer.terms}, rank 0 with {terms}",
                    hint="give all ranks the same arguments",
                )
        plan = document_digest([[o.digest for o in offers], terms.form, terms.chunk_bytes, terms.shard_bytes])
        made: tuple[str, Layout, list[Part]] | None = self.group.memory.get("plan")
        if made is None or made[0] != plan:
            claims = [o.claims for o in offers if o.claims is not None]
            if len(claims) < len(offers):
                return [None] * len(offers)  # what some rank told last time is of no use: tell all
            made = (plan, *_make(terms, [decode(c, _Claims) for c in claims], offers))
            self.group.memory["plan"] = made
        self.layout = made[1]
        if terms.replicas == "equal":
            _compare(made[1], offers)
        give = _givers(offers, terms)
        self.attempt = begin(self.store, {"save": uuid4().hex}, overwrite=terms.overwrite)
        return [
            _Answer(
                plan,
                None if o.known == plan else part,
                self.attempt.id,
                frozenset(k for k, r in give.items() if r == rank),
            )
            for rank, (o, part) in enumerate(zip(offers, made[2], strict=True))
        ]


def _make(terms: Terms, claims: Sequence[tuple[Claim, ...]], offers: Sequence[_Offer]) -> tuple[Layout, list[Part]]:
    aliases = {a for o in offers for a in o.aliases}
    tensors = merge([[_nothing(c) if c.info.name in aliases else c for c in of_rank] for of_rank in claims])
    tied = [t for t in tensors if t.info.name in aliases]
    held = next((t for t in tied if t.holders), None)
    if held is not None:
        raise UsageError(f"{held.info.key} is tied to another tensor on some ranks, and on others it is not")
    tensors = [t for t in tensors if t.info.name not in aliases]
    infos = tuple(t.info for t in tensors)
    by_key = _paths(claims, {a: n for o in offers for a, n in o.aliases.items()})
    paths = tuple(tuple(tuple(path_to_json(p)) for p in by_key.get(i.key, ())) for i in infos)
    if terms.form == "packed":
        pieces = [tuple(p) for p in deal_pieces(tensors, len(claims))]
        return Layout(tuple(tensors), tuple(claims), tuple(pieces), paths), [Part(infos, pieces=p) for p in pieces]
    grids = [a.grid for a in lay_out(infos, "", terms.chunk_bytes, terms.shard_bytes)]
    bundles, messages = deal_shards(tensors, len(claims), grids)
    parts = [Part(infos, bundles=tuple(b), messages=tuple(m)) for b, m in zip(bundles, messages, strict=True)]
    return Layout(tuple(tensors), tuple(claims), paths=paths), parts


def _paths(claims: Sequence[Sequence[Claim]], aliases: Mapping[str, str]) -> dict[Key, list[Path]]:
    """The paths of each tensor on any rank; UsageError where two ranks give one path different names."""
    first: dict[Path, tuple[Key, int]] = {}
    out: dict[Key, list[Path]] = {}
    for rank, listed in enumerate(claims):
        for claim in listed:
            key = Key(aliases.get(claim.info.name, claim.info.name), claim.info.state)
            for path in claim.paths:
                named, other = first.setdefault(path, (key, rank))
                if named != key:
                    raise UsageError(
                        f"{dotted(path)} is {named} by what rank {other} holds, and {key} by what rank {rank} holds",
                        hint='give all ranks the same keys, and keep the model under "model"',
                    )
                if (named, other) == (key, rank):
                    out.setdefault(key, []).append(path)
    return out


def _nothing(claim: Claim) -> Claim:
    """A claim of an empty shard of what other ranks know to be tied stands for nothing."""
    return Claim(claim.info, tuple(b for b in claim.boxes if b.size))


def _compare(layout: Layout, offers: Sequence[_Offer]) -> None:
    """UsageError where replicas of one box differ, as far as their checksums tell."""
    starts = [np.cumsum([0, *(len(c.boxes) for c in claims)]) for claims in layout.claims]
    for tensor in layout.tensors:
        for who in tensor.holders.values():
            if len(who) < 2:
                continue
            sums = [offers[r].sums[starts[r][claim] + piece] for r, claim, piece in who]
            other = next((i for i, s in enumerate(sums) if s != sums[0]), None)
            if other is not None:
                raise UsageError(
                    f"{tensor.info.key} has another value on rank {who[other][0]} than on rank {who[0][0]}",
                    hint='save what each rank has for itself as ucformat.torch.PerRank(value), or say replicas="first" '
                    "to keep that of the first rank",
                )


def _givers(offers: Sequence[_Offer], terms: Terms) -> dict[str, int]:
    """Which rank gives each object: the first that has it; UsageError where ranks have different values."""
    first: dict[str, tuple[int, str]] = {}
    for rank, offer in enumerate(offers):
        for name, digest in offer.objects.items():
            giver, expected = first.setdefault(name, (rank, digest))
            if digest != expected and terms.replicas == "equal":
                raise UsageError(
                    f"the object {name!r} has another value on rank {rank} than on rank {giver}",
                    hint='save what each rank has for itself as ucformat.torch.PerRank(value), or say replicas="first" '
                    "to keep that of the first rank",
                )
    return {name: rank for name, (rank, _) in first.items()}
