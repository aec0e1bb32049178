"""A checkpoint under the names, shapes and dtypes of a view; no byte is copied."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ucformat.errors import UsageError
from ucformat.geometry.box import Box, row_major
from ucformat.geometry.tensor import Extent, Key, TensorList, single_extents
from ucformat.reading.dtypes import numpy_dtype
from ucformat.reading.read import read_flat
from ucformat.storage.base import HIDDEN, Info, check_range
from ucformat.storage.wrappers import SyntheticStore, WrappedStore
from ucformat.views.gather import bytes_read, gather, in_order, is_scattered
from ucformat.views.picks import clipped, mapped, source_box
from ucformat.views.steps import apply, left_unreadable
from ucformat.views.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import Any

    from numpy.typing import NDArray

    from ucformat.geometry.tensor import TensorInfo, Tiles
    from ucformat.geometry.view import View
    from ucformat.reading.readable import CheckpointMetadata, FileRecord, Readable
    from ucformat.schema.view import Labelled
    from ucformat.storage.base import Store
    from ucformat.views.table import Entry, Formula

_PREFIX = f"{HIDDEN}computed/"  # no file of a checkpoint can have such a key


@dataclass(frozen=True, slots=True)
class ComputedFile:
    """A computed tensor, and functions that return the extents of its inputs, or those that intersect a box."""

    formula: Formula
    inputs: tuple[Callable[[Box | None], Iterable[Extent | Tiles]], ...]


def file_name(level: int, number: int) -> str:
    """The key of a computed tensor's file."""
    return f"{_PREFIX}{level}/{number}"


def computed_extent(info: TensorInfo, file: str) -> Extent:
    """The extent of a computed tensor."""
    return Extent(Box.whole(info.shape), file, 0, row_major(info.shape, info.itemsize))


def inputs_of(store: Store, key: str) -> Iterator[tuple[TensorInfo, Iterable[Extent | Tiles]]] | None:
    """The inputs of a computed file.

    Returns:
        The tensors that it is computed from with their extents; None if it is not computed.
    """
    while isinstance(store, WrappedStore):
        found = store.computed(key) if isinstance(store, ComputedStore) else None
        if found is not None:
            return ((v.info, extents(None)) for v, extents in zip(found.formula.inputs, found.inputs, strict=True))
        store = store.inner
    return None


class ComputedStore(SyntheticStore):
    """A store with additional, computed files."""

    def __init__(self, inner: Store, files: Mapping[str, ComputedFile]) -> None:
        super().__init__(inner)
        self._files = dict(files)

    def computed(self, key: str) -> ComputedFile | None:
        """Look up a computed file.

        Returns:
            The file; None if it is not one of these.
        """
        return self._files.get(key)

    def gaps(self, key: str, offset: int, nbytes: int) -> int:
        """The bytes that are read along with a range of a file of scattered indices."""
        file = self._files.get(key)
        if file is None or file.formula.operation != "take":
            return 0
        unit = file.formula.info.itemsize
        elements = offset // unit, -(-(offset + nbytes) // unit)
        return bytes_read(self, file.formula, file.inputs[0], *elements) - nbytes

    def _holds(self, key: str) -> bool:
        return key in self._files

    def _info(self, key: str) -> Info:
        return Info(key, self._files[key].formula.info.nbytes, "computed")

    def _content(self, key: str, offset: int, nbytes: int) -> memoryview:
        file = self._files[key]
        info, unit = file.formula.info, file.formula.info.itemsize
        check_range(str(info.key), offset, nbytes, info.nbytes)
        first, last = offset // unit, -(-(offset + nbytes) // unit)
        if file.formula.operation == "take":
            made = gather(self, file.formula, file.inputs[0], first, last)
        else:
            arrays = [
                read_flat(self, view.info, extents(None), first, last)
                for view, extents in zip(file.formula.inputs, file.inputs, strict=True)
            ]
            made = _OPERATIONS[file.formula.operation](arrays, info)
        return made.view(np.uint8)[offset - first * unit :][:nbytes].data


def _cast(arrays: Sequence[NDArray[Any]], info: TensorInfo) -> NDArray[Any]:
    """Round to nearest, ties to even; raise UsageError if a finite value would become infinite or NaN."""
    (array,) = arrays
    with np.errstate(over="ignore", invalid="ignore"):
        out = array.astype(numpy_dtype(info.dtype))
        lost = np.isfinite(array) & ~np.isfinite(out)
    if lost.any():
        raise UsageError(
            f"{info.key}: the value {array[lost][0]} does not fit {info.dtype}",
            hint="cast to a dtype of a larger range",
        )
    return out


def _mean(arrays: Sequence[NDArray[Any]], info: TensorInfo) -> NDArray[Any]:
    """Sum in order, in float32 (float64 for float64 tensors), and divide by the number of tensors."""
    wide = np.result_type(np.float32, arrays[0].dtype) if arrays[0].dtype == np.float64 else np.dtype(np.float32)
    total = arrays[0].astype(wide)
    for array in arrays[1:]:
        total += array.astype(wide)
    return (total / wide.type(len(arrays))).astype(numpy_dtype(info.dtype))


_OPERATIONS = {"cast": _cast, "mean": _mean}


class Viewed:
    """The tensors of a source after the steps of a view; everything else is the source's.

    `taken` lists the tensors that each step took and made.
    """

    is_view = True  # by which `Checkpoint` recognises it

    def __init__(self, base: Readable, steps: Sequence[Labelled]) -> None:
        self.base, self.kind, self.steps = base, base.kind, tuple(steps)
        table = Table.of(base.metadata.tensor_list, base.metadata.aliases, base.metadata.means)
        self.taken = apply(table, self.steps)
        stored, aliases = table.tied()
        self._views = {Key(n, s): v for n, entry in stored.items() for s, v in entry.states.items()}
        self._infos = {i.key: i for i in base.metadata.tensor_list.tensors}
        self._level: int = base._level + 1 if isinstance(base, Viewed) else 0  # noqa: SLF001 - of one's own
        self._files = {key: file_name(self._level, n) for n, key in enumerate(table.formulas)}
        self._formulas = table.formulas
        self._scattered: dict[Key, bool] = {}  # of the takes that were read
        self._computed = {
            self._files[key]: ComputedFile(
                in_order(f)[0] if f.axes else f, tuple(partial(self.of_view, view) for view in f.inputs)
            )
            for key, f in table.formulas.items()
        }
        self.store: Store = ComputedStore(base.store, self._computed) if self._computed else base.store
        self.metadata = _view_metadata(base.metadata, stored, aliases).replace(
            unreadable=left_unreadable(base.metadata.unreadable, self.steps)
        )

    def extents(self, key: Key, within: Box | None = None) -> Iterator[Extent | Tiles]:
        """See Readable."""
        return self.of_view(self._views[key], within)

    def of_view(self, view: View, within: Box | None = None) -> Iterator[Extent | Tiles]:
        """The extents of a view of the source's tensors.

        Args:
            within: only extents that intersect this box of it (default: all).
        """
        if len(view.parts) == 1:
            source, part = view.parts[0]
            whole = view.info.shape == part.box.shape and part.axes == tuple(range(len(view.info.shape)))
            if whole and part.box.shape == self._shape(source):
                yield from self._source_extents(source, within)
                return
        yield from view.extents(self._single_extents, within)

    def means(self, key: Key) -> Iterator[ComputedFile]:
        """The means of which a tensor consists, wholly or in part."""
        return (file for file, _ in self.computed(key) if file.formula.operation == "mean")

    def computed(self, key: Key) -> Iterator[tuple[ComputedFile, bool]]:
        """The casts and means of which a tensor consists, wholly or in part.

        Yields:
            The computed tensor, and whether a step (rather than the source) asks for it.
        """
        views = [self._views[key]]
        while views:
            for source, _ in views.pop().parts:
                formula = self._formulas.get(source)
                if formula is not None:
                    yield self._computed[self._files[source]], bool(self.steps)
                    views += formula.inputs
                elif isinstance(self.base, Viewed):
                    yield from self.base.computed(source)

    def _shape(self, key: Key) -> tuple[int, ...]:
        formula = self._formulas.get(key)
        info = self._infos.get(key) if formula is None else formula.info
        return info.shape if info is not None else ()

    def _source_extents(self, key: Key, within: Box | None) -> Iterable[Extent | Tiles]:
        formula = self._formulas.get(key)
        if formula is None:
            return self.base.extents(key, within)
        whole = computed_extent(formula.info, self._files[key])
        if formula.operation != "take":
            return [whole]
        box = within or whole.box
        if self._is_scattered(key, formula):
            order = in_order(formula)[1]
            return [whole] if order is None else mapped(clipped([order, *[None] * (len(box.shape) - 1)], box), [whole])
        runs = clipped(formula.axes, box)
        if not all(runs):
            return []
        box = source_box(runs)
        return mapped(runs, single_extents(self.of_view(formula.inputs[0], box), box))

    def _is_scattered(self, key: Key, formula: Formula) -> bool:
        if key not in self._scattered:
            self._scattered[key] = is_scattered(formula, partial(self.of_view, formula.inputs[0]), self.store.costs)
        return self._scattered[key]

    def _single_extents(self, key: Key, within: Box) -> Iterator[Extent]:
        return single_extents(self._source_extents(key, within), within)

    def records(self) -> Iterator[FileRecord]:
        """Nothing: a view has no files of its own."""
        return iter(())


def _view_metadata(
    metadata: CheckpointMetadata, stored: dict[str, Entry], aliases: dict[str, str]
) -> CheckpointMetadata:
    """The metadata of the source, with the names after the steps.

    The places of tensors and groups in the program's state are those of the source if all have kept their names.
    """
    names: dict[str, list[str]] = {}  # of the tensors that come from each parameter
    for name, entry in stored.items():
        names.setdefault(entry.param, []).append(name)
    groups = tuple({**g, "params": [n for p in g["params"] for n in names.get(p, ())]} for g in metadata.groups)
    numbers = {n: i for i, g in enumerate(groups) for n in g["params"]}
    if not groups:
        numbers = {
            n: metadata.tensor_list.groups[e.param] for n, e in stored.items() if e.param in metadata.tensor_list.groups
        }
    infos = tuple(view.info for entry in stored.values() for view in entry.states.values())
    viewed = metadata.replace(
        tensor_list=TensorList(infos, numbers), aliases=aliases, groups=groups, means={}, paths={}, places=()
    )
    if any(entry.param != name for name, entry in stored.items()) or aliases != metadata.aliases:
        return viewed
    kept = {i.key: metadata.paths[i.key] for i in infos if i.key in metadata.paths}  # names are what they were
    same = [g["params"] for g in groups] == [g["params"] for g in metadata.groups]
    return viewed.replace(paths=kept, places=metadata.places if same else ())
