"""The table of tensors on which the steps of a view operate: names, states, and the sources of each.

Every state of every tensor is a `View` of source tensors. The result of a formula (a cast, a mean,
or indices that are taken) is a source tensor with a key of its own, so later steps need not
distinguish it. During the steps an alias is an entry like any other, so that it is renamed and
split like its target; at the end, entries with the same parts as another become aliases again.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field, replace
from itertools import accumulate, product
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from ucformat.errors import LayoutError
from ucformat.geometry.box import Box
from ucformat.geometry.tensor import Extent, Key, TensorInfo, TensorList
from ucformat.geometry.view import BoxPair, View

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence


# Indices that a view takes along dims: which they are, and where they are stored.


#: Consecutive indices: the first in the source, how many, and the position of the first in the
#: result.
Run = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Picks:
    """Indices of a dim in the order in which they are taken, as runs (first index, length) of consecutive ones."""

    runs: tuple[tuple[int, int], ...]
    _begins: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        merged: list[tuple[int, int]] = []
        for start, length in self.runs:
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        object.__setattr__(self, "runs", tuple(merged))
        object.__setattr__(self, "_begins", tuple(accumulate((n for _, n in merged), initial=0)))

    @property
    def size(self) -> int:
        """Number of indices."""
        return self._begins[-1]

    def between(self, start: int, stop: int) -> Iterator[Run]:
        """The runs of a range of the result."""
        index = bisect_right(self._begins, start) - 1
        while index < len(self.runs) and self._begins[index] < stop:
            (first, length), begin = self.runs[index], self._begins[index]
            low, high = max(start, begin), min(stop, begin + length)
            yield first + low - begin, high - low, low
            index += 1

    def of(self, inner: Picks) -> Picks:
        """These indices of other picks, as indices of what those are taken from."""
        return Picks(
            tuple(
                (s, n)
                for start, length in self.runs
                for s, n, _ in inner.between(start, start + length)
            )
        )


def chosen(
    indices: Sequence[int | str] | None, first: int | None, count: int | None, label: str, noun: str
) -> Picks:
    """The indices that a step names.

    Args:
        indices: indices, and ranges without their end, such as `8:16`; None: the first.
        first: how many of the first, if there are no `indices`.
        count: how many there are; None: the caller checks it.
    """
    runs = [(0, first or 0)] if indices is None else []
    for index in indices or ():
        start, stop = map(int, index.split(":")) if isinstance(index, str) else (index, index + 1)
        if start >= stop:
            raise LayoutError(
                f"the range {index} is empty", hint="a range excludes its end: 8:16 is 8, 9, … 15"
            )
        runs.append((start, stop - start))
    end = 0
    for start, length in sorted(runs):
        if start < end:
            raise LayoutError(f"{noun} {start} is taken twice", hint="name each only once")
        end = start + length
    if count is not None and end > count:
        there = f"the last is {count - 1}" if count else "there is none"
        raise LayoutError(f"{label} has no {noun} {end - 1}: {there}")
    return Picks(tuple(runs))


def clipped(axes: Sequence[Picks | None], within: Box) -> list[list[Run]]:
    """The runs of each dim for a box of the result, in the order of the source."""
    return [
        [(start, length, start)] if axis is None else sorted(axis.between(start, start + length))
        for axis, start, length in zip(axes, within.start, within.shape, strict=True)
    ]


def source_box(runs: Sequence[Sequence[Run]]) -> Box:
    """The smallest box of the source that contains all runs.

    Args:
        runs: of each dim, in the order of the source.
    """
    start = tuple(r[0][0] for r in runs)
    return Box(start, tuple(r[-1][0] + r[-1][1] - a for r, a in zip(runs, start, strict=True)))


def mapped(runs: Sequence[Sequence[Run]], extents: Iterable[Extent]) -> Iterator[Extent]:
    """The extents of the result: one for each combination of runs of the dims, in each extent of the source.

    Args:
        runs: of each dim, in the order of the source.
    """
    starts = [[start for start, _, _ in of_dim] for of_dim in runs]
    for e in extents:
        dims = []
        for of_dim, begins, a, n, step in zip(
            runs, starts, e.box.start, e.box.shape, e.strides, strict=True
        ):
            cuts = []
            for start, length, to in of_dim[max(0, bisect_right(begins, a) - 1) :]:
                if start >= a + n:
                    break
                low, high = max(start, a), min(start + length, a + n)
                if low < high:
                    cuts.append((to + low - start, high - low, (low - a) * step))
            dims.append(cuts)
        for cut in product(*dims):
            shape = tuple(n for _, n, _ in cut)
            offset = e.offset + sum(skip for _, _, skip in cut)
            yield Extent(
                Box(tuple(to for to, _, _ in cut), shape),
                e.file,
                offset,
                e.strides,
                e.block_of(shape),
            )


@dataclass(frozen=True, slots=True)
class Formula:
    """A tensor made of others: its input cast or divided, the mean of its inputs, the one value of all, or indices.

    `equal` converts to the dtype exactly.
    """

    info: TensorInfo
    operation: Literal["cast", "mean", "take", "equal", "divide"]
    inputs: tuple[View, ...]
    axes: tuple[Picks | None, ...] = ()  # of a take: the indices along each dim; None: all
    factor: float = 1.0  # of a divide, a power of two


@dataclass(frozen=True, slots=True)
class ViewedTensor:
    """A tensor under a name; `param` is the source's parameter it comes from, `alias` whether it is a further name."""

    states: Mapping[str, View]
    param: str
    alias: bool = False

    @property
    def parameter(self) -> TensorInfo:
        """The state that is the parameter itself."""
        first = next((s for s in ("weight", "master") if s in self.states), next(iter(self.states)))
        return self.states[first].info

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the parameter."""
        return self.parameter.shape

    def named(self, name: str, *, alias: bool) -> ViewedTensor:
        """The same tensor under another name."""
        states = {state: renamed(view, name, state) for state, view in self.states.items()}
        return ViewedTensor(states, self.param, alias)


def identity(info: TensorInfo) -> View:
    """The view that is a source tensor itself."""
    return View(info, ((info.key, _all_of(info)),))


def _all_of(info: TensorInfo) -> BoxPair:
    whole = Box.whole(info.shape)
    return BoxPair.aligned(whole, whole)


def part_of(
    view: View, target: Box, box: Box, axes: tuple[int | None, ...] | None = None
) -> tuple[View, BoxPair]:
    """A part of a new tensor: a box that is taken from a view.

    Args:
        axes: for each dim of the new tensor the view's dim, None for a new one (default: the same
            dims).
    """
    return view, BoxPair.aligned(target, box) if axes is None else BoxPair(target, box, axes)


def compose(info: TensorInfo, parts: Iterable[tuple[View, BoxPair]]) -> View:
    """Compose a tensor of boxes of views."""
    pairs = (
        (source, _through(part, inner)) for view, part in parts for source, inner in view.parts
    )
    return View(info, tuple((source, p) for source, p in pairs if p is not None))


def _through(part: BoxPair, inner: BoxPair) -> BoxPair | None:
    """The intersection of a part taken from a view with one of the view's own parts; None if it is empty."""
    clip = inner.target.intersect(part.box)
    if clip is None:
        return None
    start, shape = list(inner.box.start), [1] * len(inner.box.shape)
    for dim, axis in enumerate(inner.axes):
        if axis is not None:
            start[axis] += clip.start[dim] - inner.target.start[dim]
            shape[axis] = clip.shape[dim]
    target = Box(
        tuple(t if a is None else t + clip.start[a] - part.box.start[a]
              for t, a in zip(part.target.start, part.axes, strict=True)),
        tuple(1 if a is None else clip.shape[a] for a in part.axes),
    )  # fmt: skip
    axes = tuple(None if a is None else inner.axes[a] for a in part.axes)
    return BoxPair(target, Box(tuple(start), tuple(shape)), axes)


@dataclass(slots=True)
class ViewTable:
    """All tensors, in order."""

    entries: dict[str, ViewedTensor]
    formulas: dict[Key, Formula] = field(default_factory=dict)
    _known: dict[object, Key] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        tensor_list: TensorList,
        aliases: Mapping[str, str],
        means: Mapping[Key, Sequence[Key]],
        factors: Mapping[Key, float] = MappingProxyType({}),
    ) -> ViewTable:
        """The table of a source."""
        table = cls({})
        states: dict[str, dict[str, View]] = {}
        for info in tensor_list.tensors:
            if info.key in means:
                inputs = tuple(
                    identity(replace(info, name=k.name, state=k.state)) for k in means[info.key]
                )
                factor = factors.get(info.key)
                view = table.computed(
                    Formula(info, "mean", inputs)
                    if factor is None
                    else Formula(info, "divide", inputs, factor=factor)
                )
            else:
                view = identity(info)
            states.setdefault(info.name, {})[info.state] = view
        table.entries = {name: ViewedTensor(by_state, name) for name, by_state in states.items()}
        for alias, name in aliases.items():
            if name in states and alias not in states:
                table.entries[alias] = table.entries[name].named(alias, alias=True)
        return table

    def computed(self, formula: Formula) -> View:
        """Add a computed tensor, which becomes a source like any other; tied tensors share one."""
        info = formula.info
        inputs = tuple((view.info.shape, view.parts) for view in formula.inputs)
        key = self._known.setdefault(
            (formula.operation, info.dtype, inputs, formula.axes, formula.factor),
            Key(info.name, f"{info.state}={formula.operation}{len(self.formulas)}"),
        )
        self.formulas.setdefault(key, formula)
        return renamed(
            identity(replace(info, name=key.name, state=key.state)), info.name, info.state
        )

    def taken(self, view: View, dim: int, picks: Picks) -> View:
        """Take indices of a tensor along a dim; those of a tensor that was taken itself are taken at once."""
        shape = view.info.shape
        if picks.runs == ((0, shape[dim]),):
            return view
        axes = tuple(picks if d == dim else None for d in range(len(shape)))
        source, (key, part) = view, view.parts[0]
        formula = self.formulas.get(key)
        if (
            formula is not None
            and formula.operation == "take"
            and part == _all_of(formula.info) == _all_of(view.info)
        ):
            axes = tuple(
                a if b is None else b if a is None else a.of(b)
                for a, b in zip(axes, formula.axes, strict=True)
            )
            (source,) = formula.inputs
        info = replace(view.info, shape=(*shape[:dim], picks.size, *shape[dim + 1 :]))
        return self.computed(Formula(info, "take", (source,), axes))

    def put(
        self, replacements: Mapping[str, Sequence[tuple[str, ViewedTensor]]], step: str
    ) -> None:
        """Replace entries in place."""
        entries: dict[str, ViewedTensor] = {}
        for name, entry in self.entries.items():
            for to, new_entry in replacements.get(name, ((name, entry),)):
                if to in entries:
                    raise LayoutError(
                        f"{step}: {name} would be called {to}, and so is "
                        f"{_origin(entries[to], entry)}",
                        hint="drop one of them first, or choose different names",
                    )
                entries[to] = new_entry
        self.entries = entries

    def tied(self) -> tuple[dict[str, ViewedTensor], dict[str, str]]:
        """The stored tensors, and the aliases: further names whose parts are still those of a stored tensor."""
        first: dict[object, str] = {}
        ordered = sorted(self.entries.items(), key=lambda item: item[1].alias)
        aliases: dict[str, str] = {}
        for name, entry in ordered:
            content = tuple(
                (state, view.info.dtype, view.info.shape, view.parts)
                for state, view in entry.states.items()
            )
            stored = first.setdefault(content, name)
            if entry.alias and stored != name:
                aliases[name] = stored
        return {name: e for name, e in self.entries.items() if name not in aliases}, aliases


def _origin(entry: ViewedTensor, other: ViewedTensor) -> str:
    return f"another part of {entry.param}" if entry.param == other.param else entry.param


def renamed(view: View, name: str, state: str) -> View:
    """The same view under another name."""
    return replace(view, info=replace(view.info, name=name, state=state))
