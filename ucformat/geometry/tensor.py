"""The nouns of the whole project: a tensor, the extents that store it, the pieces that a rank holds of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from ucformat.errors import UsageError
from ucformat.geometry.box import Box, row_major
from ucformat.schema.dtypes import ITEMSIZE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

__all__ = ["Block", "Extent", "Key", "Piece", "TensorInfo", "TensorList", "Tiles", "single_extents"]


class Key(NamedTuple):
    """What names a stored tensor: its name and its state (`weight`, `master`, `exp_avg`, …)."""

    name: str
    state: str

    def __str__(self) -> str:
        return f"{self.name} ({self.state})"

    @property
    def padding(self) -> Key:
        """The tensor of the rows that pad this one, where a checkpoint keeps them."""
        return Key(self.name, f"{self.state}.padding")

    def partial(self, rank: int) -> Key:
        """A rank's own value of a tensor that is reduced (averaged) over ranks."""
        return Key(self.name, f"{self.state}.partial{rank}")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A logical tensor in one state: what is known of it without reading its bytes."""

    name: str
    state: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        try:
            (self.name + self.state).encode()
        except UnicodeEncodeError:
            raise UsageError(
                f"the tensor name {self.name!r} ({self.state!r}) is not Unicode text",
                hint="rename it where it is saved",
            ) from None
        if self.dtype not in ITEMSIZE:
            raise UsageError(
                f"tensor {self.name} ({self.state}) has the unknown dtype {self.dtype!r}",
                hint=f"known are {', '.join(ITEMSIZE)}",
            )
        if any(n < 0 for n in self.shape):
            raise UsageError(f"tensor {self.name} ({self.state}) has the impossible shape {self.shape}")

    @property
    def key(self) -> Key:
        """Name and state."""
        return Key(self.name, self.state)

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
        return self.size * self.itemsize


@dataclass(frozen=True, slots=True)
class Block:
    """The stored unit that a checksum covers: `nbytes` raw bytes from `offset` on.

    `crc32c` is the expected checksum, or None where it is stored little-endian in the four bytes that follow. Where it
    is `placed`, it covers the place of the bytes, too (`reading.execute.place_checksum`).
    """

    offset: int
    nbytes: int
    crc32c: int | None = None
    placed: bool = False

    @property
    def stored(self) -> int:
        """Bytes to read for the block and what is stored of its checksum."""
        return self.nbytes + (4 if self.crc32c is None else 0)


@dataclass(frozen=True, slots=True)
class Extent:
    """A box of a tensor that lies, raw and little-endian, in a file.

    `file` is a key of the store that the tensor's source reads. Element `box.start + i` lies at byte
    `offset + sum(i[d] * strides[d])`; strides are in bytes, one for each dim. Extents of one tensor with the same box
    are replicas: any one of them serves.
    """

    box: Box
    file: str
    offset: int
    strides: tuple[int, ...]
    block: Block | None = None

    def leaves_block(self, itemsize: int) -> bool:
        """Whether bytes of it lie outside of its block, which then is not what its checksum covers."""
        if self.block is None or not self.box.size:
            return False
        steps = [(n - 1) * s for n, s in zip(self.box.shape, self.strides, strict=True)]
        first, last = self.offset + sum(min(s, 0) for s in steps), self.offset + sum(max(s, 0) for s in steps)
        return first < self.block.offset or last + itemsize > self.block.offset + self.block.nbytes

    @property
    def last(self) -> int:
        """The byte at which the last element begins."""
        return self.offset + sum((n - 1) * s for n, s in zip(self.box.shape, self.strides, strict=True))


@dataclass(frozen=True, slots=True)
class Tiles:
    """A box of a tensor that lies in a file as equal chunks, one after another, each followed by its crc32c.

    The chunks are those of a regular grid that begins at `box.start`, in C order; a chunk that reaches past the box is
    padded to its full shape. Chunk number `k` begins at byte `offset + k * pitch`; with `steps`, the bytes from one
    chunk to the next along each dim, they are tiles of a packed file, which lie as these say. Stands for one extent
    for each chunk, so that planning costs nothing for each chunk.
    """

    box: Box
    file: str
    offset: int
    chunk: tuple[int, ...]
    itemsize: int
    steps: tuple[int, ...] | None = None

    @property
    def placed(self) -> bool:
        """Whether the checksums cover the places of their bytes, too, as those of packed files do."""
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

    def extents(self) -> Iterator[Extent]:
        """An extent for each chunk."""
        strides, steps = row_major(self.chunk, self.itemsize), self.strides
        for at in product(*map(range, self.grid)):
            begin = tuple(i * c for i, c in zip(at, self.chunk, strict=True))
            shape = tuple(min(c, n - b) for c, n, b in zip(self.chunk, self.box.shape, begin, strict=True))
            start = tuple(a + b for a, b in zip(self.box.start, begin, strict=True))
            offset = self.offset + sum(i * s for i, s in zip(at, steps, strict=True))
            block = Block(offset, self.pitch - 4, placed=self.placed)
            yield Extent(Box(start, shape), self.file, offset, strides, block)


def single_extents(found: Iterable[Extent | Tiles]) -> Iterator[Extent]:
    """Extents, each of one chunk: `Tiles` come apart."""
    for extent in found:
        if isinstance(extent, Tiles):
            yield from extent.extents()
        else:
            yield extent


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor and where it lies in one rank's local buffer.

    Element `box.start + i` lies at element `offset + sum(i[d] * strides[d])` of the buffer. `buffer` names a flat
    buffer that several tensors share; None is the tensor's own.
    """

    box: Box
    offset: int
    strides: tuple[int, ...]
    buffer: str | None = None


@dataclass(frozen=True, slots=True)
class TensorList:
    """The tensors of a checkpoint, in the order the training program lists them.

    `groups` gives a parameter's optimizer group, by its name. Flat buffers depend on both.
    """

    tensors: tuple[TensorInfo, ...]
    groups: Mapping[str, int] = field(default_factory=dict)

    def renamed(self, rename: Callable[[str], str]) -> TensorList:
        """The same, each tensor under the name that `rename` makes of its name."""
        infos = tuple(TensorInfo(rename(i.name), i.state, i.dtype, i.shape) for i in self.tensors)
        return TensorList(infos, {rename(n): g for n, g in self.groups.items()})

    def placed(self) -> TensorList:
        """The same without trained padding: layouts place it with the tensor that it pads."""
        padding = {i.key.padding for i in self.tensors}
        return TensorList(tuple(i for i in self.tensors if i.key not in padding), self.groups)
