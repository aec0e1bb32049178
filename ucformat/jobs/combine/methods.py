"""The methods of combining: which boxes of which inputs a block is computed from, and by which formula."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ucformat.jobs.combine import formulas
from ucformat.jobs.combine.thresholds import find_thresholds
from ucformat.schema import CASTABLE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from ucformat.geometry.box import Box
    from ucformat.geometry.tensor import TensorInfo
    from ucformat.jobs.combine.formulas import Block
    from ucformat.jobs.combine.thresholds import Scan

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
        scans: how often it has to read a whole tensor before it can compute a block; of TIES, mostly.
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
    def combine(self, info: TensorInfo, box: Box, piece: Box, arrays: Sequence[NDArray[Any]], known: Any) -> Block:
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

    def combine(self, info: TensorInfo, box: Box, piece: Box, arrays: Sequence[NDArray[Any]], known: Any) -> Block:
        """See Method."""
        return self.formula(info, box, wide(box, piece, arrays), known)

    @abstractmethod
    def formula(self, info: TensorInfo, box: Box, blocks: Iterator[Block], known: Any) -> Block:
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

    def formula(self, info: TensorInfo, box: Box, blocks: Iterator[Block], known: Any) -> Block:  # noqa: ARG002
        """See Elementwise."""
        return formulas.average(blocks, self.weights)


@dataclass(frozen=True, kw_only=True)
class TaskArithmetic(Elementwise):
    """`formulas.task_arithmetic`."""

    name = "task-arithmetic"
    has_base = True
    scale: float

    def formula(self, info: TensorInfo, box: Box, blocks: Iterator[Block], known: Any) -> Block:  # noqa: ARG002
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

        dot, one, other = map(math.fsum, zip(*scan(find, lambda x, y: x + y), strict=True))
        return formulas.slerp_weights(dot, (math.sqrt(one), math.sqrt(other)), self.t)

    def formula(self, info: TensorInfo, box: Box, blocks: Iterator[Block], known: Any) -> Block:  # noqa: ARG002
        """See Elementwise."""
        return formulas.slerp(blocks, known)


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

    def formula(self, info: TensorInfo, box: Box, blocks: Iterator[Block], known: Any) -> Block:  # noqa: ARG002
        """See Elementwise."""
        return formulas.ties(next(blocks), blocks, known, self.weights, self.scale)


@dataclass(frozen=True, kw_only=True)
class Dare(Elementwise):
    """`formulas.dare`."""

    name = "dare"
    has_base = True
    density: float
    scale: float
    seed: int

    def formula(self, info: TensorInfo, box: Box, blocks: Iterator[Block], known: Any) -> Block:  # noqa: ARG002
        """See Elementwise."""
        masks = formulas.dare_masks(self.seed, info.name, len(self.weights), info.shape, box, self.density)
        return formulas.dare(next(blocks), blocks, masks, self.density, self.weights, self.scale)


#: The elementwise methods by name.
METHODS: dict[str, type[Elementwise]] = {m.name: m for m in (Average, TaskArithmetic, Slerp, Ties, Dare)}
