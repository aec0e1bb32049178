"""The tensors of a checkpoint while a view's steps work on them: names, states, and what each is made of.

Every state of every tensor is a `View` of source tensors. A formula (a cast, a mean) makes a source tensor of a key of
its own, so that the steps after it see no difference. An alias is an entry like any other while steps work, so that it
is renamed and split as what it stands for; in the end those that still have another's very parts are aliases again.
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

__all__ = ["Entry", "Formula", "Table", "compose", "identity", "part_of"]


@dataclass(frozen=True, slots=True)
class Formula:
    """A tensor whose values are computed: its inputs cast to its dtype, or their mean."""

    info: TensorInfo
    operation: Literal["cast", "mean"]
    inputs: tuple[View, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor under one name; `param` is the source's parameter it comes from, `alias` that it is a further name."""

    states: Mapping[str, View]
    param: str
    alias: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the parameter itself, which those of its states follow."""
        first = next((s for s in ("weight", "master") if s in self.states), next(iter(self.states)))
        return self.states[first].info.shape


def identity(info: TensorInfo) -> View:
    """A source tensor as it is."""
    whole = Box.whole(info.shape)
    return View(info, ((info.key, Part.aligned(whole, whole)),))


def part_of(view: View, target: Box, box: Box, axes: tuple[int | None, ...] | None = None) -> tuple[View, Part]:
    """A box of a new tensor that is a box of a view, by default with its dims in the same order."""
    return view, Part.aligned(target, box) if axes is None else Part(target, box, axes)


def compose(info: TensorInfo, parts: Iterable[tuple[View, Part]]) -> View:
    """Make a tensor of boxes of views.

    Args:
        info: the new tensor.
        parts: each with the view that is its source.

    Returns:
        A view of the sources that these views are made of.

    Raises:
        CoverageError: the parts do not cover the tensor.
    """
    found = ((source, _through(part, inner)) for view, part in parts for source, inner in view.parts)
    return View(info, tuple((source, p) for source, p in found if p is not None))


def _through(part: Part, inner: Part) -> Part | None:
    """What a part of a view takes of one of the view's own parts."""
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

    @classmethod
    def of(cls, tensor_list: TensorList, aliases: Mapping[str, str], means: Mapping[Key, Sequence[Key]]) -> Table:
        """The tensors of a source; those that it stores as several contributions are the mean of these."""
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
        """The view of a computed tensor, which from now on is a source like any other."""
        info = formula.info
        key = Key(info.name, f"{info.state}={formula.operation}{len(self.formulas)}")
        self.formulas[key] = formula
        source = identity(replace(info, state=key.state))
        return renamed(source, info.name, info.state)

    def put(self, old: Mapping[str, Sequence[tuple[str, Entry]]], step: str) -> None:
        """Replace entries, each by others in its place; LayoutError where two get one name."""
        found: dict[str, Entry] = {}
        for name, entry in self.entries.items():
            for to, new in old.get(name, ((name, entry),)):
                if to in found:
                    raise LayoutError(
                        f"{step}: {name} would be called {to}, and so is {_origin(found[to], entry)}",
                        hint="drop one of them first, or tell them apart",
                    )
                found[to] = new
        self.entries = found

    def tied(self) -> tuple[dict[str, Entry], dict[str, str]]:
        """The stored tensors, and the names that are only further names: those that still have another's very parts."""
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
