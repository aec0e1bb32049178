"""Reads once what several ranks want: one of them reads each part, and the others get it from that rank.

The ranks find out by digests which parts they have in common, and one of them deals these. They
read in rounds: the parts of a round are exchanged while those of the next one are read. Ranks of
one host read into memory that all of them map, and each copies what it wants from there; replicas
that the user names broadcast over their process group.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import blake2b
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ucformat.checkpoint import Checkpoint
from ucformat.errors import NotFound
from ucformat.references import open_reference, open_watched
from ucformat.storage.base import Info, content_version
from ucformat.storage.cache.scope import read_consistently
from ucformat.storage.url import path_text
from ucformat.storage.wrappers import WatchedStore
from ucformat.torch.comm.wire import message
from ucformat.torch.loading.read import (
    ReadAmount,
    check_targets,
    parts_of,
    read_checked,
    room,
    stored_in,
    target_of,
)
from ucformat.torch.state.elements import SharedMemory, SharedRange, map_range
from ucformat.torch.state.memory import keep_current_device, synchronize

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from ucformat.reading.execute import ReadOptions
    from ucformat.storage.base import Store
    from ucformat.torch.comm.group import Group
    from ucformat.torch.loading.match import Matched


# The documents of a checkpoint, read by one process for many.
#
# All ranks of a job open the same checkpoint, and make the same requests for it. One of them
# remembers the answers; the others get them, and request only what is not among them.


class StoreCall(NamedTuple):
    """A request to a store.

    Attributes:
        call: `info`, `read`, `list`, or `begin` for the first entries of a listing that was not
            read to its end.
        nbytes: of a read; -1: to the end of the file.
    """

    store: str
    call: str
    key: str
    offset: int = 0
    nbytes: int = -1


#: What a store has answered: bytes, the files of a listing, one file, or None if there is no such
#: file.
Answer = bytes | tuple[Info, ...] | None


class RememberingStore(WatchedStore):
    """A watched store that asks each question once: those for bytes until `forget_bytes` is called, others always.

    Files that are known from `answers` alone are not compared at the end: that is for the process
    that has read them.
    """

    def __init__(self, inner: Store, answers: dict[StoreCall, Answer]) -> None:
        super().__init__(inner)
        self._answers = answers
        self._keeps_bytes = True

    def forget_bytes(self) -> None:
        """Read from the inner store from now on; files that were looked up or listed stay known."""
        self._keeps_bytes = False
        self._answers = {q: a for q, a in self._answers.items() if q.call != "read"}

    def info(self, key: str) -> Info:
        """See Store."""
        question = StoreCall(self.url, "info", key)
        if question not in self._answers:
            try:
                self._answers[question] = (super().info(key),)
            except NotFound:
                self._answers[question] = None
        answer = self._answers[question]
        if not isinstance(answer, tuple):
            raise NotFound(f"{self.url}/{key} does not exist")
        return self._keep_version(answer[0])

    def _keep_version(self, info: Info) -> Info:
        """Keep the version of a file as one that was listed, unless each host may have a disk of its own."""
        if not self.is_local:
            self._seen.setdefault(info.key, info)
        return info

    def list(self, prefix: str = "") -> Iterator[Info]:
        """See Store."""
        whole, begin = StoreCall(self.url, "list", prefix), StoreCall(self.url, "begin", prefix)
        answers = self._answers
        first = answers.get(whole, answers.get(begin))
        first = first if isinstance(first, tuple) else ()
        yield from map(self._keep_version, first)
        if whole in answers:
            return
        keys, listed, question = {info.key for info in first}, [], begin
        try:
            for info in super().list(prefix):
                listed.append(info)
                if info.key not in keys:
                    yield info
            question = whole
        finally:
            answers[question] = tuple(listed)

    def read(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """See Store."""
        if not self._keeps_bytes:
            return super().read(key, offset, nbytes)
        question = StoreCall(self.url, "read", key, offset, -1 if nbytes is None else nbytes)
        answer = self._answers.get(question)
        if isinstance(answer, bytes):
            return answer
        data = self._answers[question] = super().read(key, offset, nbytes)
        return data

    def read_versioned(self, key: str) -> tuple[bytes, str]:
        """See Store."""
        if not self._keeps_bytes:
            return super().read_versioned(key)
        question = StoreCall(self.url, "read", key)
        if question not in self._answers:
            try:
                self._answers[question] = super().read_versioned(key)[0]
            except NotFound:
                self._answers[question] = None
        answer = self._answers[question]
        if not isinstance(answer, bytes):
            raise NotFound(f"{self.url}/{key} does not exist")
        return answer, content_version(answer)


# Opens a checkpoint on all ranks of a job, of which one reads its documents.


@message
class _Opened:
    """What rank 0 has opened.

    Attributes:
        answers: of its store, while the checkpoint was opened.
    """

    place: str
    answers: Mapping[StoreCall, Answer]


def open_together(
    place: str | PathLike[str] | Checkpoint,
    ranks: Group,
    known: Collection[str] = (),
    *,
    more: bool = False,
    store: Store | None = None,
) -> Checkpoint:
    """Open a checkpoint on all ranks, which call this together.

    If all ranks name the same place, rank 0 alone looks it up in the catalog and reads the
    manifest, the sidecar and the objects, or what tells the structure of a foreign checkpoint, and
    the others get what it has read. So a job makes as many requests as one process, and all ranks
    open the same checkpoint even if another one is committed meanwhile.

    Args:
        known: the ids of bases of which nothing will be read.
        more: the caller goes on with a collective, by which ranks learn that another one has
            failed (False: they learn it here).
        store: through which this rank reads the place, which is a url (default: the place's own).
    """
    place_name = None if isinstance(place, Checkpoint) else path_text(place)
    if isinstance(place, PathLike) and not Path(place).is_absolute():
        place_name = f"./{place_name}"  # and no reference to the catalog
    checkpoint: Checkpoint | None = None

    def read(common_name: str | None) -> _Opened | None:
        nonlocal checkpoint
        if common_name is None:
            return None
        answers: dict[StoreCall, Answer] = {}
        checkpoint, url = _open(store or common_name, answers, known)
        return _Opened(url if isinstance(url, str) else common_name, answers)

    if ranks.size == 1:
        return place if isinstance(place, Checkpoint) else open_reference(store or place)
    opened: _Opened | None = ranks.combine(place_name, _if_equal, str | None, read, _Opened | None)
    failure: Exception | None = None
    try:
        if opened is None:
            checkpoint = place if isinstance(place, Checkpoint) else open_reference(place)
        elif ranks.rank:
            checkpoint, _ = _open(store or opened.place, dict(opened.answers), known)
    except Exception as error:  # noqa: BLE001 - raised on all ranks
        failure = error
    if failure is not None or not more:
        ranks.combine(failure)
    assert checkpoint is not None  # noqa: S101 - no rank failed
    return checkpoint


def _if_equal(a: str | None, b: str | None) -> str | None:
    return a if a == b else None


def _open(
    place: str | Store, answers: dict[StoreCall, Answer], known: Collection[str]
) -> tuple[Checkpoint, str | Store]:
    return read_consistently(lambda: _read_documents(place, answers, known), optimistic=False)


def _read_documents(
    place: str | Store, answers: dict[StoreCall, Answer], known: Collection[str]
) -> tuple[Checkpoint, str | Store]:
    stores: list[RememberingStore] = []

    def watch(store: Store) -> RememberingStore:
        stores.append(RememberingStore(store, answers))
        return stores[-1]

    ck, url = open_watched(place, watch)
    # what every load needs, read here so that the answers include it
    _ = ck.objects, ck.id
    if ck.universal is not None:
        ck.universal.read_documents(known)
    for store in stores:
        store.forget_bytes()
    return ck, url


#: Bytes that each rank reads in a round, unless a part is larger.
_ROUND_BYTES = 32 << 20
#: Rounds for which there is memory: one is exchanged while the others are read, so that requests
#: are always in flight.
_ROUNDS = 4
#: A rank reads consecutive parts of so many bytes before it is another one's turn, so that small
#: tensors that are stored side by side are read by one request.
_TURN_BYTES = 8 << 20
_DIGEST_BYTES = 16


class AnotherRankFailed(Exception):
    """Another rank failed, and tells why in its next collective."""


@message
class _Wants:
    """Parts that ranks want, in the order of ranks: digest, bytes in a buffer, position among those of a rank, rank."""

    digests: bytes
    nbytes: NDArray[np.int64]
    positions: NDArray[np.int64]
    ranks: NDArray[np.int32]


@message
class _SharedParts:
    """The shared parts in the order in which they are read: digest, bytes in a buffer, and the rank that reads it."""

    digests: bytes
    nbytes: NDArray[np.int64]
    readers: NDArray[np.int32]


class _Shared(NamedTuple):
    """A shared part: its digest, the target if this rank wants it, who reads it, and `[start, stop)` in a buffer."""

    digest: bytes
    part: Matched | None
    reader: int
    start: int
    stop: int


class _Exchange(Protocol):
    """How shared parts get from their readers to the others."""

    def place(self, number: int, shared: _Shared) -> Matched:
        """Return where a part of a round is read."""

    def fill(self, number: int, shared: Sequence[_Shared]) -> None:
        """Fill the targets of a round, all of which has been read."""


class Fill(Protocol):
    """Fills targets, together with the other ranks."""

    def __call__(
        self,
        ck: Checkpoint,
        matched: Sequence[Matched],
        ranks: Group,
        replicas: dist.ProcessGroup | None,
        options: ReadOptions,
    ) -> ReadAmount:
        """See `read_shared`."""


def read_shared(
    ck: Checkpoint,
    matched: Sequence[Matched],
    ranks: Group,
    replicas: dist.ProcessGroup | None,
    options: ReadOptions,
) -> ReadAmount:
    """Fill targets; what several ranks want is read by one of them, balanced by bytes. All ranks call this.

    Args:
        replicas: the process group over which parts are broadcast that all of its ranks want; its
            backend must support the devices of the targets (None: the ranks share memory, and parts
            that any two of them want).
    """
    failure: BaseException | None = None
    cut: list[dict[bytes, Matched]] = [{} for _ in matched]
    try:
        check_targets(matched)
        synchronize(m.target.tensor for m in matched)  # kernels of the training may still use them
        costs = ck.store.costs
        # no page cache keeps for one rank what another has read
        uncached = costs.parallel is not None or costs.in_flight is not None
        if replicas is not None or (ranks.size > 1 and uncached):
            cut = _cut(ck, matched, by_target=replicas is not None)
    except Exception as error:  # noqa: BLE001 - the other ranks wait for this one
        failure = error
    own_parts = {digest: part for parts in cut for digest, part in parts.items()}
    min_ranks = 2 if replicas is None else ranks.size
    dealt = ranks.combine(
        _wants(own_parts, ranks.rank),
        _joined,
        _Wants,
        lambda wants: _deal(wants, min_ranks),
        _SharedParts,
    )
    rounds = list(_rounds(dealt, own_parts, _ROUND_BYTES * ranks.size))
    exchange: _Exchange | None = (
        _Broadcast(replicas) if replicas is not None else _HostMemory.of(ranks, rounds)
    )
    total, shared_digests = ReadAmount(), set[bytes]()
    if exchange is not None:
        total = _read_rounds(
            ranks, rounds, exchange, lambda places: read_checked(ck, places, options), failure
        )
        shared_digests = {s.digest for shared in rounds for s in shared}
    if failure is not None:
        raise failure
    own_targets: list[Matched] = []
    for m, parts in zip(matched, cut, strict=True):
        unshared = [part for digest, part in parts.items() if digest not in shared_digests]
        own_targets += [m] if len(unshared) == len(parts) else unshared
    return total.plus(read_checked(ck, own_targets, options))


def _read_rounds(
    ranks: Group,
    rounds: Sequence[Sequence[_Shared]],
    exchange: _Exchange,
    read_into: Callable[[list[Matched]], ReadAmount],
    failure: BaseException | None,
) -> ReadAmount:
    """Read this rank's parts, those of a round while the parts of the one before are exchanged; all ranks call this."""
    total = ReadAmount()
    with ThreadPoolExecutor(_ROUNDS - 1, "ucformat-share", keep_current_device()) as pool:

        def begin(number: int) -> Future[ReadAmount]:
            own = [s for s in rounds[number] if s.reader == ranks.rank]
            return pool.submit(lambda: read_into([exchange.place(number, s) for s in own]))

        reading = [begin(number) for number in range(len(rounds))[: _ROUNDS - 1]]
        for number, shared in enumerate(rounds):
            failure = failure or reading[0].exception()
            if ranks.combine(failure is not None, operator.or_, bool):
                raise failure or AnotherRankFailed
            total = total.plus(reading.pop(0).result())
            # All ranks have taken what they want from the round before, so another one can be read
            # in its place.
            reading += [
                begin(later)
                for later in range(len(rounds))[number + _ROUNDS - 1 : number + _ROUNDS]
            ]
            try:
                exchange.fill(number, shared)
            except Exception as error:  # noqa: BLE001 - the other ranks wait for this one
                failure = error
    if failure is not None:
        raise failure
    return total


def _cut(
    ck: Checkpoint, matched: Sequence[Matched], *, by_target: bool
) -> list[dict[bytes, Matched]]:
    """The parts of each target by digest; equal ones of two targets differ by their number.

    What is broadcast are elements of the target, so its dtype counts.
    """
    counts: Counter[tuple[object, ...]] = Counter()
    out = []
    for m in matched:
        parts: dict[bytes, Matched] = {}
        for part in parts_of(ck, m):
            (piece,), stored = part.target.pieces, part.stored
            dtype = m.target.info.dtype if by_target else stored.dtype
            identity = (
                ck.id,
                stored.name,
                stored.state,
                stored.shape,
                dtype,
                piece.box.start,
                piece.box.shape,
            )
            counts[identity] += 1
            parts[
                blake2b(
                    repr((*identity, counts[identity])).encode(), digest_size=_DIGEST_BYTES
                ).digest()
            ] = part
        out.append(parts)
    return out


def _wants(own_parts: Mapping[bytes, Matched], rank: int) -> _Wants:
    count = len(own_parts)
    nbytes = np.fromiter(map(room, own_parts.values()), np.int64, count)
    return _Wants(b"".join(own_parts), nbytes, np.arange(count), np.full(count, rank, np.int32))


def _joined(a: _Wants, b: _Wants) -> _Wants:
    return _Wants(
        a.digests + b.digests,
        np.concatenate([a.nbytes, b.nbytes]),
        np.concatenate([a.positions, b.positions]),
        np.concatenate([a.ranks, b.ranks]),
    )


def _split(digests: bytes) -> list[bytes]:
    return [digests[at : at + _DIGEST_BYTES] for at in range(0, len(digests), _DIGEST_BYTES)]


def _deal(wants: _Wants, min_ranks: int) -> _SharedParts:
    """Deal the parts that at least so many ranks want, in the order in which the first of these has them."""
    rows: dict[bytes, list[int]] = {}
    for row, digest in enumerate(_split(wants.digests)):
        rows.setdefault(digest, []).append(row)
    nbytes, ranks = wants.nbytes.tolist(), wants.ranks.tolist()
    shared = {
        digest: digest_rows for digest, digest_rows in rows.items() if len(digest_rows) >= min_ranks
    }
    order = sorted(shared, key=lambda digest: wants.positions[shared[digest][0]])
    loads: Counter[int] = Counter()
    readers = []
    for digest in order:
        first, *_ = digest_rows = shared[digest]
        reader = min((ranks[row] for row in digest_rows), key=lambda r: loads[r] // _TURN_BYTES)
        loads[reader] += nbytes[first]
        readers.append(reader)
    sizes = [nbytes[shared[digest][0]] for digest in order]
    return _SharedParts(b"".join(order), np.array(sizes, np.int64), np.array(readers, np.int32))


def _rounds(
    dealt: _SharedParts, own_parts: Mapping[bytes, Matched], round_bytes: int
) -> Iterator[list[_Shared]]:
    """The parts of each round, of at most so many bytes unless one part is larger."""
    shared: list[_Shared] = []
    for digest, nbytes, reader in zip(
        _split(dealt.digests), dealt.nbytes.tolist(), dealt.readers.tolist(), strict=True
    ):
        start = shared[-1].stop if shared else 0
        if start and start + nbytes > round_bytes:
            yield shared
            shared, start = [], 0
        shared.append(_Shared(digest, own_parts.get(digest), reader, start, start + nbytes))
    if shared:
        yield shared


class _Broadcast:
    """Readers read into their targets, and broadcast them over a process group."""

    def __init__(self, replicas: dist.ProcessGroup) -> None:
        self._replicas = replicas

    def place(self, _: int, shared: _Shared) -> Matched:
        assert shared.part is not None  # noqa: S101 - all ranks want it
        return shared.part

    def fill(self, number: int, shared: Sequence[_Shared]) -> None:
        targets = [target_of(self.place(number, s)) for s in shared]
        for s, target in zip(shared, targets, strict=True):
            dense = target if target.is_contiguous() else target.contiguous()
            # As bytes, since not every backend supports every dtype; `view` refuses some strides of
            # single elements.
            flat = dense.as_strided((dense.numel(),), (1,))
            dist.broadcast(flat.view(torch.uint8), group=self._replicas, group_src=s.reader)
            if dense is not target:
                target.copy_(dense)
        synchronize(targets)  # a broadcast on a device is asynchronous


class _HostMemory:
    """Readers read into memory that all ranks of the host map.

    Args:
        step: bytes for a round; the memory is used in a circle.
    """

    def __init__(self, memory: torch.Tensor, step: int) -> None:
        self._memory, self._step = memory, step

    @classmethod
    def of(cls, ranks: Group, rounds: Sequence[Sequence[_Shared]]) -> Self | None:
        """Share memory; None if there is nothing to read, or one of the ranks may not use the memory of another."""
        if not rounds:
            return None
        step = max(shared[-1].stop for shared in rounds)
        nbytes = step * min(len(rounds), _ROUNDS)
        own_memory: list[SharedMemory] = []

        def make(_: None) -> SharedRange:
            own_memory.append(SharedMemory(nbytes))
            return own_memory[0].range(0, nbytes)

        shared_range = ranks.combine(None, then=make, answer_kind=SharedRange)
        memory = own_memory[0].memory if own_memory else map_range(shared_range)
        usable = ranks.combine(memory is not None and shared_range.pid > 0, operator.and_, bool)
        # `memory` and the other ranks keep their mappings of it
        for shared_memory in own_memory:
            shared_memory.close()
        return cls(torch.from_numpy(memory), step) if usable else None

    def place(self, number: int, shared: _Shared) -> Matched:
        assert shared.part is not None  # noqa: S101 - only ranks that want it read it
        return stored_in(self._memory, number % _ROUNDS * self._step + shared.start, shared.part)

    def fill(self, number: int, shared: Sequence[_Shared]) -> None:
        copies = [
            (target_of(s.part), self.place(number, s).target.tensor)
            for s in shared
            if s.part is not None
        ]
        for target, stored in copies:
            target.copy_(stored, non_blocking=True)
        synchronize(target for target, _ in copies)  # other parts are read into this memory next
