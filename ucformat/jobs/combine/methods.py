"""The methods of combining: which boxes of which inputs a block is computed from, and by which formula."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields
from itertools import compress, count
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

import numpy as np

from ucformat.jobs.combine import formulas
from ucformat.jobs.combine.formulas import magnitudes
from ucformat.schema import CASTABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from ucformat.geometry.box import Box
    from ucformat.geometry.tensor import TensorInfo
    from ucformat.jobs.combine.formulas import Block


# The k-th greatest magnitude of a tensor's differences from a base, exactly, with bounded memory.
#
# Magnitudes are compared by the bits of float64, whose order is that of the numbers. A first round
# looks at a sample, which tells in which narrow range of numbers the threshold most likely is. A
# second one counts what is above this range, and counts each magnitude in it. If these are too
# many, neighbouring ones are counted together, and a further round looks at those among which the
# threshold is; as it does if the sample was misleading.


T = TypeVar("T")

# one in so many is in the sample, which is not smaller, nor larger
_SHARE, _LEAST, _SAMPLED = (16, 1 << 12, 1 << 18)
_COUNTED = 1 << 21  # numbers that are counted apart, of all inputs together
_DEVIATIONS = 4  # standard deviations of a rank in the sample between the expected one and either end of the range
_STEP = 7919  # between the first elements of which the sample consists, of one block and the next
_ALL = (0, (0x7FF0 << 48) + 1)  # the bits of 0, and those after infinity, which a difference may be


class Scan(Protocol):
    """Reads a tensor of all inputs once, in blocks that depend on nothing but the tensor."""

    def __call__(self, find: Callable[[Iterator[Block]], T], fold: Callable[[T, T], T]) -> T:
        """Call a function with every block, and fold its results, in any order.

        Args:
            find: called with the blocks of all inputs at one place, in order of the inputs.
        """


@dataclass(slots=True)
class _Counts:
    """How many magnitudes there are above a range, and of each number in it, or of 2 ** `shift` neighbouring ones.

    Attributes:
        above: how many there are above the range.
        new: the bits of magnitudes in the range that are not counted yet.
        keys: the bits of numbers without the last `shift`, in ascending order.
        numbers: how many there are of each.
        shift: the bits that are left out.
    """

    above: int
    new: list[NDArray[np.uint64]]
    keys: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    numbers: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    shift: int = 0

    def add(self, other: _Counts, most: int) -> _Counts:
        """Both, with at most so many keys."""
        self.above += other.above
        self.new += other.new
        if self.shift == other.shift and np.array_equal(self.keys, other.keys):
            self.numbers = self.numbers + other.numbers
        else:
            self._merge(other.keys, other.numbers, other.shift, most)
        if sum(map(len, self.new)) > most:
            self.count(most)
        return self

    def count(self, most: int) -> None:
        """Count the new magnitudes."""
        new = np.concatenate([self.keys[:0], *self.new])
        new.sort()
        self.new = []
        self._merge(new, np.ones(len(new), np.int64), 0, most)

    def _merge(
        self, keys: NDArray[np.uint64], numbers: NDArray[np.int64], shift: int, most: int
    ) -> None:
        common = max(self.shift, shift)
        keys = np.concatenate(
            [self.keys >> np.uint64(common - self.shift), keys >> np.uint64(common - shift)]
        )
        order = np.argsort(keys, kind="stable")  # which merges two sorted parts
        keys, numbers = keys[order], np.concatenate([self.numbers, numbers])[order]
        while True:
            first = np.flatnonzero(np.diff(keys, prepend=~keys[:1]))  # of each key
            if len(first) < len(keys):
                keys, numbers = keys[first], np.add.reduceat(numbers, first)
            if len(keys) <= most:
                break
            keys, common = keys >> np.uint64(1), common + 1
        self.keys, self.numbers, self.shift = keys, numbers, common

    def range_of(
        self, rank: float, beside: tuple[int, int], within: tuple[int, int]
    ) -> tuple[int, int]:
        """The range of the key that the magnitude of a rank has, or the one below or above all of them."""
        # how many there are of the greatest key, and so on
        at_least = self.above + np.cumsum(self.numbers[::-1])
        n = int(np.searchsorted(at_least, rank))
        if rank <= self.above:
            return beside[1], within[1]
        if n == len(at_least):
            return within[0], beside[0]
        key = int(self.keys[-1 - n])
        return max(key << self.shift, beside[0]), min(key + 1 << self.shift, beside[1])


@dataclass(slots=True)
class _Search:
    """The search for the magnitude of a rank.

    Attributes:
        known: the bits between which the threshold is for certain, the second excluded.
        looked_at: the bits at which the next round looks.
        sample: what the first round has counted.
        wider: how many times wider than at first the range is that is looked at.
        blocks: numbers the blocks of the sample.
    """

    rank: int
    size: int
    most: int
    known: tuple[int, int] = _ALL
    looked_at: tuple[int, int] = _ALL
    sample: _Counts | None = None
    wider: int = 1
    blocks: count[int] = field(default_factory=count)

    @property
    def every(self) -> int:
        """One of how many magnitudes is in the sample."""
        return max(1, min(_SHARE, self.size // _LEAST), self.size // _SAMPLED)

    @property
    def found(self) -> float | None:
        """The threshold, if it is known."""
        return _number(self.known[0]) if self.known[1] - self.known[0] == 1 else None

    def look(self, block: Block, base: Block) -> _Counts:
        """Count the magnitudes of a block."""
        if self.sample is None and self.every > 1:  # not always the same columns
            some = slice(next(self.blocks) * _STEP % self.every, None, self.every)
            block, base = block[some], base[some]
        differences = magnitudes(block, base)
        low, high = map(_number, self.looked_at)
        inside, above = differences >= low, differences >= high
        greater = int(np.count_nonzero(above))
        # often: of few bits, or where nothing was changed
        if self.looked_at[1] - self.looked_at[0] == 1:
            same = int(np.count_nonzero(inside)) - greater
            return _Counts(greater, [], np.array([self.looked_at[0]], np.uint64), np.array([same]))
        inside ^= above
        return _Counts(greater, [differences[inside].view(np.uint64)])

    def learn(self, seen: _Counts) -> None:
        """Take what `look` has counted of all blocks."""
        seen.count(self.most)
        if self.sample is None and self.every > 1:
            self.sample = seen
        else:
            before, self.known = (
                self.looked_at,
                seen.range_of(self.rank, self.looked_at, self.known),
            )
            self.looked_at = self.known
            if self.sample is None or (before[0] <= self.known[0] and self.known[1] <= before[1]):
                return
            self.wider *= 8  # the sample has misled
        self.looked_at = self._guess(self.sample)

    def _guess(self, sample: _Counts) -> tuple[int, int]:
        """Where the threshold most likely is."""
        of, share = int(sample.numbers.sum()), self.rank / self.size
        wide = self.wider * (1 + _DEVIATIONS * math.sqrt(share * (1 - share) * of))
        low, _ = sample.range_of(share * of + wide, _ALL, _ALL)
        _, high = sample.range_of(share * of - wide, _ALL, _ALL)
        low, high = max(low, self.known[0]), min(high, self.known[1])
        return (low, high) if low < high else self.known


def _number(bits: int) -> float:
    return float(np.uint64(bits).view(np.float64))


def find_thresholds(scan: Scan, inputs: int, rank: int, size: int) -> list[float]:
    """Find the magnitude of an input's differences from the base that has a rank; for each input.

    Args:
        scan: reads the tensor: the base first, then the inputs.
    """
    most = max(4, _COUNTED // inputs)
    searches = [_Search(rank, size, most) for _ in range(inputs)]
    while any(s.found is None for s in searches):
        todo = [s.found is None for s in searches]
        left = list(compress(searches, todo))

        def find(
            blocks: Iterator[Block], todo: list[bool] = todo, left: list[_Search] = left
        ) -> list[_Counts]:
            base = next(blocks)
            return [
                s.look(block, base) for s, block in zip(left, compress(blocks, todo), strict=True)
            ]

        def fold(mine: list[_Counts], other: list[_Counts]) -> list[_Counts]:
            return [a.add(b, most) for a, b in zip(mine, other, strict=True)]

        counts: list[_Counts] = scan(find, fold)
        for search, seen in zip(left, counts, strict=True):
            search.learn(seen)
    return [s.found for s in searches if s.found is not None]


#: The dtypes that are combined; of others, all inputs must have the same values.
REAL = CASTABLE


@dataclass(frozen=True, slots=True)
class Operand:
    """A box of a tensor of an input; `input` is its number."""

    input: int
    info: TensorInfo
    box: Box


class Method(ABC):
    """A method of combining, and its parameters.

    Attributes:
        name: its name, on the command line and in lineages.
        has_base: whether the first input is the base that the others were fine-tuned from.
        scans: how often it has to read a whole tensor before it can compute a block; of TIES,
            mostly.
    """

    name: ClassVar[str]
    has_base: ClassVar[bool] = False
    scans: ClassVar[int] = 0

    @abstractmethod
    def document(self) -> dict[str, Any]:
        """The parameters as JSON values, from which another process makes it."""

    @abstractmethod
    def roles(self) -> list[dict[str, Any]]:
        """What the lineage says of each input: its weight, or that it is the base."""

    @abstractmethod
    def about(self) -> dict[str, Any]:
        """What the lineage says of the method."""

    @abstractmethod
    def operands(self, inputs: Sequence[TensorInfo], box: Box) -> Sequence[Operand]:
        """What has to be read for a box of a tensor."""

    def prepare(self, info: TensorInfo, scan: Scan) -> Any:  # noqa: ARG002 - most need nothing
        """Find what the formula has to know of a whole tensor."""
        return None

    @abstractmethod
    def combine(
        self, info: TensorInfo, box: Box, piece: Box, arrays: Sequence[NDArray[Any]], prepared: Any
    ) -> Block:
        """Compute a block."""


@dataclass(frozen=True, kw_only=True)
class Elementwise(Method):
    """A method that computes an element from the same element of each input.

    Attributes:
        weights: the weights, of all inputs but a base.
    """

    weights: tuple[float, ...]

    def document(self) -> dict[str, Any]:
        """See Method."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def roles(self) -> list[dict[str, Any]]:
        """See Method."""
        return [{"role": "base"}] * self.has_base + [{"weight": w} for w in self.weights]

    def about(self) -> dict[str, Any]:
        """See Method."""
        return {"method": self.name, **{k: v for k, v in self.document().items() if k != "weights"}}

    def operands(self, inputs: Sequence[TensorInfo], box: Box) -> Sequence[Operand]:
        """See Method."""
        return [Operand(n, info, box) for n, info in enumerate(inputs)]

    def combine(
        self, info: TensorInfo, box: Box, piece: Box, arrays: Sequence[NDArray[Any]], prepared: Any
    ) -> Block:
        """See Method."""
        return self.formula(info, box, wide(box, piece, arrays), prepared)

    @abstractmethod
    def formula(self, info: TensorInfo, box: Box, blocks: Iterator[Block], prepared: Any) -> Block:
        """Compute a block."""


def wide(box: Box, piece: Box, arrays: Sequence[NDArray[Any]]) -> Iterator[Block]:
    """A block of each of several arrays in float64."""
    start = 0
    for first, begin, n in zip(box.start, piece.start, piece.shape, strict=True):
        start = start * n + first - begin
    return (array.reshape(-1)[start : start + box.size].astype(np.float64) for array in arrays)


@dataclass(frozen=True, kw_only=True)
class Average(Elementwise):
    """`formulas.average`."""

    name = "average"

    def roles(self) -> list[dict[str, Any]]:
        """See Method; weights add up to 1."""
        total = sum(self.weights)
        return [{"weight": w / total} for w in self.weights]

    def formula(self, info: TensorInfo, box: Box, blocks: Iterator[Block], prepared: Any) -> Block:  # noqa: ARG002
        """See Elementwise."""
        return formulas.average(blocks, self.weights)


@dataclass(frozen=True, kw_only=True)
class TaskArithmetic(Elementwise):
    """`formulas.task_arithmetic`."""

    name = "task-arithmetic"
    has_base = True
    scale: float

    def formula(self, info: TensorInfo, box: Box, blocks: Iterator[Block], prepared: Any) -> Block:  # noqa: ARG002
        """See Elementwise."""
        return formulas.task_arithmetic(next(blocks), blocks, self.weights, self.scale)


@dataclass(frozen=True, kw_only=True)
class Slerp(Elementwise):
    """`formulas.slerp`; the weights are 1 - t and t."""

    name = "slerp"
    scans = 1
    t: float

    def prepare(self, info: TensorInfo, scan: Scan) -> tuple[float, float]:  # noqa: ARG002
        """See Method: the weights of the two tensors."""

        def find(blocks: Iterator[Block]) -> list[tuple[float, float, float]]:
            a, b = blocks
            return [(float((a * b).sum()), float((a * a).sum()), float((b * b).sum()))]

        dot, square_a, square_b = map(math.fsum, zip(*scan(find, lambda x, y: x + y), strict=True))
        return formulas.slerp_weights(dot, (math.sqrt(square_a), math.sqrt(square_b)), self.t)

    def formula(self, info: TensorInfo, box: Box, blocks: Iterator[Block], prepared: Any) -> Block:  # noqa: ARG002
        """See Elementwise."""
        return formulas.slerp(blocks, prepared)


@dataclass(frozen=True, kw_only=True)
class Ties(Elementwise):
    """`formulas.ties`."""

    name = "ties"
    has_base = True
    scans = 2
    density: float
    scale: float

    def prepare(self, info: TensorInfo, scan: Scan) -> list[float]:
        """See Method: the least magnitude that is kept of each input."""
        count = len(self.weights)
        if self.density == 1:
            return [0.0] * count
        return find_thresholds(scan, count, max(1, int(self.density * info.size)), info.size)

    def formula(self, info: TensorInfo, box: Box, blocks: Iterator[Block], prepared: Any) -> Block:  # noqa: ARG002
        """See Elementwise."""
        return formulas.ties(next(blocks), blocks, prepared, self.weights, self.scale)


@dataclass(frozen=True, kw_only=True)
class Dare(Elementwise):
    """`formulas.dare`."""

    name = "dare"
    has_base = True
    density: float
    scale: float
    seed: int

    def formula(self, info: TensorInfo, box: Box, blocks: Iterator[Block], prepared: Any) -> Block:  # noqa: ARG002
        """See Elementwise."""
        masks = formulas.dare_masks(
            self.seed, info.name, len(self.weights), info.shape, box, self.density
        )
        return formulas.dare(next(blocks), blocks, masks, self.density, self.weights, self.scale)


#: The elementwise methods by name.
METHODS: dict[str, type[Elementwise]] = {
    m.name: m for m in (Average, TaskArithmetic, Slerp, Ties, Dare)
}
