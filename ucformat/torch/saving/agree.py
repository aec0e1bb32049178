"""How all ranks agree on who writes what, and on what must be equal on them: replicas, objects, names of paths.

What ranks state is merged on the way to rank 0, which asks for each distinct description once, and joins them to
the plan of all.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from operator import itemgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ucformat.errors import CoverageError, UsageError
from ucformat.format.arrays import array_folders, own_folder, packed_keys
from ucformat.format.chunking import Tiling
from ucformat.format.described import Described, DescribedRow, FileOrder
from ucformat.geometry.box import Box
from ucformat.geometry.coverage import prove
from ucformat.geometry.fingerprint import added
from ucformat.geometry.tensor import Key
from ucformat.reading.readable import path_spelled
from ucformat.reading.state_names import dotted
from ucformat.storage.concurrency import gc_paused
from ucformat.torch.comm.merging import adjoined, bits_of, merged
from ucformat.torch.comm.wire import Addressed, decode, encode, message
from ucformat.torch.saving.in_place import OTHER_FORMS, WeightFilesPlan
from ucformat.torch.saving.shards import GlobalPlan, PlannedTensors
from ucformat.torch.saving.statement import (
    HASHES,
    AskedOfRanks,
    Description,
    Exceptions,
    ListedTensor,
    Replies,
    Row,
    StatedFacts,
    StatedObjects,
    Summary,
    written_rows,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from ucformat.geometry.tensor import TensorInfo
    from ucformat.reading.readable import StatePath as Path
    from ucformat.torch.comm.group import Group
    from ucformat.torch.comm.merging import Ranges
    from ucformat.torch.saving.options import SaveOptions
    from ucformat.torch.saving.shards import Paths
    from ucformat.torch.saving.statement import (
        Fingerprints,
        PieceFingerprints,
        Statement,
        StoredAs,
        WrittenRow,
    )

T = TypeVar("T", "Description", "StatedFacts")

_DIFFERS = (
    "save per-rank values as ucformat.torch.PerRank(value), or pass "
    'replicas="first" to save that of the first rank'
)
_TENSORS_DIFFER = (
    "if these are different layers or experts, names= gives each its name in the whole model; "
    + _DIFFERS
)


def object_owners(
    objects: Iterable[tuple[int, Mapping[str, str]]], *, equal: bool
) -> dict[str, int]:
    """The rank that provides each object: the first that has it.

    Args:
        objects: ranks, ascending, and the digests of their objects by name.
        equal: whether all digests of an object must be equal.
    """
    first: dict[str, tuple[int, str]] = {}
    for rank, digests in objects:
        for name, digest in digests.items():
            owner, expected = first.setdefault(name, (rank, digest))
            if digest != expected and equal:
                raise UsageError(
                    f"the object {name!r} has a different value on rank {rank} than on rank "
                    f"{owner}",
                    hint=_DIFFERS,
                )
    return {name: rank for name, (rank, _) in first.items()}


def manifest_paths(
    infos: Sequence[TensorInfo], by_key: Mapping[Key, Sequence[Path]]
) -> tuple[Paths, ...]:
    """Return the paths of each tensor in the form of manifests."""
    return tuple(tuple(map(path_spelled, by_key.get(i.key, ()))) for i in infos)


def paths_by_key(
    items: Iterable[tuple[int, Sequence[Row]]], aliases: Mapping[str, str]
) -> dict[Key, list[Path]]:
    """Return the paths of each tensor on any rank."""
    first: dict[Path, tuple[Key, int]] = {}
    out: dict[Key, list[Path]] = {}
    for rank, listed in items:
        for item in listed:
            key = item.info.key
            if key.name in aliases:
                key = Key(aliases[key.name], key.state)
            for path in item.paths:
                first_key, first_rank = first.setdefault(path, (key, rank))
                if first_key != key:
                    raise UsageError(
                        f"{dotted(path)} is named {first_key} on rank {first_rank}, but {key} on "
                        f"rank {rank}",
                        hint='use the same keys on all ranks, and keep the model under "model"',
                    )
                if (first_key, first_rank) == (key, rank):
                    out.setdefault(key, []).append(path)
    return out


@message
class Agreement:
    """What rank 0 answers to all ranks at last.

    Attributes:
        providers: the rank that provides each object.
        exceptions: None: those that all ranks have kept from the last save.
        weights: of the safetensors form.
    """

    attempt: str
    providers: Mapping[str, int]
    exceptions: Exceptions | None
    weights: WeightFilesPlan | None


def digest_of(exceptions: Exceptions) -> bytes:
    """The digest by which ranks tell whether they have kept the same exceptions."""
    return hashlib.sha256(encode(exceptions, Exceptions)).digest()[:16]


class Coordinator:
    """Rank 0's part of the agreement; it keeps descriptions, and the plan, for the next save."""

    def __init__(self) -> None:
        self.plan: GlobalPlan | None = None
        self._planned_from: tuple[Any, ...] = ()
        self._encoded: dict[bytes, bytes] = {}
        self._summary: Summary | None = None
        self._replies = Replies()
        self._asked: AskedOfRanks | None = None

    def begin(
        self,
        statement: Statement,
        options: SaveOptions,
        start: Callable[[GlobalPlan], tuple[str, WeightFilesPlan | None]],
    ) -> None:
        """Prepare for what all ranks state.

        Args:
            start: begins the attempt, and returns its id, and how the weights of the safetensors form are written.
        """
        self._encoded |= statement.encoded
        self._own = statement.stated
        self._options, self._start = options, start
        self._summary, self._asked = None, None

    def answer(self, summary: Summary) -> AskedOfRanks | Agreement | Addressed:
        """The answer to what all ranks state together."""
        self._summary, self._replies = summary, Replies()
        if len(summary.options) > 1:
            (own_options, _), (other, rank), *_ = sorted(summary.options.items(), key=itemgetter(1))
            raise UsageError(
                f"rank {rank} saves with {other}, rank 0 with {own_options}",
                hint="give all ranks the same arguments",
            )
        used = summary.stated.keys() | summary.facts.keys() | summary.objects.keys()
        self._encoded = {d: data for d, data in self._encoded.items() if d in used}
        return self.add(summary.compared)

    def add(self, replies: Replies) -> AskedOfRanks | Agreement | Addressed:
        """The answer to what all ranks have said since."""
        summary = self._summary
        assert summary is not None  # noqa: S101 - it comes first
        self._encoded |= {digest: zlib.decompress(data) for digest, data in replies.sent.items()}
        # those to the next question may be about the same tensors
        self._replies = Replies(
            boxes=merged(self._replies.boxes, replies.boxes, _distinct),
            wholes={**self._replies.wholes, **replies.wholes},
        )
        first = {**summary.facts, **summary.objects}
        first |= {d: ranges[0][0] for d, ranges in summary.stated.items()}
        digests_by_rank: dict[int, tuple[bytes, ...]] = {}
        for digest in first.keys() - self._encoded.keys():
            digests_by_rank[first[digest]] = (*digests_by_rank.get(first[digest], ()), digest)
        if digests_by_rank:
            others = {rank: AskedOfRanks(digests) for rank, digests in digests_by_rank.items()}
            return Addressed(AskedOfRanks(), others)
        planned_from = (summary.stated, summary.facts, self._options.form, self._options.encode)
        if self.plan is None or self._planned_from != planned_from:
            self.plan = join(summary, self._encoded, self._options, self._own)
            self._planned_from = planned_from
        plan, all_kept = self.plan, summary.kept.keys() == {self.plan.digest}
        if self._options.replicas == "equal":
            question = self._compared(summary, plan.exceptions.compared, all_kept=all_kept)
            # a question that was asked already has been answered in full
            if question is not None and question != self._asked:
                self._asked = question
                return question
            check_replicas(self._replies.boxes)
            self._check_meshes(plan, summary)
        objects = sorted((rank, digest) for digest, rank in summary.objects.items())
        providers = object_owners(
            ((rank, decode(self._encoded[digest], StatedObjects)) for rank, digest in objects),
            equal=self._options.replicas == "equal",
        )
        attempt, weights = self._start(plan)
        return Agreement(attempt, providers, None if all_kept else plan.exceptions, weights)

    def _check_meshes(self, plan: GlobalPlan, summary: Summary) -> None:
        """Check that tensors are equal which ranks hold whole, or several meshes, however they cut them."""
        if not (self._replies.boxes or self._replies.wholes):
            return
        infos = (i for kind in (plan.arrays, plan.packed, plan.weights) for i in kind.infos)
        shapes = {info.key: info.shape for info in infos}
        stated = [
            (key, fingerprint, rank)
            for (key, box), fingerprints in self._replies.boxes.items()
            for fingerprint, rank in fingerprints
            if box.shape == shapes.get(key)
        ]
        complete = {
            digest
            for digest, ranges in summary.stated.items()
            if (mesh := _decoded(digest, self._encoded, Description, self._own).mesh) is not None
            and np.array_equal(np.sort(mesh.ranks, axis=None), _ranks_in(ranges))
        }
        stated += [
            (key, fingerprint, summary.stated[digest][0][0])
            for (key, digest), fingerprint in self._replies.wholes.items()
            if digest in complete
        ]
        first: dict[Key, tuple[bytes, int]] = {}
        for key, fingerprint, rank in sorted(stated, key=itemgetter(2)):
            expected, first_rank = first.setdefault(key, (fingerprint, rank))
            if fingerprint != expected:
                raise _differ(key, first_rank, rank)

    def _compared(
        self, summary: Summary, compared: tuple[Key, ...], *, all_kept: bool
    ) -> AskedOfRanks | None:
        """What rank 0 has to ask before it knows that replicas are equal, or which ones differ."""
        if summary.balance or any(len(sums) > 1 for sums in summary.sums.values()):
            return AskedOfRanks(everything=True)
        return AskedOfRanks((), compared) if compared and not all_kept else None


def agree(
    group: Group,
    statement: Statement,
    options: SaveOptions,
    sums: PieceFingerprints | None,
    kept: tuple[bytes, Exceptions],
    coordinator: Coordinator,
) -> Agreement:
    """Agree on who writes what; all ranks call this, with the exceptions that they have kept."""
    summary = statement.summary(str(options), sums, kept)
    kinds = AskedOfRanks | Agreement
    answer: AskedOfRanks | Agreement = group.combine(
        summary, merge_summaries, Summary, coordinator.answer, kinds
    )
    while isinstance(answer, AskedOfRanks):
        reply = statement.reply(answer, sums)
        answer = group.combine(reply, merge_replies, Replies, coordinator.add, kinds)
    return answer


def check_replicas(boxes: Mapping[tuple[Key, Box], Fingerprints]) -> None:
    """Check that the replicas of each box have equal fingerprints."""
    for (key, _), distinct in boxes.items():
        if len(distinct) > 1:
            (_, rank), (_, other), *_ = sorted(distinct, key=itemgetter(1))
            raise _differ(key, rank, other)


def _differ(key: Key, rank: int, other: int) -> UsageError:
    return UsageError(
        f"{key} has a different value on rank {other} than on rank {rank}", hint=_TENSORS_DIFFER
    )


def _decoded(
    digest: bytes,
    encoded: Mapping[bytes, bytes],
    kind: type[T],
    own: Mapping[bytes, Description | StatedFacts],
) -> T:
    """What ranks state, by its digest; what rank 0 states itself need not be decoded."""
    stated = own.get(digest)
    return stated if isinstance(stated, kind) else decode(encoded[digest], kind)


@gc_paused()
def join(
    summary: Summary,
    encoded: Mapping[bytes, bytes],
    options: SaveOptions,
    own: Mapping[bytes, Description | StatedFacts] = MappingProxyType({}),
) -> GlobalPlan:
    """The plan of all ranks, from all that they state.

    Tensors whose descriptions do not fit each other, and those of which some rank lists its boxes, are listed.

    Args:
        own: what rank 0 states itself, by digest.
    """
    stated = sorted(
        ((r[0][0], d, _decoded(d, encoded, Description, own)) for d, r in summary.stated.items()),
        key=itemgetter(0, 1),
    )
    facts = sorted(
        ((rank, _decoded(d, encoded, StatedFacts, own)) for d, rank in summary.facts.items()),
        key=itemgetter(0),
    )
    aliases = {
        alias: name for _, stated_facts in facts for alias, name in stated_facts.aliases.items()
    }
    order: dict[bytes, tuple[int, ...]] = {}
    for _, stated_facts in facts:
        order = {**stated_facts.order, **order}
    rows, listed_keys = _distinct_rows(stated, summary, aliases)
    # reversed, so that the first rank that states a tensor gives its place
    place = {
        row.info.key: (rank, order[digest][number])
        for rank, digest, d in reversed(stated)
        for number, row in enumerate(d.rows)
    }
    holders, left_out = _split_rows(stated, summary, listed_keys)
    infos = [row.info for key, (_, row, _) in rows.items() if key.name not in aliases]
    if options.form == "packed":
        packed: Any = "all"
    else:
        other_infos = (i for i in infos if not rows[i.key][1].weight)
        packed = "small" if packed_keys(other_infos) else "none"
    exceptions = Exceptions(
        packed,
        tuple(sorted({key for key, (_, _, count) in rows.items() if count > 1} | listed_keys)),
        {
            digest: summary.stated[digest]
            for _, digest, d in stated
            if d.mesh is None and not d.boxes
        },
        left_out,
        {},
        _listed(
            {key: rows[key][1] for key in sorted(holders, key=place.__getitem__)}, holders, aliases
        ),
        options.lossy_states(infos),
    )
    arrays = [i.key for i in infos if exceptions.stored_as(rows[i.key][1]) == "array"]
    folders = {k: folder for k, folder in array_folders(arrays).items() if folder != own_folder(k)}
    exceptions = replace(exceptions, folders=folders)
    paths = paths_by_key(((rank, d.rows) for rank, _, d in stated), aliases)
    keys = {digest: tuple(row.info.key for row in d.rows) for _, digest, d in stated}
    parts = _parts(stated, exceptions, place, paths)
    return GlobalPlan(
        exceptions, digest_of(exceptions), aliases, *parts, keys, stated, place, paths
    )


def _parts(
    stated: Sequence[tuple[int, bytes, Description]],
    exceptions: Exceptions,
    places: Mapping[Key, tuple[int, int]],
    paths: Mapping[Key, Sequence[Path]],
) -> tuple[PlannedTensors, PlannedTensors, PlannedTensors]:
    """The arrays, the packed tensors and the weights of the safetensors form."""

    def stored(kind: StoredAs) -> PlannedTensors:
        described = [
            w
            for _, digest, d in stated
            if not d.boxes
            for w in written_rows(d, digest, exceptions, kind)
        ]
        listed = tuple(t for t in exceptions.listed if exceptions.stored_as(t) == kind)
        own = sorted((w.row.info for w in described), key=lambda info: places[info.key])
        all_infos = (*own, *(t.info for t in listed))
        as_described = None if kind == "array" else _described(described, all_infos)
        return PlannedTensors(all_infos, manifest_paths(all_infos, paths), listed, as_described)

    return stored("array"), stored("packed"), stored("weight")


@gc_paused()
def without(plan: GlobalPlan, referenced: Mapping[bytes, bytes]) -> GlobalPlan:
    """The plan if nobody writes what a base has; `referenced` as for `Exceptions.without`."""
    exceptions = plan.exceptions.without(referenced)
    arrays, packed, weights = _parts(plan.stated, exceptions, plan.places, plan.state_paths)
    return plan._replace(exceptions=exceptions, arrays=arrays, packed=packed, weights=weights)


def rows_of(plan: GlobalPlan, keys: Collection[Key]) -> dict[bytes, bytes]:
    """The rows and listed tensors with these keys, as for `Exceptions.without`."""
    rows = {
        digest: bits_of(key in keys for key in of_description)
        for digest, of_description in plan.keys.items()
    }
    return {**rows, b"": bits_of(t.info.key in keys for t in plan.exceptions.listed)}


def _distinct_rows(
    stated: Sequence[tuple[int, bytes, Description]], summary: Summary, aliases: Mapping[str, str]
) -> tuple[dict[Key, tuple[int, Row, int]], set[Key]]:
    """Each tensor with the first rank that states it, and how many descriptions have it; and those to list."""
    rows: dict[Key, tuple[int, Row, int]] = {}
    listed_keys: set[Key] = set()
    for rank, digest, description in stated:
        mesh, ranks = description.mesh, _ranks_in(summary.stated[digest])
        fits = mesh is None or np.array_equal(np.sort(mesh.ranks, axis=None), ranks)
        for row in description.rows:
            key = row.info.key
            if key in rows:
                first_rank, first, count = rows[key]
                _check_same(row, rank, first, first_rank)
                rows[key] = (first_rank, first, count + 1)
            else:
                rows[key] = (rank, row, 1)
            if description.boxes or not fits or key.name in aliases:
                listed_keys.add(key)
    return rows, listed_keys


def _split_rows(
    stated: Sequence[tuple[int, bytes, Description]], summary: Summary, listed_keys: set[Key]
) -> tuple[dict[Key, dict[Box, list[int]]], dict[bytes, tuple[int, ...]]]:
    """The ranks that hold each box of the tensors to list; and the rows that another description writes."""
    holders: dict[Key, dict[Box, list[int]]] = {}
    left_out: dict[bytes, tuple[int, ...]] = {}
    written: set[Key] = set()
    for _, digest, description in stated:
        out = []
        for number, row in enumerate(description.rows):
            key = row.info.key
            if key in listed_keys:
                boxes = holders.setdefault(key, {})
                for rank, box in _holdings(description, number, _ranks_in(summary.stated[digest])):
                    boxes.setdefault(box, []).append(rank)
            if key in listed_keys or key in written:
                out.append(number)
            written.add(key)
        if out and not description.boxes:
            left_out[digest] = tuple(out)
    return holders, left_out


def _ranks_in(ranges: Ranges) -> list[int]:
    return [rank for a, b in ranges for rank in range(a, b)]


def _check_same(row: Row, rank: int, first: Row, first_rank: int) -> None:
    """Check that two ranks mean the same tensor."""
    info = row.info
    if first.info != info:
        raise UsageError(
            f"{info.key} is {first.info.dtype} {first.info.shape} on rank {first_rank}, but "
            f"{info.dtype} "
            f"{info.shape} on rank {rank}",
            hint=(
                "if these are different layers or experts, names= gives each its name in the whole "
                "model; a value that differs between ranks is saved as ucformat.torch.PerRank(value)"
            ),
        )
    if first.weight != row.weight:
        raise UsageError(
            f"{info.key} is a weight on some ranks, and on others there is another weight",
            hint=OTHER_FORMS,
        )


def _holdings(
    description: Description, number: int, ranks: Sequence[int]
) -> Iterator[tuple[int, Box]]:
    """What the ranks that state a description hold of one of its rows: each with a box that has elements."""
    row, mesh = description.rows[number], description.mesh
    for rank in ranks:
        if description.boxes:
            boxes = description.boxes[number]
        elif mesh is None:
            boxes = (Box.whole(row.info.shape),)
        else:
            at = mesh.coordinate(rank)
            assert at is not None  # noqa: S101 - it has stated the description
            boxes = description.distributions[row.distribution].boxes(row.info.shape, at)
        yield from ((rank, box) for box in boxes if box.size)


def _listed(
    rows: Mapping[Key, Row],
    holders: Mapping[Key, Mapping[Box, Sequence[int]]],
    aliases: Mapping[str, str],
) -> tuple[ListedTensor, ...]:
    """The tensors that are listed: each box once, balanced by bytes over the ranks that hold it."""
    for key, boxes in holders.items():
        if key.name in aliases and boxes:  # a rank with an empty shard cannot know that it is tied
            raise UsageError(
                f"{key} is tied to another tensor on some ranks, and on others it is not"
            )
        try:
            if key.name not in aliases:
                prove(rows[key].info, ((ranks[0], box) for box, ranks in boxes.items()))
        except CoverageError as error:
            raise CoverageError(
                error.message, hint="check that all ranks of the mesh take part in this save"
            ) from None
    loads: Counter[int] = Counter()
    provider: dict[tuple[Key, Box], int] = {}
    sizes = [
        (box.size * rows[key].info.itemsize, key, box)
        for key, boxes in holders.items()
        for box in boxes
    ]
    for nbytes, key, box in sorted(sizes, key=lambda s: -s[0]):
        rank = provider[key, box] = min(holders[key][box], key=loads.__getitem__)
        loads[rank] += nbytes
    return tuple(
        ListedTensor(
            row.info,
            tuple(holders[key]),
            tuple(provider[key, box] for box in holders[key]),
            row.weight,
        )
        for key, row in rows.items()
        if key.name not in aliases
    )


def _described(written: Sequence[WrittenRow], infos: Sequence[TensorInfo]) -> Described | None:
    number, order = {info.key: n for n, info in enumerate(infos)}, FileOrder()
    rows: list[DescribedRow] = []
    shape: tuple[int, ...] | None = None
    tile: tuple[int, ...] = ()
    itemsize = 0
    for w in sorted(written, key=lambda w: order(w.row.info, w.distribution)):
        info = w.row.info
        if info.shape != shape or info.itemsize != itemsize:  # those of a group follow each other
            shape, itemsize = info.shape, info.itemsize
            tile = Tiling.of(shape, itemsize).tile
        rows.append(DescribedRow(number[info.key], w.distribution, w.writer, tile))
    return Described(rows, infos, "") if rows else None


def merge_summaries(a: Summary, b: Summary) -> Summary:
    """What consecutive ranks state together."""
    return Summary(
        options={**b.options, **a.options},
        kept={**b.kept, **a.kept},
        stated=merged(a.stated, b.stated, adjoined),
        facts={**b.facts, **a.facts},
        objects={**b.objects, **a.objects},
        balance=(a.balance + b.balance) % HASHES,
        sums=merged(a.sums, b.sums, _distinct),
        compared=merge_replies(a.compared, b.compared),
    )


def merge_replies(a: Replies, b: Replies) -> Replies:
    """What consecutive ranks answer together."""
    return Replies(
        {**b.sent, **a.sent},
        merged(a.boxes, b.boxes, _distinct),
        merged(a.wholes, b.wholes, added),
    )


def _distinct(a: Fingerprints, b: Fingerprints) -> Fingerprints:
    values = {value for value, _ in a}
    return (*a, *(s for s in b if s[0] not in values))
