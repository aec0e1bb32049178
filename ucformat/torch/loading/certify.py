"""`certify`: compares what all ranks hold with what a checkpoint has, by fingerprints, without reading it.

Each rank computes the fingerprint of what it holds of each tensor. What the ranks of a mesh hold adds
up, replicas once; what a rank holds whole it compares alone. Only what then is in doubt, is cast, or
has no fingerprint in the checkpoint is compared with the stored elements, which names the ranks.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from itertools import count
from operator import or_
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, Unpack, cast

import numpy as np
import torch
from numpy.typing import NDArray

from ucformat.errors import CoverageError, UsageError, check_keywords
from ucformat.geometry.box import Box
from ucformat.geometry.coverage import prove
from ucformat.geometry.fingerprint import (
    MODULUS,
    NO_ELEMENTS,
    packed_sums,
    text_of,
    total,
    unpacked_sums,
)
from ucformat.jobs.record import record_certificate
from ucformat.reading.execute import ReadOptions
from ucformat.torch.certificate import Certificate, CertificateEntry, Verdict
from ucformat.torch.comm.group import TIMEOUT, group_for_call
from ucformat.torch.comm.merging import Ranges, adjoined, merged
from ucformat.torch.comm.wire import message
from ucformat.torch.loading.align import align
from ucformat.torch.loading.arguments import LoadOptions
from ucformat.torch.loading.find import is_inside, is_named, left_by_all
from ucformat.torch.loading.match import (
    PARAMETER,
    AskedTensors,
    Matched,
    Problems,
    asked_tensors,
    match,
    renamed_keys,
)
from ucformat.torch.loading.read import read_staged
from ucformat.torch.loading.share import open_together
from ucformat.torch.state.fingerprint import piece_in, pieces_fingerprints
from ucformat.torch.state.local import mesh_of
from ucformat.torch.state.memory import synchronize

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence
    from os import PathLike

    import torch.distributed as dist

    from ucformat.checkpoint import Checkpoint
    from ucformat.geometry.distribution import Distribution
    from ucformat.geometry.fingerprint import Sums
    from ucformat.geometry.tensor import Key, TensorInfo
    from ucformat.torch.comm.group import Group
    from ucformat.torch.loading.match import Rename
    from ucformat.torch.loading.values import FittedValues
    from ucformat.torch.state.local import LocalShard

__all__ = ["certify"]

Numbers = NDArray[np.int64]  # of tensors of the checkpoint, ascending


class CertifyArguments(TypedDict, total=False):
    """The arguments of `certify` besides the state and the checkpoint.

    Attributes:
        rename: as for `load`.
        names: as for `load`.
        leave: what of the checkpoint the state need not have, as for `load`.
        cast: accept tensors of other dtypes than the stored ones, if they are equal to these cast
            likewise (default: no).
        strict_step: False accepts tensors of which an earlier state is stored, and that are equal to
            it, as for `load`.
        trust: unpickle opaque objects, which may run code (default: no).
        threads: how many threads compute on this rank, and read if something must be read
            (default: one for each core, and as many as the storage can use).
        group: the ranks that take part (default: all).
        timeout: seconds after which an unresponsive rank is considered dead (default 1800).
    """

    rename: Rename | None
    names: Mapping[str, int] | None
    leave: str | Iterable[str]
    cast: bool
    strict_step: bool | None
    trust: bool
    threads: int | None
    group: dist.ProcessGroup | None
    timeout: float


def certify(
    state: Mapping[str, Any],
    ref: str | PathLike[str] | Checkpoint,
    **arguments: Unpack[CertifyArguments],
) -> Certificate:
    """Compare what all ranks hold now with what a checkpoint has; all ranks call this together.

    Nothing is changed. Tensors of which the checkpoint records fingerprints are not read. The
    certificate is recorded in the catalog.

    Args:
        state: as for `load`: the live modules, optimizers, EMA, schedulers and `Rng()`. With the
            model alone, only weights are compared.
        ref: a checkpoint of any kind that `ucformat.open` opens, a reference to one, or an open
            checkpoint.
        arguments: those of `CertifyArguments`, by keyword.

    Returns:
        the certificate, the same on all ranks; true if everything is equal.

    Raises:
        UcformatError: a rank failed or died. Every rank gets the same error.
    """
    check_keywords("certify", arguments, CertifyArguments)
    timeout = arguments.get("timeout", TIMEOUT)
    with group_for_call("certify", ref, arguments.get("group"), timeout) as ranks:
        ck = open_together(ref, ranks, more=True)
        return certify_state(state, ck, ranks, LoadOptions.of("report", cast("Any", arguments)))


def certify_state(
    state: Mapping[str, Any],
    ck: Checkpoint,
    ranks: Group,
    options: LoadOptions,
    *,
    record: bool = True,
) -> Certificate:
    """Compare what the ranks of a group hold; see `certify`.

    Args:
        record: the certificate in the catalog.
    """
    begun = time.monotonic()
    with ranks.sharing_errors():
        aligned = align(state, ck, ranks, options, to_fill=False)
        collected, names = aligned.collected, aligned.recorded.names
        live = LiveState(
            aligned.targets,
            aligned.aliases,
            aligned.problems,
            (aligned.objects, aligned.groups),
            frozenset(
                names.get(name, name)
                for root, groups in collected.groups.items()
                for group in groups
                for name in (collected.prefixes.get(root, "") + param for param in group.params)
            ),
            mesh_of(collected.tensors.values()),
            optimizer=aligned.has_optimizer,
            asked=aligned.entries,
        )
    return certify_local(live, ck, ranks, options, names, begun, record=record)


@dataclass(frozen=True, slots=True)
class LiveState:
    """What one rank holds, of any engine.

    Attributes:
        aliases: further names of tied tensors.
        problems: those that were found before.
        values: plain values as they are now and as they were saved.
        optimized: the stored names of the parameters that optimizers have.
        layout: that of the state.
        optimizer: whether the state has an optimizer.
        asked: the entries of the saved state that are asked for.
        rounded: tensors that an engine rounds to their dtypes, which is no difference.
    """

    tensors: Sequence[LocalShard]
    aliases: Mapping[str, str] = field(default_factory=dict)
    problems: Problems = field(default_factory=Problems)
    values: Sequence[FittedValues] = ()
    optimized: frozenset[str] = frozenset()
    layout: Mapping[str, Any] = field(default_factory=dict)
    optimizer: bool = False
    asked: Sequence[str] = ()
    rounded: frozenset[Key] = frozenset()


def certify_local(
    live: LiveState,
    ck: Checkpoint,
    ranks: Group,
    options: LoadOptions,
    names: Mapping[str, str],
    begun: float,
    *,
    record: bool = True,
) -> Certificate:
    """Compare what this rank and the others of a group hold; see `certify`."""
    may_be_older = ck.metadata.older_allowed or options.strict_step is False
    ck = ck.with_lossy().with_older()  # which are compared, and not taken
    with ranks.sharing_errors():
        comparison = _Comparison(live, ck, ranks, options, names)
        statement = comparison.statement()
    in_doubt: _InDoubt = ranks.combine(statement, _joined, _Statement, comparison.doubts, _InDoubt)
    with ranks.sharing_errors():
        report = comparison.compared(in_doubt)
    result: _Result = ranks.combine(report, _joined_reports, _Report, comparison.result, _Result)
    certificate = Certificate(
        ck.url,
        ck.id,
        ck.metadata.step,
        result.created,
        {"world": ranks.size} | dict(result.layout),
        result.values,
        result.left,
        comparison.nbytes,
        time.monotonic() - begun,
        options.cast,
        may_be_older=may_be_older,
        **comparison.entries(result),
    )
    if certificate and not (certificate.equal or certificate.older or certificate.values):
        raise UsageError(
            f"no rank has anything in its state that could be compared with {ck.url}",
            hint="pass the state that training goes on from",
        )
    if record and not ranks.rank:
        record_certificate(ck, certificate.document(), ok=bool(certificate))
    return certificate


class _Finding(NamedTuple):
    """What is not equal: a tensor of the state, or a value, which has no state."""

    verdict: str
    name: str
    state: str
    detail: str = ""


@message
class _Sums:
    """What ranks hold of tensors that one distribution cuts alike.

    Attributes:
        values: of each tensor the fingerprint, replicas once; a balance, which is 0 if replicas have
            equal fingerprints; and how many elements were counted.
    """

    numbers: Numbers
    values: NDArray[np.uint64]


@message
class _Holders:
    """The ranks that hold something of tensors."""

    numbers: Numbers
    ranks: Ranges


@message
class _Statement:
    """What some consecutive ranks hold.

    Attributes:
        entries: those of the saved state that are asked for.
        left: lines for the values that are asked for, and that no rank has.
        matched: a bit for each tensor of the checkpoint, whether a rank has a place for a part of it,
            perhaps an empty one.
        whole: whether one of them holds all of it, as it is stored or not.
        stateless: whether an optimizer of theirs has its parameter.
        sums: by distribution, in the form of a digest.
        boxes: the fingerprint of each box of which no distribution is known.
        doubtful: tensors that are different on a rank that holds them whole, or of which ranks hold
            different values in one box.
    """

    findings: Mapping[_Finding, Ranges]
    tensors: AskedTensors
    entries: tuple[str, ...]
    left: tuple[str, ...]
    matched: NDArray[np.uint8]
    whole: NDArray[np.uint8]
    stateless: NDArray[np.uint8]
    holders: Mapping[bytes, _Holders]
    sums: Mapping[bytes, _Sums]
    boxes: Mapping[tuple[int, Box], bytes]
    doubtful: frozenset[int]
    layout: Mapping[str, Any]
    values: int


@message
class _InDoubt:
    """What ranks must compare with the stored elements.

    Attributes:
        uncovered: tensors of which it is not known whether the ranks hold all elements.
    """

    numbers: frozenset[int]
    uncovered: frozenset[int]


@message
class _Report:
    """What comparing with the stored elements told some consecutive ranks.

    Attributes:
        different: the ranks that hold other elements, and a line about the first of these ranks.
        cast: the ranks that hold tensors of other dtypes, and a line about these.
        boxes: what the ranks hold of tensors that are perhaps not covered.
    """

    different: Mapping[int, tuple[str, Ranges]]
    cast: Mapping[int, tuple[str, Ranges]]
    boxes: Mapping[int, frozenset[Box]]


@message
class _Result:
    """What all ranks get."""

    created: datetime
    findings: Mapping[_Finding, Ranges]
    holders: Mapping[bytes, _Holders]
    unequal: frozenset[int]
    layout: Mapping[str, Any]
    values: int
    left: int


class _Comparison:
    def __init__(
        self,
        live: LiveState,
        ck: Checkpoint,
        ranks: Group,
        options: LoadOptions,
        names: Mapping[str, str],
    ) -> None:
        self.live, self.ck, self.ranks, self.options = live, ck, ranks, options
        self.names = names
        self.keys = list(ck.tensors)
        number = {key: n for n, key in enumerate(self.keys)}
        self.recorded = [ck.metadata.fingerprints.get(key) for key in self.keys]
        matched, self.problems, self.meant = match(live.tensors, live.aliases, ck, names, cast=True)
        if options.own_step:
            matched = [m for m in matched if m.stored.key not in ck.metadata.older]
        numbers = [number[m.stored.key] for m in matched]
        self.matched = list(zip(numbers, matched, strict=True))
        self.local = [
            _LocalTensor(
                n,
                m,
                by_sums=self.recorded[n] is not None and m.target.info.dtype == m.stored.dtype,
            )
            for n, m in self.matched
            if m.target.pieces or not m.target.info.size
        ]
        self.nbytes = sum(m.target.nbytes for m in matched)
        self.all: _Statement | None = None  # on rank 0, what all ranks hold

    # On every rank

    def statement(self) -> _Statement:
        """What this rank holds."""
        live, ck, rank = self.live, self.ck, self.ranks.rank
        asked = asked_tensors(
            ck,
            self.meant,
            live.tensors,
            optimizer=live.optimizer,
            inside=lambda key: is_inside(ck, key, live.asked),
        )
        stateless = [k.state not in PARAMETER and k.name in live.optimized for k in self.keys]
        synchronize(local.target.tensor for local in self.local)
        parts = _Parts(self)
        matched = np.zeros(len(self.keys), np.bool_)
        matched[[n for n, _ in self.matched]] = True
        findings = dict.fromkeys(self._findings(), ((rank, rank + 1),))
        numbers = np.array(sorted({local.number for local in self.local}), np.int64)
        holders = _Holders(numbers, ((rank, rank + 1),))
        return _Statement(
            findings,
            asked,
            tuple(live.asked),
            live.problems.unexpected,
            np.packbits(matched),
            np.packbits(parts.whole),
            np.packbits(np.array(stateless, np.bool_)),
            {hashlib.sha256(numbers.tobytes()).digest()[:16]: holders},
            {digest: _sums_of(rows) for digest, rows in parts.sums.items()},
            parts.boxes,
            frozenset(parts.doubtful),
            live.layout,
            sum(len(fitted.values) for fitted in live.values),
        )

    def _findings(self) -> Iterator[_Finding]:
        """What is not equal on this rank, apart from the elements of tensors."""
        problems = self.problems | self.live.problems
        lines_of_tensors = any((problems.missing, problems.shapes, problems.dtypes))
        keys = {str(t.key): t.key for t in self.live.tensors} if lines_of_tensors else {}
        for verdict, lines, separator in (
            ("missing", problems.missing, None),
            ("different", problems.shapes + problems.dtypes, " is "),
            ("different", problems.others + problems.inexact, ": "),
        ):
            for line in lines:
                label, _, detail = line.partition(separator) if separator else (line, "", "")
                if label in keys:
                    yield _Finding(verdict, *keys[label], f"it is {detail}" if detail else "")
                else:
                    yield _Finding(verdict, label, "", detail)
        for fitted in self.live.values:
            for label, detail in fitted.different():
                yield _Finding("different", label, "", detail)

    def compared(self, in_doubt: _InDoubt) -> _Report:
        """What this rank holds of what is in doubt, compared with the stored elements."""
        rank = (self.ranks.rank, self.ranks.rank + 1)
        chosen = [t for t in self.local if not t.by_sums or t.number in in_doubt.numbers]
        differences: dict[Key, _Difference] = {}

        def compare(part: Matched, stored: torch.Tensor) -> None:
            difference = _difference(part, stored)
            if difference is not None:
                key = part.target.key
                differences[key] = (
                    differences[key] + difference if key in differences else difference
                )

        options = ReadOptions("whole", threads=self.options.threads)
        read_staged(self.ck, [local.matched for local in chosen], options, compare)
        different: dict[int, tuple[str, Ranges]] = {}
        other_dtype: dict[int, tuple[str, Ranges]] = {}
        boxes: dict[int, frozenset[Box]] = {}
        for local in chosen:
            target, stored = local.matched.target, local.matched.stored
            if target.key in differences:
                different.setdefault(local.number, (differences[target.key].text, (rank,)))
            if target.info.dtype != stored.dtype and target.key not in self.live.rounded:
                text = f"it is {target.info.dtype}, in the checkpoint {stored.dtype}"
                other_dtype[local.number] = text, (rank,)
        for number, m in self.matched:
            if number in in_doubt.uncovered:
                own = {piece.box for piece in m.target.pieces}
                boxes[number] = boxes.get(number, frozenset()) | own
        return _Report(different, other_dtype, boxes)

    def entries(self, result: _Result) -> dict[Verdict, tuple[CertificateEntry, ...]]:
        """The entries of the certificate."""
        out: dict[Any, list[CertificateEntry]] = {}
        for finding, ranks in result.findings.items():
            entry = CertificateEntry(finding.name, finding.state, _listed(ranks), finding.detail)
            out.setdefault(finding.verdict, []).append(entry)
        ranks_of: dict[int, tuple[tuple[int, ...], ...]] = {}
        for holders in result.holders.values():
            listed = _listed(holders.ranks)
            for number in holders.numbers.tolist():
                ranks_of[number] = (*ranks_of.get(number, ()), listed)
        joined = {
            parts: tuple(sorted(rank for part in parts for rank in part))
            for parts in set(ranks_of.values())
        }
        equal = sorted(ranks_of.keys() - result.unequal)
        out["equal"], out["older"] = [], []
        for number, key in zip(equal, self._renamed(equal), strict=True):
            step = self.ck.metadata.older.get(self.keys[number])
            detail = "" if step is None else f"of step {step}"
            entry = CertificateEntry(*key, joined[ranks_of[number]], detail)
            out["equal" if step is None else "older"].append(entry)
        return {verdict: tuple(sorted(entries)) for verdict, entries in out.items()}

    def _renamed(self, numbers: Iterable[int]) -> list[Key]:
        """The names and states of stored tensors in the state."""
        return renamed_keys((self.keys[number] for number in numbers), self.names)

    # On rank 0

    def doubts(self, every: _Statement) -> _InDoubt:
        """What is in doubt after all ranks have stated what they hold."""
        self.all = every
        infos = list(self.ck.tensors.values())
        covered = set(np.flatnonzero(np.unpackbits(every.whole)).tolist())
        doubtful = set(every.doubtful)
        matched = set(np.flatnonzero(np.unpackbits(every.matched)).tolist())
        for digest, part in every.sums.items():
            for number, row in zip(part.numbers.tolist(), part.values.tolist(), strict=True):
                *sums, balance_low, balance_high, counted = row
                if counted == infos[number].size:
                    covered.add(number)
                if digest[:1] == _BY_SUMS and (
                    balance_low or balance_high or text_of(tuple(sums)) != self.recorded[number]
                ):
                    doubtful.add(number)
        boxes: dict[int, list[tuple[Box, Sums]]] = {}
        for (number, box), data in every.boxes.items():
            (sums,) = unpacked_sums(data)
            boxes.setdefault(number, []).append((box, sums))
        for number, parts in boxes.items():
            if _covers(infos[number], [box for box, _ in parts]):
                covered.add(number)
                if text_of(total(sums for _, sums in parts)) == self.recorded[number]:
                    continue
            doubtful.add(number)
        return _InDoubt(frozenset(doubtful), frozenset((matched - covered) | doubtful))

    def result(self, report: _Report) -> _Result:
        """The findings of all ranks."""
        every = self.all
        assert every is not None  # noqa: S101 - it comes first
        infos = list(self.ck.tensors.values())
        tensors: dict[int, tuple[Verdict, str, Ranges]] = {
            number: ("cast", *finding) for number, finding in report.cast.items()
        }
        for number, parts in report.boxes.items():
            if not _covers(infos[number], parts):
                tensors[number] = ("different", "no rank holds some of its elements", ())
        for number, (detail, ranks) in report.different.items():
            tensors[number] = ("different", detail, ranks)
        findings = dict(every.findings)
        findings |= {_Finding("unexpected", line, ""): () for line in every.left}
        for number, key in zip(tensors, self._renamed(tensors), strict=True):
            verdict, detail, ranks = tensors[number]
            findings[_Finding(verdict, *key, detail)] = ranks
        stored_count = len(self.keys)
        reported = _numbers_of(every.holders) | tensors.keys()
        stateless = np.unpackbits(every.stateless, count=stored_count)
        numbers = np.flatnonzero(every.tensors.unexpected(stored_count)).tolist()
        for number, key in zip(numbers, self._renamed(numbers), strict=True):
            if is_named(self.ck, self.keys[number], str(key), self.options.leave):
                continue
            verdict = "uninitialised" if stateless[number] else "unexpected"
            findings[_Finding(verdict, *key)] = ()
            reported.add(number)
        return _Result(
            datetime.now(UTC),
            findings,
            every.holders,
            frozenset(tensors),
            every.layout,
            every.values,
            stored_count - len(reported),
        )


@dataclass(frozen=True, slots=True)
class _Difference:
    """How many elements of a tensor on this rank are different, and a line about the first of them."""

    count: int
    first: str

    def __add__(self, other: _Difference) -> _Difference:
        return _Difference(self.count + other.count, self.first)

    @property
    def text(self) -> str:
        """A line for people."""
        return self.first if self.count == 1 else f"{self.first}; {self.count:,} elements differ"


def _difference(part: Matched, stored: torch.Tensor) -> _Difference | None:
    """What is different in a part of a tensor, compared with what is stored of it; None: nothing."""
    (piece,) = part.target.pieces
    tensor = part.target.tensor.detach()
    if tensor.device.type != "cpu":  # there, pieces are those of the tensor in row-major order
        tensor = tensor.contiguous()
    current = piece_in(tensor, piece)
    saved = stored.to(device=current.device, dtype=current.dtype)
    unequal = (_bytes_of(current) != _bytes_of(saved)).any(-1)
    different = int(unequal.sum())
    if not different:
        return None
    first = int(unequal.to(torch.uint8).argmax())
    index = [
        a + i
        for a, i in zip(piece.box.start, np.unravel_index(first, piece.box.shape), strict=True)
    ]
    now, then = (t.reshape(-1)[first].tolist() for t in (current, saved))
    if now == then:  # such as -0.0 and 0.0
        now, then = (_bytes_of(t)[first].tolist() for t in (current, saved))
        now, then = (f"the bytes {bytes(n).hex()}" for n in (now, then))
    return _Difference(
        different, f"the element at {list(map(int, index))} is {now}, in the checkpoint {then}"
    )


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of each element."""
    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8).reshape(-1, tensor.element_size())


_BY_SUMS, _COUNTED = b"s", b"c"  # how the parts of a distribution are compared


class _LocalTensor(NamedTuple):
    """A tensor of which this rank holds something.

    Attributes:
        number: of the stored tensor.
        by_sums: whether its fingerprint tells if it is equal.
    """

    number: int
    matched: Matched
    by_sums: bool

    @property
    def target(self) -> LocalShard:
        """What this rank holds."""
        return self.matched.target


class _Parts:
    """What this rank holds of each stored tensor, by the ways in which ranks can hold it."""

    def __init__(self, comparison: _Comparison) -> None:
        self.whole = np.zeros(len(comparison.keys), np.bool_)
        self.sums: dict[bytes, dict[int, list[int]]] = {}
        self.boxes: dict[tuple[int, Box], bytes] = {}
        self.doubtful: set[int] = set()
        self._texts: dict[Distribution, str] = {}
        members = comparison.ranks.links.members
        rank = comparison.ranks.rank if members is None else members[comparison.ranks.rank]
        fingerprints = pieces_fingerprints(
            (
                (local.target, piece)
                for local in comparison.local
                for piece in local.target.pieces
                if local.by_sums
            ),
            comparison.options.threads,
        )
        computed = iter(fingerprints)
        for number, matched, by_sums in comparison.local:
            target = matched.target
            parts = [next(computed) if by_sums else NO_ELEMENTS for _ in target.pieces]
            boxes = [piece.box for piece in target.pieces]
            d = target.distribution
            if not target.info.size or [box.shape for box in boxes] == [target.info.shape]:
                self.whole[number] = True
                if by_sums and text_of(total(parts)) != comparison.recorded[number]:
                    self.doubtful.add(number)
            elif d is not None and (at := d.mesh.coordinate(rank)) is not None:
                copy, sums, weights = d.copy_of(at), total(parts), _weights(d.copies)
                if copy:
                    row = [0, 0, *(weights[copy - 1] * lane for lane in sums), 0]
                else:
                    balance = (-sum(weights) * lane for lane in sums)
                    row = [*sums, *balance, sum(box.size for box in boxes)]
                self._add(number, d, [n % MODULUS for n in row], by_sums=by_sums)
            else:
                for box, sums in zip(boxes, parts, strict=True):
                    data = packed_sums([(0, sums)], 1)
                    if by_sums and self.boxes.setdefault((number, box), data) != data:
                        self.doubtful.add(number)

    def _add(self, number: int, d: Distribution, row: list[int], *, by_sums: bool) -> None:
        """Add a part; a second tensor of the state for the same stored one is counted apart."""
        kind = _BY_SUMS if by_sums else _COUNTED
        text = self._texts.get(d) or self._texts.setdefault(d, repr(d))
        for turn in count():
            digest = kind + hashlib.sha256(f"{turn} {text}".encode()).digest()[:16]
            if number not in self.sums.setdefault(digest, {}):
                self.sums[digest][number] = row
                return


@lru_cache(maxsize=1024)
def _weights(copies: int) -> list[int]:
    """Odd numbers of 64 bits for all replicas but the first, so that their differences do not cancel out."""
    return [
        int.from_bytes(hashlib.sha256(str(copy).encode()).digest()[:8], "little") | 1
        for copy in range(1, copies)
    ]


def _sums_of(rows: Mapping[int, list[int]]) -> _Sums:
    numbers = sorted(rows)
    return _Sums(
        np.array(numbers, np.int64), np.array([rows[n] for n in numbers], np.uint64).reshape(-1, 5)
    )


def _numbers_of(holders: Mapping[bytes, _Holders]) -> set[int]:
    """The tensors of which some rank holds something."""
    return {number for part in holders.values() for number in part.numbers.tolist()}


def _covers(info: TensorInfo, boxes: Collection[Box]) -> bool:
    """Whether boxes, which may overlap, have all elements of a tensor."""
    try:
        prove(info, ((0, box) for box in boxes))
    except CoverageError:
        # of the grid that all edges of boxes make, which is far smaller than the tensor
        edges = [
            sorted({0, n, *(b.start[dim] for b in boxes), *(b.stop[dim] for b in boxes)})
            for dim, n in enumerate(info.shape)
        ]
        covered = np.zeros([len(along) - 1 for along in edges], np.bool_)
        for box in boxes:
            bounds = zip(edges, box.start, box.stop, strict=True)
            covered[tuple(slice(along.index(a), along.index(b)) for along, a, b in bounds)] = True
        return bool(covered.all())
    return True


def _listed(ranges: Ranges) -> tuple[int, ...]:
    return tuple(rank for start, stop in ranges for rank in range(start, stop))


def _joined(a: _Statement, b: _Statement) -> _Statement:
    """What some consecutive ranks and those after them hold."""
    doubtful = a.doubtful | b.doubtful
    doubtful |= {
        number
        for (number, box), sums in a.boxes.items()
        if b.boxes.get((number, box), sums) != sums
    }
    return _Statement(
        merged(a.findings, b.findings, adjoined),
        a.tensors | b.tensors,
        tuple(dict.fromkeys((*a.entries, *b.entries))),
        left_by_all((a.left, a.entries), (b.left, b.entries)),
        a.matched | b.matched,
        a.whole | b.whole,
        a.stateless | b.stateless,
        merged(
            a.holders,
            b.holders,
            lambda x, y: _Holders(x.numbers, adjoined(x.ranks, y.ranks)),
        ),
        merged(a.sums, b.sums, _added),
        {**b.boxes, **a.boxes},
        doubtful,
        dict(a.layout) | dict(b.layout),
        a.values + b.values,
    )


def _added(a: _Sums, b: _Sums) -> _Sums:
    """The sums of ranks of one distribution, which need not hold something of the same tensors."""
    numbers = np.union1d(a.numbers, b.numbers)
    values = np.zeros((len(numbers), a.values.shape[1]), np.uint64)
    for part in (a, b):
        values[np.searchsorted(numbers, part.numbers)] += part.values
    return _Sums(numbers, values)


def _joined_reports(a: _Report, b: _Report) -> _Report:
    def both(x: tuple[str, Ranges], y: tuple[str, Ranges]) -> tuple[str, Ranges]:
        return x[0], adjoined(x[1], y[1])

    return _Report(
        merged(a.different, b.different, both),
        merged(a.cast, b.cast, both),
        merged(a.boxes, b.boxes, or_),
    )
