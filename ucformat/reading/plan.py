"""Read plans: the byte ranges to read, and the destination of each byte. Pure data, computed before any I/O."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from operator import attrgetter
from typing import TYPE_CHECKING, Literal, TypeVar, cast

from ucformat.errors import CoverageError, Inconsistent, IntegrityError, MissingData, check_choice
from ucformat.geometry.coverage import prove
from ucformat.geometry.tensor import Block, Extent, FileRun, TensorInfo, Tiles
from ucformat.reading.copies import AlikeCopies, Copy, copies, moved_copy, placed
from ucformat.storage.base import ENCODED, Costs, is_computed, stored_key
from ucformat.storage.concurrency import gc_paused, map_io
from ucformat.storage.wrappers import gaps_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ucformat.geometry.box import Box
    from ucformat.geometry.tensor import Piece
    from ucformat.storage.base import Store


def merges(gap: int, span: int, costs: Costs) -> bool:
    """Whether a gap between ranges is read along with them."""
    return gap <= costs.gap and (gap * 20 <= span or span < costs.short)


#: Which checksums to verify. `whole`: of chunks that are read whole, and of all blocks of packed
#: files, which are read whole for this purpose. `always`: of all chunks, which are read whole.
#: `never`: none.
Verify = Literal["whole", "always", "never"] | bool


_REMEMBERED = 64  # boxes at most, of which a proof that they cover a piece is remembered
_SMALL_GAP = 16  # bytes of gaps that never justify another request: checksums, alignment


@dataclass(frozen=True, slots=True)
class Request:
    """One range of bytes of a file, and the copies of it to buffers.

    With a `count` it represents `count` ranges, `step` bytes apart: its only copy is that of the
    first range, and the copies of further ones follow in memory, `dst_step` bytes apart. With
    `others` it represents the same ranges of these files too.
    """

    file: str
    offset: int
    nbytes: int
    copies: Sequence[Copy]
    count: int = 1
    step: int = 0
    others: Sequence[str] = ()

    @property
    def total(self) -> int:
        """Bytes of all ranges of all files."""
        return self.count * self.nbytes * (1 + len(self.others))

    @property
    def end(self) -> int:
        """The byte of the file after the last range."""
        return self.offset + (self.count - 1) * self.step + self.nbytes

    @property
    def is_checked(self) -> bool:
        """Whether checksums of its bytes are verified."""
        return self.copies[0].block is not None

    def repeated(self, others: Sequence[str], step: int) -> Request:
        """This request for further files, whose copies are `step` bytes apart in the buffer."""
        copies = tuple(replace(c, file_step=step) for c in self.copies)
        return Request(self.file, self.offset, self.nbytes, copies, self.count, self.step, others)

    def in_file(self, number: int) -> Request:
        """The request for one of its files: 0 is `file`, 1 the first of the others."""
        file = self.others[number - 1] if number else self.file
        copies = tuple(placed(c, c.src, c.dst + number * c.file_step) for c in self.copies)
        return Request(file, self.offset, self.nbytes, copies, self.count, self.step)

    def ranges(self) -> Iterator[Request]:
        """Each range of whole chunks as a request of its own."""
        (copy,) = self.copies
        for skip in range(0, self.count * self.step, self.step):
            block = replace(copy.block, offset=copy.block.offset + skip) if copy.block else None
            dst = copy.dst + skip // self.step * copy.count * copy.dst_step
            yield Request(
                self.file, self.offset + skip, self.nbytes, (replace(copy, dst=dst, block=block),)
            )


@dataclass(frozen=True, slots=True)
class Plan:
    """Requests in order of file and offset, and their cost."""

    requests: tuple[Request, ...]
    bytes_needed: int
    bytes_unverified: int
    bytes_besides: int = 0  # read only to verify checksums
    # of scattered indices that a view takes, those between; of encoded files, those stored less those decoded
    bytes_of_gaps: int = 0

    @property
    def bytes_read(self) -> int:
        """Bytes that will be read from storage."""
        return sum(r.total for r in self.requests) + self.bytes_of_gaps

    def through(self, store: Store) -> Plan:
        """The same plan, with the bytes that a store reads to compute what is requested, or to decode it."""
        computed = (r for r in self.requests if is_computed(r.file))
        ranges = [
            (file, r.offset + i * r.step, r.nbytes)
            for r in computed
            for file in (r.file, *r.others)
            for i in range(r.count)
        ]
        return replace(self, bytes_of_gaps=sum(map_io(lambda each: gaps_of(store, *each), ranges)))

    @property
    def ranges(self) -> int:
        """Number of ranges that will be read."""
        return sum(r.count * (1 + len(r.others)) for r in self.requests)

    @property
    def files(self) -> dict[str, int]:
        """Bytes that will be read from each file; of an encoded one, those of the plain file."""
        read: Counter[str] = Counter()
        for files, requests in self._by_files().items():
            nbytes = sum(r.count * r.nbytes for r in requests)
            read.update(dict.fromkeys(map(stored_key, _each(files)), nbytes))
        return dict(read)

    @property
    def ends(self) -> dict[str, int]:
        """The byte after the last one to read, of each file."""
        out: dict[str, int] = {}
        for files, requests in self._by_files().items():
            end = max(r.end for r in requests)
            for file in _each(files):
                out[file] = max(end, out.get(file, 0))
        return out

    def each(self) -> Iterator[Request]:
        """The requests of single files, in order of file and offset."""
        by_file: dict[str, list[tuple[list[Request], int]]] = {}
        for files, requests in self._by_files().items():
            for number, file in enumerate(_each(files)):
                by_file.setdefault(file, []).append((requests, number))
        for file in sorted(by_file):
            file_requests = [
                r.in_file(number) if r.others else r
                for requests, number in by_file[file]
                for r in requests
            ]
            yield from sorted(file_requests, key=attrgetter("offset"))

    def _by_files(self) -> dict[tuple[str, Sequence[str]], list[Request]]:
        """The requests by the files for which they stand."""
        out: dict[tuple[str, Sequence[str]], list[Request]] = {}
        for r in self.requests:
            out.setdefault((r.file, r.others), []).append(r)
        return out


def _each(files: tuple[str, Sequence[str]]) -> Iterator[str]:
    yield files[0]
    yield from files[1]


@dataclass(frozen=True, slots=True)
class ReadItem:
    """A tensor to read: its extents, and the pieces to fill, each with the number of its buffer."""

    info: TensorInfo
    extents: Iterable[Extent | Tiles | FileRun]
    pieces: Sequence[tuple[int, Piece]]


def check_verify(verify: Verify) -> Literal["whole", "always", "never"]:
    """The word for `verify`, in which True is `whole` and False is `never`."""
    check_choice("verify", verify, ("whole", "always", "never", True, False))
    return ("whole" if verify else "never") if isinstance(verify, bool) else verify


@gc_paused()
def make_plan(
    items: Iterable[ReadItem], verify: Verify = "whole", costs: Costs | None = None
) -> Plan:
    """Plan how to fill all pieces of all tensors."""
    verify, costs = check_verify(verify), costs or Costs()
    requests: list[Request] = []
    needed = unverified = besides = 0
    located = map_io(_located, items)  # a source may ask for the sizes of a tensor's files first
    planner = _Planner(verify, costs)
    for item, extents in located:
        item_requests, exposed, extra = planner.read_tensor(item, extents)
        requests += item_requests
        unverified += exposed
        besides += extra
        needed += sum([p.box.size for _, p in item.pieces]) * item.info.itemsize
    requests += planner.alike()
    requests, repeated = _once(requests)
    # those that stand for the same files next to each other, since `_join` joins only neighbours
    requests.sort(key=lambda r: (r.file, len(r.others), r.offset))
    return Plan(tuple(_join(requests, costs)), needed, unverified, besides - repeated)


def _located(item: ReadItem) -> tuple[ReadItem, list[Extent | Tiles | FileRun]]:
    """An item, and its extents without further replicas of a box, if any of its pieces has elements."""
    extents = [*item.extents] if any(p.box.size for _, p in item.pieces) else []
    if len(extents) > 1:
        first: dict[object, Extent | Tiles | FileRun] = {}
        for e in extents:
            first.setdefault(e.box, e)
        extents = list(first.values())
    return item, extents


#: The requests for a piece and an extent, the bytes that are not verified, and those that are read
#: only to verify checksums.
_Planned = tuple[list[Request], int, int]

_E = TypeVar("_E", bound=Extent | Tiles | FileRun)


@dataclass(slots=True)
class _Part:
    """What one extent has of a piece: the requests for it, and where the same of pieces that lie alike is.

    Attributes:
        number: of the extent.
        offset: of the extent in its file.
        places: of this piece and of those that lie alike, the file, the bytes from the place of
            this one, and the buffer; None if there are several requests, or a large one.
    """

    number: int
    offset: int
    requests: list[Request]
    places: list[tuple[str, int, int]] | None


@dataclass(slots=True)
class _Alike:
    """The parts of the first of pieces that lie alike, and the bytes, as in `_Planned`.

    Attributes:
        first: the piece and its extents, kept since those that lie alike are told by the ids of
            what they have in common.
    """

    first: tuple[Piece, Sequence[Tiles]]
    parts: list[_Part]
    unverified: int
    besides: int


class _Planner:
    """Plans tensor by tensor; tiles that lie like earlier ones, elsewhere, have the requests of these, moved."""

    def __init__(self, verify: Verify, costs: Costs) -> None:
        self._verify, self._costs = verify, costs
        # with the file offset of the tiles
        self._planned: dict[tuple[object, ...], tuple[int, _Planned]] = {}
        self._alike: dict[tuple[object, ...], _Alike] = {}

    def alike(self) -> Iterator[Request]:
        """The requests for pieces that lie alike: small ones that are neighbours in a file are read together."""
        parts = [part for alike in self._alike.values() for part in alike.parts if part.places]
        for part in parts:
            (first,) = part.requests
            span, ends = first.nbytes, self._costs.join - first.nbytes
            group: list[tuple[str, int, int]] = []
            # what several buffers get, as of tied weights, is read once for all of them (`_once`)
            readers = Counter((file, by) for file, by, _ in part.places or ())
            for place in sorted(part.places or ()):
                file, by, _ = place
                if group:
                    gap = by - group[-1][1] - span
                    near = file == group[0][0] and gap >= 0 and by - group[0][1] <= ends
                    single = readers[group[-1][:2]] == readers[file, by] == 1
                    if not (near and single and merges(gap, span, self._costs)):
                        yield _of_alike(first, group)
                        group = []
                group.append(place)
            yield _of_alike(first, group)

    def read_tensor(self, item: ReadItem, extents: Sequence[Extent | Tiles | FileRun]) -> _Planned:
        """The requests for a tensor, and the bytes."""
        if len(item.pieces) == 1 and all(type(e) is Tiles for e in extents):
            return self._read_alike(item, cast("Sequence[Tiles]", extents))
        planned = [
            part
            for buffer, piece in item.pieces
            for extent, common in _overlapping(item.info, piece, extents)
            for part in self._read_run(buffer, piece, extent, common, item.info)
        ]
        return _total(planned)

    def _read_alike(self, item: ReadItem, extents: Sequence[Tiles]) -> _Planned:
        """As `read_tensor`, for one piece; neighbours that lie alike have their requests in `alike`."""
        ((buffer, piece),), info = item.pieces, item.info
        # by their ids, since equal ones are mostly the same; and an encoded file is read otherwise
        key: tuple[object, ...] = (id(piece), info.itemsize)
        for e in extents:
            key += (id(e.box), id(e.chunk), id(e.steps), ENCODED in e.file)
        alike = self._alike.get(key)
        if alike is not None:
            moved: list[Request] = []
            for part in alike.parts:
                extent = extents[part.number]
                by = extent.offset - part.offset
                if part.places is not None:
                    part.places.append((extent.file, by, buffer))
                else:
                    moved += [_moved(r, extent.file, by, buffer) for r in part.requests]
            return moved, alike.unverified, alike.besides
        parts: list[_Part] = []
        planned: list[_Planned] = []
        for extent, common in _overlapping(info, piece, extents):
            new = self._read_extent(buffer, piece, extent, common, info.itemsize)
            places = [(extent.file, 0, buffer)] if self._may_be_alike(new[0]) else None
            number = next(n for n, e in enumerate(extents) if e is extent)
            parts.append(_Part(number, extent.offset, new[0], places))
            planned.append(new if places is None else ([], *new[1:]))
        requests, unverified, besides = _total(planned)
        self._alike[key] = _Alike((piece, extents), parts, unverified, besides)
        return requests, unverified, besides

    def _read_run(
        self,
        buffer: int,
        piece: Piece,
        extent: Extent | Tiles | FileRun,
        common: Box,
        info: TensorInfo,
    ) -> Iterator[_Planned]:
        """As `read_tensor`, for one piece and one extent."""
        if isinstance(extent, Extent) and extent.leaves_block(info.itemsize):
            raise IntegrityError(
                f"{info.key}: the bytes of {extent.box} leave the block of {extent.file} with "
                "their checksum",
                hint=(
                    "restore what lists them, the sidecar or the file's own header, from another "
                    "copy"
                ),
            )
        if not isinstance(extent, FileRun):
            yield self._read_extent(buffer, piece, extent, common, info.itemsize)
            return
        step = piece.strides[extent.dim] * extent.first.box.shape[extent.dim] * info.itemsize
        for tiles, others in extent.parts(piece.box):
            in_first = tiles.box.intersect(piece.box)
            assert in_first is not None  # noqa: S101 - these are parts of the piece
            requests, exposed, extra = self._read_extent(
                buffer, piece, tiles, in_first, info.itemsize
            )
            if others:
                requests = [r.repeated(others, step) for r in requests]
            yield requests, exposed * (1 + len(others)), extra * (1 + len(others))

    def _may_be_alike(self, requests: Sequence[Request]) -> bool:
        """Whether there is one request of one range, so small that neighbours are worth to be joined to it."""
        if len(requests) != 1 or 2 * requests[0].nbytes > self._costs.join:
            return False
        (r,) = requests
        return len(r.copies) == r.count == r.copies[0].count == 1

    def _read_extent(
        self, buffer: int, piece: Piece, extent: Extent | Tiles, common: Box, itemsize: int
    ) -> _Planned:
        """As `read_tensor`, for one piece and one extent."""
        if isinstance(extent, Extent):
            return self._new_requests(buffer, piece, extent, common, itemsize)
        # all that requests depend on, besides the buffer, the file and where in it the tiles begin
        place = (piece, extent.box, extent.chunk, extent.itemsize, extent.steps, itemsize)
        key = (*place, ENCODED in extent.file)
        if (earlier := self._planned.get(key)) is None:
            planned = self._new_requests(buffer, piece, extent, common, itemsize)
            self._planned[key] = extent.offset, planned
            return planned
        offset, (requests, unverified, besides) = earlier
        by = extent.offset - offset
        return [_moved(r, extent.file, by, buffer) for r in requests], unverified, besides

    def _new_requests(
        self, buffer: int, piece: Piece, extent: Extent | Tiles, common: Box, itemsize: int
    ) -> _Planned:
        requests: list[Request] = []
        unverified = besides = 0
        for inner, outer, block, whole in copies(extent, piece, common, itemsize):
            if block is None or not _is_checked(
                extent, block, self._verify, self._costs, whole=whole
            ):
                unverified += outer.nbytes * inner.nbytes
                requests += _ranges(buffer, extent.file, inner.within(outer), self._costs)
                continue
            besides += outer.nbytes * (block.stored - inner.nbytes)
            requests += _whole_chunks(buffer, extent.file, inner, outer, block, self._costs)
        return requests, unverified, besides


def _of_alike(first: Request, places: Sequence[tuple[str, int, int]]) -> Request:
    """The request for neighbours in a file that lie like what a request is for."""
    file, begin, buffer = places[0]
    moved = _moved(first, file, begin, buffer)
    if len(places) == 1:
        return moved
    further = [by - begin for _, by, _ in places]
    copies = AlikeCopies(moved.copies[0], further, [buffer for *_, buffer in places])
    return Request(file, moved.offset, further[-1] + moved.nbytes, copies)


def _moved(r: Request, file: str, by: int, buffer: int) -> Request:
    """The same request elsewhere in a file, for another buffer."""
    moved = tuple([moved_copy(c, c.src, by, buffer) for c in r.copies])
    return Request(file, r.offset + by, r.nbytes, moved, r.count, r.step)


def _is_checked(
    extent: Extent | Tiles, block: Block, verify: Verify, costs: Costs, *, whole: bool
) -> bool:
    if ENCODED in extent.file:  # to decode a part takes as long
        return True
    if verify == "whole" and not whole:
        of_array = isinstance(extent, Tiles) and not extent.placed
        return not of_array and block.nbytes <= costs.block
    return verify != "never"


def _overlapping(info: TensorInfo, piece: Piece, extents: Sequence[_E]) -> Sequence[tuple[_E, Box]]:
    """The extents that have parts of a piece, and these parts, if they are all of it."""
    if not piece.box.size:
        return ()
    parts = [(e, common) for e in extents if (common := e.box.intersect(piece.box))]
    _check_coverage(info, piece, [(e.file, common) for e, common in parts])
    return parts


def _total(planned: Iterable[_Planned]) -> _Planned:
    requests: list[Request] = []
    unverified = besides = 0
    for more, exposed, extra in planned:
        requests += more
        unverified += exposed
        besides += extra
    return requests, unverified, besides


def _check_coverage(info: TensorInfo, piece: Piece, common: list[tuple[str, Box]]) -> None:
    """Prove that the parts of files that intersect a piece contain every element of it exactly once."""
    if len(common) == 1 and common[0][1] == piece.box:
        return
    if len(common) <= _REMEMBERED and _covers(piece.box, tuple(box for _, box in common)):
        return
    stored = sum(box.size for _, box in common)
    if stored < piece.box.size:
        raise MissingData(
            f"{info.key}: {piece.box.size - stored} elements of {piece.box} are stored in no file",
            hint="a file of the checkpoint is missing or was written by another run",
        )
    shift = tuple(-s for s in piece.box.start)
    try:
        named = replace(info, name=f"{info.name}{piece.box}", shape=piece.box.shape)
        prove(named, [(file, box.shift(shift)) for file, box in common])
    except CoverageError as error:  # not an error of the caller: the files are wrong
        raise Inconsistent(
            error.message, hint="restore what lists the parts of this tensor from another copy"
        ) from None


@lru_cache(maxsize=1 << 10)  # layers repeat
def _covers(whole: Box, boxes: tuple[Box, ...]) -> bool:
    """Whether boxes contain every element of a box exactly once."""
    shift = tuple(-s for s in whole.start)
    try:
        prove(TensorInfo("", "", "uint8", whole.shape), [("", box.shift(shift)) for box in boxes])
    except CoverageError:
        return False
    return True


def _whole_chunks(
    buffer: int, file: str, inner: Copy, outer: Copy, block: Block, costs: Costs
) -> Iterator[Request]:
    """Requests for chunks that are read whole and verified; adjacent ones along the grid's last dim are merged."""
    step, dst_step = (outer.src_strides[-1], outer.dst_strides[-1]) if outer.shape else (0, 0)
    adjacent = step == block.stored
    # without their checksums, so that four chunks of 1 MiB are one request of 4 MiB
    per_request = max(1, costs.request // block.nbytes) if adjacent else 1
    skip = inner.src - block.offset
    *leading, last = outer.shape or (1,)
    for at in product(*map(range, leading)):
        src = block.offset + sum(i * s for i, s in zip(at, outer.src_strides, strict=False))
        dst = inner.dst + sum(i * d for i, d in zip(at, outer.dst_strides, strict=False))
        # requests of as many chunks, which are one here
        full = last // per_request if adjacent else 0
        runs = [(0, per_request, full)] if full else []
        runs += [
            (first, min(per_request, last - first), 1)
            for first in range(full * per_request, last, per_request)
        ]
        for first, count, times in runs:
            begin, target = src + first * step, dst + first * dst_step
            own_block = Block(begin, block.nbytes, block.crc32c, block.placed)
            copy = Copy(
                inner.shape,
                skip,
                inner.src_strides,
                target,
                inner.dst_strides,
                buffer,
                own_block,
                count,
                step,
                dst_step,
            )
            yield Request(
                file, begin, (count - 1) * step + block.stored, (copy,), times, count * step
            )


def _ranges(buffer: int, file: str, whole: Copy, costs: Costs) -> Iterator[Request]:
    """Requests for exactly the wanted bytes, except that small gaps are read too."""
    n = len(whole.shape)
    span = 1  # bytes of the file that the dims from `n` on span
    while n and merges(whole.src_strides[n - 1] - span, span, costs):
        size, step = whole.shape[n - 1], whole.src_strides[n - 1]
        if (size - 1) * step + span > costs.request:
            break
        span += (size - 1) * step
        n -= 1
    src_step = whole.src_strides[n - 1] if n else 0
    dst_step = whole.dst_strides[n - 1] if n else 0
    cut = bool(n) and merges(src_step - span, span, costs)  # a single request would be too long
    per_request = max(1, (costs.request - span) // src_step + 1 if cut else costs.request // span)
    shape, src_strides, dst_strides = whole.shape[n:], whole.src_strides[n:], whole.dst_strides[n:]
    *leading, last = whole.shape[:n] or (1,)
    for at in product(*map(range, leading)):
        src = whole.src + sum(i * s for i, s in zip(at, whole.src_strides, strict=False))
        dst = whole.dst + sum(i * d for i, d in zip(at, whole.dst_strides, strict=False))
        for first in range(0, last, per_request):
            count = min(per_request, last - first)
            begin, target = src + first * src_step, dst + first * dst_step
            if cut:
                rows = Copy(
                    (count, *shape),
                    0,
                    (src_step, *src_strides),
                    target,
                    (dst_step, *dst_strides),
                    buffer,
                )
                yield Request(file, begin, (count - 1) * src_step + span, (rows,))
            else:
                copy = Copy(shape, 0, src_strides, target, dst_strides, buffer, dst_step=dst_step)
                yield Request(file, begin, span, (copy,), count, src_step)


def _once(requests: list[Request]) -> tuple[list[Request], int]:
    """One request for each chunk that is verified, whatever is copied of it, and the bytes that are not read again."""
    out: dict[object, Request] = {}
    repeated = 0
    for number, r in enumerate(requests):
        single = r.is_checked and r.count == r.copies[0].count == 1 and not r.others
        first = out.setdefault((r.file, r.offset, r.nbytes) if single else number, r)
        if first is not r:
            repeated += r.nbytes
            # the first one verifies the chunk for all
            unchecked = tuple(replace(c, block=None) for c in r.copies)
            out[r.file, r.offset, r.nbytes] = Request(
                r.file, r.offset, r.nbytes, (*first.copies, *unchecked)
            )
    return list(out.values()), repeated


def _join(requests: list[Request], costs: Costs) -> Iterator[Request]:
    """Join sorted requests that are small and close to each other."""
    group: list[Request] = []
    gaps = 0
    for r in requests:
        if group:
            gap = r.offset - (group[-1].offset + group[-1].nbytes)
            joined = r.offset + r.nbytes - group[0].offset
            near = 0 <= gap <= costs.gap and gaps + gap <= max(_SMALL_GAP, joined // 100)
            single = r.count == group[-1].count == 1
            single = single and type(r.copies) is type(group[-1].copies) is tuple
            if (
                (r.file, r.others) == (group[0].file, group[0].others)
                and single
                and near
                and joined <= costs.join
            ):
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
    moved = tuple(
        placed(c, c.src + r.offset - first.offset, c.dst) for r in group for c in r.copies
    )
    return Request(
        first.file,
        first.offset,
        last.offset + last.nbytes - first.offset,
        moved,
        others=first.others,
    )
