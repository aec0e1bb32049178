"""Boxes of local tensors as rows of bytes."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from ucformat.geometry.box import Box, row_major
from ucformat.geometry.local import Dim
from ucformat.torch.state.elements import (
    blocks_of,
    copy_common,
    dense_elements,
    elements_of,
    elements_within,
    host_memory,
    row_major_bytes,
)
from ucformat.torch.state.local import pieces_in

itemsizes = st.sampled_from([1, 2, 4, 8, 16])
DTYPES = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32, 8: torch.int64, 16: torch.complex128}


@st.composite
def boxes(draw: st.DrawFn, ndim: int | None = None) -> Box:
    n = draw(st.integers(0, 4)) if ndim is None else ndim
    return Box(
        *(tuple(draw(st.lists(st.integers(0, 6), min_size=n, max_size=n))) for _ in range(2))
    )


def flat(box: Box, shape: tuple[int, ...]) -> list[int]:
    """The places of a box's elements in row-major order of a tensor of this shape."""
    return [int(i) for i in np.arange(math.prod(shape)).reshape(shape)[slices(box)].ravel()]


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))


@given(boxes(), itemsizes, st.integers(1, 300))
def test_blocks_follow_each_other_in_row_major_order(box: Box, itemsize: int, most: int) -> None:
    blocks = blocks_of(box, itemsize, most)
    origin = Box((0,) * len(box.shape), box.shape)
    moved = [b.shift(tuple(-a for a in box.start)) for b in blocks]
    assert [i for b in moved for i in flat(b, box.shape)] == flat(origin, box.shape)
    assert all(b.size * itemsize <= max(most, itemsize) for b in blocks)
    rows = [b.size * itemsize for b in blocks]
    assert len(blocks) <= max(
        1, 2 ** len(box.shape) * (math.ceil(box.size * itemsize / most) + sum(map(bool, rows)))
    )


@given(boxes(), itemsizes)
def test_a_box_that_is_small_is_one_block(box: Box, itemsize: int) -> None:
    assert blocks_of(box, itemsize) == ([box] if box.size else [])


def test_a_large_box_is_cut_by_rows_as_few_as_possible() -> None:
    blocks = blocks_of(Box((3, 0), (1000, 1000)), 4, 64_000)
    assert [b.shape for b in blocks] == [(16, 1000)] * 62 + [(8, 1000)]
    assert all(a.stop[0] == b.start[0] for a, b in pairwise(blocks))


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Dense, transposed or sliced, each element another value."""
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    itemsize = draw(itemsizes)
    wide = tuple(n + draw(st.integers(0, 2)) for n in shape)
    bits = bytearray(np.random.default_rng(0).bytes(math.prod(wide) * itemsize))
    data = torch.from_numpy(np.frombuffer(bits, np.uint8))
    dense = data.view(DTYPES[itemsize]).reshape(wide)
    cut = dense[tuple(slice(w - n, w) for n, w in zip(shape, wide, strict=True))]
    return cut.permute(draw(st.permutations(range(len(shape)))))


def raw(tensor: torch.Tensor) -> np.ndarray:
    """Its bytes in row-major order, made by torch alone."""
    dense = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    out: np.ndarray = dense.reshape(-1).view(torch.uint8).numpy()
    return out


def whole_piece(tensor: torch.Tensor, start: tuple[int, ...]) -> tuple[Dim, ...]:
    return tuple(Dim.whole(n, a) for a, n in zip(start, tensor.shape, strict=True))


@given(tensors(), st.data())
def test_any_box_of_any_strided_tensor(tensor: torch.Tensor, data: st.DataObject) -> None:
    start = tuple(data.draw(st.integers(0, 9)) for _ in tensor.shape)
    itemsize = tensor.element_size()
    for piece in pieces_in(tensor, whole_piece(tensor, start)):
        elements = elements_of(piece, host_memory(tensor), itemsize)
        begin = tuple(data.draw(st.integers(0, n - 1)) for n in tensor.shape)
        shape = tuple(
            data.draw(st.integers(1, n - a)) for a, n in zip(begin, tensor.shape, strict=True)
        )
        box = Box(tuple(a + b for a, b in zip(start, begin, strict=True)), shape)
        part = tensor[slices(Box(begin, shape))]
        assert np.array_equal(row_major_bytes(elements_within(elements, piece.box, box)), raw(part))
        assert elements_within(elements, piece.box, box).shape == shape


@given(tensors(), tensors().map(lambda t: t.clone()), st.data())
def test_what_two_boxes_share_is_copied_and_nothing_else(
    a: torch.Tensor, b: torch.Tensor, data: st.DataObject
) -> None:
    if a.ndim != b.ndim:
        return
    b = torch.zeros(b.shape, dtype=a.dtype)
    at, bt = (tuple(data.draw(st.integers(0, 4)) for _ in range(a.ndim)) for _ in range(2))
    size = a.element_size()
    for source in pieces_in(a, whole_piece(a, at)):
        for target in pieces_in(b, whole_piece(b, bt)):
            x, y = (
                elements_of(source, host_memory(a), size),
                elements_of(target, host_memory(b), size),
            )
            copy_common(x, source.box, y, target.box)
    expected = torch.zeros_like(b)
    common = Box(at, tuple(a.shape)).intersect(Box(bt, tuple(b.shape)))
    if common is not None:
        there = slices(common.shift(tuple(-n for n in bt)))
        expected[there] = a[slices(common.shift(tuple(-n for n in at)))]
    assert np.array_equal(raw(b), raw(expected))


def test_rows_that_lie_so_are_not_copied() -> None:
    tensor = torch.arange(24, dtype=torch.float32).reshape(6, 4)
    (piece,) = pieces_in(tensor, whole_piece(tensor, (10, 0)))
    elements = elements_of(piece, host_memory(tensor), 4)
    rows = row_major_bytes(elements_within(elements, piece.box, Box((12, 0), (3, 4))))
    tensor[2:5] = -1
    assert (rows.view(np.float32) == -1).all()
    columns = row_major_bytes(elements_within(elements, piece.box, Box((12, 1), (3, 2))))
    tensor[2:5] = -2
    assert (columns.view(np.float32) == -1).all()


def test_dense_elements_are_in_row_major_order() -> None:
    box = Box((5, 7), (2, 3))
    elements = dense_elements(box.shape, np.arange(12, dtype=np.uint8), 2)
    assert elements.strides == row_major(box.shape, 2)
    assert row_major_bytes(elements_within(elements, box, Box((6, 8), (1, 2)))).tolist() == [
        8,
        9,
        10,
        11,
    ]
