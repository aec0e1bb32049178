"""The tensors of a distributed checkpoint: stacked, as the files hold chunks of them, and as single parameters.

Up to Megatron-Core 0.14 the optimizer's format `fully_sharded_model_space` stored flat ranges of
the ranks' chunks: the shape of such an entry is the number of chunks along each dim, followed by
the size of the flattened chunk; `mcore_data` in `.metadata` has the shape of the tensor itself.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from ucformat.errors import IntegrityError
from ucformat.geometry.box import Box
from ucformat.geometry.coverage import prove
from ucformat.geometry.flat_buffer import flat_boxes, flat_extents
from ucformat.geometry.tensor import Extent, Key, TensorInfo
from ucformat.geometry.view import BoxPair, View
from ucformat.schema import ITEMSIZE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ucformat.engines.megatron.folder import MegatronArguments
    from ucformat.sources.distcp.metadata import Items, Metadata
    from ucformat.sources.index import Locate, TensorIndex
    from ucformat.storage.base import Store

_SHAPE = "nd_reformulated_orig_global_shape"


def original_shapes(meta: Metadata) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors that are stored as flat ranges, by entry."""
    data = meta.root.get("mcore_data")
    out = {}
    for fqn, recorded in data.items() if isinstance(data, dict) else ():
        shape = recorded.get(_SHAPE) if isinstance(recorded, dict) else None
        if shape is None:
            continue
        if not isinstance(shape, tuple | list) or not all(type(n) is int and n >= 0 for n in shape):
            raise IntegrityError(f"{meta.file} gives {fqn} the invalid shape {shape!r}")
        out[fqn] = tuple(shape)
    return out


class StackedTensor:
    """One tensor entry, in the coordinates of the whole, stacked tensor.

    Args:
        original: the tensor's shape if flat ranges of it are stored, else None.
    """

    def __init__(
        self,
        items: Items,
        fqn: str,
        key: Key,
        leading: int = 0,
        original: tuple[int, ...] | None = None,
    ) -> None:
        entry = items.meta.tensors[fqn]
        self.items, self.fqn, self.key, self.leading = items, fqn, key, leading
        self.dtype, self.shape = entry.dtype, entry.shape if original is None else original
        #: The boxes of the tensor in each stored chunk, in storage order, by the chunk's box.
        self._chunks: dict[Box, tuple[Box, ...]] = {
            b: (b,) if original is None else _flat(fqn, b, entry.shape, original)
            for b in entry.boxes
            if b.size
        }
        if leading > len(self.shape):
            raise IntegrityError(
                f"{items.meta.file}: {fqn} has the shape {list(self.shape)}, but its name "
                f"implies that {leading} "
                "dims are those of layers and experts"
            )
        self._by_index: dict[tuple[int, ...], list[Box]] | None = None
        self._extents: dict[Box, list[Extent]] = {}
        self._lock = threading.Lock()

    def boxes(self) -> Iterator[Box]:
        """The stored boxes."""
        return (b for boxes in self._chunks.values() for b in boxes)

    def extents(self, box: Box) -> Iterator[Extent]:
        """The extents of a box of the whole tensor, after a check that they cover it."""
        stored = ((chunk, b) for chunk in self._near(box) for b in self._chunks[chunk])
        near = [(chunk, clip) for chunk, b in stored if (clip := b.intersect(box))]
        info = TensorInfo(*self.key, self.dtype, box.shape)
        shift = tuple(-a for a in box.start)
        prove(info, [(str(chunk), clip.shift(shift)) for chunk, clip in near])
        for chunk in dict.fromkeys(chunk for chunk, _ in near):
            yield from self._read(chunk)

    def _near(self, box: Box) -> Iterable[Box]:
        """The chunks that may overlap a box: of a stack those of its layer and expert."""
        n = self.leading
        if self._by_index is None:
            by_index: dict[tuple[int, ...], list[Box]] = {}
            if all(b.shape[:n] == (1,) * n for b in self.boxes()):
                for chunk, boxes in self._chunks.items():
                    by_index.setdefault(boxes[0].start[:n], []).append(chunk)
            self._by_index = by_index  # whole: another thread may look at it
        if not self._by_index or box.shape[:n] != (1,) * n:
            return self._chunks
        return self._by_index.get(box.start[:n], [])

    def _read(self, chunk: Box) -> list[Extent]:
        with self._lock:
            extents = self._extents.get(chunk)
        if extents is None:
            shape = self.items.meta.tensors[self.fqn].shape
            info = TensorInfo(*self.key, self.dtype, shape)
            stored = self.items.locate(self.fqn, chunk, info)
            extents = self.items.chunk_extents(self.fqn, chunk, stored, info)
            if self._chunks[chunk] != (chunk,):
                extents = list(self._unflattened(chunk, *extents))
            with self._lock:
                self._extents[chunk] = extents
        return extents

    def _unflattened(self, chunk: Box, flat: Extent) -> Iterator[Extent]:
        """The extents of a flat range as boxes of the tensor."""
        unit = ITEMSIZE[self.dtype]
        if flat.strides[-1] != unit and flat.box.shape[-1] > 1:
            raise IntegrityError(
                f"{flat.file}: the flat range {chunk} of {self.fqn} is not contiguous"
            )
        grid = self.items.meta.tensors[self.fqn].shape
        local = tuple(n // g for n, g in zip(self.shape, grid, strict=False))
        extents = flat_extents(local, chunk.start[-1], chunk.stop[-1], unit, flat.file, flat.offset)
        for box, extent in zip(self._chunks[chunk], extents, strict=True):
            yield replace(extent, box=box)


def _flat(
    fqn: str, stored: Box, counts: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[Box, ...]:
    """A flat range of one chunk of a regular grid, as boxes of the tensor."""
    numel = counts[-1] if counts else 0
    grid = counts[:-1]
    if len(grid) != len(shape) or any(g < 1 or n % g for n, g in zip(shape, grid, strict=True)):
        raise IntegrityError(
            f"{fqn}: a grid of {list(grid)} chunks does not divide a tensor of {list(shape)}"
        )
    local = tuple(n // g for n, g in zip(shape, grid, strict=True))
    start, stop = stored.start[-1], stored.start[-1] + stored.shape[-1]
    outside = any(a >= g for a, g in zip(stored.start, grid, strict=False))
    whole = math.prod(local) == numel and stored.shape[:-1] == (1,) * len(grid)
    if not whole or stop > numel or outside:
        raise IntegrityError(
            f"{fqn}: {stored} is not a range of a chunk of the shape {list(local)}"
        )
    corner = tuple(i * n for i, n in zip(stored.start, local, strict=False))
    return tuple(b.shift(corner) for b in flat_boxes(local, start, stop))


@dataclass(frozen=True, slots=True)
class ReadableTensor:
    """A whole tensor in one state, and how to find the extents of a box of it."""

    key: Key
    dtype: str
    shape: tuple[int, ...]
    boxes: Callable[[], Iterator[Box]]  # the boxes that ranks stored
    extents: Callable[[Box], Iterator[Extent]]


@dataclass(frozen=True, slots=True)
class UnstackedPart:
    """One parameter in a stored tensor, at an index of its leading dims."""

    stored: StackedTensor
    index: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's own shape."""
        return self.stored.shape[len(self.index) :]

    def boxes(self) -> Iterator[Box]:
        """Its stored boxes."""
        n = len(self.index)
        whole = Box((*self.index, *[0] * len(self.shape)), (*[1] * n, *self.shape))
        for box in self.stored.boxes():
            if clip := box.intersect(whole):
                yield Box(clip.start[n:], clip.shape[n:])

    def extents(self, box: Box) -> Iterator[Extent]:
        """The extents of a box of it, as boxes of that box."""
        n = len(self.index)
        inside = Box((*self.index, *box.start), (*[1] * n, *box.shape))
        info = TensorInfo(*self.stored.key, self.stored.dtype, box.shape)
        axes = tuple(range(n, n + len(box.shape)))
        view = View(info, ((info.key, BoxPair(Box.whole(box.shape), inside, axes)),))
        return view.extents(lambda _, box: self.stored.extents(box))


class Opened(Protocol):
    """What finding parameters in the flat buckets of its optimizer needs of a checkpoint."""

    store: Store
    args: MegatronArguments
    contents: TensorIndex
    weights: dict[str, list[UnstackedPart]]


def unstacked(key: Key, parts: Sequence[UnstackedPart]) -> ReadableTensor:
    """A parameter stored in one or several parts, concatenated along the first dim."""
    first = parts[0]
    if len(parts) == 1:
        return ReadableTensor(key, first.stored.dtype, first.shape, first.boxes, first.extents)
    if len({(s.shape[1:], s.stored.dtype) for s in parts}) > 1 or not first.shape:
        raise IntegrityError(
            f"{key}: its two halves have the shapes {[list(s.shape) for s in parts]}"
        )
    rows = sum(s.shape[0] for s in parts)
    whole = Box.whole((rows, *first.shape[1:]))
    starts = [sum(s.shape[0] for s in parts[:i]) for i in range(len(parts))]

    def moved(box: Box, offset: int) -> Box:
        return box.shift((offset, *[0] * (len(box.shape) - 1)))

    def boxes() -> Iterator[Box]:
        for part, start in zip(parts, starts, strict=True):
            yield from (moved(b, start) for b in part.boxes())

    def extents(box: Box) -> Iterator[Extent]:
        for part, start in zip(parts, starts, strict=True):
            clip = box.intersect(moved(Box.whole(part.shape), start))
            if clip is not None:
                shift = tuple(a - b for a, b in zip(clip.start, box.start, strict=True))
                for e in part.extents(moved(clip, -start)):
                    yield replace(e, box=e.box.shift(shift))

    return ReadableTensor(key, first.stored.dtype, whole.shape, boxes, extents)


def add_tensor(contents: TensorIndex, tensor: ReadableTensor, args: MegatronArguments) -> None:
    """Add a tensor to the contents, the padding of a vocabulary separately."""
    rows = args.rows(tensor.key.name, tensor.shape[0]) if tensor.shape else 0
    if not tensor.shape or rows >= tensor.shape[0]:
        whole = Box.whole(tensor.shape)
        contents.add(*tensor.key, tensor.dtype, tensor.shape, partial(_part, tensor, whole))
        return
    row_shape = tensor.shape[1:]
    unpadded = Box.whole((rows, *row_shape))
    padding = Box.whole((tensor.shape[0] - rows, *row_shape)).shift((rows, *[0] * len(row_shape)))
    contents.add(*tensor.key, tensor.dtype, unpadded.shape, partial(_part, tensor, unpadded))
    contents.add(*tensor.key.padding, tensor.dtype, padding.shape, partial(_part, tensor, padding))


def _part(tensor: ReadableTensor, box: Box, within: Box | None) -> Iterator[Extent]:
    """The extents of a box of a tensor, as boxes of that box, from which `within` counts."""
    if within is None:
        return tensor.extents(box)
    inside = tensor.extents(within.shift(box.start))
    return (replace(e, box=e.box.shift(within.start)) for e in inside)


def joined(
    key: Key, dtype: str, shape: tuple[int, ...], parts: Sequence[tuple[Locate, Sequence[BoxPair]]]
) -> ReadableTensor:
    """The global tensor whose parts ranks hold."""
    owners: dict[Box, int] = {}
    views: list[tuple[Key, BoxPair]] = []
    for i, (_, regions) in enumerate(parts):
        views += ((Key(str(i), ""), r) for r in regions if owners.setdefault(r.target, i) == i)
    view = View(TensorInfo(*key, dtype, shape), tuple(views))

    def extents(box: Box) -> Iterator[Extent]:
        shift = tuple(-a for a in box.start)
        info = TensorInfo(*key, dtype, box.shape)
        inner = []
        for source, part in view.parts:
            clip = part.target.intersect(box)
            if clip is not None:
                move = tuple(a - b for a, b in zip(clip.start, part.target.start, strict=True))
                box_inside = Box(part.box.shift(move).start, clip.shape)
                inner.append((source, BoxPair(clip.shift(shift), box_inside, part.axes)))
        return View(info, tuple(inner)).extents(
            lambda source, near: parts[int(source.name)][0](near)
        )

    return ReadableTensor(key, dtype, shape, lambda: (p.target for _, p in view.parts), extents)
