"""The operations of a view's steps on tensors and their states: cut, join, transpose, stack, cast, average."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ucformat.errors import LayoutError
from ucformat.geometry.box import Box
from ucformat.schema import CASTABLE, NUMBERS
from ucformat.views.picks import Picks, chosen
from ucformat.views.table import Entry, Formula, compose, part_of, renamed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ucformat.geometry.tensor import TensorInfo
    from ucformat.geometry.view import View
    from ucformat.schema.view import Take
    from ucformat.views.table import Table

Shape = tuple[int, ...]
Named = Sequence[tuple[str, Entry]]


def transposed(name: str, entry: Entry, axes: Sequence[int] | None) -> Entry:
    """Permute the dims of a tensor.

    Args:
        axes: for each new dim the old one (None: reverse the dims).
    """
    order = tuple(reversed(range(len(entry.shape)))) if axes is None else tuple(axes)
    if sorted(order) != list(range(len(entry.shape))):
        raise LayoutError(f"{name} has the shape {entry.shape}: the axes {order} are not its dims")

    def change(view: View) -> View:
        shape = tuple(view.info.shape[a] for a in order)
        part = part_of(view, Box.whole(shape), Box.whole(view.info.shape), order)
        return compose(replace(view.info, shape=shape), [part])

    return _each_state(name, entry, change)


def trimmed(name: str, entry: Entry, dim: int, size: int) -> Entry:
    """Keep the first indices along a dim."""
    _check_dim(name, entry, dim)
    if size > entry.shape[dim]:
        raise LayoutError(f"{name} has the shape {entry.shape}: dim {dim} has fewer than {size} indices")
    return _each_state(name, entry, lambda view: _taken(view, name, dim, [(0, size)]))


def taken(table: Table, name: str, entry: Entry, step: Take) -> Entry:
    """Take indices along a dim, in their order."""
    _check_dim(name, entry, step.dim)
    length = entry.shape[step.dim]
    blocks = length if step.of is None else step.of
    if blocks and length % blocks:
        raise LayoutError(
            f"{name} has the shape {entry.shape}: dim {step.dim} cannot be divided into {blocks} equal blocks"
        )
    what = f"{name} has the shape {entry.shape}: dim {step.dim}"
    picks = chosen(step.indices, step.first, blocks, what, "index" if step.of is None else "block")
    width = length // blocks if blocks else 1
    units = Picks(tuple((start * width, count * width) for start, count in picks.runs))
    return _each_state(name, entry, lambda view: table.taken(view, step.dim, units))


def split(
    name: str, entry: Entry, into: Sequence[str], dim: int, sizes: Sequence[int] | None, repeat: int
) -> list[tuple[str, Entry]]:
    """Split a tensor along a dim, which consists of `repeat` blocks, each with a part of every new tensor.

    Args:
        sizes: the widths or proportions of the new tensors (None: equal parts).
    """
    _check_dim(name, entry, dim)
    length, parts = entry.shape[dim], sizes or [1] * len(into)
    total = repeat * sum(parts)
    if len(parts) != len(into):
        raise LayoutError(f"{len(parts)} sizes are given for {len(into)} names")
    if not length or length % total:
        raise LayoutError(
            f"{name} has the shape {entry.shape}: dim {dim} cannot be split into {repeat} x {list(parts)}"
        )
    unit = length // total
    out, skip = [], 0
    for to, part in zip(into, parts, strict=True):
        runs = [((block * sum(parts) + skip) * unit, part * unit) for block in range(repeat)]
        out.append((to, _each_state(name, entry, partial(_taken, name=to, dim=dim, runs=runs), to)))
        skip += part
    return out


def _taken(view: View, name: str, dim: int, runs: Iterable[tuple[int, int]]) -> View:
    """Concatenate runs of indices (first index, length) along a dim."""
    shape = view.info.shape
    parts, at = [], 0
    for begin, length in runs:
        parts.append(part_of(view, _slab(shape, dim, at, length), _slab(shape, dim, begin, length)))
        at += length
    info = replace(view.info, name=name, shape=(*shape[:dim], at, *shape[dim + 1 :]))
    return compose(info, parts)


def fused(name: str, members: Named, dim: int, repeat: int) -> Entry:
    """Concatenate tensors along a dim; each is cut into blocks, which are interleaved."""
    for member, entry in members:
        _check_dim(member, entry, dim)
        if entry.shape[dim] % repeat:
            raise LayoutError(f"{member} has the shape {entry.shape}: dim {dim} cannot be split into {repeat}")
        if _without(entry.shape, dim) != _without(members[0][1].shape, dim):
            raise LayoutError(
                f"{member} of the shape {entry.shape} does not fit {members[0][0]}: {members[0][1].shape}"
            )

    def join(views: Sequence[View]) -> View:
        runs, at = [], 0
        for block in range(repeat):
            for view in views:
                length = view.info.shape[dim] // repeat
                runs.append((view, block * length, at, length))
                at += length
        shape = views[0].info.shape
        parts = [
            part_of(view, _slab(shape, dim, to, length), _slab(view.info.shape, dim, begin, length))
            for view, begin, to, length in runs
        ]
        info = replace(views[0].info, name=name, shape=(*shape[:dim], at, *shape[dim + 1 :]))
        return compose(info, parts)

    return _together(name, members, join)


def stacked(name: str, members: Named, dim: int) -> Entry:
    """Stack tensors along a new dim."""
    first = members[0][1].shape
    if dim > len(first):
        raise LayoutError(f"{members[0][0]} has the shape {first}: there is no place for a new dim {dim}")
    for member, entry in members:
        if entry.shape != first:
            raise LayoutError(f"{member} has the shape {entry.shape}, {members[0][0]} {first}: they cannot be stacked")

    def join(views: Sequence[View]) -> View:
        shape = (*first[:dim], len(views), *first[dim:])
        axes = (*range(dim), None, *range(dim, len(first)))
        parts = [part_of(v, _slab(shape, dim, i, 1), Box.whole(first), axes) for i, v in enumerate(views)]
        return compose(replace(views[0].info, name=name, shape=shape), parts)

    return _together(name, members, join)


def unstacked(name: str, entry: Entry, into: str, dim: int, start: int) -> list[tuple[str, Entry]]:
    """Make a tensor of each index of a dim, without that dim."""
    _check_dim(name, entry, dim)

    def take(view: View, *, i: int, to: str) -> View:
        shape = view.info.shape
        box = _slab(shape, dim, i, 1)
        axes = (*range(dim), *range(dim + 1, len(shape)))
        left = _without(shape, dim)
        return compose(replace(view.info, name=to, shape=left), [part_of(view, Box.whole(left), box, axes)])

    names = [(i, into.replace("{i}", str(start + i))) for i in range(entry.shape[dim])]
    return [(to, _each_state(name, entry, partial(take, i=i, to=to), to)) for i, to in names]


def cast(table: Table, name: str, entry: Entry, states: set[str], dtype: str) -> Entry:
    """Round states of a tensor to another floating-point dtype."""

    def change(view: View) -> View:
        if view.info.dtype == dtype:
            return view
        for one, known in ((view.info.dtype, NUMBERS), (dtype, CASTABLE)):
            if one not in known:
                raise LayoutError(
                    f"{name} ({view.info.state}) is {view.info.dtype}, which is not cast to {dtype}",
                    hint="only floating-point values are",
                )
        return table.computed(Formula(replace(view.info, dtype=dtype), "cast", (view,)))

    return Entry({s: change(v) if s in states else v for s, v in entry.states.items()}, entry.param, entry.alias)


def meaned(table: Table, name: str, members: Named) -> Entry:
    """Average tensors, state by state."""
    for member, entry in members:
        if entry.shape != members[0][1].shape:
            raise LayoutError(f"{member} has the shape {entry.shape}, {members[0][0]} {members[0][1].shape}")

    def join(views: Sequence[View]) -> View:
        info = replace(views[0].info, name=name)
        if info.dtype not in CASTABLE:
            raise LayoutError(
                f"{members[0][0]} ({info.state}) is {info.dtype}: only floating-point values are averaged"
            )
        return table.computed(Formula(info, "mean", tuple(views)))

    return _together(name, members, join)


def _each_state(name: str, entry: Entry, change: Callable[[View], View], to: str | None = None) -> Entry:
    """Change all states that have the shape of the parameter; states of one element stay as they are."""
    new, states = to or name, {}
    for state, view in entry.states.items():
        if view.info.shape == entry.shape:
            states[state] = renamed(change(view), new, state)
        elif view.info.size == 1:
            states[state] = renamed(view, new, state)
        else:
            raise _odd(name, state, view.info, entry.shape)
    return Entry(states, entry.param, entry.alias)


def _together(name: str, members: Named, join: Callable[[Sequence[View]], View]) -> Entry:
    """Join tensors state by state; for states of one element the first tensor's is taken."""
    first_name, first = members[0]
    states = {}
    for member, entry in members:
        if entry.states.keys() != first.states.keys():
            raise LayoutError(
                f"{member} has the states {', '.join(entry.states)}, {first_name} {', '.join(first.states)}",
                hint="drop the states that not all of them have",
            )
    for state, view in first.states.items():
        views = [entry.states[state] for _, entry in members]
        if len({v.info.dtype for v in views}) > 1:
            raise LayoutError(f"{name} would be of several dtypes ({state}): {', '.join(_dtypes(views))}")
        if all(v.info.shape == e.shape for v, (_, e) in zip(views, members, strict=True)):
            states[state] = renamed(join(views), name, state)
        elif view.info.size == 1:
            states[state] = renamed(view, name, state)
        else:
            raise _odd(first_name, state, view.info, first.shape)
    return Entry(states, first.param, all(e.alias for _, e in members))


def _dtypes(views: Sequence[View]) -> Iterator[str]:
    yield from sorted({v.info.dtype for v in views})


def _odd(name: str, state: str, info: TensorInfo, shape: Shape) -> LayoutError:
    return LayoutError(
        f"{name} has the shape {shape}, and its state {state} {info.shape}, which cannot follow",
        hint=f"drop it: {{drop: {name!r}, states: [{state}]}}",
    )


def _check_dim(name: str, entry: Entry, dim: int) -> None:
    if dim >= len(entry.shape):
        raise LayoutError(f"{name} has the shape {entry.shape}: there is no dim {dim}")


def _slab(shape: Shape, dim: int, start: int, length: int) -> Box:
    box = [0] * len(shape)
    box[dim] = start
    return Box(tuple(box), (*shape[:dim], length, *shape[dim + 1 :]))


def _without(shape: Shape, dim: int) -> Shape:
    return (*shape[:dim], *shape[dim + 1 :])
