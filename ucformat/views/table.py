"""The table of tensors on which the steps of a view operate: names, states, and the sources of each.

Every state of every tensor is a `View` of source tensors. The result of a formula (a cast, a mean, or indices that are
taken) is a source tensor with a key of its own, so later steps need not distinguish it. During the steps an alias is an
entry like any other, so that it is renamed and split like its target; at the end, entries with the same parts as
another become aliases again.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from ucformat.errors import LayoutError
from ucformat.geometry.box import Box
from ucformat.geometry.tensor import Key, TensorInfo, TensorList
from ucformat.geometry.view import Part, View

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ucformat.views.picks import Picks


@dataclass(frozen=True, slots=True)
class Formula:
    """A tensor made of others: its input cast to its dtype, the mean of its inputs, or indices taken of its input."""

    info: TensorInfo
    operation: Literal["cast", "mean", "take"]
    inputs: tuple[View, ...]
    axes: tuple[Picks | None, ...] = ()  # of a take: the indices along each dim; None: all


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor under a name; `param` is the source's parameter it comes from, `alias` whether it is a further name."""

    states: Mapping[str, View]
    param: str
    alias: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the parameter."""
        first = next((s for s in ("weight", "master") if s in self.states), next(iter(self.states)))
        return self.states[first].info.shape


def identity(info: TensorInfo) -> View:
    """The view that is a source tensor itself."""
    return View(info, ((info.key, _all_of(info)),))


def _all_of(info: TensorInfo) -> Part:
    whole = Box.whole(info.shape)
    return Part.aligned(whole, whole)


def part_of(view: View, target: Box, box: Box, axes: tuple[int | None, ...] | None = None) -> tuple[View, Part]:
    """A part of a new tensor: a box that is taken from a view.

    Args:
        axes: for each dim of the new tensor the view's dim, None for a new one (default: the same dims).
    """
    return view, Part.aligned(target, box) if axes is None else Part(target, box, axes)


def compose(info: TensorInfo, parts: Iterable[tuple[View, Part]]) -> View:
    """Compose a tensor of boxes of views."""
    found = ((source, _through(part, inner)) for view, part in parts for source, inner in view.parts)
    return View(info, tuple((source, p) for source, p in found if p is not None))


def _through(part: Part, inner: Part) -> Part | None:
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
    return Part(target, Box(tuple(start), tuple(shape)), axes)


@dataclass(slots=True)
class Table:
    """All tensors, in order."""

    entries: dict[str, Entry]
    formulas: dict[Key, Formula] = field(default_factory=dict)
    _known: dict[object, Key] = field(default_factory=dict)

    @classmethod
    def of(cls, tensor_list: TensorList, aliases: Mapping[str, str], means: Mapping[Key, Sequence[Key]]) -> Table:
        """The table of a source."""
        table = cls({})
        states: dict[str, dict[str, View]] = {}
        for info in tensor_list.tensors:
            if info.key in means:
                inputs = tuple(identity(replace(info, name=k.name, state=k.state)) for k in means[info.key])
                view = table.computed(Formula(info, "mean", inputs))
            else:
                view = identity(info)
            states.setdefault(info.name, {})[info.state] = view
        table.entries = {name: Entry(found, name) for name, found in states.items()}
        for alias, name in aliases.items():
            if name in states and alias not in states:
                table.entries[alias] = Entry(
                    {s: renamed(v, alias, s) for s, v in states[name].items()}, name, alias=True
                )
        return table

    def computed(self, formula: Formula) -> View:
        """Add a computed tensor, which becomes a source like any other; tied tensors share one."""
        info = formula.info
        inputs = tuple((view.info.shape, view.parts) for view in formula.inputs)
        key = self._known.setdefault(
            (formula.operation, info.dtype, inputs, formula.axes),
            Key(info.name, f"{info.state}={formula.operation}{len(self.formulas)}"),
        )
        self.formulas.setdefault(key, formula)
        return renamed(identity(replace(info, name=key.name, state=key.state)), info.name, info.state)

    def taken(self, view: View, dim: int, picks: Picks) -> View:
        """Take indices of a tensor along a dim; those of a tensor that was taken itself are taken at once."""
        shape = view.info.shape
        if picks.runs == ((0, shape[dim]),):
            return view
        axes = tuple(picks if d == dim else None for d in range(len(shape)))
        source, (key, part) = view, view.parts[0]
        formula = self.formulas.get(key)
        if formula is not None and formula.operation == "take" and part == _all_of(formula.info) == _all_of(view.info):
            axes = tuple(
                a if b is None else b if a is None else a.of(b) for a, b in zip(axes, formula.axes, strict=True)
            )
            (source,) = formula.inputs
        info = replace(view.info, shape=(*shape[:dim], picks.size, *shape[dim + 1 :]))
        return self.computed(Formula(info, "take", (source,), axes))

    def put(self, old: Mapping[str, Sequence[tuple[str, Entry]]], step: str) -> None:
        """Replace entries in place."""
        found: dict[str, Entry] = {}
        for name, entry in self.entries.items():
            for to, new in old.get(name, ((name, entry),)):
                if to in found:
                    raise LayoutError(
                        f"{step}: {name} would be called {to}, and so is {_origin(found[to], entry)}",
                        hint="drop one of them first, or choose different names",
                    )
                found[to] = new
        self.entries = found

    def tied(self) -> tuple[dict[str, Entry], dict[str, str]]:
        """The stored tensors, and the aliases: further names whose parts are still those of a stored tensor."""
        first: dict[object, str] = {}
        ordered = sorted(self.entries.items(), key=lambda item: item[1].alias)
        aliases: dict[str, str] = {}
        for name, entry in ordered:
            known = tuple((state, view.info.dtype, view.info.shape, view.parts) for state, view in entry.states.items())
            stored = first.setdefault(known, name)
            if entry.alias and stored != name:
                aliases[name] = stored
        return {name: e for name, e in self.entries.items() if name not in aliases}, aliases


def _origin(entry: Entry, other: Entry) -> str:
    return f"another part of {entry.param}" if entry.param == other.param else entry.param


def renamed(view: View, name: str, state: str) -> View:
    """The same view under another name."""
    return replace(view, info=replace(view.info, name=name, state=state))
