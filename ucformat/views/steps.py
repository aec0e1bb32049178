"""The steps of a view, one after the other: how the tensors of one family of models become another's.

Each step takes some tensors of the table and puts others in their place; nothing is read. What it
does to a parameter it does to its states of the same shape too; states of one element (`step`) go
with each part; other shapes (factored moments) are refused by steps that would cut them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from ucformat.errors import LayoutError
from ucformat.geometry.box import Box
from ucformat.geometry.patterns import expand
from ucformat.geometry.placement import compile_match
from ucformat.geometry.tensor import Key
from ucformat.geometry.view import BoxPair
from ucformat.schema import CASTABLE, INTEGERS, NUMBERS
from ucformat.schema import view as schema
from ucformat.views.table import Formula, Picks, ViewedTensor, chosen, compose, part_of, renamed

if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from ucformat.geometry.tensor import TensorInfo
    from ucformat.geometry.view import View
    from ucformat.schema.view import ComposedPart, Labelled, Take
    from ucformat.views.table import ViewTable


# The operations of a view's steps on tensors and their states: cut, join, transpose, stack, cast,
# average.


Shape = tuple[int, ...]
Named = Sequence[tuple[str, ViewedTensor]]


def transposed(name: str, entry: ViewedTensor, axes: Sequence[int] | None) -> ViewedTensor:
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


def trimmed(name: str, entry: ViewedTensor, dim: int, size: int) -> ViewedTensor:
    """Keep the first indices along a dim."""
    _check_dim(name, entry, dim)
    if size > entry.shape[dim]:
        raise LayoutError(
            f"{name} has the shape {entry.shape}: dim {dim} has fewer than {size} indices"
        )
    return _each_state(name, entry, lambda view: _taken(view, name, dim, [(0, size)]))


def taken(table: ViewTable, name: str, entry: ViewedTensor, step: Take) -> ViewedTensor:
    """Take indices along a dim, in their order."""
    _check_dim(name, entry, step.dim)
    length = entry.shape[step.dim]
    blocks = length if step.of is None else step.of
    if blocks and length % blocks:
        raise LayoutError(
            f"{name} has the shape {entry.shape}: dim {step.dim} cannot be divided into {blocks} "
            "equal blocks"
        )
    label = f"{name} has the shape {entry.shape}: dim {step.dim}"
    picks = chosen(step.indices, step.first, blocks, label, "index" if step.of is None else "block")
    width = length // blocks if blocks else 1
    units = Picks(tuple((start * width, count * width) for start, count in picks.runs))
    return _each_state(name, entry, lambda view: table.taken(view, step.dim, units))


def split(
    name: str,
    entry: ViewedTensor,
    into: Sequence[str],
    dim: int,
    sizes: Sequence[int] | None,
    repeat: int,
) -> list[tuple[str, ViewedTensor]]:
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
            f"{name} has the shape {entry.shape}: dim {dim} cannot be split into {repeat} x "
            f"{list(parts)}"
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
    parts, end = [], 0
    for begin, length in runs:
        parts.append(
            part_of(view, _slab(shape, dim, end, length), _slab(shape, dim, begin, length))
        )
        end += length
    info = replace(view.info, name=name, shape=(*shape[:dim], end, *shape[dim + 1 :]))
    return compose(info, parts)


def fused(name: str, members: Named, dim: int, repeat: int) -> ViewedTensor:
    """Concatenate tensors along a dim; each is cut into blocks, which are interleaved."""
    for member, entry in members:
        _check_dim(member, entry, dim)
        if entry.shape[dim] % repeat:
            raise LayoutError(
                f"{member} has the shape {entry.shape}: dim {dim} cannot be split into {repeat}"
            )
        if _without(entry.shape, dim) != _without(members[0][1].shape, dim):
            raise LayoutError(
                f"{member} of the shape {entry.shape} does not fit {members[0][0]}: "
                f"{members[0][1].shape}"
            )

    def join(views: Sequence[View]) -> View:
        runs, end = [], 0
        for block in range(repeat):
            for view in views:
                length = view.info.shape[dim] // repeat
                runs.append((view, block * length, end, length))
                end += length
        shape = views[0].info.shape
        parts = [
            part_of(view, _slab(shape, dim, to, length), _slab(view.info.shape, dim, begin, length))
            for view, begin, to, length in runs
        ]
        info = replace(views[0].info, name=name, shape=(*shape[:dim], end, *shape[dim + 1 :]))
        return compose(info, parts)

    return _together(name, members, join)


def stacked(name: str, members: Named, dim: int) -> ViewedTensor:
    """Stack tensors along a new dim."""
    first = members[0][1].shape
    if dim > len(first):
        raise LayoutError(
            f"{members[0][0]} has the shape {first}: there is no place for a new dim {dim}"
        )
    for member, entry in members:
        if entry.shape != first:
            raise LayoutError(
                f"{member} has the shape {entry.shape}, {members[0][0]} {first}: they cannot be "
                "stacked"
            )

    def join(views: Sequence[View]) -> View:
        shape = (*first[:dim], len(views), *first[dim:])
        axes = (*range(dim), None, *range(dim, len(first)))
        parts = [
            part_of(v, _slab(shape, dim, i, 1), Box.whole(first), axes) for i, v in enumerate(views)
        ]
        return compose(replace(views[0].info, name=name, shape=shape), parts)

    return _together(name, members, join)


def unstacked(
    name: str, entry: ViewedTensor, into: str, dim: int, start: int
) -> list[tuple[str, ViewedTensor]]:
    """Make a tensor of each index of a dim, without that dim."""
    _check_dim(name, entry, dim)

    def take(view: View, *, i: int, to: str) -> View:
        shape = view.info.shape
        box = _slab(shape, dim, i, 1)
        axes = (*range(dim), *range(dim + 1, len(shape)))
        left = _without(shape, dim)
        return compose(
            replace(view.info, name=to, shape=left), [part_of(view, Box.whole(left), box, axes)]
        )

    names = [(i, into.replace("{i}", str(start + i))) for i in range(entry.shape[dim])]
    return [(to, _each_state(name, entry, partial(take, i=i, to=to), to)) for i, to in names]


def cast(
    table: ViewTable, name: str, entry: ViewedTensor, states: set[str], dtype: str
) -> ViewedTensor:
    """Round states of a tensor to another floating-point dtype."""
    changed = {
        s: cast_view(table, name, v, dtype) if s in states else v for s, v in entry.states.items()
    }
    return replace(entry, states=changed)


def cast_view(table: ViewTable, name: str, view: View, dtype: str) -> View:
    """Round a state of a tensor to another floating-point dtype."""
    if view.info.dtype == dtype:
        return view
    for checked, allowed in ((view.info.dtype, NUMBERS), (dtype, CASTABLE)):
        if checked not in allowed:
            raise LayoutError(
                f"{name} ({view.info.state}) is {view.info.dtype}, which is not cast to {dtype}",
                hint="only floating-point values are",
            )
    return table.computed(Formula(replace(view.info, dtype=dtype), "cast", (view,)))


def one_value(
    table: ViewTable, name: str, state: str, views: Sequence[View], dtype: str | None
) -> View:
    """Make a state of one element that all these are, converted exactly."""
    for view in views:
        if view.info.size != 1 or view.info.shape != views[0].info.shape:
            raise LayoutError(
                f"{view.info.key} has the shape {view.info.shape}, and should have one element"
            )
        if view.info.dtype != views[0].info.dtype:
            raise LayoutError(
                f"{view.info.key} is {view.info.dtype}, and {views[0].info.key} "
                f"{views[0].info.dtype}"
            )
    own = views[0].info
    if dtype is not None and own.dtype not in NUMBERS | INTEGERS:
        raise LayoutError(f"{own.key} is {own.dtype}, which is no number")
    if len(views) == 1 and dtype in (None, own.dtype):
        return renamed(views[0], name, state)
    info = replace(own, name=name, state=state, dtype=dtype or own.dtype)
    return renamed(table.computed(Formula(info, "equal", tuple(views))), name, state)


def meaned(table: ViewTable, name: str, members: Named) -> ViewedTensor:
    """Average tensors, state by state."""
    for member, entry in members:
        if entry.shape != members[0][1].shape:
            raise LayoutError(
                f"{member} has the shape {entry.shape}, {members[0][0]} {members[0][1].shape}"
            )

    def join(views: Sequence[View]) -> View:
        info = replace(views[0].info, name=name)
        if info.dtype not in CASTABLE:
            raise LayoutError(
                f"{members[0][0]} ({info.state}) is {info.dtype}: only floating-point values are "
                "averaged"
            )
        return table.computed(Formula(info, "mean", tuple(views)))

    return _together(name, members, join)


def composed(
    table: ViewTable, name: str, shape: Shape, parts: Sequence[ComposedPart]
) -> ViewedTensor:
    """Compose a tensor of boxes of others."""
    members = [(part.from_, table.entries[part.from_]) for part in parts]

    def join(views: Sequence[View]) -> View:
        taken = []
        for part, view in zip(parts, views, strict=True):
            source = view.info.shape
            start = tuple(part.start) if part.start is not None else (0,) * len(source)
            size = tuple(part.size) if part.size is not None else source
            at = tuple(part.at) if part.at is not None else (0,) * len(shape)
            axes = tuple(range(len(source))) if part.axes is None else tuple(part.axes)
            if not len(start) == len(size) == len(source) or not len(at) == len(axes) == len(shape):
                raise LayoutError(
                    f"the box of {part.from_} has not its dims {source}, or not those of {shape}"
                )
            box = Box(start, size)
            if not Box.whole(source).contains(box):
                raise LayoutError(f"{part.from_} has the shape {source}, which has no box {box}")
            if any(a is not None and a >= len(source) for a in axes):
                raise LayoutError(f"{part.from_} has the shape {source}, and not the axes {axes}")
            target = Box(at, tuple(1 if a is None else size[a] for a in axes))
            if part.cast is not None and view.info.dtype != part.cast:
                boxed = compose(
                    replace(view.info, shape=size), [part_of(view, Box.whole(size), box)]
                )
                view = cast_view(table, part.from_, boxed, part.cast)  # noqa: PLW2901
                box = Box.whole(size)
            taken.append((view, BoxPair(target, box, axes)))
        info = replace(taken[0][0].info if taken else views[0].info, name=name, shape=shape)
        for part, (view, _) in zip(parts, taken, strict=True):
            if view.info.dtype != info.dtype:
                raise LayoutError(
                    f"{name} would be of several dtypes: {info.dtype}, and {view.info.dtype} of "
                    f"{part.from_}",
                    hint="`cast` the parts",
                )
        return compose(info, taken)

    return _together(name, members, join, mixed=True)


def _each_state(
    name: str, entry: ViewedTensor, change: Callable[[View], View], to: str | None = None
) -> ViewedTensor:
    """Change all states that have the shape of the parameter; states of one element stay as they are."""
    new_name, states = to or name, {}
    for state, view in entry.states.items():
        if view.info.shape == entry.shape:
            states[state] = renamed(change(view), new_name, state)
        elif view.info.size == 1:
            states[state] = renamed(view, new_name, state)
        else:
            raise _odd(name, state, view.info, entry.shape)
    return replace(entry, states=states)


def _together(
    name: str, members: Named, join: Callable[[Sequence[View]], View], *, mixed: bool = False
) -> ViewedTensor:
    """Join tensors state by state; for states of one element the first tensor's is taken.

    Args:
        mixed: whether they may have several dtypes.
    """
    first_name, first = members[0]
    states = {}
    for member, entry in members:
        if entry.states.keys() != first.states.keys():
            raise LayoutError(
                f"{member} has the states {', '.join(entry.states)}, {first_name} "
                f"{', '.join(first.states)}",
                hint="drop the states that not all of them have",
            )
    for state, view in first.states.items():
        views = [entry.states[state] for _, entry in members]
        if not mixed and len({v.info.dtype for v in views}) > 1:
            dtypes = ", ".join(sorted({v.info.dtype for v in views}))
            raise LayoutError(f"{name} would be of several dtypes ({state}): {dtypes}")
        if all(v.info.shape == e.shape for v, (_, e) in zip(views, members, strict=True)):
            states[state] = renamed(join(views), name, state)
        elif view.info.size == 1:
            states[state] = renamed(view, name, state)
        else:
            raise _odd(first_name, state, view.info, first.shape)
    return ViewedTensor(states, first.param, all(e.alias for _, e in members))


def _odd(name: str, state: str, info: TensorInfo, shape: Shape) -> LayoutError:
    return LayoutError(
        f"{name} has the shape {shape}, and its state {state} {info.shape}, which cannot follow",
        hint=f"drop it: {{drop: {name!r}, states: [{state}]}}",
    )


def _check_dim(name: str, entry: ViewedTensor, dim: int) -> None:
    if dim >= len(entry.shape):
        raise LayoutError(f"{name} has the shape {entry.shape}: there is no dim {dim}")


def _slab(shape: Shape, dim: int, start: int, length: int) -> Box:
    box = [0] * len(shape)
    box[dim] = start
    return Box(tuple(box), (*shape[:dim], length, *shape[dim + 1 :]))


def _without(shape: Shape, dim: int) -> Shape:
    return (*shape[:dim], *shape[dim + 1 :])


_FEW = 12  # numbers that an error lists


@dataclass(frozen=True, slots=True)
class Taken:
    """The names of the tensors that a step took and made."""

    step: str
    took: tuple[str, ...]
    made: tuple[str, ...]


def apply(table: ViewTable, steps: Sequence[Labelled]) -> list[Taken]:
    """Apply steps in order; of each the tensors that it took and made."""
    return [_apply(table, label, step) for label, step in steps]


def _apply(table: ViewTable, label: str, step: Any) -> Taken:
    verb = next(iter(type(step).model_fields))
    names = getattr(step, verb)
    listed = [names] if isinstance(names, str) else [*names]
    where = f"{label} ({verb} {', '.join([*listed[:_FEW], *['…'] * (len(listed) > _FEW)])})"
    before = dict(table.entries)
    try:
        _DO[type(step)](table, step, where)
    except LayoutError as e:
        if e.message.startswith(where):
            raise
        raise LayoutError(f"{where}: {e.message}", hint=e.hint) from e
    took = tuple(n for n, e in before.items() if table.entries.get(n) is not e)
    made = tuple(n for n, e in table.entries.items() if before.get(n) is not e)
    return Taken(where, took, made)


def left_unreadable(unreadable: Mapping[Key, str], steps: Sequence[Labelled]) -> dict[Key, str]:
    """The tensors that cannot be read, after steps: some keep or drop them, others change their names or not at all."""
    left = dict(unreadable)
    for _, step in steps:
        match step:
            case schema.KeepStep() | schema.Drop():
                keep, names, states = _filtered(step)
                left = {
                    key: why
                    for key, why in left.items()
                    if bool(names.find(key.name) and (not step.states or states.find(key.state)))
                    is keep
                }
            case schema.RenameStep():
                renames = _Names(step.rename)
                left = {
                    Key(expand(match, step.to), key.state)
                    if (match := renames.find(key.name))
                    else key: why
                    for key, why in left.items()
                }
            case schema.Compose():
                left = {}
            case schema.RenameStates():
                renames = _Names(step.match)
                left = {
                    Key(key.name, step.rename_states.get(key.state, key.state))
                    if renames.find(key.name)
                    else key: why
                    for key, why in left.items()
                }
    return left


class _Names:
    """Patterns of whole names."""

    def __init__(self, patterns: str | Sequence[str]) -> None:
        self._texts = (patterns,) if isinstance(patterns, str) else tuple(patterns)
        self._patterns = tuple(map(compile_match, self._texts))

    def find(self, name: str) -> re.Match[str] | None:
        return next(filter(None, (p.fullmatch(name) for p in self._patterns)), None)

    def all_among(self, table: ViewTable) -> Iterator[tuple[str, ViewedTensor, re.Match[str]]]:
        """As `among`; LayoutError if a pattern matches nothing."""
        for pattern, text in zip(self._patterns, self._texts, strict=True):
            if not any(map(pattern.fullmatch, table.entries)):
                near = get_close_matches(text, table.entries, 3, 0.3) or list(table.entries)[:3]
                raise LayoutError(
                    f"no tensor is called {text}", hint=f"there are {', '.join(near)}, …"
                )
        return self.among(table)

    def among(self, table: ViewTable) -> Iterator[tuple[str, ViewedTensor, re.Match[str]]]:
        for name, entry in list(table.entries.items()):
            if match := self.find(name):
                yield name, entry, match

    def states(self, entry: ViewedTensor) -> set[str]:
        """The states that match; all if there are no patterns."""
        return {s for s in entry.states if not self._patterns or self.find(s)}


def _filtered(step: schema.KeepStep | schema.Drop) -> tuple[bool, _Names, _Names]:
    """Whether a step keeps what it names or drops it, and the names and states."""
    if isinstance(step, schema.KeepStep):
        return True, _Names(step.keep), _Names(step.states)
    return False, _Names(step.drop), _Names(step.states)


def _filter(table: ViewTable, step: schema.KeepStep | schema.Drop, where: str) -> None:
    keep, names, states = _filtered(step)
    out: dict[str, list[tuple[str, ViewedTensor]]] = {}
    for name, entry in table.entries.items():
        chosen = states.states(entry) if names.find(name) else set()
        left = {s: v for s, v in entry.states.items() if (s in chosen) is keep}
        if len(left) < len(entry.states):
            out[name] = [(name, replace(entry, states=left))] if left else []
    table.put(out, where)


def _rename(table: ViewTable, step: schema.RenameStep, where: str) -> None:
    out = {}
    for name, entry, match in _Names(step.rename).among(table):
        to = expand(match, step.to)
        if to != name:
            out[name] = [(to, entry.named(to, alias=entry.alias))]
    table.put(out, where)


def _rename_states(table: ViewTable, step: schema.RenameStates, where: str) -> None:
    out = {}
    for name, entry, _ in _Names(step.match).among(table):
        new_states = [step.rename_states.get(s, s) for s in entry.states]
        if len(set(new_states)) < len(new_states):
            raise LayoutError(
                f"{name} would have two states of one name, of {', '.join(entry.states)}"
            )
        if new_states != list(entry.states):
            states = {
                to: renamed(v, name, to)
                for to, v in zip(new_states, entry.states.values(), strict=True)
            }
            out[name] = [(name, replace(entry, states=states))]
    table.put(out, where)


def _each(
    table: ViewTable,
    where: str,
    patterns: str | list[str],
    change: Callable[[str, ViewedTensor], ViewedTensor],
) -> None:
    table.put({n: [(n, change(n, e))] for n, e, _ in _Names(patterns).among(table)}, where)


def _transpose(table: ViewTable, step: schema.Transpose, where: str) -> None:
    _each(table, where, step.transpose, lambda n, e: transposed(n, e, step.axes))


def _trim(table: ViewTable, step: schema.Trim, where: str) -> None:
    _each(table, where, step.trim, lambda n, e: trimmed(n, e, step.dim, step.size))


def _take(table: ViewTable, step: schema.Take, where: str) -> None:
    table.put(
        {n: [(n, taken(table, n, e, step))] for n, e, _ in _Names(step.take).all_among(table)},
        where,
    )


def _split(table: ViewTable, step: schema.Split, where: str) -> None:
    out = {}
    for name, entry, match in _Names(step.split).among(table):
        into = [expand(match, t) for t in step.into]
        out[name] = split(name, entry, into, step.dim, step.sizes, step.repeat)
    table.put(out, where)


def _fuse(table: ViewTable, step: schema.Fuse, where: str) -> None:
    out: dict[str, list[tuple[str, ViewedTensor]]] = {}
    for name, _, match in _Names(step.fuse).among(table):
        members = [name, *(expand(match, t) for t in step.and_)]
        _must_be_there(table, members, where)
        into = expand(match, step.into)
        entry = fused(into, [(m, table.entries[m]) for m in members], step.dim, step.repeat)
        out |= {m: [] for m in members} | {name: [(into, entry)]}
    table.put(out, where)


def _stack(table: ViewTable, step: schema.Stack, where: str) -> None:
    _gather(
        table, step.stack, step.into, where, lambda into, members: stacked(into, members, step.dim)
    )


def _mean(table: ViewTable, step: schema.Mean, where: str) -> None:
    _gather(table, step.mean, step.into, where, lambda into, members: meaned(table, into, members))


def _gather(
    table: ViewTable,
    pattern: str,
    into: str,
    where: str,
    make: Callable[[str, list[tuple[str, ViewedTensor]]], ViewedTensor],
) -> None:
    """Replace numbered tensors by one, in the position of the first."""
    groups: dict[str, dict[int, str]] = {}
    for name, _, match in _Names(pattern).among(table):
        number = int(name[slice(*_number(match, name))])
        numbers = groups.setdefault(expand(match, into), {})
        if number in numbers:
            raise LayoutError(
                f"{name} and {numbers[number]} are both number {number} of {expand(match, into)}"
            )
        numbers[number] = name
    out: dict[str, list[tuple[str, ViewedTensor]]] = {}
    for to, numbers in groups.items():
        missing = next((i for i in range(len(numbers)) if i not in numbers), None)
        if missing is not None:
            raise LayoutError(
                f"{to} has the numbers {sorted(numbers)}, of which {missing} is missing"
            )
        members = [(numbers[i], table.entries[numbers[i]]) for i in range(len(numbers))]
        out |= {name: [] for name, _ in members}
        out[next(n for n in table.entries if n in numbers.values())] = [(to, make(to, members))]
    table.put(out, where)


def _select(table: ViewTable, step: schema.Select, where: str) -> None:
    """Of tensors whose names differ in a number, keep some, under new numbers and in the order of these."""
    # the text before the number -> names, and where the number ends
    groups: dict[str, list[tuple[str, int]]] = {}
    for name, _, match in _Names(step.select).all_among(table):
        start, stop = _number(match, name)
        groups.setdefault(name[:start], []).append((name, stop))
    out: dict[str, list[tuple[str, ViewedTensor]]] = {
        name: [] for members in groups.values() for name, _ in members
    }
    for before, members in groups.items():
        texts = [name[len(before) : stop] for name, stop in members]
        new_numbers = _renumbered(step, before, set(map(int, texts)))
        width = max((len(text) for text in texts if text.startswith("0")), default=1)
        selected = [
            (new_numbers[int(t)], name, stop)
            for t, (name, stop) in zip(texts, members, strict=True)
            if int(t) in new_numbers
        ]
        # The tensors of the first new number get the first places, since a tensor list has the
        # order of the program.
        for (_, replaced, _), (number, name, stop) in zip(
            selected, sorted(selected, key=itemgetter(0)), strict=True
        ):
            to = f"{before}{number:0{width}}{name[stop:]}"
            entry = table.entries[name]
            out[replaced] = [(to, entry.named(to, alias=entry.alias))]
    table.put(out, where)


def _renumbered(step: schema.Select, before: str, numbers: set[int]) -> dict[int, int]:
    """The new number of each that stays."""
    new_numbers: dict[int, int] = {}
    for start, length in chosen(step.indices, step.first, None, before, "number").runs:
        for number in range(start, start + length):
            if number not in numbers:
                listed = [*map(str, sorted(numbers)[:_FEW]), *["…"] * (len(numbers) > _FEW)]
                raise LayoutError(
                    f"there is no {before}{number}", hint=f"the numbers are {', '.join(listed)}"
                )
            new_numbers[number] = len(new_numbers)
    return new_numbers


def _number(match: re.Match[str], name: str) -> tuple[int, int]:
    """Where the number is that a pattern captures: in its group `i`, or else the first."""
    group = "i" if "i" in match.re.groupindex else 1 if match.re.groups else 0
    if not (match[group] or "").isdecimal() or not group:
        raise LayoutError(
            f"the pattern captures no number in {name}",
            hint=r"its group is the number: /layers\.(\d+)\..*/",
        )
    return match.span(group)


def _unstack(table: ViewTable, step: schema.Unstack, where: str) -> None:
    if "{i}" not in step.into:
        raise LayoutError(f"{where}: `into` must have {{i}}, which is the number")
    out = {}
    for name, entry, match in _Names(step.unstack).among(table):
        template = expand(match, step.into)
        out[name] = unstacked(name, entry, template, step.dim, step.start)
    table.put(out, where)


def _alias(table: ViewTable, step: schema.AliasStep, where: str) -> None:
    for alias, name in step.alias.items():
        if alias in table.entries:
            raise LayoutError(
                f"{where}: {alias} is stored itself",
                hint="drop it first, if its values are the same",
            )
        _must_be_there(table, [name], where)
        table.entries[alias] = table.entries[name].named(alias, alias=True)


def _untie(table: ViewTable, step: schema.Untie, where: str) -> None:
    _each(table, where, step.untie, lambda _, e: replace(e, alias=False))


def _cast(table: ViewTable, step: schema.Cast, where: str) -> None:
    states = _Names(step.states)
    _each(table, where, step.cast, lambda n, e: cast(table, n, e, states.states(e), step.dtype))


def _give(table: ViewTable, step: schema.Give, where: str) -> None:
    _must_be_there(table, [step.give], where)
    states = table.entries[step.give].states
    if states.keys() != {"weight"}:
        raise LayoutError(f"{step.give} has the states {', '.join(states)}, and not just weight")
    out: dict[str, list[tuple[str, ViewedTensor]]] = {step.give: []}
    for name, entry, _ in _Names(step.to).all_among(table):
        if name == step.give:
            continue
        if step.state in entry.states:
            raise LayoutError(f"{name} has a state {step.state} already")
        own = one_value(table, name, step.state, [states["weight"]], step.dtype)
        out[name] = [(name, replace(entry, states={**entry.states, step.state: own}))]
    if len(out) == 1:
        raise LayoutError(f"{step.give} would be given to itself alone")
    table.put(out, where)


def _gather_state(table: ViewTable, step: schema.Gather, where: str) -> None:
    out: dict[str, list[tuple[str, ViewedTensor]]] = {}
    views: list[View] = []
    for name, entry, _ in _Names(step.gather).all_among(table):
        if step.state not in entry.states:
            raise LayoutError(f"{name} has no state {step.state}")
        views.append(entry.states[step.state])
        left = {s: v for s, v in entry.states.items() if s != step.state}
        out[name] = [(name, replace(entry, states=left))] if left else []
    made = one_value(table, step.into, "weight", views, step.dtype)
    first = next(iter(out))
    out[first] = [(step.into, ViewedTensor({"weight": made}, step.into)), *out[first]]
    table.put(out, where)


def _compose(table: ViewTable, step: schema.Compose, where: str) -> None:
    used = dict.fromkeys(part.from_ for t in step.compose.values() for part in t.parts)
    _must_be_there(table, [*used, *(name for name in step.of if name not in used)], where)
    for name, expected in step.of.items():
        info = table.entries[name].parameter
        if (info.dtype, info.shape) != (expected.dtype, tuple(expected.shape)):
            raise LayoutError(
                f"{name} is {info.dtype} {list(info.shape)}, and must be {expected.dtype} "
                f"{expected.shape}",
                hint="cast it by a view, or capture the loader with this checkpoint",
            )
    table.entries = {
        name: composed(table, name, tuple(t.shape), t.parts) for name, t in step.compose.items()
    }


def _must_be_there(table: ViewTable, names: Sequence[str], where: str) -> None:
    missing = [n for n in names if n not in table.entries]
    if missing:
        raise LayoutError(f"{where} needs {', '.join(missing)}, which the checkpoint does not have")


_DO: dict[type, Callable[[ViewTable, Any, str], None]] = {
    schema.KeepStep: _filter,
    schema.Drop: _filter,
    schema.RenameStep: _rename,
    schema.RenameStates: _rename_states,
    schema.Transpose: _transpose,
    schema.Trim: _trim,
    schema.Take: _take,
    schema.Select: _select,
    schema.Split: _split,
    schema.Fuse: _fuse,
    schema.Stack: _stack,
    schema.Unstack: _unstack,
    schema.AliasStep: _alias,
    schema.Untie: _untie,
    schema.Cast: _cast,
    schema.Give: _give,
    schema.Gather: _gather_state,
    schema.Mean: _mean,
    schema.Compose: _compose,
}
