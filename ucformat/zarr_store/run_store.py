"""A run as a read-only store of zarr-python, in which each tensor is an array along all steps."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ucformat.errors import UsageError, first_names
from ucformat.format.arrays import STEP, array_folders, chunked_array_json, steps_json
from ucformat.zarr_store.store import ArrayStore, ChunkedArray, ChunkReader, TensorArray

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from ucformat.geometry.tensor import Key, TensorInfo
    from ucformat.reading.plan import Verify
    from ucformat.zarr_store.store import TensorSource

_MAX_NAMED = 5  # tensors that an error names


class RunArray(ChunkedArray):
    """A tensor along the steps of a run. A chunk is of one step, and of the edges that suit the first one."""

    def __init__(self, info: TensorInfo, readers: Sequence[ChunkReader]) -> None:
        self._info, self._readers = info, readers
        self._arrays = {0: TensorArray(readers[0], info)}

    @cached_property
    def document(self) -> bytes:
        """See ChunkedArray."""
        return chunked_array_json(self._info, self._arrays[0].chunk, len(self._readers))

    @property
    def nbytes(self) -> int:
        """See ChunkedArray."""
        return self._arrays[0].nbytes

    @cached_property
    def grid(self) -> tuple[int, ...]:
        """See ChunkedArray."""
        return (len(self._readers), *self._arrays[0].grid)

    async def read(self, index: tuple[int, ...], start: int, stop: int) -> NDArray[np.uint8]:
        """See ChunkedArray."""
        at, *inside = index
        array = self._arrays.get(at)
        if array is None:
            array = TensorArray(self._readers[at], self._info, self._arrays[0].chunk)
            self._arrays[at] = array
        return await array.read(tuple(inside), start, stop)


class StepArray(ChunkedArray):
    """The numbers of the steps, the coordinate of the first dim."""

    def __init__(self, steps: Sequence[int]) -> None:
        self._data = np.array(steps, "<i8").view(np.uint8)
        self._document = steps_json(len(steps))

    @property
    def document(self) -> bytes:
        """See ChunkedArray."""
        return self._document

    @property
    def nbytes(self) -> int:
        """See ChunkedArray."""
        return self._data.nbytes

    @property
    def grid(self) -> tuple[int, ...]:
        """See ChunkedArray."""
        return (1,)

    async def read(self, index: tuple[int, ...], start: int, stop: int) -> NDArray[np.uint8]:  # noqa: ARG002 - there is one chunk
        """See ChunkedArray."""
        return self._data[start:stop]


class StepsSource(Protocol):
    """What the store needs of a `Run`."""

    url: str

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps of its checkpoints, in ascending order."""

    def checkpoints(self) -> Sequence[TensorSource]:
        """The checkpoints of the steps."""

    @property
    def recipe(self) -> tuple[object, ...]:
        """The same for runs of the same checkpoints."""


class RunStore(ArrayStore):
    """The tensors of a run as arrays of zarr-python; see `Run.zarr_store`.

    It is pickled as what opens the checkpoints again where it is unpickled.
    """

    def __init__(
        self,
        run: StepsSource,
        names: tuple[str, ...] | None = None,
        *,
        verify: Verify = "whole",
        read_only: bool = False,
        infos: Mapping[Key, TensorInfo] | None = None,
    ) -> None:
        super().__init__(read_only=read_only)
        self._run, self._names, self._verify = run, names, verify
        self._infos = _common(run, names) if infos is None else infos

    @cached_property
    def _states(self) -> dict[str, dict[str, ChunkedArray]]:
        steps = StepArray(self._run.steps)
        readers = [ChunkReader(ck.source, self._verify) for ck in self._run.checkpoints()]
        out: dict[str, dict[str, ChunkedArray]] = {}
        for key, path in array_folders(self._infos, [STEP]).items():
            state, _, folder = path.partition("/")
            out.setdefault(state, {STEP: steps})[folder] = RunArray(self._infos[key], readers)
        return out

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RunStore):
            return False
        mine, theirs = self._run.recipe, other._run.recipe
        return (mine, self._names, self._verify) == (theirs, other._names, other._verify)

    __hash__ = None

    def __repr__(self) -> str:
        return f"RunStore({self._run.url!r})"

    def __str__(self) -> str:
        return self._run.url

    def __reduce__(
        self,
    ) -> tuple[Callable[..., RunStore], tuple[StepsSource, tuple[str, ...] | None, Verify, bool]]:
        return _unpickled, (self._run, self._names, self._verify, self.read_only)

    def _again(self, *, read_only: bool) -> RunStore:
        return RunStore(
            *(self._run, self._names),
            verify=self._verify,
            read_only=read_only,
            infos=self._infos,
        )


def _unpickled(
    run: StepsSource,
    names: tuple[str, ...] | None,
    verify: Verify,
    read_only: bool,  # noqa: FBT001 - pickled
) -> RunStore:
    return RunStore(run, names, verify=verify, read_only=read_only)


def _common(run: StepsSource, names: tuple[str, ...] | None) -> dict[Key, TensorInfo]:
    """Dtype and shape of the tensors, which are the same at all steps.

    Raises:
        UsageError: some are not; or there is none of a name.
    """
    chosen = None if names is None else set(names)
    all_infos = [
        {key: i for key, i in ck.tensors.items() if chosen is None or key.name in chosen}
        for ck in run.checkpoints()
    ]
    first = all_infos[0]
    wrong = {
        key: step
        for step, infos in zip(run.steps, all_infos, strict=True)
        if infos != first
        for key in infos.keys() | first.keys()
        if infos.get(key) != first.get(key)
    }
    if wrong:
        listed = first_names((f"{key} at step {wrong[key]}" for key in sorted(wrong)), _MAX_NAMED)
        raise UsageError(
            f"{run.url} has tensors that are not the same in dtype and shape at all steps: {listed}",
            hint="choose steps (`run.select`) at which they are, or the other tensors: "
            "run.zarr_store(names=[…])",
        )
    if chosen is not None and (absent := chosen - {key.name for key in first}):
        raise UsageError(
            f"{run.url} has no tensor {min(absent)!r}", hint="`run.names()` lists them"
        )
    return first
