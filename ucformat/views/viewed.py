"""A checkpoint under the names, shapes and dtypes of a view; no byte is copied."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np

from ucformat.errors import UnsupportedError, UsageError
from ucformat.geometry.box import Box, offset_of, row_major
from ucformat.geometry.flat_buffer import flat_boxes
from ucformat.geometry.tensor import Extent, Key, Piece, TensorInfo, TensorList, single_extents
from ucformat.reading.dtypes import numpy_dtype
from ucformat.reading.execute import ReadOptions, read_flat, read_items
from ucformat.reading.plan import ReadItem, make_plan, merges
from ucformat.reading.readable import Loss
from ucformat.storage.base import HIDDEN, Info, check_range
from ucformat.storage.wrappers import SyntheticStore, WrappedStore
from ucformat.views.steps import apply, left_unreadable
from ucformat.views.table import Picks, ViewTable, clipped, mapped, source_box

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import Any

    from numpy.typing import NDArray

    from ucformat.geometry.tensor import Tiles
    from ucformat.geometry.view import View
    from ucformat.reading.readable import CheckpointMetadata, FileRecord, Readable
    from ucformat.schema.view import Labelled
    from ucformat.storage.base import Costs, Store
    from ucformat.views.table import Formula, Run, ViewedTensor

    Locate = Callable[[Box], Iterable[Extent | Tiles]]


# Scattered indices: rows of a file are read with the gaps between them, and the indices are picked
# in memory.
#
# Where a file stores the indices of a dim so close to each other that one request reads several of
# them, an extent for each would be read in requests of a few bytes, or read the same bytes again
# and again.


_FEW = 64  # combinations of runs that are read one by one in any case
_DENSE = 8  # all of a span is read if at least one index in so many is wanted
_AT_ONCE = 4 << 20  # bytes that are read at once, gaps included


def is_scattered(formula: Formula, locate: Locate, costs: Costs) -> bool:
    """Whether indices are picked in memory; otherwise each run of them has extents of its own."""
    runs = clipped(formula.axes, Box.whole(formula.info.shape))
    if not all(runs) or math.prod(map(len, runs)) <= _FEW:
        return False
    return any(
        len(list(_across_gaps(of_dim, stride, costs))) < len(of_dim)
        for of_dim, stride in zip(runs, _strides(runs, locate), strict=True)
    )


def gather(
    store: Store, formula: Formula, locate: Locate, first: int, last: int
) -> NDArray[np.generic]:
    """Read a range of a tensor of scattered indices."""
    info, out = formula.info, np.empty(last - first, numpy_dtype(formula.info.dtype))
    steps = row_major(info.shape)
    for box in flat_boxes(info.shape, first, last):
        for part, runs, near in _parts(formula, box, locate, store.costs):
            offset = offset_of(part.start, steps) - first
            into = np.lib.stride_tricks.as_strided(
                out[offset:], part.shape, [s * info.itemsize for s in steps]
            )
            into[...] = _read(store, info, locate, part, runs, near)
    return out


def bytes_read(store: Store, formula: Formula, locate: Locate, first: int, last: int) -> int:
    """The bytes that are read for a range of a tensor of scattered indices."""
    boxes = flat_boxes(formula.info.shape, first, last)
    parts = (part for box in boxes for part in _parts(formula, box, locate, store.costs))
    plans = (
        make_plan([_item(formula.info, locate, near)], "whole", store.costs) for _, _, near in parts
    )
    return sum(plan.through(store).bytes_read for plan in plans)


def in_order(formula: Formula) -> tuple[Formula, Picks | None]:
    """The indices with those of the first dim in the order of the source.

    A range of the tensor has only some of these, so that each range would otherwise read from
    everywhere.

    Returns:
        The indices, and which of the first dim they were in the order in which they are wanted;
        None if it is the same.
    """
    axis = formula.axes[0]
    if axis is None or list(axis.runs) == sorted(axis.runs):
        return formula, None
    runs = sorted(axis.runs)
    begins = dict(zip(runs, accumulate((n for _, n in runs), initial=0), strict=False))
    return (
        replace(formula, axes=(Picks(tuple(runs)), *formula.axes[1:])),
        Picks(tuple((begins[run], run[1]) for run in axis.runs)),
    )


def _parts(
    formula: Formula, box: Box, locate: Locate, costs: Costs
) -> Iterator[tuple[Box, list[list[Run]], list[list[Run]]]]:
    """Parts of a box that are small enough to be read at once, with their runs, and these joined across gaps."""
    strides = _strides(clipped(formula.axes, box), locate)

    @cache  # only some of the dims are cut
    def of_dim(d: int, start: int, length: int) -> tuple[list[Run], list[Run]]:
        (runs,) = clipped(formula.axes[d : d + 1], Box((start,), (length,)))
        return runs, list(_across_gaps(runs, strides[d], costs))

    todo = [box]
    while todo:
        part = todo.pop()
        dims = [
            of_dim(d, start, n)
            for d, (start, n) in enumerate(zip(part.start, part.shape, strict=True))
        ]
        near = [joined for _, joined in dims]
        size = math.prod(sum(n for _, n, _ in of_dim) for of_dim in near)
        if size * formula.info.itemsize <= _AT_ONCE or part.size == 1:
            yield part, [runs for runs, _ in dims], near
            continue
        d = next(d for d, n in enumerate(part.shape) if n > 1)
        half = part.shape[d] // 2
        # The first half last, so that it is the next part and the parts come in order.
        for skip, n in ((half, part.shape[d] - half), (0, half)):
            start = tuple(a + skip * (i == d) for i, a in enumerate(part.start))
            todo.append(Box(start, (*part.shape[:d], n, *part.shape[d + 1 :])))


def _item(info: TensorInfo, locate: Locate, near: list[list[Run]]) -> ReadItem:
    """What is read for a part: joined runs."""
    shape = tuple(sum(n for _, n, _ in of_dim) for of_dim in near)
    box = source_box(near)
    extents = mapped(near, single_extents(locate(box), box))
    piece = Piece(Box.whole(shape), 0, row_major(shape))
    return ReadItem(TensorInfo(info.name, info.state, info.dtype, shape), extents, [(0, piece)])


def _read(
    store: Store,
    info: TensorInfo,
    locate: Locate,
    part: Box,
    runs: list[list[Run]],
    near: list[list[Run]],
) -> NDArray[np.generic]:
    """Read joined runs, and pick the indices of a part."""
    item = _item(info, locate, near)
    raw = np.empty(item.info.size, numpy_dtype(info.dtype))
    read_items(store, [item], [raw.view(np.uint8)], [str(info.key)], ReadOptions(threads=1))
    positions = [
        _positions(*of_dim) for of_dim in zip(runs, near, part.start, part.shape, strict=True)
    ]
    return raw.reshape(item.info.shape)[np.ix_(*positions)]


def _positions(runs: list[Run], near: list[Run], start: int, length: int) -> NDArray[np.intp]:
    """Where the indices of one dim of a part are among those that are read."""
    out, firsts = np.empty(length, np.intp), [first for first, _, _ in near]
    for first, n, to in runs:
        source, _, position = near[int(np.searchsorted(firsts, first, "right")) - 1]
        out[to - start : to - start + n] = np.arange(
            position + first - source, position + first - source + n
        )
    return out


def _strides(runs: Sequence[Sequence[Run]], locate: Locate) -> tuple[int, ...]:
    """The bytes between neighbouring indices of each dim in the file."""
    first = Box(tuple(of_dim[0][0] for of_dim in runs), (1,) * len(runs))
    extent = next((e for e in single_extents(locate(first), first) if e.box.intersect(first)), None)
    # reading reports what is missing
    return row_major(first.shape) if extent is None else tuple(map(abs, extent.strides))


def _across_gaps(runs: Sequence[Run], stride: int, costs: Costs) -> Iterator[Run]:
    """Runs of one dim, in the order of the source, together with gaps between them that are read along."""
    # `sum(run[:2])` is where a run ends.
    gaps = [(b[0] - sum(a[:2])) * stride for a, b in pairwise(runs)]
    joins = [merges(gap, run[1] * stride, costs) for gap, run in zip(gaps, runs, strict=False)]
    first, last = runs[0], runs[-1]
    if 2 * sum(joins) < len(joins):
        joins = [False] * len(joins)  # most are read one by one in any case
    elif _DENSE * sum(n for _, n, _ in runs) >= sum(last[:2]) - first[0]:
        joins = [True] * len(joins)
    start, position = first[0], 0
    for a, b, joined in zip(runs, runs[1:], joins, strict=False):
        if not joined:
            yield start, sum(a[:2]) - start, position
            start, position = b[0], position + sum(a[:2]) - start
    yield start, sum(last[:2]) - start, position


_PREFIX = f"{HIDDEN}computed/"  # no file of a checkpoint can have such a key


@dataclass(frozen=True, slots=True)
class ComputedFile:
    """A computed tensor, and functions that return the extents of its inputs, or those that intersect a box."""

    formula: Formula
    inputs: tuple[Callable[[Box | None], Iterable[Extent | Tiles]], ...]


def inputs_of(
    store: Store, key: str
) -> Iterator[tuple[TensorInfo, Iterable[Extent | Tiles]]] | None:
    """The tensors that a computed file is made of, with their extents; None if it is no such file."""
    while isinstance(store, WrappedStore):
        file = store.computed(key) if isinstance(store, ComputedStore) else None
        if file is not None:
            return (
                (v.info, extents(None))
                for v, extents in zip(file.formula.inputs, file.inputs, strict=True)
            )
        store = store.inner
    return None


class ComputedStore(SyntheticStore):
    """A store with additional, computed files."""

    def __init__(self, inner: Store, files: Mapping[str, ComputedFile]) -> None:
        super().__init__(inner)
        self._files = dict(files)

    def computed(self, key: str) -> ComputedFile | None:
        """A computed file; None if it is not one of these."""
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
            values = gather(self, file.formula, file.inputs[0], first, last)
        else:
            arrays = [
                read_flat(self, view.info, extents(None), first, last)
                for view, extents in zip(file.formula.inputs, file.inputs, strict=True)
            ]
            values = _OPERATIONS[file.formula.operation](arrays, file.formula)
        return values.view(np.uint8)[offset - first * unit :][:nbytes].data


def _cast(arrays: Sequence[NDArray[Any]], formula: Formula) -> NDArray[Any]:
    """Round to nearest, ties to even; raise UsageError if a finite value would become infinite or NaN."""
    (array,), info = arrays, formula.info
    with np.errstate(over="ignore", invalid="ignore"):
        out = array.astype(numpy_dtype(info.dtype))
        lost = np.isfinite(array) & ~np.isfinite(out)
    if lost.any():
        raise UsageError(
            f"{info.key}: the value {array[lost][0]} does not fit {info.dtype}",
            hint="cast to a dtype of a larger range",
        )
    return out


def _mean(arrays: Sequence[NDArray[Any]], formula: Formula) -> NDArray[Any]:
    """Sum in order, in float32 (float64 for float64 tensors), and divide by the number of tensors."""
    wide = (
        np.result_type(np.float32, arrays[0].dtype)
        if arrays[0].dtype == np.float64
        else np.dtype(np.float32)
    )
    total = arrays[0].astype(wide)
    for array in arrays[1:]:
        total += array.astype(wide)
    return (total / wide.type(len(arrays))).astype(numpy_dtype(formula.info.dtype))


def _equal(arrays: Sequence[NDArray[Any]], formula: Formula) -> NDArray[Any]:
    """Convert the value that all have; UsageError if they differ, or the dtype does not have it."""
    (first, *others), info = arrays, formula.info
    if any(
        other.tobytes() != first.tobytes() for other in others
    ):  # so that NaNs are equal, and 0 and -0 not
        values = list(dict.fromkeys(str(array.reshape(-1)[0]) for array in arrays))
        raise UsageError(
            f"{info.key} would have several values: {', '.join(values[:_SHOWN])}",
            hint="gather the state of those tensors that have the same, and drop it of the others",
        )
    with np.errstate(invalid="ignore", over="ignore"):
        out = first.astype(numpy_dtype(info.dtype))
        same = out.astype(first.dtype).tobytes() == first.tobytes()
    if not same:
        raise UsageError(
            f"{info.key}: the value {first.reshape(-1)[0]} does not fit {info.dtype}",
            hint="convert it to another dtype",
        )
    return out


def _divide(arrays: Sequence[NDArray[Any]], formula: Formula) -> NDArray[Any]:
    """Divide by a power of two; raise UnsupportedError if a value would not be exact."""
    (array,), info = arrays, formula.info
    wide = array.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        out = (wide / formula.factor).astype(numpy_dtype(info.dtype))
        lost = (out.astype(np.float64) * formula.factor != wide) & ~np.isnan(wide)
    if lost.any():
        raise UnsupportedError(
            f"{info.key}: {array[lost][0]} is {formula.factor} times a value that is not exactly a "
            f"{info.dtype}",
            hint="what was scaled before it was saved cannot be restored; leave the tensor out by a view",
        )
    return out


_SHOWN = 5  # values that an error lists
_OPERATIONS = {"cast": _cast, "mean": _mean, "equal": _equal, "divide": _divide}


class Viewed:
    """The tensors of a source after the steps of a view; everything else is the source's.

    `taken` lists the tensors that each step took and made.
    """

    is_view = True  # by which `Checkpoint` recognises it

    def __init__(self, base: Readable, steps: Sequence[Labelled]) -> None:
        self.base, self.kind, self.steps = base, base.kind, tuple(steps)
        metadata = base.metadata
        table = ViewTable.of(
            metadata.tensor_list, metadata.aliases, metadata.means, metadata.factors
        )
        self.taken = apply(table, self.steps)
        stored, aliases = table.tied()
        self._views = {Key(n, s): v for n, entry in stored.items() for s, v in entry.states.items()}
        self._infos = {i.key: i for i in base.metadata.tensor_list.tensors}
        self._level: int = base._level + 1 if isinstance(base, Viewed) else 0  # noqa: SLF001 - of one's own
        self._files = {k: f"{_PREFIX}{self._level}/{n}" for n, k in enumerate(table.formulas)}
        self._formulas = table.formulas
        self._scattered: dict[Key, bool] = {}  # of the takes that were read
        self._computed = {
            self._files[key]: ComputedFile(
                in_order(f)[0] if f.axes else f,
                tuple(partial(self.of_view, view) for view in f.inputs),
            )
            for key, f in table.formulas.items()
        }
        self.store: Store = (
            ComputedStore(base.store, self._computed) if self._computed else base.store
        )
        self.metadata = _view_metadata(base.metadata, stored, aliases, table.formulas).replace(
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
            whole = view.info.shape == part.box.shape and part.axes == tuple(
                range(len(view.info.shape))
            )
            if whole and part.box.shape == self._shape(source):
                yield from self._source_extents(source, within)
                return
        yield from view.extents(self._single_extents, within)

    def means(self, key: Key) -> Iterator[ComputedFile]:
        """The means of which a tensor consists, wholly or in part."""
        return (file for file, _ in self.computed(key) if file.formula.operation == "mean")

    def computed(self, key: Key) -> Iterator[tuple[ComputedFile, bool]]:
        """What is computed of which a tensor consists, wholly or in part.

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
        info = formula.info
        strides = row_major(info.shape, info.itemsize)
        whole = Extent(Box.whole(info.shape), self._files[key], 0, strides)
        if formula.operation != "take":
            return [whole]
        box = within or whole.box
        if self._is_scattered(key, formula):
            # The computed file has the indices of the first dim in the order of the source.
            order = in_order(formula)[1]
            return (
                [whole]
                if order is None
                else mapped(clipped([order, *[None] * (len(box.shape) - 1)], box), [whole])
            )
        runs = clipped(formula.axes, box)
        if not all(runs):
            return []
        box = source_box(runs)
        return mapped(runs, single_extents(self.of_view(formula.inputs[0], box), box))

    def _is_scattered(self, key: Key, formula: Formula) -> bool:
        if key not in self._scattered:
            self._scattered[key] = is_scattered(
                formula, partial(self.of_view, formula.inputs[0]), self.store.costs
            )
        return self._scattered[key]

    def _single_extents(self, key: Key, within: Box) -> Iterator[Extent]:
        return single_extents(self._source_extents(key, within), within)

    def records(self) -> Iterator[FileRecord]:
        """Nothing: a view has no files of its own."""
        return iter(())


def _marks(
    stored: Mapping[str, ViewedTensor],
    metadata: CheckpointMetadata,
    formulas: Mapping[Key, Formula],
) -> tuple[dict[Key, Loss], dict[Key, int]]:
    """What of the tensors of a view was encoded with loss, or is older; the bounds are those of their sources."""

    def sources(view: View) -> Iterator[Key]:
        for key, _ in view.parts:
            if key in formulas:
                for part in formulas[key].inputs:
                    yield from sources(part)
            else:
                yield key

    lossy, older = dict[Key, Loss](), dict[Key, int]()
    for view in (view for entry in stored.values() for view in entry.states.values()):
        losses = [metadata.lossy[key] for key in sources(view) if key in metadata.lossy]
        if losses:
            _, *bounds = zip(*losses, strict=True)
            lossy[view.info.key] = Loss(losses[0].encoding, *map(max, bounds))
        steps = [metadata.older[key] for key in sources(view) if key in metadata.older]
        if steps:
            older[view.info.key] = min(steps)
    return lossy, older


def _view_metadata(
    metadata: CheckpointMetadata,
    stored: dict[str, ViewedTensor],
    aliases: dict[str, str],
    formulas: Mapping[Key, Formula],
) -> CheckpointMetadata:
    """The metadata of the source, with the names after the steps.

    The places of tensors and groups in the program's state are those of the source if all have kept
    their names.
    """
    names: dict[str, list[str]] = {}  # of the tensors that come from each parameter
    for name, entry in stored.items():
        names.setdefault(entry.param, []).append(name)
    groups = tuple(
        {**g, "params": [n for p in g["params"] for n in names.get(p, ())]} for g in metadata.groups
    )
    numbers = {n: i for i, g in enumerate(groups) for n in g["params"]}
    if not groups:
        numbers = {
            n: metadata.tensor_list.groups[e.param]
            for n, e in stored.items()
            if e.param in metadata.tensor_list.groups
        }
    infos = tuple(view.info for entry in stored.values() for view in entry.states.values())
    has_marks = bool(metadata.lossy or metadata.older)
    lossy, older = _marks(stored, metadata, formulas) if has_marks else ({}, {})
    viewed = metadata.replace(
        tensor_list=TensorList(infos, numbers),
        aliases=aliases,
        groups=groups,
        means={},
        factors={},
        paths={},
        places=(),
        fingerprints={},
        lossy=lossy,
        older=older,
    )
    if any(entry.param != name for name, entry in stored.items()) or aliases != metadata.aliases:
        return viewed
    # names are what they were
    paths = {i.key: metadata.paths[i.key] for i in infos if i.key in metadata.paths}
    same_groups = [g["params"] for g in groups] == [g["params"] for g in metadata.groups]
    return viewed.replace(paths=paths, places=metadata.places if same_groups else ())
