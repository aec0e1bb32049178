"""Agreement of all ranks on who writes what, by descriptions.

What ranks state is merged on the way to rank 0, which asks for each distinct description once.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ucformat.errors import UsageError
from ucformat.format.arrays import array_folders, own_folder
from ucformat.torch.comm.wire import Addressed, decode
from ucformat.torch.saving.equality import object_owners
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

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from ucformat.geometry.tensor import Key, TensorInfo
    from ucformat.torch.comm.group import Group
    from ucformat.torch.saving.statement import Ranges, Sums


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
        the answer of rank 0, which has an attempt unless ranks have to list boxes; on rank 0 all descriptions.
    """
    joiner: _Joiner = group.cache.pop("joiner", None) or _Joiner()  # a save of another thread gets one of its own
    compared: tuple[Key, ...] = group.cache.get("compared", ())  # equal on all ranks, or the options are not
    if not group.rank:
        joiner.begin(statement, compared, begin, equal=equal, arrays=arrays)
    offer = statement.offer(options, sums, compared)
    answer: Question | Agreement = group.combine(offer, merge_offers, Offer, joiner.answer, Question | Agreement)
    while isinstance(answer, Question):
        compared = answer.compared or compared
        answer = group.combine(statement.more(answer, sums), merge_more, More, joiner.add, Question | Agreement)
    # Where several threads save, ranks may keep those of different saves: without an attempt, all begin anew.
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
        self._seen = {d: data for d, data in self._seen.items() if d in offer.stated or d in offer.facts}
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
            return Addressed(Question(), {rank: Question(digests) for rank, digests in asked.items()})
        key = (offer.stated, offer.facts, self._listed, self._arrays)
        if self._plan is None or self._plan[0] != key:
            self._plan = (key, self._join(offer))
        plan = self._plan[1]
        if isinstance(plan, tuple):
            return Agreement(listed=(*self._listed, *plan))
        if self._equal and (offer.balance or any(len(s) > 1 for s in (*offer.sums.values(), *more.sums.values()))):
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
        stating = [(rank, decode(self._seen[digest], Facts)) for digest, rank in offer.facts.items()]
        tied = {alias for _, facts in stating for alias in facts.aliases}
        first: dict[Key, tuple[int, TensorInfo]] = {}
        left_out: dict[bytes, tuple[int, ...]] = {}
        several: set[Key] = set()
        unfit: set[Key] = set()
        for rank, digest, description in stated:
            ranks = np.concatenate([np.arange(a, b) for a, b in offer.stated[digest]])
            if description.mesh is not None and not np.array_equal(np.sort(description.mesh.ranks, axis=None), ranks):
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
        if unfit := unfit | {key for key in first if key.name in tied}:  # some ranks do not know that it is tied
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


def _merged(a: Mapping[bytes, Any], b: Mapping[bytes, Any], join: Callable[[Any, Any], Any]) -> dict[bytes, Any]:
    return {**b, **{k: join(v, b[k]) if k in b else v for k, v in a.items()}}


def _adjoined(a: Ranges, b: Ranges) -> Ranges:
    """The ranges of lower and of higher ranks together."""
    return (*a[:-1], (a[-1][0], b[0][1]), *b[1:]) if a[-1][1] == b[0][0] else (*a, *b)
