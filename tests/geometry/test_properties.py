"""For any shapes, mesh and placements: pieces tile every tensor, and load after save is the identity."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.geometry.reference import FILLER, gather, numbered, scatter, window
from tests.geometry.strategies import lists_and_layouts
from ucformat.geometry.box import Box
from ucformat.geometry.layout import Layout
from ucformat.geometry.tensor import TensorList, Tiles

if TYPE_CHECKING:
    from collections.abc import Sequence

Case = tuple[TensorList, Layout, Layout]

thorough = settings(max_examples=100)


@thorough
@given(lists_and_layouts)
def test_save_under_one_layout_and_load_under_another_is_the_identity(case: Case) -> None:
    tensor_list, one, other = case
    wholes = numbered(tensor_list)
    for layout in (one, other):
        bound = layout.bind(tensor_list)
        wholes = gather(bound, scatter(bound, wholes))
    for key, expected in numbered(tensor_list).items():
        np.testing.assert_array_equal(wholes[key], expected)


@thorough
@given(lists_and_layouts)
def test_elements_are_held_equally_often_by_all_holders(case: Case) -> None:
    """Walk the elements, as `prove` never does, and hold the two against each other."""
    tensor_list, layout, _ = case
    bound = layout.bind(tensor_list)
    bound.prove()
    for info in tensor_list.tensors:
        count = np.zeros(info.shape, int)
        for rank in range(bound.ranks):
            for piece in bound.pieces(info.key, rank):
                assert Box.whole(info.shape).contains(piece.box)
                count[tuple(map(slice, piece.box.start, piece.box.stop))] += 1
        assert not count.size or (count.min() == count.max() > 0)


@thorough
@given(lists_and_layouts)
def test_a_rank_holds_disjoint_pieces_within_its_buffer_in_order(case: Case) -> None:
    tensor_list, layout, _ = case
    bound = layout.bind(tensor_list)
    for rank in range(bound.ranks):
        buffers = bound.buffers(rank)
        used = {key: np.zeros(b.size, bool) for key, b in buffers.items()}
        assert list(bound.keys(rank)) == [
            i.key for i in tensor_list.tensors if bound.local(i.key, rank) is not None
        ]
        for info in tensor_list.tensors:
            local = bound.local(info.key, rank)
            if local is None:
                assert bound.pieces(info.key, rank) == ()
                continue
            assert local.pieces == bound.pieces(info.key, rank)
            assert local.size == math.prod(local.shape)
            own = np.zeros(local.size, bool)
            array = own if local.buffer is None else used[local.buffer, info.state]
            assert not array[local.offset : local.offset + local.size].any()
            for pieces in (local.pieces, local.padding):
                assert [p.offset for p in pieces] == sorted(p.offset for p in pieces)
                for piece in pieces:
                    assert piece.buffer == local.buffer
                    reach = sum(
                        (n - 1) * s for n, s in zip(piece.box.shape, piece.strides, strict=True)
                    )
                    assert (
                        local.offset
                        <= piece.offset
                        <= piece.offset + reach
                        < local.offset + local.size
                    )
                    to = window(array, piece)
                    assert not to.any()
                    to[...] = True
            assert array[
                local.offset : local.offset + local.size
            ].all()  # pieces and padding leave nothing


@thorough
@given(lists_and_layouts)
def test_padding_is_a_tensor_of_its_own_that_is_tiled_too(case: Case) -> None:
    tensor_list, layout, _ = case
    bound = layout.bind(tensor_list)
    for info in tensor_list.tensors:
        padding = bound.padding(info.key)
        held = [
            p for r in range(bound.ranks) if (loc := bound.local(info.key, r)) for p in loc.padding
        ]
        if padding is None:
            assert not held
            continue
        assert padding.key == (info.name, f"{info.state}.padding")
        count = np.zeros(padding.shape, int)
        for piece in held:
            count[tuple(map(slice, piece.box.start, piece.box.stop))] += 1
        assert not count.size or (count.min() == count.max() > 0)


@thorough
@given(lists_and_layouts)
def test_a_layout_survives_its_document(case: Case) -> None:
    _, layout, other = case
    for sort_keys in (False, True):  # a manifest may sort the keys
        again = Layout.parse(json.loads(json.dumps(layout.dump(), sort_keys=sort_keys)))
        assert again == layout
        assert hash(again) == hash(layout)
        assert (again == other) == (layout == other)
    assert list(again.mesh.axes) == list(layout.mesh.axes)


def test_the_filler_is_no_value() -> None:
    assert FILLER < 0  # `numbered` counts from 0


@thorough
@given(st.data())
def test_the_chunks_within_a_box_are_those_that_intersect_it(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 9), max_size=3).map(tuple))

    def each(least: int, most: Sequence[int]) -> tuple[int, ...]:
        return tuple(data.draw(st.integers(least, n)) for n in most)

    start = each(0, [5] * len(sizes))
    tiles = Tiles(Box(start, sizes), "f", 100, each(1, sizes), 4)
    if data.draw(st.booleans()):
        tiles = replace(tiles, steps=tuple(1000**n for n in range(len(sizes), 0, -1)))
    within = Box(each(0, [15] * len(sizes)), each(0, [15] * len(sizes)))
    assert list(tiles.extents(within)) == [e for e in tiles.extents() if e.box.intersect(within)]
    offsets = {e.box: e.offset for e in tiles.extents() if e.box.shape == tiles.chunk}
    for box in (within, Box(within.start, tiles.chunk), *(e.box for e in tiles.extents())):
        assert tiles.offset_of(box) == offsets.get(box)
