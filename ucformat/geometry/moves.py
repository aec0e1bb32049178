"""Moves: which elements of one strided array are those of another, through any views of both.

Views of arrays (slices, transpositions, reshapes) are strided, so a copy from one view to another
is a `Move`, and moves compose. Where the strides of two views divide each other, as those of
slices, transpositions and of heads in a row do, an element has digits, one for each stride, and a
view is a range of each digit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise, product
from typing import TYPE_CHECKING

from ucformat.errors import LayoutError
from ucformat.geometry.box import Box, row_major, unravel
from ucformat.geometry.view import BoxPair

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

TO, FROM = 0, 1
#: The most boxes of which a tensor is composed.
MAX_BOXES = 1 << 14
_Strides = tuple[int, ...]


class NotBoxes(LayoutError):
    """Elements are arranged in such a way that few boxes do not describe them."""


@dataclass(frozen=True, slots=True)
class Move:
    """Element `offsets[TO] + sum(i * strides[TO])` of one array is the same, `FROM`, of another.

    A stride of 0 in `FROM` repeats an element; those in `TO` differ, so that no element is moved
    twice to the same place.
    """

    shape: tuple[int, ...]
    strides: tuple[_Strides, _Strides]
    offsets: tuple[int, int]

    @classmethod
    def between(
        cls, shape: Sequence[int], to: tuple[_Strides, int], source: tuple[_Strides, int]
    ) -> Move:
        """The move between two views of one shape, each given by its strides and its offset."""
        return _merged(zip(shape, to[0], source[0], strict=True), (to[1], source[1]))

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def bounds(self, side: int) -> tuple[int, int]:
        """The first element on a side, and the one past the last."""
        reach = sum((n - 1) * s for n, s in zip(self.shape, self.strides[side], strict=True))
        return self.offsets[side], self.offsets[side] + reach + 1

    def _digits(self, side: int) -> Iterator[int]:
        """The strides on a side that lead anywhere."""
        return (s for n, s in zip(self.shape, self.strides[side], strict=True) if n > 1 and s)


def _merged(dims: Iterable[tuple[int, int, int]], offsets: tuple[int, int]) -> Move:
    """The move of these dims (size, stride to, stride from), the largest strides first, as few as possible."""
    out: list[tuple[int, int, int]] = []
    for n, to, source in sorted((d for d in dims if d[0] != 1), key=lambda d: (-d[1], -d[2])):
        if out and out[-1][1:] == (to * n, source * n):
            n *= out.pop()[0]  # noqa: PLW2901
        out.append((n, to, source))
    shape, to_strides, from_strides = zip(*out, strict=True) if out else ((), (), ())
    return Move(tuple(shape), (tuple(to_strides), tuple(from_strides)), offsets)


def composed(second: Move, first: Move) -> list[Move]:
    """What `second` takes from the elements that `first` put there.

    Raises:
        NotBoxes: the strides of the two do not divide each other.
    """
    low, high = second.bounds(FROM)
    begin, end = first.bounds(TO)
    if high <= begin or end <= low or not (second.size and first.size):
        return []
    chain = _chain([*second._digits(FROM), *first._digits(TO)])  # noqa: SLF001
    out = []
    for a, b in product(_aligned(second, FROM, chain), _aligned(first, TO, chain)):
        ranges = _common(a, b, chain)
        if ranges is None:
            continue
        dims = [
            (n, 0, 0) if n == 1 else (n, _stride(a, FROM, d, TO), _stride(b, TO, d, FROM))
            for d, (_, n, _, _) in zip(chain, ranges, strict=True)
        ]
        to, source = a.offsets[TO], b.offsets[FROM]
        for d, (_, _, skip_a, skip_b) in zip(chain, ranges, strict=True):
            to += skip_a * _stride(a, FROM, d, TO)
            source += skip_b * _stride(b, TO, d, FROM)
        # what is repeated has no digit
        dims += [(n, t, 0) for n, t, s in zip(a.shape, *a.strides, strict=True) if n > 1 and not s]
        out.append(_merged(dims, (to, source)))
    return out


def remaining(old: Move, new: Move) -> list[Move]:
    """What is left of a move after another one has replaced elements.

    Raises:
        NotBoxes: the strides of the two do not divide each other.
    """
    low, high = old.bounds(TO)
    begin, end = new.bounds(TO)
    if high <= begin or end <= low or not (old.size and new.size):
        return [old]
    chain = _chain([*old._digits(TO), *new._digits(TO)])  # noqa: SLF001
    left = _aligned(old, TO, chain)
    for b in _aligned(new, TO, chain):
        left = [part for a in left for part in _without(a, b, chain)]
    return [_merged(zip(m.shape, *m.strides, strict=True), m.offsets) for m in left]


def boxes(move: Move, target: tuple[int, ...], source: tuple[int, ...]) -> list[BoxPair]:
    """The boxes of row-major arrays of these shapes that a move connects.

    Raises:
        NotBoxes: there are too many.
    """
    if not move.size:
        return []
    parts, shapes = [move], (target, source)
    for side in (TO, FROM):
        steps = [s for n, s in zip(shapes[side], row_major(shapes[side]), strict=True) if n > 1]
        parts = [
            p
            for m in parts
            for p in _aligned(m, side, _chain([*m._digits(side), *steps, 1]))  # noqa: SLF001
        ]
    out: list[BoxPair] = []
    for part in parts:
        out += _boxes(part, shapes)
        if len(out) > MAX_BOXES:
            raise NotBoxes(f"more than {MAX_BOXES} boxes would describe it")
    return out


def _boxes(move: Move, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> Iterator[BoxPair]:
    """As `boxes`, of a move no dim of which leaves a dim of the arrays."""
    target, source = shapes
    steps = [row_major(shape) for shape in shapes]
    runs: dict[int, tuple[int, int]] = {}  # dim of the target -> dim of the source, length
    singles: list[tuple[int, int, int]] = []
    for n, to, begin in zip(move.shape, *move.strides, strict=True):
        t = next((d for d, m in enumerate(target) if m > 1 and steps[TO][d] == to), None)
        s = next((d for d, m in enumerate(source) if m > 1 and steps[FROM][d] == begin), None)
        if t is None or s is None:
            singles.append((n, to, begin))
        else:
            runs[t] = s, n
    count = math.prod(n for n, _, _ in singles)
    if count > MAX_BOXES:
        raise NotBoxes(f"{count} boxes would describe it, more than {MAX_BOXES}")
    axes = tuple(runs[d][0] if d in runs else None for d in range(len(target)))
    shape = tuple(runs[d][1] if d in runs else 1 for d in range(len(target)))
    lengths = dict(runs.values())
    source_shape = tuple(lengths.get(d, 1) for d in range(len(source)))
    for index in product(*(range(n) for n, _, _ in singles)):
        to, begin = move.offsets
        for i, (_, a, b) in zip(index, singles, strict=True):
            to, begin = to + i * a, begin + i * b
        yield BoxPair(
            Box(unravel(to, target), shape), Box(unravel(begin, source), source_shape), axes
        )


def _chain(strides: Iterable[int]) -> list[int]:
    """The strides, the largest first; each divides the one before."""
    chain = sorted(set(strides), reverse=True)
    for larger, smaller in pairwise(chain):
        if larger % smaller:
            raise NotBoxes(f"rows of {larger} and of {smaller} elements do not divide each other")
    return chain


def _aligned(move: Move, side: int, chain: Sequence[int]) -> list[Move]:
    """The parts of a move in which the digits of the elements on a side are independent: none carries."""
    todo, out = [move], []
    while todo:
        m = todo.pop()
        for larger, d in reversed(list(pairwise(chain))):
            dims = [i for i, (n, s) in enumerate(_of(m, side)) if s == d and n > 1]
            if len(dims) > 1:
                raise NotBoxes("elements are moved more than once")
            start = m.offsets[side] % larger // d
            radix = larger // d
            if dims and start + m.shape[dims[0]] > radix:
                todo += _carried(m, side, dims[0], start, radix)
                break
        else:
            out.append(m)
        if len(out) + len(todo) > MAX_BOXES:
            raise NotBoxes(f"more than {MAX_BOXES} boxes would describe it")
    return out


def _of(move: Move, side: int) -> Iterator[tuple[int, int]]:
    return zip(move.shape, move.strides[side], strict=True)


def _carried(move: Move, side: int, dim: int, start: int, radix: int) -> list[Move]:
    """The parts of a dim whose digit begins at `start` and carries at `radix`: the first, whole cycles, the last."""
    n, step = move.shape[dim], move.strides[side][dim]
    first = (radix - start) % radix
    cycles, last = divmod(n - first, radix)
    parts = [_range(move, dim, 0, first)] if first else []
    if cycles > 1 and all(s != step * radix for m, s in _of(move, side) if m > 1):
        whole = _range(move, dim, first, cycles * radix)
        strides = [(*s[:dim], s[dim] * radix, *s[dim:]) for s in whole.strides]
        shape = (*whole.shape[:dim], cycles, radix, *whole.shape[dim + 1 :])
        parts.append(Move(shape, (strides[TO], strides[FROM]), whole.offsets))
    else:
        parts += [_range(move, dim, first + i * radix, radix) for i in range(cycles)]
    return [*parts, _range(move, dim, n - last, last)] if last else parts


def _range(move: Move, dim: int, start: int, length: int) -> Move:
    """Some indices of a dim."""
    to, source = move.strides
    offsets = (move.offsets[TO] + start * to[dim], move.offsets[FROM] + start * source[dim])
    return Move((*move.shape[:dim], length, *move.shape[dim + 1 :]), move.strides, offsets)


def _stride(move: Move, side: int, digit: int, wanted: int) -> int:
    """The stride, on the wanted side, of the dim whose stride on a side is this; 0 if there is none."""
    return next(
        (
            move.strides[wanted][i]
            for i, (n, s) in enumerate(_of(move, side))
            if s == digit and n > 1
        ),
        0,
    )


def _interval(move: Move, side: int, digit: int, larger: int | None) -> tuple[int, int]:
    """The first value of a digit, and how many there are."""
    offset = move.offsets[side] if larger is None else move.offsets[side] % larger
    length = next((n for n, s in _of(move, side) if s == digit and n > 1), 1)
    return offset // digit, length


def _common(a: Move, b: Move, chain: Sequence[int]) -> list[tuple[int, int, int, int]] | None:
    """Of each digit the first common value, how many there are, and how many each skips; None if there is none.

    The digits are those of where `a` takes, and where `b` puts.
    """
    unit = chain[-1] if chain else None
    at, begin = a.offsets[FROM], b.offsets[TO]
    if at != begin if unit is None else at % unit != begin % unit:
        return None
    out = []
    for larger, digit in zip([None, *chain], chain, strict=False):
        first, n = _interval(a, FROM, digit, larger)
        second, m = _interval(b, TO, digit, larger)
        low, high = max(first, second), min(first + n, second + m)
        if high <= low:
            return None
        out.append((low, high - low, low - first, low - second))
    return out


def _without(a: Move, b: Move, chain: Sequence[int]) -> Iterator[Move]:
    """The parts of `a` that are not where `b` puts elements."""
    as_source = Move(a.shape, (a.strides[FROM], a.strides[TO]), (a.offsets[FROM], a.offsets[TO]))
    ranges = _common(as_source, b, chain)
    if ranges is None:
        yield a
        return
    for digit, (_, length, skip, _) in zip(chain, ranges, strict=True):
        dim = next((i for i, (n, s) in enumerate(_of(a, TO)) if s == digit and n > 1), None)
        if dim is None:
            continue
        if skip:
            yield _range(a, dim, 0, skip)
        if skip + length < a.shape[dim]:
            yield _range(a, dim, skip + length, a.shape[dim] - skip - length)
        a = _range(a, dim, skip, length)
