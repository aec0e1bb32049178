"""Random steps of a view, each as a layout file spells it, and what NumPy makes of whole arrays instead."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import strategies as st

if TYPE_CHECKING:
    from collections.abc import Callable

    from ucformat.checkpoint import Checkpoint

States = dict[str, Any]  # state -> array
Tensors = dict[str, States]


def read_all(ck: Checkpoint) -> Tensors:
    """Every tensor and further name, in all states."""
    return {name: {s: ck[name, s].read() for s in ck.states(name)} for name in (*ck, *ck.aliases)}


def shape_of(states: States) -> tuple[int, ...]:
    first: Any = next(
        (states[s] for s in ("weight", "master") if s in states), next(iter(states.values()))
    )
    return tuple(first.shape)


def each(states: States, change: Callable[[Any], Any]) -> States:
    """What happens to a parameter happens to its states; those of one element stay."""
    shape = shape_of(states)
    return {s: np.array(change(a), order="C") if a.shape == shape else a for s, a in states.items()}


def together(members: list[States], join: Callable[[list[Any]], Any]) -> States:
    shape = shape_of(members[0])
    return {
        s: np.array(join([m[s] for m in members]), order="C") if a.shape == shape else a
        for s, a in members[0].items()
    }


def replace(tensors: Tensors, new: dict[str, list[tuple[str, States]]]) -> Tensors:
    out: Tensors = {}
    for name, states in tensors.items():
        out |= dict(new.get(name, [(name, states)]))
    return out


def spelled(draw: Any, picks: list[int]) -> list[int | str]:
    """Indices in the file's words: runs as ranges, or not."""
    out: list[int | str] = []
    at = 0
    while at < len(picks):
        end = at + 1
        while end < len(picks) and picks[end] == picks[end - 1] + 1 and draw(st.booleans()):
            end += 1
        out.append(
            picks[at]
            if end == at + 1 and draw(st.booleans())
            else f"{picks[at]}:{picks[end - 1] + 1}"
        )
        at = end
    return out


def subset(draw: Any, count: int) -> tuple[dict[str, Any], list[int]]:
    """Some of so many indices: `first` or `indices`, and the list."""
    if draw(st.booleans()):
        first = draw(st.integers(1, count))
        return {"first": first}, list(range(first))
    picks = draw(st.permutations(range(count)))[: draw(st.integers(1, count))]
    picks = sorted(picks) if draw(st.booleans()) else picks
    return {"indices": spelled(draw, picks)}, picks


def take(draw: Any, tensors: Tensors, name: str) -> tuple[dict[str, Any], Tensors] | None:
    shape = shape_of(tensors[name])
    dims = [d for d, n in enumerate(shape) if n]
    if not dims:
        return None
    dim = draw(st.sampled_from(dims))
    of = draw(
        st.sampled_from([None, *(n for n in range(1, shape[dim] + 1) if shape[dim] % n == 0)])
    )
    given, picks = subset(draw, of or shape[dim])
    width = shape[dim] // (of or shape[dim])
    where = [p * width + i for p in picks for i in range(width)]
    step = {"take": name, "dim": dim, **given, **({} if of is None else {"of": of})}
    return step, replace(
        tensors, {name: [(name, each(tensors[name], lambda a: np.take(a, where, dim)))]}
    )


NUMBERED = re.compile(r"(.*?\D)(\d+)(\D.*|$)")


def select(draw: Any, tensors: Tensors, name: str) -> tuple[dict[str, Any], Tensors] | None:
    found = NUMBERED.fullmatch(name)
    if found is None:
        return None
    before = found[1]
    same = {n: m for n in tensors if (m := NUMBERED.fullmatch(n)) and m[1] == before}
    numbers = sorted({int(m[2]) for m in same.values()})
    _, picks = subset(draw, len(numbers))
    chosen = [numbers[p] for p in picks]
    step = {"select": rf"/{re.escape(before)}(?P<i>\d+)(\D.*)?/", "indices": chosen}
    new = {
        n: [(f"{before}{chosen.index(int(m[2]))}{m[3]}", tensors[n])] if int(m[2]) in chosen else []
        for n, m in same.items()
    }
    return step, replace(tensors, new)


def transpose(_: Any, tensors: Tensors, name: str) -> tuple[dict[str, Any], Tensors]:
    return {"transpose": name}, replace(
        tensors, {name: [(name, each(tensors[name], np.transpose))]}
    )


def half(array: Any, number: int, dim: int) -> Any:
    return np.split(array, 2, dim)[number]


def split(draw: Any, tensors: Tensors, name: str) -> tuple[dict[str, Any], Tensors] | None:
    dims = [d for d, n in enumerate(shape_of(tensors[name])) if n and n % 2 == 0]
    if not dims:
        return None
    dim = draw(st.sampled_from(dims))
    into = [f"{name}!a", f"{name}!b"]
    halves = [each(tensors[name], partial(half, number=k, dim=dim)) for k in range(2)]
    return {"split": name, "into": into, "dim": dim}, replace(
        tensors, {name: list(zip(into, halves, strict=True))}
    )


def twin(tensors: Tensors, name: str) -> str | None:
    """Another tensor with the same states, shapes and dtypes."""

    def kind(states: States) -> list[Any]:
        return [(s, a.dtype, a.shape) for s, a in states.items()]

    return next((n for n in tensors if n != name and kind(tensors[n]) == kind(tensors[name])), None)


def fuse(draw: Any, tensors: Tensors, name: str) -> tuple[dict[str, Any], Tensors] | None:
    other, dims = twin(tensors, name), len(shape_of(tensors[name]))
    if other is None or not dims:
        return None
    dim = draw(st.integers(0, dims - 1))
    made = together([tensors[name], tensors[other]], lambda arrays: np.concatenate(arrays, dim))
    step = {"fuse": f"/{re.escape(name)}/", "and": [other], "into": f"{name}+", "dim": dim}
    return step, replace(tensors, {name: [(f"{name}+", made)], other: []})


def unstack(draw: Any, tensors: Tensors, name: str) -> tuple[dict[str, Any], Tensors] | None:
    shape = shape_of(tensors[name])
    dims = [d for d, n in enumerate(shape) if 0 < n <= 4]
    if not dims or len(shape) < 2:
        return None
    dim = draw(st.sampled_from(dims))
    parts = [
        (f"{name}@{i}", each(tensors[name], partial(np.take, indices=i, axis=dim)))
        for i in range(shape[dim])
    ]
    return {"unstack": name, "into": f"{name}@{{i}}", "dim": dim}, replace(tensors, {name: parts})


def cast(_: Any, tensors: Tensors, name: str) -> tuple[dict[str, Any], Tensors] | None:
    if any(
        str(a.dtype) not in ("float16", "bfloat16", "float32", "float64")
        for a in tensors[name].values()
    ):
        return None
    wide = {s: a.astype(np.float64) for s, a in tensors[name].items()}
    return {"cast": name, "dtype": "float64"}, replace(tensors, {name: [(name, wide)]})


def rename(_: Any, tensors: Tensors, name: str) -> tuple[dict[str, Any], Tensors]:
    return {"rename": name, "to": f"{name}~"}, replace(
        tensors, {name: [(f"{name}~", tensors[name])]}
    )


def drop(_: Any, tensors: Tensors, name: str) -> tuple[dict[str, Any], Tensors] | None:
    return ({"drop": name}, replace(tensors, {name: []})) if len(tensors) > 1 else None


KINDS: list[Callable[[Any, Tensors, str], tuple[dict[str, Any], Tensors] | None]] = [
    *(take, take, take, select, transpose, split, fuse, unstack, cast, rename, drop),
]


@dataclass(frozen=True)
class Drawn:
    """Random steps, and what they make of some tensors."""

    steps: list[dict[str, Any]]
    made: Tensors = field(repr=False)


@st.composite
def drawn(draw: Any, tensors: Tensors, most: int = 7) -> Drawn:
    """Random steps for these tensors."""
    out: list[dict[str, Any]] = []
    for _ in range(draw(st.integers(1, most))):
        kind, name = draw(st.sampled_from(KINDS)), draw(st.sampled_from(sorted(tensors)))
        if (made := kind(draw, tensors, name)) is not None:
            step, tensors = made
            out.append(step)
    return Drawn(out, tensors)
