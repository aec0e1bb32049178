"""Distributions against what `torch.chunk` and lists of all ranks' boxes give."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ucformat.errors import LayoutError
from ucformat.geometry.box import Box
from ucformat.geometry.coverage import prove
from ucformat.geometry.distribution import Cut, Distribution, RankMesh
from ucformat.geometry.tensor import TensorInfo


@st.composite
def distributed(draw: st.DrawFn) -> tuple[tuple[int, ...], Distribution]:
    """A shape, and a distribution that fits it."""
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    ranks = RankMesh.of(mesh, range(math.prod(mesh)))
    axes = draw(st.permutations(range(len(mesh))))
    cuts = tuple(
        Cut(draw(st.integers(0, len(shape) - 1)), axis)
        for axis in axes[: draw(st.integers(0, len(mesh)))]
        if shape
    )
    rest = [axis for axis in axes if axis not in {c.axis for c in cuts}]
    whole = Distribution(ranks, cuts)
    sizes = {whole.local(shape, at).size for at in coordinates(mesh)}
    if rest and len(sizes) == 1 and draw(st.booleans()):
        position = draw(st.integers(0, 9))
        part = -(-(position + sizes.pop() + draw(st.integers(0, 5))) // mesh[rest[0]])
        return shape, Distribution(ranks, cuts, rest[0], max(1, part), position)
    return shape, whole


def coordinates(mesh: tuple[int, ...]) -> list[tuple[int, ...]]:
    return list(product(*map(range, mesh)))


def chunked(
    shape: tuple[int, ...], found: Distribution, coordinate: tuple[int, ...]
) -> torch.Tensor:
    """The elements that a rank holds, cut by torch itself; empty parts are empty tensors."""
    local = torch.arange(math.prod(shape)).reshape(shape)
    for dim, axis in found.cuts:
        parts = local.chunk(found.mesh.sizes[axis], dim)
        at = coordinate[axis]
        local = parts[at] if at < len(parts) else local.narrow(dim, 0, 0)
    if found.flat is None:
        return local.reshape(-1)
    buffer = torch.full((found.part * found.mesh.sizes[found.flat],), -1)
    buffer[found.position : found.position + local.numel()] = local.reshape(-1)
    mine = buffer[coordinate[found.flat] * found.part :][: found.part]
    return mine[mine >= 0]


@given(distributed())
def test_boxes_are_those_of_torch(case: tuple[tuple[int, ...], Distribution]) -> None:
    shape, found = case
    assert found.fits(shape)
    whole = torch.arange(math.prod(shape)).reshape(shape)
    for at in coordinates(found.mesh.sizes):
        boxes = found.boxes(shape, at)
        held = [
            whole[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))].reshape(-1)
            for box in boxes
        ]
        assert all(box.size for box in boxes)
        assert torch.cat([*held, torch.empty(0, dtype=torch.int64)]).equal(
            chunked(shape, found, at)
        )
    prove(
        TensorInfo("t", "weight", "float32", shape),
        [(0, box) for at in coordinates(found.mesh.sizes) for box in found.boxes(shape, at)],
    )


@given(distributed(), st.data())
def test_holdings_are_all_boxes_that_intersect(
    case: tuple[tuple[int, ...], Distribution], data: st.DataObject
) -> None:
    shape, found = case
    start = tuple(data.draw(st.integers(0, n)) for n in shape)
    within = Box(
        start, tuple(data.draw(st.integers(0, n - a)) for n, a in zip(shape, start, strict=True))
    )
    expected = sorted(
        (tuple(at[axis] for axis in found.axes), box)
        for at in coordinates(found.mesh.sizes)
        if not any(at[axis] for axis in found.replicas)
        for box in found.boxes(shape, at)
        if box.intersect(within) is not None
    )
    assert sorted(tuple(h) for h in found.holdings(shape, within)) == expected
    for at in coordinates(found.mesh.sizes):
        assert found.copy_of(at) < found.copies
        assert found.coordinate(tuple(at[axis] for axis in found.axes), found.copy_of(at)) == at
    overlap = np.broadcast_to(found.overlap(shape, within), found.mesh.sizes)
    for at in coordinates(found.mesh.sizes):
        common = [c for box in found.boxes(shape, at) if (c := box.intersect(within)) is not None]
        if found.flat is None:
            assert overlap[at] == sum(box.size for box in common)
        else:  # an estimate that never misses a holder
            assert overlap[at] >= bool(common)


def test_an_axis_cuts_once_and_a_flat_buffer_holds_the_whole_tensor() -> None:
    two, six = RankMesh((2,), 0, (1,)), RankMesh((2, 3), 0, (3, 1))
    for wrong in ((two, (Cut(0, 0), Cut(1, 0))), (two, (Cut(0, 1),)), (six, (Cut(0, 0),), 0, 4)):
        with pytest.raises(LayoutError):
            Distribution(*wrong)
    assert not Distribution(two, (Cut(1, 0),)).fits((4,))
    assert not Distribution(two, flat=0, part=4, position=1).fits((8,))
    assert not Distribution(six, (Cut(0, 1),), flat=0, part=9).fits((4,))  # of 2, 2 and 0 elements
    assert Distribution(two, flat=0, part=4).fits((8,))


def test_a_box_of_a_tensor_on_a_million_ranks_is_found_at_once() -> None:
    found = Distribution(RankMesh((1 << 10, 1 << 10), 0, (1 << 10, 1)), (Cut(0, 0), Cut(0, 1)))
    (held,) = found.holdings((1 << 30, 3), Box((12345 << 10, 1), (7, 1)))
    assert held.at == divmod(12345, 1 << 10)
    assert held.box == Box((12345 << 10, 0), (1 << 10, 3)) == found.boxes((1 << 30, 3), held.at)[0]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple), st.data())
def test_a_mesh_keeps_its_ranks(sizes: tuple[int, ...], data: st.DataObject) -> None:
    count = math.prod(sizes)
    step = data.draw(st.integers(1, 5))
    ranks = data.draw(st.permutations(range(count)) | st.just([3 + step * i for i in range(count)]))
    mesh = RankMesh.of(sizes, ranks)
    assert mesh.ranks.shape == sizes
    assert mesh.ranks.reshape(-1).tolist() == list(ranks)
    assert [mesh.coordinate(rank) for rank in ranks] == coordinates(sizes)
    assert mesh.coordinate(1000) is None
    assert min(mesh.strides, default=0) >= 0
    assert not RankMesh.of(sizes, [3 + step * i for i in range(count)]).listed


def test_two_groups_cross_at_a_rank() -> None:
    assert RankMesh.crossing(5, [1, 5], [4, 5, 6]) == RankMesh.of((2, 3), [0, 1, 2, 4, 5, 6])
    assert RankMesh.crossing(0, [0, 1], [0, 1]) is None  # would be in the mesh twice
    assert RankMesh.crossing(4, [0, 4], [3, 4]) is None  # no other group can be so
