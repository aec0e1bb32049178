"""Hypothesis strategies: shapes, meshes, and random compositions of placements that fit them."""

from __future__ import annotations

import math

from hypothesis import strategies as st

from ucformat.geometry.layout import Layout
from ucformat.geometry.placement import (
    Flat,
    Mesh,
    Owner,
    Partial,
    Placement,
    Replicate,
    Rule,
    Shard,
    Stage,
)
from ucformat.geometry.tensor import TensorInfo, TensorList

AXES = ("a", "b", "c")

shapes = st.lists(st.sampled_from([0, 1, 1, 2, 3, 4, 5, 7, 8, 12]), max_size=4).map(tuple)


@st.composite
def tensor_lists(draw: st.DrawFn) -> TensorList:
    """Some tensors, each in two states, in one of two optimizer groups."""
    chosen = draw(st.lists(shapes, min_size=1, max_size=4))
    infos = [
        TensorInfo(f"t.{i}", s, "float32", shape)
        for i, shape in enumerate(chosen)
        for s in ("weight", "m")
    ]
    return TensorList(tuple(infos), {f"t.{i}": draw(st.integers(0, 1)) for i in range(len(chosen))})


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    axes = dict(zip(AXES, sizes, strict=False))
    ranks = draw(st.permutations(range(math.prod(sizes)))) if draw(st.booleans()) else None
    return Mesh(axes, ranks)


@st.composite
def _partition(draw: st.DrawFn, n: int, k: int) -> tuple[int, ...]:
    """`k` widths that add up to `n`."""
    cuts = sorted(draw(st.lists(st.integers(0, n), min_size=k - 1, max_size=k - 1)))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, n], strict=True))


@st.composite
def _shard(
    draw: st.DrawFn, shape: tuple[int, ...], over: tuple[str, ...], degree: int, cut: set[int]
) -> Shard:
    """A shard that fits; of a dim that was cut before, only what fits whatever is left of it."""
    d = draw(st.integers(0, len(shape) - 1))
    dim, n = draw(st.sampled_from([d, d - len(shape)])), shape[d]
    kinds = (
        ["chunk"] if d in cut else ["chunk", "sizes", "parts", "proportions", "uneven parts", "pad"]
    )
    kind = draw(st.sampled_from(kinds))
    cut.add(d)
    if kind == "sizes":
        return Shard(dim, over, sizes=draw(_partition(n, degree)))
    if kind == "parts" and n:
        return Shard(dim, over, parts=draw(_partition(n, draw(st.integers(1, 4)))))
    if kind == "proportions" and n:
        unit = draw(st.sampled_from([u for u in range(1, n + 1) if n % u == 0]))
        return Shard(dim, over, parts=draw(_partition(unit, draw(st.integers(1, 3)))))
    if kind == "uneven parts" and n:
        widths = draw(_partition(n, draw(st.integers(1, 3))))
        return Shard(dim, over, parts=tuple(draw(_partition(w, degree)) for w in widths))
    if kind == "pad" and cut.isdisjoint({-1}):
        cut.add(-1)  # one dim can be padded
        return Shard(dim, over, pad_to=degree * draw(st.integers(1, 3)))
    return Shard(dim, over)


@st.composite
def _flat(draw: st.DrawFn, over: tuple[str, ...]) -> Flat:
    return Flat(
        over,
        group=draw(st.sampled_from(["optimizer", "all", "tensor", r"/t\.(\d).*/"])),
        order=draw(st.sampled_from(["checkpoint", "reverse", "round_robin"])),
        cut=draw(st.sampled_from(["after_join", "before_join"])),
        tensor_align=draw(st.sampled_from([1, 2, 5])),
        group_pad=draw(st.sampled_from([1, 2, 3])),
        total_align=draw(st.sampled_from([1, 8])),
        max_elements=draw(st.sampled_from([None, 1, 10, 40])),
    )


@st.composite
def layouts(draw: st.DrawFn, tensor_list: TensorList) -> Layout:
    """A random composition for each tensor, the same for all its states; all may share one flat placement."""
    mesh = draw(meshes())
    axes = draw(st.permutations(list(mesh.axes)))
    flat_axes = tuple(axes[: draw(st.integers(0, len(axes)))])
    flat = draw(_flat(flat_axes)) if flat_axes else None
    rest = axes[len(flat_axes) :]
    rules = []
    for info in tensor_list.tensors[::2]:
        left = draw(st.permutations(rest))
        place: list[Placement] = []
        cut: set[int] = set()
        while left:
            over = tuple(left[: draw(st.integers(1, len(left)))])
            left = left[len(over) :]
            degree = mesh.degree(over)
            choices: list[st.SearchStrategy[Placement]] = [
                st.just(Replicate()),
                st.just(Partial("mean", over)),
                st.builds(Stage, st.just(over), st.integers(-degree, degree - 1)),
                st.builds(Owner, st.integers(0, degree - 1), st.just(over)),
            ]
            if info.shape:
                choices.append(_shard(info.shape, over, degree, cut))
            place.append(draw(st.one_of(choices)))
        rules.append(Rule(info.name, tuple(place)))
    data = [Rule("*", (flat,))] if flat else []
    return Layout(mesh, rules, data=data)


lists_and_layouts = tensor_lists().flatmap(lambda r: st.tuples(st.just(r), layouts(r), layouts(r)))
