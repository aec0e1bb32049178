"""The job that writes a combined checkpoint: the shards of a conversion, filled from several inputs."""

from __future__ import annotations

import threading
from copy import copy
from math import prod
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np

from ucformat._version import __version__
from ucformat.errors import Conflict, UsageError
from ucformat.format.chunking import Grid
from ucformat.format.digest import document_digest
from ucformat.geometry.box import Box, row_major
from ucformat.geometry.tensor import Key, Piece
from ucformat.jobs.combine.lora import Lora
from ucformat.jobs.combine.methods import METHODS, Operand
from ucformat.jobs.combine.outputs import CombinedTensor, find_outputs
from ucformat.jobs.reopen import reopen, spec_of
from ucformat.jobs.run import run
from ucformat.jobs.shards import ShardJob, WriteOptions, plan_document
from ucformat.jobs.tasks import job_name
from ucformat.reading.dtypes import numpy_dtype
from ucformat.storage.concurrency import thread_memory
from ucformat.storage.url import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
    from types import EllipsisType

    from numpy.typing import NDArray

    from ucformat.checkpoint import Checkpoint
    from ucformat.format.arrays import StoredArray
    from ucformat.geometry.tensor import TensorInfo
    from ucformat.jobs.combine.formulas import Block
    from ucformat.jobs.combine.methods import Method
    from ucformat.jobs.inputs import InputBox
    from ucformat.storage.base import Store

T = TypeVar("T")

_READ_BYTES = 48 << 20  # of all inputs together, that a thread holds at once
# elements that are computed at once: in float64, a few blocks fit a processor's cache
_BLOCK = 1 << 15


class Combination:
    """What is combined, and how.

    Attributes:
        sources: the inputs, of which the first gives everything that is not a tensor.
        outputs: the tensors of the new checkpoint that are computed, by name and state.
        left_out: those that are not.
    """

    left_out: frozenset[Key] = frozenset()

    def __init__(
        self,
        sources: Sequence[Checkpoint],
        method: Method,
        states: Sequence[str] | None = None,
        take: Sequence[str] = (),
        cast: str | None = None,
    ) -> None:
        self.sources = tuple(sources)
        self.method = method
        self._chosen = (states, tuple(take), cast)
        outputs = find_outputs(
            self.sources[:1] if isinstance(method, Lora) else self.sources, states, take, cast
        )
        self.outputs: dict[Key, CombinedTensor] = {output.info.key: output for output in outputs}

    @property
    def infos(self) -> list[TensorInfo]:
        """The tensors that are computed."""
        return [output.info for output in self.outputs.values()]

    def without(self, keys: Iterable[Key]) -> Self:
        """The same, but for some tensors, which are not computed."""
        less = copy(self)
        less.left_out = self.left_out.union(keys)
        less.outputs = {k: o for k, o in self.outputs.items() if k not in less.left_out}
        return less

    def plan(self, options: WriteOptions) -> dict[str, Any]:
        """The plan, which identifies it: the files of the inputs as they are now, tensors, method and grids."""
        return {
            "combine": {"method": self.method.name, **self.method.document()},
            "inputs": [plan_document(source, (), options) for source in self.sources],
            "tensors": [
                (*o.info.key, o.info.dtype, o.info.shape, o.how) for o in self.outputs.values()
            ],
            "grids": (options.chunk_bytes, options.shard_bytes),
            "writer": __version__,
        }

    def spec(self) -> dict[str, Any]:
        """What another process needs to make it, as JSON values."""
        states, take, cast = self._chosen
        return {
            "inputs": [spec_of(source) for source in self.sources],
            "method": (self.method.name, self.method.document()),
            "chosen": (states, take, cast),
            "left_out": sorted(self.left_out),
        }

    @classmethod
    def of_spec(cls, spec: Mapping[str, Any]) -> Self:
        """Make it in another process."""
        sources = [reopen(input_spec) for input_spec in spec["inputs"]]
        name, document = spec["method"]
        parameters = {**document, "weights": tuple(document["weights"])}
        method = Lora(sources, **parameters) if name == Lora.name else METHODS[name](**parameters)
        return cls(sources, method, *spec["chosen"]).without(Key(*k) for k in spec["left_out"])

    def operands(self, output: CombinedTensor, box: Box) -> Sequence[Operand]:
        """What has to be read for a box of a tensor."""
        if output.how == "combined":
            return self.method.operands(output.inputs, box)
        return [Operand(n, info, box) for n, info in enumerate(output.inputs)]


class CombineJob(ShardJob):
    """Writes the shards of combined tensors."""

    kind = "combine"

    def __init__(
        self, combination: Combination, store: Store, attempt: str, options: WriteOptions
    ) -> None:
        self.combination = combination
        super().__init__(combination.sources[0], store, attempt, combination.infos, options)
        self._prepared: dict[Key, Any] = {}
        self._locks = {key: threading.Lock() for key in combination.outputs}

    @property
    def sources(self) -> Sequence[Checkpoint]:
        """See ShardJob."""
        return self.combination.sources

    def group(self, task: int) -> Hashable:
        """See Job: what a method finds of a whole tensor is found by one part only."""
        array, _ = self.shard(task)
        return array.info.key if self._scans(self.combination.outputs[array.info.key]) else task

    def spec(self) -> dict[str, Any]:
        """See Job."""
        return {
            "job": job_name(self),
            "combination": self.combination.spec(),
            "store": self.store.url,
            "attempt": self.attempt,
            "grids": (self.options.chunk_bytes, self.options.shard_bytes),
            "verify": self.options.verify,
            "codec": self.options.codec,
            "plan": document_digest(self.combination.plan(self.options)),
        }

    @classmethod
    def of_spec(cls, spec: Mapping[str, Any]) -> Self:
        """See Job."""
        combination = Combination.of_spec(spec["combination"])
        chunk_bytes, shard_bytes = spec["grids"]
        options = WriteOptions(chunk_bytes, shard_bytes, verify=spec["verify"], codec=spec["codec"])
        if document_digest(combination.plan(options)) != spec["plan"]:
            raise Conflict(
                "a worker reads other files of the inputs than those with which the job was "
                "started",
                hint="they must be the same places on all machines, and must not change meanwhile",
            )
        return cls(combination, open_store(spec["store"]), spec["attempt"], options)

    def boxes(self, array: StoredArray, box: Box) -> Sequence[InputBox]:
        """See ShardJob."""
        return self._boxes(self.combination.outputs[array.info.key], box)

    def times_read(self, array: StoredArray) -> int:
        """See ShardJob."""
        return 1 + self._scans(self.combination.outputs[array.info.key])

    def _scans(self, output: CombinedTensor) -> int:
        return self.combination.method.scans if output.how == "combined" else 0

    def _boxes(self, output: CombinedTensor, box: Box) -> list[InputBox]:
        return [
            self.inputs[o.input].within(o.info, o.box)
            for o in self.combination.operands(output, box)
        ]

    def fill(
        self, array: StoredArray, boxes: Sequence[InputBox], piece: Piece, raw: NDArray[np.uint8]
    ) -> bool:
        """See ShardJob."""
        info, output = array.info, self.combination.outputs[array.info.key]
        if output.how == "taken":
            return boxes[0].read(piece, raw)
        dtype = numpy_dtype(info.dtype)
        strides = tuple(s * info.itemsize for s in piece.strides)
        target: NDArray[Any] = np.ndarray(
            piece.box.shape, dtype, raw.data, piece.offset * info.itemsize, strides
        )
        prepared = self._knowledge(output) if self._scans(output) else None
        covered = True
        for part in self._parts(boxes, piece.box):
            arrays, whole = self._read(output, boxes, part)
            covered &= whole
            if output.how == "equal":
                self._must_be_equal(output, arrays)
                target[_slices(part, piece.box)] = arrays[0]
                continue
            for box in cut(part, _BLOCK):
                block = self.combination.method.combine(info, box, part, arrays, prepared)
                self._check(output, block, arrays)
                # Rounded to nearest, ties to even, as NumPy and torch cast float64: to bfloat16
                # through float32.
                np.copyto(
                    target[_slices(box, piece.box)], block.reshape(box.shape), casting="unsafe"
                )
        return covered

    def _parts(self, boxes: Sequence[InputBox], box: Box) -> Iterator[Box]:
        """Cut a box so that what is read of all inputs for a part fits the memory."""
        return cut(box, max(1, _READ_BYTES // sum(b.info.itemsize for b in boxes)))

    def _read(
        self, output: CombinedTensor, boxes: Sequence[InputBox], part: Box
    ) -> tuple[list[NDArray[Any]], bool]:
        """Read the operands of a part; returns them, and whether checksums cover all bytes that were read."""
        arrays: list[NDArray[Any]] = []
        covered = True
        for input_box, operand in zip(boxes, self.combination.operands(output, part), strict=True):
            info, box = operand.info, operand.box
            memory = thread_memory(f"operand {len(arrays)}", box.size * info.itemsize)
            covered &= input_box.read(Piece(box, 0, row_major(box.shape)), memory)
            arrays.append(memory.view(numpy_dtype(info.dtype)).reshape(box.shape))
        return arrays, covered

    # --- what a method finds of a whole tensor

    def _knowledge(self, output: CombinedTensor) -> Any:
        key = output.info.key
        with self._locks[key]:
            if key not in self._prepared:

                def scan(find: Callable[[Iterator[Block]], T], fold: Callable[[T, T], T]) -> T:
                    return self._scan(output, find, fold)

                self._prepared[key] = self.combination.method.prepare(output.info, scan)
            return self._prepared[key]

    def _scan(
        self,
        output: CombinedTensor,
        find: Callable[[Iterator[Block]], T],
        fold: Callable[[T, T], T],
    ) -> T:
        """See Scan. The blocks are those of default grids, so that their sums do not depend on options."""
        info = output.inputs[0]
        grid = Grid.of(info.shape, info.itemsize)

        def of_shard(shard: tuple[int, ...]) -> T:
            whole = grid.box(shard)
            boxes = self._boxes(output, whole)
            folded: T | None = None
            for box in cut(whole, _SCANNED):
                for part in self._parts(boxes, box):
                    arrays, _ = self._read(output, boxes, part)
                    for block in cut(part, _BLOCK):
                        result = find(self._finite(output, block, part, arrays))
                        folded = result if folded is None else fold(folded, result)
            assert folded is not None  # noqa: S101 - shards have elements
            return folded

        total: T | None = None
        for _, result in run(of_shard, grid.shards(), self.options.workers):
            total = result if total is None else fold(total, result)
        assert total is not None  # noqa: S101 - only tensors with elements have tasks
        return total

    def _finite(
        self, output: CombinedTensor, box: Box, part: Box, arrays: Sequence[NDArray[Any]]
    ) -> Iterator[Block]:
        from ucformat.jobs.combine.methods import wide

        for n, block in enumerate(wide(box, part, arrays)):
            if not np.isfinite(block).all():
                raise self._not_finite(n, output.inputs[n])
            yield block

    # --- what may be wrong with values

    def _check(self, output: CombinedTensor, block: Block, arrays: Sequence[NDArray[Any]]) -> None:
        """Raise UsageError if a value of an input is not finite, or one of the result does not fit the dtype."""
        if not block.size:
            return
        extremes = np.array([block.min(), block.max()])
        with np.errstate(over="ignore", invalid="ignore"):
            if np.isfinite(extremes.astype(numpy_dtype(output.info.dtype))).all():
                return
        operands = self.combination.operands(output, Box.whole(output.info.shape))
        for operand, array in zip(operands, arrays, strict=True):
            if not np.isfinite(array).all():
                raise self._not_finite(operand.input, operand.info)
        worst = extremes[np.argmax(np.abs(extremes))]
        raise UsageError(
            f"{output.info.key}: the combined value {worst:g} does not fit {output.info.dtype}",
            hint="choose a dtype of a larger range: --cast float32 (cast=)",
        )

    def _not_finite(self, number: int, info: TensorInfo) -> UsageError:
        return UsageError(
            f"{self.sources[number].home}: {info.key} has values that are not finite, so it "
            "cannot be combined",
            hint=(
                "leave out this input, or keep the tensor of the first one: --take PATTERN (take=)"
            ),
        )

    def _must_be_equal(self, output: CombinedTensor, arrays: Sequence[NDArray[Any]]) -> None:
        """Raise UsageError if a tensor without floating-point numbers differs between inputs."""
        first, *others = (array.reshape(-1).view(np.uint8) for array in arrays)
        for n, other in enumerate(others, 1):
            if not np.array_equal(first, other):
                raise UsageError(
                    f"{output.info.key} has the dtype {output.info.dtype}, and differs between "
                    f"{self.sources[0].home} "
                    f"and {self.sources[n].home}: such values are not combined",
                    hint="keep that of the first input: --take PATTERN (take=)",
                )


_SCANNED = 1 << 21  # elements that are read at once by a scan


def cut(box: Box, most: int) -> Iterator[Box]:
    """Cut a box along its first dims; the parts are consecutive in C order."""
    if box.size <= most:
        yield box
        return
    d = next(d for d, n in enumerate(box.shape) if n > 1)
    step = max(1, most // prod(box.shape[d + 1 :]))
    for first in range(0, box.shape[d], step):
        start, shape = list(box.start), list(box.shape)
        start[d] += first
        shape[d] = min(step, box.shape[d] - first)
        yield from cut(Box(tuple(start), tuple(shape)), most)


def _slices(box: Box, within: Box) -> tuple[slice | EllipsisType, ...]:
    """The index of a box; with it, a 0-d array remains one."""
    return (
        ...,
        *(
            slice(a - b, a - b + n)
            for a, b, n in zip(box.start, within.start, box.shape, strict=True)
        ),
    )
