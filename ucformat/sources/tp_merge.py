"""Merging tensor-parallel ranks' parts into whole tensors, for every engine that saves each rank's parts separately."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from ucformat.errors import IntegrityError, LayoutError, UsageError, option_text
from ucformat.geometry.box import Box
from ucformat.geometry.flat_buffer import flat_boxes
from ucformat.geometry.layout import Layout
from ucformat.geometry.local import Cut, keep_rows, local_dims, regions_of
from ucformat.geometry.placement import Shard
from ucformat.geometry.tensor import Key
from ucformat.geometry.view import Part
from ucformat.sources.index import TensorIndex

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ucformat.sources.index import Locate
    from ucformat.sources.pickle.file import TorchFile
    from ucformat.sources.pickle.stand_ins import StoredTensor
    from ucformat.storage.base import Store


# Compare copies of one tensor in several files, reading as little as possible.
#
# The CRC-32 in the zip directory decides if each tensor has a record of its own. Others are read
# and compared: first the leading elements, which expose most differences; then all of a tensor up
# to 1 MiB, or 16 samples of 64 KiB.

#: `constant`: equal, but one repeated value, row or column, so that different tensors may be equal
#: by chance.
Verdict = Literal["equal", "constant", "different"]

_MAX_WHOLE_BYTES = 1 << 20
_SAMPLES, _SAMPLE_BYTES = 16, 1 << 16
_HEAD_BYTES, _SMALL = 1 << 9, 8  # bytes, and elements of a small tensor


class LocalContents(TensorIndex):
    """The tensors of one model-parallel rank; it also records which are whole in a file, for their checksums."""

    __slots__ = ("label", "large", "whole")

    def __init__(self, label: str = "") -> None:
        super().__init__()
        self.whole: dict[Key, tuple[TorchFile, StoredTensor]] = {}
        self.large: dict[Key, None] = {}  # large tensors in plain values
        self.label = label

    def add_whole(self, name: str, state: str, file: TorchFile, tensor: StoredTensor) -> None:
        """Add a tensor that is whole in one file."""
        super().add_whole(name, state, file, tensor)
        if (key := Key(name, state)) in self.infos:  # else it is unreadable
            self.whole[key] = file, tensor

    def replica(self, key: Key, box: Box | None = None) -> Replica:
        """A tensor, or a box of it, to compare with other copies."""
        info = self.infos[key]
        box = box or Box.whole(info.shape)
        whole = self.whole.get(key) if box == Box.whole(info.shape) else None
        return Replica(self.locate[key], box, info.itemsize, whole)

    def forget(self, keys: Iterable[Key]) -> None:
        """Remove tensors that another rank's contents hold."""
        for key in keys:
            self.infos.pop(key, None)
            self.locate.pop(key, None)

    def add_large(self, path: str, file: TorchFile, tensor: StoredTensor) -> str:
        """Add a tensor from a plain value, named by its path; returns the name."""
        name = super().add_large(self.label + path, file, tensor)
        if (key := Key(name, "weight")) in self.infos:
            self.large[key] = None
        return name


class Replica:
    """A box of a stored tensor, to compare with other copies; `whole` if one file holds exactly this box."""

    def __init__(
        self,
        locate: Locate,
        box: Box,
        itemsize: int,
        whole: tuple[TorchFile, StoredTensor] | None = None,
    ) -> None:
        self.locate, self.box, self.itemsize, self._whole = locate, box, itemsize, whole

    def crc32(self) -> int:
        """CRC-32 of its bytes, as recorded in the file; 0 if none is recorded."""
        if self._whole is None:
            return 0
        file, tensor = self._whole
        return file.crc32(tensor) if tensor.numel == tensor.size == self.box.size else 0

    def ranges(self, *, short: bool) -> Iterable[tuple[int, int]]:
        """The flat ranges to compare, as (start, stop) in elements.

        Args:
            short: only enough to find out whether one value, row or column is repeated.
        """
        size = self.box.size
        few, place = _HEAD_BYTES // self.itemsize, _SAMPLE_BYTES // self.itemsize
        if size <= 4 * few:
            return [(0, _SMALL), (0, size)] if size > _SMALL else [(0, size)] if size else []
        row = size // self.box.shape[0]
        first = [(0, few), *([(row, min(size, row + few))] if few < row < size else [])]
        if short:
            return [*first, (0, min(size, place))]
        if size * self.itemsize <= _MAX_WHOLE_BYTES:
            return [*first, (0, size)]
        step = (size - place) // (_SAMPLES - 1)
        return [*first, *((i * step, i * step + place) for i in range(_SAMPLES))]

    def read(self, store: Store, start: int, stop: int) -> bytes:
        """Read a flat range."""
        from ucformat.reading.execute import read_extents

        boxes = (part.shift(self.box.start) for part in flat_boxes(self.box.shape, start, stop))
        return read_extents(store, self.locate, boxes, self.itemsize, f"{self.box} of a tensor")


def compare(store: Store, copies: Sequence[Replica]) -> Verdict:
    """Compare copies of one tensor."""
    if (same := _by_sums(copies)) is False:
        return "different"
    repeated = _Repeated(copies[0].box.shape)
    for start, stop in copies[0].ranges(short=same is True):
        parts = {copy.read(store, start, stop) for copy in copies[: 1 if same else None]}
        if len(parts) > 1:
            return "different"
        repeated.add(start, parts.pop(), copies[0].itemsize)
    return "constant" if repeated.found else "equal"


def _same(store: Store, copies: Sequence[Replica]) -> bool:
    """Whether all copies have the same bytes."""
    same = _by_sums(copies)
    if same is not None:
        return same
    ranges = copies[0].ranges(short=False)
    return all(
        len({copy.read(store, start, stop) for copy in copies}) == 1 for start, stop in ranges
    )


class _Repeated:
    """Whether all elements read of a tensor repeat one slice along a dim."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._size = math.prod(shape)
        rows = [
            math.prod(shape[d:]) for d in range(len(shape) + 1)
        ]  # [d]: elements of a slice of the dims from d on
        self._ways = [(rows[d], rows[d + 1]) for d, n in enumerate(shape) if n > 1]
        self._seen: list[dict[int, bytes]] = [
            {} for _ in self._ways
        ]  # offset in the slice -> element
        self._again = [0] * len(self._ways)

    def add(self, start: int, data: bytes, itemsize: int) -> None:
        """Add the elements from index `start` on."""
        import numpy as np

        values = np.frombuffer(data, f"V{itemsize}")
        index = np.arange(start, start + len(values))
        for way, (outer, inner) in reversed(list(enumerate(self._ways))):
            _, first, inverse = np.unique(
                at := index // outer * inner + index % inner, return_index=True, return_inverse=True
            )
            seen = self._seen[way]
            same = bool((values[first][inverse] == values).all()) and all(
                seen.setdefault(place, value) == value
                for place, value in zip(at[first].tolist(), values[first].tolist(), strict=True)
            )
            self._again[way] += len(values)
            if not same:
                del self._ways[way], self._seen[way], self._again[way]

    @property
    def found(self) -> bool:
        """Also true for tensors of one element or none."""
        seen = zip(self._again, self._seen, strict=True)
        return self._size <= 1 or any(again > len(places) for again, places in seen)


def must_agree(store: Store, key: Key, copies: Sequence[Replica]) -> None:
    """Check that replicas have the same bytes."""
    for other in copies[1:]:
        if not _same(store, (copies[0], other)):
            one, two = (
                next((e.file for e in c.locate(c.box) if e.box.intersect(c.box)), "?")
                for c in (copies[0], other)
            )
            which = (
                f"{one} and {two}"
                if one != two
                else f"the parts of the tensor-parallel ranks in {one}"
            )
            raise IntegrityError(
                f"{key}: {which} should be equal, but differ",
                hint="files of different saves are mixed in one folder, or the ranks' copies had diverged in "
                f"training; if it is cut instead, specify how: {option_text('layout')}",
            )


def _by_sums(copies: Sequence[Replica]) -> bool | None:
    """Whether the recorded CRC-32s are equal; None if one is not recorded."""
    sums = [copy.crc32() for copy in copies]
    return len(set(sums)) == 1 if all(sums) else None


# How a parameter is sharded across the tensor-parallel ranks: its global shape, and the regions of
# each rank.
#
# A caller may also specify it by one word for each pattern of names (`cuts`), which becomes a
# layout.

TP = "tp"  # the axis of layouts
_MAX_PARTS = 1 << 16

Shapes = tuple[tuple[int, ...], ...]  # of the local tensors, by tensor-parallel rank


@dataclass(frozen=True, slots=True)
class TPSharding:
    """A global tensor and its regions: the parts of it that are stored in each tensor-parallel rank's local tensor.

    Equal boxes of several ranks are replicas. `padding`: regions of rows that files hold beyond the
    end of the tensor. `mean`: the tensor is the mean of the ranks' values. `scaled`: stored values
    must be multiplied by a factor.
    """

    shape: tuple[int, ...]
    regions: tuple[tuple[Part, ...], ...]
    padding: tuple[tuple[Part, ...], ...] = ()
    padding_rows: int = 0
    mean: bool = False
    scaled: bool = False
    why: str = ""

    def because(self, why: str) -> TPSharding:
        """A copy with this reason."""
        return replace(self, why=why)

    def strip(self, rows: int) -> TPSharding:
        """A copy whose trailing rows are padding."""
        if not self.shape or rows >= self.shape[0]:
            return self
        cut = [keep_rows(regions, rows) for regions in self.regions]
        return replace(
            self,
            shape=(rows, *self.shape[1:]),
            regions=tuple(kept for kept, _ in cut),
            padding=tuple(spare for _, spare in cut),
            padding_rows=self.shape[0] - rows,
        )

    @property
    def padding_shape(self) -> tuple[int, ...]:
        """The shape of the padding tensor."""
        return (self.padding_rows, *self.shape[1:])


def replicate(shapes: Shapes) -> TPSharding:
    """Every rank holds the whole tensor."""
    if len(set(shapes)) > 1:
        raise LayoutError(f"its parts have the shapes {_list(shapes)}, so they cannot be replicas")
    whole = Box.whole(shapes[0])
    return TPSharding(shapes[0], ((Part.aligned(whole, whole),),) * len(shapes))


def mean(shapes: Shapes) -> TPSharding:
    """The tensor is the mean of the ranks' values."""
    return replace(replicate(shapes), mean=len(shapes) > 1)


def concatenate(shapes: Shapes, dim: int) -> TPSharding:
    """The ranks' parts are concatenated along a dim, in which they may differ."""
    d = dim + len(shapes[0]) if dim < 0 else dim
    if not 0 <= d < len(shapes[0]):
        raise LayoutError(
            f"its parts of the shape {list(shapes[0])} cannot be joined along dim {dim}"
        )
    return shard(shapes, Shard(d, TP, sizes=tuple(s[d] if d < len(s) else 0 for s in shapes)))


def shard(shapes: Shapes, how: Shard, size: int | None = None) -> TPSharding:
    """The ranks' parts are those of a `Shard`.

    Args:
        size: global size of the dim; None: the sum of the parts, which include any padding.
    """
    ndim = len(shapes[0])
    d = how.dim + ndim if how.dim < 0 else how.dim
    if not 0 <= d < ndim or any(len(s) != ndim for s in shapes):
        raise LayoutError(
            f"its parts have the shapes {_list(shapes)}, which cannot be joined along dim {how.dim}"
        )
    if (
        how.sizes is None and how.parts is None and how.pad_to is None
    ):  # the widths are those of the files
        how = replace(how, sizes=tuple(s[d] for s in shapes))
    total = sum(s[d] for s in shapes) if size is None else size
    whole = (*shapes[0][:d], total, *shapes[0][d + 1 :])
    regions, padding = [], []
    for at, shape in enumerate(shapes):
        dims = local_dims(whole, (Cut(how, len(shapes), at),))
        found = tuple(n.size for n in dims)
        if found != shape:
            raise LayoutError(
                f"the part of tensor-parallel rank {at} has the shape {list(shape)}, where {_shard_text(how)} of "
                f"{list(whole)} gives {list(found)}"
            )
        kept, spare = regions_of(dims)
        regions.append(kept)
        padding.append(spare)
    rows = -total % how.pad_to if how.pad_to else 0
    if rows and d:
        raise LayoutError(f"{_shard_text(how)} pads dim {d}; padding is supported along dim 0 only")
    return TPSharding(whole, tuple(regions), tuple(padding) if rows else (), rows)


def sub_params(
    shapes: Shapes, view: Sequence[int | Sequence[int]], dim: int, widths: Sequence[Sequence[int]]
) -> TPSharding:
    """Several tensors, concatenated along a dim of a view, are each cut separately.

    Args:
        view: shape of the global tensor as a view, which may have more dims; -1: the remaining
            elements.
    """
    sizes: list[int] = [n if isinstance(n, int) else sum(n) for n in view]
    if not 0 <= dim < len(sizes):
        raise LayoutError(f"its sub-parameters are along dim {dim} of a view of {len(sizes)} dims")
    if any(len(w) != len(shapes) for w in widths):
        raise LayoutError(f"its sub-parameters are not cut for {len(shapes)} ranks")
    sizes[dim] = sum(sum(w) for w in widths)
    total = sum(math.prod(s) for s in shapes)
    free = [i for i, n in enumerate(sizes) if n < 0]
    known = math.prod(n for n in sizes if n >= 0)
    if free and known:
        sizes[free[0]] = total // known
    if len(free) > 1 or math.prod(sizes) != total:
        raise LayoutError(
            f"its parts of the shapes {_list(shapes)} are not {total} elements of the view {sizes}"
        )
    of, outer, inner = _dim_of(shapes[0], sizes, dim)
    if outer * len(widths) > _MAX_PARTS:
        raise LayoutError(f"it would be split into {outer * len(widths):,} parts")
    parts = tuple(tuple(w * inner for w in part) for part in widths) * outer
    return shard(shapes, Shard(of, TP, parts=parts))


def _dim_of(shape: tuple[int, ...], view: list[int], dim: int) -> tuple[int, int, int]:
    """The dim of the tensor that a dim of its view is in, and the product of those before and after it in there."""
    for d in range(len(shape)):
        for first in range(dim + 1):
            for last in range(dim + 1, len(view) + 1):
                if _splits(view[:first], shape[:d]) and _splits(view[last:], shape[d + 1 :]):
                    return d, math.prod(view[first:dim]), math.prod(view[dim + 1 : last])
    raise LayoutError(
        f"the view {view} of its sub-parameters does not split the dims of {list(shape)}"
    )


def _splits(view: list[int], shape: tuple[int, ...]) -> bool:
    """Whether a view is of this shape, each dim perhaps split into several."""
    rest = list(view)
    for size in shape:
        product = 1
        while rest and (product < size or rest[0] == 1):
            product *= rest.pop(0)
        if product != size:
            return False
    return not rest


def _shard_text(how: Shard) -> str:
    given = {"sizes": how.sizes, "parts": how.parts, "pad_to": how.pad_to}
    return f"shard {how.dim}" + "".join(f" {k} {v}" for k, v in given.items() if v is not None)


def _list(shapes: Shapes) -> str:
    return ", ".join(str(list(s)) for s in shapes[:8]) + (", …" if len(shapes) > 8 else "")


#: By the words that callers give; any number is a dim along which the ranks' parts are joined.
CUTS: dict[str, list[Any]] = {
    "replicate": ["replicate"],
    "mean": [{"partial": "mean", "over": TP}],
    "halves": [{"shard": 0, "over": TP, "parts": [1, 1]}],
}


def layout_of_cuts(cuts: Mapping[str, str | int] | None, ranks: int) -> Layout | None:
    """The layout that `cuts` specifies; None if `cuts` is empty."""
    if not cuts:
        return None
    return Layout(
        {TP: ranks},
        [{"match": pattern, "place": _place(pattern, how)} for pattern, how in cuts.items()],
    )


def cuts_option(cuts: Mapping[str, str]) -> str:
    """The option for these cuts, as `option_text` spells it."""
    return option_text(
        "cuts", repr(dict(cuts)), ",".join(f"{pattern}={how}" for pattern, how in cuts.items())
    )


def _place(pattern: str, how: str | int) -> list[Any]:
    if str(how).isdecimal():
        return [{"shard": int(how), "over": TP}]
    if how not in CUTS:
        raise UsageError(
            f"{how!r}, given for {pattern!r}, is not a sharding",
            hint=f"use one of {', '.join(CUTS)}, or the number of the dim along which the ranks' parts are joined",
        )
    return CUTS[str(how)]
