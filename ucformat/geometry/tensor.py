"""The central types of the project: a tensor, the extents that store it, the pieces of it that a rank holds."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from ucformat.errors import UsageError
from ucformat.geometry.box import Box, offset_of, reach, row_major
from ucformat.schema import ITEMSIZE
from ucformat.schema.limits import MAX_TEXT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

_SMALL = 1 << 20  # bytes of a block that is read to verify a part of it


class Key(NamedTuple):
    """Identifies a stored tensor: its name and its state (`weight`, `master`, `exp_avg`, …)."""

    name: str
    state: str

    def __str__(self) -> str:
        return f"{self.name} ({self.state})"

    @property
    def padding(self) -> Key:
        """The key of the tensor with the rows that pad this one, if a checkpoint stores them."""
        return Key(self.name, f"{self.state}.padding")

    def partial(self, rank: int) -> Key:
        """The key of one rank's value of a tensor that is reduced (averaged) over ranks."""
        return Key(self.name, f"{self.state}.partial{rank}")


class _Keyed:
    __slots__ = ("_key",)  # not a field, so that messages between ranks do not have it
    _key: Key


@dataclass(frozen=True, slots=True)
class TensorInfo(_Keyed):
    """The metadata of a logical tensor in one state."""

    name: str
    state: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if not (self.name.isascii() and self.state.isascii()):
            try:
                (self.name + self.state).encode()
            except UnicodeEncodeError:
                raise UsageError(
                    f"the tensor name {self.name!r} ({self.state!r}) is not Unicode text",
                    hint="rename it where it is saved",
                ) from None
        if max(len(self.name), len(self.state)) > MAX_TEXT:
            raise UsageError(
                f"the tensor name {self.name[:100]!r}… ({self.state[:100]!r}) is too long",
                hint=f"a name or state has at most {MAX_TEXT:,} characters",
            )
        if self.dtype not in ITEMSIZE:
            raise UsageError(
                f"tensor {self.name} ({self.state}) has the unknown dtype {self.dtype!r}",
                hint=f"known are {', '.join(ITEMSIZE)}",
            )
        if min(self.shape, default=0) < 0:
            raise UsageError(
                f"tensor {self.name} ({self.state}) has the invalid shape {self.shape}"
            )

    @property
    def key(self) -> Key:
        """Name and state."""
        try:  # plans ask for it many times for each tensor, and keep it many times
            return self._key
        except AttributeError:
            key = Key(self.name, self.state)
            object.__setattr__(self, "_key", key)
            return key

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return ITEMSIZE[self.dtype]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class Block:
    """The stored unit that a checksum covers: `nbytes` raw bytes from byte `offset` of a file.

    `crc32c` is the expected checksum; None means that it follows the bytes, as four bytes in
    little-endian order. If `placed`, the checksum also covers the location of the bytes
    (`reading.execute.place_checksum`).
    """

    offset: int
    nbytes: int
    crc32c: int | None = None
    placed: bool = False

    @property
    def stored(self) -> int:
        """Bytes to read for the block and its stored checksum."""
        return self.nbytes + (4 if self.crc32c is None else 0)


@dataclass(frozen=True, slots=True)
class Extent:
    """A box of a tensor that is stored, raw and little-endian, in a file.

    `file` is a key of the store that the tensor's source reads. Element `box.start + i` is at byte
    `offset + sum(i[d] * strides[d])`; strides are in bytes, one for each dim. Extents of one tensor
    with the same box are replicas; a reader may use any of them.
    """

    box: Box
    file: str
    offset: int
    strides: tuple[int, ...]
    block: Block | None = None

    def leaves_block(self, itemsize: int) -> bool:
        """Whether the extent has bytes outside of its block, which the block's checksum does not cover."""
        if self.block is None or not self.box.size:
            return False
        steps = [(n - 1) * s for n, s in zip(self.box.shape, self.strides, strict=True)]
        first, last = (
            self.offset + sum(min(s, 0) for s in steps),
            self.offset + sum(max(s, 0) for s in steps),
        )
        return first < self.block.offset or last + itemsize > self.block.offset + self.block.nbytes

    def block_of(self, shape: tuple[int, ...]) -> Block | None:
        """The block that covers a part of the extent.

        A small block of a packed file is read whole to verify any part of it; others are left out
        for a part.
        """
        block = self.block
        if block is None or shape == self.box.shape:
            return block
        return (
            block if (block.placed or block.crc32c is not None) and block.nbytes <= _SMALL else None
        )

    @property
    def last(self) -> int:
        """The byte of the file at which the last element begins."""
        return self.offset + reach(self.box.shape, self.strides)


@dataclass(frozen=True, slots=True)
class Tiles:
    """A box of a tensor that is stored in a file as equal chunks, one after another, each followed by its crc32c.

    The chunks form a regular grid that begins at `box.start`, in C order; a chunk that extends past
    the box is padded to its full shape. Chunk number `k` begins at byte `offset + k * pitch`. With
    `steps`, the bytes from one chunk to the next along each dim, they are tiles of a packed file at
    these positions. It is equivalent to one extent for each chunk, and planning does not have to
    enumerate the chunks.
    """

    box: Box
    file: str
    offset: int
    chunk: tuple[int, ...]
    itemsize: int
    steps: tuple[int, ...] | None = None

    @property
    def placed(self) -> bool:
        """Whether the checksums also cover the location of their bytes, as those of packed files do."""
        return self.steps is not None

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of chunks along each dim."""
        return tuple(-(-n // c) for n, c in zip(self.box.shape, self.chunk, strict=True))

    @property
    def pitch(self) -> int:
        """Bytes from one chunk to the next."""
        return math.prod(self.chunk) * self.itemsize + 4

    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes from one chunk to the next, along each dim."""
        return row_major(self.grid, self.pitch) if self.steps is None else self.steps

    def offset_of(self, box: Box) -> int | None:
        """Where the chunk with just this box begins in the file; None if there is none, or it is padded."""
        if box.shape != self.chunk:
            return None
        offset = self.offset
        dims = zip(box.start, self.box.start, self.chunk, self.grid, self.strides, strict=True)
        for at, start, size, count, step in dims:
            number, rest = divmod(at - start, size)
            if rest or not 0 <= number < count:
                return None
            offset += number * step
        return offset

    def block_at(self, offset: int) -> Block:
        """The block of the chunk that begins there in the file."""
        return Block(offset, self.pitch - 4, placed=self.placed)

    def extents(self, within: Box | None = None) -> Iterator[Extent]:
        """An extent for each chunk, or only for those that intersect a box."""
        strides, steps = row_major(self.chunk, self.itemsize), self.strides
        common = self.box if within is None else self.box.intersect(within)
        if common is None:
            return
        dims = zip(common.start, common.shape, self.box.start, self.chunk, strict=True)
        for at in product(*(range((a - b) // c, -(-(a - b + n) // c)) for a, n, b, c in dims)):
            begin = tuple(i * c for i, c in zip(at, self.chunk, strict=True))
            shape = tuple(
                min(c, n - b) for c, n, b in zip(self.chunk, self.box.shape, begin, strict=True)
            )
            start = tuple(a + b for a, b in zip(self.box.start, begin, strict=True))
            offset = self.offset + offset_of(at, steps)
            block = self.block_at(offset)
            yield Extent(Box(start, shape), self.file, offset, strides, block)


@dataclass(frozen=True, slots=True)
class FileRun:
    """Boxes of equal shape that follow each other along a dim, each in a file of its own, all at the same place of it.

    It is equivalent to `Tiles` for each file, and planning does not have to enumerate the files.

    Attributes:
        first: the box in the first file.
    """

    first: Tiles
    dim: int
    files: Sequence[str]

    @property
    def file(self) -> str:
        """The first file."""
        return self.first.file

    @property
    def box(self) -> Box:
        """The box that all of them form."""
        shape = list(self.first.box.shape)
        shape[self.dim] *= len(self.files)
        return Box(self.first.box.start, tuple(shape))

    def tiles(self, number: int) -> Tiles:
        """The box in one of the files."""
        box = self.first.box
        start = list(box.start)
        start[self.dim] += number * box.shape[self.dim]
        return replace(self.first, box=Box(tuple(start), box.shape), file=self.files[number])

    def parts(self, within: Box) -> Iterator[tuple[Tiles, Sequence[str]]]:
        """The files of which a box intersects the same part: what the first of them has, and the others."""
        size, begin = self.first.box.shape[self.dim], self.first.box.start[self.dim]
        low = max(0, within.start[self.dim] - begin)
        high = min(len(self.files) * size, within.stop[self.dim] - begin)
        first, last = -(-low // size), high // size  # those that are wholly within
        if first < last:
            yield self.tiles(first), self.files[first + 1 : last]
        for cut in dict.fromkeys((low // size, (high - 1) // size)):
            if not first <= cut < last:
                yield self.tiles(cut), ()


def single_extents(
    extents: Iterable[Extent | Tiles], within: Box | None = None
) -> Iterator[Extent]:
    """Extents of single chunks: each `Tiles` is expanded into one extent for each chunk."""
    for extent in extents:
        if isinstance(extent, Tiles):
            yield from extent.extents(within)
        else:
            yield extent


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor, and its location in one rank's local buffer.

    Element `box.start + i` is at element `offset + sum(i[d] * strides[d])` of the buffer. `buffer`
    is the name of a flat buffer that several tensors share; None is memory of the tensor's own.
    """

    box: Box
    offset: int
    strides: tuple[int, ...]
    buffer: str | None = None

    def part(self, box: Box) -> Piece:
        """The part of it that is a box within its own."""
        within = tuple(a - b for a, b in zip(box.start, self.box.start, strict=True))
        return Piece(box, self.offset + offset_of(within, self.strides), self.strides, self.buffer)


def cut_piece(piece: Piece, start: int, stop: int) -> Iterator[Piece]:
    """The parts of a piece that lie in a range of its buffer: few, if its strides are nested as in arrays.

    Yields:
        Pieces of the same buffer; their offsets count from its beginning.
    """
    shape, strides = piece.box.shape, piece.strides
    span = 1 + reach(shape, strides)
    if 0 in shape or piece.offset >= stop or piece.offset + span <= start:
        return
    if start <= piece.offset and piece.offset + span <= stop:
        yield piece
        return
    # of the largest steps
    d = max((d for d, n in enumerate(shape) if n > 1), key=strides.__getitem__)
    count, step = shape[d], strides[d]
    inner = span - (count - 1) * step  # elements that one index spans
    # that reaches into the range
    first = min(count, max(0, (start - piece.offset - inner) // step + 1))
    last = max(first, min(count, -((piece.offset - stop) // step)))
    # the first that is wholly inside
    whole = min(last, max(first, -((piece.offset - start) // step)))
    end = max(whole, min(last, (stop - piece.offset - inner) // step + 1))
    if whole < end:
        yield _along(piece, d, whole, end)
    for index in (*range(first, whole), *range(end, last)):
        yield from cut_piece(_along(piece, d, index, index + 1), start, stop)


def _along(piece: Piece, d: int, low: int, high: int) -> Piece:
    """The indices `[low, high)` of one dim of a piece."""
    begin, shape = list(piece.box.start), list(piece.box.shape)
    begin[d] += low
    shape[d] = high - low
    box = Box(tuple(begin), tuple(shape))
    return Piece(box, piece.offset + low * piece.strides[d], piece.strides, piece.buffer)


@dataclass(frozen=True, slots=True)
class TensorList:
    """The tensors of a checkpoint, in the order in which the training program lists them.

    `groups` maps the name of a parameter to the index of its optimizer group. Flat buffers depend
    on both.
    """

    tensors: Sequence[TensorInfo]
    groups: Mapping[str, int] = field(default_factory=dict)

    def renamed(self, rename: Callable[[str], str]) -> TensorList:
        """The same list with each tensor renamed."""
        infos = tuple(TensorInfo(rename(i.name), i.state, i.dtype, i.shape) for i in self.tensors)
        return TensorList(infos, {rename(n): g for n, g in self.groups.items()})

    def placed(self) -> TensorList:
        """The same list without stored padding tensors, which layouts place together with the tensor they pad."""
        padding = {i.key.padding for i in self.tensors}
        return TensorList(tuple(i for i in self.tensors if i.key not in padding), self.groups)
