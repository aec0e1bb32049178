"""Checksums of a source of which tasks, perhaps in several processes, read the bytes piece by piece in any order."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, NamedTuple

from ucformat.jobs.finished import SumDoc
from ucformat.storage.crc import CRC32_SHIFT, CRC32C_SHIFT
from ucformat.storage.strided import checksum, crc32

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


class StreamSum:
    """The progress of one checksum: which of its bytes have been read, and their combined CRC."""

    __slots__ = ("castagnoli", "crc", "expected", "file", "left", "shift", "start", "stop", "value", "waits", "what")

    def __init__(self, file: str, what: str, start: int, nbytes: int, expected: int, *, castagnoli: bool) -> None:
        self.file, self.what, self.start, self.stop, self.expected = file, what, start, start + nbytes, expected
        self.castagnoli = castagnoli
        self.crc: Callable[[memoryview], int] = checksum if castagnoli else crc32
        self.shift = CRC32C_SHIFT if castagnoli else CRC32_SHIFT
        self.left = [(self.start, self.stop)]  # ranges that have not been read yet, in order
        self.value, self.waits = 0, nbytes

    @property
    def begun(self) -> bool:
        """Whether some of its bytes have been read."""
        return self.waits < self.stop - self.start

    def claim(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Mark bytes as read; returns the ranges of them that had not been read before."""
        first = max(0, bisect_right(self.left, (start, start)) - 1)
        last, mine, rest = first, [], []
        for a, b in self.left[first:]:
            if a >= stop:
                break
            last += 1
            x, y = max(a, start), min(b, stop)
            if x >= y:
                rest.append((a, b))
                continue
            mine.append((x, y))
            rest += [part for part in ((a, x), (y, b)) if part[0] < part[1]]
        self.left[first:last] = rest
        return mine

    def take(self, ranges: Sequence[tuple[int, int]]) -> bool:
        """Mark ranges as read, unless bytes of them have been read before, or they are not in order.

        Args:
            ranges: the first byte of each, and the byte after its last one.
        """
        rest: list[tuple[int, int]] = []
        todo = iter(self.left)
        free = next(todo, None)
        for start, stop in ranges:
            while free is not None and free[1] <= start:
                rest.append(free)
                free = next(todo, None)
            if free is None or not free[0] <= start < stop <= free[1]:
                return False
            if free[0] < start:
                rest.append((free[0], start))
            free = (stop, free[1]) if stop < free[1] else next(todo, None)
        self.left = [*rest, *(() if free is None else (free,)), *todo]
        self.waits -= sum(stop - start for start, stop in ranges)
        return True


class SumPart(NamedTuple):
    """What was read of a checksum: the ranges, and their CRC, shifted to the end of the checksum's bytes."""

    of: StreamSum
    ranges: list[tuple[int, int]]
    value: int


def sums_of(tasks: Iterable[Sequence[SumPart]]) -> tuple[SumDoc, ...]:
    """What tasks have read of checksums, for a record; checksums of which they have read all are left out."""
    ranges: dict[StreamSum, list[tuple[int, int]]] = {}
    values: dict[StreamSum, int] = {}
    for part in (p for parts in tasks for p in parts):
        ranges.setdefault(part.of, []).extend(part.ranges)
        values[part.of] = values.get(part.of, 0) ^ part.value
    return tuple(
        SumDoc(
            file=one.file,
            start=one.start,
            nbytes=one.stop - one.start,
            kind="crc32c" if one.castagnoli else "crc32",
            expected=one.expected,
            ranges=joined,
            value=values[one],
        )
        for one, found in ranges.items()
        if (joined := _joined(found)) != ((one.start, one.stop),)
    )


def _joined(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Ranges that do not overlap, in order, adjacent ones as one."""
    out: list[tuple[int, int]] = []
    for a, b in sorted(ranges):
        if out and out[-1][1] == a:
            out[-1] = (out[-1][0], b)
        else:
            out.append((a, b))
    return tuple(out)
