"""The k-th greatest magnitude of a tensor's differences from a base, exactly, with bounded memory.

Magnitudes are compared by the bits of float64, whose order is that of the numbers. Each round reads the tensors once
and counts magnitudes by their next 16 bits, of those whose upper bits are known to be the threshold's. When few of
these are left, a round collects them, and the threshold is one of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import compress
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from ucformat.jobs.combine.formulas import magnitude_bits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from ucformat.jobs.combine.formulas import Block

    Counts = list[NDArray[np.int64] | NDArray[np.uint64]]

__all__ = ["Scan", "find_thresholds"]

T = TypeVar("T")

_BITS = 16  # of a round: 64 Ki counters
_COLLECTED = 1 << 16  # magnitudes of an input, at most, that are collected


class Scan(Protocol):
    """Reads a tensor of all inputs once, in blocks that depend on nothing but the tensor."""

    def __call__(self, find: Callable[[Iterator[Block]], T], fold: Callable[[T, T], T]) -> T:
        """Call a function with every block, and fold its results, in any order.

        Args:
            find: called with the blocks of all inputs at one place, in order of the inputs.
            fold: makes one result of two.
        """


@dataclass(slots=True)
class _Search:
    """What is known of a threshold: its bits from `shift` on, and that it is the `rank`-th of `left` with these."""

    rank: int
    left: int
    shift: int = 64
    prefix: int = 0
    found: float | None = field(default=None)

    @property
    def collects(self) -> bool:
        return self.left <= _COLLECTED

    def look(self, bits: NDArray[np.uint64]) -> NDArray[np.int64] | NDArray[np.uint64]:
        """Those of a block's magnitudes that may be the threshold, or their numbers by the next bits."""
        if self.shift < 64:
            bits = bits[bits >> np.uint64(self.shift) == np.uint64(self.prefix)]
        if self.collects:
            return bits
        digits = (bits >> np.uint64(self.shift - _BITS)) & np.uint64((1 << _BITS) - 1)
        return np.bincount(digits.astype(np.int64), minlength=1 << _BITS)

    def fold(
        self, one: NDArray[np.int64] | NDArray[np.uint64], other: NDArray[np.int64] | NDArray[np.uint64]
    ) -> NDArray[np.int64] | NDArray[np.uint64]:
        """Both of what `look` has returned for two blocks."""
        return np.concatenate([one, other]) if self.collects else np.add(one, other, out=one)

    def learn(self, seen: NDArray[np.int64] | NDArray[np.uint64]) -> None:
        """Take what `look` has returned for all blocks."""
        if self.collects:
            self.found = float(np.sort(seen)[len(seen) - self.rank].astype(np.uint64).view(np.float64))
            return
        at_least = np.cumsum(seen[::-1])  # how many there are of the greatest digit, of the greatest two, …
        n = int(np.searchsorted(at_least, self.rank))
        digit = len(seen) - 1 - n
        self.rank -= int(at_least[n] - seen[digit])
        self.left, self.shift = int(seen[digit]), self.shift - _BITS
        self.prefix = self.prefix << _BITS | digit
        if not self.shift:  # all that are left are equal
            self.found = float(np.uint64(self.prefix).view(np.float64))


def find_thresholds(scan: Scan, count: int, rank: int, size: int) -> list[float]:
    """Find the magnitude of an input's differences from the base that has a rank; for each input.

    Args:
        scan: reads the tensor: the base first, then the inputs.
        count: the number of inputs.
        rank: 1 for the greatest magnitude.
        size: the number of elements.
    """
    searches = [_Search(rank, size) for _ in range(count)]
    while any(s.found is None for s in searches):
        todo = [s.found is None for s in searches]
        left = list(compress(searches, todo))

        def find(blocks: Iterator[Block], todo: list[bool] = todo, left: list[_Search] = left) -> Counts:
            base = next(blocks)
            return [s.look(magnitude_bits(block, base)) for s, block in zip(left, compress(blocks, todo), strict=True)]

        def fold(one: Counts, other: Counts, left: list[_Search] = left) -> Counts:
            return [s.fold(a, b) for s, a, b in zip(left, one, other, strict=True)]

        counts: Counts = scan(find, fold)
        for search, seen in zip(left, counts, strict=True):
            search.learn(seen)
    return [s.found for s in searches if s.found is not None]
