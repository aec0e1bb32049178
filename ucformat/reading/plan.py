"""Read plans: which byte ranges to read, and where each byte of them goes. Pure data, made before any I/O."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Literal

from ucformat.errors import CoverageError, Inconsistent, IntegrityError, MissingData
from ucformat.geometry.coverage import prove
from ucformat.geometry.tensor import Tiles
from ucformat.reading.moves import Check, Strided, moves
from ucformat.storage.base import Costs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ucformat.geometry.tensor import Extent, Piece, TensorInfo
    from ucformat.reading.moves import Move

__all__ = ["Part", "Plan", "Request", "Verify", "make_plan", "read_tensor"]

#: Which checksums to check: of the chunks of arrays that are read whole and of all blocks of packed files (which are
#: read whole for it), of all chunks too, of none.
Verify = Literal["whole", "always", "never"]


_TRIFLE = 16  # bytes of gaps that are never worth another request: checksums, alignment


@dataclass(frozen=True, slots=True)
class Part:
    """What one request gives to one buffer: the set `inner`, `count` times, at steps in the bytes read and in memory.

    `inner.src` counts from the first byte of the request. With a `check`, each of the `count` sets lies in a chunk of
    its own, whose checksum is to be checked.
    """

    buffer: int
    inner: Strided
    check: Check | None = None
    count: int = 1
    src_step: int = 0
    dst_step: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """One range of bytes of one file, and the parts of it that are wanted.

    With a `count` it stands for so many ranges, `step` bytes apart: its one part is that of the first, and each next
    one goes `dst_step` further in memory.
    """

    file: str
    offset: int
    nbytes: int
    parts: tuple[Part, ...]
    count: int = 1
    step: int = 0

    @property
    def total(self) -> int:
        """Bytes of all ranges."""
        return self.count * self.nbytes

    @property
    def end(self) -> int:
        """The byte after the last range."""
        return self.offset + (self.count - 1) * self.step + self.nbytes


@dataclass(frozen=True, slots=True)
class Plan:
    """Requests in the order of files and offsets, and what they cost."""

    requests: tuple[Request, ...]
    bytes_needed: int
    bytes_unverified: int
    bytes_besides: int = 0  # that are read for the sake of checksums alone

    @property
    def bytes_read(self) -> int:
        """Bytes that will be read from storage."""
        return sum(r.total for r in self.requests)

    @property
    def ranges(self) -> int:
        """Number of ranges that will be read."""
        return sum(r.count for r in self.requests)

    @property
    def files(self) -> dict[str, int]:
        """Bytes that will be read from each file."""
        read: Counter[str] = Counter()
        for r in self.requests:
            read[r.file] += r.total
        return dict(read)


@dataclass(frozen=True, slots=True)
class Wanted:
    """Pieces of one tensor, each with the number of the buffer it goes to."""

    info: TensorInfo
    extents: Iterable[Extent | Tiles]
    pieces: Sequence[tuple[int, Piece]]


def make_plan(wanted: Iterable[Wanted], verify: Verify = "whole", costs: Costs | None = None) -> Plan:
    """How to fill all the pieces of all the tensors.

    Raises:
        MissingData: the extents of a tensor leave a hole in a piece.
        CoverageError: two extents overlap and are not replicas of one box.
        IntegrityError: an extent leaves the block that has its checksum.
    """
    costs = costs or Costs()
    requests: list[Request] = []
    needed = unverified = besides = 0
    for w in wanted:
        found, exposed, more = read_tensor(w, verify, costs)
        requests += found
        unverified += exposed
        besides += more
        needed += sum(p.box.size for _, p in w.pieces) * w.info.itemsize
    requests.sort(key=lambda r: (r.file, r.offset))
    return Plan(tuple(_join(requests, costs)), needed, unverified, besides)


def read_tensor(w: Wanted, verify: Verify, costs: Costs) -> tuple[list[Request], int, int]:
    """The requests for one tensor's pieces, how many bytes of it go unchecked, and how many more are read to check."""
    requests: list[Request] = []
    unverified = besides = 0
    pieces = [(b, p) for b, p in w.pieces if p.box.size]
    if not pieces:
        return requests, 0, 0
    extents = _distinct(w.extents)
    for buffer, piece in pieces:
        met = [e for e in extents if e.box.intersect(piece.box)]
        _must_cover(w.info, piece, met)
        for extent in met:
            if not isinstance(extent, Tiles) and extent.leaves_block(w.info.itemsize):
                raise IntegrityError(
                    f"{w.info.key}: the bytes of {extent.box} leave the block in {extent.file} that has their checksum",
                    hint="restore what lists them, the sidecar or the file's own header, from another copy",
                )
            for move in moves(extent, piece, w.info.itemsize):
                if move.check is None or not _is_checked(move, extent, verify, costs):
                    unverified += move.nbytes
                    requests += _ranges(buffer, move, costs)
                    continue
                besides += move.outer.nbytes * move.check.stored - move.nbytes
                requests += _whole_chunks(buffer, move, costs)
    return requests, unverified, besides


def _is_checked(move: Move, extent: Extent | Tiles, verify: Verify, costs: Costs) -> bool:
    if verify == "whole" and not move.whole:
        assert move.check is not None  # noqa: S101
        of_array = isinstance(extent, Tiles) and not extent.placed
        return not of_array and move.check.nbytes <= costs.block
    return verify != "never"


def _distinct(extents: Iterable[Extent | Tiles]) -> list[Extent | Tiles]:
    """The extents without further replicas of a box."""
    first: dict[object, Extent | Tiles] = {}
    for e in extents:
        first.setdefault(e.box, e)
    return list(first.values())


def _must_cover(info: TensorInfo, piece: Piece, extents: list[Extent | Tiles]) -> None:
    """Prove that the extents hold all of the piece, each element once."""
    common = [(e.file, box) for e in extents if (box := e.box.intersect(piece.box))]
    if len(common) == 1 and common[0][1] == piece.box:
        return
    held = sum(box.size for _, box in common)
    if held < piece.box.size:
        raise MissingData(
            f"{info.key}: {piece.box.size - held} elements of {piece.box} are stored in no file",
            hint="a file of the checkpoint is missing or was written by another run",
        )
    shift = tuple(-s for s in piece.box.start)
    try:
        prove(_like(info, piece), [(file, box.shift(shift)) for file, box in common])
    except CoverageError as error:  # nobody asked for it: the files are at fault
        raise Inconsistent(
            error.message, hint="restore what lists the parts of this tensor from another copy"
        ) from None


def _like(info: TensorInfo, piece: Piece) -> TensorInfo:
    return type(info)(f"{info.name}{piece.box}", info.state, info.dtype, piece.box.shape)


def _whole_chunks(buffer: int, move: Move, costs: Costs) -> Iterator[Request]:
    """Requests for chunks that are read whole and checked; neighbours along the last dim of the grid together."""
    check, inner, outer = move.check, move.inner, move.outer
    assert check is not None  # noqa: S101
    step = outer.src_strides[-1] if outer.shape else 0
    adjacent = step == check.stored
    most = max(1, costs.request // check.stored) if adjacent else 1
    *leading, last = outer.shape or (1,)
    for at in product(*map(range, leading)):
        src = sum(i * s for i, s in zip(at, outer.src_strides, strict=False))
        dst = sum(i * d for i, d in zip(at, outer.dst_strides, strict=False))
        for first in range(0, last, most):
            count = min(most, last - first)
            begin = inner.src - check.skip + src + first * step
            to = inner.dst + dst + first * (outer.dst_strides[-1] if outer.shape else 0)
            part = Part(
                buffer,
                Strided(inner.shape, check.skip, inner.src_strides, to, inner.dst_strides),
                check,
                count,
                step,
                outer.dst_strides[-1] if outer.shape else 0,
            )
            yield Request(move.file, begin, (count - 1) * step + check.stored, (part,))


def _ranges(buffer: int, move: Move, costs: Costs) -> Iterator[Request]:
    """Requests for exactly the wanted bytes, save that small gaps are read over."""
    whole = move.inner.within(move.outer)
    n = len(whole.shape)
    span = 1  # bytes of the file that the innermost dims from `n` on reach over
    while n and _merges(whole.src_strides[n - 1] - span, span, costs):
        size, step = whole.shape[n - 1], whole.src_strides[n - 1]
        if (size - 1) * step + span > costs.request:
            break
        span += (size - 1) * step
        n -= 1
    src_step = whole.src_strides[n - 1] if n else 0
    dst_step = whole.dst_strides[n - 1] if n else 0
    cut = bool(n) and _merges(src_step - span, span, costs)  # the request would be too long
    most = max(1, (costs.request - span) // src_step + 1 if cut else costs.request // span)
    *leading, last = whole.shape[:n] or (1,)
    for at in product(*map(range, leading)):
        src = whole.src + sum(i * s for i, s in zip(at, whole.src_strides, strict=False))
        dst = whole.dst + sum(i * d for i, d in zip(at, whole.dst_strides, strict=False))
        for first in range(0, last, most):
            count = min(most, last - first)
            begin, to = src + first * src_step, dst + first * dst_step
            inner = Strided(whole.shape[n:], 0, whole.src_strides[n:], to, whole.dst_strides[n:])
            if cut:
                rows = ((count, *inner.shape), 0, (src_step, *inner.src_strides), to, (dst_step, *inner.dst_strides))
                yield Request(move.file, begin, (count - 1) * src_step + span, (Part(buffer, Strided(*rows)),))
            else:
                part = Part(buffer, inner, dst_step=dst_step)
                yield Request(move.file, begin, span, (part,), count, src_step)


def _merges(gap: int, span: int, costs: Costs) -> bool:
    """Whether a gap between ranges of `span` bytes is read over."""
    return gap <= costs.gap and (gap * 20 <= span or span < costs.short)


def _join(requests: list[Request], costs: Costs) -> Iterator[Request]:
    """Join sorted requests that are small and near each other."""
    group: list[Request] = []
    gaps = 0
    for r in requests:
        if group:
            gap = r.offset - (group[-1].offset + group[-1].nbytes)
            joined = r.offset + r.nbytes - group[0].offset
            near = 0 <= gap <= costs.gap and gaps + gap <= max(_TRIFLE, joined // 100)
            single = r.count == group[-1].count == 1
            if r.file == group[0].file and single and near and joined <= costs.join:
                gaps += gap
            else:
                yield _joined(group)
                group, gaps = [], 0
        group.append(r)
    if group:
        yield _joined(group)


def _joined(group: list[Request]) -> Request:
    if len(group) == 1:
        return group[0]
    first, last = group[0], group[-1]
    parts = tuple(
        Part(p.buffer, _from(p.inner, r.offset - first.offset), p.check, p.count, p.src_step, p.dst_step)
        for r in group
        for p in r.parts
    )
    return Request(first.file, first.offset, last.offset + last.nbytes - first.offset, parts)


def _from(inner: Strided, by: int) -> Strided:
    return Strided(inner.shape, inner.src + by, inner.src_strides, inner.dst, inner.dst_strides)
