"""Layouts as linear operators: gathering is the adjoint of scattering, and a load after a save is one of them.

A scatter F copies the elements of whole tensors to all ranks that hold them; its adjoint F* adds up
what ranks have of each element. So <F x, y> = <x, F* y> for any x and y exactly if what is known
from a rank (which boxes it holds, and where) is what is known from the tensor (who holds a box).
"""

from __future__ import annotations

import math
import uuid
from itertools import pairwise, product
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.geometry.reference import Arrays, buffer_of, empty, inside, scatter, window
from tests.geometry.strategies import lists_and_layouts
from tests.geometry.test_distribution import coordinates, distributed
from ucformat.geometry.box import Box
from ucformat.geometry.fingerprint import fingerprint_of, total
from ucformat.geometry.layout import Layout
from ucformat.geometry.tensor import Extent, Key, Piece, TensorList, Tiles
from ucformat.reading.execute import ReadOptions, read_items
from ucformat.reading.plan import ReadItem
from ucformat.storage.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ucformat.geometry.bound import BoundLayout
    from ucformat.geometry.distribution import Distribution
    from ucformat.storage.base import Store

Case = tuple[TensorList, Layout, Layout]
UNIT = 4  # bytes of an element

thorough = settings(max_examples=100)


def values(tensor_list: TensorList, seed: int) -> dict[Key, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {i.key: rng.integers(1, 1 << 20, i.shape, np.int64) for i in tensor_list.tensors}


def put(store: Store, name: str, array: np.ndarray) -> None:
    with store.create(name) as out:
        out.write(array.astype(np.int32).tobytes())


def read_by(
    bound: BoundLayout, store: Store, extents: Mapping[Key, Iterable[Extent | Tiles]]
) -> list[Arrays]:
    """What each rank reads of stored tensors, by the planner."""
    ranks = []
    for rank in range(bound.ranks):
        arrays = {key: a.astype(np.int32) for key, a in empty(bound, rank).items()}
        names = list(arrays)
        items = []
        for info in bound.tensor_list.tensors:
            pieces = [
                (names.index(info.key if p.buffer is None else (p.buffer, info.state)), p)
                for p in bound.pieces(info.key, rank)
            ]
            items.append(ReadItem(info, extents[info.key], pieces))
        memories = [arrays[name].view(np.uint8) for name in names]
        options = ReadOptions("never", threads=1)  # the chunks have no checksums
        read_items(store, items, memories, [str(name) for name in names], options)
        ranks.append({key: a.astype(np.int64) for key, a in arrays.items()})
    return ranks


def inner(a: Iterable[np.ndarray], b: Iterable[np.ndarray]) -> int:
    return sum(int((x * y).sum()) for x, y in zip(a, b, strict=True))


@thorough
@given(lists_and_layouts, st.integers(0, 2**32), st.data())
def test_what_ranks_read_is_the_adjoint_of_gathering(
    case: Case, seed: int, data: st.DataObject
) -> None:
    """F by the planner, from chunks of any size; F* by the pieces of the ranks."""
    tensor_list, layout, _ = case
    bound, x = layout.bind(tensor_list), values(tensor_list, seed)
    store, extents = MemoryStore(uuid.uuid4().hex), {}
    for n, info in enumerate(tensor_list.tensors):
        chunk = tuple(data.draw(st.integers(1, max(1, size))) for size in info.shape)
        tiles = Tiles(Box.whole(info.shape), f"{n}", 0, chunk, UNIT)
        extents[info.key] = [tiles]
        stored = np.zeros(math.prod(tiles.grid) * tiles.pitch // UNIT, np.int64)
        for e in tiles.extents():
            strides = tuple(s // UNIT for s in e.strides)
            window(stored, Piece(e.box, e.offset // UNIT, strides))[...] = inside(
                x[info.key], e.box
            )
        put(store, f"{n}", stored)
    scattered = read_by(bound, store, extents)
    rng = np.random.default_rng(seed + 1)
    y = [
        {key: rng.integers(-99, 99, a.shape, np.int64) for key, a in arrays.items()}
        for arrays in scattered
    ]
    gathered = {key: np.zeros_like(a) for key, a in x.items()}
    for rank, arrays in enumerate(y):
        held = {key: np.zeros_like(a) for key, a in arrays.items()}
        for info in tensor_list.tensors:
            for piece in bound.pieces(info.key, rank):
                part = window(buffer_of(arrays, info.key, piece), piece)
                inside(gathered[info.key], piece.box)[...] += part
                window(buffer_of(held, info.key, piece), piece)[...] = 1
        for key in arrays:
            arrays[key] *= held[key]  # padding is no part of the space
    assert inner(
        (a for arrays in scattered for a in arrays.values()),
        (a for arrays in y for a in arrays.values()),
    ) == inner(x.values(), gathered.values())


@thorough
@given(distributed(), st.integers(0, 2**32), st.data())
def test_who_holds_a_box_is_the_adjoint_of_what_a_rank_holds(
    case: tuple[tuple[int, ...], Distribution], seed: int, data: st.DataObject
) -> None:
    """F by the boxes of each rank; F* box by box of any tiling, by the ranks that hold parts of it."""
    shape, distribution = case
    rng = np.random.default_rng(seed)
    x = rng.integers(1, 1 << 20, shape, np.int64)
    boxes = {at: distribution.boxes(shape, at) for at in coordinates(distribution.mesh.sizes)}
    y = {
        (at, box): rng.integers(-99, 99, box.shape, np.int64)
        for at, of_rank in boxes.items()
        for box in of_rank
    }
    gathered = np.zeros_like(x)
    edges = [
        sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=2))}) if n else [0, 0]
        for n in shape
    ]
    for cut in product(*(list(pairwise(e)) for e in edges)):
        tile = Box(tuple(a for a, _ in cut), tuple(b - a for a, b in cut))
        for holding in distribution.holdings(shape, tile):
            common = holding.box.intersect(tile)
            if common is None:
                continue
            for copy in range(distribution.copies):
                held = y[distribution.coordinate(holding.at, copy), holding.box]
                part = Box(
                    tuple(a - b for a, b in zip(common.start, holding.box.start, strict=True)),
                    common.shape,
                )
                inside(gathered, common)[...] += inside(held, part)
    scattered = (inside(x, box) for _, box in y)
    assert inner(scattered, y.values()) == inner([x], [gathered])


@thorough
@given(lists_and_layouts, st.integers(0, 2**32))
def test_a_load_after_a_save_is_a_scatter(case: Case, seed: int) -> None:
    """B after A is B: the planner's, from the files of the ranks of A. And their fingerprints add up."""
    tensor_list, saved, loaded = case
    a, b, x = saved.bind(tensor_list), loaded.bind(tensor_list), values(tensor_list, seed)
    store = MemoryStore(uuid.uuid4().hex)
    numbers: dict[tuple[int, tuple[str, str]], str] = {}
    extents: dict[Key, list[Extent]] = {info.key: [] for info in tensor_list.tensors}
    sums: dict[Key, dict[Box, tuple[int, int]]] = {info.key: {} for info in tensor_list.tensors}
    for rank, arrays in enumerate(scatter(a, x)):
        for key, array in arrays.items():
            numbers[rank, key] = f"{len(numbers)}"
            put(store, numbers[rank, key], array)
        for info in tensor_list.tensors:
            for p in a.pieces(info.key, rank):
                file = numbers[rank, info.key if p.buffer is None else (p.buffer, info.state)]
                strides = tuple(s * UNIT for s in p.strides)
                extents[info.key].append(Extent(p.box, file, p.offset * UNIT, strides))
                elements = window(buffer_of(arrays, info.key, p), p).astype(np.int32)
                sums[info.key][p.box] = fingerprint_of(elements, info.shape, p.box)
    for found, expected in zip(read_by(b, store, extents), scatter(b, x), strict=True):
        assert found.keys() == expected.keys()
        for key, array in expected.items():
            np.testing.assert_array_equal(found[key], array)
    for info in tensor_list.tensors:
        elements = x[info.key].astype(np.int32)
        whole = fingerprint_of(elements, info.shape, Box.whole(info.shape))
        assert total(sums[info.key].values()) == whole
