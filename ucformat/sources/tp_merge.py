"""Merging tensor-parallel ranks' parts into whole tensors, for every engine that saves each rank's parts separately."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

from ucformat.errors import IntegrityError, UsageError, option_text
from ucformat.geometry.box import Box
from ucformat.geometry.flat_buffer import flat_boxes
from ucformat.geometry.layout import Layout
from ucformat.geometry.tensor import Key
from ucformat.geometry.tp_sharding import TP
from ucformat.sources.index import TensorIndex

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ucformat.reading.stand_ins import StoredTensor
    from ucformat.sources.index import Locate
    from ucformat.sources.pickle.file import TorchFile
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
        head, sample = _HEAD_BYTES // self.itemsize, _SAMPLE_BYTES // self.itemsize
        if size <= 4 * head:
            return [(0, _SMALL), (0, size)] if size > _SMALL else [(0, size)] if size else []
        row = size // self.box.shape[0]
        first = [(0, head), *([(row, min(size, row + head))] if head < row < size else [])]
        if short:
            return [*first, (0, min(size, sample))]
        if size * self.itemsize <= _MAX_WHOLE_BYTES:
            return [*first, (0, size)]
        step = (size - sample) // (_SAMPLES - 1)
        return [*first, *((i * step, i * step + sample) for i in range(_SAMPLES))]

    def read(self, store: Store, start: int, stop: int) -> bytes:
        """Read a flat range."""
        from ucformat.reading.execute import read_extents

        boxes = (part.shift(self.box.start) for part in flat_boxes(self.box.shape, start, stop))
        return read_extents(store, self.locate, boxes, self.itemsize, f"{self.box} of a tensor")


def compare(store: Store, copies: Sequence[Replica]) -> Verdict:
    """Compare copies of one tensor."""
    if (equal_sums := _by_sums(copies)) is False:
        return "different"
    repeated = _Repeated(copies[0].box.shape)
    for start, stop in copies[0].ranges(short=equal_sums is True):
        # If the checksums are equal, one copy suffices to find out whether it is constant.
        parts = {copy.read(store, start, stop) for copy in copies[: 1 if equal_sums else None]}
        if len(parts) > 1:
            return "different"
        repeated.add(start, parts.pop(), copies[0].itemsize)
    return "constant" if repeated.found else "equal"


def _equal_bytes(store: Store, copies: Sequence[Replica]) -> bool:
    """Whether all copies have the same bytes."""
    equal_sums = _by_sums(copies)
    if equal_sums is not None:
        return equal_sums
    ranges = copies[0].ranges(short=False)
    return all(
        len({copy.read(store, start, stop) for copy in copies}) == 1 for start, stop in ranges
    )


class _Repeated:
    """Whether all elements read of a tensor repeat one slice along a dim."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._size = math.prod(shape)
        # [d]: elements of a slice of the dims from d on
        rows = [math.prod(shape[d:]) for d in range(len(shape) + 1)]
        self._ways = [(rows[d], rows[d + 1]) for d, n in enumerate(shape) if n > 1]
        # offset in the slice -> element
        self._seen: list[dict[int, bytes]] = [{} for _ in self._ways]
        self._again = [0] * len(self._ways)

    def add(self, start: int, data: bytes, itemsize: int) -> None:
        """Add the elements from index `start` on."""
        import numpy as np

        values = np.frombuffer(data, f"V{itemsize}")
        index = np.arange(start, start + len(values))
        # Backwards, since a way that does not repeat is deleted.
        for number, (outer, inner) in reversed(list(enumerate(self._ways))):
            _, first, inverse = np.unique(
                # The offset in a slice: the flat index without the part that counts along the dim.
                places := index // outer * inner + index % inner,
                return_index=True,
                return_inverse=True,
            )
            seen = self._seen[number]
            repeats = bool((values[first][inverse] == values).all()) and all(
                seen.setdefault(place, value) == value
                for place, value in zip(places[first].tolist(), values[first].tolist(), strict=True)
            )
            self._again[number] += len(values)
            if not repeats:
                del self._ways[number], self._seen[number], self._again[number]

    @property
    def found(self) -> bool:
        """Also true for tensors of one element or none."""
        seen = zip(self._again, self._seen, strict=True)
        return self._size <= 1 or any(again > len(places) for again, places in seen)


def must_agree(store: Store, key: Key, copies: Sequence[Replica]) -> None:
    """Check that replicas have the same bytes."""
    for other in copies[1:]:
        if not _equal_bytes(store, (copies[0], other)):
            first_file, second_file = (
                next((e.file for e in c.locate(c.box) if e.box.intersect(c.box)), "?")
                for c in (copies[0], other)
            )
            files = (
                f"{first_file} and {second_file}"
                if first_file != second_file
                else f"the parts of the tensor-parallel ranks in {first_file}"
            )
            raise IntegrityError(
                f"{key}: {files} should be equal, but differ",
                hint="files of different saves are mixed in one folder, or the ranks' copies had diverged in "
                f"training; if it is cut instead, specify how: {option_text('layout')}",
            )


def _by_sums(copies: Sequence[Replica]) -> bool | None:
    """Whether the recorded CRC-32s are equal; None if one is not recorded."""
    sums = [copy.crc32() for copy in copies]
    return len(set(sums)) == 1 if all(sums) else None


# A caller may specify how parameters are sharded by one word for each pattern of names (`cuts`), which
# becomes a layout.

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
        [
            {"match": pattern, "place": _place(pattern, sharding)}
            for pattern, sharding in cuts.items()
        ],
    )


def cuts_option(cuts: Mapping[str, str]) -> str:
    """The option for these cuts, as `option_text` spells it."""
    return option_text(
        "cuts",
        repr(dict(cuts)),
        ",".join(f"{pattern}={sharding}" for pattern, sharding in cuts.items()),
    )


def _place(pattern: str, sharding: str | int) -> list[Any]:
    if str(sharding).isdecimal():
        return [{"shard": int(sharding), "over": TP}]
    if sharding not in CUTS:
        raise UsageError(
            f"{sharding!r}, given for {pattern!r}, is not a sharding",
            hint=(
                f"use one of {', '.join(CUTS)}, or the number of the dim along which the ranks' "
                "parts are joined"
            ),
        )
    return CUTS[str(sharding)]
