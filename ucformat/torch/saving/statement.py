"""What a rank states about its tensors: how the ranks of a mesh hold them, or its own boxes.

Ranks with equal descriptions state equal digests. Who writes a tensor follows from its description,
which of tensors that some rank cannot describe is a list of all boxes, each with the rank that provides it.
"""

from __future__ import annotations

import hashlib
import heapq
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import field, replace
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from ucformat.errors import UsageError
from ucformat.format.arrays import is_small, own_folder
from ucformat.format.described import FileOrder
from ucformat.geometry.box import Box
from ucformat.geometry.distribution import BoxList, Distribution, RankMesh
from ucformat.geometry.fingerprint import LANES, Sums, fingerprint_of, packed_sums
from ucformat.geometry.tensor import Key, TensorInfo
from ucformat.reading.readable import StatePath as Path
from ucformat.storage.concurrency import gc_paused
from ucformat.torch.comm.merging import Ranges, ones_of
from ucformat.torch.comm.wire import encode, message
from ucformat.torch.state.elements import elements_within

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from ucformat.torch.state.elements import Elements

#: Hashes are below this, so that they fit in a signed integer of 64 bits.
HASHES = 1 << 62

#: Distinct fingerprints of what should be equal, and the first rank that has each.
Fingerprints = tuple[tuple[bytes, int], ...]
StoredAs = Literal["array", "packed", "weight"]


@message
class WriteItem:
    """The boxes of a tensor that one rank holds, and its paths in the program's state."""

    info: TensorInfo
    boxes: tuple[Box, ...]
    paths: tuple[Path, ...] = ()


class Fragment(NamedTuple):
    """A box of tensor number `tensor`, which the sender holds in piece `piece` of its item `item`.

    The number of a tensor is that of the rank's own item. Only the sender knows its item and piece;
    for others they are -1.
    """

    sender: int
    tensor: int
    item: int
    piece: int
    box: Box


class PieceFingerprints:
    """The fingerprint of each piece of the items of a rank; computed when it is asked for.

    Args:
        elements: as in `RankState`.
    """

    def __init__(
        self, items: Sequence[WriteItem], elements: Callable[[int, int], Elements]
    ) -> None:
        self._items, self._elements = items, elements
        self._computed: dict[int, NDArray[np.uint64]] = {}

    def compute(self, threads: int) -> None:
        """Compute those of all pieces now, by several threads."""
        with ThreadPoolExecutor(threads, "ucformat-fingerprint") as pool:
            # the largest first, so that no thread is left with one at the end
            numbers = sorted(range(len(self._items)), key=lambda n: -self._items[n].info.nbytes)
            remaining = iter(numbers)  # of all threads: to hand over a small item takes longer
            for _ in pool.map(lambda _: [self[n] for n in remaining], range(threads)):
                pass

    def of_piece(self, item: int, piece: int) -> Sums:
        """Return the fingerprint of one piece."""
        low, high = self[item][piece].tolist()
        return low, high

    def __getitem__(self, item: int) -> NDArray[np.uint64]:
        """Return a row for each piece of an item."""
        if item not in self._computed:
            info, boxes = self._items[item].info, self._items[item].boxes
            sums = [
                fingerprint_of(self._elements(item, piece), info.shape, box)
                for piece, box in enumerate(boxes)
            ]
            self._computed[item] = np.array(sums, "<u8").reshape(-1, LANES)
        return self._computed[item]


class RankState(NamedTuple):
    """What one rank saves.

    Attributes:
        distributions: of each item; None if it is not known.
        elements: returns the array of an (item, piece).
    """

    items: Sequence[WriteItem]
    distributions: Sequence[Distribution | None]
    aliases: Mapping[str, str]
    objects: Mapping[str, Any]
    elements: Callable[[int, int], Elements]

    def within(self, part: Fragment) -> Elements:
        """Return the elements of a fragment that this rank sends or writes."""
        box = self.items[part.item].boxes[part.piece]
        return elements_within(self.elements(part.item, part.piece), box, part.box)


@message
class StatedFacts:
    """What ranks state of tensors besides descriptions.

    Attributes:
        order: the numbers of the items of each description, by its digest.
    """

    aliases: Mapping[str, str]
    order: Mapping[bytes, tuple[int, ...]] = field(default_factory=dict)


#: The digests of objects, by name.
StatedObjects = Mapping[str, str]


@message
class Row:
    """A tensor of a description.

    Attributes:
        distribution: its number; -1: ranks hold the tensor whole, or list its boxes.
        weight: whether it is one of the weights of the safetensors form.
    """

    info: TensorInfo
    distribution: int
    paths: tuple[Path, ...] = ()
    weight: bool = False


@message
class Description:
    """How the ranks of a mesh hold tensors; without one, those that state it have all of them.

    Attributes:
        boxes: of each row, those of the one rank that states it, if it knows no distribution.
    """

    mesh: RankMesh | None
    distributions: tuple[Distribution, ...]
    rows: tuple[Row, ...]
    boxes: tuple[tuple[Box, ...], ...] = ()


@message
class ListedTensor:
    """A tensor that some rank cannot describe: its boxes, and the rank that provides each."""

    info: TensorInfo
    boxes: tuple[Box, ...]
    ranks: tuple[int, ...]
    weight: bool = False


@message
class Exceptions:
    """What is not the same for all tensors and ranks.

    Attributes:
        packed: which tensors are packed: all, small ones because they are too many for arrays, or none.
        compared: tensors in several descriptions, whose checksums ranks state.
        whole: the ranks that state each description without a mesh, by its digest.
        left_out: the rows of descriptions that are written by another one.
        folders: of arrays whose folders do not follow from their names alone.
        listed: tensors that no description covers.
        packed_states: states of which all tensors are packed, too.
    """

    packed: Literal["all", "small", "none"] = "none"
    compared: tuple[Key, ...] = ()
    whole: Mapping[bytes, Ranges] = field(default_factory=dict)
    left_out: Mapping[bytes, tuple[int, ...]] = field(default_factory=dict)
    folders: Mapping[Key, str] = field(default_factory=dict)
    listed: tuple[ListedTensor, ...] = ()
    packed_states: tuple[str, ...] = ()

    def stored_as(self, tensor: Row | ListedTensor) -> StoredAs:
        """Return how a tensor is stored."""
        if tensor.weight:
            return "weight"
        packed = self.packed == "all" or (self.packed == "small" and is_small(tensor.info))
        return "packed" if packed or tensor.info.state in self.packed_states else "array"

    @property
    def have_packed(self) -> bool:
        """Whether there are packed files."""
        return self.packed != "none" or bool(self.packed_states)

    def folder(self, key: Key) -> str:
        """Return the folder of an array, below the attempt's `data` folder."""
        return self.folders.get(key) or own_folder(key)

    def without(self, referenced: Mapping[bytes, bytes]) -> Exceptions:
        """Return these if nobody writes what a base has: for each description a bit for each row.

        Those of listed tensors are under the empty digest.
        """
        out = {digest: ones_of(bits) for digest, bits in referenced.items()}
        gone = {*out.pop(b"", ())}
        left_out = {
            digest: tuple(sorted({*out.get(digest, ()), *self.left_out.get(digest, ())}))
            for digest in {**self.left_out, **out}
        }
        listed = tuple(tensor for n, tensor in enumerate(self.listed) if n not in gone)
        return replace(self, left_out=left_out, listed=listed)

    def box_lists(self, kind: StoredAs) -> list[tuple[ListedTensor, BoxList]]:
        """Return the listed tensors of a kind, with distributions over one mesh."""
        mesh = RankMesh((1 + max((max(t.ranks) for t in self.listed), default=0),), 0, (1,))
        return [
            (t, BoxList(mesh, t.boxes, t.ranks)) for t in self.listed if self.stored_as(t) == kind
        ]


@message
class AskedOfRanks:
    """What rank 0 asks a rank for.

    Attributes:
        digests: of descriptions, facts and objects.
        compared: the tensors of which it wants fingerprints.
        everything: whether it wants those of all tensors, to tell which one differs.
    """

    digests: tuple[bytes, ...] = ()
    compared: tuple[Key, ...] = ()
    everything: bool = False


@message
class Replies:
    """Answers of consecutive ranks.

    Attributes:
        sent: compressed descriptions, facts and objects, by their digests.
        boxes: the fingerprints of boxes.
        wholes: those of tensors, replicas once, by the description of the ranks that hold them.
    """

    sent: Mapping[bytes, bytes] = field(default_factory=dict)
    boxes: Mapping[tuple[Key, Box], Fingerprints] = field(default_factory=dict)
    wholes: Mapping[tuple[Key, bytes], bytes] = field(default_factory=dict)


@message
class Summary:
    """What some consecutive ranks state.

    Attributes:
        options: the first rank with these options.
        kept: the first rank that has kept exceptions of this digest, and sends the fingerprints that they ask for.
        stated: the ranks that state a description, by its digest.
        facts: the first rank that states these facts, by their digest.
        objects: the first rank that states these objects, likewise.
        balance: a sum over ranks, which is 0 over all ranks of a mesh if its replicas have equal
            fingerprints.
        sums: a hash of the fingerprints of what ranks hold whole, by the digest of its description.
        compared: the fingerprints of tensors in several descriptions.
    """

    options: Mapping[str, int]
    kept: Mapping[bytes, int]
    stated: Mapping[bytes, Ranges]
    facts: Mapping[bytes, int]
    objects: Mapping[bytes, int]
    balance: int
    sums: Mapping[bytes, Fingerprints]
    compared: Replies


class WrittenRow(NamedTuple):
    """A row, its number in the description, and the replica that writes it (`copy_of`)."""

    number: int
    row: Row
    distribution: Distribution
    writer: int


class SharedRow(NamedTuple):
    """A tensor that ranks write together: this rank's item, or -1, and who holds what."""

    item: int
    info: TensorInfo
    distribution: Distribution | BoxList


class Statement:
    """What one rank states: descriptions of each mesh and of whole tensors, and other boxes.

    A distribution is stated only if its boxes on this rank are those of the item.

    Args:
        distributions: of each item; None if it is not known.
        weights: the weights of the safetensors form.
    """

    @gc_paused()
    def __init__(
        self,
        rank: int,
        items: Sequence[WriteItem],
        distributions: Sequence[Distribution | None],
        facts: StatedFacts,
        weights: frozenset[Key] = frozenset(),
    ) -> None:
        self.rank, self.items, self.facts = rank, items, facts
        self._distributions = list(distributions)
        self.coordinates: dict[RankMesh, tuple[int, ...] | None] = {}
        self._number = {item.info.key: number for number, item in enumerate(items)}
        if len(self._number) < len(items):
            twice = next(i.info.key for n, i in enumerate(items) if self._number[i.info.key] != n)
            raise UsageError(
                f"rank {rank} saves two tensors as {twice}", hint="give them different names"
            )
        rows: dict[RankMesh | Literal["whole", "listed"], list[tuple[int, Row]]] = {}
        numbers: dict[RankMesh, dict[Distribution, int]] = {}
        for number, (item, d) in enumerate(zip(items, distributions, strict=True)):
            mesh: RankMesh | Literal["whole", "listed"] = "listed"
            at = -1
            if d is not None and self._follows(item, d):
                mesh = d.mesh
                of_mesh = numbers.setdefault(mesh, {})
                at = of_mesh.setdefault(d, len(of_mesh))
            elif not item.info.size or [b.shape for b in item.boxes] == [item.info.shape]:
                mesh = "whole"
            row = Row(item.info, at, item.paths, item.info.key in weights)
            rows.setdefault(mesh, []).append((number, row))
        self.descriptions: dict[bytes, Description] = {}  # of meshes, and of whole tensors
        self.encoded: dict[bytes, bytes] = {}
        self.order: dict[bytes, tuple[int, ...]] = {}
        for mesh, numbered in rows.items():
            boxes = tuple(items[n].boxes for n, _ in numbered) if mesh == "listed" else ()
            own_mesh = None if isinstance(mesh, str) else mesh
            distinct = () if own_mesh is None else tuple(numbers[own_mesh])
            description = Description(own_mesh, distinct, tuple(r for _, r in numbered), boxes)
            digest = self._keep(encode(description, Description))
            self.order[digest] = tuple(number for number, _ in numbered)
            if mesh != "listed":
                self.descriptions[digest] = description
        stated_facts = replace(facts, order=self.order)
        self._facts = self._keep(encode(stated_facts, StatedFacts))
        self._objects = b""
        self.tell({})
        #: What has no boxes, by its digest.
        self.stated: dict[bytes, Description | StatedFacts] = {
            **self.descriptions,
            self._facts: stated_facts,
        }
        self._replicated = [
            (digest, d, numbers)
            for digest, description in self.descriptions.items()
            for d, numbers in _replicated(description)
        ]

    @cached_property
    def _place(self) -> dict[int, tuple[bytes, int]]:
        """The description of each item, and its number there."""
        return {
            item: (digest, number)
            for digest, order in self.order.items()
            for number, item in enumerate(order)
        }

    def is_of(
        self,
        items: Sequence[WriteItem],
        distributions: Sequence[Distribution | None],
        facts: StatedFacts,
    ) -> bool:
        """Whether another statement with these arguments would be equal."""
        return (self.facts, self._distributions, self.items) == (facts, [*distributions], items)

    def tell(self, objects: StatedObjects) -> None:
        """State these objects, which are often others than in the last save, and not those before."""
        self.encoded.pop(self._objects, None)
        self._objects = self._keep(encode(objects, StatedObjects))

    def _keep(self, data: bytes) -> bytes:
        digest = hashlib.sha256(data).digest()[:16]
        self.encoded[digest] = data
        return digest

    def _follows(self, item: WriteItem, d: Distribution) -> bool:
        """Whether this rank's boxes of an item follow from a distribution."""
        at, shape = self._coordinate(d.mesh), item.info.shape
        return (
            at is not None
            and d.fits(shape)
            and d.boxes(shape, at) == tuple(b for b in item.boxes if b.size)
        )

    def _coordinate(self, mesh: RankMesh) -> tuple[int, ...] | None:
        if mesh not in self.coordinates:
            self.coordinates[mesh] = mesh.coordinate(self.rank)
        return self.coordinates[mesh]

    def summary(
        self, options: str, sums: PieceFingerprints | None, kept: tuple[bytes, Exceptions]
    ) -> Summary:
        """What this rank sends to rank 0 first.

        Args:
            sums: of its items (None: replicas are not compared).
            kept: the exceptions of the last save, and their digest.
        """
        whole = {
            digest: ((_digest(*(sums[n] for n in self.order[digest])), self.rank),)
            for digest, d in self.descriptions.items()
            if d.mesh is None and sums is not None
        }
        return Summary(
            options={options: self.rank},
            kept={kept[0]: self.rank},
            stated=dict.fromkeys(self.order, ((self.rank, self.rank + 1),)),
            facts={self._facts: self.rank},
            objects={self._objects: self.rank},
            balance=self._balance(sums, kept[1].left_out),
            sums=whole,
            compared=self.reply(AskedOfRanks((), kept[1].compared), sums),
        )

    def reply(self, question: AskedOfRanks, sums: PieceFingerprints | None) -> Replies:
        """What this rank answers to a question of rank 0."""
        sent = {digest: zlib.compress(self.encoded[digest], 1) for digest in question.digests}
        if sums is None:
            return Replies(sent)
        keys = self._number.keys() if question.everything else question.compared
        numbers = {key: n for key in keys if (n := self._number.get(key)) is not None}
        return Replies(
            sent,
            boxes={
                (key, box): ((row.tobytes(), self.rank),)
                for key, number in numbers.items()
                for box, row in zip(self.items[number].boxes, sums[number], strict=True)
            },
            wholes={
                (key, digest): sums[number].sum(0, np.uint64).tobytes()
                for key, number in numbers.items()
                if (digest := self._counted_in(number)) is not None
            },
        )

    def _counted_in(self, item: int) -> bytes | None:
        """The description of a mesh in which this rank is the first replica of its part of an item."""
        digest, number = self._place[item]
        description = self.descriptions.get(digest)
        if description is None or description.mesh is None:
            return None
        at = self._coordinate(description.mesh)
        assert at is not None  # noqa: S101 - this rank holds what it states
        d = description.distributions[description.rows[number].distribution]
        return None if d.copy_of(at) else digest

    def _balance(
        self, sums: PieceFingerprints | None, left_out: Mapping[bytes, tuple[int, ...]]
    ) -> int:
        """Hashes of what this rank holds as a replica, negative and multiplied for the first."""
        total = 0
        if sums is None:
            return total
        for digest, d, numbers in self._replicated:
            at = self._coordinate(d.mesh)
            assert at is not None  # noqa: S101 - this rank holds what it states
            out, order = left_out.get(digest, ()), self.order[digest]
            written = [sums[order[n]] for n in numbers if n not in out]
            if not written:  # a mesh of which a rank is missing has no balance
                continue
            own = _hash(np.frombuffer(digest, np.uint8), *written)
            total += own * (1 if d.copy_of(at) else 1 - d.copies)
        return total % HASHES

    def by_description(self, fingerprints: bytes) -> dict[bytes, bytes]:
        """Sums by item, as `packed_sums` has them, by the rows of each description instead."""
        sums = np.frombuffer(fingerprints, "<u8").reshape(-1, LANES)
        return {digest: sums[list(order)].tobytes() for digest, order in self.order.items()}

    def sums(
        self,
        exceptions: Exceptions,
        kinds: Iterable[StoredAs],
        fingerprint: Callable[[int, int], Sums],
    ) -> dict[bytes, bytes]:
        """The fingerprints of what this rank writes of some kinds, added up by the rows of each description.

        Args:
            fingerprint: that of an (item, piece).
        """
        parts = (
            (item, fingerprint(item, piece))
            for kind in kinds
            for item, piece in self.pieces(exceptions, kind)
        )
        return self.by_description(packed_sums(parts, len(self.items)))

    def pieces(self, exceptions: Exceptions, kind: StoredAs) -> list[tuple[int, int]]:
        """The (item, piece) of a kind that this rank writes, in file order: described ones first."""
        own_rows: list[tuple[int, WrittenRow]] = []
        for digest, description in self.descriptions.items():
            own_copy: dict[int, int] = {}  # by the identity of a distribution; -1: not in its mesh
            for written in written_rows(description, digest, exceptions, kind):
                d = written.distribution
                if (copy := own_copy.get(id(d))) is None:
                    at = self._coordinate(d.mesh)
                    copy = own_copy[id(d)] = -1 if at is None else d.copy_of(at)
                if copy == written.writer:
                    own_rows.append((self.order[digest][written.number], written))
        order = FileOrder()
        own_rows.sort(key=lambda m: order(m[1].row.info, m[1].distribution))
        described = [
            (item, p)
            for item, _ in own_rows
            for p, b in enumerate(self.items[item].boxes)
            if b.size
        ]
        return described + self.listed_pieces(exceptions, kind)

    def listed_pieces(self, exceptions: Exceptions, kind: StoredAs) -> list[tuple[int, int]]:
        """The (item, piece) of listed tensors that this rank writes, last in its file."""
        return [
            (number, self.items[number].boxes.index(box))
            for tensor, boxes in exceptions.box_lists(kind)
            for number in (self._number.get(tensor.info.key, -1),)
            for box in boxes.boxes(tensor.info.shape, (self.rank,))
        ]

    def shared(self, exceptions: Exceptions, kind: StoredAs) -> Iterator[list[SharedRow]]:
        """The tensors of each description, in the same order on all ranks; then the listed ones."""
        for digest in sorted(self.descriptions):
            description, order = self.descriptions[digest], self.order[digest]
            distributions = distributions_of(description, digest, exceptions)
            yield [
                SharedRow(order[number], row.info, distributions[row.distribution])
                for number, row in chosen_rows(description, digest, exceptions, kind)
            ]
        yield [
            SharedRow(self._number.get(tensor.info.key, -1), tensor.info, boxes)
            for tensor, boxes in exceptions.box_lists(kind)
        ]


def _replicated(description: Description) -> Iterable[tuple[Distribution, list[int]]]:
    """The rows of a mesh that are replicated over the same axes, and a distribution that is."""
    by_axes: dict[tuple[int, ...], tuple[Distribution, list[int]]] = {}
    for number, row in enumerate(description.rows if description.mesh else ()):
        d = description.distributions[row.distribution]
        if d.copies > 1:
            by_axes.setdefault(d.replicas, (d, []))[1].append(number)
    return by_axes.values()


def distributions_of(
    description: Description, digest: bytes, exceptions: Exceptions
) -> tuple[Distribution, ...]:
    """The distributions of a description; without a mesh one, with replicas on all its ranks."""
    if description.mesh is not None:
        return description.distributions
    ranks = [rank for a, b in exceptions.whole[digest] for rank in range(a, b)]
    return (Distribution(RankMesh.of((len(ranks),), ranks)),)


def chosen_rows(
    description: Description, digest: bytes, exceptions: Exceptions, kind: StoredAs
) -> list[tuple[int, Row]]:
    """The rows of one kind that the ranks of a description write, with their numbers."""
    if kind == "array" and exceptions.packed == "all":
        return []
    if kind == "weight" and not any(map(attrgetter("weight"), description.rows)):
        return []
    left_out = set(exceptions.left_out.get(digest, ()))
    return [
        (number, row)
        for number, row in enumerate(description.rows)
        if number not in left_out and exceptions.stored_as(row) == kind
    ]


def written_rows(
    description: Description, digest: bytes, exceptions: Exceptions, kind: StoredAs
) -> Iterator[WrittenRow]:
    """The rows of a kind that ranks write, balanced by bytes over the replicas of each part."""
    distributions = distributions_of(description, digest, exceptions)
    loads: dict[tuple[int, ...], list[tuple[int, int]]] = {}  # by axes of replicas: bytes, replica
    for d in distributions:
        if d.replicas not in loads:
            loads[d.replicas] = [(0, replica) for replica in range(d.copies)]
    by_distribution = [(d, loads[d.replicas], d.copies) for d in distributions]

    def largest_first(numbered: tuple[int, Row]) -> tuple[int, str, str]:
        info = numbered[1].info
        return (-info.nbytes, info.name, info.state)

    rows = chosen_rows(description, digest, exceptions, kind)
    if any(d.copies > 1 for d in distributions):
        rows.sort(key=largest_first)
    for number, row in rows:
        d, heap, copies = by_distribution[row.distribution]
        nbytes, writer = heap[0]
        if copies > 1:
            heapq.heapreplace(heap, (nbytes + row.info.nbytes * copies // d.mesh.size, writer))
        yield WrittenRow(number, row, d, writer)


def _digest(*parts: NDArray[Any]) -> bytes:
    state = hashlib.sha256()
    for part in parts:
        state.update(np.ascontiguousarray(part).data)
    return state.digest()[:16]


def _hash(*parts: NDArray[Any]) -> int:
    return int.from_bytes(_digest(*parts)[:8], "little") % HASHES
