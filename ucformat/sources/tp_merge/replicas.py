"""Whether what several files hold of one tensor is the same, without reading more than needed.

The zip directory's CRC-32 tells where a tensor has a record of its own. Others are read and compared: the first
elements, which tell most that differ; then whole up to 1 MiB, larger ones in 16 places of 64 KiB.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from ucformat.errors import IntegrityError, option_text
from ucformat.geometry.box import Box
from ucformat.geometry.flat_buffer import flat_boxes
from ucformat.sources.index import TensorIndex

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ucformat.geometry.tensor import Key
    from ucformat.sources.index import Locate
    from ucformat.sources.pickle.file import TorchFile
    from ucformat.sources.pickle.stand_ins import StoredTensor
    from ucformat.storage.base import Store

__all__ = ["LocalContents", "Replica", "Verdict", "compare", "must_agree"]

#: `constant`: equal, but made of one value, row or column, repeated: then two different tensors may well be equal.
Verdict = Literal["equal", "constant", "different"]

_WHOLE = 1 << 20
_PLACES, _PLACE = 16, 1 << 16
_FIRST, _FEW = 1 << 9, 8  # bytes, and elements of a small tensor


class LocalContents(TensorIndex):
    """The tensors of one model-parallel rank; it also notes which are whole in a file, for their checksums."""

    __slots__ = ("label", "large", "whole")

    def __init__(self, label: str = "") -> None:
        super().__init__()
        self.whole: dict[Key, tuple[TorchFile, StoredTensor]] = {}
        self.large: dict[Key, None] = {}  # those that plain values hold
        self.label = label

    def add_whole(self, name: str, state: str, file: TorchFile, tensor: StoredTensor) -> None:
        """Add a tensor that is whole in one file."""
        super().add_whole(name, state, file, tensor)
        self.whole[next(reversed(self.infos))] = file, tensor

    def replica(self, key: Key, box: Box | None = None) -> Replica:
        """A tensor, or a box of it, to be compared with what others hold."""
        info = self.infos[key]
        box = box or Box.whole(info.shape)
        whole = self.whole.get(key) if box == Box.whole(info.shape) else None
        return Replica(self.locate[key], box, info.itemsize, whole)

    def forget(self, keys: Iterable[Key]) -> None:
        """Leave out tensors, where they are there: another rank's contents have them."""
        for key in keys:
            self.infos.pop(key, None)
            self.locate.pop(key, None)

    def add_large(self, path: str, file: TorchFile, tensor: StoredTensor) -> str:
        """A tensor out of a plain value, under the name of its path."""
        name = super().add_large(self.label + path, file, tensor)
        self.large[next(reversed(self.infos))] = None
        return name


class Replica:
    """A box of a stored tensor, to be compared with others; `whole` where it is all that one file holds of it."""

    def __init__(
        self, locate: Locate, box: Box, itemsize: int, whole: tuple[TorchFile, StoredTensor] | None = None
    ) -> None:
        self.locate, self.box, self.itemsize, self._whole = locate, box, itemsize, whole

    def crc32(self) -> int:
        """CRC-32 of its bytes, as the file has it; 0 where it has none."""
        if self._whole is None:
            return 0
        file, tensor = self._whole
        return file.crc32(tensor) if tensor.numel == tensor.size == self.box.size else 0

    def ranges(self, *, short: bool) -> Iterable[tuple[int, int]]:
        """Flat ranges of it to compare; short ones only tell what is repeated."""
        size = self.box.size
        few, place = _FIRST // self.itemsize, _PLACE // self.itemsize
        if size <= 4 * few:
            return [(0, _FEW), (0, size)] if size > _FEW else [(0, size)] if size else []
        row = size // self.box.shape[0]
        first = [(0, few), *([(row, min(size, row + few))] if few < row < size else [])]
        if short:
            return [*first, (0, min(size, place))]
        if size * self.itemsize <= _WHOLE:
            return [*first, (0, size)]
        step = (size - place) // (_PLACES - 1)
        return [*first, *((i * step, i * step + place) for i in range(_PLACES))]

    def read(self, store: Store, start: int, stop: int) -> bytes:
        """The bytes of a flat range of it."""
        from ucformat.reading.read import read_extents

        boxes = (part.shift(self.box.start) for part in flat_boxes(self.box.shape, start, stop))
        return read_extents(store, self.locate, boxes, self.itemsize, f"{self.box} of a tensor")


def compare(store: Store, copies: Sequence[Replica]) -> Verdict:
    """Whether copies of one shape hold the same bytes."""
    if (told := _by_sums(copies)) is False:
        return "different"
    repeated = _Repeated(copies[0].box.shape)
    for start, stop in copies[0].ranges(short=told is True):
        parts = {copy.read(store, start, stop) for copy in copies[: 1 if told else None]}
        if len(parts) > 1:
            return "different"
        repeated.add(start, parts.pop(), copies[0].itemsize)
    return "constant" if repeated.is_so else "equal"


def _same(store: Store, copies: Sequence[Replica]) -> bool:
    """Whether they hold the same bytes, whatever these are."""
    told = _by_sums(copies)
    if told is not None:
        return told
    ranges = copies[0].ranges(short=False)
    return all(len({copy.read(store, start, stop) for copy in copies}) == 1 for start, stop in ranges)


class _Repeated:
    """Whether all that was seen of a tensor is one slice along a dim, over and over."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._size = math.prod(shape)
        rows = [math.prod(shape[d:]) for d in range(len(shape) + 1)]  # [d]: elements of a slice of the dims from d on
        self._ways = [(rows[d], rows[d + 1]) for d, n in enumerate(shape) if n > 1]
        self._seen: list[dict[int, bytes]] = [{} for _ in self._ways]  # place in the slice -> element
        self._again = [0] * len(self._ways)

    def add(self, start: int, data: bytes, itemsize: int) -> None:
        """The elements from this one on."""
        import numpy as np

        values = np.frombuffer(data, f"V{itemsize}")
        index = np.arange(start, start + len(values))
        for way, (outer, inner) in reversed(list(enumerate(self._ways))):
            _, first, of = np.unique(
                at := index // outer * inner + index % inner, return_index=True, return_inverse=True
            )
            seen = self._seen[way]
            same = bool((values[first][of] == values).all()) and all(
                seen.setdefault(place, value) == value
                for place, value in zip(at[first].tolist(), values[first].tolist(), strict=True)
            )
            self._again[way] += len(values)
            if not same:
                del self._ways[way], self._seen[way], self._again[way]

    @property
    def is_so(self) -> bool:
        """True of a tensor of one element, too, and of none."""
        seen = zip(self._again, self._seen, strict=True)
        return self._size <= 1 or any(again > len(places) for again, places in seen)


def must_agree(store: Store, key: Key, copies: Sequence[Replica]) -> None:
    """IntegrityError, which names two files, where replicas differ."""
    for other in copies[1:]:
        if not _same(store, (copies[0], other)):
            one, two = (
                next((e.file for e in c.locate(c.box) if e.box.intersect(c.box)), "?") for c in (copies[0], other)
            )
            which = f"{one} and {two}" if one != two else f"the parts of the tensor-parallel ranks in {one}"
            raise IntegrityError(
                f"{key}: {which} should hold the same, and do not",
                hint="files of different saves are mixed in one folder, or the ranks' copies had come apart in "
                f"training; if it is cut instead, specify how: {option_text('layout')}",
            )


def _by_sums(copies: Sequence[Replica]) -> bool | None:
    """Whether the CRC-32s of tensors that have records of their own are equal; None where one is not known."""
    sums = [copy.crc32() for copy in copies]
    return len(set(sums)) == 1 if all(sums) else None
