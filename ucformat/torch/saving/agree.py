"""What must be equal on all ranks that save together: replicas, objects, and the names of what is at a path."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ucformat.errors import UsageError
from ucformat.format.arrays import array_folders, own_folder
from ucformat.geometry.box import Box
from ucformat.geometry.flat_buffer import flat_boxes
from ucformat.geometry.tensor import Key
from ucformat.reading.garbage import gc_paused
from ucformat.reading.readable import path_to_json
from ucformat.sources.state_names import dotted
from ucformat.storage.strided import checksum
from ucformat.torch.comm.wire import Addressed, decode
from ucformat.torch.saving.statement import (
    HASHES,
    Agreement,
    Description,
    Exceptions,
    Facts,
    More,
    Offer,
    Question,
    Statement,
    WrittenRow,
    written_rows,
)
from ucformat.torch.state.elements import elements_within, row_major_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from ucformat.geometry.tensor import TensorInfo
    from ucformat.reading.readable import StatePath as Path
    from ucformat.torch.comm.group import Group
    from ucformat.torch.saving.assignment import GlobalTensor, WriteItem
    from ucformat.torch.saving.statement import Ranges, Row, Sums
    from ucformat.torch.state.elements import Elements


_DIFFERS = (
    "save per-rank values as ucformat.torch.PerRank(value), or pass "
    'replicas="first" to save that of the first rank'
)

#: Replicas of at most this many bytes are compared before they are saved. Of larger tensors that
#: ranks hold whole, some samples are compared: ranks that hold different parts of the same shape
#: under one name differ in all samples.
_COMPARED_WHOLE = 64 << 10
_SAMPLES, _SAMPLE_BYTES = 4, 1 << 10


@gc_paused()
def checksums(
    items: Sequence[WriteItem], elements: Callable[[int, int], Elements]
) -> list[NDArray[np.uint32]]:
    """Return a checksum of each piece of each item, by which replicas are compared.

    Of a large tensor that a rank holds whole it is that of some samples; of other large pieces it
    is 0.
    """

    def of(number: int, piece: int, box: Box) -> int:
        info = items[number].info
        if box.size * info.itemsize <= _COMPARED_WHOLE:
            return checksum(row_major_bytes(elements(number, piece)).data)
        return _sum_of_samples(elements(number, piece)) if box.shape == info.shape else 0

    return [
        np.array([of(n, j, b) for j, b in enumerate(i.boxes)], np.uint32)
        for n, i in enumerate(items)
    ]


def _sum_of_samples(elements: Elements) -> int:
    whole, few = Box.whole(elements.shape), _SAMPLE_BYTES // elements.itemsize
    step = (whole.size - few) // (_SAMPLES - 1)
    boxes = [
        box for i in range(_SAMPLES) for box in flat_boxes(whole.shape, i * step, i * step + few)
    ]
    return checksum(
        np.concatenate([row_major_bytes(elements_within(elements, whole, b)) for b in boxes]).data
    )


def check_replicas(
    tensors: Sequence[GlobalTensor],
    items: Sequence[Sequence[WriteItem]],
    found: Sequence[NDArray[np.uint32]],
) -> None:
    """Check that the replicas of each box have equal checksums."""
    starts = [np.cumsum([0, *(len(c.boxes) for c in of_rank)]) for of_rank in items]
    for tensor in tensors:
        for holders in tensor.holders.values():
            if len(holders) < 2:
                continue
            sums = [found[r][starts[r][item] + piece] for r, item, piece in holders]
            other = next((i for i, s in enumerate(sums) if s != sums[0]), None)
            if other is not None:
                raise UsageError(
                    f"{tensor.info.key} has a different value on rank {holders[other][0]} than on rank {holders[0][0]}",
                    hint=_DIFFERS,
                )


def object_owners(
    objects: Iterable[tuple[int, Mapping[str, str]]], *, equal: bool
) -> dict[str, int]:
    """Return the rank that provides each object: the first that has it.

    Args:
        objects: ranks, ascending, and the digests of their objects by name.
        equal: whether all digests of an object must be equal.
    """
    first: dict[str, tuple[int, str]] = {}
    for rank, digests in objects:
        for name, digest in digests.items():
            giver, expected = first.setdefault(name, (rank, digest))
            if digest != expected and equal:
                raise UsageError(
                    f"the object {name!r} has a different value on rank {rank} than on rank {giver}",
                    hint=_DIFFERS,
                )
    return {name: rank for name, (rank, _) in first.items()}


def manifest_paths(
    infos: Sequence[TensorInfo], by_key: Mapping[Key, Sequence[Path]]
) -> tuple[tuple[tuple[str | int, ...], ...], ...]:
    """Return the paths of each tensor in the form of manifests."""
    return tuple(tuple(tuple(path_to_json(p)) for p in by_key.get(i.key, ())) for i in infos)


def paths_by_key(
    items: Iterable[tuple[int, Sequence[WriteItem | Row]]], aliases: Mapping[str, str]
) -> dict[Key, list[Path]]:
    """Return the paths of each tensor on any rank."""
    first: dict[Path, tuple[Key, int]] = {}
    out: dict[Key, list[Path]] = {}
    for rank, listed in items:
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


# Agreement of all ranks on who writes what, by descriptions.
#
# What ranks state is merged on the way to rank 0, which asks for each distinct description once.


class Joined(NamedTuple):
    """All descriptions together, on rank 0: each row with the first rank that states it, and its item there."""

    rows: list[tuple[tuple[int, int], WrittenRow]]
    stated: list[tuple[int, Description]]  # by first rank


def agree(
    group: Group,
    statement: Statement,
    options: str,
    sums: Sequence[NDArray[np.uint32]],
    begin: Callable[[], str],
    *,
    equal: bool,
    arrays: bool,
) -> tuple[Agreement, Joined | None]:
    """Agree on who writes what; all ranks call this together.

    Args:
        options: of the save, as text, which must be the same on all ranks.
        arrays: whether tensors get folders, whose names may not differ only in case.

    Returns:
        the answer of rank 0, which has an attempt unless ranks have to list boxes; on rank 0 all
        descriptions.
    """
    joiner: _Joiner = (
        group.cache.pop("joiner", None) or _Joiner()
    )  # a save of another thread gets one of its own
    compared: tuple[Key, ...] = group.cache.get(
        "compared", ()
    )  # equal on all ranks, or the options are not
    if not group.rank:
        joiner.begin(statement, compared, begin, equal=equal, arrays=arrays)
    offer = statement.offer(options, sums, compared)
    answer: Question | Agreement = group.combine(
        offer, merge_offers, Offer, joiner.answer, Question | Agreement
    )
    while isinstance(answer, Question):
        compared = answer.compared or compared
        answer = group.combine(
            statement.more(answer, sums), merge_more, More, joiner.add, Question | Agreement
        )
    # Where several threads save, ranks may keep those of different saves: without an attempt, all
    # begin anew.
    group.cache["compared"] = () if answer.attempt is None else compared
    group.cache["joiner"] = joiner
    return answer, joiner.joined


class _Joiner:
    """Rank 0's part of `agree`; it keeps descriptions for the next save."""

    def __init__(self) -> None:
        self._seen: dict[bytes, bytes] = {}
        self._offer: Offer | None = None
        self._plan: tuple[Any, Exceptions | tuple[Key, ...]] | None = None
        self._compared: tuple[Key, ...] = ()
        self._listed: tuple[Key, ...] = ()
        self._begin: Callable[[], str] = str
        self._equal, self._arrays = True, False
        self.joined: Joined | None = None

    def begin(
        self,
        statement: Statement,
        compared: tuple[Key, ...],
        begin: Callable[[], str],
        *,
        equal: bool,
        arrays: bool,
    ) -> None:
        """Prepare for the offers of a save; see `agree`."""
        self._seen |= statement.encoded
        self._listed = tuple(sorted(statement.listed))
        self._compared, self._begin, self._equal, self._arrays = compared, begin, equal, arrays

    def answer(self, offer: Offer) -> Question | Agreement | Addressed:
        """The answer to the offers of all ranks."""
        self._offer = offer
        self._seen = {
            d: data for d, data in self._seen.items() if d in offer.stated or d in offer.facts
        }
        return self.add(More({}, offer.sums))

    def add(self, more: More) -> Question | Agreement | Addressed:
        """The answer to what all ranks have said since their offers."""
        offer = self._offer
        assert offer is not None  # noqa: S101 - it comes first
        if not offer.unambiguous or len(offer.options) > 1:
            return Agreement()
        if offer.undescribed:
            return Agreement(listed=(*self._listed, *sorted(offer.undescribed)))
        self._seen |= {digest: zlib.decompress(data) for digest, data in more.sent.items()}
        first = {**offer.facts, **{digest: ranges[0][0] for digest, ranges in offer.stated.items()}}
        asked: dict[int, tuple[bytes, ...]] = {}
        for digest in first.keys() - self._seen.keys():
            asked[first[digest]] = (*asked.get(first[digest], ()), digest)
        if asked:
            return Addressed(
                Question(), {rank: Question(digests) for rank, digests in asked.items()}
            )
        key = (offer.stated, offer.facts, self._listed, self._arrays)
        if self._plan is None or self._plan[0] != key:
            self._plan = (key, self._join(offer))
        plan = self._plan[1]
        if isinstance(plan, tuple):
            return Agreement(listed=(*self._listed, *plan))
        if self._equal and (
            offer.balance or any(len(s) > 1 for s in (*offer.sums.values(), *more.sums.values()))
        ):
            return Agreement()  # where boxes are listed, the error says what differs on which ranks
        if plan.compared and plan.compared != self._compared:
            self._compared = plan.compared
            return Question((), plan.compared)
        stating = sorted((rank, digest) for digest, rank in offer.facts.items())
        objects = [(rank, decode(self._seen[digest], Facts).objects) for rank, digest in stating]
        providers = object_owners(objects, equal=self._equal)
        return Agreement(self._begin(), providers, None if plan == Exceptions() else plan)

    def _join(self, offer: Offer) -> Exceptions | tuple[Key, ...]:
        """The exceptions; or the tensors whose descriptions do not fit each other."""
        stated = sorted(
            (
                (ranges[0][0], digest, decode(self._seen[digest], Description))
                for digest, ranges in offer.stated.items()
            ),
            key=lambda s: s[:2],
        )
        stating = [
            (rank, decode(self._seen[digest], Facts)) for digest, rank in offer.facts.items()
        ]
        tied = {alias for _, facts in stating for alias in facts.aliases}
        first: dict[Key, tuple[int, TensorInfo]] = {}
        left_out: dict[bytes, tuple[int, ...]] = {}
        several: set[Key] = set()
        unfit: set[Key] = set()
        for rank, digest, description in stated:
            ranks = np.concatenate([np.arange(a, b) for a, b in offer.stated[digest]])
            if description.mesh is not None and not np.array_equal(
                np.sort(description.mesh.ranks, axis=None), ranks
            ):
                unfit.update(row.info.key for row in description.rows)
            out = []
            for number, row in enumerate(description.rows):
                other, info = first.setdefault(row.info.key, (rank, row.info))
                if info != row.info:
                    raise UsageError(
                        f"{info.key} is {info.dtype} {info.shape} on rank {other}, but {row.info.dtype} "
                        f"{row.info.shape} on rank {rank}",
                        hint="save a value that differs between ranks as ucformat.torch.PerRank(value)",
                    )
                if info is not row.info:
                    several.add(info.key)
                    out.append(number)
            if out:
                left_out[digest] = tuple(out)
        if unfit := unfit | {
            key for key in first if key.name in tied
        }:  # some ranks do not know that it is tied
            return tuple(sorted(unfit))
        whole = {digest: offer.stated[digest] for _, digest, d in stated if d.mesh is None}
        folders = array_folders((*first, *self._listed)) if self._arrays else {}
        folders = {key: folder for key, folder in folders.items() if folder != own_folder(key)}
        plan = Exceptions(tuple(sorted(several)), whole, left_out, folders)
        order: dict[bytes, tuple[int, ...]] = {}
        for _, facts in sorted(stating, key=lambda f: f[0]):
            order = {**facts.order, **order}
        rows = [
            ((rank, order[digest][found.number]), found)
            for rank, digest, d in stated
            for found in written_rows(d, digest, plan)
        ]
        self.joined = Joined(rows, [(rank, d) for rank, _, d in stated])
        return plan


def merge_offers(a: Offer, b: Offer) -> Offer:
    """Return what consecutive ranks state together."""
    return Offer(
        options={**b.options, **a.options},
        stated=_merged(a.stated, b.stated, _adjoined),
        facts={**b.facts, **a.facts},
        balance=(a.balance + b.balance) % HASHES,
        unambiguous=a.unambiguous and b.unambiguous,
        undescribed=a.undescribed | b.undescribed,
        sums=_merged(a.sums, b.sums, _distinct),
    )


def merge_more(a: More, b: More) -> More:
    """Return what consecutive ranks answer together."""
    return More({**b.sent, **a.sent}, _merged(a.sums, b.sums, _distinct))


def _distinct(a: Sums, b: Sums) -> Sums:
    known = {found for found, _ in a}
    return (*a, *(s for s in b if s[0] not in known))


def _merged(
    a: Mapping[bytes, Any], b: Mapping[bytes, Any], join: Callable[[Any, Any], Any]
) -> dict[bytes, Any]:
    return {**b, **{k: join(v, b[k]) if k in b else v for k, v in a.items()}}


def _adjoined(a: Ranges, b: Ranges) -> Ranges:
    """The ranges of lower and of higher ranks together."""
    return (*a[:-1], (a[-1][0], b[0][1]), *b[1:]) if a[-1][1] == b[0][0] else (*a, *b)
