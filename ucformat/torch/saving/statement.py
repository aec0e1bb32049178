"""What a rank states about the tensors that it holds: how a mesh holds them, instead of which boxes it holds itself.

Ranks with equal descriptions state equal digests. Who writes a tensor follows from its description.
"""

from __future__ import annotations

import hashlib
import heapq
import zlib
from collections.abc import Mapping
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ucformat.format.arrays import own_folder
from ucformat.format.described import file_order
from ucformat.geometry.distribution import Distribution, RankMesh
from ucformat.geometry.tensor import Key, TensorInfo
from ucformat.reading.garbage import gc_paused
from ucformat.reading.readable import StatePath as Path
from ucformat.torch.comm.wire import encode, message

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from ucformat.geometry.box import Box
    from ucformat.torch.saving.assignment import WriteItem

#: Hashes are below this, so that they fit in a signed integer of 64 bits.
HASHES = 1 << 62

Ranges = tuple[tuple[int, int], ...]  # of ranks, [start, stop), ascending
Sums = tuple[tuple[int, int], ...]  # distinct checksums, and the first rank that has each


@message
class Facts:
    """What ranks state besides descriptions.

    Attributes:
        objects: the digests of objects, by name.
        order: the numbers of the items of each description, by its digest.
    """

    aliases: Mapping[str, str]
    objects: Mapping[str, str]
    order: Mapping[bytes, tuple[int, ...]] = field(default_factory=dict)


@message
class Row:
    """A tensor of a description, and the number of its distribution; -1: ranks hold it whole."""

    info: TensorInfo
    distribution: int
    paths: tuple[Path, ...] = ()


@message
class Description:
    """How the ranks of a mesh hold tensors; without a mesh, the ranks that state it hold them whole."""

    mesh: RankMesh | None
    distributions: tuple[Distribution, ...]
    rows: tuple[Row, ...]


@message
class Exceptions:
    """What is not the same for all tensors and ranks.

    Attributes:
        compared: tensors in several descriptions, whose checksums ranks state.
        whole: the ranks that state each description without a mesh, by its digest.
        left_out: the rows of descriptions that the ranks of another one write.
        folders: of arrays whose folders do not follow from their names alone.
    """

    compared: tuple[Key, ...] = ()
    whole: Mapping[bytes, Ranges] = field(default_factory=dict)
    left_out: Mapping[bytes, tuple[int, ...]] = field(default_factory=dict)
    folders: Mapping[Key, str] = field(default_factory=dict)

    def folder(self, key: Key) -> str:
        """Return the folder of an array, below the attempt's `data` folder."""
        return self.folders.get(key) or own_folder(key)


@message
class Agreement:
    """What rank 0 answers to all ranks at last.

    Attributes:
        attempt: what `begin` has returned; None if ranks have to list boxes: those of `listed`, and
            describe the other tensors again; without `listed`, those of all tensors.
        providers: the rank that provides each object.
        listed: tensors that some rank cannot describe, or whose descriptions do not fit each other.
    """

    attempt: str | None = None
    providers: Mapping[str, int] = field(default_factory=dict)
    exceptions: Exceptions | None = None
    listed: tuple[Key, ...] = ()


@message
class Question:
    """What rank 0 asks a rank for: what has these digests, and the checksums of tensors in several descriptions."""

    digests: tuple[bytes, ...] = ()
    compared: tuple[Key, ...] = ()


@message
class More:
    """The answers of some consecutive ranks: compressed descriptions and facts by digest, checksums by label."""

    sent: Mapping[bytes, bytes] = field(default_factory=dict)
    sums: Mapping[bytes, Sums] = field(default_factory=dict)


@message
class Offer:
    """What some consecutive ranks state.

    Attributes:
        options: the first rank with these options and `compared`, by a digest of both.
        stated: the ranks that state a description, by its digest.
        facts: the first rank that states these facts, by their digest.
        balance: a sum over ranks, which is 0 over all ranks of a mesh if its replicas have equal
            checksums.
        unambiguous: whether no rank holds two tensors of one name and state.
        undescribed: tensors that some of them can only list.
        sums: checksums of what is to be equal, by a label of it.
    """

    options: Mapping[bytes, int]
    stated: Mapping[bytes, Ranges]
    facts: Mapping[bytes, int]
    balance: int
    unambiguous: bool
    undescribed: frozenset[Key]
    sums: Mapping[bytes, Sums]


class WrittenRow(NamedTuple):
    """A row of a description, its number there, and which of its replicas writes it (`Distribution.copy_of`)."""

    number: int
    row: Row
    distribution: Distribution
    writer: int


class Statement:
    """What one rank states: a description for each mesh, and one for whole tensors.

    A distribution is stated only if its boxes on this rank are those of the item.

    Args:
        distributions: of each item; None if it is not known.
        listed: tensors whose boxes all ranks list, so they are not stated.
    """

    @gc_paused()
    def __init__(
        self,
        rank: int,
        items: Sequence[WriteItem],
        distributions: Sequence[Distribution | None],
        facts: Facts,
        listed: frozenset[Key] = frozenset(),
    ) -> None:
        self.rank, self.items, self.facts, self._distributions = (
            rank,
            items,
            facts,
            list(distributions),
        )
        self.listed = listed
        self.unambiguous = len({item.info.key for item in items}) == len(
            items
        )  # else merging of boxes reports it
        self.undescribed: set[Key] = set()
        self.coordinates: dict[RankMesh, tuple[int, ...] | None] = {}
        rows: dict[RankMesh | None, list[tuple[int, Row]]] = {}
        known: dict[RankMesh | None, dict[Distribution, int]] = {None: {}}
        for number, (item, d) in enumerate(zip(items, distributions, strict=True)):
            if listed and item.info.key in listed:
                continue
            if d is not None and self._holds(item, d):
                of_mesh = known.setdefault(d.mesh, {})
                at = of_mesh.setdefault(d, len(of_mesh))
                rows.setdefault(d.mesh, []).append((number, Row(item.info, at, item.paths)))
            elif not item.info.size or [b.shape for b in item.boxes] == [item.info.shape]:
                rows.setdefault(None, []).append((number, Row(item.info, -1, item.paths)))
            else:
                self.undescribed.add(item.info.key)
        self.descriptions: dict[bytes, Description] = {}
        self.encoded: dict[bytes, bytes] = {}
        self.order: dict[bytes, tuple[int, ...]] = {}
        for mesh, numbered in rows.items():
            description = Description(mesh, tuple(known[mesh]), tuple(row for _, row in numbered))
            digest = self._keep(encode(description, Description))
            self.descriptions[digest] = description
            self.order[digest] = tuple(number for number, _ in numbered)
        self._facts = self._keep(encode(replace(facts, order=self.order), Facts))
        self._replicated = [
            (digest, d, [self.order[digest][n] for n in numbers])
            for digest, description in self.descriptions.items()
            for d, numbers in _replicated(description)
        ]

    def is_of(
        self,
        items: Sequence[WriteItem],
        distributions: Sequence[Distribution | None],
        facts: Facts,
        listed: frozenset[Key] = frozenset(),
    ) -> bool:
        """Whether another statement with these arguments would be equal."""
        return (self.facts, self.listed, self._distributions, self.items) == (
            facts,
            listed,
            [*distributions],
            items,
        )

    def _keep(self, data: bytes) -> bytes:
        digest = _digest(data)
        self.encoded[digest] = data
        return digest

    def _holds(self, item: WriteItem, d: Distribution) -> bool:
        """Whether this rank's boxes of an item follow from a distribution."""
        if d.mesh not in self.coordinates:
            self.coordinates[d.mesh] = d.mesh.coordinate(self.rank)
        at, shape = self.coordinates[d.mesh], item.info.shape
        return (
            at is not None
            and d.fits(shape)
            and d.boxes(shape, at) == tuple(b for b in item.boxes if b.size)
        )

    def offer(
        self, options: str, sums: Sequence[NDArray[np.uint32]], compared: tuple[Key, ...]
    ) -> Offer:
        """What this rank sends to rank 0 first.

        Args:
            compared: tensors in several descriptions, as far as ranks know them from the last save.
        """
        found: dict[bytes, Sums] = {
            digest: ((_hash(*(sums[n] for n in self.order[digest])), self.rank),)
            for digest, d in self.descriptions.items()
            if d.mesh is None
        }
        return Offer(
            options={
                _digest(
                    repr((options, compared, sorted(self.listed))).encode(errors="surrogatepass")
                ): self.rank
            },
            stated=dict.fromkeys(self.descriptions, ((self.rank, self.rank + 1),)),
            facts={self._facts: self.rank},
            balance=self._balance(sums),
            unambiguous=self.unambiguous,
            undescribed=frozenset(self.undescribed),
            sums={**found, **self.more(Question((), compared), sums).sums},
        )

    def more(self, question: Question, sums: Sequence[NDArray[np.uint32]]) -> More:
        """What this rank answers to a question of rank 0."""
        compared = set(question.compared)
        held = (
            [(i, s) for i, s in zip(self.items, sums, strict=True) if i.info.key in compared]
            if compared
            else []
        )
        return More(
            sent={digest: zlib.compress(self.encoded[digest], 1) for digest in question.digests},
            sums={
                _label(item.info, box): ((int(s), self.rank),)
                for item, found in held
                for box, s in zip(item.boxes, found, strict=True)
            },
        )

    def _balance(self, sums: Sequence[NDArray[np.uint32]]) -> int:
        """The hashes of what this rank holds as a replica, negative and multiplied for the first one."""
        total = 0
        for digest, d, numbers in self._replicated:
            at = self.coordinates[d.mesh]
            assert at is not None  # noqa: S101 - this rank holds what it states
            part = np.array([-1 if axis in d.replicas else i for axis, i in enumerate(at)])
            found = _hash(np.frombuffer(digest, np.uint8), part, *(sums[n] for n in numbers))
            total += found * (1 if d.copy_of(at) else 1 - d.copies)
        return total % HASHES

    def pieces(self, exceptions: Exceptions) -> list[tuple[int, int]]:
        """The (item, piece) that this rank writes, in the order of its file."""
        mine: list[tuple[int, WrittenRow]] = []
        for digest, d in self.descriptions.items():
            for found in written_rows(d, digest, exceptions):
                mesh = found.distribution.mesh
                at = (
                    self.coordinates[mesh]
                    if mesh in self.coordinates
                    else mesh.coordinate(self.rank)
                )
                if at is not None and found.distribution.copy_of(at) == found.writer:
                    mine.append((self.order[digest][found.number], found))
        mine.sort(key=lambda m: file_order(m[1].row.info, m[1].distribution))
        return [
            (item, p) for item, _ in mine for p, b in enumerate(self.items[item].boxes) if b.size
        ]


def _replicated(description: Description) -> Iterable[tuple[Distribution, list[int]]]:
    """The rows of a mesh that are replicated over the same axes, and a distribution that is."""
    found: dict[tuple[int, ...], tuple[Distribution, list[int]]] = {}
    for number, row in enumerate(description.rows if description.mesh else ()):
        d = description.distributions[row.distribution]
        if d.copies > 1:
            found.setdefault(d.replicas, (d, []))[1].append(number)
    return found.values()


def distributions_of(
    description: Description, digest: bytes, exceptions: Exceptions
) -> tuple[Distribution, ...]:
    """The distributions of a description; without a mesh one, in which all ranks that state it are replicas."""
    if description.mesh is not None:
        return description.distributions
    ranks = [rank for a, b in exceptions.whole[digest] for rank in range(a, b)]
    return (Distribution(RankMesh.of((len(ranks),), ranks)),)


def written_rows(
    description: Description, digest: bytes, exceptions: Exceptions
) -> Iterator[WrittenRow]:
    """The rows that the ranks of a description write, balanced by bytes over the replicas of each part."""
    left_out = set(exceptions.left_out.get(digest, ()))
    distributions = distributions_of(description, digest, exceptions)
    loads: dict[
        tuple[int, ...], list[tuple[int, int]]
    ] = {}  # of replicas over these axes: (bytes, replica)
    for d in distributions:
        if d.replicas not in loads:
            loads[d.replicas] = [(0, replica) for replica in range(d.copies)]
    known = [(d, loads[d.replicas], d.copies) for d in distributions]

    def largest_first(numbered: tuple[int, Row]) -> tuple[int, str, str]:
        info = numbered[1].info
        return (-info.nbytes, info.name, info.state)

    for number, row in sorted(enumerate(description.rows), key=largest_first):
        if number in left_out:
            continue
        d, heap, copies = known[row.distribution]
        nbytes, writer = heap[0]
        if copies > 1:
            heapq.heapreplace(heap, (nbytes + row.info.nbytes * copies // d.mesh.size, writer))
        yield WrittenRow(number, row, d, writer)


def _hash(*parts: NDArray[Any]) -> int:
    state = hashlib.sha256()
    for part in parts:
        state.update(np.ascontiguousarray(part).data)
    return int.from_bytes(state.digest()[:8], "little") % HASHES


def _label(info: TensorInfo, box: Box) -> bytes:
    """What identifies a box of a tensor."""
    return _digest(repr((*info.key, box.start, box.shape)).encode(errors="surrogatepass"))


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:16]
