"""A tensor along the steps of a run: what is read of it, in plans first and then in concurrent reads."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ucformat.errors import OutOfBounds, TensorNotFound, UsageError
from ucformat.reading.dtypes import numpy_dtype
from ucformat.reading.execute import check_out, is_direct
from ucformat.reading.indexing import parse_index, parts_of
from ucformat.reading.rank import size_text
from ucformat.runs.members import naming_step
from ucformat.storage.concurrency import map_io

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import DTypeLike, NDArray

    from ucformat.checkpoint import Checkpoint
    from ucformat.geometry.box import Box
    from ucformat.geometry.tensor import Key, TensorInfo
    from ucformat.reading.indexing import Index
    from ucformat.reading.lazy import Tensor
    from ucformat.reading.plan import Plan, Verify

__all__ = ["RunPlan", "RunTensor"]

_BUFFER_BYTES = 256 << 20  # of boxes that are read at once to take scattered elements of them
_MAX_SHOWN = 12  # steps that a plan shows
_MAX_NAMED = 10  # steps that an error names


def choose_steps(steps: Sequence[int], wanted: object, label: str) -> list[int]:
    """The steps that an index of the first axis selects: an integer, or a slice of numbers of steps.

    A slice `start:stop:stride` selects the steps that there are of `range(start, stop, stride)`,
    which begins at 0 if `start` is left out, and ends after the last step if `stop` is.
    """
    if isinstance(wanted, int | np.integer) and not isinstance(wanted, bool):
        if wanted not in steps:
            near = sorted(steps, key=lambda step: abs(step - int(wanted)))[:2]
            raise OutOfBounds(
                f"{label} has no step {wanted}",
                hint=f"the first index is the number of a step, not a position; near it are "
                f"{' and '.join(map(str, sorted(near)))}",
            )
        return [int(wanted)]
    if not isinstance(wanted, slice):
        raise UsageError(
            f"{label}: cannot select steps by {wanted!r}",
            hint="the number of a step, a slice of these, or `...`; run.select([…]) takes a list",
        )
    limits = [n for n in (wanted.start, wanted.stop, wanted.step) if n is not None]
    if not all(isinstance(n, int | np.integer) and n >= 0 for n in limits) or wanted.step == 0:
        raise UsageError(
            f"{label}: cannot select steps by {_slice_text(wanted)}",
            hint="a slice has numbers of steps, which ascend and are not negative; positions are "
            "in run.steps: the last one is run.steps[-1]",
        )
    stop = steps[-1] + 1 if wanted.stop is None else wanted.stop
    numbers = range(wanted.start or 0, stop, wanted.step or 1)
    chosen = [step for step in steps if step in numbers]
    if not chosen:
        raise OutOfBounds(
            f"{label} has none of the steps {_slice_text(wanted)}",
            hint=f"its steps are {steps_text(steps)}",
        )
    return chosen


def _slice_text(wanted: slice) -> str:
    parts = [wanted.start, wanted.stop] + [wanted.step] * (wanted.step is not None)
    return ":".join("" if part is None else str(part) for part in parts)


def steps_text(steps: Sequence[int]) -> str:
    """Steps in a message: all, or the first and the last."""
    if len(steps) <= _MAX_NAMED:
        return ", ".join(map(str, steps))
    first = ", ".join(map(str, steps[: _MAX_NAMED - 2]))
    return f"{first}, …, {steps[-1]} ({len(steps):,} steps)"


@dataclass(frozen=True)
class RunPlan:
    """What reading a slice of a tensor along a run reads; created without any I/O on tensors.

    `plans` has the plan of each step that is read, and `same_as` the other steps, of which the
    tensor is that of an earlier one by its fingerprint.
    """

    label: str
    plans: Mapping[int, Plan]
    same_as: Mapping[int, int]
    shape: tuple[int, ...]
    nbytes: int

    @property
    def bytes_read(self) -> int:
        """Bytes that will be read from storage, of all steps."""
        return sum(plan.bytes_read for plan in self.plans.values())

    @property
    def bytes_needed(self) -> int:
        """Bytes of the elements that are read, of all steps that are read."""
        return sum(plan.bytes_needed for plan in self.plans.values())

    @property
    def bytes_unverified(self) -> int:
        """Bytes needed that are not covered by a verified checksum."""
        return sum(plan.bytes_unverified for plan in self.plans.values())

    @property
    def requests(self) -> int:
        """Number of ranges that will be read, of all steps."""
        return sum(plan.ranges for plan in self.plans.values())

    def __str__(self) -> str:
        steps = sorted([*self.plans, *self.same_as])
        lines = [
            f"{self.label}: {len(steps)} steps, {list(self.shape)}, {size_text(self.nbytes)} of memory",
            f"  read        {size_text(self.bytes_read)}",
            f"  unverified  {size_text(self.bytes_unverified)}",
            f"  requests    {self.requests}",
        ]
        if self.same_as:
            lines.append(f"  not read    {len(self.same_as)} steps, equal to an earlier one")
        half = _MAX_SHOWN // 2
        shown = steps if len(steps) <= _MAX_SHOWN else [*steps[:half], None, *steps[-half:]]
        for step in shown:
            if step is None:
                lines.append(f"  … {len(steps) - 2 * half} more steps")
            elif step in self.same_as:
                lines.append(f"  step {step}: as step {self.same_as[step]}")
            else:
                read, count = self.plans[step].bytes_read, self.plans[step].ranges
                word = "request" if count == 1 else "requests"
                lines.append(f"  step {step}: {size_text(read)} in {count} {word}")
        return "\n".join(lines)


@dataclass(frozen=True)
class _Selection:
    """A parsed index: the tensor at each step, the box to read of each, and what is taken of the box."""

    info: TensorInfo
    tensors: dict[int, Tensor]
    is_single: bool  # a single step, whose axis is dropped
    box: Box
    taken: tuple[int | slice, ...]
    shape: tuple[int, ...]  # of the result

    @cached_property
    def same_as(self) -> dict[int, int]:
        """The steps whose tensor is that of an earlier one, by the fingerprints that both recorded."""
        first: dict[str, int] = {}
        same_as = {}
        for step, tensor in self.tensors.items():
            recorded = tensor.recorded_fingerprint
            if recorded is not None and first.setdefault(recorded, step) != step:
                same_as[step] = first[recorded]
        return same_as

    @property
    def is_plain(self) -> bool:
        """Whether all elements of the box are taken, in their order."""
        return all(isinstance(part, int) or part.step in (None, 1) for part in self.taken)

    def in_box(self, row: NDArray[Any]) -> NDArray[Any]:
        """A row of the result in the shape of the box: with the dims that integers drop."""
        dropped = tuple(dim for dim, part in enumerate(self.taken) if isinstance(part, int))
        return np.expand_dims(row, dropped)


class StepsSource(Protocol):
    """What a tensor needs of a `Run`."""

    url: str

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps of its checkpoints, in ascending order."""

    def checkpoints(self, steps: Sequence[int]) -> Sequence[Checkpoint]:
        """The checkpoints of some steps."""


class RunTensor:
    """One tensor in one state along the steps of a run. The first axis is the step, by its number.

    `t[1000]` is that of step 1000, `t[1000:2000:100, 0:8]` a slice of those steps among 1000, 1100,
    … that there are. Only the slices are read.
    """

    def __init__(self, run: StepsSource, key: Key) -> None:
        self._run, self._key = run, key

    @property
    def name(self) -> str:
        """Its name in the checkpoints."""
        return self._key.name

    @property
    def state(self) -> str:
        """Its state: `weight`, `master`, `exp_avg`, …."""
        return self._key.state

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps along the first axis."""
        return self._run.steps

    @cached_property
    def _info(self) -> TensorInfo:
        return next(iter(self._at(self.steps).values())).info

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of steps, and the shape of the tensor.

        Raises:
            UsageError: the steps do not have it all, or not in one shape and dtype.
        """
        return (len(self.steps), *self._info.shape)

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements, of all steps."""
        return len(self.steps) * self._info.size

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype, as that of `Tensor`."""
        return numpy_dtype(self._info.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of all steps."""
        return len(self.steps) * self._info.nbytes

    def __len__(self) -> int:
        return len(self.steps)

    def __repr__(self) -> str:
        return f"<ucformat.RunTensor {self._key}: {len(self.steps)} steps of {self._run.url}>"

    def __getitem__(self, index: Index) -> NDArray[Any]:
        """Read a slice: steps by their numbers, the other dims with NumPy's basic indexing."""
        return self.read(index)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:  # noqa: FBT001
        if copy is False:
            raise ValueError(f"{self._key} is in storage: it cannot become an array without a copy")
        return self.read() if dtype is None else self.read().astype(dtype, copy=False)

    def plan(self, index: Index = ..., *, verify: Verify = "whole") -> RunPlan:
        """The requests that reading a slice would make, without making them.

        Args:
            index: as in `t[index]` (default: everything).
            verify: which checksums to verify, as for `read`.
        """
        chosen = self._select(index)
        to_read = [step for step in chosen.tensors if step not in chosen.same_as]

        def plan(step: int) -> Plan:
            with naming_step(step, self._run.url):
                return chosen.tensors[step].plan(chosen.box, verify=verify)

        plans = dict(zip(to_read, map_io(plan, to_read), strict=True))
        nbytes = math.prod(chosen.shape) * chosen.info.itemsize
        return RunPlan(str(self._key), plans, chosen.same_as, chosen.shape, nbytes)

    def read(
        self,
        index: Index = ...,
        out: NDArray[Any] | None = None,
        *,
        verify: Verify = "whole",
        threads: int | None = None,
    ) -> NDArray[Any]:
        """Read a slice, of all steps at once.

        Args:
            index: as in `t[index]` (default: everything).
            out: the array to fill, of the shape and dtype of the slice (None: a new array).
            verify: which checksums to verify, as for `Tensor.read`.
            threads: number of reading threads, of all steps together (None: as many as suit the
                store).

        Returns:
            `out`, or a new array; its first axis has the chosen steps in ascending order.

        Raises:
            OutOfBounds: the run has none of these steps.
            UsageError: some of the chosen steps do not have the tensor, or in another shape or
                dtype; or `out` does not fit.
        """
        chosen = self._select(index)
        if out is None:
            out = np.empty(chosen.shape, numpy_dtype(chosen.info.dtype))
        else:
            check_out(out, chosen.info.dtype, chosen.shape, str(self._key))
        self._fill(chosen, out[np.newaxis] if chosen.is_single else out, verify, threads)
        return out

    # --- choosing

    def _select(self, index: Index) -> _Selection:
        label = f"{self._key} of {self._run.url}"
        parts = index if isinstance(index, tuple) else (index,)
        # of an index that begins with `...`, the number of dims says what comes first
        named = parts[0] if parts and parts[0] is not Ellipsis else slice(None)
        tensors = self._at(choose_steps(self.steps, named, label))
        info = next(iter(tensors.values())).info
        first, *others = parts_of(index, (len(self.steps), *info.shape), label)
        steps = choose_steps(self.steps, first, label)
        box, taken = parse_index(tuple(others), info.shape, label)
        shape = tuple(
            len(range(n)[part])
            for n, part in zip(box.shape, taken, strict=True)
            if isinstance(part, slice)
        )
        is_single = not isinstance(first, slice)
        chosen = {step: tensors[step] for step in steps}
        return _Selection(
            info, chosen, is_single, box, taken, shape if is_single else (len(steps), *shape)
        )

    def _at(self, steps: Sequence[int]) -> dict[int, Tensor]:
        """The tensor at each of these steps.

        Raises:
            TensorNotFound: not all of them have it.
            UsageError: they have it in several dtypes or shapes.
        """
        tensors: dict[int, Tensor] = {}
        missing: TensorNotFound | None = None
        for step, checkpoint in zip(steps, self._run.checkpoints(steps), strict=True):
            with naming_step(step, checkpoint.url):
                try:
                    tensors[step] = checkpoint[self.name, self.state]
                except TensorNotFound as error:
                    missing = missing or error
        if missing is not None:
            if not tensors:
                raise missing
            absent = steps_text([step for step in steps if step not in tensors])
            raise TensorNotFound(
                f"{self._run.url} has no {self._key} at the steps {absent}",
                hint=f"choose among those that have it: {steps_text(list(tensors))}",
            )
        by_kind: dict[str, list[int]] = {}
        for step, tensor in tensors.items():
            kind = f"{tensor.info.dtype} {list(tensor.shape)}"
            by_kind.setdefault(kind, []).append(step)
        if len(by_kind) > 1:
            kinds = "; ".join(f"{kind} at {steps_text(some)}" for kind, some in by_kind.items())
            raise UsageError(
                f"{self._key} of {self._run.url} changes along these steps: {kinds}",
                hint="choose steps at which it is the same",
            )
        return tensors

    # --- reading

    def _fill(
        self, chosen: _Selection, out: NDArray[Any], verify: Verify, threads: int | None
    ) -> None:
        """Read the chosen steps, in ascending order and several at once, into the rows of an array."""
        rows = {step: out[i, ...] for i, step in enumerate(chosen.tensors)}
        to_read = [step for step in chosen.tensors if step not in chosen.same_as]
        total = threads or max(chosen.tensors[step].default_threads for step in to_read)
        count = min(total, len(to_read))
        if not chosen.is_plain or not is_direct(out):
            nbytes = chosen.box.size * chosen.info.itemsize
            count = max(1, min(count, _BUFFER_BYTES // max(1, nbytes)))

        def read(step: int) -> None:
            tensor, row = chosen.tensors[step], rows[step]
            # a step that is read alone has as many threads as suit it
            own = threads if count == 1 else max(1, total // count)
            with naming_step(step, self._run.url):
                if chosen.is_plain and is_direct(row):
                    tensor.read_box(chosen.box, chosen.in_box(row), verify, own)
                else:
                    row[...] = tensor.read_box(chosen.box, None, verify, own)[chosen.taken]

        with ThreadPoolExecutor(count, "ucformat-run") as pool:
            jobs = [pool.submit(copy_context().run, read, step) for step in to_read]
            try:
                for job in jobs:
                    job.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        for step, earlier in chosen.same_as.items():
            rows[step][...] = rows[earlier]
