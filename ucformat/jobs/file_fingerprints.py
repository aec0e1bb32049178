"""Fingerprints of tensors from the bytes of a file that is taken from beginning to end."""

from __future__ import annotations

from operator import add
from typing import TYPE_CHECKING

import numpy as np

from ucformat.geometry.box import Box
from ucformat.geometry.fingerprint import fingerprint_of
from ucformat.geometry.flat_buffer import flat_boxes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ucformat.geometry.fingerprint import Sums
    from ucformat.geometry.tensor import TensorInfo


class FileFingerprints:
    """The parts that boxes in a file have in the fingerprints of their tensors.

    Attributes:
        parts: the numbers of boxes, each with a part.
    """

    def __init__(self, boxes: Sequence[tuple[TensorInfo, Box, int]]) -> None:
        """Begin a file.

        Args:
            boxes: boxes of tensors that are row-major in the file, and the bytes at which they
                begin, in order.
        """
        self._boxes, self._first, self._at = boxes, 0, 0
        self.parts: list[tuple[int, Sums]] = []

    def take(self, data: memoryview) -> None:
        """Take the next bytes of the file, which cut no element of the boxes in two."""
        end = self._at + data.nbytes
        for n in range(self._first, len(self._boxes)):
            info, box, begin = self._boxes[n]
            if begin >= end:
                break
            self.parts += ((n, part) for part in self._parts(info, box, begin, data))
            if n == self._first and begin + box.size * info.itemsize <= end:
                self._first += 1
        self._at = end

    def _parts(self, info: TensorInfo, box: Box, begin: int, data: memoryview) -> Iterator[Sums]:
        unit = info.itemsize
        first = min(max(self._at - begin, 0) // unit, box.size)
        last = min((self._at + data.nbytes - begin) // unit, box.size)
        for run in flat_boxes(box.shape, first, last):
            elements = np.ndarray(run.shape, f"V{unit}", data, begin + first * unit - self._at)
            start = tuple(map(add, box.start, run.start))
            yield fingerprint_of(elements, info.shape, Box(start, run.shape))
            first += run.size
