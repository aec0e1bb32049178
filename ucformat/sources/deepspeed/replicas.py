"""Whether what several files hold of one tensor is the same, without reading more than needed.

The zip directory's CRC-32 tells where a tensor has a record of its own. Others are read and compared: whole up to
1 MiB, larger ones in 16 places of 64 KiB.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ucformat.errors import IntegrityError
from ucformat.geometry.flat import flat_boxes
from ucformat.sources.contents import Contents

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ucformat.geometry.box import Box
    from ucformat.geometry.tensor import Extent, Key
    from ucformat.sources.contents import Locate
    from ucformat.sources.stand_ins import StoredTensor
    from ucformat.sources.torch_file import TorchFile
    from ucformat.storage.base import Store

__all__ = ["Copy", "LocalContents", "Verdict", "compare", "must_agree"]

#: `constant`: equal, but all elements are one value, so that two different tensors may well be equal.
Verdict = Literal["equal", "constant", "different"]

_WHOLE = 1 << 20
_PLACES, _PLACE = 16, 1 << 16


class LocalContents(Contents):
    """The tensors of one model-parallel rank; it also notes which lie whole in a file, for their checksums."""

    __slots__ = ("label", "large", "whole")

    def __init__(self, label: str = "") -> None:
        super().__init__()
        self.whole: dict[Key, tuple[TorchFile, StoredTensor]] = {}
        self.large: dict[Key, None] = {}  # those that plain values hold
        self.label = label

    def add_whole(self, name: str, state: str, file: TorchFile, tensor: StoredTensor) -> None:
        """A tensor that lies whole in one file."""
        super().add_whole(name, state, file, tensor)
        self.whole[next(reversed(self.infos))] = file, tensor

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


@dataclass(frozen=True, slots=True)
class Copy:
    """A box of a stored tensor; `whole` where it is all that one file holds of it."""

    locate: Locate
    box: Box
    itemsize: int
    whole: tuple[TorchFile, StoredTensor] | None = None


def compare(store: Store, copies: Sequence[Copy]) -> Verdict:
    """Whether copies of one shape hold the same bytes."""
    sums = [_own_sum(copy) for copy in copies]
    told = all(sums)
    if told and len(set(sums)) > 1:
        return "different"
    extents = [list(copy.locate(copy.box)) for copy in copies[: 1 if told else None]]
    constant, first = True, b""
    for start, stop in _ranges(copies[0], short=told):
        parts = {_read(store, copy, e, start, stop) for copy, e in zip(copies, extents, strict=False)}
        if len(parts) > 1:
            return "different"
        data = parts.pop()
        unit = copies[0].itemsize
        first = first or data[:unit]
        constant = constant and data == first * (len(data) // unit)
    return "constant" if constant else "equal"


def must_agree(store: Store, key: Key, copies: Sequence[Copy]) -> None:
    """IntegrityError, which names two files, where replicas differ."""
    for other in copies[1:]:
        if compare(store, (copies[0], other)) == "different":
            one, two = (
                next((e.file for e in c.locate(c.box) if e.box.intersect(c.box)), "?") for c in (copies[0], other)
            )
            raise IntegrityError(
                f"{key}: {one} and {two} should hold the same, and do not",
                hint="files of different saves are mixed in one folder, or the ranks' copies had come apart in "
                "training; if it is cut instead, say how: DeepSpeed(layout=…)",
            )


def _own_sum(copy: Copy) -> int:
    """The CRC-32 of a tensor that has a record of its own; 0 where it is not known."""
    if copy.whole is None:
        return 0
    file, tensor = copy.whole
    return file.crc32(tensor) if tensor.numel == tensor.size == copy.box.size else 0


def _ranges(copy: Copy, *, short: bool) -> Iterable[tuple[int, int]]:
    """Flat ranges of a copy to compare; a short one only tells a constant."""
    size = copy.box.size
    place = _PLACE // copy.itemsize
    if short:
        return [(0, min(size, place))] if size else []
    if size * copy.itemsize <= _WHOLE:
        return [(0, size)] if size else []
    step = (size - place) // (_PLACES - 1)
    return [(i * step, i * step + place) for i in range(_PLACES)]


def _read(store: Store, copy: Copy, extents: list[Extent], start: int, stop: int) -> bytes:
    """The bytes of a flat range of a copy."""
    import numpy as np

    out = []
    for part in flat_boxes(copy.box.shape, start, stop):
        box = part.shift(copy.box.start)
        into = np.zeros(box.shape, f"V{copy.itemsize}")
        left = box.size
        for extent in extents:
            clip = extent.box.intersect(box)
            if clip is None:
                continue
            at = extent.offset + sum(
                (a - b) * s for a, b, s in zip(clip.start, extent.box.start, extent.strides, strict=True)
            )
            span = copy.itemsize + sum((n - 1) * s for n, s in zip(clip.shape, extent.strides, strict=True))
            where = tuple(slice(a - b, a - b + n) for a, b, n in zip(clip.start, box.start, clip.shape, strict=True))
            into[where] = np.ndarray(clip.shape, into.dtype, store.read(extent.file, at, span), 0, extent.strides)
            left -= math.prod(clip.shape)
        if left:
            raise IntegrityError(f"{copy.box} of a tensor is not all there: {left} elements are stored in no file")
        out.append(into.tobytes())
    return b"".join(out)
